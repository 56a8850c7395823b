"""Tokenized prompts in a deterministic, resumable order."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np
from jaxtyping import Int64


class PromptError(ValueError):
    """Prompts that cannot be used, or that are not those of the checkpoint."""


@dataclasses.dataclass(frozen=True)
class PromptSet[ExampleT]:
    """Examples with their prompts.

    Attributes:
      examples: The examples kept.
      tokens: Token ids of each prompt.
      num_dropped: Examples left out because their prompts are too long.
    """

    examples: tuple[ExampleT, ...]
    tokens: tuple[tuple[int, ...], ...]
    num_dropped: int

    def __len__(self) -> int:
        return len(self.examples)

    def fingerprint(self) -> str:
        """Returns a digest of the prompts, their order and their number."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]


def tokenize_prompts[ExampleT](
    source: Sequence[ExampleT],
    render: Callable[[ExampleT], Sequence[int]],
    max_length: int,
    too_long: Literal["drop", "error"] = "error",
) -> PromptSet[ExampleT]:
    """Renders every example of a source.

    Args:
      source: Anything with a length and integer indices.
      render: Returns the prompt's token ids.
      max_length: The most tokens that a prompt may have.
      too_long: Whether a longer prompt is left out or an error.

    Raises:
      PromptError: No prompt is left, or one is empty or, unless dropped, too long; it
        names the row.
    """
    if too_long not in ("drop", "error"):
        raise ValueError(f"too_long must be 'drop' or 'error', got {too_long!r}")
    examples, prompts = [], []
    for row in range(len(source)):
        tokens = tuple(render(source[row]))
        if not tokens:
            raise PromptError(f"row {row} has an empty prompt: correct or remove it")
        if len(tokens) <= max_length:
            examples.append(source[row])
            prompts.append(tokens)
        elif too_long == "error":
            raise PromptError(
                f"the prompt of row {row} has {len(tokens)} tokens, but at most "
                f"{max_length} are allowed: raise the limit or drop long prompts"
            )
    if not examples:
        raise PromptError(
            f"no prompt is left of {len(source)} rows: raise the limit of {max_length} "
            "tokens"
            if len(source)
            else "the source has no rows"
        )
    return PromptSet(tuple(examples), tuple(prompts), len(source) - len(examples))


@dataclasses.dataclass(frozen=True)
class PromptBatch[ExampleT]:
    """The prompts of one step.

    Attributes:
      ids: Numbers of the draws, [P]: no two draws of a run share one.
      examples: The examples, P of them.
      tokens: Their prompts.
    """

    ids: Int64[np.ndarray, "P"]
    examples: tuple[ExampleT, ...]
    tokens: tuple[tuple[int, ...], ...]


class PromptIterator[ExampleT](Iterator[PromptBatch[ExampleT]]):
    """Batches of prompts without end, every epoch in a new order.

    The stream of draws is a function of the prompts and the seed alone. Batches are cut
    from it without regard to epochs: none is short, and one larger than the prompt set
    holds some prompts more than once, under different ids.

    Args:
      prompts: What to draw from.
      num_prompts_per_step: P, the prompts in a batch.
      seed: Of the order.
    """

    def __init__(
        self, prompts: PromptSet[ExampleT], num_prompts_per_step: int, seed: int
    ):
        if num_prompts_per_step < 1:
            raise ValueError(
                f"num_prompts_per_step must be >= 1, got {num_prompts_per_step}"
            )
        self._prompts = prompts
        self._num_prompts_per_step = num_prompts_per_step
        self._order = grain.MapDataset.range(len(prompts)).seed(seed).shuffle().repeat()
        self._identity = {
            "seed": seed,
            "num_prompts": len(prompts),
            "fingerprint": prompts.fingerprint(),
        }
        self._position = 0

    def __next__(self) -> PromptBatch[ExampleT]:
        start, self._position = (
            self._position,
            self._position + self._num_prompts_per_step,
        )
        ids = np.arange(start, self._position, dtype=np.int64)
        rows = [int(self._order[i]) for i in ids.tolist()]
        return PromptBatch(
            ids,
            tuple(self._prompts.examples[r] for r in rows),
            tuple(self._prompts.tokens[r] for r in rows),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the position in a form that JSON can hold."""
        return {"position": self._position} | self._identity

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken, with any batch size.

        Raises:
          PromptError: The state belongs to other prompts or another seed.
        """
        changed = [k for k, v in self._identity.items() if state.get(k) != v]
        if changed:
            raise PromptError(
                "the checkpoint was made with other prompts: "
                + ", ".join(
                    f"{k} was {state.get(k)!r} and is {self._identity[k]!r}"
                    for k in changed
                )
                + ". Restore the data, tokenizer and seed, or start a new run"
            )
        self._position = int(state["position"])
