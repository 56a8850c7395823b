"""The block-ordered products against numpy: bit for bit, and against float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.fp8 import ACTIVATION_BLOCK, WEIGHT_BLOCK, quantize
from fp8rl_jax.fp8.matmul import add_scaled_matmul_nt, matmul_nt, scaled_matmul_nt

matmul = jax.jit(scaled_matmul_nt, static_argnums=2)


def reference_matmul(a, b):
    """Blocks of K ascending, all in float64: partial product times product of scales.

    A partial product of codes is exact; so is a product of two scales.
    """
    (a, a_scales), (b, b_scales) = (
        (
            np.asarray(q.codes, np.float64),
            np.asarray(q.scales, np.float64).repeat(q.block[0], 0)[: q.shape[0]],
        )
        for q in (a, b)
    )
    total = 0.0
    for i in range(a_scales.shape[1]):
        k = np.s_[:, 128 * i : 128 * (i + 1)]
        total = total + a[k] @ b[k].T * (a_scales[:, i, None] * b_scales[None, :, i])
    return total


@pytest.mark.parametrize(
    ("m", "n", "k", "b_block"),
    [
        (3, 5, 128, WEIGHT_BLOCK),
        (130, 200, 300, WEIGHT_BLOCK),
        (17, 33, 1100, WEIGHT_BLOCK),  # more blocks than are unrolled
        (40, 24, 520, ACTIVATION_BLOCK),  # as in wgrad
        (1, 1, 7, WEIGHT_BLOCK),
    ],
)
def test_equals_the_block_ordered_reference(m, n, k, b_block, normal, assert_same_bits):
    a = jax.jit(quantize)(normal((m, k), 1))
    b = jax.jit(quantize, static_argnums=1)(normal((n, k), 2), b_block)
    expected = reference_matmul(a, b).astype(np.float32)
    assert_same_bits(matmul(a, b, jnp.float32), expected)
    assert_same_bits(matmul(a, b, jnp.bfloat16), expected.astype(ml_dtypes.bfloat16))


def test_large_cancelling_sums_keep_their_digits(assert_same_bits):
    # K = 16384: large products, the same negated, then small ones. The running sum
    # reaches 1e5: 14 bits (Hopper's FP8 accumulation without promotion) would be off
    # by about 6 in a result of that size, float32 by about 0.01.
    rng = np.random.default_rng(0)
    large = 1e3 * rng.standard_normal((4, 8192 - 64))
    x = np.concatenate([large, -large, rng.standard_normal((4, 128))], 1)
    a = jax.jit(quantize)(jnp.asarray(x, jnp.float32))
    w = jnp.ones((8, x.shape[1]), jnp.float32)
    b = jax.jit(quantize, static_argnums=1)(w, WEIGHT_BLOCK)
    y = matmul(a, b, jnp.float32)
    assert_same_bits(y, reference_matmul(a, b).astype(np.float32))
    values = np.asarray(a.codes, np.float64) * np.asarray(a.scales, np.float64).repeat(
        128, 1
    )
    np.testing.assert_allclose(y, values.sum(1, keepdims=True) + np.zeros(8), rtol=1e-6)


def test_one_outlier_costs_its_own_block_only(normal, assert_same_bits):
    x = np.array(normal((2, 512), 3, jnp.float32))
    plain = jax.jit(quantize)(jnp.asarray(x))
    x[0, 5] = 1e4
    a = jax.jit(quantize)(jnp.asarray(x))
    b = jax.jit(quantize, static_argnums=1)(normal((6, 512), 4), WEIGHT_BLOCK)
    assert_same_bits(
        matmul(a, b, jnp.float32), reference_matmul(a, b).astype(np.float32)
    )
    changed = np.asarray(a.codes, np.float32) != np.asarray(plain.codes, np.float32)
    assert changed[0, :128].any()
    assert not changed[0, 128:].any() and not changed[1].any()


def test_a_row_does_not_depend_on_the_number_of_rows(normal, assert_same_bits):
    x = normal((160, 640), 5)
    b = jax.jit(quantize, static_argnums=1)(normal((96, 640), 6), WEIGHT_BLOCK)
    whole = matmul(jax.jit(quantize)(x), b, jnp.float32)
    for rows in (np.s_[:1], np.s_[37:38], np.s_[3:20], np.s_[:129]):
        part = matmul(jax.jit(quantize)(x[rows]), b, jnp.float32)
        assert_same_bits(part, whole[rows])


def test_bfloat16_product_is_the_rounded_f64_product(normal, assert_same_bits):
    a, b = normal((33, 1000), 7), normal((20, 1000), 8)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    for dtype in (jnp.float32, jnp.bfloat16):
        y = jax.jit(matmul_nt, static_argnums=2)(a, b, dtype)
        assert_same_bits(y, exact.astype(dtype))


@pytest.fixture
def wgrad_operands(normal):
    """[40, 300] and [24, 300] in 1x128 blocks."""
    return [jax.jit(quantize)(normal((rows, 300), rows)) for rows in (40, 24)]


def test_a_product_is_added_to_its_layer_of_a_buffer(
    wgrad_operands, normal, assert_same_bits
):
    buffer = normal((3, 40, 24), 1, jnp.float32)
    product = reference_matmul(*wgrad_operands).astype(np.float32)
    expected = np.array(buffer)
    expected[2] += product
    total = jax.jit(add_scaled_matmul_nt)(buffer, jnp.int32(2), *wgrad_operands)
    assert_same_bits(total, expected)
    total = jax.jit(add_scaled_matmul_nt)(buffer[2], None, *wgrad_operands)
    assert_same_bits(total, expected[2])


def test_products_of_micro_batches_add_up_under_scan(
    wgrad_operands, normal, assert_same_bits
):
    buffer = normal((2, 40, 24), 1, jnp.float32)

    def step(buffer, layer):
        return add_scaled_matmul_nt(buffer, layer, *wgrad_operands), None

    layers = jnp.array([0, 1, 1], jnp.int32)
    total = jax.jit(lambda b: jax.lax.scan(step, b, layers)[0])(buffer)
    product = reference_matmul(*wgrad_operands).astype(np.float32)
    expected = np.array(buffer)
    for layer in layers:
        expected[layer] += product
    assert_same_bits(total, expected)


@pytest.mark.parametrize("k_and_block", [(256, (1, 128)), (128, (1, 64))])
def test_mismatched_operands_are_named(k_and_block, normal):
    k, block = k_and_block
    a, b = quantize(normal((2, 128))), quantize(normal((2, k)), block)
    with pytest.raises(ValueError, match=r"K in blocks of 128, got \(2, 128\)"):
        scaled_matmul_nt(a, b, jnp.float32)


def test_adding_checks_what_it_is_given():
    a, b = quantize(jnp.ones((8, 128))), quantize(jnp.ones((16, 128)))
    for buffer, layer, right in (
        (jnp.zeros((8, 8)), None, b),
        (jnp.zeros((2, 8, 16)), None, b),
        (jnp.zeros((8, 16)), None, quantize(jnp.ones((16, 128)), WEIGHT_BLOCK)),
    ):
        with pytest.raises(ValueError, match="add_scaled_matmul_nt needs"):
            add_scaled_matmul_nt(buffer, layer, a, right)
    with pytest.raises(ValueError, match="must be float32"):
        add_scaled_matmul_nt(jnp.zeros((8, 16), jnp.bfloat16), None, a, b)


def test_adding_under_vmap_lowers_for_hopper():
    a, b = quantize(jnp.ones((128, 128))), quantize(jnp.ones((256, 128)))
    add = jax.vmap(lambda buffer, layer: add_scaled_matmul_nt(buffer, layer, a, b))
    buffers, layers = jnp.zeros((2, 3, 128, 256)), jnp.array([0, 2], jnp.int32)
    total = jax.jit(add)(buffers, layers)
    np.testing.assert_allclose(total[0, 0], 128.0, rtol=1e-6)
    np.testing.assert_array_equal(total[0, 1:], 0)
    lowered = jax.jit(add).trace(buffers, layers).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
