"""Block-wise quantisation to float8_e4m3fn.

References:
  DeepSeek-AI. "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3 (1x128 and
  128x128 blocks, one online scale per block).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.numerics import by_platform, round_to

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
ACTIVATION_BLOCK = (1, BLOCK)
WEIGHT_BLOCK = (BLOCK, BLOCK)
# Below this amax the scale would be subnormal; such a block is zero for our purposes.
_AMAX_FLOOR = E4M3_MAX * 2.0**-126


def pad_to_multiple(x: Array, multiples: tuple[int, ...]) -> Array:
    """Zero-pads the trailing axes up to multiples; returns ``x`` itself if none is."""
    trailing = x.shape[-len(multiples) :]
    widths = [(0, -n % m) for n, m in zip(trailing, multiples, strict=True)]
    if not any(w for _, w in widths):
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(multiples)) + widths)


def _blocks(x: Array, block: tuple[int, int]) -> Array:
    """[..., M, N] -> [..., M / b0, b0, N / b1, b1]; M and N are multiples."""
    *lead, m, n = x.shape
    return x.reshape(*lead, m // block[0], block[0], n // block[1], block[1])


def _ceil_power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest power of two >= x, for normal positive float32; inf, nan stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = ((bits + jnp.uint32(0x7FFFFF)) >> 23) << 23
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(up, jnp.float32), x)


def round_e4m3(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds to the nearest e4m3 value (ties to even), saturating, in x's own dtype.

    JAX's cast turns values above 464 and inf into NaN; here finite values saturate at
    +-448. The result is exact in e4m3, so the cast that follows cannot round again and
    a compiler that drops a down-cast/up-cast pair changes nothing. NaN stays NaN.
    """
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    normal = lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, 3)
    subnormal = jnp.round(x * 2.0**9) * 2.0**-9
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal)


def quantize(
    x: Float[Array, "... M N"],
    block: tuple[int, int] = ACTIVATION_BLOCK,
    *,
    power_of_two: bool = False,
) -> ScaledArray:
    """Quantises blocks of the two last axes with scale = amax / 448.

    Codes are ``x * (1 / scale)`` in float32, reciprocal and product rounded once each.
    An all-zero block gets scale 1 and codes 0. A block that holds inf or NaN
    dequantises to non-finite values throughout: nothing hides it. Ragged edges behave
    as if padded with zeros. Not differentiable.

    Args:
      x: [..., M, N], bfloat16 or float32.
      block: (rows, columns) that share a scale.
      power_of_two: round scales up to powers of two, so that dequantised values are
        exact in bfloat16.

    Returns:
      The codes and scales of ``x``.

    Raises:
      ValueError: ``x`` has fewer than two axes or a block side is not positive.
    """
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(
            f"quantize needs at least two axes and a positive block, got shape "
            f"{x.shape} and block {block}."
        )
    m, n = x.shape[-2:]

    def scales_and_codes(dtype, x):
        x = _blocks(pad_to_multiple(x, block), block)
        amax = jnp.max(jnp.abs(x), axis=(-3, -1)).astype(jnp.float32)
        scales = round_to(amax.astype(dtype) / E4M3_MAX, jnp.float32)
        scales = jnp.where(amax < _AMAX_FLOOR, jnp.ones_like(scales), scales)
        if power_of_two:
            scales = _ceil_power_of_two(scales)
        # XLA turns some float32 divisions into products with the reciprocal, depending
        # on the program around them; a product written as such is always that one.
        inverse = round_to(1.0 / scales.astype(dtype), jnp.float32)
        scaled = x.astype(jnp.float32) * inverse[..., :, None, :, None]
        codes = round_e4m3(scaled).astype(E4M3)
        *lead, rows, b0, columns, b1 = codes.shape
        return scales, codes.reshape(*lead, rows * b0, columns * b1)[..., :m, :n]

    scales, codes = by_platform(scales_and_codes, lax.stop_gradient(x))
    return ScaledArray(codes, scales, block)


def expand_scales(q: ScaledArray) -> Float[Array, "... M N"]:
    """Scales repeated over their blocks: float32 of the values' shape."""
    m, n = q.shape[-2:]
    scales = jnp.repeat(q.scales, q.block[0], axis=-2)[..., :m, :]
    return jnp.repeat(scales, q.block[1], axis=-1)[..., :n]


def dequantize(q: ScaledArray, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """The values ``codes * scales`` rounded once to ``dtype``."""
    return round_to(q.codes.astype(jnp.float32) * expand_scales(q), dtype)
