"""Which parts run in FP8, in sampling and in training: the named ladder.

| recipe               | sampler linears | sampler KV, attention | trainer |
|----------------------|-----------------|-----------------------|---------|
| `bf16`               | bf16            | bf16                  | bf16    |
| `fp8_rollout_linear` | FP8             | bf16                  | bf16    |
| `fp8_rollout`        | FP8             | FP8                   | bf16    |
| `fp8` (the default)  | FP8             | FP8                   | FP8     |

Only where both columns agree do sampler and trainer evaluate one policy; the two middle
rungs reproduce what other stacks ship and want an importance correction (`tis_ratio`).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinearPrecision:
    """Which of a linear layer's three products run in FP8.

    Attributes:
      forward: y = x w^T, activations 1x128 by weights 128x128.
      dgrad: dx = dy w, output gradients 1x128 by the transposed weight codes.
      wgrad: dw = dy^T x, both 1x128 along tokens, quantised from the bf16 source.
    """

    forward: bool = True
    dgrad: bool = True
    wgrad: bool = True


@dataclasses.dataclass(frozen=True)
class Precision:
    """What runs in FP8 in one phase (sampling or training).

    Attributes:
      linear: the seven linear layers of a block.
      kv_cache: keys and values are quantised per token and head; the trainer attends
        over the same quantised keys and values.
      attention: queries and probabilities are quantised too, so that both products of
        attention run on FP8 operands. Needs ``kv_cache``.
    """

    linear: LinearPrecision
    kv_cache: bool
    attention: bool

    def __post_init__(self):
        if self.attention and not self.kv_cache:
            raise ValueError("FP8 attention needs an FP8 KV cache: set kv_cache=True.")


FP8_LINEAR = LinearPrecision()
BF16_LINEAR = LinearPrecision(forward=False, dgrad=False, wgrad=False)
FP8 = Precision(FP8_LINEAR, kv_cache=True, attention=True)
BF16 = Precision(BF16_LINEAR, kv_cache=False, attention=False)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Precision of the sampler and of the trainer."""

    name: str
    rollout: Precision
    train: Precision

    @property
    def one_policy(self) -> bool:
        """Whether sampler and trainer evaluate the same quantised function."""
        forward = [
            (p.linear.forward, p.kv_cache, p.attention)
            for p in (self.rollout, self.train)
        ]
        return forward[0] == forward[1]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", rollout=BF16, train=BF16),
        Recipe(
            "fp8_rollout_linear",
            rollout=Precision(FP8_LINEAR, kv_cache=False, attention=False),
            train=BF16,
        ),
        Recipe("fp8_rollout", rollout=FP8, train=BF16),
        Recipe("fp8", rollout=FP8, train=FP8),
    )
}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
      ValueError: no such recipe; the message lists the names.
    """
    if name not in RECIPES:
        raise ValueError(
            f"Unknown recipe {name!r}: choose one of {', '.join(sorted(RECIPES))}."
        )
    return RECIPES[name]
