"""The Hopper GEMM in GPU interpret mode against float64; arguments, CUDA lowering."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels import hopper_gemm, tuning
from fp8rl_jax.kernels.hopper_gemm import (
    GemmConfig,
    choose_config,
    scaled_gemm,
    scaled_gemm_into,
)

INTERPRET = plgpu.InterpretGPUParams()
E4M3 = jnp.float8_e4m3fn


def operands(m, n, k, b_block_rows=128, seed=0):
    """Codes of every bit pattern but NaN, and scales over three orders of magnitude."""
    rng = np.random.default_rng(seed)
    finite = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    blocks = k // 128
    b_scales = (blocks, n) if b_block_rows == 1 else (-(-n // 128), blocks)
    codes = [rng.choice(finite, s).view(E4M3) for s in ((m, k), (n, k))]
    scales = [
        (10.0 ** rng.uniform(-3, 0, s)).astype(np.float32)
        for s in ((blocks, m), b_scales)
    ]
    return *codes, *scales


def structs(m, n, k, b_block_rows=128):
    blocks = k // 128
    b_scales = (blocks, n) if b_block_rows == 1 else (-(-n // 128), blocks)
    return (
        jax.ShapeDtypeStruct((m, k), E4M3),
        jax.ShapeDtypeStruct((n, k), E4M3),
        jax.ShapeDtypeStruct((blocks, m), jnp.float32),
        jax.ShapeDtypeStruct(b_scales, jnp.float32),
    )


def assert_close(out, a, b, a_scales, b_scales, b_block_rows):
    """Against the product of the dequantised operands in float64."""
    k_block, n_block = np.arange(a.shape[1]) // 128, np.arange(b.shape[0]) // 128
    rows = b_scales.T if b_block_rows == 1 else b_scales[n_block]
    x = a.astype(np.float64) * a_scales.T[:, k_block].astype(np.float64)
    y = b.astype(np.float64) * rows[:, k_block].astype(np.float64)
    product, magnitude = x @ y.T, np.abs(x) @ np.abs(y).T
    # The interpreter multiplies in float32: one rounding for each of a block's terms
    # and of the blocks, one each for the product of the scales and that with it.
    bound = 2.0**-24 * (130 + a.shape[1] // 128) * magnitude
    if out.dtype == jnp.bfloat16:
        bound += 2.0**-8 * (np.abs(product) + bound)
    assert out.shape == product.shape
    assert np.all(np.abs(np.asarray(out, np.float64) - product) <= bound)


@pytest.fixture
def two_thread_blocks(monkeypatch):
    """Few of them, so that each visits several tiles."""
    monkeypatch.setattr(hopper_gemm, "_NUM_SMS", 2)


BF16, F32 = jnp.bfloat16, jnp.float32


# One, two and three compute warpgroups; clusters along both axes, also past the last
# tile; stages for less and for more than one round; blocks of K that unrolling leaves
# over; ragged M and N; a tile of 192 over the borders of weight blocks.
@pytest.mark.parametrize(
    ("shape", "out_dtype", "config"),
    [
        ((200, 200, 384), BF16, GemmConfig(cluster=1)),
        ((1, 128, 128), F32, GemmConfig(cluster=1)),
        ((130, 200, 768), F32, GemmConfig(2, 128, 3, unroll=4, cluster=1)),
        ((200, 300, 256), F32, GemmConfig(cluster=2, cluster_axis="n")),
        ((200, 200, 256), BF16, GemmConfig(cluster=2, cluster_axis="m", raster=1)),
        ((7, 64, 512), F32, GemmConfig(1, 32, 16, unroll=4, in_flight=4, cluster=1)),
        ((70, 200, 512), BF16, GemmConfig(1, 64, 3, unroll=2, in_flight=2, cluster=1)),
        ((5, 330, 256), F32, GemmConfig(1, 192, 4, unroll=1, cluster=1)),
        ((130, 400, 256), BF16, GemmConfig(2, 192, 2, unroll=1, cluster=2)),
    ],
)
def test_weight_product(shape, out_dtype, config, two_thread_blocks):
    args = operands(*shape)
    out = scaled_gemm(*args, out_dtype=out_dtype, config=config, interpret=INTERPRET)
    assert out.dtype == out_dtype
    assert_close(out, *args, 128)


@pytest.mark.parametrize(
    ("shape", "out_dtype", "config"),
    [
        ((200, 72, 256), F32, GemmConfig(unroll=1, cluster=1)),
        ((100, 330, 384), F32, GemmConfig(2, 128, 3, unroll=1, cluster_axis="m")),
        ((70, 200, 512), BF16, GemmConfig(1, 64, 4, unroll=2, in_flight=2)),
    ],
)
def test_wgrad_product(shape, out_dtype, config, two_thread_blocks):
    args = operands(*shape, b_block_rows=1)
    gemm = functools.partial(scaled_gemm, b_block_rows=1, out_dtype=out_dtype)
    assert_close(gemm(*args, config=config, interpret=INTERPRET), *args, 1)


def test_vmap_and_scan(two_thread_blocks):
    config = GemmConfig(1, 64, 4, unroll=1, cluster=1)
    gemm = functools.partial(scaled_gemm, config=config, interpret=INTERPRET)
    a, _, a_scales, _ = shared = operands(40, 128, 256)
    layers = [operands(40, 128, 256, seed=i) for i in (1, 2)]
    b, b_scales = (np.stack([x[i] for x in layers]) for i in (1, 3))
    mapped = jax.jit(jax.vmap(gemm, (None, 0, None, 0)))(a, b, a_scales, b_scales)
    scanned = jax.jit(
        lambda xs: jax.lax.scan(
            lambda _, x: (None, gemm(a, x[0], a_scales, x[1])), None, xs
        )[1]
    )((b, b_scales))
    for i in range(2):
        args = shared[0], b[i], shared[2], b_scales[i]
        assert_close(mapped[i], *args, 128)
        assert_close(scanned[i], *args, 128)


def lower(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


# One for each rule; `python -m benchmarks.gemm --tune` has replaced some for the shapes
# that it measured. Lowering refuses a kernel that exceeds the shared memory.
@pytest.mark.parametrize(
    ("m", "n", "k", "b_block_rows"),
    [
        (1, 4096, 4096, 128),
        (64, 24576, 4096, 128),
        (128, 6144, 4096, 128),
        (128, 12288, 4096, 128),
        (256, 4096, 12288, 128),
        (256, 24576, 4096, 128),
        (8192, 12288, 4096, 128),
        (4096, 12288, 8192, 1),
    ],
)
def test_rules_give_configurations_that_lower(m, n, k, b_block_rows, monkeypatch):
    monkeypatch.setattr(tuning, "lookup", lambda *_: None)
    for out_dtype in (jnp.bfloat16, jnp.float32):
        gemm = functools.partial(
            scaled_gemm, b_block_rows=b_block_rows, out_dtype=out_dtype
        )
        assert "@mosaic_gpu" in lower(gemm, *structs(m, n, k, b_block_rows))


def test_tuned_configurations_lower():
    configs = {GemmConfig(**c) for c in tuning._table("hopper_gemm").values()}
    for config in configs:
        gemm = functools.partial(scaled_gemm, config=config, out_dtype=jnp.float32)
        assert "@mosaic_gpu" in lower(gemm, *structs(256, 4096, 1024))


def test_a_configuration_past_the_shared_memory_is_refused():
    gemm = functools.partial(scaled_gemm, config=GemmConfig(stages=16))
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lower(gemm, *structs(256, 256, 256))


def add_product(buffer, layer, *args, **kwargs):
    ref = jax.new_ref(buffer)
    scaled_gemm_into(ref, layer, *args, **kwargs)
    return jax.freeze(ref)


def into_structs(m, n, k, buffer, dtype=jnp.float32):
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct(buffer, dtype), layer, *structs(m, n, k, 1)


def test_the_product_in_place_lowers_to_a_call_that_aliases_the_buffer():
    # Interpret mode has no TMA reduction; tests/gpu judges the numbers.
    text = lower(add_product, *into_structs(256, 384, 1024, (3, 256, 384)))
    (call,) = (line for line in text.splitlines() if "@mosaic_gpu" in line)
    assert "output_operand_alias" in call
    assert call.endswith("tensor<3x256x384xf32>")


@pytest.mark.parametrize(
    ("buffer", "dtype"),
    [
        ((3, 256, 128), jnp.float32),
        ((3, 384, 256), jnp.float32),
        ((3, 256, 384), jnp.bfloat16),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer, dtype):
    args = into_structs(256, 384, 128, buffer, dtype)
    with pytest.raises(ValueError, match=r"The buffer must be float32 \[L, 256, 384\]"):
        jax.eval_shape(add_product, *args)


def test_a_buffer_of_ragged_blocks_is_refused():
    args = into_structs(256, 200, 128, (3, 256, 200))
    with pytest.raises(ValueError, match="with whole blocks of 128"):
        jax.eval_shape(add_product, *args)


@pytest.mark.parametrize(
    ("index", "shape", "dtype", "message"),
    [
        (0, (64, 256), jnp.bfloat16, r"a must be e4m3 \[M, K\]"),
        (0, (64, 200), E4M3, "K in blocks of 128"),
        (0, (64, 0), E4M3, "K in blocks of 128"),
        (1, (300, 256), jnp.float8_e5m2, r"b must be float8_e4m3fn \(300, 256\)"),
        (1, (300, 128), E4M3, r"b must be float8_e4m3fn \(300, 256\)"),
        (2, (64, 2), jnp.float32, r"a_scales must be float32 \(2, 64\)"),
        (2, (2, 64), jnp.bfloat16, "a_scales must be float32"),
        (3, (2, 2), jnp.float32, r"b_scales must be float32 \(3, 2\)"),
        (3, (2, 300), jnp.float32, r"b_scales must be float32 \(3, 2\)"),
    ],
)
def test_bad_arguments_are_named(index, shape, dtype, message):
    args = list(structs(64, 300, 256))
    args[index] = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(scaled_gemm, *args)


def test_scales_of_a_weight_are_refused_in_wgrad():
    with pytest.raises(ValueError, match=r"b_scales must be float32 \(2, 300\)"):
        jax.eval_shape(
            functools.partial(scaled_gemm, b_block_rows=1), *structs(64, 300, 256)
        )


@pytest.mark.parametrize(
    ("m", "bucket"),
    [
        (1, 64),
        (64, 64),
        (65, 128),
        (128, 128),
        (300, 512),
        (8192, 8192),
        (8193, 8192),
        (10**6, 8192),
    ],
)
def test_bucket(m, bucket):
    assert tuning.bucket(m) == bucket


def test_lookup_reads_the_table(tmp_path, monkeypatch):
    config = {"tile_n": 64, "stages": 8}
    table = [{"m": 128, "n": 4096, "k": 1024, "config": config}]
    (tmp_path / "a_kernel.json").write_text(json.dumps(table))
    monkeypatch.setattr(
        tuning, "resources", types.SimpleNamespace(files=lambda _: tmp_path)
    )
    assert tuning.lookup("a_kernel", 65, 4096, 1024) == config
    assert tuning.lookup("a_kernel", 128, 4096, 1024) == config
    for shape in ((64, 4096, 1024), (129, 4096, 1024), (128, 4096, 2048)):
        assert tuning.lookup("a_kernel", *shape) is None


def test_a_tuned_configuration_takes_precedence(monkeypatch):
    tuned = {"warpgroups": 2, "tile_n": 64, "cluster": 1}
    monkeypatch.setattr(tuning, "lookup", lambda *shape: tuned)
    assert choose_config(64, 4096, 4096, False) == GemmConfig(2, 64, cluster=1)
    # Wgrad has no table.
    assert choose_config(4096, 4096, 4096, True) == GemmConfig(unroll=1)
