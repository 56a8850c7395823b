"""The Hopper bfloat16 GEMM in GPU interpret mode against float64; CUDA lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels import hopper_bf16_gemm
from fp8rl_jax.kernels.hopper_bf16_gemm import (
    GemmConfig,
    bf16_gemm,
    choose_config,
    head_logits,
)

INTERPRET = plgpu.InterpretGPUParams()
BF16, F32 = jnp.bfloat16, jnp.float32


def operands(m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(BF16) for s in ((m, k), (n, k))]


def assert_close(out, a, b, factor=1.0):
    """Against the product in float64."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    product, magnitude = factor * (x @ y.T), factor * (np.abs(x) @ np.abs(y).T)
    # One rounding for each term.
    bound = 2.0**-24 * (a.shape[1] + 2) * magnitude
    if out.dtype == BF16:
        bound += 2.0**-8 * (np.abs(product) + bound)
    assert out.shape == product.shape
    assert np.all(np.abs(np.asarray(out, np.float64) - product) <= bound)


@pytest.fixture
def two_thread_blocks(monkeypatch):
    """Few of them, so that each visits several tiles."""
    monkeypatch.setattr(hopper_bf16_gemm, "_NUM_SMS", 2)


# One, two and three compute warpgroups; clusters along both axes, also past the last
# tile; stages for less and for more than one round; one step of K; ragged M, N and K.
@pytest.mark.parametrize(
    ("shape", "out_dtype", "config"),
    [
        ((200, 200, 192), BF16, GemmConfig(2, 256, 1)),
        ((1, 128, 64), F32, GemmConfig(1, 32, 1)),
        ((130, 200, 320), F32, GemmConfig(2, 128, 1, stages=3)),
        ((256, 200, 320), F32, GemmConfig(2, 128, 2, "m", stages=3)),
        ((300, 130, 128), BF16, GemmConfig(3, 128, 2, "n", stages=2)),
        ((200, 200, 128), BF16, GemmConfig(2, 192, 2, "m", raster=1)),
        ((7, 76, 200), F32, GemmConfig(1, 48, 2, "n")),
    ],
)
def test_product(shape, out_dtype, config, two_thread_blocks):
    a, b = operands(*shape)
    out = bf16_gemm(a, b, out_dtype=out_dtype, config=config, interpret=INTERPRET)
    assert out.dtype == out_dtype
    assert_close(out, a, b)


def test_bits_depend_on_no_shape(two_thread_blocks):
    a, b = operands(130, 96, 192)
    whole = bf16_gemm(
        a, b, out_dtype=F32, config=GemmConfig(2, 96, 1), interpret=INTERPRET
    )
    for rows, config in ((70, GemmConfig(1, 48, 2, "n")), (3, GemmConfig(1, 32, 1))):
        part = bf16_gemm(a[:rows], b, out_dtype=F32, config=config, interpret=INTERPRET)
        np.testing.assert_array_equal(part, whole[:rows])


# A chunk inside the head and one at its end, columns masked on both sides, a tile that
# is masked as a whole, thread blocks past the last tile; every row's own factor.
@pytest.mark.parametrize(
    ("rows", "start", "first", "last", "config"),
    [
        (70, 8, 0, 256, GemmConfig(2, 256, 1)),
        (5, 256, 130, 250, GemmConfig(1, 128, 1)),
        (130, 128, 3, 128, GemmConfig(2, 128, 2, "n", stages=2)),
        (130, 0, 0, 5, GemmConfig(1, 256, 2, "m")),
    ],
)
def test_head_logits(rows, start, first, last, config, two_thread_blocks):
    hidden, head = operands(rows, 512, 128)
    factors = np.linspace(0.3, 2.0, rows, dtype=np.float32)
    head_fn = functools.partial(
        head_logits,
        num_columns=256,
        config=config,
        interpret=INTERPRET,
    )
    bounds = np.array([[0, 0, 256], [start, first, last]], np.int32)
    index = jnp.int32(1)
    logits, statistics = jax.jit(head_fn)(hidden, head, bounds, index, factors)
    counts = (np.arange(256) >= first) & (np.arange(256) < last)
    chunk = head[start : start + 256]
    assert np.all(np.isneginf(logits[:, ~counts]))
    assert_close(
        logits[:, counts], hidden, chunk[counts], factors[:, None].astype(np.float64)
    )
    tiles = np.asarray(logits, np.float64).reshape(rows, 2, 128)
    maxima, sums = np.swapaxes(statistics, 1, 2)
    np.testing.assert_array_equal(maxima, tiles.max(-1))
    with np.errstate(invalid="ignore"):
        terms = np.exp(tiles - tiles.max(-1, keepdims=True))
    expected = np.where(np.isneginf(tiles), 0.0, terms).sum(-1)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)


def test_all_columns_masked(two_thread_blocks):
    hidden, head = operands(1, 128, 64)
    logits, (maxima, sums) = head_logits(
        hidden,
        head,
        np.array([[0, 7, 7]], np.int32),
        jnp.int32(0),
        np.ones(1, F32),
        num_columns=128,
        interpret=INTERPRET,
    )
    assert np.all(np.isneginf(logits))
    assert np.all(np.isneginf(maxima))
    assert np.all(sums == 0)


def lower(fn, *shapes):
    structs = [jax.ShapeDtypeStruct(s, BF16) for s in shapes]
    return jax.jit(fn).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


# Lowering refuses a kernel that exceeds the shared memory.
@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (1, 4096, GemmConfig(1, 32, 2, "n")),
        (64, 6144, GemmConfig(1, 48, 2, "n")),
        (64, 24576, GemmConfig(1, 192, 2, "n")),
        (128, 4096, GemmConfig(1, 64, 2, "m")),
        (128, 12288, GemmConfig(2, 96, 2, "n")),
        (320, 4096, GemmConfig(2, 96, 1)),
        (256, 4096, GemmConfig(2, 64, 2, "n")),
        (256, 24576, GemmConfig(2, 192, 2, "m")),
        (512, 4096, GemmConfig(2, 128, 2, "m")),
        (8192, 12288, GemmConfig(2, 256, 2, "m")),
    ],
)
def test_the_rule_gives_configurations_that_lower(m, n, config):
    assert choose_config(m, n) == config
    for out_dtype in (BF16, F32):
        gemm = functools.partial(bf16_gemm, out_dtype=out_dtype)
        assert "@mosaic_gpu" in lower(gemm, (m, 4096), (n, 4096))


@pytest.mark.parametrize("m", [64, 512, 8192])
def test_the_head_lowers_without_a_copy(m):
    bounds, index = np.zeros((38, 3), np.int32), jnp.int32(37)

    def head(hidden, head):
        return head_logits(hidden, head, bounds, index, jnp.ones(m))

    text = lower(head, (m, 4096), (151936, 4096))
    assert "@mosaic_gpu" in text
    assert "dynamic_slice" not in text


@pytest.mark.parametrize(
    ("a", "b", "dtype", "message"),
    [
        ((64, 128), (64, 64), BF16, r"\(64, 128\) and b \(64, 64\) are no"),
        ((64, 0), (64, 0), BF16, "are no"),
        ((128,), (64, 128), BF16, "are no"),
        ((64, 128), (64, 128), F32, "must be bfloat16, got float32"),
    ],
)
def test_bad_operands_are_named(a, b, dtype, message):
    structs = [jax.ShapeDtypeStruct(s, dtype) for s in (a, b)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(bf16_gemm, *structs)


@pytest.mark.parametrize(
    ("num_columns", "tile_n", "message"),
    [
        (200, 128, "The columns come in tiles of 128, got 200"),
        (256, 192, "Tiles of 192 columns hold no whole 128"),
    ],
)
def test_parts_of_tiles_are_refused(num_columns, tile_n, message):
    hidden, head = operands(8, 256, 64)
    config = GemmConfig(2, tile_n, 1)
    with pytest.raises(ValueError, match=message):
        head_logits(
            hidden,
            head,
            np.array([[0, 0, 8]], np.int32),
            jnp.int32(0),
            np.ones(8, F32),
            num_columns=num_columns,
            config=config,
        )
