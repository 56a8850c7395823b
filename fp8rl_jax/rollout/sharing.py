"""Rows of a decode plan that begin with the same pages, which are then read once."""

import numpy as np
from jaxtyping import Int

from fp8rl_jax.rollout.plans import SharedPages

_LEAST_SAVED = 0.4  # of the pages that a step reads


def pays(num_saved: int, num_visible: int) -> bool:
    """Whether a step is faster if it reads shared pages once.

    It is taken to be if that saves at least 40 % of the pages that are visible to the
    rows. Groups of 16 on an H200: with 23 % saved attention took 1 to 6 % longer, with
    47 % it took 9 to 18 % less time, with 83 % 44 to 57 % less (docs/benchmarks.md).

    Args:
      num_saved: the sum over groups of (members - 1) * shared pages.
      num_visible: the sum over rows of their pages.
    """
    return num_saved >= _LEAST_SAVED * num_visible


def find_shared_pages(
    page_table: Int[np.ndarray, "R W"],
    positions: Int[np.ndarray, "R"],
    *,
    num_shards: int,
    page_size: int,
    group_size: int,
    always: bool = False,
) -> SharedPages | None:
    """Groups the rows of a decode plan that share full pages.

    There is room for a group of every four rows, so that plans of one size have groups
    of one size. If it does not suffice, those that save least are left out.

    Args:
      page_table: int32 [R, W] of all shards; -1 where a row has no page.
      positions: int32 [R], of the token to be stored; -1: idle row.
      num_shards: shards, of R / num_shards rows each.
      page_size: tokens of a page.
      group_size: most rows of a group.
      always: also if it does not pay.

    Returns:
      The groups; None if there are none, or if they do not pay.
    """
    of_shards = [
        _group(*rows, page_size, group_size)
        for rows in zip(
            np.split(page_table, num_shards),
            np.split(positions, num_shards),
            strict=True,
        )
    ]
    rows, num_pages = (np.concatenate(x) for x in zip(*of_shards, strict=True))
    num_saved = int((((rows >= 0).sum(1) - 1) * num_pages).sum())
    num_visible = int((positions // page_size + 1).sum())
    if not num_saved or not (always or pays(num_saved, num_visible)):
        return None
    return SharedPages(rows, num_pages)


def _group(page_table, positions, page_size, group_size):
    """Puts each row of a shard together with those that it shares most pages with.

    Where all prompts begin alike, these are the samples of its own prompt.
    """
    # A step stores into the page of its position: only those before it are shared.
    full = positions // page_size
    columns = np.arange(max(full.max(), 1))
    table = page_table[:, : len(columns)]
    table = np.where(columns[None] < full[:, None], table, -1)
    # In the order of their bytes, rows that begin alike are neighbours.
    keys = [row.tobytes() for row in table]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    table = table[order]
    same = (table[1:] == table[:-1]) & (table[1:] >= 0)
    common = np.logical_and.accumulate(same, axis=1).sum(1)  # with the next row
    around = np.pad(common, 1)
    most = np.maximum(around[1:], around[:-1])  # with any row
    together = (common > 0) & (common == most[1:]) & (common == most[:-1])
    starts = np.flatnonzero(np.pad(~together, (1, 0), constant_values=True))
    sizes = np.diff(starts, append=len(order))
    # More rows than a group has are several.
    place = np.arange(len(order)) - np.repeat(starts, sizes)
    starts = np.flatnonzero(place % group_size == 0)
    sizes = np.diff(starts, append=len(order))
    num_saved = (sizes - 1) * around[starts + 1]
    num_groups = -(-len(order) // 4)
    rows = np.full((num_groups, group_size), -1, np.int32)
    num_pages = np.zeros(num_groups, np.int32)
    best = np.argsort(-num_saved, kind="stable")[: min(num_groups, (sizes > 1).sum())]
    for i, group in enumerate(best):
        begin, size = starts[group], sizes[group]
        rows[i, :size] = order[begin : begin + size]
        num_pages[i] = around[begin + 1]
    return rows, num_pages
