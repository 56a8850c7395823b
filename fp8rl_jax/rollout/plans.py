"""What the scheduler asks the device programs to do."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Chunks of tokens to store; row r belongs to shard r // (R / shards).

    Attributes:
      tokens: int32 [R, C], right-padded with 0.
      start: int32 [R], position of column 0, a multiple of the page size; -1: idle row.
      page_table: int32 [R, W], up to the last page that the chunk fills; -1 after it.
    """

    tokens: Int[np.ndarray, "R C"]
    start: Int[np.ndarray, "R"]
    page_table: Int[np.ndarray, "R W"]


class SharedPages(NamedTuple):
    """Groups of rows that begin with the same pages, as many of each shard.

    All keys in these pages are visible to all rows of the group.

    Attributes:
      groups: int32 [S, members], rows counted from the first of the shard; -1: none.
      num_pages: int32 [S], how many pages the rows of a group share; 0: no group.
    """

    groups: Int[np.ndarray, "S members"]
    num_pages: Int[np.ndarray, "S"]


@dataclasses.dataclass(frozen=True, eq=False)
class DecodePlan:
    """A burst of decode steps; row r belongs to shard r // (R / shards).

    All copies come before the first step, and every source is read before any target
    is written. Rows of a shard are sorted by descending length, idle ones last.

    Attributes:
      num_steps: steps of the burst.
      tokens: int32 [R], the last token of each sequence.
      positions: int32 [R], its position; -1: idle row.
      limits: int32 [R], the last position that a token may be drawn for.
      sample_ids: int32 [R].
      temperature: float32 [R].
      top_k: int32 [R]; 0: no limit.
      top_p: float32 [R].
      min_p: float32 [R].
      stop_ids: int32 [R, K], padded with -1.
      page_table: int32 [R, W]; -1 where a row has no page.
      shared: pages to read once for several rows; None: read all for each row.
      copy_source: int32 [shards * N], pages to copy, N for each shard; -1: none.
      copy_target: int32 [shards * N], likewise.
      slots: int32 [R], where each sequence runs; -1: idle row. For the scheduler.
      sequences: object [R], a `Sequence` or None. For the scheduler.
    """

    num_steps: int
    tokens: Int[np.ndarray, "R"]
    positions: Int[np.ndarray, "R"]
    limits: Int[np.ndarray, "R"]
    sample_ids: Int[np.ndarray, "R"]
    temperature: Float[np.ndarray, "R"]
    top_k: Int[np.ndarray, "R"]
    top_p: Float[np.ndarray, "R"]
    min_p: Float[np.ndarray, "R"]
    stop_ids: Int[np.ndarray, "R K"]
    page_table: Int[np.ndarray, "R W"]
    shared: SharedPages | None
    copy_source: Int[np.ndarray, "_"]
    copy_target: Int[np.ndarray, "_"]
    slots: Int[np.ndarray, "R"]
    sequences: np.ndarray
