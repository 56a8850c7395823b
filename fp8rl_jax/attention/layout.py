"""How keys and values of tokens lie in pages.

Keys of a page are rows, [page, H]. FP8 values are its columns, [H, page], so that the
product with probabilities contracts along rows; and their tokens are permuted inside
groups of 16, so that on Hopper a tile of scores in registers, once quantised, *is* an
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


def column_of(slot: Int[Array, "..."]) -> Int[Array, "..."]:
    """The column in which an FP8 page of values keeps a token's slot.

    Column 16 j + 4 t + i holds slot 16 j + 2 t + (i & 1) + 8 (i >> 1).
    """
    within = slot % GROUP
    half, pair, bit = within // 8, within // 2 % 4, within % 2
    return slot - within + 4 * pair + 2 * half + bit


def rows_of_values(pages: Array) -> Array:
    """Values of FP8 pages [..., H, page] as rows in the order of slots, [..., page, H].

    Works on codes of any dtype.
    """
    *lead, head_dim, page = pages.shape
    # Group, pair, half, bit of a column; a slot is group, half, pair, bit.
    columns = pages.reshape(*lead, head_dim, page // GROUP, 4, 2, 2)
    n = len(lead)
    order = (*range(n), n + 1, n + 3, n + 2, n + 4, n)
    return columns.transpose(order).reshape(*lead, page, head_dim)


def stored_values(codes: Array, scales: Array) -> Float[Array, "... page H"]:
    """What pages of values dequantise to, for tests and inspection; float32."""
    return rows_of_values(codes.astype(jnp.float32)) * scales[..., None]
