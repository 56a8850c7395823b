"""The plain-JAX matrix products: the block order that every kernel must keep."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax import numerics
from fp8rl_jax.fp8.quantize import BLOCK, pad_to_multiple
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.numerics import by_platform, round_to

_NT = (((1,), (1,)), ((), ()))
# Blocks of K unrolled in the program; more only lengthen compilation.
_MAX_UNROLL = 4


def matmul_nt(
    a: Float[Array, "M K"], b: Float[Array, "N K"], out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """a b^T with operands of one dtype, wide accumulation and one rounding."""

    def product(dtype, a, b):
        return round_to(numerics.dot(dtype, a, b, _NT), out_dtype)

    return by_platform(product, a, b)


def scaled_matmul_nt(
    a: ScaledArray, b: ScaledArray, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """a b^T of block-scaled operands, [M, K] by [N, K].

    For each block of 128 along K, ascending: the partial product of the codes times the
    product of both scales is added to the accumulator, which is rounded once to
    ``out_dtype``. A row of the result depends on that row of ``a`` alone, never on M.

    Args:
      a: [M, K], scales one per (1 or 128 rows, 128 columns).
      b: [N, K], likewise.
      out_dtype: bfloat16 or float32.

    Raises:
      ValueError: the contracted lengths differ or K is not blocked by 128.
    """
    if a.shape[1] != b.shape[1] or a.block[1] != BLOCK or b.block[1] != BLOCK:
        raise ValueError(
            f"scaled_matmul_nt needs [M, K] and [N, K] with K in blocks of {BLOCK}, "
            f"got {a.shape} in blocks {a.block} and {b.shape} in blocks {b.block}."
        )

    def by_block(x: ScaledArray):
        """Codes [K/128, rows, 128] and scales [K/128, rows]."""
        codes = pad_to_multiple(x.codes, (BLOCK,))
        codes = codes.reshape(x.shape[0], -1, BLOCK).swapaxes(0, 1)
        scales = jnp.repeat(x.scales.T, x.block[0], axis=1)[:, : x.shape[0]]
        return codes, scales

    def product(dtype, *blocks):
        def scaled_partial(block):
            a_codes, a_scales, b_codes, b_scales = block
            scale = a_scales[:, None].astype(dtype) * b_scales[None, :].astype(dtype)
            return numerics.dot(dtype, a_codes, b_codes, _NT) * scale

        def step(accumulator, block):
            return accumulator + scaled_partial(block), None

        first, *rest = scaled_partial([x[0] for x in blocks]), *[x[1:] for x in blocks]
        num_rest = rest[0].shape[0]
        unroll = max(num_rest, 1) if num_rest < _MAX_UNROLL else 1
        accumulator, _ = lax.scan(step, first, rest, unroll=unroll)
        return round_to(accumulator, out_dtype)

    return by_platform(product, *by_block(a), *by_block(b))
