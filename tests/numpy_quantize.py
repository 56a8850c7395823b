"""Quantisation by numpy's float32 arithmetic, the yardstick of the kernels' tests."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np


def blocks(x, block=(1, 128)):
    """Codes and scales of ``x``."""
    x = np.asarray(x).astype(np.float32)
    (m, k), (b0, b1) = x.shape, block
    x = np.pad(x, ((0, -m % b0), (0, -k % b1)))
    x = x.reshape(x.shape[0] // b0, b0, x.shape[1] // b1, b1)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max((1, 3))
        scales = amax * np.float32(1 / 448)
        scales = np.where(amax < np.float32(448 * 2.0**-126), np.float32(1), scales)
        inverse = np.float32(1) / scales
        codes = np.clip(x * inverse[:, None, :, None], -448, 448)
    codes = codes.reshape(scales.shape[0] * b0, scales.shape[1] * b1)[:m, :k]
    return codes.astype(ml_dtypes.float8_e4m3fn), scales


def assert_same(actual, expected):
    """Equal bits, any NaN for any NaN."""
    actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
    np.testing.assert_array_equal(actual, expected)


def assert_codes(out, y, rows=True, columns=True):
    """``out`` holds the codes of exactly ``y``, by row and by column if asked for."""
    for wanted, x, codes, scales in (
        (rows, y, out.codes, out.scales),
        (columns, np.asarray(y).T, out.codes_t, out.scales_t),
    ):
        if not wanted:
            assert codes is None and scales is None
            continue
        expected_codes, expected_scales = blocks(x)
        assert_same(codes, expected_codes)
        assert_same(scales, expected_scales.T)


def normal(seed, *shape, dtype=jnp.bfloat16):
    """Standard normal values."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(x).astype(dtype)


def awkward(seed, m, k, dtype):
    """Rows of very different size; a zero block, inf, NaN, tiny and huge values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * np.exp(4 * rng.standard_normal((m, 1)))
    if m > 4:
        x[0, :128] = 0
        x[1, 5] = np.inf
        x[2, k - 1] = np.nan
        x[3] *= 1e-39 / np.abs(x[3]).max()
        x[4] *= 3e38 / np.abs(x[4]).max()
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def taking_turns(*xs):
    """Blocks of 128 columns of each in turn."""
    parts = [np.split(x, x.shape[1] // 128, axis=1) for x in xs]
    return np.concatenate([b for turn in zip(*parts, strict=True) for b in turn], 1)


def wide(x):
    """``x`` in float64."""
    return np.asarray(x).astype(np.float64)


def to_bf16(x):
    """``x`` rounded to bfloat16, by way of float32."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)
