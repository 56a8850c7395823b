"""Group relative policy optimisation as pure functions of arrays."""

from fp8rl_jax.grpo.advantages import group_advantages, group_baseline_and_std
from fp8rl_jax.grpo.aggregation import (
    Normalizer,
    aggregate,
    combine_metrics,
    empty_metrics,
)
from fp8rl_jax.grpo.config import AdvantageConfig, LossConfig
from fp8rl_jax.grpo.importance import policy_ratio, truncated_importance_weight
from fp8rl_jax.grpo.inputs import LossInputs
from fp8rl_jax.grpo.kl import kl_estimate, kl_penalized_rewards
from fp8rl_jax.grpo.losses import clipped_surrogate, policy_loss
from fp8rl_jax.grpo.mismatch import mismatch_metrics
from fp8rl_jax.grpo.presets import PRESET_NAMES, Algorithm, preset

__all__ = [
    "PRESET_NAMES",
    "AdvantageConfig",
    "Algorithm",
    "LossConfig",
    "LossInputs",
    "Normalizer",
    "aggregate",
    "clipped_surrogate",
    "combine_metrics",
    "empty_metrics",
    "group_advantages",
    "group_baseline_and_std",
    "kl_estimate",
    "kl_penalized_rewards",
    "mismatch_metrics",
    "policy_loss",
    "policy_ratio",
    "preset",
    "truncated_importance_weight",
]
