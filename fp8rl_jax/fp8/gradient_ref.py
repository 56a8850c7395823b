"""A place in a buffer where the gradient of one weight is added."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from fp8rl_jax.fp8.matmul import add_scaled_matmul_nt
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.implementation import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientRef:
    """Where a backward pass adds the gradient of a weight [N, K], in place.

    Adding into one buffer over layers and micro-batches leaves no gradient to be
    returned, stacked or summed, and lets a kernel add its product itself.

    Attributes:
      ref: float32 `jax.Ref` [N, K], or [L, N, K] for the weights of all layers.
      layer: int32 scalar, the layer in ``ref``; None if ``ref`` is [N, K].
    """

    ref: jax.Ref
    layer: Int[Array, ""] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the gradient."""
        return self.ref.shape if self.layer is None else self.ref.shape[1:]

    def add(self, gradient: Float[Array, "N K"]) -> None:
        """Adds a float32 gradient."""
        self.ref[... if self.layer is None else self.layer] += gradient

    def add_product(
        self, a: ScaledArray, b: ScaledArray, implementation: Implementation | None
    ) -> None:
        """Adds a b^T, of [N, M] and [K, M]."""
        self.ref[...] = add_scaled_matmul_nt(
            self.ref[...], self.layer, a, b, implementation=implementation
        )
