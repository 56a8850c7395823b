"""The clipped policy-gradient loss of GRPO, Dr. GRPO and DAPO.

It is a chain of one-line choices, each a function of its own: ratio → clipped surrogate
→ importance weight → aggregation, plus the KL penalty. A new member of the family
replaces one link.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.grpo.aggregation import (
    Normalizer,
    aggregate,
    masked_max,
    masked_min,
    token_mean,
    zero_outside,
)
from fp8rl_jax.grpo.config import LossConfig
from fp8rl_jax.grpo.importance import policy_ratio, truncated_importance_weight
from fp8rl_jax.grpo.inputs import LossInputs, check_inputs, zero_padding
from fp8rl_jax.grpo.kl import kl_estimate
from fp8rl_jax.grpo.mismatch import mismatch_metrics


class Surrogate(NamedTuple):
    """Token losses with what is reported about their clipping, each [B, T]."""

    loss: Float[Array, "B T"]
    clipped_ratio: Float[Array, "B T"]
    is_clipped: Bool[Array, "B T"]
    is_dual_clipped: Bool[Array, "B T"]


def clipped_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Returns max(−r A, −clip(r, 1 − low, 1 + high) A), at most −c A where A < 0.

    References:
      Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; Yu et al. 2025,
      https://arxiv.org/abs/2503.14476, eq. 10 (separate bounds); Ye et al. 2020,
      https://arxiv.org/abs/1912.09729 (dual clip, c).
    """
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    unclipped, clipped = -ratio * advantages, -clipped_ratio * advantages
    # Strictly greater: at a tie the ratio keeps its gradient.
    is_clipped = clipped > unclipped
    loss = jnp.where(is_clipped, clipped, unclipped)
    is_dual_clipped = jnp.zeros_like(is_clipped)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual_clipped = (advantages < 0.0) & (loss > bound)
        loss = jnp.where(is_dual_clipped, bound, loss)
    return Surrogate(loss, clipped_ratio, is_clipped, is_dual_clipped)


def policy_loss(
    log_probs: Float[Array, "B T"],
    batch: LossInputs,
    normalizer: Normalizer,
    config: LossConfig,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns a micro-batch's share of the loss, and of the metrics, of an update.

    Metrics are shares of means over valid tokens, but ``loss`` and ``kl_penalty``
    (before its coefficient), which follow ``config.aggregation``, and names in ``_min``
    and ``_max``, which are extrema (±inf without a valid token):

    * ``loss``; ``kl_penalty`` where it is part of the loss;
    * ``probs_ratio`` and ``probs_ratio_clamped``, each also ``_min`` and ``_max``;
    * ``clip_fraction``: tokens whose gradient the clip removed; ``dual_clip_fraction``;
    * with rollout log-probs, :func:`fp8rl_jax.grpo.mismatch.mismatch_metrics` of them
      against the trainer's at the start of the update: ``batch.old_log_probs`` where
      given, else the current ones. The latter are those of the start in the first
      update of a rollout; with ``old_policy="rollout"`` later updates add their own
      drift;
    * with rollout log-probs, ``approx_entropy``: −mean π/π_rollout · log π;
    * with truncated importance sampling, ``is_oob_ratio``: tokens of a ratio above C.

    Args:
      log_probs: f32 [B, T], of the current policy; only this carries a gradient.
      batch: the rest of the micro-batch.
      normalizer: counts of the whole update, not of this micro-batch.
      config: the loss.

    Returns:
      An f32 scalar and a dictionary of f32 scalars. Losses and gradients of
      micro-batches add up; metrics combine by
      :func:`fp8rl_jax.grpo.aggregation.combine_metrics`.

    Raises:
      ValueError: if an array is missing, superfluous or of a wrong shape or dtype.
    """
    check_inputs(log_probs, batch, config)
    mask = batch.mask.astype(bool)
    log_probs = zero_outside(mask, log_probs)
    batch = zero_padding(batch)
    old, rollout = batch.old_log_probs, batch.rollout_log_probs

    current = jax.lax.stop_gradient(log_probs)
    start = current if old is None else old
    ratio = policy_ratio(
        log_probs, rollout if config.old_policy == "rollout" else start
    )
    surrogate = clipped_surrogate(
        ratio,
        batch.advantages,
        config.clip_ratio_low,
        config.clip_ratio_high,
        config.dual_clip,
    )
    token_loss = surrogate.loss
    metrics = _ratio_metrics(ratio, surrogate, mask, normalizer.tokens, config)

    if rollout is not None:
        metrics |= mismatch_metrics(start, rollout, mask, normalizer.tokens)
        entropy = -policy_ratio(current, rollout) * current
        metrics["approx_entropy"] = token_mean(entropy, mask, normalizer.tokens)
    if config.tis_ratio is not None:
        weight, raw = truncated_importance_weight(start, rollout, config.tis_ratio)
        token_loss = token_loss * weight
        out_of_bounds = (raw > config.tis_ratio).astype(jnp.float32)
        metrics["is_oob_ratio"] = token_mean(out_of_bounds, mask, normalizer.tokens)

    def total(values):
        return aggregate(
            values, mask, normalizer, config.aggregation, config.max_response_length
        )

    loss = total(token_loss)
    if config.adds_kl_to_loss:
        kl = kl_estimate(
            log_probs,
            batch.reference_log_probs,
            config.kl_type,
            rollout_log_probs=rollout if config.kl_importance_weighting else None,
        )
        kl_penalty = total(kl)
        loss = loss + config.kl_coefficient * kl_penalty
        metrics["kl_penalty"] = jax.lax.stop_gradient(kl_penalty)
    metrics["loss"] = jax.lax.stop_gradient(loss)
    return loss, metrics


def _ratio_metrics(
    ratio: Array, surrogate: Surrogate, mask: Array, tokens: Array, config: LossConfig
) -> dict[str, Array]:
    ratio = jax.lax.stop_gradient(ratio)
    clipped_ratio = jax.lax.stop_gradient(surrogate.clipped_ratio)
    metrics = {}
    for name, x in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped_ratio)):
        metrics[name] = token_mean(x, mask, tokens)
        metrics[f"{name}_min"] = masked_min(x, mask)
        metrics[f"{name}_max"] = masked_max(x, mask)
    is_clipped = surrogate.is_clipped.astype(jnp.float32)
    metrics["clip_fraction"] = token_mean(is_clipped, mask, tokens)
    if config.dual_clip is not None:
        is_dual_clipped = surrogate.is_dual_clipped.astype(jnp.float32)
        metrics["dual_clip_fraction"] = token_mean(is_dual_clipped, mask, tokens)
    return metrics
