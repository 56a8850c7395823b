"""Matrix products: the plain-JAX block order that every kernel keeps, and dispatch."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax import numerics
from fp8rl_jax.fp8.quantize import BLOCK, pad_to_multiple
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.implementation import (
    Implementation,
    PlatformFunction,
    compute_capability,
    one_at_a_time,
)
from fp8rl_jax.kernels import hopper_bf16_gemm, hopper_gemm, triton_gemm
from fp8rl_jax.numerics import by_platform, round_to

_NT = (((1,), (1,)), ((), ()))
# Blocks of K unrolled in the program; more only lengthen compilation.
_MAX_UNROLL = 4


# Up to so many rows a bfloat16 product is bound by reading the other operand. Of more,
# as a trainer has, XLA's is faster.
_MAX_KERNEL_ROWS = 1024


def xla_matmul_nt(
    a: Float[Array, "M K"], b: Float[Array, "N K"], out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """a b^T by XLA, with operands of one dtype, wide accumulation and one rounding."""

    def product(dtype, a, b):
        if dtype == jnp.float32 and a.dtype == jnp.bfloat16:
            # The float32 sums are rounded as they are stored.
            return lax.dot_general(a, b, _NT, preferred_element_type=out_dtype)
        return round_to(numerics.dot(dtype, a, b, _NT), out_dtype)

    return by_platform(product, a, b)


def matmul_nt(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    out_dtype: jnp.dtype,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
    """a b^T as :func:`xla_matmul_nt`, by a kernel where that is few bfloat16 rows.

    The kernel reads a layer of stacked weights in place, of which XLA makes a copy.

    Args:
      a: [M, K].
      b: [N, K], of the same dtype.
      out_dtype: of the result.
      implementation: "mosaic" (Hopper GPUs, bfloat16, up to 1,024 rows) or
        "reference"; None takes the best that runs where the program is lowered for.
    """
    (y,) = _matmul(
        a,
        b,
        dtypes=(a.dtype, b.dtype),
        out_dtype=jnp.dtype(out_dtype),
        implementation=implementation,
    )
    return y


def _no_matmul_kernel(a, b, *, dtypes, out_dtype):
    del b
    if set(dtypes) != {jnp.dtype(jnp.bfloat16)}:
        return f"The kernel multiplies bfloat16, got {[d.name for d in dtypes]}."
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f"The kernel stores bfloat16 or float32, got {out_dtype.name}."
    if a[0] > _MAX_KERNEL_ROWS:
        return f"XLA's product is faster than the kernel's for {a[0]} rows."
    return None


_matmul = PlatformFunction(
    "matmul",
    lambda a, b, *, dtypes, out_dtype: [((a[0], b[0]), out_dtype)],
    lambda a, b, *, dtypes, out_dtype: (xla_matmul_nt(a, b, out_dtype),),
    {
        "mosaic": one_at_a_time(
            lambda a, b, *, dtypes, out_dtype: (
                hopper_bf16_gemm.bf16_gemm(a, b, out_dtype=out_dtype),
            )
        )
    },
    no_kernel=_no_matmul_kernel,
)


def scaled_matmul_nt(
    a: ScaledArray,
    b: ScaledArray,
    out_dtype: jnp.dtype,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
    """a b^T of block-scaled operands, [M, K] by [N, K].

    For each block of 128 along K, ascending: the partial product of the codes times the
    product of both scales is added to the accumulator, which is rounded once to
    ``out_dtype``. A row of the result depends on that row of ``a`` alone, never on M.

    Args:
      a: [M, K], scales one per (1 or 128 rows, 128 columns).
      b: [N, K], likewise.
      out_dtype: bfloat16 or float32.
      implementation: "mosaic" (Hopper GPUs), "triton" (NVIDIA GPUs with jax-triton) or
        "reference"; None takes the best that runs where the program is lowered for.

    Raises:
      ValueError: the contracted lengths differ, K is not blocked by 128, or the
        implementation cannot run on the platform.
    """
    if a.shape[1] != b.shape[1] or a.block[1] != BLOCK or b.block[1] != BLOCK:
        raise ValueError(
            f"scaled_matmul_nt needs [M, K] and [N, K] with K in blocks of {BLOCK}, "
            f"got {a.shape} in blocks {a.block} and {b.shape} in blocks {b.block}."
        )
    (y,) = _scaled_matmul(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        block_rows=(a.block[0], b.block[0]),
        out_dtype=jnp.dtype(out_dtype),
        implementation=implementation,
    )
    return y


def add_scaled_matmul_nt(
    buffer: Float[Array, "*L M N"],
    layer: Int[Array, ""] | None,
    a: ScaledArray,
    b: ScaledArray,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*L M N"]:
    """buffer[layer] + a b^T, in place where the program allows it.

    On Hopper the kernel adds its product as it stores it: no array of the product's
    size exists.

    Args:
      buffer: float32, [M, N], or [L, M, N] if there is a ``layer``.
      layer: int32 scalar or None.
      a: [M, K] in 1x128 blocks.
      b: [N, K], likewise.
      implementation: see :func:`scaled_matmul_nt`.

    Raises:
      ValueError: shapes, blocks or the buffer's dtype do not fit.
    """
    shape = (a.shape[0], b.shape[0])
    blocked = a.block == b.block == (1, BLOCK) and a.shape[1] == b.shape[1]
    if not blocked or buffer.shape[layer is not None :] != shape:
        raise ValueError(
            f"add_scaled_matmul_nt needs [M, K] and [N, K] in 1x{BLOCK} blocks and a "
            f"buffer [M, N], or [L, M, N] with a layer, got {a.shape} in {a.block}, "
            f"{b.shape} in {b.block} and {buffer.shape}."
        )
    if buffer.dtype != jnp.float32:
        raise ValueError(f"The buffer must be float32, got {buffer.dtype}.")
    stacked = buffer[None] if layer is None else buffer
    index = jnp.int32(0) if layer is None else layer
    (total,) = _add_scaled_matmul(
        stacked,
        index,
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        implementation=implementation,
    )
    return total[0] if layer is None else total


def _out_types(a, b, a_scales, b_scales, *, block_rows, out_dtype):
    del a_scales, b_scales, block_rows
    return [((a[0], b[0]), out_dtype)]


def _rows(scales: Float[Array, "m k"], block_rows: int, rows: int):
    """One scale per row and block, [K/128, rows]."""
    if block_rows == 1:
        return scales.T
    return jnp.repeat(scales.T, block_rows, axis=1)[:, :rows]


def _reference(a, b, a_scales, b_scales, *, block_rows, out_dtype):
    def by_block(codes, scales, rows):
        """Codes [K/128, rows, 128] and scales [K/128, rows]."""
        size = codes.shape[0]
        codes = pad_to_multiple(codes, (BLOCK,))
        codes = codes.reshape(size, codes.shape[1] // BLOCK, BLOCK)
        return codes.swapaxes(0, 1), _rows(scales, rows, size)

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

    blocks = (
        *by_block(a, a_scales, block_rows[0]),
        *by_block(b, b_scales, block_rows[1]),
    )
    return (by_platform(product, *blocks),)


def _on_gpu(kernel):
    """Wraps a kernel that takes [K/128, rows] scales and K in whole blocks."""

    def run(a, b, a_scales, b_scales, *, block_rows, out_dtype):
        a, b = (pad_to_multiple(x, (BLOCK,)) for x in (a, b))
        a_scales = _rows(a_scales, block_rows[0], a.shape[0])
        if block_rows[1] == 1:
            b_scales = b_scales.T
        y = kernel(
            a, b, a_scales, b_scales, out_dtype=out_dtype, b_block_rows=block_rows[1]
        )
        return (y,)

    return run


@one_at_a_time
def _triton_gemm(*operands, **static):
    capability = round(10 * float(compute_capability()))
    return triton_gemm.scaled_gemm(*operands, compute_capability=capability, **static)


_scaled_matmul = PlatformFunction(
    "scaled_matmul",
    _out_types,
    _reference,
    {
        "mosaic": _on_gpu(hopper_gemm.scaled_gemm),
        "triton": _on_gpu(_triton_gemm),
    },
)


def _product_then_sum(product):
    """Two steps: where no kernel adds what it stores."""

    def run(buffer, layer, *operands):
        (y,) = product(*operands, block_rows=(1, 1), out_dtype=buffer.dtype)
        return (buffer.at[layer].add(y),)

    return run


def _add_on_hopper(buffer, layer, a, b, a_scales, b_scales):
    if buffer.shape[1] % BLOCK or buffer.shape[2] % BLOCK:  # the store cannot be padded
        run = _product_then_sum(_on_gpu(hopper_gemm.scaled_gemm))
        return run(buffer, layer, a, b, a_scales, b_scales)
    a, b = (pad_to_multiple(x, (BLOCK,)) for x in (a, b))
    ref = jax.new_ref(buffer)
    hopper_gemm.scaled_gemm_into(ref, layer, a, b, a_scales.T, b_scales.T)
    return (jax.freeze(ref),)


_add_scaled_matmul = PlatformFunction(
    "add_scaled_matmul",
    lambda buffer, *_: [(buffer, jnp.float32)],
    _product_then_sum(_reference),
    {
        "mosaic": one_at_a_time(_add_on_hopper),
        "triton": _product_then_sum(_on_gpu(_triton_gemm)),
    },
)
