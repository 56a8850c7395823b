"""Attention over quantised keys and values, and the cache that holds them."""

from fp8rl_jax.attention.attention import attention, cached_attention
from fp8rl_jax.attention.kv_cache import KVCache, cache_length, write_kv

__all__ = ["KVCache", "attention", "cache_length", "cached_attention", "write_kv"]
