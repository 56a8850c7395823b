"""Attention on raw arrays: the reference of each operation and its Hopper kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.attention.layout import place_of, quantize_tokens, rows_of_values
from fp8rl_jax.attention.reference import attention_backward, attention_forward
from fp8rl_jax.fp8 import BLOCK, ScaledArray, dequantize
from fp8rl_jax.fp8.quantize import E4M3, pad_to_multiple
from fp8rl_jax.implementation import PlatformFunction, one_at_a_time
from fp8rl_jax.kernels import (
    cudnn_attention,
    hopper_kv_store,
    hopper_paged_attention,
    hopper_paged_decode,
    hopper_quantize_tokens,
)

_HEAD_DIM = 128  # that of every Qwen3


def _group(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K GT H"]:
    """Rows of one KV head together: [B, K, G*T, H], the G query heads outermost."""
    b, t, n, h = q.shape
    return q.swapaxes(1, 2).reshape(b, num_kv_heads, n // num_kv_heads * t, h)


def _ungroup(out: Float[Array, "B K GT H"], num_queries: int):
    b, _, _, h = out.shape
    return out.reshape(b, -1, num_queries, h).swapaxes(1, 2)


def _round_trip(x):
    """The values that the quantised tokens stand for, in the dtype of ``x``: exact."""
    return dequantize(quantize_tokens(x), x.dtype)


# Attention of rows over themselves.


def _one_sequence(shape):
    """Positions and segments of rows that are one sequence each, padding included."""
    positions = jnp.arange(shape[1], dtype=jnp.int32)[None]
    return jnp.broadcast_to(positions, shape), jnp.ones(shape, jnp.int32)


def _attend_self(
    q, k, v, positions, segments=None, index=None, *, precision, with_values, dtype
):
    del index
    if segments is None:
        positions, segments = _one_sequence(positions.shape)
    num_kv_heads, values = k.shape[2], ()
    if with_values:
        values = (
            _round_trip(q) if precision.attention else q,
            *(_round_trip(x) if precision.kv_cache else x for x in (k, v)),
        )
    q, k, v = _group(q, num_kv_heads), k.swapaxes(1, 2), v.swapaxes(1, 2)
    if precision.attention:
        q, k, v = map(quantize_tokens, (q, k, v))
    elif precision.kv_cache:
        k, v = map(_round_trip, (k, v))
    tokens = positions, segments
    out, lse = attention_forward(q, k, v, *tokens, *tokens, out_dtype=dtype)
    batch, length = positions.shape
    return _ungroup(out, length), lse.reshape(batch, -1, length), *values


def _blocks(positions, segments):
    """The first and the own page of each block of 128 queries; -1: only padding.

    The pages are those of all rows, one after the other.
    """
    starts = positions[:, ::BLOCK]
    own = jnp.arange(starts.size, dtype=jnp.int32).reshape(starts.shape)
    first = own - starts // BLOCK
    if segments is not None:
        own = jnp.where(segments[:, ::BLOCK] == 0, -1, own)
    return first.reshape(-1), own.reshape(-1)


def _attend_self_on_hopper(
    q, k, v, positions, segments=None, index=None, *, precision, with_values, dtype
):
    del dtype, index
    batch, length, num_heads, _ = q.shape
    q, k, v = (pad_to_multiple(x, (BLOCK, 1, 1)) for x in (q, k, v))
    if segments is None:
        positions, _ = _one_sequence(q.shape[:2])
    else:
        segments = pad_to_multiple(segments, (BLOCK,))
        positions = pad_to_multiple(positions, (BLOCK,))
    first, own = _blocks(positions, segments)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    if precision.attention:
        quantized = (
            hopper_quantize_tokens.quantize_tokens(q, with_values=with_values),
            hopper_kv_store.quantize_kv_pages(k, v, with_values=with_values),
        )
        (q, q_scales, *values), (k, v, *scales) = quantized
        scales, values = [q_scales, *scales[:2]], [*values, *scales[2:]]
    else:
        scales, values = (), (q, k, v) if with_values else ()
        k, v = (x.reshape(-1, BLOCK, *x.shape[1:]).swapaxes(1, 2) for x in (k, v))
    out, lse = _attend_on_hopper(
        q,
        *scales[:1],
        page_table=jnp.arange(own.size, dtype=jnp.int32)[None],
        row=jnp.zeros_like(own),
        first=first,
        own=own,
        layer=jnp.int32(0),
        pool=[x[None] for x in (k, v, *scales[1:])],
    )
    lse = lse.reshape(num_heads, batch, -1).swapaxes(0, 1)
    rows = (x.reshape(batch, -1, *x.shape[1:])[:, :length] for x in (out, *values))
    out, *values = rows
    return out, lse[:, :, :length], *values


def _attend_on_hopper(q, *q_scales, page_table, row, first, own, layer, pool):
    """Of query blocks [Tq, N, H] over pages."""
    k, v, *scales = pool
    names = ("q_scales", "k_scales", "v_scales") if scales else ()
    return hopper_paged_attention.paged_attention(
        q,
        k,
        v,
        page_table,
        row,
        first,
        own,
        layer,
        **dict(zip(names, (*q_scales, *scales), strict=True)),
    )


def _codes(x):
    q = quantize_tokens(x)
    return q.codes, q.scales[..., 0]


def _self_types(q, k, v, *_, precision, with_values, dtype):
    del precision
    batch, length, heads, _ = q
    values = [(x, dtype) for x in (q, k, v)] if with_values else []
    return [(q, dtype), ((batch, heads, length), jnp.float32), *values]


def no_kernel(head_dim, dtype, one_recipe=True, page=BLOCK) -> str | None:
    """Why the kernels do not take such operands; None if they do."""
    if head_dim != _HEAD_DIM or page != BLOCK:
        return (
            f"Attention kernels are for head_dim {_HEAD_DIM} and pages of {BLOCK}, got "
            f"{head_dim} and {page}."
        )
    if dtype != jnp.bfloat16:
        return f"Attention kernels are for bfloat16, got {dtype.name}."
    if not one_recipe:
        return "Attention kernels take FP8 queries over an FP8 cache, or neither."
    return None


attend_self = PlatformFunction(
    "attend_self",
    _self_types,
    _attend_self,
    {"mosaic": one_at_a_time(_attend_self_on_hopper)},
    no_kernel=lambda q, *_, precision, with_values, dtype: no_kernel(
        q[-1], dtype, precision.kv_cache == precision.attention
    ),
)


# Its gradient, by the values that its products saw.


def _differentiate(
    d_out, out, lse, q, k, v, positions, segments=None, index=None, *, dtype
):
    del dtype, index
    if segments is None:
        positions, segments = _one_sequence(positions.shape)
    batch, length = positions.shape
    num_kv_heads = k.shape[2]
    rows = [_group(x, num_kv_heads) for x in (d_out, out)]
    lse = lse.reshape(batch, num_kv_heads, -1)
    heads = _group(q, num_kv_heads), k.swapaxes(1, 2), v.swapaxes(1, 2)
    tokens = positions, segments
    dq, dk, dv = attention_backward(*rows, lse, *heads, *tokens, *tokens)
    return _ungroup(dq, length), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _differentiate_on_hopper(
    d_out, out, lse, q, k, v, positions, segments=None, index=None, *, dtype
):
    del dtype
    arrays, lse = (d_out, out, q, k, v), lse.swapaxes(1, 2)
    lengths = None
    if index is not None:
        # A row for every sequence. cuDNN takes packed ones too, but its workspace is
        # that of sequences which are all as long as the row.
        arrays, lse, lengths = _unpack(arrays, lse, index)
    length = lse.shape[1]
    arrays = [pad_to_multiple(x, (BLOCK, 1, 1)) for x in arrays]
    lse = jnp.pad(lse, ((0, 0), (0, -length % BLOCK), (0, 0)), constant_values=jnp.inf)
    gradients = cudnn_attention.attention_backward(*arrays, lse.swapaxes(1, 2), lengths)
    if index is not None:
        return tuple(_pack(x, positions, segments, index.shape[1]) for x in gradients)
    return tuple(x[:, :length] for x in gradients)


def _unpack(arrays, lse, index):
    """Packed tokens [B, T, ...] as rows [B S, R, ...], and the lengths of these."""
    batch, sequences, length = index.shape
    places = index.reshape(batch, -1)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def rows(x, fill):
        x = x.at[row, places].get(mode="clip")
        x = jnp.where(places[..., None, None] < 0, jnp.asarray(fill, x.dtype), x)
        return x.reshape(batch * sequences, length, *x.shape[2:])

    lengths = jnp.sum((index >= 0).astype(jnp.int32), -1).reshape(-1)
    lse = rows(lse[..., None], jnp.inf)[..., 0]
    return [rows(x, 0.0) for x in arrays], lse, lengths


def _pack(x, positions, segments, sequences):
    """The inverse; zeros where there is no sequence."""
    batch = positions.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None] * sequences + segments - 1
    taken = x.at[row, positions].get(mode="clip")
    real = (segments != 0)[:, :, None, None]
    return jnp.where(real, taken, jnp.zeros_like(taken))


def _no_kernel_for_differentiate(
    d_out, out, lse, q, k, v, positions, segments=None, index=None, *, dtype
):
    if segments is not None and index is None:
        return "The gradient of packed sequences is computed where an index says."
    return no_kernel(d_out[-1], dtype)


differentiate = PlatformFunction(
    "attend_self_backward",
    lambda d_out, out, lse, q, k, v, *_, dtype: [(shape, dtype) for shape in (q, k, v)],
    _differentiate,
    {"mosaic": one_at_a_time(_differentiate_on_hopper)},
    no_kernel=_no_kernel_for_differentiate,
)


# Attention of new tokens over a cache.


def _gather(q, page_table, layer, k, v, *scales):
    """Keys and values of each row, [B, K, S, H], with their scales if they have any."""
    table = jnp.maximum(page_table, 0)

    def pages(x):
        return jnp.moveaxis(x[layer, table], 1, 2)

    def rows(x):
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    k, v, *scales = (pages(x) for x in (k, v, *scales))
    if not scales:
        return rows(k), rows(v)
    block = (1, q.shape[-1])
    k_scales, v_scales = (rows(x)[..., None] for x in scales)
    return (
        ScaledArray(rows(k), k_scales, block),
        ScaledArray(rows(rows_of_values(v)), v_scales, block),
    )


def attend_pages_reference(
    q, positions, order, page_table, layer, k, v, *scales, fp8, dtype
):
    """Attention of tokens [B, T, N, H] over the pages of their rows, a tuple of one."""
    del order
    keys, values = _gather(q, page_table, layer, k, v, *scales)
    q = _group(q, keys.shape[1])
    if fp8:
        q = quantize_tokens(q)
    elif scales:
        keys, values = dequantize(keys, dtype), dequantize(values, dtype)
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    slots = jnp.broadcast_to(slots[None], (q.shape[0], slots.size))
    out, _ = attention_forward(
        q,
        keys,
        values,
        positions,
        jnp.ones_like(positions),
        slots,
        jnp.ones_like(slots),
        out_dtype=dtype,
    )
    return (_ungroup(out, positions.shape[1]),)


def _attend_pages_on_hopper(q, positions, order, page_table, layer, *pool, fp8, dtype):
    if q.shape[1] == 1:
        return (_decode_on_hopper(q, positions, order, page_table, layer, *pool),)
    batch, length, num_heads, head_dim = q.shape
    q = pad_to_multiple(q, (BLOCK, 1, 1))
    own = positions[:, ::BLOCK] // BLOCK
    own = jnp.where(jnp.take_along_axis(page_table, own, axis=1) < 0, -1, own)
    row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], own.shape)
    queries = (q.reshape(-1, num_heads, head_dim),)
    if fp8:
        queries = hopper_quantize_tokens.quantize_tokens(*queries)
    out, _ = _attend_on_hopper(
        *queries,
        page_table=page_table,
        row=row.reshape(-1),
        first=jnp.zeros(own.size, jnp.int32),
        own=own.reshape(-1),
        layer=layer,
        pool=pool,
    )
    return (out.reshape(q.shape)[:, :length],)


def _decode_on_hopper(q, positions, order, page_table, layer, k, v, *scales):
    """One query a row."""
    grouped = q.shape[0], k.shape[2], -1
    extra = {}
    if scales:
        codes, q_scales = _codes(q)
        extra = dict(
            q_scales=q_scales.reshape(grouped), k_scales=scales[0], v_scales=scales[1]
        )
    out = hopper_paged_decode.paged_decode(
        (codes if scales else q).reshape(*grouped, q.shape[-1]),
        k,
        v,
        page_table,
        positions[:, 0] + 1,
        layer,
        order=order,
        **extra,
    )
    return out.reshape(q.shape)


attend_pages = PlatformFunction(
    "attend_pages",
    lambda q, *_, fp8, dtype: [(q, dtype)],
    attend_pages_reference,
    {"mosaic": one_at_a_time(_attend_pages_on_hopper)},
    no_kernel=lambda q, positions, order, table, layer, k, v, *scales, fp8, dtype: (
        no_kernel(q[-1], dtype, bool(scales) == fp8, k[3])
    ),
)


# New keys and values into a cache.


def store_reference(k_new, v_new, pages, slots, layer, k, v, *scales, dtype):
    """The arrays of a pool with new tokens [B, T, K, H] in it."""
    pages = jnp.where(pages < 0, k.shape[1], pages)  # past the end: dropped

    def at(x, *index):
        return x.at[layer, pages, :, *index]

    if not scales:
        return (
            at(k, slots).set(k_new, mode="drop"),
            at(v, slots).set(v_new, mode="drop"),
        )
    (k_codes, k_scale), (v_codes, v_scale) = map(_stored_codes, (k_new, v_new))
    group, column = place_of(slots)
    return (
        at(k, slots).set(k_codes, mode="drop"),
        at(v, group, slice(None), column).set(v_codes, mode="drop"),
        at(scales[0], slots).set(k_scale, mode="drop"),
        at(scales[1], slots).set(v_scale, mode="drop"),
    )


def _stored_codes(x):
    """As `_codes`; of a non-finite token the scale says so and the codes are 0.

    A page that another sequence takes over may still hold it, and 0 times a NaN code
    would reach that sequence.
    """
    codes, scales = _codes(x)
    finite = jnp.isfinite(scales)
    zero = jnp.zeros_like(codes)
    return jnp.where(finite[..., None], codes, zero), jnp.where(finite, scales, jnp.nan)


def _store_on_hopper(k_new, v_new, pages, slots, layer, *pool, dtype):
    del dtype
    k_new, v_new = (x.reshape(-1, *x.shape[2:]) for x in (k_new, v_new))
    refs = tuple(jax.new_ref(x) for x in pool)
    if pages.shape[1] == 1:
        hopper_kv_store.store_kv(
            refs, k_new, v_new, pages.reshape(-1), slots.reshape(-1), layer
        )
    else:
        blocks = pages[:, ::BLOCK].reshape(-1)
        hopper_kv_store.store_kv_pages(refs, k_new, v_new, blocks, layer)
    return tuple(jax.freeze(ref) for ref in refs)


def _no_kernel_for_store(k_new, v_new, pages, slots, layer, k, *_, dtype):
    if pages[1] > 1 and pages[1] % BLOCK:
        return f"The kernel stores whole pages of {BLOCK}, got {pages[1]} tokens."
    return no_kernel(k_new[-1], dtype, page=k[3])


def pool_types(pool, dtype):
    """Shapes and dtypes of a pool of these shapes."""
    k, v, *scales = pool
    codes = E4M3 if scales else dtype
    return [(k, codes), (v, codes), *((x, jnp.float32) for x in scales)]


store = PlatformFunction(
    "store_kv",
    lambda k_new, v_new, pages, slots, layer, *pool, dtype: pool_types(pool, dtype),
    store_reference,
    {"mosaic": _store_on_hopper},
    no_kernel=_no_kernel_for_store,
)
