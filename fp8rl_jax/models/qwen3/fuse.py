"""Projections that hold several of Hugging Face's matrices, and how their rows lie.

One product then gives the queries, keys and values of a token, and one its gate and up:

* ``qkv_proj`` [K (G + 2) H, D]: for each KV head its G query heads, its key, its value;
* ``gate_up_proj`` [2 F, D]: 128 rows of gate, the same 128 of up, and so on; blocks of
  gcd(F, 128) rows where F is not a multiple of 128.

So rows lie in groups, each of which holds some rows of every part. A mesh axis that
divides the number of groups shards the kernel, its product and the parts of the product
alike, and no data moves between them. Where H and F are multiples of 128, a 128x128
block lies within one part, whose FP8 codes are then those it would have by itself.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from jaxtyping import Array, Float, Int

from fp8rl_jax.fp8 import BLOCK
from fp8rl_jax.models.qwen3.config import Qwen3Config


def qkv_widths(config: Qwen3Config) -> tuple[int, int, int]:
    """Rows of query, key and value in one group of `qkv_proj`; there are K groups."""
    query_heads = config.num_heads // config.num_kv_heads
    return query_heads * config.head_dim, config.head_dim, config.head_dim


def gate_up_widths(config: Qwen3Config) -> tuple[int, int]:
    """Rows of gate and up in one group of `gate_up_proj`."""
    block = math.gcd(config.intermediate_size, BLOCK)
    return block, block


def parts_of(config: Qwen3Config, module: str) -> dict[str, int]:
    """Name of each matrix that a module holds -> its width, its rows in a group.

    A module that is not fused is its only part, in groups of one row.
    """
    match module:
        case "qkv_proj":
            names, widths = ("q_proj", "k_proj", "v_proj"), qkv_widths(config)
        case "gate_up_proj":
            names, widths = ("gate_proj", "up_proj"), gate_up_widths(config)
        case _:
            names, widths = (module,), (1,)
    return dict(zip(names, widths, strict=True))


def fuse(
    parts: Sequence[Float[Array, "*lead _ D"]], widths: Sequence[int]
) -> Float[Array, "*lead fused D"]:
    """Interleaves the rows of several kernels.

    Args:
      parts: kernels [..., groups * width, D], JAX or numpy.
      widths: rows of each part in a group.

    Returns:
      [..., groups * sum(widths), D], of the same kind of array.
    """
    xp = parts[0].__array_namespace__()
    grouped = [
        x.reshape(*x.shape[:-2], -1, width, x.shape[-1])
        for x, width in zip(parts, widths, strict=True)
    ]
    fused = xp.concatenate(grouped, -2)
    return fused.reshape(*fused.shape[:-3], -1, fused.shape[-1])


def split_fused(
    x: Float[Array, "..."], widths: Sequence[int], axis: int = -1
) -> list[Float[Array, "..."]]:
    """Takes apart the rows of a fused kernel, or the features of its product.

    Args:
      x: groups * sum(widths) long along ``axis``, JAX or numpy.
      widths: rows (features) of each part in a group.
      axis: the fused axis: -1 of a product, -2 of a kernel.

    Returns:
      The parts, each groups * width long along ``axis``.
    """
    xp = x.__array_namespace__()
    axis %= x.ndim
    lead, trail = x.shape[:axis], x.shape[axis + 1 :]
    grouped = x.reshape(*lead, -1, sum(widths), *trail)
    # The transpose of a split is one concatenation: gradients are copied, never added.
    parts = xp.split(grouped, list(accumulate(widths))[:-1], axis + 1)
    return [part.reshape(*lead, -1, *trail) for part in parts]


def rows_of_parts(widths: Sequence[int], num_rows: int) -> list[Int[np.ndarray, "_"]]:
    """Where the rows of each part lie in a fused kernel of ``num_rows`` rows.

    Returns:
      For each part the positions of its rows 0, 1, ..., which ascend.
    """
    return split_fused(np.arange(num_rows), widths)
