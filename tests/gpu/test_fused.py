"""The fused layers with Hopper's kernels against their plain-JAX reference on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_quantize import normal, wide

from fp8rl_jax.fp8.fused import norm_gated_mlp, norm_linear
from fp8rl_jax.fp8.quantize import quantize_weight
from fp8rl_jax.fp8.recipe import FP8_LINEAR
from fp8rl_jax.fp8.weights import CodedWeight, WeightCodes

EPS = 1e-6
K, N, F = 1024, 1536, 2048
F32 = jnp.float32


def coded(master):
    return CodedWeight(master, WeightCodes(*quantize_weight(master)))


def linear(x):
    front = x["residual"], x["update"], x["scale"]
    return norm_linear(*front, EPS, coded(x["qkv"]), FP8_LINEAR)


def mlp(x):
    front = x["residual"], x["update"], x["scale"]
    weights = coded(x["gate_up"]), coded(x["down"])
    return norm_gated_mlp(*front, EPS, *weights, FP8_LINEAR)


def values_and_gradients(fn, x, cotangents):
    def run(x):
        out, vjp = jax.vjp(fn, x)
        return out, vjp(cotangents)[0]

    return jax.device_get(jax.jit(run)(x))


@pytest.mark.parametrize(
    ("fn", "used", "width"), [(linear, ("qkv",), N), (mlp, ("gate_up", "down"), K)]
)
def test_values_and_gradients_are_close_to_those_on_the_cpu(fn, used, width):
    weights = {
        "qkv": normal(3, N, K, dtype=F32),
        "gate_up": normal(4, 2 * F, K, dtype=F32),
        "down": normal(5, K, F, dtype=F32),
    }
    x = {name: weights[name] / 32 for name in used}
    x |= {
        "residual": normal(0, 3, 100, K),
        "update": normal(1, 3, 100, K),
        "scale": jnp.exp(0.3 * normal(2, K, dtype=F32)),
    }
    cotangents = normal(6, 3, 100, K), normal(7, 3, 100, width)
    here = values_and_gradients(fn, x, cotangents)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        there = values_and_gradients(fn, *jax.device_put((x, cotangents), cpu))
    # The residual sum is rounded once from the same operands.
    np.testing.assert_array_equal(here[0][0], there[0][0])
    leaves = jax.tree.leaves_with_path((here[0][1], here[1]))
    expected = jax.tree.leaves((there[0][1], there[1]))
    for (path, a), b in zip(leaves, expected, strict=True):
        a, b = wide(a), wide(b)
        # Sums differ in 14 bits, so one code in a hundred falls to the other side: a
        # step of 2^-4 each. Quantisation itself costs 4e-2.
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 1.2e-2, (jax.tree_util.keystr(path), error)
