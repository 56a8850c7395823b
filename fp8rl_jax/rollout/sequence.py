"""One completion in the making."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fp8rl_jax.rollout.types import Completion, FinishReason, Request


@dataclasses.dataclass(eq=False, slots=True)
class Placement:
    """Where a sequence runs.

    Attributes:
      slot: its slot, numbered over all shards.
      pages: page p // page_size holds position p.
      num_filled: so many of the first pages are known to be filled.
      copy_source: a page, held, whose first slots are to be copied into the page of the
        last cached token; None if there is nothing to copy.
    """

    slot: int
    pages: list[int]
    num_filled: int = 0
    copy_source: int | None = None


class Sequence:
    """A prompt and what has been drawn after it.

    Attributes:
      request_id: the request.
      sample: which of its samples.
      sample_id: names the noise of its tokens.
      sampling: how to draw.
      order: its place among all sequences by arrival.
      prompt_length: tokens of the prompt.
      length: tokens altogether.
      finish_reason: why it ended; None while it has not.
      placement: where it runs; None while it waits and after it has ended.
    """

    def __init__(self, request: Request, request_id: int, sample: int, order: int):
        limit = request.sampling.max_new_tokens
        self.request_id = request_id
        self.sample = sample
        self.sample_id = request.sample_ids[sample]
        self.sampling = request.sampling
        self.order = order
        self.prompt_length = self.length = len(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.placement: Placement | None = None
        self._tokens = np.empty(self.length + limit, np.int32)
        self._tokens[: self.length] = request.prompt
        self._log_probs = np.empty(limit, np.float32)

    @property
    def max_length(self) -> int:
        """Tokens that the sequence may have at most."""
        return len(self._tokens)

    @property
    def tokens(self) -> Int[np.ndarray, "length"]:
        """The prompt and all tokens drawn so far."""
        return self._tokens[: self.length]

    @property
    def cached_tokens(self) -> Int[np.ndarray, "length-1"]:
        """Tokens whose keys and values must be there to draw the next one."""
        return self._tokens[: self.length - 1]

    def extend(
        self, tokens: Int[np.ndarray, "T"], log_probs: Float[np.ndarray, "T"]
    ) -> None:
        """Appends tokens that were drawn."""
        begin, end = self.length, self.length + len(tokens)
        self._tokens[begin:end] = tokens
        self._log_probs[begin - self.prompt_length : end - self.prompt_length] = (
            log_probs
        )
        self.length = end

    def cut(self, num_tokens: int) -> None:
        """Drops all but the first ``num_tokens`` that were drawn.

        Raises:
          ValueError: there are fewer.
        """
        drawn = self.length - self.prompt_length
        if not 0 <= num_tokens <= drawn:
            raise ValueError(f"{drawn} tokens cannot be cut to {num_tokens}.")
        self.length = self.prompt_length + num_tokens

    def completion(self) -> Completion:
        """What was drawn.

        Raises:
          RuntimeError: the sequence has not ended.
        """
        if self.finish_reason is None:
            raise RuntimeError("The sequence has not ended.")
        return Completion(
            self.request_id,
            self.sample,
            self.tokens[self.prompt_length :].copy(),
            self._log_probs[: self.length - self.prompt_length].copy(),
            self.finish_reason,
        )


class Event(NamedTuple):
    """What happened to a sequence.

    Attributes:
      sequence: it.
      tokens: drawn since the last event.
      log_probs: of each of them.
      finish_reason: why it ended; None if it goes on.
    """

    sequence: Sequence
    tokens: Int[np.ndarray, "T"]
    log_probs: Float[np.ndarray, "T"]
    finish_reason: FinishReason | None
