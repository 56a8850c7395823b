"""Block quantisation against numpy and ml_dtypes, and its edge cases."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8rl_jax.fp8 import ScaledArray, dequantize, quantize
from fp8rl_jax.fp8.quantize import quantize_both, quantize_weight, round_e4m3

E4M3 = ml_dtypes.float8_e4m3fn
jit_quantize = jax.jit(quantize, static_argnums=1, static_argnames="power_of_two")


def all_bfloat16():
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return x[np.isfinite(x.astype(np.float32))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_e4m3_is_the_saturating_cast_for_all_bfloat16_values(
    dtype, assert_same_bits
):
    x = all_bfloat16().astype(dtype)
    expected = np.clip(x.astype(np.float32), -448, 448).astype(E4M3)
    rounded = jax.jit(round_e4m3)(x)
    assert rounded.dtype == x.dtype
    # Exact in e4m3 already: the cast afterwards changes nothing.
    np.testing.assert_array_equal(
        np.asarray(rounded, np.float32), expected.astype(np.float32)
    )
    assert_same_bits(rounded.astype(jnp.float8_e4m3fn), expected)


def test_round_e4m3_ties_and_saturation():
    x = jnp.array([17, 19, 17.001, 2.0**-10, 3 * 2.0**-10, 463, 465, 1e30, jnp.inf])
    expected = [16, 20, 18, 0, 2.0**-8, 448, 448, 448, 448]
    np.testing.assert_array_equal(jax.jit(round_e4m3)(x), expected)
    np.testing.assert_array_equal(jax.jit(round_e4m3)(-x), -np.array(expected))
    assert jnp.isnan(round_e4m3(jnp.float32(jnp.nan)))


def test_a_float32_source_is_not_rounded_through_bfloat16():
    # 17.001 / 16 is above a tie; bfloat16 would move it onto the tie, and down.
    x = jnp.array([[448.0, 17.001]])
    codes = jit_quantize(x).codes.astype(jnp.float32)
    np.testing.assert_array_equal(codes, [[448, 18]])
    codes = jit_quantize(x.astype(jnp.bfloat16)).codes.astype(jnp.float32)
    np.testing.assert_array_equal(codes, [[448, 16]])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    [
        ((5, 256), (1, 128), "bfloat16"),
        ((3, 300), (1, 128), "float32"),
        ((256, 128), (128, 128), "float32"),
        ((130, 257), (128, 128), "bfloat16"),
        ((7, 64), (1, 64), "bfloat16"),
        ((1, 1), (1, 128), "float32"),
    ],
)
def test_codes_and_scales_equal_the_reference(
    shape, block, dtype, power_of_two, ref, assert_same_bits
):
    # Heavy tails, blocks of very different magnitude.
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, shape) * 10.0 ** rng.integers(-8, 8, (shape[0], 1))
    x = jnp.asarray(x, dtype)
    q = jit_quantize(x, block, power_of_two=power_of_two)
    codes, scales = ref.quantize(x, block, power_of_two)
    assert q.block == block and q.shape == shape
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.codes, codes)
    if power_of_two:
        values = np.asarray(dequantize(q), np.float64)
        expanded = ref.repeat_scales(scales.astype(np.float64), block, shape)
        np.testing.assert_array_equal(values, codes.astype(np.float64) * expanded)


@pytest.mark.parametrize(
    ("power_of_two", "fraction"),
    # Half a unit of the top binade, 16, against a largest code of 448 (exact scales)
    # or of at least 256 (scales rounded up to a power of two).
    [(False, 1 / 28), (True, 1 / 16)],
)
def test_dequantisation_error_is_bounded_by_the_amax(power_of_two, fraction, normal):
    x = normal((128, 512), dtype=jnp.float32)
    q = jit_quantize(x, (1, 128), power_of_two=power_of_two)
    error = np.abs(np.asarray(dequantize(q, jnp.float32)) - np.asarray(x))
    error = error.reshape(128, 4, 128).max(-1)
    amax = np.abs(np.asarray(x)).reshape(128, 4, 128).max(-1)
    assert (error <= amax * fraction * (1 + 1e-6)).all()
    assert (error > amax * fraction / 2).any()


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_zero_blocks(block):
    x = np.ones((256, 256), np.float32)
    x[:128, :128] = 0  # a whole block
    x[130] = 0  # a row
    x[:, 255] = 0  # a column
    q = jit_quantize(jnp.asarray(x), block)
    assert q.scales[0, 0] == 1.0
    np.testing.assert_array_equal(dequantize(q, jnp.float32), x)
    zeros = jit_quantize(jnp.zeros((3, 5), jnp.bfloat16), block)
    np.testing.assert_array_equal(zeros.scales, np.ones_like(zeros.scales))
    np.testing.assert_array_equal(zeros.codes.astype(jnp.float32), np.zeros((3, 5)))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_block_with_a_non_finite_value_stays_non_finite(bad, power_of_two):
    x = np.ones((2, 256), np.float32)
    x[0, 3] = bad
    q = jit_quantize(jnp.asarray(x), (1, 128), power_of_two=power_of_two)
    finite = np.isfinite(np.asarray(dequantize(q, jnp.float32)))
    assert not finite[0, :128].any()
    assert finite[0, 128:].all() and finite[1].all()


@pytest.mark.parametrize("amax", [2.0**-118, 2.0**-126, 1e-42])
def test_tiny_blocks_are_finite(amax):
    # Above 448 * 2^-126 the scale is normal; below, the block counts as zero.
    x = jnp.full((1, 128), amax, jnp.float32)
    q = jit_quantize(x, (1, 128))
    if amax >= 448 * 2.0**-126:
        np.testing.assert_allclose(dequantize(q, jnp.float32), x, rtol=1e-6)
    else:
        assert q.scales[0, 0] == 1.0
        np.testing.assert_array_equal(q.codes.astype(jnp.float32), np.zeros((1, 128)))


def test_a_block_does_not_depend_on_its_neighbours(normal, assert_same_bits):
    x = normal((4, 384))
    whole, part = jit_quantize(x), jit_quantize(x[1:2, 128:256])
    assert_same_bits(whole.codes[1:2, 128:256], part.codes)
    assert_same_bits(whole.scales[1:2, 1:2], part.scales)


def test_dequantize_rounds_once(ref, normal):
    x = normal((3, 200), dtype=jnp.float32)
    q = jit_quantize(x)
    exact = ref.values(x, (1, 128))
    values = jax.jit(dequantize, static_argnums=1)(q, jnp.float32)
    np.testing.assert_array_equal(values, exact.astype(np.float32))
    # A product of 4 + 24 bits, rounded to float32 and from there to bfloat16.
    bf16 = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(dequantize)(q), np.float32), bf16.astype(np.float32)
    )


def test_transpose_of_weight_codes_is_the_quantised_transpose(normal, assert_same_bits):
    w = normal((200, 300), dtype=jnp.float32)
    a, b = jit_quantize(w, (128, 128)).mT, jit_quantize(w.T, (128, 128))
    assert a.block == b.block
    assert_same_bits(a.codes, b.codes)
    assert_same_bits(a.scales, b.scales)
    # A 1x128 transpose has another block: it may not pass for a quantised transpose.
    assert jit_quantize(w).mT.block == (128, 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(5, 256), (200, 300), (1, 1)])
def test_both_layouts_are_those_of_the_matrix_and_of_its_transpose(
    shape, dtype, normal, ref, assert_same_bits
):
    x = normal(shape, dtype=dtype)
    for q, source in zip(jax.jit(quantize_both)(x), (x, x.T), strict=True):
        codes, scales = ref.quantize(source, (1, 128))
        assert q.block == (1, 128)
        assert_same_bits(q.codes, codes)
        assert_same_bits(q.scales, scales)


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (2, 3, 130, 72)])
def test_a_weight_and_its_transpose_have_the_same_codes(
    shape, normal, ref, assert_same_bits
):
    w = normal(shape, dtype=jnp.float32)
    q, q_t = jax.jit(quantize_weight)(w)
    assert q.block == q_t.block == (128, 128)
    for index in np.ndindex(shape[:-2]):
        codes, scales = ref.quantize(w[index], (128, 128))
        assert_same_bits(q.codes[index], codes)
        assert_same_bits(q.scales[index], scales)
        assert_same_bits(q_t.codes[index], codes.T)
        assert_same_bits(q_t.scales[index], scales.T)


def scanned(x):
    return jax.lax.scan(lambda _, row: (None, quantize(row)), None, x)[1]


def sharded(x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P("data")
    return jax.shard_map(quantize, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    "transformed",
    [quantize, jax.vmap(quantize), scanned, jax.checkpoint(quantize), sharded],
    ids=["leading axis", "vmap", "scan", "remat", "shard_map"],
)
def test_same_bits_under_transforms(transformed, normal, ref, assert_same_bits):
    x = normal((8, 3, 200))
    q = jax.jit(transformed)(x)
    assert isinstance(q, ScaledArray)
    for i in range(8):
        codes, scales = ref.quantize(x[i], (1, 128))
        assert_same_bits(q.codes[i], codes)
        assert_same_bits(q.scales[i], scales)


def test_no_gradient_flows_through_quantisation(normal):
    def loss(x):
        return dequantize(quantize(x), jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))(normal((2, 128)))
    np.testing.assert_array_equal(gradient, np.zeros((2, 128)))


@pytest.mark.parametrize("function", [quantize_both, quantize_weight])
def test_no_gradient_flows_through_two_layouts(function, normal):
    def loss(x):
        return sum(dequantize(q, jnp.float32).sum() for q in function(x))

    gradient = jax.jit(jax.grad(loss))(normal((2, 128)))
    np.testing.assert_array_equal(gradient, np.zeros((2, 128)))


@pytest.mark.parametrize(("shape", "block"), [((128,), (1, 128)), ((2, 2), (0, 128))])
def test_bad_input_is_named(shape, block):
    with pytest.raises(ValueError, match="at least two axes and a positive block"):
        quantize(jnp.ones(shape), block)


def test_blocks_without_a_kernel_are_refused_where_one_is_asked_for():
    for kwargs in (dict(block=(1, 64)), dict(power_of_two=True)):
        with pytest.raises(ValueError, match="Kernels quantise blocks"):
            quantize(jnp.ones((8, 128)), implementation="mosaic", **kwargs)
