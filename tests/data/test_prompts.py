import collections
import json

import numpy as np
import pytest

from fp8rl_jax.data.prompts import PromptError, PromptIterator, tokenize_prompts


def prompt_set(n, **kwargs):
    """n examples 0..n-1 whose prompts have 1..n tokens."""
    return tokenize_prompts(
        range(n), lambda i: [i] * (i + 1), **{"max_length": n} | kwargs
    )


def draw(iterator, steps):
    return [e for _ in range(steps) for e in next(iterator).examples]


def test_every_epoch_is_a_new_permutation():
    draws = draw(PromptIterator(prompt_set(12), 4, seed=0), 9)
    epochs = [tuple(draws[i : i + 12]) for i in range(0, 36, 12)]
    assert all(sorted(e) == list(range(12)) for e in epochs)
    assert len({*epochs, tuple(range(12))}) == 4


def test_batches():
    iterator = PromptIterator(prompt_set(5), 3, seed=0)
    ids = []
    for _ in range(4):
        batch = next(iterator)
        assert batch.ids.dtype == np.int64
        ids += batch.ids.tolist()
        for example, tokens in zip(batch.examples, batch.tokens, strict=True):
            assert tokens == (example,) * (example + 1)
    assert ids == list(range(12))


def test_order_depends_on_the_seed_only():
    orders = [
        draw(PromptIterator(prompt_set(24), size, seed), 24 // size)
        for size, seed in [(2, 0), (8, 0), (2, 1)]
    ]
    assert orders[0] == orders[1] != orders[2]


def test_batch_larger_than_the_set_runs_over_epochs():
    batch = next(PromptIterator(prompt_set(3), 7, seed=0))
    assert len(set(batch.ids.tolist())) == 7
    counts = collections.Counter(batch.examples)
    assert set(counts) == {0, 1, 2}
    assert sorted(counts.values()) == [2, 2, 3]


@pytest.mark.parametrize("size", [4, 3])
def test_resume_continues_exactly(size):
    reference = PromptIterator(prompt_set(10), 4, seed=5)
    draw(reference, 3)  # In the middle of the second epoch.
    state = json.loads(json.dumps(reference.get_state()))
    resumed = PromptIterator(prompt_set(10), size, seed=5)
    draw(resumed, 1)
    resumed.set_state(state)
    assert next(resumed).ids[0] == 12
    resumed.set_state(state)
    assert draw(resumed, 12 // size) == draw(reference, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: PromptIterator(prompt_set(11), 4, 5), "num_prompts was 10 and is 11"),
        (lambda: PromptIterator(prompt_set(10), 4, 6), "seed was 5 and is 6"),
        (
            lambda: PromptIterator(
                tokenize_prompts(range(10), lambda i: [i], 10), 4, 5
            ),
            "fingerprint was",
        ),
    ],
)
def test_resume_with_other_data_is_an_error(changed, message):
    state = PromptIterator(prompt_set(10), 4, 5).get_state()
    with pytest.raises(PromptError, match=message):
        changed().set_state(state)


def test_long_prompts():
    dropped = prompt_set(10, max_length=4, too_long="drop")
    assert dropped.examples == (0, 1, 2, 3)
    assert dropped.num_dropped == 6
    with pytest.raises(PromptError, match="row 4 has 5 tokens, but at most 4"):
        prompt_set(10, max_length=4)
    with pytest.raises(PromptError, match="no prompt is left of 10 rows"):
        prompt_set(10, max_length=0, too_long="drop")


def test_bad_input():
    with pytest.raises(PromptError, match="no rows"):
        prompt_set(0)
    with pytest.raises(PromptError, match="row 1 has an empty prompt"):
        tokenize_prompts(["a", ""], str.encode, 4)
    with pytest.raises(ValueError, match="too_long"):
        prompt_set(3, too_long="truncate")
    with pytest.raises(ValueError, match="num_prompts_per_step"):
        PromptIterator(prompt_set(3), 0, 0)
