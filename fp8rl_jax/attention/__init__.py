"""Attention over quantised keys and values, and the paged cache that holds them."""

from fp8rl_jax.attention.attention import attention, cached_attention
from fp8rl_jax.attention.kv_cache import KVCache, Placement, page_size
from fp8rl_jax.attention.pages import OutOfPages, PagePool

__all__ = [
    "KVCache",
    "OutOfPages",
    "PagePool",
    "Placement",
    "attention",
    "cached_attention",
    "page_size",
]
