"""Sampling from the policy: the `RolloutEngine` contract and its engines."""

from fp8rl_jax.rollout.engine import StaticRolloutEngine
from fp8rl_jax.rollout.types import (
    FinishReason,
    Prompts,
    RolloutEngine,
    Rollouts,
    SamplingParams,
)

__all__ = [
    "FinishReason",
    "Prompts",
    "RolloutEngine",
    "Rollouts",
    "SamplingParams",
    "StaticRolloutEngine",
]
