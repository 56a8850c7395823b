"""The sampler's key-value cache, bfloat16 or FP8."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.fp8 import BLOCK, Precision, ScaledArray, quantize

Entries = Float[Array, "..."] | ScaledArray
# Below one block, cache lengths are rounded to this many slots.
_SMALL_ROUND = 8


def quantize_kv(x: Float[Array, "B K S H"]) -> ScaledArray:
    """Quantises keys or values with one power-of-two scale per token and head.

    A power of two makes the dequantised value exact in bfloat16. There is nothing to
    calibrate, and a token's codes depend on that token alone.
    """
    return quantize(x, (1, x.shape[-1]), power_of_two=True)


def cache_length(num_tokens: int) -> int:
    """Slots for sequences of up to ``num_tokens``: whole blocks of 128 positions."""
    multiple = BLOCK if num_tokens > BLOCK else _SMALL_ROUND
    return -(-num_tokens // multiple) * multiple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers; slot s of a row holds position s.

    Attributes:
      k: [L, B, K, S, H], an array or a ScaledArray with scales [L, B, K, S, 1].
      v: likewise.
    """

    k: Entries
    v: Entries

    @classmethod
    def create(
        cls,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        precision: Precision,
        dtype: jnp.dtype = jnp.bfloat16,
    ) -> "KVCache":
        """An empty cache of the layout that ``precision`` asks for."""
        shape = (num_layers, batch, num_kv_heads, num_slots, head_dim)

        def empty() -> Entries:
            if not precision.kv_cache:
                return jnp.zeros(shape, dtype)
            return ScaledArray(
                jnp.zeros(shape, jnp.float8_e4m3fn),
                jnp.ones((*shape[:-1], 1), jnp.float32),
                (1, head_dim),
            )

        return cls(empty(), empty())

    def repeat_rows(self, count: int) -> "KVCache":
        """Every row ``count`` times in place: the G samples share one prefill."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), self)


def write_kv(
    entries: Entries,
    layer: Int[Array, ""],
    new: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
) -> Entries:
    """Stores one layer's new keys or values at their positions, in place under jit.

    Each is quantised once, here, if the cache is FP8. Positions outside the cache are
    dropped.

    Args:
      entries: all layers, [L, B, K, S, H].
      layer: the layer to write.
      new: [B, T, K, H].
      positions: slot of each new token.

    Returns:
      The updated entries.
    """
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]

    def scatter(old, x):
        return old.at[layer, rows, :, positions].set(x, mode="drop")

    if not isinstance(entries, ScaledArray):
        return scatter(entries, new)
    q = quantize_kv(new)
    return ScaledArray(
        scatter(entries.codes, q.codes), scatter(entries.scales, q.scales), q.block
    )
