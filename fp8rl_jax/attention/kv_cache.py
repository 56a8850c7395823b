"""The sampler's key-value cache: pages of bfloat16 or FP8 that sequences share."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Int

from fp8rl_jax.attention.dispatch import store
from fp8rl_jax.attention.layout import GROUP
from fp8rl_jax.fp8 import BLOCK, Precision
from fp8rl_jax.implementation import Implementation
from fp8rl_jax.kernels.hopper_paged_decode import SharedPrefix


def page_size(num_tokens: int, platform: str) -> int:
    """Positions of a page: 128, the block of attention.

    Where no kernel reads them, sequences whose ``num_tokens`` all fit have one smaller
    page each.

    Args:
      num_tokens: of the longest sequence.
      platform: of the devices, "gpu" for those with kernels.
    """
    if platform == "gpu" or num_tokens > BLOCK:
        return BLOCK
    return -(-num_tokens // GROUP) * GROUP


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the tokens of a step go and how far they see; the same in every layer.

    Attributes:
      positions: int32 [B, T], within the sequence. Either one token a row (-1: the row
        is idle), or consecutive positions from a multiple of the page size on.
      pages: int32 [B, T], the page of each; -1 if the row has none there.
      slots: int32 [B, T], the slot within it.
      order: int32 [B], rows by descending number of tokens up to their last, without
        those in shared pages: those with most work first.
    """

    positions: Int[Array, "B T"]
    pages: Int[Array, "B T"]
    slots: Int[Array, "B T"]
    order: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers in pages, and each row's table of pages.

    Position p of a sequence is slot p % page of the page that entry p // page of its
    row names. Rows may share pages (see `attention.pages`).

    Attributes:
      k: [L, P, K, page, H], bfloat16, or e4m3 codes.
      v: bfloat16 [L, P, K, page, H], or e4m3 codes [L, P, K, page / 16, H, 16], laid
        out as `attention.layout` says.
      k_scales: float32 [L, P, K, page], powers of two; None for bfloat16.
      v_scales: likewise.
      page_table: int32 [B, pages of a row]; -1 where a row has no page.
      shared: pages at the beginning of several rows, which a decode step then reads
        once. Only its speed depends on it.
    """

    k: Float[Array, "L P K page H"] | Float8e4m3fn[Array, "L P K page H"]
    v: Float[Array, "L P K page H"] | Float8e4m3fn[Array, "L P K page/16 H 16"]
    k_scales: Float[Array, "L P K page"] | None
    v_scales: Float[Array, "L P K page"] | None
    page_table: Int[Array, "B pages"]
    shared: SharedPrefix | None = None

    @classmethod
    def create(
        cls,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page: int,
        head_dim: int,
        page_table: Int[Array, "B pages"],
        precision: Precision,
        dtype: jnp.dtype = jnp.bfloat16,
    ) -> "KVCache":
        """Empty pages of the format that ``precision`` asks for.

        Raises:
          ValueError: ``page`` is not a multiple of 16.
        """
        if page % GROUP or page <= 0:
            raise ValueError(f"A page holds a multiple of {GROUP} tokens, got {page}.")
        shape = num_layers, num_pages, num_kv_heads, page, head_dim
        if not precision.kv_cache:
            k, v = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
            return cls(k, v, None, None, page_table)
        groups = *shape[:3], page // GROUP, head_dim, GROUP
        k, v = (jnp.zeros(s, jnp.float8_e4m3fn) for s in (shape, groups))
        ones = [jnp.ones(shape[:-1], jnp.float32) for _ in range(2)]
        return cls(k, v, *ones, page_table)

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.k.shape[3]

    def arrays(self) -> tuple[Array, ...]:
        """Keys and values, then their scales if there are any."""
        scales = () if self.k_scales is None else (self.k_scales, self.v_scales)
        return self.k, self.v, *scales

    def with_arrays(
        self, k: Array, v: Array, k_scales: Array | None = None, v_scales=None
    ) -> "KVCache":
        """The same rows over other arrays, as :meth:`arrays` gives them."""
        return KVCache(k, v, k_scales, v_scales, self.page_table, self.shared)

    def with_table(
        self, page_table: Int[Array, "B pages"], shared: SharedPrefix | None = None
    ) -> "KVCache":
        """The same pages for other rows."""
        return dataclasses.replace(self, page_table=page_table, shared=shared)

    def place(self, positions: Int[Array, "B T"]) -> Placement:
        """Where tokens at these positions go; see :class:`Placement`."""
        size, num_entries = self.page_size, self.page_table.shape[1]
        inside = (positions >= 0) & (positions < num_entries * size)
        entry = jnp.where(inside, positions // size, 0)
        pages = jnp.take_along_axis(self.page_table, entry, axis=1)
        work = positions[:, -1]
        if self.shared is not None:
            work -= size * self.shared.first
        order = jnp.argsort(-work).astype(jnp.int32)
        return Placement(
            positions, jnp.where(inside, pages, -1), positions % size, order
        )

    def store(
        self,
        layer: Int[Array, ""],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        tokens: Placement,
        *,
        implementation: Implementation | None = None,
    ) -> "KVCache":
        """Stores one layer's keys and values of new tokens, in place under jit.

        Each is quantised once, here, if the cache is FP8. Tokens without a page are
        dropped. Of several tokens a row, whole pages are written.

        Args:
          layer: the layer to write.
          k: [B, T, K, H].
          v: [B, T, K, H].
          tokens: where they go.
          implementation: "mosaic" (Hopper GPUs) or "reference"; None takes the best
            that runs where the program is lowered for.
        """
        arrays = store(
            k,
            v,
            tokens.pages,
            tokens.slots,
            layer,
            *self.arrays(),
            dtype=k.dtype,
            implementation=implementation,
        )
        return self.with_arrays(*arrays)

    def copy_pages(self, source: Int[Array, "C"], target: Int[Array, "C"]) -> "KVCache":
        """Copies pages of all layers, in place under jit.

        Args:
          source: pages to copy.
          target: where to; -1 drops the copy.
        """
        target = jnp.where(target < 0, self.k.shape[1], target)

        def copy(x):
            return x.at[:, target].set(x[:, source], mode="drop")

        return self.with_arrays(*map(copy, self.arrays()))
