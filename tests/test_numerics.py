"""Rounding points and wide evaluation against ml_dtypes and numpy float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8rl_jax.numerics import by_platform, dot, round_to, wide

BF16 = ml_dtypes.bfloat16


def rms_norm(x, scale):
    mean = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * scale[None, :]


def rms_norm_f64(x, scale, dy):
    """Value and gradients of `rms_norm`, written out in numpy float64."""
    x, scale, dy = (np.asarray(a, np.float64) for a in (x, scale, dy))
    inverse = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    dn = dy * scale
    dx = inverse * dn - x * inverse**3 * (dn * x).mean(-1, keepdims=True)
    return x * inverse * scale, dx, (dy * x * inverse).sum(0)


@pytest.fixture(scope="module")
def norm_case():
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.standard_normal((16, 96)), jnp.bfloat16)
    scale = jnp.asarray(rng.standard_normal(96), jnp.float32)
    dy = jnp.asarray(rng.standard_normal((16, 96)), jnp.bfloat16)
    return x, scale, dy


def norm_and_gradients(x, scale, dy):
    y, vjp = jax.vjp(lambda *a: wide(rms_norm, jnp.bfloat16, *a), x, scale)
    return y, *vjp(dy)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def test_round_to_bfloat16_is_nearest_even_for_every_upper_half():
    # Every sign, exponent and upper mantissa; around, below and at the ties.
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (upper[:, None] | lower).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) >= 2.0**-126)]
    rounded = jax.jit(round_to, static_argnums=1)(x, jnp.bfloat16)
    np.testing.assert_array_equal(bits(rounded), bits(x.astype(BF16)))


def test_round_to_from_float64():
    # To bfloat16 it goes through float32: numpy's casts do the same.
    rng = np.random.default_rng(1)
    ties = 1 + 2.0**-8 + np.array([0, 2.0**-20, -(2.0**-20), 2.0**-40])
    x = np.concatenate([rng.standard_normal(1000), ties, 1 + ties * 2.0**-16])
    for dtype in (jnp.float32, jnp.bfloat16):
        with jax.enable_x64(True):
            rounded = jax.jit(round_to, static_argnums=1)(jnp.asarray(x), dtype)
        assert rounded.dtype == dtype
        np.testing.assert_array_equal(
            bits(rounded), bits(x.astype(np.float32).astype(dtype))
        )


def test_round_to_keeps_special_values():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    rounded = np.asarray(round_to(jnp.asarray(x), jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(rounded[:4], x[:4])
    assert np.signbit(rounded[1]) and np.isnan(rounded[4]) and np.isinf(rounded[5])


def test_round_to_survives_fusion_under_jit():
    # XLA:CPU drops a pair of casts in front of a sum (jax 0.11): off by 0.1 here.
    x = np.random.default_rng(2).standard_normal(4096).astype(np.float32)

    @jax.jit
    def total(x):
        return jnp.sum(round_to(x * x, jnp.bfloat16).astype(jnp.float32))

    expected = (x * x).astype(BF16).astype(np.float64).sum()
    assert abs(total(x) - expected) < 0.01


def test_wide_values_and_gradients_equal_the_rounded_f64_formula(norm_case):
    results = jax.jit(norm_and_gradients)(*norm_case)
    for result, expected in zip(results, rms_norm_f64(*norm_case), strict=True):
        np.testing.assert_array_equal(bits(result), bits(expected.astype(result.dtype)))


def test_wide_is_wide():
    # x + y - x in float32 loses y altogether.
    x, y = jnp.float32(1e10), jnp.float32(1.0)
    assert jax.jit(lambda x, y: wide(lambda x, y: x + y - x, jnp.float32, x, y))(
        x, y
    ) == np.float32(1.0)


def test_wide_passes_integers_through_with_several_results():
    def fn(table, ids):
        rows = jnp.take(table, ids, axis=0)
        return [rows, -rows]

    def loss(table, ids):
        a, b = wide(fn, [jnp.float32, jnp.bfloat16], table, ids)
        return a.sum() + 2 * b.astype(jnp.float32).sum()

    table = jnp.ones((3, 2), jnp.float32)
    gradient = jax.jit(jax.grad(loss))(table, jnp.array([0, 2, 2], jnp.int32))
    np.testing.assert_array_equal(gradient, [[-1, -1], [0, 0], [-2, -2]])


def lowered_text(fn, platform, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_float64_is_lowered_for_cpu_only(platform, norm_case):
    text = lowered_text(norm_and_gradients, platform, *norm_case)
    assert ("f64" in text) == (platform == "cpu")


def test_by_platform_gives_the_accumulation_dtype():
    seen = []

    def fn(dtype, x):
        seen.append(dtype.name)
        return x

    jax.jit(lambda x: by_platform(fn, x))(jnp.float32(1))
    assert set(seen) == {"float64", "float32"}


def test_dot_of_fp8_codes_is_exact_in_any_order():
    # Largest and smallest products of codes: 448² against 2^-18, far apart in float32.
    a = np.array([448, 2**-9, -448, 2**-9], np.float64)
    b = np.array([448, 2**-9, 448, 2**-9], np.float64)

    @jax.jit
    def products(a, b):
        def fn(dtype, a, b):
            y = dot(dtype, a, b, (((0,), (0,)), ((), ())))
            return round_to(y, jnp.float32)

        return by_platform(fn, a, b)

    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [0, 2, 1, 3]):
        operands = (jnp.asarray(x[order], jnp.float8_e4m3fn) for x in (a, b))
        assert products(*operands) == np.float32(2.0**-17)


TRANSFORMS = {
    "vmap": lambda fn: jax.vmap(fn, in_axes=(0, None, 0)),
    "scan": lambda fn: (
        lambda xs, scale, dys: jax.lax.scan(
            lambda _, xy: (None, fn(xy[0], scale, xy[1])), None, (xs, dys)
        )[1]
    ),
    "remat": lambda fn: jax.vmap(jax.checkpoint(fn), in_axes=(0, None, 0)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_wide_gives_the_same_bits_under_transforms(transform, norm_case):
    x, scale, dy = norm_case
    expected = jax.jit(norm_and_gradients)(x, scale, dy)
    split = [a.reshape(4, 4, -1) for a in (x, dy)]
    y, dx, dscale = jax.jit(TRANSFORMS[transform](norm_and_gradients))(
        split[0], scale, split[1]
    )
    np.testing.assert_array_equal(bits(y.reshape(x.shape)), bits(expected[0]))
    np.testing.assert_array_equal(bits(dx.reshape(x.shape)), bits(expected[1]))
    np.testing.assert_allclose(dscale.sum(0), expected[2], rtol=1e-5, atol=1e-5)


def test_wide_sums_the_gradient_of_a_replicated_argument_under_shard_map(norm_case):
    x, scale, dy = norm_case
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = P("data")
    sharded = jax.shard_map(
        norm_and_gradients,
        mesh=mesh,
        in_specs=(rows, P(), rows),
        out_specs=(rows, rows, P()),
    )
    expected = jax.jit(norm_and_gradients)(x, scale, dy)
    y, dx, dscale = jax.jit(sharded)(x, scale, dy)
    np.testing.assert_array_equal(bits(y), bits(expected[0]))
    np.testing.assert_array_equal(bits(dx), bits(expected[1]))
    np.testing.assert_allclose(dscale, expected[2], rtol=1e-5, atol=1e-5)
