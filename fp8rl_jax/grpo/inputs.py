"""What a micro-batch brings to the loss: declared, checked and cleaned of padding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fp8rl_jax.grpo.aggregation import zero_outside
from fp8rl_jax.grpo.config import LossConfig


class LossInputs(NamedTuple):
    """What a micro-batch brings to the loss, beside the current policy's log-probs.

    Log-probs belong to the token at their position and are taken at the sampling
    temperature. Positions outside the mask may hold anything, NaN included.

    Attributes:
      mask: [B, T], nonzero for response tokens (the stop token is one).
      advantages: f32 [B] or [B, T].
      old_log_probs: f32 [B, T], by the trainer at the start of the update, where
        ``LossConfig.old_policy`` is ``"recomputed"``; None otherwise.
      rollout_log_probs: f32 [B, T], recorded by the sampler.
      reference_log_probs: f32 [B, T], of the reference policy.
    """

    mask: Num[Array, "B T"] | Bool[Array, "B T"]
    advantages: Float[Array, "B"] | Float[Array, "B T"]
    old_log_probs: Float[Array, "B T"] | None = None
    rollout_log_probs: Float[Array, "B T"] | None = None
    reference_log_probs: Float[Array, "B T"] | None = None


def zero_padding(batch: LossInputs) -> LossInputs:
    """Returns the batch as constants, all [B, T], with zeros outside the mask."""
    mask = batch.mask.astype(bool)
    advantages = batch.advantages
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    arrays = batch._replace(mask=None, advantages=advantages)
    cleaned = jax.tree.map(lambda x: zero_outside(mask, x), arrays)
    return jax.lax.stop_gradient(cleaned)._replace(mask=mask)


def check_inputs(log_probs: Array, batch: LossInputs, config: LossConfig) -> None:
    """Raises ValueError if an array is missing, superfluous or not as declared."""
    shape = log_probs.shape
    if len(shape) != 2:
        raise ValueError(f"log_probs must be [B, T], not of shape {shape}.")
    if batch.mask.shape != shape:
        raise ValueError(f"mask has shape {batch.mask.shape}, log_probs {shape}.")
    if batch.advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages has shape {batch.advantages.shape}: pass {shape[:1]} or "
            f"{shape}."
        )
    floats = {"log_probs": log_probs} | batch._asdict()
    del floats["mask"]
    for name, x in floats.items():
        if x is not None and x.dtype != jnp.float32:
            raise ValueError(f"{name} is {x.dtype}: the loss needs float32.")
        if x is not None and name != "advantages" and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, log_probs {shape}.")

    if config.old_policy == "recomputed" and batch.old_log_probs is None:
        raise ValueError(
            "old_policy='recomputed' needs old_log_probs: evaluate them before the "
            "first update of a rollout."
        )
    if config.old_policy != "recomputed" and batch.old_log_probs is not None:
        raise ValueError(
            f"old_policy={config.old_policy!r} would ignore old_log_probs: set it to "
            "'recomputed', or pass None."
        )
    needs_rollout = {
        "old_policy='rollout'": config.old_policy == "rollout",
        "tis_ratio": config.tis_ratio is not None,
        "kl_importance_weighting": (
            config.adds_kl_to_loss and config.kl_importance_weighting
        ),
    }
    for option, needs in needs_rollout.items():
        if needs and batch.rollout_log_probs is None:
            raise ValueError(f"{option} needs rollout_log_probs.")
    if config.adds_kl_to_loss and batch.reference_log_probs is None:
        raise ValueError(
            f"kl_coefficient={config.kl_coefficient} needs reference_log_probs: pass "
            "them, or set it to 0."
        )
