"""The rollout engine: what is drawn, what is recorded, when it ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_policy import CONFIG, NEVER_DRAWN, PRECISION, VOCAB_SIZE, policy

from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import tree_shardings
from fp8rl_jax.rollout import ContinuousRolloutEngine as Engine
from fp8rl_jax.rollout import FinishReason, Prompts, SamplingParams, programs

SAMPLING = SamplingParams(0.8, 8, (NEVER_DRAWN,), num_samples=2)
PROMPTS = Prompts(
    [
        np.random.default_rng(n).integers(VOCAB_SIZE, size=n).tolist()
        for n in (3, 40, 17)
    ],
    np.array([[10, 11], [20, 21], [30, 31]]),
)
KEY = (7, 0)


def subset(prompts, rows, samples=slice(None)):
    return Prompts(
        [prompts.tokens[i] for i in rows], prompts.sample_ids[list(rows)][:, samples]
    )


@pytest.fixture(scope="module")
def rollouts(weights):
    """Three prompts of mixed length, two samples each, eight tokens."""
    return Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
        weights, PROMPTS, SAMPLING, KEY
    )


@jax.jit
def _hidden(weights, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    return Qwen3(CONFIG, weights)(tokens[None], positions, PRECISION)[0][0]


def logits_without_a_cache(weights, prompt, response):
    """Logits [len(response), V] that each response token was drawn from."""
    # One length for all, so that one program serves; the future is invisible.
    tokens = np.zeros(64, np.int32)
    tokens[: len(prompt) + len(response)] = [*prompt, *response]
    hidden = np.asarray(_hidden(weights, tokens), np.float64)
    head = np.asarray(weights["embed"]["embedding"], np.float64)
    first = len(prompt) - 1
    return hidden[first : first + len(response)] @ head.T


def assert_same(found, expected):
    for field in dataclasses.fields(found):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(a, b, field.name)


def test_rows_lengths_and_finish_reasons_without_a_stop(rollouts):
    assert rollouts.tokens.shape == rollouts.log_probs.shape == (6, 8)
    assert rollouts.tokens.dtype == np.int32
    assert rollouts.log_probs.dtype == np.float32
    np.testing.assert_array_equal(rollouts.lengths, 8)
    np.testing.assert_array_equal(rollouts.finish_reasons, FinishReason.LENGTH)
    np.testing.assert_array_equal(rollouts.sample_ids, [10, 11, 20, 21, 30, 31])


def test_log_probs_are_those_of_the_full_forward_at_the_temperature(weights, rollouts):
    for row in range(6):
        response = rollouts.tokens[row].tolist()
        logits = logits_without_a_cache(weights, PROMPTS.tokens[row // 2], response)
        logits = logits[:, :VOCAB_SIZE] / 0.8
        expected = logits[np.arange(8), response] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(rollouts.log_probs[row], expected, atol=1e-5, rtol=0)
    assert np.std(rollouts.log_probs) > 0.3


def test_greedy_takes_the_argmax_of_the_full_forward(weights):
    sampling = SamplingParams(0.0, 12, (NEVER_DRAWN,))
    prompts = subset(PROMPTS, (0, 2), slice(1))
    out = Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
        weights, prompts, sampling, KEY
    )
    for row, prompt in enumerate(prompts.tokens):
        response = out.tokens[row].tolist()
        logits = logits_without_a_cache(weights, prompt, response)[:, :VOCAB_SIZE]
        np.testing.assert_array_equal(response, logits.argmax(-1))
        # Recorded at temperature 1.
        expected = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(out.log_probs[row], expected, atol=1e-5, rtol=0)


def test_the_same_key_repeats_and_another_differs(weights, rollouts):
    sampler = Engine(CONFIG, PRECISION, VOCAB_SIZE)
    assert_same(sampler.generate(weights, PROMPTS, SAMPLING, KEY), rollouts)
    for key in ((7, 1), (8, 0)):
        other = sampler.generate(weights, PROMPTS, SAMPLING, key)
        assert np.mean(other.tokens != rollouts.tokens) > 0.5


def test_samples_of_a_prompt_differ(rollouts):
    for row in (0, 2, 4):
        assert np.mean(rollouts.tokens[row] != rollouts.tokens[row + 1]) > 0.5


def test_the_order_of_prompts_and_samples_does_not_matter(weights, rollouts):
    prompts = subset(PROMPTS, (2, 0, 1), slice(None, None, -1))
    found = Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
        weights, prompts, SAMPLING, KEY
    )
    rows = [5, 4, 1, 0, 3, 2]
    np.testing.assert_array_equal(found.sample_ids, rollouts.sample_ids[rows])
    np.testing.assert_array_equal(found.tokens, rollouts.tokens[rows])
    np.testing.assert_array_equal(found.log_probs, rollouts.log_probs[rows])


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_one_row_alone_is_the_row_of_the_batch(weights, rollouts, limit):
    """A shorter limit cuts the row and changes nothing else."""
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=limit, num_samples=1)
    alone = subset(PROMPTS, (2,), slice(1, 2))
    found = Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
        weights, alone, sampling, KEY
    )
    np.testing.assert_array_equal(found.tokens, rollouts.tokens[5:6, :limit])
    np.testing.assert_array_equal(found.log_probs, rollouts.log_probs[5:6, :limit])
    assert found.lengths == limit


def test_padding_ids_are_never_drawn(params, rollouts):
    """Even where the head gives them nearly all the probability."""
    embedding = params["embed"]["embedding"]
    directions = jax.random.normal(jax.random.key(9), (6, 128), jnp.float32)
    loud = params | {
        "embed": {"embedding": embedding.at[VOCAB_SIZE:].set(5.0 * directions)}
    }
    loud = policy(loud)
    found = Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(loud, PROMPTS, SAMPLING, KEY)
    np.testing.assert_array_equal(found.tokens, rollouts.tokens)
    np.testing.assert_array_equal(found.log_probs, rollouts.log_probs)
    logits = np.concatenate(
        [
            logits_without_a_cache(loud, PROMPTS.tokens[row // 2], found.tokens[row])
            for row in range(6)
        ]
    )
    assert np.mean(logits.argmax(-1) >= VOCAB_SIZE) > 0.9


def test_a_prompt_is_prefilled_once_for_its_samples(weights):
    for num_samples in (1, 8):
        sampling = dataclasses.replace(SAMPLING, num_samples=num_samples)
        ids = np.arange(2 * num_samples).reshape(2, -1)
        sampler = Engine(CONFIG, PRECISION, VOCAB_SIZE)
        sampler.generate(weights, Prompts([[0] * 40, [1] * 200], ids), sampling, KEY)
        # The last token of a prompt is a decode step's.
        assert sampler.metrics["rollout/prefill_tokens"] == 39 + 199


def test_a_mesh_of_eight_devices_draws_the_same(params, rollouts):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = tree_shardings(mesh, DEFAULT_RULES, param_axes(True), params)
    sharded = jax.device_put(params, shardings)
    sampler = Engine(CONFIG, PRECISION, VOCAB_SIZE, mesh)
    with jax.set_mesh(mesh):
        # Three prompts do not divide over four batch shards: a row is filled in.
        found = sampler.generate(policy(sharded), PROMPTS, SAMPLING, KEY)
    assert_same(found, rollouts)


@pytest.mark.parametrize(
    ("tokens", "sample_ids", "message"),
    [
        ([], np.zeros((0, 2)), "no prompts"),
        ([[1], []], np.zeros((2, 2)), "Prompt 1 is empty"),
        ([[1], [2, 90]], np.zeros((2, 2)), r"Prompt 1 .*outside \[0, 90\)"),
        ([[-1]], np.zeros((1, 2)), "Prompt 0 .*outside"),
        ([[1], [2]], np.zeros((2, 1)), r"sample_ids .* \(2, 2\), got \(2, 1\)"),
    ],
)
def test_bad_prompts_are_refused(weights, tokens, sample_ids, message):
    with pytest.raises(ValueError, match=message):
        Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
            weights, Prompts(tokens, sample_ids), SAMPLING, KEY
        )


@pytest.mark.parametrize("vocab_size", [0, 97])
def test_a_vocabulary_that_does_not_fit_the_model_is_refused(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size}.*at most.*96"):
        Engine(CONFIG, PRECISION, vocab_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"num_samples": 0}, "num_samples must be >= 1"),
        ({"stop_ids": ()}, "stop_ids is empty"),
    ],
)
def test_bad_sampling_parameters_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SAMPLING, **change)


def cut_at_stops(rollouts, stop_ids):
    """What stopping makes of completions that were drawn without a stop."""
    tokens, log_probs = rollouts.tokens.copy(), rollouts.log_probs.copy()
    lengths, reasons = rollouts.lengths.copy(), rollouts.finish_reasons.copy()
    for row, ids in enumerate(rollouts.tokens):
        stops = np.flatnonzero(np.isin(ids, stop_ids))
        if stops.size:
            lengths[row], reasons[row] = stops[0] + 1, FinishReason.STOP
            tokens[row, lengths[row] :] = 0
            log_probs[row, lengths[row] :] = 0.0
    return dataclasses.replace(
        rollouts,
        tokens=tokens,
        log_probs=log_probs,
        lengths=lengths,
        finish_reasons=reasons,
    )


@pytest.fixture
def draws(monkeypatch):
    """Records every execution of the sampler's draw, the loop's included."""
    executions = []
    original = programs.sample_tokens

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: executions.append(1))
        return original(*args, **kwargs)

    jax.clear_caches()
    monkeypatch.setattr(programs, "sample_tokens", counted)
    yield executions
    jax.clear_caches()


@pytest.mark.parametrize("stopping_rows", [(0, 3), (0, 1, 2, 3, 4, 5)])
def test_stop_ids_end_rows_and_then_the_loop(weights, rollouts, draws, stopping_rows):
    columns = (0, 4, 2, 1, 3, 2)
    stop_ids = tuple(int(rollouts.tokens[row, columns[row]]) for row in stopping_rows)
    assert len(set(stop_ids)) > 1
    expected = cut_at_stops(rollouts, stop_ids)
    sampling = dataclasses.replace(SAMPLING, stop_ids=(NEVER_DRAWN, *stop_ids))
    found = Engine(CONFIG, PRECISION, VOCAB_SIZE).generate(
        weights, PROMPTS, sampling, KEY
    )
    assert_same(found, expected)
    stops = found.finish_reasons == FinishReason.STOP
    assert stops.any() and stops.all() == (len(stopping_rows) == 6)
    # One draw a step, and no step after the last stop.
    jax.effects_barrier()
    assert len(draws) == found.lengths.max()
    assert (len(draws) < 8) == stops.all()
