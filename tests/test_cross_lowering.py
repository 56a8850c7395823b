"""The 8B train step and sampler lower for CUDA and TPU from shapes alone."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import BLOCK, get_recipe
from fp8rl_jax.grpo import LossConfig, LossInputs, policy_loss
from fp8rl_jax.learner import Learner, OptimizerConfig
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES
from fp8rl_jax.rollout import Prompts, SamplingParams, StaticRolloutEngine
from fp8rl_jax.rollout.engine import _generate

CONFIG = QWEN3_SIZES["8b"]
VOCAB_SIZE = 151_669  # the tokenizer's; the model has 151,936 rows
RECIPE = get_recipe("fp8")
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 1024, 4096
ROWS, TOKENS = 4, 8192


@pytest.fixture(scope="module")
def learner():
    return Learner(
        CONFIG,
        RECIPE,
        OptimizerConfig(learning_rate=1e-6),
        functools.partial(policy_loss, config=LossConfig(tis_ratio=2.0)),
        vocab_size=VOCAB_SIZE,
        remat="full",
    )


def array(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="module")
def train_step(learner):
    """The traced optimiser step: two micro-batches of four packed rows."""
    state = learner.abstract_state()
    codes = jax.eval_shape(learner.quantize, state.params)
    rows = (2, ROWS, TOKENS)
    batch = TokenBatch(*(array(rows) for _ in TokenBatch._fields))
    inputs = LossInputs(
        array(rows, jnp.bool_),
        array(rows, jnp.float32),
        rollout_log_probs=array(rows, jnp.float32),
    )
    return learner.update.trace(state, codes, batch, inputs)


@pytest.fixture(scope="module")
def sampler(learner):
    """The traced sampler: 32 prompts, 16 samples each."""
    params = learner.abstract_state().params
    codes = jax.eval_shape(learner.quantize, params)
    engine = StaticRolloutEngine(CONFIG, RECIPE.rollout, VOCAB_SIZE)
    ids = np.zeros((PROMPTS, SAMPLES), np.int32)
    arrays, static = engine._program(
        Prompts([[0] * PROMPT_TOKENS] * PROMPTS, ids),
        SamplingParams(1.0, NEW_TOKENS, CONFIG.eos_token_ids, SAMPLES),
        "gpu",
    )
    return _generate.trace(
        jax.eval_shape(learner.rollout_weights, params, codes),
        jax.tree.map(lambda x: array(x.shape, x.dtype), arrays),
        array((), jnp.uint32),
        array((), jnp.uint32),
        **static,
    )


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("program", ["train_step", "sampler"])
def test_the_8b_programs_lower_from_shapes(program, platform, request):
    held = {id(x) for x in jax.live_arrays()}
    traced = request.getfixturevalue(program)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    allocated = sum(x.nbytes for x in jax.live_arrays() if id(x) not in held)
    assert allocated < 2**16  # no weight, no cache, no batch
    # The codes of a layer's gate and up projection, stacked over the layers.
    assert "tensor<36x24576x4096xf8E4M3FN>" in text
    # On Hopper only the sums over 128 ids each of a chunk are merged in it.
    sizes = [
        math.prod(map(int, x.split("x"))) for x in re.findall(r"<([\dx]+)xf64>", text)
    ]
    assert not sizes or (platform == "cuda" and max(sizes) <= ROWS * TOKENS * 32)
    # [tokens, vocabulary] never exists.
    assert "x151936xf32" not in text and f"x{VOCAB_SIZE}xf32" not in text


def test_the_masks_of_all_blocks_are_not_kept(train_step):
    """Autodiff of the layer scan would hoist them: 8 GiB here."""
    text = train_step.lower(lowering_platforms=("tpu",)).as_text()
    group = CONFIG.num_heads // CONFIG.num_kv_heads
    one = f"{ROWS}x{CONFIG.num_kv_heads}x{group * TOKENS}x{BLOCK}xi1"
    assert f"tensor<{one}>" in text  # one block's, inside the loop
    assert f"x{one}" not in text


def test_the_cpu_program_is_the_one_with_float64(train_step):
    text = train_step.lower(lowering_platforms=("cpu",)).as_text()
    assert "f64" in text
