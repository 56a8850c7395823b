"""A block-scaled FP8 array."""

import dataclasses

import jax
from jaxtyping import Array, Float, Float8e4m3fn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """FP8 codes and one float32 scale per block of the two last axes.

    The value is ``codes * scales`` with every scale repeated over its block. Blocks at
    the right and lower edges may be ragged. Stacking (layers, batch) adds leading axes
    to both arrays and leaves ``block`` as it is, so that `lax.scan` over a stacked
    ScaledArray yields the ScaledArray of a layer.

    Attributes:
      codes: float8_e4m3fn [..., M, N].
      scales: float32 [..., ceil(M / block[0]), ceil(N / block[1])].
      block: rows and columns that share a scale (static).
    """

    codes: Float8e4m3fn[Array, "... M N"]
    scales: Float[Array, "... m n"]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Rank of the values."""
        return self.codes.ndim

    @property
    def mT(self) -> "ScaledArray":
        """The transpose of the two last axes; the codes are the same bits."""
        return ScaledArray(self.codes.mT, self.scales.mT, self.block[::-1])
