"""The plain-JAX reference on a GPU: same codes as on CPU, products and policy close."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.data.batching import micro_batches, place_on_targets, token_rows
from fp8rl_jax.fp8 import get_recipe, quantize
from fp8rl_jax.fp8.matmul import scaled_matmul_nt
from fp8rl_jax.fp8.quantize import expand_scales
from fp8rl_jax.learner import Learner, negative_log_likelihood
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.rollout import ContinuousRolloutEngine, Prompts, SamplingParams


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_codes_are_those_of_the_cpu(block):
    x = np.random.default_rng(0).standard_normal((300, 520)).astype(np.float32)
    here = jax.jit(lambda x: quantize(x, block))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.jit(lambda x: quantize(x, block))(x)
    np.testing.assert_array_equal(here.scales, there.scales)
    codes = [np.asarray(q.codes).view(np.uint8) for q in (here, there)]
    np.testing.assert_array_equal(*codes)


def test_product_is_within_float32_sums_of_the_exact_one():
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((n, 640)).astype(np.float32) for n in (200, 384))
    xq, wq = quantize(jnp.asarray(x)), quantize(jnp.asarray(w), (128, 128))
    y = jax.jit(lambda a, b: scaled_matmul_nt(a, b, jnp.float32))(xq, wq)
    a, b = (
        np.asarray(q.codes).astype(np.float64) * np.asarray(expand_scales(q))
        for q in (xq, wq)
    )
    # 640 terms summed in float32: far below one part in 10^4 of the terms' size.
    bound = 1e-4 * (np.abs(a) @ np.abs(b).T)
    assert (np.abs(np.asarray(y, np.float64) - a @ b.T) <= bound).all()


@pytest.mark.parametrize(("name", "bound"), [("bf16", 1e-3), ("fp8", 0.0)])
def test_sampler_and_trainer_are_close(name, bound):
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=512,
        tie_word_embeddings=True,
    )
    recipe = get_recipe(name)
    learner = Learner(
        config, recipe, OptimizerConfig(1e-4), negative_log_likelihood, vocab_size=380
    )
    params = init_params(config, jax.random.key(0), std=0.05)
    codes = learner.quantize(params)
    prompts = Prompts([[1, 2, 3], list(range(50))], np.arange(8).reshape(2, 4))
    rollouts = ContinuousRolloutEngine(config, recipe.rollout, 380).generate(
        learner.rollout_weights(params, codes),
        prompts,
        SamplingParams(max_new_tokens=64, stop_ids=(379,), num_samples=4),
        key=(0, 0),
    )
    completions = rollouts.completions()
    tokens, mask = token_rows(
        [p for p in prompts.tokens for _ in range(4)], completions
    )
    frozen = learner.frozen_weights(params, codes)
    scored = learner.score(frozen, learner.put(micro_batches(tokens, 8)))[0]
    d = (np.asarray(scored) - place_on_targets(rollouts.log_probs, mask))[mask]
    assert np.mean(np.expm1(d) - d) <= bound
