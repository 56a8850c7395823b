"""Static choices of the GRPO family, checked when they are made."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, get_args

Baseline = Literal["mean", "leave_one_out"]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"
]
KLType = Literal["k1", "k2", "k3"]
KLPlacement = Literal["loss", "reward"]
OldPolicy = Literal["current", "rollout", "recomputed"]


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError unless ``value`` is one of a ``Literal``'s strings."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}.")


def _check_bool(name: str, value: object) -> None:
    # The string "none" would count as true (axolotl#3731).
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def _check_number(name: str, value: object, condition: str, holds: Callable) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not holds(value):
        raise ValueError(f"{name}={value!r} must be a number {condition}.")


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How the rewards of a group become advantages.

    Attributes:
      baseline: what is subtracted: the mean of the group, or of the other samples.
      normalize_std: divide by the standard deviation (ddof = 1).
      eps: added to the standard deviation that divides.
      std_floor: a standard deviation up to this share of the group's largest absolute
        reward is rounding residue; it counts as zero and does not divide.
    """

    baseline: Baseline = "mean"
    normalize_std: bool = True
    eps: float = 1e-6
    std_floor: float = 1e-5

    def __post_init__(self):
        check_choice("baseline", self.baseline, Baseline)
        _check_bool("normalize_std", self.normalize_std)
        _check_number("eps", self.eps, "of at least 0", lambda x: x >= 0)
        _check_number("std_floor", self.std_floor, "of at least 0", lambda x: x >= 0)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The clipped policy-gradient loss and its corrections.

    Attributes:
      clip_ratio_low: the policy ratio is clipped below at ``1 - clip_ratio_low``.
      clip_ratio_high: the policy ratio is clipped above at ``1 + clip_ratio_high``.
      dual_clip: ``c`` > 1 of dual clipping: a token of negative advantage A costs at
        most ``-c * A``. None switches it off.
      aggregation: how token losses become a scalar, see
        :func:`fp8rl_jax.grpo.aggregation.aggregate`.
      max_response_length: constant divisor of ``sequence_mean_token_sum_norm``, in
        tokens. Never the padded width, which varies from batch to batch.
      kl_coefficient: beta of the KL penalty; 0 needs no reference policy.
      kl_type: estimator, see :func:`fp8rl_jax.grpo.kl.kl_estimate`.
      kl_placement: ``"loss"`` adds the penalty to the loss. ``"reward"`` leaves the
        loss alone: the caller applies
        :func:`fp8rl_jax.grpo.kl.kl_penalized_rewards` before the advantages.
      kl_importance_weighting: multiply the penalty by π/π_rollout, which makes its
        gradient that of the reverse KL, on- and off-policy.
      tis_ratio: C of truncated importance sampling: each token's loss is weighted by
        min(π_old/π_rollout, C). ``math.inf`` never truncates; None switches it off.
      old_policy: the denominator of the policy ratio. ``"current"``: the current policy
        itself, so that the ratio is exactly 1; right only for one update per rollout.
        ``"rollout"``: the log-probs recorded by the sampler. ``"recomputed"``:
        log-probs evaluated by the trainer before the first update.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None
    kl_coefficient: float = 0.0
    kl_type: KLType = "k3"
    kl_placement: KLPlacement = "loss"
    kl_importance_weighting: bool = False
    tis_ratio: float | None = None
    old_policy: OldPolicy = "current"

    def __post_init__(self):
        check_choice("aggregation", self.aggregation, Aggregation)
        check_choice("kl_type", self.kl_type, KLType)
        check_choice("kl_placement", self.kl_placement, KLPlacement)
        check_choice("old_policy", self.old_policy, OldPolicy)
        _check_bool("kl_importance_weighting", self.kl_importance_weighting)
        _check_number(
            "clip_ratio_low", self.clip_ratio_low, "in (0, 1]", lambda x: 0 < x <= 1
        )
        _check_number(
            "clip_ratio_high", self.clip_ratio_high, "above 0", lambda x: x > 0
        )
        _check_number(
            "kl_coefficient",
            self.kl_coefficient,
            "of at least 0 (a negative one rewards divergence)",
            lambda x: 0 <= x < math.inf,
        )
        if self.dual_clip is not None:
            _check_number("dual_clip", self.dual_clip, "above 1", lambda x: x > 1)
        if self.tis_ratio is not None:
            _check_number("tis_ratio", self.tis_ratio, "above 0", lambda x: x > 0)
        if self.max_response_length is not None:
            _check_number(
                "max_response_length",
                self.max_response_length,
                "of at least 1 token",
                lambda x: x >= 1,
            )
        self._check_combinations()

    def _check_combinations(self):
        if (
            self.aggregation == "sequence_mean_token_sum_norm"
            and self.max_response_length is None
        ):
            raise ValueError(
                "aggregation='sequence_mean_token_sum_norm' divides by a constant: set "
                "max_response_length to the sampler's max_new_tokens."
            )
        if self.tis_ratio is not None and self.old_policy == "rollout":
            raise ValueError(
                "tis_ratio with old_policy='rollout' corrects for the sampler twice: "
                "the ratio is already taken against the rollout log-probs. Set "
                "tis_ratio to None, or old_policy to 'recomputed' or 'current'."
            )
        if self.kl_placement == "reward" and self.kl_type != "k1":
            raise ValueError(
                f"kl_placement='reward' with kl_type={self.kl_type!r} is biased: k1 is "
                "the estimator whose policy gradient is that of the reverse KL. Set "
                "kl_type to 'k1'."
            )
        if self.kl_importance_weighting and self.kl_placement == "reward":
            raise ValueError(
                "kl_importance_weighting applies to a penalty in the loss: switch it "
                "off or set kl_placement to 'loss'."
            )
        if self.kl_importance_weighting and self.kl_type == "k2":
            raise ValueError(
                "kl_importance_weighting with kl_type='k2' has the gradient of no "
                "divergence: set kl_type to 'k3' or 'k1'."
            )

    @property
    def adds_kl_to_loss(self) -> bool:
        """Whether the loss holds a KL term, and so needs reference log-probs."""
        return self.kl_coefficient > 0 and self.kl_placement == "loss"
