"""How far the sampler's log-probs are from the trainer's for the same tokens.

In this package the two are one function, so every value here has an exact expectation:
differences 0, ratios 1. Names and formulas are NeMo RL's. They are taken before any
truncation or masking by an importance-sampling correction.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fp8rl_jax.grpo.aggregation import masked_max, token_mean, zero_outside


def mismatch_metrics(
    train_log_probs: Float[Array, "B T"],
    rollout_log_probs: Float[Array, "B T"],
    mask: Num[Array, "B T"] | Bool[Array, "B T"],
    tokens: Float[Array, ""],
) -> dict[str, Float[Array, ""]]:
    """Compares trainer and sampler; with d = log π_train − log π_rollout:

    * ``token_mult_prob_error``: mean exp(abs d), at least 1. A single token of large
      abs d dominates it: read it beside the two that follow.
    * ``logprob_abs_diff``, ``logprob_abs_diff_max``: mean and largest abs d.
    * ``seq_mult_prob_error_max``: the largest of the sequences' means of exp(abs d).
    * ``gen_kl_error``: mean exp(d) − d − 1, estimates KL(π_rollout‖π_train).
    * ``policy_kl_error``: mean exp(−d) + d − 1.
    * ``js_divergence_error``: the mean of both k3 divergences to the mixture.
    * ``sampling_importance_ratio``: mean exp(d), not truncated.

    Args:
      train_log_probs: f32 [B, T], of the trainer, before the weights change.
      rollout_log_probs: f32 [B, T], recorded by the sampler.
      mask: [B, T], nonzero for response tokens. Other positions may hold anything.
      tokens: f32 scalar, valid tokens in the whole update.

    Returns:
      f32 scalars, to be combined over micro-batches with
      :func:`fp8rl_jax.grpo.aggregation.combine_metrics`. They carry no gradient.
    """
    mask = mask.astype(bool)
    train = jax.lax.stop_gradient(zero_outside(mask, train_log_probs))
    rollout = jax.lax.stop_gradient(zero_outside(mask, rollout_log_probs))
    d = train - rollout
    # log π − log (π_train + π_rollout)/2 for either π: of d alone, free of the rounding
    # of large log-probs.
    train_to_mixture = jnp.log(2.0) - jax.nn.softplus(-d)
    rollout_to_mixture = jnp.log(2.0) - jax.nn.softplus(d)
    js = (_k3(train_to_mixture) + _k3(rollout_to_mixture)) / 2.0
    mult_error = jnp.exp(jnp.abs(d))
    lengths = jnp.maximum(mask.sum(axis=-1, dtype=jnp.int32), 1).astype(jnp.float32)
    sequence_error = zero_outside(mask, mult_error).sum(axis=-1) / lengths
    means = {
        "token_mult_prob_error": mult_error,
        "logprob_abs_diff": jnp.abs(d),
        "gen_kl_error": _k3(d),
        "policy_kl_error": _k3(-d),
        "js_divergence_error": js,
        "sampling_importance_ratio": jnp.exp(d),
    }
    return {name: token_mean(x, mask, tokens) for name, x in means.items()} | {
        "logprob_abs_diff_max": masked_max(jnp.abs(d), mask),
        "seq_mult_prob_error_max": masked_max(sequence_error, mask.any(axis=-1)),
    }


def _k3(x: Array) -> Array:
    # expm1 keeps the digits of small differences.
    return jnp.expm1(x) - x
