"""How the sequences of an update lie in its micro-batches: a row each, or packed."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from fp8rl_jax.data.batching import BLOCK, TokenBatch, micro_batches


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the R sequences of an update are, in A micro-batches.

    A sequence occupies one of the N places of a micro-batch. What the loss reads has a
    row of its own for each place; tokens may share rows.

    Attributes:
      batch: tokens, on the host.
      places: int32 [A, N], the sequence in each place; -1: none.
      num_micro_batches: those that hold anything; they come first.
      token_share: share of the tokens of these that belong to a sequence.
    """

    batch: TokenBatch
    places: Int[np.ndarray, "A N"]
    num_micro_batches: int
    token_share: float

    def take(self, tree: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
        """Arrays [R, ...] as [A, N, ...], zeros where there is no sequence."""

        def place(x):
            taken = np.zeros((*self.places.shape, *x.shape[1:]), x.dtype)
            there = self.places >= 0
            taken[there] = x[self.places[there]]
            return taken

        return jax.tree.map(place, tree)

    def restore(self, values: Float[np.ndarray, "A N T"]) -> Float[np.ndarray, "R T"]:
        """The inverse of :meth:`take`."""
        there = self.places >= 0
        rows = np.zeros((there.sum(), *values.shape[2:]), values.dtype)
        rows[self.places[there]] = values[there]
        return rows


def lay_out_rows(batch: TokenBatch, mask: Bool[np.ndarray, "R T"], rows: int) -> Layout:
    """A row for every sequence.

    Args:
      batch: of [R, T], a sequence a row.
      mask: targets that count; none of a sequence comes after its last.
      rows: of a micro-batch.

    Raises:
      ValueError: R is not a multiple of ``rows``.
    """
    order = np.arange(len(mask), dtype=np.int32)
    cut, places = micro_batches((batch, order), rows)
    share = _lengths(mask).sum() / mask.size
    return Layout(cut, places, len(places), float(share))


def pack(
    batch: TokenBatch, mask: Bool[np.ndarray, "R T"], num_tokens: int, num_rows: int
) -> Layout:
    """Several sequences a row, each from a multiple of 128 on.

    The blocks that attention reads are then those of the sequence alone, so packing
    changes no log-prob. Longest first, each into the first row that has room: at most
    11/9 of the fewest rows possible, and one.

    Args:
      batch: of [R, T], a sequence a row.
      mask: targets that count; none of a sequence comes after its last.
      num_tokens: of a packed row, a multiple of 128.
      num_rows: packed rows of a micro-batch.

    Raises:
      ValueError: a sequence is longer than a row.

    References:
      Johnson, "Near-optimal bin packing algorithms", 1973 (first fit decreasing).
    """
    lengths = _lengths(mask)
    if lengths.max() > num_tokens:
        raise ValueError(
            f"A sequence of {lengths.max()} tokens does not fit a packed row of "
            f"{num_tokens}: raise train.tokens_per_micro_batch."
        )
    bins = _first_fit_decreasing(-(-lengths // BLOCK), num_tokens // BLOCK)
    most = _few_sizes(max(map(len, bins)))
    count = -(-len(bins) // num_rows)
    shape = _few_sizes(count), num_rows, most
    places = np.full(shape, -1, np.int32)
    index = np.full((*shape, mask.shape[1]), -1, np.int32)
    packed = TokenBatch(
        *(np.zeros((*shape[:2], num_tokens), np.int32) for _ in range(4))
    )
    # Rows of about as many tokens side by side: neighbours in order of filling.
    for number, sequences in enumerate(bins):
        at, start = divmod(number, num_rows), 0
        for place, sequence in enumerate(sequences):
            length = lengths[sequence]
            span = slice(start, start + length)
            for name in ("tokens", "targets", "positions"):
                values = getattr(batch, name)[sequence, :length]
                getattr(packed, name)[*at, span] = values
            packed.segments[*at, span] = place + 1
            places[*at, place] = sequence
            index[*at, place, :length] = np.arange(start, start + length)
            start += -(-length // BLOCK) * BLOCK
    share = lengths.sum() / (count * num_rows * num_tokens)
    return Layout(
        packed._replace(index=index),
        places.reshape(shape[0], -1),
        count,
        float(share),
    )


def _lengths(mask: Bool[np.ndarray, "R T"]) -> Int[np.ndarray, "R"]:
    """Tokens up to the last target of each row."""
    columns = np.arange(1, mask.shape[1] + 1, dtype=np.int32)
    return np.max(np.where(mask, columns, 1), 1)


def _first_fit_decreasing(sizes, room: int) -> list[list[int]]:
    """Items of each bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        number = next((i for i, space in enumerate(left) if space >= size), len(bins))
        if number == len(bins):
            bins.append([])
            left.append(room)
        bins[number].append(item)
        left[number] -= size
    return bins


def _few_sizes(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ...: each is a program to compile."""
    size = 1
    while size < count:
        if size >= 2 and size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size
