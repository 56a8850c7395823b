"""The plan against arrays on devices and against programs compiled for an H200.

The programs' sizes are ``memory_analysis().temp_size_in_bytes`` of `Learner.update`,
`Learner.score`, `programs.prefill` and `programs.decode`, compiled with jax 0.11.2 for
an H200 without one (as tests/deviceless.py does) on 2026-12-01: one row of the tokens a
micro-batch, four micro-batches, one device.
"""

import dataclasses
import functools
import math

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp8rl_jax.activation_memory import (
    Shards,
    backward_bytes,
    forward_bytes,
    kept_bytes,
)
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.learner import Learner
from fp8rl_jax.memory_plan import MemoryPlan, Workload, plan_memory
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.mesh import make_abstract_mesh, make_mesh
from fp8rl_jax.rollout import EngineLimits

# Recipe, size, layers, tokens, rematerialisation, bytes.
UPDATES = [
    ("fp8", "8b", 36, 1024, "full", 33_793_937_136),
    ("fp8", "8b", 36, 8192, "full", 39_302_827_760),  # with moments in bfloat16
    ("fp8", "8b", 36, 16384, "full", 45_911_802_352),
    ("bf16", "8b", 36, 8192, "full", 39_872_187_536),
    ("bf16", "8b", 36, 16384, "full", 46_018_580_368),
    ("fp8", "8b", 36, 15360, "attention", 63_281_975_040),
    ("bf16", "8b", 36, 15360, "attention", 63_630_067_616),
    ("fp8", "32b", 8, 8192, "full", 26_489_071_088),
    ("bf16", "32b", 8, 8192, "full", 28_006_943_376),
    ("fp8", "0.6b", 28, 8192, "full", 3_886_738_144),
    ("fp8", "0.6b", 28, 8192, "dots", 3_886_738_144),
    ("fp8", "0.6b", 28, 8192, "none", 12_878_044_640),
    ("bf16", "0.6b", 28, 8192, "dots", 3_926_874_496),
    ("bf16", "0.6b", 28, 8192, "none", 16_475_107_456),
]
# Recipe, size, tokens, bytes: scoring, a prefill, a decode step.
FORWARDS = [
    ("fp8", "8b", 8192, 577_869_736),
    ("fp8", "8b", 16384, 1_155_733_416),
    ("fp8", "8b", 8192, 577_834_440),
    ("fp8", "8b", 512, 36_133_376),
    ("fp8", "32b", 8192, 1_143_314_344),
    ("bf16", "8b", 8192, 843_160_712),
    ("bf16", "8b", 8192, 843_125_508),
]
SMALL = Qwen3Config(
    vocab_size=512,
    hidden_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=512,
    tie_word_embeddings=False,
)


def learner_of(model, recipe, mesh, **optimizer):
    return Learner(
        model,
        get_recipe(recipe),
        OptimizerConfig(1e-6, **optimizer),
        lambda *_: None,
        vocab_size=model.vocab_size,
        mesh=mesh,
    )


def plan_of(model, recipe, mesh, device_bytes=138_700_000_000, optimizer=None, **work):
    work = {
        "micro_batch_tokens": 8192,
        "update_tokens": 512 * 8192,
        "remat": "full",
        "reference": False,
        "recomputed": False,
        "limits": EngineLimits(max_length=8192),
        "longest_prompt": 2048,
        "num_prompts": 32,
        "num_sequences": 512,
    } | work
    learner = learner_of(model, recipe, mesh, **(optimizer or {}))
    work = Workload(**work)
    return plan_memory(model, get_recipe(recipe), learner, mesh, work, device_bytes)


one_device = functools.partial(make_abstract_mesh, 1, 1, 1, 1)


@pytest.mark.parametrize("measured", UPDATES, ids=str)
def test_an_update_takes_a_little_less_than_planned(measured):
    recipe, size, layers, tokens, remat, temporary = measured
    model = dataclasses.replace(QWEN3_SIZES[size], num_layers=layers)
    linear = get_recipe(recipe).train.linear
    gradients = 4 * model.num_parameters
    planned = kept_bytes(model, linear, tokens, remat, 1)
    planned += backward_bytes(model, linear, tokens, Shards())
    assert temporary <= gradients + planned <= 1.03 * temporary


@pytest.mark.parametrize("measured", FORWARDS, ids=str)
def test_a_forward_pass_takes_a_little_less_than_planned(measured):
    recipe, size, tokens, temporary = measured
    linear = get_recipe(recipe).train.linear
    planned = forward_bytes(QWEN3_SIZES[size], linear, tokens, Shards())
    assert temporary <= planned <= 1.05 * temporary


@pytest.mark.parametrize(("recipe", "gigabytes"), [("fp8", 112.185), ("bf16", 98.290)])
def test_the_arguments_of_an_update_are_those_of_the_compiled_program(
    recipe, gigabytes
):
    """A program's arguments, as above, are masters, moments, codes and the batch."""
    update = plan_of(QWEN3_SIZES["8b"], recipe, one_device()).phases["update"]
    planned = sum(update[part] for part in ("masters", "moments", "weight codes"))
    assert planned / 1e9 == pytest.approx(gigabytes, abs=2e-3)


def bytes_on_one_device(tree):
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_arrays_take_on_a_device_what_was_planned(recipe):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    plan = plan_of(SMALL, recipe, mesh, reference=True, recomputed=True)
    with jax.set_mesh(mesh):
        learner = learner_of(SMALL, recipe, mesh)
        params = init_params(SMALL, jax.random.key(0), learner.state_shardings().params)
        state = learner.init(params)
        codes = learner.quantize(params)
        weights = learner.rollout_weights(params, codes)
        frozen = learner.frozen_weights(params, codes)
    update = plan.phases["update"]
    assert update["masters"] == bytes_on_one_device(state.params)
    assert update["moments"] == bytes_on_one_device(state.opt_state)
    assert update["weight codes"] == bytes_on_one_device(codes)
    assert update["reference policy"] == bytes_on_one_device(frozen)
    new = plan.phases["sampling"]["sampler's bf16 weights"]
    shared = codes if recipe == "fp8" else None
    forward = jax.tree.map(
        lambda x: x.codes, shared, is_leaf=lambda x: hasattr(x, "transposed")
    )
    assert new == bytes_on_one_device(weights) - bytes_on_one_device(forward)
    assert plan.phases["log-probs"]["trainer's bf16 weights"] == new


def test_a_mesh_without_devices_gives_the_same_plan():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    abstract = make_abstract_mesh(data=2, fsdp=-1, tensor=2, num_devices=8)
    assert abstract.shape == mesh.shape
    assert plan_of(SMALL, "fp8", abstract) == plan_of(SMALL, "fp8", mesh)
    sharding = NamedSharding(abstract, PartitionSpec("fsdp"))
    assert sharding.shard_shape((8,)) == (4,)


def test_parts_of_8b_on_one_device():
    """By hand: DESIGN's table of one H200, and 76 kB of keys and values a token."""
    optimizer = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
    model = QWEN3_SIZES["8b"]
    plan = plan_of(model, "fp8", one_device(), optimizer=optimizer, reference=True)
    parts = {name: round(size / 1e9, 1) for name, size in plan.phases["update"].items()}
    assert parts["masters"] == parts["moments"] == parts["gradients"] == 32.8
    assert parts["weight codes"] == 13.9  # 6.95e9 kernels, in two layouts
    assert parts["reference policy"] == 9.4  # one layout, embeddings and head
    assert parts["kept by the layers"] == 4.8
    sampling = plan.phases["sampling"]
    pages = sampling["key-value pages"]
    assert pages == plan.capacity.num_pages * 128 * 36 * 8 * (2 * 128 + 2 * 4)
    free = 138_700_000_000 - sum(plan.phases["update"][p] for p in list(parts)[:4])
    free -= sampling["sampler's bf16 weights"]
    assert 0 <= 0.9 * free - pages < plan.capacity.bytes_per_page
    assert plan.fits


def test_phases_that_are_not_there_are_not_planned():
    mesh = one_device()
    plan = plan_of(SMALL, "fp8", mesh)
    assert list(plan.phases) == ["sampling", "update"]
    assert "reference policy" not in plan.phases["update"]
    plan = plan_of(SMALL, "bf16", mesh, recomputed=True)
    assert plan.phases["log-probs"]["trainer's bf16 weights"] > 0


def test_sampling_gathers_weights_that_are_sharded():
    model = QWEN3_SIZES["8b"]
    plan = plan_of(model, "fp8", make_abstract_mesh(1, 4, 2, 8))
    gathered = plan.phases["sampling"]["sampler's weights, gathered"]
    whole = plan_of(model, "fp8", one_device(), reference=True)
    assert gathered == pytest.approx(
        whole.phases["update"]["reference policy"] / 2, rel=1e-2
    )
    assert whole.phases["sampling"]["sampler's weights, gathered"] == 0


def test_a_device_without_room_for_one_sequence_says_what_is_missing():
    plan = plan_of(QWEN3_SIZES["8b"], "fp8", one_device(), device_bytes=80 * 10**9)
    assert not plan.fits
    assert plan.capacity.num_pages >= 64
    assert plan.worst_phase == "update"
    assert plan.peak("sampling") > plan.device_bytes


def test_the_table_adds_up():
    plan = MemoryPlan(
        {
            "sampling": {"masters": 4 * 10**9, "none": 0, "programs": 10**8},
            "update": {"masters": 4 * 10**9, "programs": 10**9, "gradients": 2 * 10**9},
        },
        10**10,
        None,
    )
    assert math.isclose(plan.peak("update"), 7e9)
    assert plan.rows() == [
        {"GB per device": "masters", "sampling": "4.0", "update": "4.0"},
        {"GB per device": "gradients", "sampling": "", "update": "2.0"},
        {"GB per device": "programs", "sampling": "0.1", "update": "1.0"},
        {"GB per device": "peak", "sampling": "4.1", "update": "7.0"},
        {"GB per device": "of", "sampling": "10.0", "update": "10.0"},
    ]
