"""What goes into a rollout engine and what comes out."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int, PyTree


class FinishReason(enum.IntEnum):
    """Why a completion ended."""

    STOP = 0  # drew a stop token, which is its last token
    LENGTH = 1  # reached max_new_tokens
    CANCELLED = 2  # its request was cancelled


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token. Recorded
        log-probs are those of the full distribution at this temperature (at 1 for 0).
      max_new_tokens: at most so many tokens a completion, the stop token included.
      stop_ids: drawing any of these ends a completion.
      num_samples: completions per prompt, G.
      top_k: draw from the so many most likely tokens; 0 for all.
      top_p: draw from the fewest tokens that together have this probability.
      min_p: draw from tokens with at least this part of the highest probability.
      stop_strings: text that ends a completion as soon as it contains any of these.
    """

    temperature: float = 1.0
    max_new_tokens: int = 1024
    stop_ids: tuple[int, ...] = ()
    num_samples: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0: no limit), got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1: all), got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] (0: all), got {self.min_p}.")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(
                "stop_strings must be a tuple of strings that are not empty, got "
                f"{self.stop_strings!r}."
            )
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if not self.stop_ids:
            raise ValueError(
                "stop_ids is empty: no completion could end. Give the tokenizer's "
                "end-of-turn ids."
            )
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))

    @property
    def truncated(self) -> bool:
        """Whether some tokens are never drawn, by top_k, top_p or min_p."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to complete.

    Attributes:
      prompt: token ids, at least one.
      sampling: how to draw.
      sample_ids: one per completion. The noise of a completion is a function of (seed,
        step, sample id, position) and of nothing else.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    sample_ids: tuple[int, ...]

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("The prompt is empty: give it at least one token.")
        if len(self.sample_ids) != self.sampling.num_samples:
            raise ValueError(
                f"{len(self.sample_ids)} sample_ids were given for num_samples="
                f"{self.sampling.num_samples}: give one per completion."
            )


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was drawn for one sample of a request.

    Attributes:
      request: the id that the request was given.
      sample: which of its samples, from 0 on.
      tokens: int32 [T], the stop token included.
      log_probs: float32 [T], of each token at the sampling temperature.
      finish_reason: why it ended.
    """

    request: int
    sample: int
    tokens: Int[np.ndarray, "T"]
    log_probs: Float[np.ndarray, "T"]
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of one call.

    Attributes:
      tokens: token ids of each prompt, unpadded.
      sample_ids: [P, G], one id per completion. The noise of a completion is a
        function of (seed, step, sample id, position) and of nothing else.
    """

    tokens: list[list[int]]
    sample_ids: Int[np.ndarray, "P G"]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Completions, row r = p * G + g for sample g of prompt p.

    Attributes:
      tokens: [R, T] int32, right-padded with 0, the stop token included.
      log_probs: [R, T] float32, of each token at the sampling temperature; 0 on
        padding.
      lengths: [R] int32, tokens of each completion.
      finish_reasons: [R] int32, a `FinishReason`.
      sample_ids: [R] int32.
    """

    tokens: Int[np.ndarray, "R T"]
    log_probs: Float[np.ndarray, "R T"]
    lengths: Int[np.ndarray, "R"]
    finish_reasons: Int[np.ndarray, "R"]
    sample_ids: Int[np.ndarray, "R"]

    def completions(self) -> list[Int[np.ndarray, "_"]]:
        """The token ids of every row, without padding."""
        rows = zip(self.tokens, self.lengths, strict=True)
        return [tokens[:length] for tokens, length in rows]


class RolloutEngine(Protocol):
    """Draws completions from a policy.

    Attributes:
      metrics: what the last call did, by name.
      description: what it had room for, in a line.
    """

    metrics: dict[str, float]
    description: str

    def generate(
        self,
        weights: PyTree,
        prompts: Prompts,
        sampling: SamplingParams,
        key: tuple[int, int],
    ) -> Rollouts:
        """Draws ``sampling.num_samples`` completions for every prompt.

        Results do not depend on the batch, its order or its padding.

        Args:
          weights: the policy as `fp8.weights.sampling_weights` lays it out.
          prompts: prompts and sample ids.
          sampling: how to draw.
          key: (seed, step).

        Returns:
          The completions, on the host.
        """
