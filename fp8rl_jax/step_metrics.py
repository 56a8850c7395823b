"""The metrics of a GRPO step, under NeMo RL's names."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from fp8rl_jax.data.prompts import PromptBatch
from fp8rl_jax.rollout import FinishReason, Rollouts
from fp8rl_jax.tasks.base import Grade

_log = logging.getLogger(__name__)

# Meaningful only before the weights change: taken from a rollout's first update.
_FIRST_UPDATE = (
    "token_mult_prob_error",
    "logprob_abs_diff",
    "logprob_abs_diff_max",
    "seq_mult_prob_error_max",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
)


def combine_updates(updates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One set of metrics for the optimiser steps of a rollout batch."""

    def combine(name: str) -> float:
        values = np.array([u[name] for u in updates])
        if name in _FIRST_UPDATE:
            return values[0].item()
        if name.endswith("_min") or name == "finite":
            return values.min().item()
        return (values.max() if name.endswith("_max") else values.mean()).item()

    return {f"train/{name}": combine(name) for name in updates[0]}


def step_metrics(
    batch: PromptBatch,
    rollouts: Rollouts,
    grades: Sequence[Grade],
    rewards: Float[np.ndarray, "P G"],
    advantages: Float[np.ndarray, "P G"],
) -> dict[str, float]:
    """What the rollouts and their grades say."""
    prompt_lengths = np.array([len(tokens) for tokens in batch.tokens])
    truncated = rollouts.finish_reasons == FinishReason.LENGTH
    best, worst = rewards.max(axis=1), rewards.min(axis=1)
    total = prompt_lengths.sum() * rewards.shape[1] + rollouts.lengths.sum()
    metrics = {
        "train/reward": rewards.mean(),
        "train/accuracy": np.mean([g.correct for g in grades]),
        "train/grading_failures": sum(g.failure is not None for g in grades),
        "train/pct_mixed_groups": (best != worst).mean(),
        "train/advantages_min": advantages.min(),
        "train/advantages_max": advantages.max(),
        "train/mean_prompt_length": prompt_lengths.mean(),
        "train/mean_gen_tokens_per_sample": rollouts.lengths.mean(),
        "train/max_gen_tokens_per_sample": rollouts.lengths.max(),
        "train/truncation_rate": truncated.mean(),
        "train/natural_termination_rate": 1.0 - truncated.mean(),
        "train/total_num_tokens": total,
    }
    components: dict[str, list[float]] = {}
    for grade in grades:
        for name, value in grade.components.items():
            components.setdefault(f"train/reward_{name}", []).append(value)
    metrics |= {name: np.mean(values) for name, values in components.items()}
    if truncated.all():
        _log.warning(
            "Every completion was cut at max_new_tokens: does the prompt use the chat "
            "template, and does the model know the stop token?"
        )
    return {name: float(value) for name, value in metrics.items()}


def with_throughput(
    timing: dict[str, float], metrics: dict[str, float], num_devices: int
) -> dict[str, float]:
    """Adds rates to the times of the phases, unless the step did not train."""
    seconds = {name.rpartition("/")[2]: value for name, value in timing.items()}
    if "policy_training" not in seconds:
        return timing
    tokens = metrics["train/total_num_tokens"]
    generated = metrics["train/global_valid_toks"]
    rate = tokens / seconds["total_step_time"]
    return timing | {
        "performance/tokens_per_sec": rate,
        "performance/tokens_per_sec_per_gpu": rate / num_devices,
        "performance/generation_tokens_per_sec": generated / seconds["generation"],
        "performance/policy_training_tokens_per_sec": tokens
        / seconds["policy_training"],
    }
