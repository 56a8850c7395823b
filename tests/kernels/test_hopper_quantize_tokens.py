"""Quantisation of tokens in GPU interpret mode, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy_quantize import assert_same

from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.fp8 import dequantize
from fp8rl_jax.kernels import hopper_quantize_tokens as kernels

INTERPRET = plgpu.InterpretGPUParams()


def run(fn, x):
    """Interprets a kernel without XLA's licence to drop roundings to bfloat16."""
    fn = jax.jit(
        functools.partial(fn, interpret=INTERPRET),
        compiler_options={"xla_allow_excess_precision": False},
    )
    return fn(x)


def tokens(num_tokens):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_tokens, 2, 128))
    x *= np.exp2(rng.uniform(-30, 30, (num_tokens, 2, 1)))
    x[3, 1] = 0
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("num_tokens", [32, 70])
def test_codes_and_values_are_the_references(num_tokens):
    x = tokens(num_tokens)
    expected = quantize_tokens(x)
    with_values = functools.partial(kernels.quantize_tokens, with_values=True)
    codes, scales, values = run(with_values, x)
    assert_same(codes, expected.codes)
    assert_same(scales.T, expected.scales[..., 0])
    assert_same(values, dequantize(expected, jnp.bfloat16))
    for alone, beside in zip(
        run(kernels.quantize_tokens, x), (codes, scales), strict=True
    ):
        assert_same(alone, beside)


def test_what_is_not_finite_stays_so():
    x = tokens(32).at[5, 0, 9].set(jnp.nan).at[6, 1, 0].set(jnp.inf)
    with_values = functools.partial(kernels.quantize_tokens, with_values=True)
    codes, scales, values = run(with_values, x)
    bad = np.zeros((32, 2), bool)
    bad[5, 0] = bad[6, 1] = True
    np.testing.assert_array_equal(np.isnan(scales.T), bad)
    assert not np.any(np.asarray(codes, np.float32)[bad])
    values = np.asarray(values, np.float32)
    np.testing.assert_array_equal(np.isnan(values).all(-1), bad)


def test_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16 \[T, N, 128\], got float32"):
        kernels.quantize_tokens(jnp.zeros((32, 2, 128)))
    with pytest.raises(ValueError, match=r"got bfloat16 \(32, 2, 64\)"):
        kernels.quantize_tokens(jnp.zeros((32, 2, 64), jnp.bfloat16))
