"""AdamW, its schedule, and moments that are stored in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float, Key, PyTree, UInt16

MOMENT_DTYPES = ("float32", "bfloat16")
_DROPPED_BITS = 16  # of a float32's 32, in bfloat16


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a global-norm clip.

    Attributes:
      learning_rate: peak, reached after the warm-up.
      warmup_steps: optimiser steps of linear warm-up.
      warmup_start: learning rate of the first step, as a share of the peak.
      decay_steps: 0 keeps the peak; otherwise a cosine reaches 0 after so many
        optimiser steps, the warm-up included.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay of embeddings and kernels (not of norm scales).
      max_grad_norm: global norm to clip at.
      mu_dtype: of the stored first moment, "float32" or "bfloat16".
      nu_dtype: of the stored second moment, likewise.
    """

    learning_rate: float
    warmup_steps: int = 0
    warmup_start: float = 0.1
    decay_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    mu_dtype: str = "float32"
    nu_dtype: str = "float32"

    def __post_init__(self):
        if not self.learning_rate > 0 or not self.max_grad_norm > 0:
            raise ValueError(
                "learning_rate and max_grad_norm must be positive, got "
                f"{self.learning_rate} and {self.max_grad_norm}."
            )
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} must exceed "
                f"warmup_steps={self.warmup_steps}, or be 0 for no decay."
            )
        for name in ("mu_dtype", "nu_dtype"):
            if (dtype := getattr(self, name)) not in MOMENT_DTYPES:
                raise ValueError(
                    f"{name}={dtype!r}: choose one of {', '.join(MOMENT_DTYPES)}."
                )

    def schedule(self) -> optax.Schedule:
        """Learning rate of each optimiser step, counted from 0."""
        peak, start = self.learning_rate, self.learning_rate * self.warmup_start
        warmup = optax.linear_schedule(start, peak, max(self.warmup_steps, 1))
        if self.decay_steps:
            rest = optax.cosine_decay_schedule(
                peak, self.decay_steps - self.warmup_steps
            )
        else:
            rest = optax.constant_schedule(peak)
        return optax.join_schedules([warmup, rest], [self.warmup_steps])

    def transform(self) -> optax.GradientTransformation:
        """The optax transformation."""

        def decays(params):
            return jax.tree.map_with_path(
                lambda path, _: path[-1].key != "scale", params
            )

        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            store_moments(
                optax.scale_by_adam(self.b1, self.b2, self.eps),
                jnp.dtype(self.mu_dtype),
                jnp.dtype(self.nu_dtype),
            ),
            optax.add_decayed_weights(self.weight_decay, decays),
            optax.scale_by_learning_rate(self.schedule()),
        )


def store_moments(
    adam: optax.GradientTransformation, mu_dtype: jnp.dtype, nu_dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Has Adam compute in float32 and keep its moments in other dtypes.

    To bfloat16 they are rounded stochastically. Rounded to nearest, a second moment
    that decays by 0.1 % a step would never decay: that is less than half of the last
    bit.

    Args:
      adam: `optax.scale_by_adam`.
      mu_dtype: of the first moment, float32 or bfloat16.
      nu_dtype: of the second moment, likewise.
    """
    dtypes = {"mu": mu_dtype, "nu": nu_dtype}

    def init(params):
        state = adam.init(params)
        return state._replace(
            **{
                name: jax.tree.map(lambda x, d=dtype: x.astype(d), getattr(state, name))
                for name, dtype in dtypes.items()
            }
        )

    def update(updates, state, params=None):
        wide = state._replace(
            **{
                name: jax.tree.map(
                    lambda x: x.astype(jnp.float32), getattr(state, name)
                )
                for name in dtypes
            }
        )
        updates, new = adam.update(updates, wide, params)
        if all(dtype == jnp.float32 for dtype in dtypes.values()):
            return updates, new
        # A function of the step alone, so that a resumed run goes on with the same.
        key = jax.random.fold_in(jax.random.key(0), new.count)
        mu, nu = _round_moments(new.mu, new.nu, key, (mu_dtype, nu_dtype))
        return updates, new._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _round_moments(
    mu: PyTree[Array],
    nu: PyTree[Array],
    key: Key[Array, ""],
    dtypes: tuple[jnp.dtype, jnp.dtype],
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Both moments of every parameter in their dtypes."""
    tree = jax.tree.structure(mu)
    out = []
    for i, moments in enumerate(zip(*map(jax.tree.leaves, (mu, nu)), strict=True)):
        # One draw serves both: 16 bits each.
        bits = jax.random.bits(jax.random.fold_in(key, i), moments[0].shape)
        halves = (bits & 0xFFFF).astype(jnp.uint16), (bits >> 16).astype(jnp.uint16)
        out.append(
            x if dtype == jnp.float32 else stochastic_round(x, noise)
            for x, noise, dtype in zip(moments, halves, dtypes, strict=True)
        )
    return tuple(jax.tree.unflatten(tree, x) for x in zip(*out, strict=True))


def stochastic_round(
    x: Float[Array, "*shape"], noise: UInt16[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
    """Rounds to a neighbour in bfloat16, the nearer the likelier: x on average.

    Args:
      x: float32.
      noise: uniform.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + noise.astype(jnp.uint32)) >> _DROPPED_BITS
    rounded = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
