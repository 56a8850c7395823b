"""The Triton GEMM on a GPU, against float64, and its rows against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.kernels.triton_gemm import Tile, scaled_gemm

pytest.importorskip(
    "jax_triton",
    reason="jax-triton or JAX's CUDA plugin is not installed here",
    exc_type=ImportError,
)


def operands(m, n, k, b_block_rows=128):
    """Codes of every bit pattern but NaN, and scales over three orders of magnitude."""
    rng = np.random.default_rng(m + n + k)
    finite = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    blocks = -(-k // 128)
    by_row = (blocks, n)
    b_scales = by_row if b_block_rows == 1 else (-(-n // 128), blocks)
    codes = [rng.choice(finite, s).view(jnp.float8_e4m3fn) for s in ((m, k), (n, k))]
    scales = [
        (10.0 ** rng.uniform(-3, 0, s)).astype(np.float32)
        for s in ((blocks, m), b_scales)
    ]
    return *codes, *scales


@pytest.mark.parametrize("b_block_rows", [1, 128])
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1, 512, 1024), None),
        ((64, 4096, 1024), None),
        ((200, 384, 512), None),
        ((1024, 512, 1024), None),
        ((300, 200, 300), None),
        ((300, 200, 304), Tile(64, 128, 2, 4, 3)),
    ],
)
def test_product_is_close_to_the_exact_one(shape, tile, b_block_rows):
    args = a, b, a_scales, b_scales = operands(*shape, b_block_rows)
    k_block, n_block = np.arange(shape[2]) // 128, np.arange(shape[1]) // 128
    rows = b_scales.T if b_block_rows == 1 else b_scales[n_block]
    x = a.astype(np.float64) * a_scales.T[:, k_block].astype(np.float64)
    y = b.astype(np.float64) * rows[:, k_block].astype(np.float64)
    product, magnitude = x @ y.T, np.abs(x) @ np.abs(y).T
    gemm = functools.partial(scaled_gemm, b_block_rows=b_block_rows, tile=tile)
    out = np.asarray(jax.jit(functools.partial(gemm, out_dtype=jnp.float32))(*args))
    # Hopper aligns the 32 products of an instruction to the largest with 13 bits.
    assert np.all(np.abs(out - product) <= 2.0**-10 * magnitude)
    rounded = np.asarray(jax.jit(gemm)(*args))
    np.testing.assert_array_equal(rounded, out.astype(jnp.bfloat16))


def test_a_row_has_the_same_bits_whatever_the_number_of_rows():
    a, b, a_scales, b_scales = operands(2048, 4096, 1024)
    gemm = jax.jit(functools.partial(scaled_gemm, out_dtype=jnp.float32))
    whole = np.asarray(gemm(a, b, a_scales, b_scales))
    for m in (1, 64, 65, 256, 300):
        some = gemm(a[:m], b, np.ascontiguousarray(a_scales[:, :m]), b_scales)
        np.testing.assert_array_equal(np.asarray(some), whole[:m])
