import dataclasses
import math

import pytest

from fp8rl_jax.grpo import PRESET_NAMES, AdvantageConfig, LossConfig, preset


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"aggregation": "none"}, "aggregation='none'"),
        ({"aggregation": ["token_mean"]}, "aggregation"),
        ({"kl_type": "kl"}, "kl_type='kl'"),
        ({"kl_placement": True}, "kl_placement"),
        ({"old_policy": None}, "old_policy"),
        ({"kl_importance_weighting": "none"}, "kl_importance_weighting='none'"),
        ({"clip_ratio_low": 0.0}, "clip_ratio_low"),
        ({"clip_ratio_low": 1.2}, "clip_ratio_low"),
        ({"clip_ratio_high": "0.28"}, "clip_ratio_high"),
        ({"clip_ratio_high": math.nan}, "clip_ratio_high"),
        # A penalty of the wrong sign: Logic-RL#58, RAGEN#58.
        ({"kl_coefficient": -0.1}, "kl_coefficient"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"tis_ratio": 0.0}, "tis_ratio"),
        ({"tis_ratio": True}, "tis_ratio"),
        ({"max_response_length": 0}, "max_response_length"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "max_response_length"),
        ({"tis_ratio": 2.0, "old_policy": "rollout"}, "twice"),
        ({"kl_placement": "reward"}, "k1"),
        ({"kl_importance_weighting": True, "kl_type": "k2"}, "k2"),
        (
            {
                "kl_importance_weighting": True,
                "kl_type": "k1",
                "kl_placement": "reward",
            },
            "kl_placement",
        ),
    ],
)
def test_bad_loss_config_is_an_error_that_names_it(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        # axolotl#3731: the string "none" counted as true.
        {"normalize_std": "none"},
        {"normalize_std": 1},
        {"baseline": "loo"},
        {"eps": -1e-6},
        {"std_floor": "1e-5"},
    ],
)
def test_bad_advantage_config_is_an_error_that_names_it(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        AdvantageConfig(**kwargs)


def test_presets_are_the_published_choices():
    grpo, dr_grpo, dapo = (
        preset(name, max_response_length=512) for name in ("grpo", "dr_grpo", "dapo")
    )
    assert {"grpo", "dr_grpo", "dapo"} == set(PRESET_NAMES)
    assert grpo.loss.aggregation == "sequence_mean_token_mean"
    assert (grpo.loss.clip_ratio_low, grpo.loss.clip_ratio_high) == (0.2, 0.2)
    assert grpo.advantages.normalize_std
    assert dr_grpo.loss.aggregation == "sequence_mean_token_sum_norm"
    assert dr_grpo.loss.max_response_length == 512
    assert not dr_grpo.advantages.normalize_std
    assert dapo.loss.aggregation == "token_mean"
    assert (dapo.loss.clip_ratio_low, dapo.loss.clip_ratio_high) == (0.2, 0.28)
    with pytest.raises(ValueError, match="dapo"):
        preset("ppo", max_response_length=512)


def test_a_varied_preset_is_checked_again():
    loss = preset("dapo", max_response_length=512).loss
    with pytest.raises(ValueError, match="clip_ratio_high"):
        dataclasses.replace(loss, clip_ratio_high=-1.0)
