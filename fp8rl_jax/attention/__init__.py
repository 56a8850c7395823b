"""Attention over quantised keys and values, and the paged cache that holds them."""

from fp8rl_jax.attention.attention import ATTENDED, attention, cached_attention
from fp8rl_jax.attention.kv_cache import (
    KVCache,
    Placement,
    SharedPrefix,
    page_size,
)
from fp8rl_jax.attention.projected import Rotation, decode_step, split_and_rotate

__all__ = [
    "ATTENDED",
    "KVCache",
    "Placement",
    "Rotation",
    "SharedPrefix",
    "attention",
    "cached_attention",
    "decode_step",
    "page_size",
    "split_and_rotate",
]
