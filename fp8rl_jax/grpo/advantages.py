"""Group-relative advantages."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.grpo.config import AdvantageConfig, Baseline, check_choice


def group_baseline_and_std(
    rewards: Float[Array, "P G"],
    valid: Bool[Array, "P G"] | None = None,
    *,
    baseline: Baseline = "mean",
    std_floor: float = 1e-5,
) -> tuple[Float[Array, "P G"], Float[Array, "P G"]]:
    """Mean and standard deviation of what each sample is compared with.

    That is its group's valid samples, for the leave-one-out baseline without itself. A
    row is one prompt instance: two rows of the same prompt are two groups.

    Args:
      rewards: f32 [P, G].
      valid: bool [P, G], samples that count; all by default.
      baseline: ``"mean"`` or ``"leave_one_out"``.
      std_floor: relative floor, see :class:`fp8rl_jax.grpo.config.AdvantageConfig`.

    Returns:
      f32 [P, G] each: the baseline, and the standard deviation with Bessel's correction
      (ddof = 1). The latter is exactly 0 if the samples compared with are equal, are
      fewer than two, or differ by rounding only. Without any, the baseline is the
      sample's own reward.

    Raises:
      ValueError: if the arrays are not f32 [P, G] and bool [P, G].
    """
    check_choice("baseline", baseline, Baseline)
    if rewards.ndim != 2 or rewards.dtype != jnp.float32:
        raise ValueError(
            f"rewards must be float32 [prompts, group], not {rewards.dtype} of shape "
            f"{rewards.shape}."
        )
    if valid is None:
        valid = jnp.ones(rewards.shape, bool)
    if valid.shape != rewards.shape or valid.dtype != jnp.bool_:
        raise ValueError(
            f"valid must be bool of the rewards' shape {rewards.shape}, not "
            f"{valid.dtype} of shape {valid.shape}."
        )
    group_size = rewards.shape[1]
    rewards = jnp.where(valid, rewards, jnp.zeros_like(rewards))
    # peers[p, i, j]: sample i of prompt p is compared with sample j.
    peers = jnp.broadcast_to(valid[:, None, :], (*rewards.shape, group_size))
    if baseline == "leave_one_out":
        peers &= ~jnp.eye(group_size, dtype=bool)[None]
    others = jnp.broadcast_to(rewards[:, None, :], peers.shape)

    count = peers.sum(axis=-1, dtype=jnp.int32).astype(jnp.float32)
    mean = jnp.sum(others, axis=-1, where=peers) / jnp.maximum(count, 1.0)
    smallest = jnp.min(others, axis=-1, where=peers, initial=jnp.inf)
    largest = jnp.max(others, axis=-1, where=peers, initial=-jnp.inf)
    # The mean of equal numbers can differ from them by an ulp.
    mean = jnp.where(smallest == largest, smallest, mean)
    mean = jnp.where(count == 0, rewards, mean)

    # Two passes: E[x²] − E[x]² leaves a residue that passes for a real deviation.
    squares = jnp.square(others - mean[:, :, None])
    variance = jnp.sum(squares, axis=-1, where=peers) / jnp.maximum(count - 1.0, 1.0)
    std = jnp.sqrt(variance)
    scale = jnp.max(jnp.abs(rewards), axis=-1, keepdims=True)
    return mean, jnp.where(std <= std_floor * scale, jnp.zeros_like(std), std)


def group_advantages(
    rewards: Float[Array, "P G"],
    config: AdvantageConfig,
    valid: Bool[Array, "P G"] | None = None,
) -> Float[Array, "P G"]:
    """Returns (r − baseline) / (std + eps), or r − baseline where std is 0.

    A group of equal rewards has advantages of exactly 0. It stays in the denominators
    of the loss, and in its KL term; to take it out, clear its rows of the loss mask.

    Args:
      rewards: f32 [P, G], a row for each prompt instance.
      config: baseline and normalisation.
      valid: bool [P, G]. An invalid sample gets the advantage 0 and does not enter its
        group's statistics; its reward may hold anything. All are valid by default.

    Returns:
      f32 [P, G].

    Raises:
      ValueError: if the arrays are not f32 [P, G] and bool [P, G].

    References:
      Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; Ahmadian et al.
      2024, https://arxiv.org/abs/2402.14740 (leave-one-out); Liu et al. 2025,
      https://arxiv.org/abs/2503.20783, section 3.2 (without normalisation).
    """
    mean, std = group_baseline_and_std(
        rewards, valid, baseline=config.baseline, std_floor=config.std_floor
    )
    advantages = rewards - mean
    if config.normalize_std:
        divisor = jnp.where(std > 0.0, std + config.eps, jnp.ones_like(std))
        advantages = advantages / divisor
    if valid is None:
        return advantages
    return jnp.where(valid, advantages, jnp.zeros_like(advantages))
