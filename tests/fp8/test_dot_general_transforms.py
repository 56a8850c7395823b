"""`fp8_dot_general` inside layers, transformations and across devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from fp8rl_jax.fp8 import WEIGHT_BLOCK, LinearPrecision, fp8_dot_general
from fp8rl_jax.fp8.recipe import BF16_LINEAR, FP8_LINEAR

NT = (((1,), (1,)), ((), ()))


def product_and_gradients(x, w, dy, passes=FP8_LINEAR):
    y, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, NT, passes=passes), x, w)
    return y, *vjp(dy)


def check_layer(apply, kernel, x, kernel_shape, ref):
    """Judges y and both gradients of ``apply(kernel, x)`` (no bias) by float64.

    kernel_shape: the [in, out] matrix that the kernel is, reshaped.
    """
    dy = jnp.asarray(
        np.random.default_rng(9).standard_normal(jax.eval_shape(apply, kernel, x).shape)
    ).astype(x.dtype)

    @jax.jit
    def run(kernel, x):
        y, vjp = jax.vjp(apply, kernel, x)
        return y, *vjp(dy)

    y, dw, dx = run(kernel, x)
    assert dw.shape == kernel.shape and dx.shape == x.shape
    x, w, dy = (
        np.asarray(a, np.float64).reshape(shape)
        for a, shape in (
            (x, (-1, kernel_shape[0])),
            (kernel, kernel_shape),
            (dy, (-1, kernel_shape[1])),
        )
    )
    w_hat = ref.values(w, WEIGHT_BLOCK)

    def quantised(a):
        return ref.values(a, (1, 128))

    for result, expected in (
        (y, quantised(x) @ w_hat),
        (dx, quantised(dy) @ w_hat.T),
        (dw, quantised(x.T) @ quantised(dy.T).T),
    ):
        result = np.asarray(result, np.float64).reshape(expected.shape)
        np.testing.assert_allclose(result, expected, rtol=1e-7, atol=1e-13)


def test_nnx_linear(normal, ref):
    layer = nnx.Linear(
        260, 24, use_bias=False, dot_general=fp8_dot_general, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)

    def apply(kernel, x):
        return nnx.merge(graph, {"kernel": state["kernel"].replace(kernel)})(x)

    x = normal((2, 3, 260), 1, jnp.float32)
    check_layer(apply, state["kernel"].get_value(), x, (260, 24), ref)


def test_nnx_linear_general(normal, ref):
    layer = nnx.LinearGeneral(
        (4, 36),
        (2, 16),
        axis=(-2, -1),
        use_bias=False,
        dot_general=fp8_dot_general,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(layer)

    def apply(kernel, x):
        return nnx.merge(graph, {"kernel": state["kernel"].replace(kernel)})(x)

    x = normal((5, 4, 36), 1, jnp.float32)
    check_layer(apply, state["kernel"].get_value(), x, (144, 32), ref)


def test_linen_dense(normal, ref):
    layer = linen.Dense(24, use_bias=False, dot_general=fp8_dot_general)
    x = normal((2, 3, 260), 1, jnp.float32)
    params = jax.jit(layer.init)(jax.random.key(0), x)

    def apply(kernel, x):
        return layer.apply({"params": {"kernel": kernel}}, x)

    check_layer(apply, params["params"]["kernel"], x, (260, 24), ref)


def scan_rows(x, w, dy):
    def step(_, xs):
        return None, product_and_gradients(*xs)

    return jax.lax.scan(step, None, (x, w, dy))[1]


TRANSFORMS = {
    "vmap": jax.vmap(product_and_gradients),
    "scan over stacked weights": scan_rows,
    "remat": jax.vmap(
        lambda x, w, dy: (lambda y, vjp: (y, *vjp(dy)))(
            *jax.vjp(jax.checkpoint(lambda x, w: fp8_dot_general(x, w, NT)), x, w)
        )
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_same_bits_under_transforms(transform, normal, assert_same_bits):
    x, dy = normal((3, 20, 260), 1), normal((3, 20, 24), 3)
    w = normal((3, 24, 260), 2, jnp.float32)
    alone = jax.jit(product_and_gradients)
    results = jax.jit(TRANSFORMS[transform])(x, w, dy)
    for i in range(3):
        expected = alone(x[i], w[i], dy[i])
        for result, same in zip(results, expected, strict=True):
            assert_same_bits(result[i], same)


def run_sharded(passes, *args):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = P("data")
    fn = jax.shard_map(
        functools.partial(product_and_gradients, passes=passes),
        mesh=mesh,
        in_specs=(rows, P(), rows),
        out_specs=(rows, rows, P()),
    )
    return jax.jit(fn)(*args)


@pytest.mark.parametrize(
    ("rows", "wgrad", "tolerance"),
    [
        # Shards of whole blocks of tokens: the same blocks, summed in another order.
        (8 * 128, True, 1e-5),
        # Ragged shards: other blocks. Each sum is within 4.2 % of the exact one (see
        # test_dot_general), in Frobenius norm, hence the two within sqrt(2) of that.
        (8 * 24, True, 0.06),
        (8 * 24, False, 1e-5),
    ],
)
def test_sharded_rows_with_a_replicated_weight(
    rows, wgrad, tolerance, normal, assert_same_bits
):
    args = normal((rows, 136), 1), normal((24, 136), 2, jnp.float32), normal((rows, 24))
    passes = LinearPrecision(wgrad=wgrad)
    y, dx, dw = jax.jit(product_and_gradients, static_argnums=3)(*args, passes)
    y_sharded, dx_sharded, dw_sharded = run_sharded(passes, *args)
    assert_same_bits(y_sharded, y)
    assert_same_bits(dx_sharded, dx)
    error = np.linalg.norm(dw_sharded - dw) / np.linalg.norm(dw)
    assert error < tolerance


def test_gradient_taken_outside_shard_map(normal):
    x, w, dy = normal((64, 136), 1), normal((24, 136), 2, jnp.float32), normal((64, 24))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(product, x, w):
        return (product(x, w) * dy).astype(jnp.float32).sum()

    def product(x, w):
        passes = LinearPrecision(wgrad=False)
        return fp8_dot_general(x, w, NT, passes=passes)

    rows = P("data")
    sharded = jax.shard_map(product, mesh=mesh, in_specs=(rows, P()), out_specs=rows)
    gradient = jax.jit(jax.grad(functools.partial(loss, sharded), 1))(x, w)
    expected = jax.jit(jax.grad(functools.partial(loss, product), 1))(x, w)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_lowered_program_holds_fp8_codes(platform, normal):
    args = normal((8, 256)), normal((128, 256), 1, jnp.float32), normal((8, 128))

    def lowered(passes):
        traced = jax.jit(product_and_gradients, static_argnums=3).trace(*args, passes)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    fp8 = lowered(FP8_LINEAR)
    # Codes of x, w, dy and of the two transposes that wgrad reads.
    for shape in ("8x256", "128x256", "8x128", "256x8", "128x8"):
        assert f"tensor<{shape}xf8E4M3FN>" in fp8, shape
    assert ("f64" in fp8) == (platform == "cpu")
    assert "f8E4M3FN" not in lowered(BF16_LINEAR)
