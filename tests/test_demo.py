"""The demo learns, and learns from the rewards: minutes long."""

import pytest

from configs import qwen3_tiny
from fp8rl_jax.loop import Result, train


def run(run_dir, **grpo) -> Result:
    config = qwen3_tiny.get_config()
    config.run_dir = str(run_dir)
    config.grpo.update(grpo)
    return train(config)


@pytest.mark.slow
def test_grpo_reaches_four_fifths_of_the_held_out_sums(tmp_path):
    accuracy = run(tmp_path).accuracy
    assert accuracy["at the start"] < 0.05
    assert 0.20 <= accuracy["after the warm start"] <= 0.45
    assert accuracy["after GRPO"] >= 0.80


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(tmp_path):
    accuracy = run(tmp_path, shuffle_rewards=True).accuracy
    assert accuracy["after GRPO"] - accuracy["after the warm start"] < 0.05
