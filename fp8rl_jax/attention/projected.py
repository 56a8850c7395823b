"""From the fused projection to attention: split, QK-norm, RoPE, decode step.

A projected token holds, for each KV head, its G query heads, its key and its value. On
Hopper one kernel splits, norms and rotates it, with the same bits in training, prefill
and decoding; in a decode step it also quantises and stores.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.attention import dispatch
from fp8rl_jax.attention.kv_cache import KVCache, Placement, SharedPrefix
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.fp8.fused import rms_norm
from fp8rl_jax.implementation import PlatformFunction, one_at_a_time
from fp8rl_jax.kernels import hopper_paged_decode, hopper_qkv
from fp8rl_jax.numerics import unify_varying, wide


class Rotation(NamedTuple):
    """What turns projected queries and keys into those that attend.

    Attributes:
      q_norm: float32 [H], scale of the queries' RMSNorm.
      k_norm: float32 [H], of the keys'.
      cos: float32 [B, T, H / 2], of the rotary angles.
      sin: float32 [B, T, H / 2].
    """

    q_norm: Float[Array, "H"]
    k_norm: Float[Array, "H"]
    cos: Float[Array, "B T h"]
    sin: Float[Array, "B T h"]


def split_and_rotate(
    qkv: Float[Array, "B T E"], rotation: Rotation, groups: int, eps: float
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Queries, keys and values of projected tokens; differentiable.

    Args:
      qkv: E = K (G + 2) H.
      rotation: norms and angles.
      groups: G, query heads a KV head.
      eps: added to the mean square of the norms.

    Returns:
      Queries (N = K G) and keys after norm and RoPE with one rounding, and values.
    """
    qkv, *rotation = unify_varying(qkv, *rotation)
    return _split_and_rotate((groups, eps), qkv, tuple(rotation))


def decode_step(
    qkv: Float[Array, "B 1 E"],
    rotation: Rotation,
    groups: int,
    eps: float,
    cache: KVCache,
    layer: Int[Array, ""],
    tokens: Placement,
    precision: Precision,
) -> tuple[Float[Array, "B 1 N H"], KVCache]:
    """Stores one projected token a row, and attends.

    The same values as :func:`split_and_rotate`, `KVCache.store` and
    `cached_attention`.

    Args:
      qkv: see :func:`split_and_rotate`, also for the next three.
      rotation: norms and angles.
      groups: query heads a KV head.
      eps: of the norms.
      cache: pages that hold the tokens before.
      layer: of the cache.
      tokens: where the new ones go.
      precision: what runs in FP8.

    Returns:
      The result of attention and the cache with the new tokens.
    """
    pool = cache.arrays()
    out, *arrays = _decode_step(
        qkv,
        *rotation,
        tokens.positions,
        tokens.pages,
        tokens.slots,
        tokens.order,
        cache.page_table,
        layer,
        *pool,
        *jax.tree.leaves(cache.shared),
        num_arrays=len(pool),
        groups=groups,
        eps=eps,
        fp8=precision.attention,
        dtype=qkv.dtype,
    )
    return out, cache.with_arrays(*arrays)


def _split(qkv, head_dim, groups):
    """Queries [B, T, K G, H], keys and values [B, T, K, H]."""
    heads = qkv.reshape(*qkv.shape[:2], -1, groups + 2, head_dim)
    q, k, v = jnp.split(heads, (groups, groups + 1), axis=3)
    return tuple(x.reshape(*qkv.shape[:2], -1, head_dim) for x in (q, k, v))


def _reference(qkv, q_norm, k_norm, cos, sin, *, groups, eps, dtype=None):
    del dtype
    q, k, v = _split(qkv, q_norm.shape[0], groups)

    def rotate(x, norm, cos, sin):
        x1, x2 = jnp.split(rms_norm(x, norm, eps), 2, axis=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def rotated(x, norm):
        return wide(rotate, x.dtype, x, norm, cos, sin)

    return rotated(q, q_norm), rotated(k, k_norm), v


def _on_hopper(qkv, q_norm, k_norm, cos, sin, *, groups, eps, dtype):
    del dtype
    batch, length, _ = qkv.shape
    qkv, cos, sin = (x.reshape(-1, x.shape[-1]) for x in (qkv, cos, sin))
    outs = hopper_qkv.qkv_rows(qkv, q_norm, k_norm, cos, sin, groups=groups, eps=eps)
    return tuple(x.reshape(batch, length, *x.shape[1:]) for x in outs)


def _types(qkv, q_norm, *_, groups, eps, dtype):
    del eps
    batch, length, width = qkv
    (head_dim,) = q_norm
    heads = width // head_dim // (groups + 2)
    shapes = [(batch, length, n, head_dim) for n in (heads * groups, heads, heads)]
    return [(shape, dtype) for shape in shapes]


_rows = PlatformFunction(
    "split_and_rotate",
    _types,
    _reference,
    {"mosaic": one_at_a_time(_on_hopper)},
    no_kernel=lambda qkv, q_norm, *_, groups, eps, dtype: dispatch.no_kernel(
        q_norm[0], dtype
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split_and_rotate(static, qkv, rotation):
    groups, eps = static
    return _rows(qkv, *rotation, groups=groups, eps=eps, dtype=qkv.dtype)


def _split_and_rotate_fwd(static, qkv, rotation):
    return _split_and_rotate(static, qkv, rotation), (qkv, rotation)


def _split_and_rotate_bwd(static, residuals, cotangents):
    groups, eps = static
    qkv, rotation = residuals

    def reference(qkv, rotation):
        return _reference(qkv, *rotation, groups=groups, eps=eps)

    return jax.vjp(reference, qkv, rotation)[1](cotangents)


_split_and_rotate.defvjp(_split_and_rotate_fwd, _split_and_rotate_bwd)


# One token a row: operands of the projection, of the placement, of the cache with
# ``num_arrays`` of its pool, and of the shared prefix if there is one.


def _decode_reference(qkv, *operands, num_arrays, groups, eps, fp8, dtype):
    rotation, (positions, pages, slots, order, page_table, layer, *rest) = (
        operands[:4],
        operands[4:],
    )
    pool = rest[:num_arrays]  # the rows' own tables name the shared pages, too
    q, k, v = _reference(qkv, *rotation, groups=groups, eps=eps)
    pool = dispatch.store_reference(k, v, pages, slots, layer, *pool, dtype=dtype)
    out = dispatch.attend_pages_reference(
        q, positions, order, page_table, layer, *pool, fp8=fp8, dtype=dtype
    )
    return *out, *pool


def _decode_on_hopper(qkv, *operands, num_arrays, groups, eps, fp8, dtype):
    q_norm, k_norm, cos, sin, *places = operands
    positions, pages, slots, order, page_table, layer, *rest = places
    pool, shared = rest[:num_arrays], rest[num_arrays:]
    del fp8, dtype
    tables = q_norm, k_norm, cos[:, 0], sin[:, 0]
    static = dict(groups=groups, eps=eps)
    refs = tuple(jax.new_ref(x) for x in pool)
    lengths = positions[:, 0] + 1
    names = ("q_scales", "k_scales", "v_scales") if len(pool) == 4 else ()
    where = pages[:, 0], slots[:, 0], layer
    q, *q_scales = hopper_qkv.qkv_store(refs, qkv[:, 0], *tables, *where, **static)
    pool = [jax.freeze(ref) for ref in refs]
    out = hopper_paged_decode.paged_decode(
        q,
        *pool[:2],
        page_table,
        lengths,
        layer,
        order=order,
        shared=SharedPrefix(*shared) if shared else None,
        **dict(zip(names, (*q_scales, *pool[2:]), strict=True)),
    )
    return out.reshape(qkv.shape[0], 1, -1, q_norm.shape[0]), *pool


def _decode_types(qkv, q_norm, *operands, num_arrays, groups, eps, fp8, dtype):
    out = _types(qkv, q_norm, groups=groups, eps=eps, dtype=dtype)[0]
    pool = operands[9:][:num_arrays]
    return [out, *dispatch.pool_types(pool, dtype)]


def _no_decode_kernel(qkv, q_norm, *operands, num_arrays, groups, eps, fp8, dtype):
    k = operands[9]
    return dispatch.no_kernel(q_norm[0], dtype, (num_arrays == 4) == fp8, k[3])


_decode_step = PlatformFunction(
    "decode_step",
    _decode_types,
    _decode_reference,
    {"mosaic": _decode_on_hopper},
    no_kernel=_no_decode_kernel,
)
