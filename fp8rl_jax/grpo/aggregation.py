"""From token values to one number that does not depend on how a batch is split.

Every mean is taken over the whole update: each micro-batch sums its own tokens and
divides by the counts of all of them, so that the losses (and gradients) of the
micro-batches add up to those of the batch, for any number of micro-batches, devices,
padding columns and order of rows.
"""

from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fp8rl_jax.grpo.config import Aggregation, check_choice


def zero_outside(mask: Bool[Array, "B T"], x: Float[Array, "B T"]) -> Array:
    """Returns ``x`` with zeros outside ``mask``.

    Applied to inputs, before any exp: 0 * NaN is NaN, and so is the gradient of
    ``where(mask, exp(x), 0)`` where exp overflows.
    """
    return jnp.where(mask, x, jnp.zeros_like(x))


class Normalizer(NamedTuple):
    """Counts over all micro-batches and devices of one update.

    Attributes:
      tokens: f32 scalar, valid tokens.
      sequences: f32 scalar, rows with at least one valid token.
    """

    tokens: Float[Array, ""]
    sequences: Float[Array, ""]

    @classmethod
    def from_mask(cls, mask: Num[Array, "B T"] | Bool[Array, "B T"]) -> Self:
        """Counts the mask of a whole update; nonzero marks a valid token."""
        mask = mask.astype(bool)
        return cls(
            tokens=mask.sum(dtype=jnp.int32).astype(jnp.float32),
            sequences=mask.any(axis=-1).sum(dtype=jnp.int32).astype(jnp.float32),
        )


def token_mean(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], tokens: Float[Array, ""]
) -> Float[Array, ""]:
    """Returns this micro-batch's share of a mean over ``tokens`` tokens."""
    # The guard makes an update without a valid token 0 instead of NaN.
    return zero_outside(mask, values).sum() / jnp.maximum(tokens, 1.0)


def aggregate(
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    normalizer: Normalizer,
    aggregation: Aggregation,
    max_response_length: int | None = None,
) -> Float[Array, ""]:
    """Returns this micro-batch's share of the aggregate of token values.

    With y_i the valid tokens of row i and N the rows that have any:

    * ``token_mean``: Σ_i Σ_t v / Σ_i |y_i| (DAPO).
    * ``sequence_mean_token_mean``: (1/N) Σ_i (1/|y_i|) Σ_t v (GRPO).
    * ``sequence_mean_token_sum_norm``: (1/(N L)) Σ_i Σ_t v, L constant (Dr. GRPO).

    Args:
      values: f32 [B, T].
      mask: bool [B, T]. A row holds the whole of its sequence.
      normalizer: counts of the whole update.
      aggregation: the rule.
      max_response_length: L, in tokens.

    Returns:
      An f32 scalar; the sum over the micro-batches of an update is the aggregate.

    Raises:
      ValueError: if the rule is unknown, or needs a ``max_response_length`` not given.

    References:
      Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 12; Shao et al. 2024,
      https://arxiv.org/abs/2402.03300, eq. 3; Liu et al. 2025,
      https://arxiv.org/abs/2503.20783, section 3.2.
    """
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "token_mean":
        return token_mean(values, mask, normalizer.tokens)
    sums = zero_outside(mask, values).sum(axis=-1)
    sequences = jnp.maximum(normalizer.sequences, 1.0)
    if aggregation == "sequence_mean_token_mean":
        lengths = jnp.maximum(mask.sum(axis=-1, dtype=jnp.int32), 1)
        return (sums / lengths.astype(jnp.float32)).sum() / sequences
    if max_response_length is None:
        raise ValueError("sequence_mean_token_sum_norm needs max_response_length.")
    return sums.sum() / (sequences * max_response_length)


def masked_min(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Array:
    """Returns the smallest valid value, +inf if there is none."""
    return jnp.min(values, where=mask, initial=jnp.inf)


def masked_max(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Array:
    """Returns the largest valid value, -inf if there is none."""
    return jnp.max(values, where=mask, initial=-jnp.inf)


def combine_metrics(stacked: Mapping[str, Float[Array, "M"]]) -> dict[str, Array]:
    """Combines the metrics of M micro-batches, as stacked by ``jax.lax.scan``.

    Names that end in ``_min`` or ``_max`` are extrema; all others are shares of a
    global mean, or of a count, and add up.
    """

    def combine(name, values):
        if name.endswith("_min"):
            return values.min(axis=0)
        if name.endswith("_max"):
            return values.max(axis=0)
        return values.sum(axis=0)

    return {name: combine(name, values) for name, values in stacked.items()}


def empty_metrics(
    metrics: Mapping[str, jax.ShapeDtypeStruct], count: int
) -> dict[str, Float[Array, "M"]]:
    """The stacked metrics of ``count`` micro-batches without a valid token."""

    def fill(name):
        if name.endswith("_min"):
            return jnp.inf
        return -jnp.inf if name.endswith("_max") else 0.0

    return {
        name: jnp.full((count, *x.shape), fill(name), x.dtype)
        for name, x in metrics.items()
    }
