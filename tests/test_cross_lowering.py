"""The 8B train step and sampler lower for CUDA and TPU, for 64 devices, from shapes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import BLOCK, get_recipe
from fp8rl_jax.grpo import LossConfig, LossInputs, policy_loss
from fp8rl_jax.learner import Learner
from fp8rl_jax.logprobs import chunking
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.mesh import make_abstract_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.rollout import programs
from fp8rl_jax.rollout.plans import SharedPages

CONFIG = QWEN3_SIZES["8b"]
VOCAB_SIZE = 151_669  # the tokenizer's; the model has 151,936 rows
RECIPE = get_recipe("fp8")
MESH = make_abstract_mesh(data=4, fsdp=8, tensor=2, num_devices=64)
SHARDS = 32  # of rows
SEQUENCES = 512 * SHARDS
ROWS, TOKENS = SHARDS, 8192
PLACES, LONGEST = 6, 2048  # sequences of a packed row


@pytest.fixture(scope="module")
def learner():
    return Learner(
        CONFIG,
        RECIPE,
        OptimizerConfig(learning_rate=1e-6),
        functools.partial(policy_loss, config=LossConfig(tis_ratio=2.0)),
        vocab_size=VOCAB_SIZE,
        remat="full",
        mesh=MESH,
    )


def array(shape, dtype=jnp.int32, axes=()):
    sharding = NamedSharding(MESH, DEFAULT_RULES.spec(axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


micro_batches = functools.partial(array, axes=(None, "batch"))


@pytest.fixture(scope="module")
def train_step(learner):
    """The traced optimiser step: two micro-batches, a packed row on every shard."""
    state = learner.abstract_state()
    codes = jax.eval_shape(learner.quantize, state.params)
    packed, rows = (2, ROWS, TOKENS), (2, ROWS * PLACES, LONGEST)
    index = micro_batches((2, ROWS, PLACES, LONGEST))
    batch = TokenBatch(*(micro_batches(packed) for _ in range(4)), index)
    inputs = LossInputs(
        micro_batches(rows, jnp.bool_),
        micro_batches(rows, jnp.float32),
        rollout_log_probs=micro_batches(rows, jnp.float32),
    )
    with jax.sharding.use_abstract_mesh(MESH):
        return learner.update_program.trace(state, codes, batch, inputs, array(()))


@pytest.fixture(scope="module")
def sampler(learner):
    """What the sampler's programs are traced for: weights, policy and 4,000 pages."""
    params = learner.abstract_state().params
    codes = jax.eval_shape(learner.quantize, params)
    weights = jax.eval_shape(learner.rollout_weights, params, codes)
    policy = programs.Policy(CONFIG, RECIPE.rollout, VOCAB_SIZE, MESH)
    create = functools.partial(programs.create_pool, policy, 4000, BLOCK)
    return weights, policy, jax.eval_shape(create)


def trace_decode(sampler, shared=None):
    """The traced burst of decode steps of 512 sequences a shard."""
    weights, policy, pool = sampler
    ints, floats = array((SEQUENCES,)), array((SEQUENCES,), jnp.float32)
    rows = programs.Rows(
        *(ints for _ in range(4)),
        temperature=floats,
        top_k=ints,
        top_p=floats,
        min_p=floats,
        stop_ids=array((SEQUENCES, 2)),
        page_table=array((SEQUENCES, 64)),
        shared=shared,
    )
    key = (array((), jnp.uint32),) * 2
    static = dict(num_steps=16, truncated=False, policy=policy)
    return programs.decode.trace(weights, pool, rows, key, **static)


@pytest.fixture(scope="module")
def decode(sampler):
    return trace_decode(sampler)


@pytest.fixture(scope="module")
def prefill(sampler):
    """The traced prefill of 16 chunks a shard."""
    weights, policy, pool = sampler
    rows = 16 * SHARDS
    chunks = programs.Chunks(array((rows, 512)), array((rows,)), array((rows, 64)))
    return programs.prefill.trace(weights, pool, chunks, policy=policy)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("program", ["train_step", "decode", "prefill"])
def test_the_8b_programs_lower_from_shapes(program, platform, request):
    held = {id(x) for x in jax.live_arrays()}
    traced = request.getfixturevalue(program)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    allocated = sum(x.nbytes for x in jax.live_arrays() if id(x) not in held)
    assert allocated < 2**16  # no weight, no cache, no batch
    # The codes of a layer's gate and up projection, stacked over the layers.
    assert "tensor<36x24576x4096xf8E4M3FN>" in text
    # On Hopper two numbers for 128 ids, maximum and sum, are merged in it.
    sizes = [
        math.prod(map(int, x.split("x"))) for x in re.findall(r"<([\dx]+)xf64>", text)
    ]
    statistics = 2 * math.prod(chunking(CONFIG.vocab_size)) // 128
    assert not sizes or platform == "cuda"
    assert max(sizes, default=0) <= ROWS * TOKENS * statistics
    # [tokens, vocabulary] never exists.
    assert "x151936xf32" not in text and f"x{VOCAB_SIZE}xf32" not in text


def test_pages_that_a_group_shares_are_read_by_a_kernel_of_their_own(sampler, decode):
    shared = SharedPages(array((SEQUENCES // 4, 16)), array((SEQUENCES // 4,)))
    together = trace_decode(sampler, shared)
    apart, together = (
        x.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")
        for x in (decode, together)
    )
    assert together == apart + 1


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
