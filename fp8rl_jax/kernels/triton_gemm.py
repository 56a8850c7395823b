"""Block-scaled FP8 GEMM in Triton, for NVIDIA GPUs without a wgmma kernel.

One kernel serves Ampere and everything after it. Triton and jax-triton are optional and
imported by the first call only.

References:
  DeepSeek-AI. "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2 (partial
  sums promoted to float32 every 128 of K).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn

BLOCK = 128
# From Ada on, tensor cores take e4m3 operands; before, Triton does not know the type.
_FIRST_FP8_CAPABILITY = 89
# Row blocks whose programs run side by side and share their blocks of b in L2.
_GROUP_M = 16


class Tile(NamedTuple):
    """How the output is cut into programs.

    Attributes:
      block_m: rows of one `tl.dot`; at least 64, so that Hopper runs it as wgmma.
      block_n: columns of a program, a divisor of 128: one weight scale per K block.
      num_dots: dots per program and K block, one below the other. They share a block
        of b, and only one of their products occupies registers at a time.
      num_warps: warps of a program.
      num_stages: K blocks in shared memory, in flight or in use.
    """

    block_m: int
    block_n: int
    num_dots: int
    num_warps: int
    num_stages: int


def choose_tile(m: int, n: int, b_block_rows: int, compute_capability: int) -> Tile:
    """The tile for an [m, n] product.

    Every tile adds the same terms in the same order.

    Args:
      m: rows.
      n: columns.
      b_block_rows: as in :func:`scaled_gemm`.
      compute_capability: as in :func:`scaled_gemm`.
    """
    # Shared memory per program: 227 KiB on the data-centre parts from Hopper on, 99 KiB
    # on most others.
    large = compute_capability in (90, 100, 103)
    if m <= 64:  # decode: bound by reading b, so many small programs
        if n < 16384:
            return Tile(64, 32, 1, 4, 8 if large else 6)
        return Tile(64, 128, 1, 4, 4)
    if m <= 256 or not large:
        return Tile(64, 128, 1, 4, 3)
    # A scale per column takes the registers of a second product; on Blackwell the
    # copies out of tensor memory do.
    if b_block_rows == 1:
        return Tile(128, 64, 1, 8, 4)
    if compute_capability == 90:
        return Tile(64, 128, 2, 4, 3)
    return Tile(128, 128, 1, 8, 4)


def scaled_gemm(
    a: Float8e4m3fn[Array, "M K"],
    b: Float8e4m3fn[Array, "N K"],
    a_scales: Float[Array, "K_blocks M"],
    b_scales: Float[Array, "..."],
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    b_block_rows: int = BLOCK,
    tile: Tile | None = None,
    compute_capability: int | None = None,
) -> Float[Array, "M N"]:
    """a b^T of operands in e4m3 with one scale per block.

    For each block of 128 along K, ascending: the product of the codes times the product
    of both scales is added in float32; the sum is rounded once to ``out_dtype``. A row
    of the result depends on that row of ``a`` alone. M, N and K may be ragged. Rows of
    a multiple of 16 codes (K % 16 == 0) load fastest.

    Not differentiable, no batching rule, CUDA only. Before Ada the codes are multiplied
    as float16, exactly, except that a NaN code counts as +-480: `fp8.quantize` marks a
    block that holds NaN in its scale as well.

    Args:
      a: [M, K] codes.
      b: [N, K] codes.
      a_scales: float32 [ceil(K / 128), M]: one per row and block of K.
      b_scales: float32 [ceil(N / 128), ceil(K / 128)] if ``b_block_rows`` is 128
        (weights), or [ceil(K / 128), N] if it is 1 (laid out as ``a_scales``).
      out_dtype: bfloat16 or float32.
      b_block_rows: rows of ``b`` that share a scale, 128 or 1.
      tile: how to cut the output; :func:`choose_tile` if None.
      compute_capability: of the GPU to lower for, ten times the major number plus the
        minor one: 90 for Hopper, at least 80. The first CUDA device's if None.

    Raises:
      ValueError: dtypes or shapes do not fit, ``tile`` does not, the GPU is older than
        Ampere, or there is no CUDA device and no ``compute_capability``.
      ImportError: jax-triton, Triton or JAX's CUDA plugin is missing.
    """
    _check(a, b, a_scales, b_scales, jnp.dtype(out_dtype), b_block_rows)
    (m, k), n = a.shape, b.shape[0]
    if compute_capability is None:
        compute_capability = _device_compute_capability()
    if compute_capability < 80:
        raise ValueError(f"Needs compute capability 80, got {compute_capability}.")
    if tile is None:
        tile = choose_tile(m, n, b_block_rows, compute_capability)
    if tile.block_m < 64 or BLOCK % tile.block_n:
        raise ValueError(f"tile {tile}: block_m < 64 or block_n does not divide 128.")
    triton_call, kernel = _load()
    fp8_dot = compute_capability >= _FIRST_FP8_CAPABILITY
    if not fp8_dot:
        a, b = (lax.bitcast_convert_type(x, jnp.uint8) for x in (a, b))
    return triton_call(
        a,
        b,
        a_scales,
        b_scales,
        m,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(_cdiv(m, tile.block_m * tile.num_dots) * _cdiv(n, tile.block_n),),
        name="scaled_gemm",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        compute_capability=compute_capability,
        N=n,
        K=k,
        B_BLOCK_ROWS=b_block_rows,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_DOTS=tile.num_dots,
        GROUP_M=_GROUP_M,
    )


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _check(a, b, a_scales, b_scales, out_dtype, b_block_rows) -> None:
    if b_block_rows not in (1, BLOCK):
        raise ValueError(f"b_block_rows must be 1 or {BLOCK}, got {b_block_rows}.")
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must be [M, K] and [N, K]: {a.shape}, {b.shape}.")
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        raise ValueError(f"a and b must not be empty: {a.shape}, {b.shape}.")
    num_blocks = _cdiv(k, BLOCK)
    by_row = (num_blocks, n)
    expected = {
        "a": (a, jnp.float8_e4m3fn, (m, k)),
        "b": (b, jnp.float8_e4m3fn, (n, k)),
        "a_scales": (a_scales, jnp.float32, (num_blocks, m)),
        "b_scales": (
            b_scales,
            jnp.float32,
            by_row if b_block_rows == 1 else (_cdiv(n, BLOCK), num_blocks),
        ),
    }
    for name, (x, dtype, shape) in expected.items():
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name} {list(shape)}, "
                f"got {x.dtype.name} {list(x.shape)}."
            )


def _device_compute_capability() -> int:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as e:
        raise ValueError("No CUDA device: pass compute_capability=.") from e
    return round(10 * float(device.compute_capability))


def _load():
    """`jax_triton.triton_call` and the kernel."""
    try:
        # jax_triton fails as well where JAX has no CUDA plugin.
        from jax_triton import triton_call

        from fp8rl_jax.kernels.triton_gemm_kernel import scaled_gemm_kernel
    except ImportError as e:
        raise ImportError(
            "scaled_gemm needs jax-triton and JAX's CUDA plugin: "
            "pip install 'fp8rl_jax[triton,cuda13]'."
        ) from e
    return triton_call, scaled_gemm_kernel
