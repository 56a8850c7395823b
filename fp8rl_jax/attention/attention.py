"""Causal grouped-query attention for training, prefill and decoding."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.attention.kv_cache import quantize_kv
from fp8rl_jax.attention.reference import attention_backward, attention_forward
from fp8rl_jax.fp8 import Precision, ScaledArray, dequantize, quantize
from fp8rl_jax.numerics import unify_varying


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    precision: Precision,
) -> Float[Array, "B T N H"]:
    """Differentiable causal attention of sequences over themselves (T == S).

    Under an FP8 KV cache the keys and values are quantised here exactly as the sampler
    quantises them into its cache. Several segments may share a row; each then starts at
    a multiple of 128, so that blocks of the row are blocks of the sequence.

    Args:
      q: queries after QK-norm and RoPE, N query heads.
      k: keys after QK-norm and RoPE, K heads; N is a multiple of K.
      v: values.
      positions: position of each token within its sequence.
      segments: id of each token's sequence within its row; 0 marks padding.
      precision: what runs in FP8.

    Returns:
      [B, T, N, H] in ``q.dtype``; straight-through gradients for the quantisation.
    """
    heads = [_group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)]
    q, k, v, positions, segments = unify_varying(*heads, positions, segments)
    out = _attention(precision, q, k, v, positions, segments)
    return _ungroup(out, positions.shape[1])


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"] | ScaledArray,
    v: Float[Array, "B K S H"] | ScaledArray,
    q_positions: Int[Array, "B T"],
    precision: Precision,
) -> Float[Array, "B T N H"]:
    """Attention of new tokens over a cache that already holds them.

    Args:
      q: queries of the new tokens.
      k: one layer's cached keys; slot s holds position s.
      v: one layer's cached values.
      q_positions: position of each new token; slots beyond it are invisible.
      precision: what runs in FP8; must be the one the cache was made for.

    Returns:
      [B, T, N, H] in ``q.dtype``.
    """
    num_slots = k.shape[2]
    batch = q.shape[0]
    kv_positions = jnp.broadcast_to(
        jnp.arange(num_slots, dtype=jnp.int32)[None], (batch, num_slots)
    )
    out, _ = _forward(
        precision,
        _group(q, k.shape[1]),
        k,
        v,
        q_positions,
        jnp.ones_like(q_positions),
        kv_positions,
        jnp.ones_like(kv_positions),
    )
    return _ungroup(out, q.shape[1])


def _group(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K GT H"]:
    """Rows of one KV head together: [B, K, G*T, H], the G query heads outermost."""
    b, t, n, h = q.shape
    return q.swapaxes(1, 2).reshape(b, num_kv_heads, n // num_kv_heads * t, h)


def _ungroup(out: Float[Array, "B K GT H"], num_queries: int):
    b, _, _, h = out.shape
    return out.reshape(b, -1, num_queries, h).swapaxes(1, 2)


def _operands(precision: Precision, q, k, v):
    """Queries, keys and values as the products take them."""
    if precision.attention:
        return quantize(q, (1, q.shape[-1])), k, v
    if precision.kv_cache:
        return q, dequantize(k, q.dtype), dequantize(v, q.dtype)
    return q, k, v


def _forward(precision: Precision, q, k, v, *positions_and_segments):
    operands = _operands(precision, q, k, v)
    return attention_forward(*operands, *positions_and_segments, out_dtype=q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(precision, q, k, v, positions, segments):
    return _attention_fwd(precision, q, k, v, positions, segments)[0]


def _attention_fwd(precision, q, k, v, positions, segments):
    if precision.kv_cache:
        k, v = quantize_kv(k), quantize_kv(v)
    out, lse = _forward(precision, q, k, v, positions, segments, positions, segments)
    return out, (out, lse, q, k, v, positions, segments)


def _attention_bwd(precision, residuals, d_out):
    out, lse, q, k, v, positions, segments = residuals
    tokens = (positions, segments)
    gradients = attention_backward(
        d_out, out, lse, *_operands(precision, q, k, v), *tokens, *tokens
    )
    return *gradients, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
