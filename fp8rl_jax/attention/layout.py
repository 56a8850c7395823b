"""How keys and values of tokens lie in pages.

Keys of a page are rows, [page, H]. FP8 values are [page / 16, H, 16]: for each group of
16 tokens its columns, so that the product with probabilities contracts along rows while
a token stays within 16 H bytes, which one store need touch. Tokens are permuted inside
their group, so that on Hopper a tile of scores in registers, once quantised, *is* an
operand of that product. bfloat16 values are rows like the keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.fp8 import ScaledArray, quantize

GROUP = 16


def quantize_tokens(x: Float[Array, "... T H"]) -> ScaledArray:
    """Quantises queries, keys or values: one power-of-two scale per token and head.

    A power of two makes the dequantised value exact in bfloat16. There is nothing to
    calibrate, and a token's codes depend on that token alone.
    """
    return quantize(x, (1, x.shape[-1]), power_of_two=True)


def place_of(slot: Int[Array, "..."]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Group and column in which an FP8 page of values keeps a token's slot.

    Column 4 t + i of group j holds slot 16 j + 2 t + (i & 1) + 8 (i >> 1).
    """
    within = slot % GROUP
    half, pair, bit = within // 8, within // 2 % 4, within % 2
    return slot // GROUP, 4 * pair + 2 * half + bit


def rows_of_values(pages: Array) -> Array:
    """Values of FP8 pages [..., page / 16, H, 16] as rows of slots, [..., page, H].

    Works on codes of any dtype.
    """
    *lead, groups, head_dim, _ = pages.shape
    # Pair, half, bit of a column; a slot is group, half, pair, bit.
    columns = pages.reshape(*lead, groups, head_dim, 4, 2, 2)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 4, n + 1)
    return columns.transpose(order).reshape(*lead, groups * GROUP, head_dim)


def stored_values(codes: Array, scales: Array) -> Float[Array, "... page H"]:
    """What pages of values dequantise to, for tests and inspection; float32."""
    return rows_of_values(codes.astype(jnp.float32)) * scales[..., None]
