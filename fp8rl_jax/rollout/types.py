"""What goes into a rollout engine and what comes out."""

import dataclasses
import enum
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int, PyTree


class FinishReason(enum.IntEnum):
    """Why a completion ended."""

    STOP = 0  # drew a stop token, which is its last token
    LENGTH = 1  # reached max_new_tokens


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token. Recorded
        log-probs are those of the full distribution at this temperature (at 1 for 0).
      max_new_tokens: at most so many tokens a completion, the stop token included.
      stop_ids: drawing any of these ends a completion.
      num_samples: completions per prompt, G.
    """

    temperature: float = 1.0
    max_new_tokens: int = 1024
    stop_ids: tuple[int, ...] = ()
    num_samples: int = 1

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}.")
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if not self.stop_ids:
            raise ValueError(
                "stop_ids is empty: no completion could end. Give the tokenizer's "
                "end-of-turn ids."
            )
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))


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
    """Draws completions from a policy."""

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
