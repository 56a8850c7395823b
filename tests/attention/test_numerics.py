"""FP8 attention over a paged cache on hard data, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    FP8_BOUNDS,
    decode_last,
    exact_last,
    operands,
    relative_error,
    values,
)

from fp8rl_jax.fp8.recipe import BF16, FP8


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("case", CASES)
def test_fp8(case, length):
    q, k, v = operands(case, length)
    out = decode_last(q, k, v, FP8)
    bounds = FP8_BOUNDS[case]
    of_codes = exact_last(*map(values, (q, k, v)))
    assert relative_error(out, of_codes) < bounds[0]
    assert relative_error(out, exact_last(q, k, v)) < bounds[1]


@pytest.mark.parametrize("length", [1, 129])
@pytest.mark.parametrize("case", CASES)
def test_bf16(case, length):
    q, k, v = operands(case, length)
    out = decode_last(q, k, v, BF16)
    assert relative_error(out, exact_last(q, k, v)) < 6e-3


def test_uniform_attention_over_16k_tokens():
    # Each probability is 6e-5 of the sum; relative to the maximum it is 1.
    q, k, v = operands("uniform", 16384)
    out = decode_last(q, k, v, FP8)
    assert relative_error(out, exact_last(q, k, v)) < 0.01


def per_tensor(x):
    """Values of a cache with one scale for all tokens and heads, as if calibrated."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max() / 448
    return (
        np.asarray(jnp.asarray(x / scale).astype(jnp.float8_e4m3fn), np.float64) * scale
    )


def test_keys_without_a_norm_keep_a_sane_error_where_one_scale_for_all_loses_it():
    # Without QK-norm a few tokens' keys may be very much larger than the others'. Here
    # they point away from the queries, so the others share the mass; one scale that
    # fits the large ones flushes those to zero.
    q, k, v = (np.asarray(x, np.float64) for x in operands("plain", 1000))
    direction = np.sign(k[0, 0])
    q = np.abs(q) * np.repeat(direction, 2, axis=0)
    # Values that tell whether the keys were told apart.
    v = 0.1 * v + np.sign(np.einsum("skh,kh->sk", k[0], q[0, -1, ::2]))[..., None]
    k[:, [0, 400, 700]] = -1e6 * np.abs(k[:, [0, 400, 700]]) * direction
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    expected = exact_last(q, k, v)
    assert relative_error(decode_last(q, k, v, FP8), expected) < 0.1
    assert relative_error(exact_last(q, per_tensor(k), per_tensor(v)), expected) > 0.4
