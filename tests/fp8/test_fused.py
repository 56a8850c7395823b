"""The fused forms give the bits of the composition that they stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.fp8.fused import (
    add_and_norm,
    norm_gated_mlp,
    norm_linear,
    rms_norm,
    silu_mul,
)
from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.quantize import quantize_weight
from fp8rl_jax.fp8.recipe import BF16_LINEAR, FP8_LINEAR
from fp8rl_jax.fp8.weights import CodedWeight, WeightCodes, linear

EPS = 1e-6
K, N, F = 256, 384, 128


def draw(*shape, dtype=jnp.float32, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(x, jnp.float32).astype(dtype)


def coded(master):
    return CodedWeight(master, WeightCodes(*quantize_weight(master)))


@pytest.fixture
def inputs():
    return {
        "residual": draw(2, 40, K, dtype=jnp.bfloat16),
        "update": draw(2, 40, K, dtype=jnp.bfloat16, seed=1),
        "scale": jnp.exp(0.3 * draw(K)),
        "qkv": 0.1 * draw(N, K),
        "gate_up": 0.1 * draw(2 * F, K),
        "down": 0.1 * draw(K, F),
    }


def composed_linear(x, passes=FP8_LINEAR):
    residual, y = add_and_norm(x["residual"], x["update"], x["scale"], EPS)
    return residual, linear(y, coded(x["qkv"]), passes)


def fused_linear(x):
    weight = coded(x["qkv"])
    return norm_linear(x["residual"], x["update"], x["scale"], EPS, weight, FP8_LINEAR)


def composed_mlp(x):
    residual, y = add_and_norm(x["residual"], x["update"], x["scale"], EPS)
    gate_up = linear(y, coded(x["gate_up"]), FP8_LINEAR)
    return residual, linear(silu_mul(gate_up, 128), coded(x["down"]), FP8_LINEAR)


def fused_mlp(x):
    weights = coded(x["gate_up"]), coded(x["down"])
    return norm_gated_mlp(
        x["residual"], x["update"], x["scale"], EPS, *weights, FP8_LINEAR
    )


def values_and_gradients(fn, x):
    def run(x):
        out, vjp = jax.vjp(fn, x)
        return out, vjp(tuple(draw(*y.shape, dtype=y.dtype, seed=7) for y in out))[0]

    return jax.device_get(jax.jit(run)(x))


@pytest.mark.parametrize(
    ("fused", "composed", "used"),
    [
        (fused_linear, composed_linear, ("qkv",)),
        (fused_mlp, composed_mlp, ("gate_up", "down")),
    ],
)
def test_values_and_gradients_are_those_of_the_composition(
    fused, composed, used, inputs
):
    got, want = (values_and_gradients(fn, inputs) for fn in (fused, composed))
    for a, b in zip(got[0], want[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("residual", "update", "scale", *used):
        assert np.any(want[1][name] != 0)
        np.testing.assert_array_equal(got[1][name], want[1][name], err_msg=name)


def test_the_sampler_computes_the_same(inputs):
    x = inputs
    codes = {n: quantize_weight(x[n])[0] for n in ("qkv", "gate_up", "down")}
    front = x["residual"], x["update"], x["scale"], EPS
    sampled = jax.jit(lambda: norm_linear(*front, codes["qkv"], FP8_LINEAR))()
    np.testing.assert_array_equal(sampled[1], jax.jit(fused_linear)(x)[1])
    sampled = jax.jit(
        lambda: norm_gated_mlp(*front, codes["gate_up"], codes["down"], FP8_LINEAR)
    )()
    np.testing.assert_array_equal(sampled[1], jax.jit(fused_mlp)(x)[1])


def test_gradients_are_added_in_place(inputs):
    want = values_and_gradients(fused_mlp, inputs)[1]

    @jax.jit
    def in_place(x):
        buffers = [jax.new_ref(jnp.ones((3, *x[n].shape))) for n in ("gate_up", "down")]
        places = tuple(GradientRef(b, jnp.int32(1)) for b in buffers)

        def fn(x):
            return norm_gated_mlp(
                x["residual"],
                x["update"],
                x["scale"],
                EPS,
                coded(jax.lax.stop_gradient(x["gate_up"])),
                coded(jax.lax.stop_gradient(x["down"])),
                FP8_LINEAR,
                gradient_refs=places,
            )

        out, vjp = jax.vjp(fn, x)
        cotangents = tuple(draw(*y.shape, dtype=y.dtype, seed=7) for y in out)
        return vjp(cotangents)[0], [jax.freeze(b) for b in buffers]

    grads, buffers = jax.device_get(in_place(inputs))
    np.testing.assert_array_equal(grads["residual"], want["residual"])
    for name, buffer in zip(("gate_up", "down"), buffers, strict=True):
        assert not np.any(grads[name])
        np.testing.assert_array_equal(buffer[[0, 2]], 1)
        np.testing.assert_allclose(buffer[1], 1 + want[name], rtol=1e-6)


def test_products_in_bf16_are_composed(inputs):
    x = inputs

    def fn(x):
        front = x["residual"], x["update"], x["scale"], EPS
        return norm_linear(*front, x["qkv"], BF16_LINEAR)

    got = values_and_gradients(fn, x)

    def composed(x):
        residual, y = add_and_norm(x["residual"], x["update"], x["scale"], EPS)
        return residual, linear(y, x["qkv"], BF16_LINEAR)

    want = values_and_gradients(composed, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_formulas():
    x = np.random.default_rng(0).standard_normal((5, 512))
    scale = np.random.default_rng(1).uniform(0.5, 2, 512)
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + EPS) * scale
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), EPS)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    gate, up = x.reshape(5, 2, 2, 128)[:, :, 0], x.reshape(5, 2, 2, 128)[:, :, 1]
    expected = (gate / (1 + np.exp(-gate)) * up).reshape(5, 256)
    got = jax.jit(functools.partial(silu_mul, block=128))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_the_kernels_do_not_take_is_composed(inputs):
    x = inputs | {"scale": inputs["scale"].astype(jnp.bfloat16)}
    got = values_and_gradients(fused_linear, x)
    want = values_and_gradients(composed_linear, x)
    np.testing.assert_array_equal(got[0][1], want[0][1])
    assert got[1]["scale"].dtype == jnp.bfloat16
