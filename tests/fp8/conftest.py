"""Independent numpy references of block quantisation and its products."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

E4M3 = ml_dtypes.float8_e4m3fn


def repeat_scales(scales, block, shape):
    scales = np.asarray(scales).repeat(block[0], -2).repeat(block[1], -1)
    return scales[..., : shape[-2], : shape[-1]]


def reference_quantize(x, block, power_of_two=False):
    """Codes and scales of a matrix, block by block.

    Scales and their reciprocals are computed in float64 and rounded to float32; the
    product with the reciprocal is exact in float64 and rounded to float32.
    """
    x = np.asarray(x, np.float64)
    rows, columns = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    scales = np.ones((rows, columns), np.float32)
    codes = np.zeros(x.shape, E4M3)
    for i in range(rows):
        for j in range(columns):
            part = np.s_[
                i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
            ]
            amax = np.abs(x[part]).max()
            if amax >= 448 * 2.0**-126:
                scale = amax.astype(np.float32) * np.float32(1 / 448)
                if power_of_two:
                    scale = 2.0 ** np.ceil(np.log2(np.float32(scale)))
                scales[i, j] = scale
            inverse = np.float32(1 / np.float64(scales[i, j]))
            scaled = (x[part] * np.float64(inverse)).astype(np.float32)
            codes[part] = np.clip(scaled, -448, 448).astype(E4M3)
    return codes, scales


def reference_values(x, block, power_of_two=False):
    """The quantised values of a matrix, exact in float64."""
    codes, scales = reference_quantize(x, block, power_of_two)
    scales = repeat_scales(scales.astype(np.float64), block, codes.shape)
    return codes.astype(np.float64) * scales


def rounding_bound(x, block):
    """Largest |x - quantised x|: half a unit of 3 bits, or of the smallest 2^-9."""
    _, scales = reference_quantize(x, block)
    scales = repeat_scales(scales.astype(np.float64), block, np.shape(x))
    # 1e-6: scales, reciprocals and products are themselves rounded to float32.
    return (np.abs(np.asarray(x, np.float64)) * 2.0**-4 + scales * 2.0**-10) * (
        1 + 1e-6
    )


@pytest.fixture(scope="session")
def ref():
    """The references above, as attributes."""

    class References:
        quantize = staticmethod(reference_quantize)
        values = staticmethod(reference_values)
        rounding_bound = staticmethod(rounding_bound)
        repeat_scales = staticmethod(repeat_scales)

    return References


@pytest.fixture
def normal():
    """normal(shape, seed, dtype): reproducible standard normal arrays."""

    def make(shape, seed=0, dtype=jnp.bfloat16):
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)

    return make


@pytest.fixture
def assert_same_bits():
    def check(actual, expected):
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.dtype == expected.dtype
        view = f"u{actual.itemsize}"
        np.testing.assert_array_equal(actual.view(view), expected.view(view))

    return check
