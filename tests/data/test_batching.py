import numpy as np
import pytest

from fp8rl_jax.data.batching import (
    bucket_length,
    micro_batches,
    place_on_targets,
    token_rows,
)


def test_bucket_length():
    small = [bucket_length(n) for n in (1, 16, 17, 128)]
    assert small == [8, 16, 24, 128]
    buckets = sorted({bucket_length(n) for n in range(129, 4097)})
    assert buckets == [128 * k for k in (2, 3, 4, 6, 8, 12, 16, 24, 32)]
    assert all(bucket_length(n) >= n for n in range(1, 5000))


def test_token_rows():
    prompts, completions = [[1, 2, 3], [4]], [[5], [6, 7, 8]]
    batch, mask = token_rows(prompts, completions)
    assert batch.tokens.shape == mask.shape == (2, 8)
    np.testing.assert_array_equal(batch.tokens[:, :4], [[1, 2, 3, 0], [4, 6, 7, 0]])
    np.testing.assert_array_equal(batch.targets[:, :4], [[2, 3, 5, 0], [6, 7, 8, 0]])
    assert batch.segments is None
    np.testing.assert_array_equal(batch.positions, [np.arange(8)] * 2)
    assert not any(x[:, 3:].any() for x in (batch.tokens, batch.targets, mask))
    # Exactly the completions are trained on.
    assert [batch.targets[i, mask[i]].tolist() for i in range(2)] == completions

    values = np.array([[0.5, 9, 9], [1, 2, 3]], np.float32)
    placed = place_on_targets(values, mask)
    np.testing.assert_array_equal(placed[:, :4], [[0, 0, 0.5, 0], [1, 2, 3, 0]])
    assert placed[:, 3:].sum() == 0


def test_micro_batches():
    tree = {"a": np.arange(6), "b": np.arange(12).reshape(6, 2)}
    cut = micro_batches(tree, 2)
    np.testing.assert_array_equal(cut["a"], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(cut["b"][2], [[8, 9], [10, 11]])
    with pytest.raises(ValueError, match=r"6 rows does not divide into .* of 4"):
        micro_batches(tree, 4)
