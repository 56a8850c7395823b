"""`fp8_dot_general`: values, gradients and errors against numpy float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from fp8rl_jax.fp8 import WEIGHT_BLOCK, LinearPrecision, fp8_dot_general, quantize
from fp8rl_jax.fp8.quantize import quantize_weight
from fp8rl_jax.fp8.recipe import BF16_LINEAR

NT = (((1,), (1,)), ((), ()))
ROW = (1, 128)


def product_and_gradients(x, w, dy, **kwargs):
    y, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, NT, **kwargs), x, w)
    return y, *vjp(dy)


run = jax.jit(
    product_and_gradients, static_argnames=("passes", "preferred_element_type")
)


def f64(x):
    return np.asarray(x, np.float64)


@pytest.fixture
def operands(normal):
    """x [M, K] and dy [M, N] in dtype, w [N, K] in float32, with ragged sizes."""

    def make(m=200, n=136, k=260, dtype=jnp.float32):
        w = normal((n, k), 2, jnp.float32)
        return normal((m, k), 1, dtype), w, normal((m, n), 3, dtype)

    return make


def heavy_tailed(shape, seed):
    """Student's t with 1.5 degrees of freedom: one outlier rules each block."""
    x = np.random.default_rng(seed).standard_t(1.5, shape)
    return jnp.asarray(x, jnp.float32)


# Each product as (operand, its block) twice; the contraction is the last axis.
def products(x, w, dy):
    return {
        "forward": ((x, ROW), (w, WEIGHT_BLOCK)),
        "dgrad": ((dy, ROW), (w.T, WEIGHT_BLOCK)),
        "wgrad": ((dy.T, ROW), (x.T, ROW)),
    }


def check_products(results, x, w, dy, ref, frobenius=None):
    """Judges y, dx and dw against the quantised and the exact product, float64."""
    x, w, dy = f64(x), f64(w), f64(dy)
    for result, ((a, a_block), (b, b_block)) in zip(
        results, products(x, w, dy).values(), strict=True
    ):
        result = f64(result)
        a_hat, b_hat = ref.values(a, a_block), ref.values(b, b_block)
        # Of the quantised product: the rounding of the result to float32.
        expected = a_hat @ b_hat.T
        bound = 1.001 * 2.0**-24 * abs(expected) + 1e-14 * (abs(a_hat) @ abs(b_hat).T)
        assert (abs(result - expected) <= bound).all()
        # Of the exact product: |da| |b| + |a| |db| + |da| |db|.
        da, db = ref.rounding_bound(a, a_block), ref.rounding_bound(b, b_block)
        bound += da @ abs(b).T + abs(a) @ db.T + da @ db.T
        exact = a @ b.T
        assert (abs(result - exact) <= bound).all()
        if frobenius:
            error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
            low, high = frobenius
            assert low < error < high


def test_forward_dgrad_wgrad_of_normal_data(operands, ref):
    # Rounding to 4 bits costs a factor 1 + d with d uniform in +-2^-4 / m for a
    # significand m in [1, 2): 2.5 % rms for normal data, sqrt(2) times that for two
    # operands. Less than 2 % would mean that an operand was not quantised.
    x, w, dy = operands()
    check_products(run(x, w, dy), x, w, dy, ref, frobenius=(0.03, 0.042))


def test_forward_dgrad_wgrad_of_heavy_tailed_data(ref):
    shapes = (200, 260), (136, 260), (200, 136)
    x, w, dy = (heavy_tailed(shape, seed) for seed, shape in enumerate(shapes))
    check_products(run(x, w, dy), x, w, dy, ref)


def test_bfloat16_results_are_rounded_once(operands, ref):
    x, w, dy = operands(dtype=jnp.bfloat16)
    y, dx, dw = run(x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    y32, dx32, dw32 = run(*(a.astype(jnp.float32) for a in (x, w, dy)))
    np.testing.assert_array_equal(dw, dw32)
    for rounded, full in ((y, y32), (dx, dx32)):
        expected = np.asarray(full).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(f64(rounded), expected)


def test_preferred_element_type(operands):
    x, w, dy = operands(dtype=jnp.bfloat16)
    y, dx, dw = run(x, w, f64(dy).astype(np.float32), preferred_element_type="float32")
    assert (y.dtype, dx.dtype, dw.dtype) == ("float32", "bfloat16", "float32")
    y_bf16, _, _ = run(x, w, dy)
    np.testing.assert_array_equal(
        f64(y_bf16), np.asarray(y).astype(ml_dtypes.bfloat16).astype(np.float64)
    )


@pytest.mark.parametrize(
    "passes",
    [
        LinearPrecision(wgrad=False),
        LinearPrecision(dgrad=False),
        LinearPrecision(forward=False),
        LinearPrecision(forward=False, dgrad=False),
        BF16_LINEAR,
    ],
    ids=str,
)
def test_passes_choose_what_is_quantised(passes, operands, ref):
    x, w, dy = operands(m=72, n=40, dtype=jnp.bfloat16)
    results = dict(zip(products(x, w, dy), run(x, w, dy, passes=passes), strict=True))
    for name, ((a, a_block), (b, b_block)) in products(f64(x), f64(w), f64(dy)).items():
        if getattr(passes, name):
            a, b = ref.values(a, a_block), ref.values(b, b_block)
        elif name == "dgrad" and passes.forward:
            # The function that was evaluated is linear in x with the quantised weight.
            b = ref.values(b, b_block)
        if not getattr(passes, name):
            b = f64(b.astype(ml_dtypes.bfloat16))
        unit = 2.0**-24 if name == "wgrad" else 2.0**-8
        bound = 1.001 * unit * abs(a @ b.T) + 1e-14 * (abs(a) @ abs(b).T)
        assert (abs(f64(results[name]) - a @ b.T) <= bound).all(), name


def test_codes_stand_in_for_the_weight(operands, assert_same_bits):
    x, w, dy = operands()
    codes = jax.jit(quantize, static_argnums=1)(w, WEIGHT_BLOCK)
    expected = run(x, w, dy)
    for result, same in zip(run(x, w, dy, codes=codes), expected, strict=True):
        assert_same_bits(result, same)
    # The weight itself is not read: only its codes are.
    y, dx, dw = run(x, jnp.full_like(w, jnp.nan), dy, codes=codes)
    for result, same in zip((y, dx, dw), expected, strict=True):
        assert_same_bits(result, same)


def test_transposed_codes_serve_dgrad(operands, assert_same_bits):
    x, w, dy = operands()
    codes, transposed = jax.jit(quantize_weight)(w)
    expected = run(x, w, dy)
    results = run(x, w, dy, codes=codes, transposed_codes=transposed)
    for result, same in zip(results, expected, strict=True):
        assert_same_bits(result, same)
    # They alone are read there: zeros in their place give zeros.
    zeros = jax.tree.map(jnp.zeros_like, transposed)
    y, dx, dw = run(x, w, dy, codes=codes, transposed_codes=zeros)
    assert_same_bits(y, expected[0])
    np.testing.assert_array_equal(dx, np.zeros_like(dx))
    assert_same_bits(dw, expected[2])


def test_codes_receive_no_gradient(operands):
    x, w, _ = operands(m=4)

    def loss(scales, codes):
        codes = type(codes)(codes.codes, scales, codes.block)
        return fp8_dot_general(x, w, NT, codes=codes).sum()

    codes = quantize(w, WEIGHT_BLOCK)
    gradient = jax.jit(jax.grad(loss))(codes.scales, codes)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_scaled_array_weight(operands, assert_same_bits):
    x, w, dy = operands()
    codes = jax.jit(quantize, static_argnums=1)(w, WEIGHT_BLOCK)
    y, vjp = jax.jit(
        lambda x: jax.vjp(lambda x: fp8_dot_general(x, codes, NT), x),
    )(x)
    expected = run(x, w, dy)
    assert_same_bits(y, expected[0])
    assert_same_bits(jax.jit(vjp)(dy)[0], expected[1])


# lhs shape, rhs shape, dimension numbers: several contracting, free and batch axes.
CASES = {
    "NN": ((40, 260), (260, 24), (((1,), (0,)), ((), ()))),
    "leading axes": ((2, 3, 136), (24, 136), (((2,), (1,)), ((), ()))),
    "heads in": ((6, 4, 64), (4, 64, 24), (((1, 2), (0, 1)), ((), ()))),
    "heads out": ((2, 5, 136), (136, 4, 16), (((2,), (0,)), ((), ()))),
    "permuted": ((64, 6, 4), (24, 4, 64), (((2, 0), (1, 2)), ((), ()))),
    "batch": ((3, 20, 136), (3, 136, 24), (((2,), (1,)), ((0,), (0,)))),
    "two batch axes": ((20, 2, 3, 24), (3, 2, 5, 24), (((3,), (3,)), ((2, 1), (0, 1)))),
    "vectors": ((136,), (136,), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("case", CASES)
def test_general_dimension_numbers(case):
    # Powers of two within one block are quantised exactly but for the rounding of the
    # scale: shapes, values and gradients then equal those of lax.dot_general.
    lhs_shape, rhs_shape, dimension_numbers = CASES[case]

    def powers_of_two(shape, seed):
        rng = np.random.default_rng(seed)
        x = 2.0 ** rng.integers(-2, 3, shape) * rng.choice([-1, 1], shape)
        return jnp.asarray(x, jnp.float32)

    lhs, rhs = powers_of_two(lhs_shape, 1), powers_of_two(rhs_shape, 2)
    exact = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=lax.Precision.HIGHEST,
    )
    fp8 = functools.partial(fp8_dot_general, dimension_numbers=dimension_numbers)
    dy = powers_of_two(jax.eval_shape(exact, lhs, rhs).shape, 3)

    def value_and_gradients(fn, lhs, rhs, dy):
        y, vjp = jax.vjp(fn, lhs, rhs)
        return y, *vjp(dy)

    results = jax.jit(functools.partial(value_and_gradients, fp8))(lhs, rhs, dy)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(f64(a)) for a in (lhs, rhs, dy)]
        expected = value_and_gradients(exact, *arrays)
        magnitudes = value_and_gradients(exact, *map(jnp.abs, arrays))
    for result, reference, size in zip(results, expected, magnitudes, strict=True):
        assert result.shape == reference.shape
        # Each operand is off by the roundings of its scale and reciprocal.
        assert (abs(f64(result) - f64(reference)) <= 2.0**-21 * f64(size)).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_operands_are_not_hidden(bad, operands):
    x, w, dy = operands()
    x = x.at[3, 200].set(bad)
    y, dx, dw = (np.isfinite(a) for a in run(x, w, dy))
    assert not y[3].any() and y[:3].all() and y[4:].all()
    assert dx.all()
    assert not dw[:, 200].any() and dw[:, :200].all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_cotangents_are_not_hidden(bad, operands):
    x, w, dy = operands()
    _, dx, dw = (np.isfinite(a) for a in run(x, w, dy.at[3, 5].set(bad)))
    assert not dx[3].any() and dx[:3].all() and dx[4:].all()
    assert not dw[5].any() and dw[:5].all() and dw[6:].all()


def test_zero_operands_give_zeros(operands):
    x, w, dy = operands()
    for zeroed in range(3):
        arrays = [a * jnp.float32(i != zeroed) for i, a in enumerate((x, w, dy))]
        y, dx, dw = run(*arrays)
        for result, uses in ((y, (0, 1)), (dx, (1, 2)), (dw, (0, 2))):
            assert np.isfinite(result).all()
            assert (not np.any(result)) == (zeroed in uses)


ERRORS = {
    "contracting sizes": (lambda x, w, q: (x[:, :128], w, NT), {}, "sizes differ"),
    "transposed codes": (lambda x, w, q: (x, q.mT, NT), {}, "sizes differ"),
    "code axis": (
        lambda x, w, q: (x, q, (((1,), (0,)), ((), ()))),
        {},
        "contracted over axis 1",
    ),
    "codes twice": (lambda x, w, q: (x, q, NT), {"codes"}, "not both"),
    "codes of a bf16 pass": (
        lambda x, w, q: (x, w, NT),
        {"codes", "bf16"},
        "passes.forward is False",
    ),
    "codes of another shape": (
        lambda x, w, q: (x, w[:9], NT),
        {"codes"},
        r"codes must be \[N, K\] = \(9, 260\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, operands):
    make, options, message = ERRORS[case]
    x, w, _ = operands(m=2)
    q = quantize(w, WEIGHT_BLOCK)
    kwargs = {"codes": q} if "codes" in options else {}
    if "bf16" in options:
        kwargs["passes"] = BF16_LINEAR
    with pytest.raises(ValueError, match=message):
        fp8_dot_general(*make(x, w, q), **kwargs)


def test_other_dtypes_are_refused():
    x = jnp.ones((8, 128), jnp.float16)
    with pytest.raises(ValueError, match="lhs must be bfloat16 or float32"):
        fp8_dot_general(x, jnp.ones((128, 128)), (((1,), (0,)), ((), ())))
