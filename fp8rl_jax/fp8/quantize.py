"""Block-wise quantisation to float8_e4m3fn.

References:
  DeepSeek-AI. "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3 (1x128 and
  128x128 blocks, one online scale per block).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.implementation import Implementation, PlatformFunction
from fp8rl_jax.kernels import hopper_quantize
from fp8rl_jax.kernels.hopper_quantize_tiles import Quantized
from fp8rl_jax.numerics import by_platform, round_to

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
_ONE_OVER_MAX = np.float32(1.0 / E4M3_MAX)
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
    implementation: Implementation | None = None,
) -> ScaledArray:
    """Quantises blocks of the two last axes with scale = amax / 448.

    In float32 the scale is ``amax * (1 / 448)`` and the codes are ``x * (1 / scale)``,
    each reciprocal and each product rounded once. An all-zero block gets scale 1 and
    codes 0. A block that holds inf or NaN dequantises to non-finite values throughout:
    nothing hides it. Ragged edges behave as if padded with zeros. Not differentiable.

    Args:
      x: [..., M, N], bfloat16 or float32.
      block: (rows, columns) that share a scale.
      power_of_two: round scales up to powers of two, so that dequantised values are
        exact in bfloat16.
      implementation: "mosaic" (Hopper GPUs; the two blocks of linear layers) or
        "reference"; None takes the best that runs where the program is lowered for.
        The bits are the same.

    Returns:
      The codes and scales of ``x``.

    Raises:
      ValueError: ``x`` has fewer than two axes, a block side is not positive, or there
        is no such implementation.
    """
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(
            f"quantize needs at least two axes and a positive block, got shape "
            f"{x.shape} and block {block}."
        )
    x = lax.stop_gradient(x)
    if power_of_two or block not in (ACTIVATION_BLOCK, WEIGHT_BLOCK):
        if implementation not in (None, "reference"):
            raise ValueError(
                f"Kernels quantise blocks {ACTIVATION_BLOCK} and {WEIGHT_BLOCK} alone, "
                f"got {block}, power_of_two={power_of_two} and "
                f"implementation={implementation!r}: leave implementation unset."
            )
        codes, scales = _reference(x, block, power_of_two)
    elif block == WEIGHT_BLOCK:
        return quantize_weight(x, implementation=implementation)[0]
    else:
        codes, scales = _over_leading(_rows, x, implementation)
    return ScaledArray(codes, scales, block)


def quantize_weight(
    w: Float[Array, "... N K"], *, implementation: Implementation | None = None
) -> tuple[ScaledArray, ScaledArray]:
    """A weight in 128x128 blocks, and its transpose: the same codes laid out [K, N].

    The forward product reads the first and dgrad the second; transposition is exact.
    """
    w = lax.stop_gradient(w)
    codes, scales, transposed = _over_leading(_weight, w, implementation)
    return ScaledArray(codes, scales, WEIGHT_BLOCK), ScaledArray(
        transposed, scales.mT, WEIGHT_BLOCK
    )


def quantize_both(
    x: Float[Array, "M N"], *, implementation: Implementation | None = None
) -> tuple[ScaledArray, ScaledArray]:
    """``x`` and its transpose, each in 1x128 blocks, in one pass.

    What training needs of an activation and of an output gradient: the first multiplies
    weights, the second, [N, M], the other operand of wgrad.
    """
    outs = _both(lax.stop_gradient(x), implementation=implementation)
    return ScaledArray(*outs[:2], ACTIVATION_BLOCK), ScaledArray(
        *outs[2:], ACTIVATION_BLOCK
    )


def _reference(x, block, power_of_two=False):
    m, n = x.shape[-2:]

    def codes_and_scales(dtype, x):
        x = _blocks(pad_to_multiple(x, block), block)
        amax = _largest_magnitude(x, axis=(-3, -1)).astype(jnp.float32)
        # XLA turns some float32 divisions into products with the reciprocal, depending
        # on the program around them; products written as such are always those.
        scales = amax * _ONE_OVER_MAX
        scales = jnp.where(amax < _AMAX_FLOOR, jnp.ones_like(scales), scales)
        if power_of_two:
            scales = _ceil_power_of_two(scales)
        inverse = round_to(1.0 / scales.astype(dtype), jnp.float32)
        scaled = x.astype(jnp.float32) * inverse[..., :, None, :, None]
        codes = round_e4m3(scaled).astype(E4M3)
        *lead, rows, b0, columns, b1 = codes.shape
        return codes.reshape(*lead, rows * b0, columns * b1)[..., :m, :n], scales

    return by_platform(codes_and_scales, x)


def _largest_magnitude(x: Array, axis: tuple[int, ...]) -> Array:
    """max |x|, NaN if there is one: XLA:CPU's float32 maximum loses it.

    The order of non-negative floats, inf and NaN above them, is that of their bits.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(jnp.max(bits, axis), x.dtype)


def _over_leading(function, x, implementation):
    function = functools.partial(function, implementation=implementation)
    for _ in x.shape[:-2]:
        function = jax.vmap(function)
    return function(x)


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def row_types(shape: tuple[int, int]) -> list[tuple[tuple[int, int], jnp.dtype]]:
    """Shape and dtype of the codes and scales of [M, N] in 1x128 blocks."""
    return [(shape, E4M3), ((shape[0], _num_blocks(shape[1])), jnp.float32)]


def both_types(shape: tuple[int, int]) -> list[tuple[tuple[int, int], jnp.dtype]]:
    """The same of [M, N] and of its transpose."""
    return [*row_types(shape), *row_types(shape[::-1])]


def from_kernel(q: Quantized) -> tuple[Array, ...]:
    """A kernel's codes, and its scales laid out as `ScaledArray` has them."""
    rows = () if q.codes is None else (q.codes, q.scales.T)
    columns = () if q.codes_t is None else (q.codes_t, q.scales_t.T)
    return *rows, *columns


def _rows_reference(x):
    return _reference(x, ACTIVATION_BLOCK)


def _rows_on_hopper(x):
    codes, scales = hopper_quantize.quantize_rows(x)
    return codes, scales.T


def _both_reference(x):
    return *_rows_reference(x), *_rows_reference(x.T)


def _both_on_hopper(x):
    if x.dtype != jnp.bfloat16:  # the kernel transposes 16-bit values only
        return *_rows_on_hopper(x), *_rows_on_hopper(x.T)
    return from_kernel(hopper_quantize.quantize_both(x))


def _weight_reference(w):
    codes, scales = _reference(w, WEIGHT_BLOCK)
    return codes, scales, codes.T


def _weight_on_hopper(w):
    return hopper_quantize.quantize_weight(w.astype(jnp.float32))


_rows = PlatformFunction(
    "quantize_rows", row_types, _rows_reference, {"mosaic": _rows_on_hopper}
)
_both = PlatformFunction(
    "quantize_both", both_types, _both_reference, {"mosaic": _both_on_hopper}
)
_weight = PlatformFunction(
    "quantize_weight",
    lambda w: [
        (w, E4M3),
        (tuple(_num_blocks(size) for size in w), jnp.float32),
        (w[::-1], E4M3),
    ],
    _weight_reference,
    {"mosaic": _weight_on_hopper},
)


def expand_scales(q: ScaledArray) -> Float[Array, "... M N"]:
    """Scales repeated over their blocks: float32 of the values' shape."""
    m, n = q.shape[-2:]
    scales = jnp.repeat(q.scales, q.block[0], axis=-2)[..., :m, :]
    return jnp.repeat(scales, q.block[1], axis=-1)[..., :n]


def dequantize(q: ScaledArray, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """The values ``codes * scales`` rounded once to ``dtype``."""
    return round_to(q.codes.astype(jnp.float32) * expand_scales(q), dtype)
