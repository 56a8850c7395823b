"""How many slots and pages a session has, from what memory is really free."""

import types

import pytest
from rollout_policy import CONFIG, PRECISION, VOCAB_SIZE

from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES
from fp8rl_jax.rollout.capacity import EngineLimits, plan_capacity
from fp8rl_jax.rollout.programs import Policy, page_bytes


class Weights:
    """Stands for weights on devices with so many free bytes; None: they do not say."""

    def __init__(self, platform, *free):
        self._devices = [
            types.SimpleNamespace(
                platform=platform,
                process_index=0,
                memory_stats=lambda n=n: (
                    n and {"bytes_limit": 10 * n, "bytes_in_use": 9 * n}
                ),
            )
            for n in free
        ]

    def devices(self):
        return self._devices


def plan(weights, limits=None, policy=None, **sizes):
    sizes = {
        "max_length": 1280,
        "longest_prompt": 256,
        "num_prompts": 32,
        "num_sequences": 512,
    } | sizes
    policy = policy or Policy(CONFIG, PRECISION, VOCAB_SIZE)
    return plan_capacity(policy, limits or EngineLimits(), weights, **sizes)


@pytest.mark.parametrize(("recipe", "token"), [("fp8", 36 * 8 * 264), ("bf16", 147456)])
def test_a_token_of_8b_takes_its_keys_values_and_scales(recipe, token):
    policy = Policy(QWEN3_SIZES["8b"], get_recipe(recipe).rollout, 151_669)
    assert page_bytes(policy.config, policy.precision, 128) == 128 * token
    free = 80 * 10**9
    capacity = plan(Weights("gpu", free), policy=policy, max_length=8192)
    assert capacity.num_pages == int(0.9 * free) // (128 * token)
    assert capacity.page_copies * capacity.bytes_per_page <= 2**29
    assert f"{capacity.num_pages * 128:,} tokens" in str(capacity)


def test_enough_memory_gives_every_slot_its_pages():
    capacity = plan(Weights("gpu", 10**12))
    assert capacity.page_size == 128
    assert capacity.num_slots == 512
    # Ten pages a sequence, and one that admission leaves over.
    assert capacity.num_pages == 512 * 11
    assert (capacity.prefill_rows, capacity.prefill_length) == (32, 256)
    assert "512 sequences of 1,280 tokens at once" in str(capacity)


def test_the_fullest_device_decides():
    per_page = page_bytes(CONFIG, PRECISION, 128)
    capacity = plan(Weights("gpu", 10**12, 1000 * per_page))
    assert capacity.num_pages == 900


def test_limits_are_kept():
    limits = EngineLimits(
        max_slots=64, max_length=2000, prefill_tokens=1024, num_pages=99
    )
    capacity = plan(Weights("gpu", 10**12), limits, longest_prompt=1500)
    assert capacity.num_slots == 64
    assert capacity.max_length == 2000
    assert capacity.num_pages == 99
    assert (capacity.prefill_rows, capacity.prefill_length) == (2, 512)


def test_where_no_kernel_reads_pages_a_short_sequence_has_one_small_page():
    capacity = plan(Weights("cpu", None), max_length=11, longest_prompt=8)
    assert capacity.page_size == 16
    assert capacity.num_pages == 2 * 512


@pytest.mark.parametrize(("size", "members"), [("0.6b", 16), ("8b", 16), ("14b", 8)])
def test_the_queries_of_a_group_fit_the_kernel(size, members):
    policy = Policy(QWEN3_SIZES[size], get_recipe("fp8").rollout, 151_669)
    assert plan(Weights("gpu", 10**12), policy=policy).group_size == members


@pytest.mark.parametrize("asked", [None, False, True])
def test_prefixes_are_shared_where_a_kernel_can_gain_by_it(asked):
    limits = EngineLimits(share_prefixes=asked)
    assert plan(Weights("gpu", 10**12), limits).share_prefixes is asked
    assert plan(Weights("cpu", None), limits).share_prefixes is bool(asked)


def test_memory_for_less_than_one_sequence_is_refused():
    per_page = page_bytes(CONFIG, PRECISION, 128)
    with pytest.raises(ValueError, match="do not hold one sequence of 1280 tokens"):
        plan(Weights("gpu", 10 * per_page))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_slots": 0}, "max_slots must be positive"),
        ({"num_pages": 0}, "num_pages must be positive"),
        ({"memory_fraction": 1.5}, "memory_fraction must be at most 1"),
    ],
)
def test_bad_limits_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EngineLimits(**change)
