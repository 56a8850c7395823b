"""Pages of a static batch."""

import numpy as np
import pytest

from fp8rl_jax.rollout import SamplingParams
from fp8rl_jax.rollout.static_pages import lay_out, padded_length

PAGE = 128


@pytest.mark.parametrize(
    ("num_tokens", "page", "padded"), [(1, 128, 128), (129, 128, 256), (17, 48, 32)]
)
def test_padded_length(num_tokens, page, padded):
    assert padded_length(num_tokens, page) == padded


@pytest.mark.parametrize("shards", [1, 2])
def test_samples_share_full_pages_and_own_the_rest(shards):
    lengths = np.array([5, 128, 300, 257], np.int32)
    sampling = SamplingParams(1.0, 200, (0,), num_samples=3)
    pages, num_pages = lay_out(lengths, 384, sampling, PAGE, shards)
    assert pages.prompt_table.shape == (4, 3) and pages.row_table.shape == (12, 5)
    copies = np.stack([pages.copy_source, pages.copy_target], -1).reshape(4, 2, 2)
    rows = pages.row_table.reshape(4, 3, 5)
    per_shard = 4 // shards
    for shard in range(shards):
        own = []
        for i in range(shard * per_shard, (shard + 1) * per_shard):
            full, total = lengths[i] // PAGE, -(-(lengths[i] + 200) // PAGE)
            prompt = pages.prompt_table[i]
            held = prompt[prompt >= 0]
            assert len(held) == -(-lengths[i] // PAGE)
            own.extend(prompt[:full])
            for j in range(3):
                row = rows[i, j]
                assert (row >= 0).sum() == total and (row[total:] == -1).all()
                np.testing.assert_array_equal(row[:full], prompt[:full])
                own.extend(row[full:total])
                if j == 2:  # goes on in the original
                    np.testing.assert_array_equal(row[: len(held)], held)
                elif lengths[i] % PAGE:
                    copy = [prompt[full], row[full]]
                    np.testing.assert_array_equal(copies[i, j], copy)
                else:
                    assert copies[i, j, 1] == -1
        # Nobody writes to another's page.
        assert len(set(own)) == len(own)
        assert max(own) < num_pages


def test_the_number_of_pages_depends_on_shapes_alone():
    sampling = SamplingParams(1.0, 128, (0,), num_samples=2)
    counts = {
        lay_out(np.array(lengths, np.int32), 256, sampling, PAGE, 1)[1]
        for lengths in ([1, 1], [129, 256], [128, 200])
    }
    assert counts == {2 * (2 + 2 * 2)}
