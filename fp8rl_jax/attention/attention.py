"""Causal grouped-query attention for training, prefill and decoding."""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fp8rl_jax.attention.dispatch import attend_pages, attend_self, differentiate
from fp8rl_jax.attention.kv_cache import KVCache, Placement
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.implementation import Implementation
from fp8rl_jax.numerics import unify_varying

# What a rematerialisation policy may keep for the gradient.
ATTENDED = "attention"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    precision: Precision,
    *,
    index: Int[Array, "B S R"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Differentiable causal attention of sequences over themselves.

    Under an FP8 KV cache the keys and values are quantised here exactly as the sampler
    quantises them into its cache. Several segments may share a row; each then starts at
    a multiple of 128, so that blocks of the row are blocks of the sequence.

    Args:
      q: queries after QK-norm and RoPE, N query heads.
      k: keys after QK-norm and RoPE, K heads; N is a multiple of K.
      v: values.
      positions: position of each token within its sequence.
      segments: id of each token's sequence within its row; 0 marks padding, whose
        results mean nothing. None if every row is one sequence from its first token on
        (and perhaps padding after it), whatever ``positions`` says.
      precision: what runs in FP8.
      index: where the tokens of segment s are: index[:, s - 1], -1 after its last. The
        gradient's kernel needs it beside ``segments``.
      implementation: "mosaic" (Hopper GPUs) or "reference"; None takes the best that
        runs where the program is lowered for.

    Returns:
      [B, T, N, H] in ``q.dtype``; straight-through gradients for the quantisation.
    """
    tokens = tuple(x for x in (positions, segments, index) if x is not None)
    q, k, v, *tokens = unify_varying(q, k, v, *tokens)
    return _attention(_Static(precision, implementation), q, k, v, tuple(tokens))


def cached_attention(
    q: Float[Array, "B T N H"],
    cache: KVCache,
    layer: Int[Array, ""],
    tokens: Placement,
    precision: Precision,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of new tokens over a cache that already holds them.

    Args:
      q: queries of the new tokens.
      cache: pages; a row's table says which hold its sequence.
      layer: the layer to read.
      tokens: where the new tokens are; keys at later positions are invisible.
      precision: what runs in FP8; must be the one the cache was made for.
      implementation: see :func:`attention`.

    Returns:
      [B, T, N, H] in ``q.dtype``.
    """
    (out,) = attend_pages(
        q,
        tokens.positions,
        tokens.order,
        cache.page_table,
        layer,
        *cache.arrays(),
        fp8=precision.attention,
        dtype=q.dtype,
        implementation=implementation,
    )
    return out


class _Static(NamedTuple):
    precision: Precision
    implementation: Implementation | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, q, k, v, tokens):
    return _attend_self(static, q, k, v, tokens, with_values=False)[0]


def _attend_self(static, q, k, v, tokens, with_values):
    return attend_self(
        *(q, k, v, *tokens), with_values=with_values, dtype=q.dtype, **static._asdict()
    )


def _attention_fwd(static, q, k, v, tokens):
    arrays = _attend_self(static, q, k, v, tokens, with_values=True)
    out, *residuals = (checkpoint_name(x, ATTENDED) for x in arrays)
    return out, (out, *residuals, tokens)


def _attention_bwd(static, residuals, d_out):
    *arrays, tokens = residuals
    gradients = differentiate(
        d_out,
        *arrays,
        *tokens,
        dtype=d_out.dtype,
        implementation=static.implementation,
    )
    return *gradients, jax.tree.map(lambda _: None, tokens)


_attention.defvjp(_attention_fwd, _attention_bwd)
