"""Quantisation kernels on a Hopper GPU, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_quantize import (
    assert_codes,
    assert_same,
    awkward,
    blocks,
    normal,
    taking_turns,
    to_bf16,
    wide,
)

from fp8rl_jax.kernels import hopper_norm_quantize as norm
from fp8rl_jax.kernels import hopper_quantize as hopper
from fp8rl_jax.kernels import hopper_silu_quantize as silu

BF16 = jnp.bfloat16


def fraction_of_codes_off(out, y):
    """How many codes are not those of ``y``, none of them by more than a step."""
    for codes, expected in (
        (out.codes, blocks(y)[0]),
        (out.codes_t, blocks(np.asarray(y).T)[0]),
    ):
        codes, expected = (np.asarray(x).astype(np.float32) for x in (codes, expected))
        np.testing.assert_allclose(codes, expected, rtol=0.13, atol=2.0**-9)
        yield (codes != expected).mean()


# One row; ragged; tiles of 32 rows; tiles of 128.
@pytest.mark.parametrize(
    ("m", "k", "dtype"),
    [
        (1, 512, jnp.bfloat16),
        (1001, 200, jnp.float32),
        (8192, 512, jnp.bfloat16),
        (1100, 12288, jnp.bfloat16),
    ],
)
def test_rows(m, k, dtype):
    x = awkward(0, m, k, dtype)
    codes, scales = hopper.quantize_rows(x)
    expected_codes, expected_scales = blocks(x)
    assert_same(codes, expected_codes)
    assert_same(scales, expected_scales.T)


@pytest.mark.parametrize(("m", "k"), [(72, 512), (1001, 200), (2048, 1024)])
def test_both(m, k):
    x = awkward(1, m, k, BF16)
    assert_codes(hopper.quantize_both(x), x)


def test_columns():
    x = awkward(2, 1001, 384, BF16)
    columns = hopper.Quantized(None, None, *hopper.quantize_columns(x))
    assert_codes(columns, x, rows=False)


def test_weight():
    w = jnp.stack([awkward(seed, 520, 384, jnp.float32) for seed in (3, 4)])
    codes, scales, codes_t = hopper.quantize_weight(w)
    for i in range(2):
        expected_codes, expected_scales = blocks(w[i], (128, 128))
        assert_same(codes[i], expected_codes)
        assert_same(scales[i], expected_scales)
        assert_same(codes_t[i], expected_codes.T)


def test_silu_mul_and_its_gradient():
    gate, up, dy = normal(5, 1000, 512) * 3, normal(6, 1000, 512), normal(7, 1000, 512)
    gate_up = jnp.asarray(taking_turns(gate, up))
    out = silu.silu_mul_quantize(gate_up)
    backward = silu.silu_mul_backward_quantize(dy, gate_up)
    gate, up, dy = wide(gate), wide(up), wide(dy)
    sigmoid = 1 / (1 + np.exp(-gate))
    for off in fraction_of_codes_off(out, to_bf16(gate * sigmoid * up)):
        assert off < 1e-3
    dgate = dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    dgate_up = to_bf16(taking_turns(dgate, dy * gate * sigmoid))
    for off in fraction_of_codes_off(backward, dgate_up):
        assert off < 1e-3


def test_silu_mul_of_few_rows_equals_that_of_many():
    gate_up = normal(7, 1000, 1024) * 3
    many = silu.silu_mul_quantize(gate_up)
    few = silu.silu_mul_quantize(gate_up[40:104], columns=False)
    assert_same(few.codes, many.codes[40:104])
    assert_same(few.scales, many.scales[:, 40:104])


# Odd, two, four and eight blocks: each way of laying rows over a warpgroup.
@pytest.mark.parametrize("k", [384, 256, 2560, 4096])
def test_add_norm(k):
    residual, update = normal(8, 1000, k) * 3, normal(9, 1000, k)
    scale = jnp.exp(0.2 * normal(10, k, dtype=jnp.float32))
    out = norm.add_norm_quantize(
        residual, update, scale, eps=1e-6, columns=True, normed=True
    )
    total = to_bf16(wide(residual) + wide(update))
    assert_same(out.residual, total)
    inverse = 1 / np.sqrt((wide(total) ** 2).mean(axis=1) + 1e-6)
    np.testing.assert_allclose(out.inverse_rms, inverse, rtol=1e-6)
    normed = to_bf16(wide(total) * inverse[:, None] * wide(scale))
    assert (wide(out.normed) != wide(normed)).mean() < 1e-3
    np.testing.assert_allclose(wide(out.normed), wide(normed), rtol=2.0**-7)
    # The second kernel computes the norm's bits again.
    assert_codes(out.codes, out.normed)


def test_norm_of_a_row_does_not_depend_on_the_others():
    residual, update, scale = (
        normal(11, 1000, 4096),
        normal(12, 1000, 4096),
        jnp.ones(4096),
    )
    fn = functools.partial(norm.add_norm_quantize, eps=1e-6, columns=True, normed=True)
    every, some = (
        fn(residual, update, scale),
        fn(residual[701:710], update[701:710], scale),
    )
    assert_same(some.inverse_rms, every.inverse_rms[701:710])
    assert_same(some.normed, every.normed[701:710])
    assert_same(some.codes.codes, every.codes.codes[701:710])
    assert_same(some.codes.scales, every.codes.scales[:, 701:710])


@pytest.mark.parametrize("k", [384, 256, 2560, 4096])
def test_add_norm_backward(k):
    residual, dnormed, dresidual = (normal(seed, 1000, k) for seed in (13, 14, 15))
    scale = jnp.exp(0.2 * normal(16, k, dtype=jnp.float32))
    dsum, dscale = norm.add_norm_backward(dnormed, dresidual, residual, scale, eps=1e-6)
    x, dy = wide(residual), wide(dnormed)
    inverse = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    unit, dunit = x * inverse, dy * wide(scale)
    dx = inverse * (dunit - unit * (dunit * unit).mean(axis=1, keepdims=True))
    expected = to_bf16(wide(dresidual) + wide(to_bf16(dx)))
    assert (wide(dsum) != wide(expected)).mean() < 1e-3
    # One rounding of dx the other way, where dresidual cancels most of it.
    np.testing.assert_allclose(wide(dsum), wide(expected), rtol=2.0**-6, atol=2.0**-5)
    # A thousand terms of order one.
    np.testing.assert_allclose(dscale, (dy * unit).sum(axis=0), atol=1e-3)


def test_vmap_and_scan():
    x = normal(17, 3, 256, 256)

    def step(_, x):
        return None, hopper.quantize_both(x)

    mapped = jax.vmap(hopper.quantize_both)(x)
    scanned = jax.lax.scan(step, None, x)[1]
    for i in range(3):
        assert_codes(jax.tree.map(lambda a, i=i: a[i], mapped), x[i])
        assert_codes(jax.tree.map(lambda a, i=i: a[i], scanned), x[i])
