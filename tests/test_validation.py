"""Validation counts every held-out prompt once, however batches are cut."""

import numpy as np
import pytest

from fp8rl_jax.data.prompts import PromptSet
from fp8rl_jax.data.tokenizer import ByteTokenizer
from fp8rl_jax.rollout import FinishReason, Rollouts, SamplingParams
from fp8rl_jax.tasks.base import Example, Grade
from fp8rl_jax.validation import validate

STOP = ByteTokenizer.stop_ids[0]
LIMIT = 4


class Echo:
    """Answers a prompt with its own text, cut at the limit; records the calls."""

    def __init__(self):
        self.calls = []

    def generate(self, weights, prompts, sampling, key):
        self.calls.append((prompts, key))
        rows = [p for p in prompts.tokens for _ in range(sampling.num_samples)]
        tokens = np.zeros((len(rows), LIMIT), np.int32)
        lengths, reasons = [], []
        for row, prompt in enumerate(rows):
            answer = [*prompt, STOP][:LIMIT]
            tokens[row, : len(answer)] = answer
            lengths.append(len(answer))
            stopped = answer[-1] == STOP
            reasons.append(FinishReason.STOP if stopped else FinishReason.LENGTH)
        return Rollouts(
            tokens,
            np.zeros(tokens.shape, np.float32),
            np.array(lengths),
            np.array(reasons),
            prompts.sample_ids.reshape(-1),
        )


class Pool:
    """Calls an example correct if its answer is the completion; half a point else.

    With several samples, only the first of a prompt may be correct.
    """

    def __init__(self):
        self.graded = []

    def grade(self, samples):
        grades = []
        for example, text, _ in samples:
            first = not self.graded or self.graded[-1] != example.id
            self.graded.append(example.id)
            correct = text == example.answer and first
            grades.append(Grade(1.0 if correct else 0.5, correct))
        return grades


def prompts(count):
    """Prompts of one to five bytes; the answers of every third are right."""
    texts = [str(i) * (1 + i % 5) for i in range(count)]
    return PromptSet(
        tuple(
            Example(str(i), text, text if i % 3 == 0 else "wrong")
            for i, text in enumerate(texts)
        ),
        tuple(tuple(text.encode()) for text in texts),
        0,
    )


def run(count=10, batch_size=4, num_samples=1, max_prompts=100):
    engine, pool = Echo(), Pool()
    metrics, shown = validate(
        engine,
        None,
        prompts(count),
        SamplingParams(0.0, LIMIT, (STOP,), num_samples),
        ByteTokenizer(),
        pool,
        key=(3, 7),
        max_prompts=max_prompts,
        batch_size=batch_size,
    )
    return metrics, shown, engine


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 64])
def test_a_ragged_last_batch_counts_once(batch_size):
    metrics, shown, engine = run(batch_size=batch_size)
    # Prompt i has 1 + i % 5 bytes: 4 or 5 leave no room for the stop token, and 5 are
    # cut. So of 0, 3, 6 and 9, whose answers could be right, 9 is not.
    cut, right = (3, 4, 8, 9), (0, 3, 6)
    assert metrics["accuracy"] == len(right) / 10
    np.testing.assert_allclose(metrics["reward"], (3 * 1.0 + 7 * 0.5) / 10)
    lengths = [min(2 + i % 5, LIMIT) for i in range(10)]
    np.testing.assert_allclose(metrics["avg_length"], np.mean(lengths))
    assert metrics["truncation_rate"] == len(cut) / 10
    assert "pass_k" not in metrics
    assert [s.prompt for s in shown] == [e.prompt for e in prompts(10).examples]
    # One program serves all batches, the last one included.
    assert {len(p.tokens) for p, _ in engine.calls} == {batch_size}
    assert {key for _, key in engine.calls} == {(3, 7)}


def test_several_samples_a_prompt():
    metrics, shown, engine = run(num_samples=3)
    assert metrics["pass_k"] == 0.3
    np.testing.assert_allclose(metrics["accuracy"], 0.3 / 3)
    assert len(shown) == 10
    ids = np.concatenate([p.sample_ids.ravel() for p, _ in engine.calls])
    assert len(set(ids.tolist())) == len(ids)  # no two samples share their noise


def test_samples_do_not_depend_on_the_batch_size():
    ids = [
        np.concatenate([p.sample_ids for p, _ in run(5, size, 2)[2].calls])[:5]
        for size in (2, 5)
    ]
    np.testing.assert_array_equal(*ids)


def test_max_prompts():
    metrics, shown, _ = run(max_prompts=5)
    assert len(shown) == 5 and metrics["accuracy"] == 2 / 5
