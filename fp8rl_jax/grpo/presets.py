"""The published algorithms as configurations."""

import dataclasses
from collections.abc import Mapping

from fp8rl_jax.grpo.config import AdvantageConfig, LossConfig


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An advantage rule and the loss that goes with it."""

    advantages: AdvantageConfig
    loss: LossConfig


# No preset penalises the KL divergence: it costs a reference model, and present
# practice leaves it out. The GRPO paper's beta is 0.04.
_PRESETS: Mapping[str, tuple[AdvantageConfig, Mapping[str, object]]] = {
    # Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3.
    "grpo": (AdvantageConfig(), {"aggregation": "sequence_mean_token_mean"}),
    # Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    "dr_grpo": (
        AdvantageConfig(normalize_std=False),
        {"aggregation": "sequence_mean_token_sum_norm"},
    ),
    # Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8.
    "dapo": (
        AdvantageConfig(),
        {"aggregation": "token_mean", "clip_ratio_high": 0.28},
    ),
}
PRESET_NAMES = tuple(_PRESETS)


def preset(name: str, *, max_response_length: int) -> Algorithm:
    """Returns a published algorithm, to be varied with ``dataclasses.replace``.

    Args:
      name: ``"grpo"``, ``"dr_grpo"`` or ``"dapo"``. Of DAPO these are clip-higher and
        the token-level loss; its dynamic sampling and length penalty act on the
        rollouts.
      max_response_length: the sampler's limit, in tokens; the constant of Dr. GRPO.

    Raises:
      ValueError: if there is no preset of that name.
    """
    if name not in _PRESETS:
        raise ValueError(f"no preset {name!r}: choose from {', '.join(PRESET_NAMES)}.")
    advantages, loss = _PRESETS[name]
    return Algorithm(
        advantages, LossConfig(max_response_length=max_response_length, **loss)
    )
