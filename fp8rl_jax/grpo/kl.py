"""Estimators of KL(π‖π_ref) from the log-probs of sampled tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fp8rl_jax.grpo.aggregation import zero_outside
from fp8rl_jax.grpo.config import KLType, check_choice
from fp8rl_jax.grpo.importance import policy_ratio


def kl_estimate(
    log_probs: Float[Array, "*S"],
    reference_log_probs: Float[Array, "*S"],
    kl_type: KLType,
    *,
    rollout_log_probs: Float[Array, "*S"] | None = None,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Float[Array, "*S"]:
    """Estimates the KL divergence to the reference, token by token.

    With δ = log π − log π_ref of a token sampled from π, and the expected gradient of
    each when it is a term of the loss:

    ====  ==============  ====================================================
    type  value           gradient
    ====  ==============  ====================================================
    k1    δ               0: use it in the reward only
    k2    δ²/2            that of KL(π‖π_ref)
    k3    exp(−δ) + δ − 1 that of KL(π_ref‖π), close to the other near π_ref
    ====  ==============  ====================================================

    With ``rollout_log_probs`` the estimate is multiplied by π/π_rollout and its
    gradient flows through that weight too: the value is then unbiased for tokens
    sampled from π_rollout, and the gradient of k1 and of k3 is that of KL(π‖π_ref).

    Args:
      log_probs: f32, log π; carries the gradient.
      reference_log_probs: f32, log π_ref.
      kl_type: ``"k1"``, ``"k2"`` or ``"k3"``.
      rollout_log_probs: f32, log-probs under the policy that sampled the tokens.
      input_clamp: bound of abs(δ), None for no bound.
      output_clamp: bound of the absolute estimate before the weight, None for no bound.
        A token on which a clamp acts has no gradient, through its weight either.

    Returns:
      f32 estimates, of the shape of ``log_probs``.

    Raises:
      ValueError: if ``kl_type`` is not one of the three.

    References:
      Schulman 2020, http://joschu.net/blog/kl-approx.html; Shao et al. 2024,
      https://arxiv.org/abs/2402.03300, eq. 4; DeepSeek-AI 2025,
      https://arxiv.org/abs/2512.02556, section 3.1 (weighting).
    """
    check_choice("kl_type", kl_type, KLType)
    raw_delta = log_probs - jax.lax.stop_gradient(reference_log_probs)
    delta = _clamp(raw_delta, input_clamp)
    if kl_type == "k1":
        raw_estimate = delta
    elif kl_type == "k2":
        raw_estimate = jnp.square(delta) / 2.0
    else:
        # expm1 keeps the digits of small divergences.
        raw_estimate = jnp.expm1(-delta) + delta
    estimate = _clamp(raw_estimate, output_clamp)
    if rollout_log_probs is None:
        return estimate
    weight = policy_ratio(log_probs, rollout_log_probs)
    is_clamped = (delta != raw_delta) | (estimate != raw_estimate)
    return estimate * jnp.where(is_clamped, jax.lax.stop_gradient(weight), weight)


def kl_penalized_rewards(
    rewards: Float[Array, "P G"],
    log_probs: Float[Array, "B T"],
    reference_log_probs: Float[Array, "B T"],
    mask: Num[Array, "B T"] | Bool[Array, "B T"],
    kl_coefficient: float,
) -> Float[Array, "P G"]:
    """Subtracts β Σ_t k1 of each response from its reward.

    This is the penalty of ``LossConfig(kl_placement="reward")``; apply it before the
    advantages. A group of equal rewards is not constant any more afterwards, so select
    groups (dynamic sampling) by the rewards before the penalty.

    Args:
      rewards: f32 [P, G].
      log_probs: f32 [B, T], B = P G with the samples of a prompt adjacent; of the
        policy before the update. No gradient flows.
      reference_log_probs: f32 [B, T].
      mask: [B, T], nonzero for response tokens. Other positions may hold anything.
      kl_coefficient: β.

    Returns:
      f32 [P, G].

    Raises:
      ValueError: if B is not P G.
    """
    if log_probs.shape[0] != rewards.size:
        raise ValueError(
            f"log_probs has {log_probs.shape[0]} rows for rewards of shape "
            f"{rewards.shape}: pass one row for each reward."
        )
    mask = mask.astype(bool)
    kl = kl_estimate(
        zero_outside(mask, log_probs), zero_outside(mask, reference_log_probs), "k1"
    )
    penalty = kl_coefficient * zero_outside(mask, kl).sum(axis=-1)
    return rewards - jax.lax.stop_gradient(penalty).reshape(rewards.shape)


def _clamp(x: Array, bound: float | None) -> Array:
    return x if bound is None else jnp.clip(x, -bound, bound)
