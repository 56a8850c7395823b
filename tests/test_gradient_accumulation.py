"""Gradients of all micro-batches and layers are added in one buffer, in place."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import fp8_dot_general, get_recipe
from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.weights import training_weights
from fp8rl_jax.learner import Learner, policy_log_probs
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.models.qwen3.model import abstract_params
from fp8rl_jax.optimizer import OptimizerConfig

VOCAB_SIZE = 250


class Weighted(NamedTuple):
    """Loss inputs: every target's weight, and the mask that the learner needs."""

    mask: Array
    weights: Array


def weighted_sum(log_probs, inputs, normalizer):
    del normalizer
    loss = jnp.sum(log_probs * inputs.weights)
    return loss, {"loss": lax.stop_gradient(loss)}


def model(num_layers: int, hidden_size: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_kv_heads=hidden_size // 64,
        head_dim=64,
        intermediate_size=2 * hidden_size,
        tie_word_embeddings=tied,
    )


def learner(config: Qwen3Config, recipe: str, remat: str) -> Learner:
    return Learner(
        config,
        get_recipe(recipe),
        OptimizerConfig(1e-3),
        weighted_sum,
        vocab_size=VOCAB_SIZE,
        remat=remat,
    )


@pytest.mark.parametrize(
    ("recipe", "remat", "tied"),
    [("fp8", "full", True), ("fp8", "none", False), ("bf16", "full", False)],
)
def test_gradients_are_those_of_jax_grad(recipe, remat, tied):
    config = model(2, 128, tied)
    policy = learner(config, recipe, remat)
    params = init_params(config, jax.random.key(0), std=0.05)
    codes = policy.quantize(params)
    rng = np.random.default_rng(0)
    shape = (3, 2, 32)
    tokens, targets = rng.integers(VOCAB_SIZE, size=(2, *shape), dtype=np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), shape)
    batch = TokenBatch(tokens, targets, positions, np.ones_like(positions))
    inputs = Weighted(np.ones(shape, bool), rng.normal(size=shape).astype(np.float32))
    batch, inputs = policy.put((batch, inputs))
    grads, _, _ = jax.jit(policy._gradients)(params, codes, batch, inputs)

    @jax.jit
    @jax.grad
    def one(params, batch, weights):
        precision = get_recipe(recipe).train
        log_probs = policy_log_probs(
            config,
            precision,
            training_weights(params, codes, precision.linear),
            batch,
            vocab_size=VOCAB_SIZE,
            temperature=1.0,
        )
        return jnp.sum(log_probs * weights)

    arrays = batch, inputs.weights
    each = [
        jax.device_get(one(params, *jax.tree.map(lambda x, i=i: x[i], arrays)))
        for i in range(len(tokens))
    ]
    expected = jax.tree.map(lambda *xs: sum(np.float64(x) for x in xs), *each)
    for x, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(want) > 0
        assert np.linalg.norm(x - want) <= 1e-6 * np.linalg.norm(want)


def test_no_second_buffer_of_gradients():
    """Each further layer adds its activations to the temporaries, no gradients."""

    def temporary_bytes(num_layers):
        config = model(num_layers, 512, tied=False)
        policy = learner(config, "bf16", "full")
        params = abstract_params(config)
        codes = jax.eval_shape(policy.quantize, params)
        ids = jax.ShapeDtypeStruct((4, 1, 32), jnp.int32)
        inputs = Weighted(
            jax.ShapeDtypeStruct(ids.shape, jnp.bool_),
            jax.ShapeDtypeStruct(ids.shape, jnp.float32),
        )
        gradients = jax.jit(policy._gradients)
        compiled = gradients.lower(params, codes, TokenBatch(*[ids] * 4), inputs)
        layer = sum(4 * x.size for x in jax.tree.leaves(params["layers"])) / num_layers
        return compiled.compile().memory_analysis().temp_size_in_bytes, layer

    (few, layer), (many, _) = temporary_bytes(2), temporary_bytes(6)
    assert many - few < 0.1 * 4 * layer


def test_fp8_dot_general_adds_into_its_ref():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 128)).astype(np.float32) for n in (64, 256))
    start = rng.normal(size=(3, 256, 128)).astype(np.float32)
    dot = functools.partial(fp8_dot_general, dimension_numbers=(((1,), (1,)), ((), ())))

    def loss(x, w, **kwargs):
        return jnp.sum(dot(x, w, **kwargs) ** 2)

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)

    @jax.jit
    def in_place(x, w, start):
        ref = jax.new_ref(start)
        place = GradientRef(ref, jnp.int32(1))
        grads = jax.grad(functools.partial(loss, gradient_ref=place), (0, 1))(x, w)
        return grads, jax.freeze(ref)

    (got_dx, got_dw), total = jax.device_get(in_place(x, w, start))
    np.testing.assert_array_equal(got_dx, dx)
    assert not np.any(got_dw)
    np.testing.assert_array_equal(total[[0, 2]], start[[0, 2]])
    np.testing.assert_allclose(total[1], start[1] + np.asarray(dw), rtol=1e-6)
    with pytest.raises(ValueError, match="gradient_ref must be"):
        dot(x, w, gradient_ref=GradientRef(jax.new_ref(jnp.zeros((128, 256)))))
