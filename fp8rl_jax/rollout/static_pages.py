"""Pages of a static batch: every row gets those that it may need at the start."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from fp8rl_jax.attention import PagePool
from fp8rl_jax.fp8 import BLOCK
from fp8rl_jax.rollout.types import SamplingParams

_SMALL_ROUND = 16


class Pages(NamedTuple):
    """Which pages prompts and their samples use.

    The G samples of a prompt share its full pages. The partly filled last one is
    copied, except for the last sample, which goes on in the original.

    Attributes:
      prompt_table: int32 [prompts, pages of a padded prompt]; -1 where there is none.
      row_table: int32 [prompts * G, pages of a whole row]; likewise.
      copy_source: int32 [prompts * (G - 1)], pages to copy after the prefill.
      copy_target: int32, likewise; -1: nothing to copy.
    """

    prompt_table: Int[Array, "prompts _"]
    row_table: Int[Array, "rows _"]
    copy_source: Int[Array, "_"]
    copy_target: Int[Array, "_"]


def padded_length(num_tokens: int, page: int) -> int:
    """Prompts are padded to whole pages, or to few lengths where a page is small."""
    multiple = BLOCK if page == BLOCK else _SMALL_ROUND
    return -(-num_tokens // multiple) * multiple


def lay_out(
    lengths: Int[np.ndarray, "prompts"],
    padded: int,
    sampling: SamplingParams,
    page: int,
    shards: int,
) -> tuple[Pages, int]:
    """Deals out pages, numbered from 0 on every shard.

    Args:
      lengths: tokens of each prompt.
      padded: the length that prompts are padded to.
      sampling: samples per prompt and the most tokens of each.
      page: tokens of a page.
      shards: devices that the prompts are split over.

    Returns:
      The pages, and how many a shard must have: a bound that depends on shapes alone,
      so that the program does too.
    """
    limit = sampling.max_new_tokens
    per_shard = len(lengths) // shards
    prompt_pages = -(-padded // page)
    row_pages = -(-(padded + limit) // page)
    # A row's new tokens begin and end within a page.
    own = min(-(-limit // page) + 1, row_pages)
    num_pages = per_shard * (prompt_pages + sampling.num_samples * own)
    parts = [
        _one_shard(part, prompt_pages, row_pages, num_pages, sampling, page)
        for part in np.split(lengths, shards)
    ]
    return Pages(*map(np.concatenate, zip(*parts, strict=True))), num_pages


def _one_shard(lengths, prompt_pages, row_pages, num_pages, sampling, page):
    group, pool = sampling.num_samples, PagePool(num_pages)
    prompt_table = np.full((len(lengths), prompt_pages), -1, np.int32)
    row_table = np.full((len(lengths) * group, row_pages), -1, np.int32)
    copies = np.zeros((2, len(lengths), group - 1), np.int32)
    copies[1] = -1
    for i, length in enumerate(lengths.tolist()):
        prompt = pool.allocate(-(-length // page))
        prompt_table[i, : len(prompt)] = prompt
        total = -(-(length + sampling.max_new_tokens) // page)
        for j in range(group):
            pages = prompt
            if j < group - 1:
                pages, copy = pool.fork(prompt, length, page)
                for pair in copy:
                    copies[:, i, j] = pair
            row = pages + pool.allocate(total - len(pages))
            row_table[i * group + j, : len(row)] = row
    return Pages(prompt_table, row_table, *copies.reshape(2, -1))
