"""Completions are those of each prompt alone, whatever the engine does meanwhile."""

import jax
import numpy as np
import pytest
from rollout_policy import CONFIG, NEVER_DRAWN, PRECISION, VOCAB_SIZE, policy

from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.rollout import (
    ContinuousRolloutEngine,
    EngineLimits,
    FinishReason,
    Request,
    SamplingParams,
    programs,
)

KEY = (7, 0)
LONGEST = 330  # tokens: three pages of 128
ALONE = EngineLimits(max_slots=1, max_length=LONGEST)


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(VOCAB_SIZE, size=count).tolist()


def request(prompt, sample_ids, new, stop_ids=(), **sampling):
    params = SamplingParams(
        sampling.pop("temperature", 0.9),
        new,
        (NEVER_DRAWN, *stop_ids),
        len(sample_ids),
        **sampling,
    )
    return Request(prompt, params, tuple(sample_ids))


PROMPT = tokens_of(0, 150)
REQUESTS = [
    request(PROMPT, (0, 1, 2), 40),
    request(tokens_of(1, 3), (10,), 50, temperature=0.5),
    request(PROMPT[:140] + tokens_of(2, 30), (20, 21), 20),
    request(tokens_of(3, 1), (30,), 140),
    request(tokens_of(4, 129), (40, 41), 25, stop_ids=tuple(range(20, 40))),
    request(tokens_of(5, 128), (50,), 33, temperature=0.0),
    request(PROMPT, (60,), 40, temperature=1.3),
    request(tokens_of(6, 20), (70, 71), 12, temperature=2.0, top_k=3),
    request(tokens_of(7, 20), (80,), 12, temperature=2.0, top_p=0.5, min_p=0.05),
    request(tokens_of(8, 100), (90, 91), 200),
]


def open_session(weights, limits, mesh=None, **kwargs):
    engine = ContinuousRolloutEngine(
        CONFIG, PRECISION, VOCAB_SIZE, mesh, limits=limits, decode=text_of
    )
    return engine.session(
        weights,
        KEY,
        max_length=LONGEST,
        num_prompts=2,
        num_sequences=kwargs.pop("num_sequences", 16),
        **kwargs,
    )


def text_of(ids):
    """A character a token."""
    return "".join(chr(ord("0") + i) for i in ids)


def by_sample(completions):
    """Completions by the id of their request and their place in it."""
    found = {(c.request, c.sample): c for c in completions}
    assert len(found) == len(completions)
    return found


def assert_same(found, expected):
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.log_probs, expected.log_probs)


def one_by_one(weights, requests):
    """Each sample of each request alone in the engine."""
    out = {}
    for i, r in enumerate(requests):
        for j, sample_id in enumerate(r.sample_ids):
            with open_session(weights, ALONE, num_sequences=1) as session:
                values = {**vars(r.sampling), "num_samples": 1}
                alone = Request(r.prompt, SamplingParams(**values), (sample_id,))
                session.submit(alone)
                (out[i, j],) = session.run()
    return out


@pytest.fixture(scope="module")
def alone(weights):
    return one_by_one(weights, REQUESTS)


def test_they_end_for_different_reasons(alone):
    reasons = {c.finish_reason for c in alone.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("seed", "limits"),
    [
        (0, EngineLimits(max_length=LONGEST)),
        (
            1,
            EngineLimits(
                max_slots=3, max_length=LONGEST, decode_steps=5, share_prefixes=True
            ),
        ),
        (2, EngineLimits(max_length=LONGEST, decode_steps=3, prefill_tokens=128)),
        (3, EngineLimits(max_length=LONGEST, num_pages=4, decode_steps=7)),
        (4, EngineLimits(max_length=LONGEST, share_prefixes=True)),
    ],
    ids=["at ease", "three slots", "small chunks", "few pages", "shared prefixes"],
)
def test_arrival_slots_chunks_and_pages_change_nothing(
    weights, alone, seed, limits, monkeypatch
):
    shared, decode = [], programs.decode

    def spy(weights, pool, rows, *args, **kwargs):
        shared.append(rows.shared)
        return decode(weights, pool, rows, *args, **kwargs)

    monkeypatch.setattr(programs, "decode", spy)
    rng = np.random.default_rng(seed)
    waiting = [(int(rng.integers(4)), i) for i in rng.permutation(len(REQUESTS))]
    submitted, completions, step = {}, [], 0
    with open_session(weights, limits) as session:
        while waiting or session.has_work:
            for when, i in list(waiting):
                if when <= step:
                    submitted[session.submit(REQUESTS[i])] = i
                    waiting.remove((when, i))
            completions += session.step()
            step += 1
        metrics = session.metrics()
    assert len(completions) == len(alone)
    for (number, sample), found in by_sample(completions).items():
        assert_same(found, alone[submitted[number], sample])
    assert metrics["rollout/cache_hit_tokens"] > 0
    assert (metrics["rollout/preemptions"] > 0) == (limits.num_pages is not None)
    assert any(x is not None for x in shared) == bool(limits.share_prefixes)
    if limits.max_slots == 3:
        assert metrics["rollout/slot_use_until_queue_empty"] > 0.8


def test_a_mesh_changes_nothing(weights, alone):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    limits = EngineLimits(
        max_slots=2, max_length=LONGEST, decode_steps=5, share_prefixes=True
    )
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        spread = jax.device_put(weights, everywhere)
        with open_session(spread, limits, mesh) as session:
            for r in REQUESTS:
                session.submit(r)
            found = by_sample(session.run())
    assert found.keys() == alone.keys()
    for name, completion in found.items():
        assert_same(completion, alone[name])


def test_the_next_turn_finds_the_last_one_in_the_cache(weights):
    limits = EngineLimits(max_length=LONGEST)
    with open_session(weights, limits) as session:
        session.submit(REQUESTS[0])
        first = by_sample(session.run())[0, 1]
        before = session.metrics()["rollout/cache_hit_tokens"]
        prompt = [*PROMPT, *first.tokens.tolist(), *tokens_of(9, 70)]
        turn = request(prompt, (99,), 30)
        session.submit(turn)
        (second,) = session.run()
        # A page of 128 is full after the first turn.
        assert session.metrics()["rollout/cache_hit_tokens"] == before + 128
    (expected,) = one_by_one(weights, [turn]).values()
    assert_same(second, expected)


def test_new_weights_use_nothing_of_the_old(weights):
    other = policy(init_params(CONFIG, jax.random.key(1), std=0.1))
    limits = EngineLimits(max_length=LONGEST)
    with open_session(weights, limits) as session:
        session.submit(REQUESTS[0])
        session.run()
        session.set_weights(other, KEY)
        number = session.submit(REQUESTS[0])
        found = by_sample(session.run())
    expected = one_by_one(other, REQUESTS[:1])
    for sample in range(3):
        assert_same(found[number, sample], expected[0, sample])


def test_a_cancelled_request_keeps_what_it_has_and_disturbs_nobody(weights, alone):
    limits = EngineLimits(max_length=LONGEST, decode_steps=4)
    with open_session(weights, limits) as session:
        numbers = [session.submit(r) for r in REQUESTS[:4]]
        completions = session.step()
        session.cancel(numbers[0])
        completions += session.run()
    found = by_sample(completions)
    for (number, sample), completion in found.items():
        expected = alone[numbers.index(number), sample]
        if number != numbers[0]:
            assert_same(completion, expected)
            continue
        assert completion.finish_reason == FinishReason.CANCELLED
        np.testing.assert_array_equal(completion.tokens, expected.tokens[:4])
        np.testing.assert_array_equal(completion.log_probs, expected.log_probs[:4])
    assert len(found) == 7


def test_tokens_are_streamed_as_they_are_drawn(weights, alone):
    seen = {}

    def note(number, sample, tokens, log_probs):
        parts = seen.setdefault((number, sample), ([], []))
        parts[0].extend(tokens.tolist())
        parts[1].extend(log_probs.tolist())
        assert len(tokens) <= 4

    limits = EngineLimits(max_length=LONGEST, decode_steps=4)
    with open_session(weights, limits, on_tokens=note) as session:
        session.submit(REQUESTS[0])
        session.run()
    for name, (tokens, log_probs) in seen.items():
        np.testing.assert_array_equal(tokens, alone[name].tokens)
        np.testing.assert_array_equal(np.float32(log_probs), alone[name].log_probs)
    assert len(seen) == 3


@pytest.mark.parametrize("decode_steps", [3, 16])
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(
    weights, alone, decode_steps
):
    whole = alone[0, 0]
    string = text_of(whole.tokens[17:20])  # over the border of a burst
    end = text_of(whole.tokens).index(string) + 3
    seen = []
    limits = EngineLimits(max_length=LONGEST, decode_steps=decode_steps)
    with open_session(
        weights, limits, on_tokens=lambda *a: seen.extend(a[2].tolist())
    ) as session:
        session.submit(request(PROMPT, (0,), 40, stop_strings=("never", string)))
        (found,) = session.run()
    assert found.finish_reason == FinishReason.STOP
    np.testing.assert_array_equal(found.tokens, whole.tokens[:end])
    np.testing.assert_array_equal(found.log_probs, whole.log_probs[:end])
    assert seen == found.tokens.tolist()


def test_a_request_that_is_too_large_is_refused_before_anything_runs(weights):
    limits = EngineLimits(max_length=LONGEST)
    with open_session(weights, limits) as session:
        with pytest.raises(ValueError, match="max_length=330"):
            session.submit(request(PROMPT, (0,), 200))
        assert not session.has_work
    with pytest.raises(ValueError, match="do not hold one sequence of 330 tokens"):
        open_session(weights, EngineLimits(max_length=LONGEST, num_pages=2))


def test_stop_strings_need_a_tokenizer(weights):
    engine = ContinuousRolloutEngine(CONFIG, PRECISION, VOCAB_SIZE)
    with (
        engine.session(weights, KEY, max_length=40) as session,
        pytest.raises(ValueError, match=r"decode=tokenizer\.decode"),
    ):
        session.submit(request([1], (0,), 4, stop_strings=("x",)))
