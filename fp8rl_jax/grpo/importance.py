"""Ratios of probabilities of the same tokens under two policies.

Three policies meet in an update: the current one (π, carries the gradient), the one at
its start (π_old) and the sampler's (π_rollout). The loss's ratio is π/π_old; the
correction for the sampler is π_old/π_rollout, a constant. Their product is π/π_rollout,
which is why the correction must not be combined with a ratio taken against π_rollout.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO_CLAMP = 20.0


def policy_ratio(
    log_probs: Float[Array, "*S"], old_log_probs: Float[Array, "*S"]
) -> Float[Array, "*S"]:
    """Returns π/π_old, with the gradient through ``log_probs`` only.

    The log-ratio is clamped to ±20, where it has no gradient: a finite log-ratio never
    overflows. NaN stays NaN, so that the step can report it.
    """
    log_ratio = log_probs - jax.lax.stop_gradient(old_log_probs)
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def truncated_importance_weight(
    old_log_probs: Float[Array, "*S"],
    rollout_log_probs: Float[Array, "*S"],
    tis_ratio: float,
) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Token-level truncated importance sampling.

    Args:
      old_log_probs: f32, by the trainer at the start of the update.
      rollout_log_probs: f32, recorded by the sampler.
      tis_ratio: C, the largest weight.

    Returns:
      The weights min(π_old/π_rollout, C), and the ratios before truncation; neither
      carries a gradient. A ratio that would overflow gets the weight C (not 0: the
      token is one the trainer finds far likelier), a NaN stays NaN.

    References:
      Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training".
    """
    ratio = policy_ratio(jax.lax.stop_gradient(old_log_probs), rollout_log_probs)
    return jnp.minimum(ratio, tis_ratio), ratio
