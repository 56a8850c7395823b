"""Host-side batches of token rows for the trainer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

_SMALL_ROUND = 8
BLOCK = 128  # tokens that attention reads together


class TokenBatch(NamedTuple):
    """Rows of tokens, each with the token that follows it.

    Attributes:
      tokens: int32 [..., T], inputs.
      targets: int32 [..., T], the token after each input.
      positions: int32 [..., T], within the sequence.
      segments: int32 [..., T], the sequence's id within its row; 0 marks padding. None
        if every row is one sequence, perhaps with padding after it.
      index: int32 [..., S, R], where in the row the tokens of segments 1 to S are; -1
        after the last of each. None likewise.
    """

    tokens: Int[Array, "... T"]
    targets: Int[Array, "... T"]
    positions: Int[Array, "... T"]
    segments: Int[Array, "... T"] | None = None
    index: Int[Array, "... S R"] | None = None


def bucket_length(length: int) -> int:
    """The padded length for rows of up to ``length`` tokens.

    Multiples of 8 up to 128; then 128 times 1, 2, 3, 4, 6, 8, 12, ...: at most a third
    is padding, and few programs are compiled.
    """
    if length <= BLOCK:
        return -(-length // _SMALL_ROUND) * _SMALL_ROUND
    bucket = BLOCK
    while bucket < length:
        if bucket >= 2 * BLOCK and bucket * 3 // 2 >= length:
            return bucket * 3 // 2
        bucket *= 2
    return bucket


def token_rows(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[TokenBatch, Bool[np.ndarray, "R T"]]:
    """One row a sequence, right-padded to a bucket.

    Args:
      prompts: prompt ids of each row.
      completions: completion ids of each row.

    Returns:
      The batch [R, T], and the mask of targets that are completion tokens.
    """
    lengths = [len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)]
    shape = (len(lengths), bucket_length(max(lengths)))
    tokens, targets = (np.zeros(shape, np.int32) for _ in range(2))
    mask = np.zeros(shape, bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = [*prompt, *completion]
        tokens[i, : lengths[i]] = row[:-1]
        targets[i, : lengths[i]] = row[1:]
        mask[i, len(prompt) - 1 : lengths[i]] = True
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return TokenBatch(tokens, targets, np.array(positions)), mask


def place_on_targets(
    values: Float[np.ndarray, "R C"], mask: Bool[np.ndarray, "R T"]
) -> Float[np.ndarray, "R T"]:
    """Moves values of completion tokens to the positions of those targets.

    Args:
      values: one per completion token, right-padded.
      mask: the completion targets of each row, as many as the row has values.
    """
    placed = np.zeros(mask.shape, np.float32)
    within = np.arange(values.shape[1]) < mask.sum(1)[:, None]
    placed[mask] = values[within]
    return placed


def micro_batches(tree: PyTree[np.ndarray], rows: int) -> PyTree[np.ndarray]:
    """Cuts every array [R, ...] to [R / rows, rows, ...].

    Raises:
      ValueError: R is not a multiple of ``rows``.
    """

    def cut(x):
        if len(x) % rows:
            raise ValueError(
                f"A batch of {len(x)} rows does not divide into micro-batches of "
                f"{rows}."
            )
        return x.reshape(-1, rows, *x.shape[1:])

    return jax.tree.map(cut, tree)
