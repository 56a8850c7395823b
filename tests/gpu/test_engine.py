"""The engine on a GPU: a completion's bits are those of its prompt sampled alone."""

import jax
import numpy as np
import pytest

from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.fp8.weights import quantize_weights, sampling_weights
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.rollout import (
    ContinuousRolloutEngine,
    EngineLimits,
    Request,
    SamplingParams,
)

CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=768,
    tie_word_embeddings=True,
)
STOP = 511  # the tokenizer's ids end before it: never drawn
LONGEST = 400  # tokens: four pages of 128
FEW = 6  # pages, for up to eleven samples


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(500, size=count).tolist()


def request(prompt, sample_ids, new, temperature=0.9, **truncation):
    params = SamplingParams(temperature, new, (STOP,), len(sample_ids), **truncation)
    return Request(prompt, params, tuple(sample_ids))


PROMPT = tokens_of(0, 250)
REQUESTS = [
    request(PROMPT, (0, 1, 2), 60),
    request(tokens_of(1, 3), (10,), 300),
    request(PROMPT[:200] + tokens_of(2, 30), (20, 21), 40),
    request(tokens_of(3, 128), (30, 31), 130, 0.0),
    request(tokens_of(4, 129), (40,), 33, 2.0, top_k=5, top_p=0.9),
    request(tokens_of(5, 300), (50, 51), 90, 1.3),
]


def make_engine(recipe, **limits):
    limits = EngineLimits(max_length=LONGEST, **limits)
    return ContinuousRolloutEngine(CONFIG, recipe.rollout, 510, limits=limits)


def sample(engine, weights, requests):
    """Completions by request and sample, and the metrics; half the requests late."""
    found = []
    with engine.session(
        weights, (3, 1), max_length=LONGEST, num_prompts=4, num_sequences=16
    ) as session:
        for r in requests[::2]:
            session.submit(r)
        found += session.step()
        for r in requests[1::2]:
            session.submit(r)
        found += session.run()
        metrics = session.metrics()
    order = [*requests[::2], *requests[1::2]]
    named = {order[c.request].sample_ids[c.sample]: c for c in found}
    assert len(named) == len(found)
    return named, metrics


@pytest.fixture(scope="module", params=["fp8", "bf16"])
def policy(request):
    recipe = get_recipe(request.param)

    @jax.jit
    def make(params):
        codes = quantize_weights(params) if request.param == "fp8" else None
        if codes is None:
            codes = jax.tree.map(lambda _: None, params)
        return sampling_weights(params, codes, recipe.rollout.linear)

    weights = make(init_params(CONFIG, jax.random.key(0), std=0.05))
    engine, alone = make_engine(recipe, max_slots=1), {}
    for r in REQUESTS:
        for i in r.sample_ids:
            one = Request(
                r.prompt, SamplingParams(**{**vars(r.sampling), "num_samples": 1}), (i,)
            )
            named, _ = sample(engine, weights, [one])
            alone |= named
    return recipe, weights, alone


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_slots": 3, "decode_steps": 7},
        {"num_pages": FEW, "prefill_tokens": 128},
        {"share_prefixes": True},
    ],
    ids=["at ease", "three slots", "few pages", "shared prefixes"],
)
def test_slots_arrival_chunks_and_pages_change_no_bit(policy, limits):
    recipe, weights, alone = policy
    named, metrics = sample(make_engine(recipe, **limits), weights, REQUESTS)
    assert named.keys() == alone.keys()
    assert (metrics["rollout/preemptions"] > 0) == ("num_pages" in limits)
    for i, completion in named.items():
        np.testing.assert_array_equal(completion.tokens, alone[i].tokens)
        np.testing.assert_array_equal(completion.log_probs, alone[i].log_probs)
