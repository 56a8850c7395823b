"""Sampling completions from a policy."""

from fp8rl_jax.rollout.capacity import Capacity, EngineLimits
from fp8rl_jax.rollout.engine import ContinuousRolloutEngine, Session
from fp8rl_jax.rollout.types import (
    Completion,
    FinishReason,
    Prompts,
    Request,
    RolloutEngine,
    Rollouts,
    SamplingParams,
)

__all__ = [
    "Capacity",
    "Completion",
    "ContinuousRolloutEngine",
    "EngineLimits",
    "FinishReason",
    "Prompts",
    "Request",
    "RolloutEngine",
    "Rollouts",
    "SamplingParams",
    "Session",
]
