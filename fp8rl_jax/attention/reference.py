"""Blocked attention in plain JAX: the KV block order that every kernel must keep.

One block is 128 positions of a sequence. For a query the blocks are taken in ascending
order with a running maximum and sum (online softmax); a block that is masked entirely
changes nothing, so decoding over a long cache, prefill and the training forward give
the same bits for the same query.

References:
  Dao. "FlashAttention-2", arXiv:2307.08691, algorithms 1 and 2.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax import numerics
from fp8rl_jax.fp8.quantize import BLOCK, E4M3, pad_to_multiple, round_e4m3
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.numerics import by_platform, round_to

# Operands [B, K, rows, H] by [B, K, keys, H], and [B, K, rows, keys] by the latter.
_QK = (((3,), (3,)), ((0, 1), (0, 1)))
_PV = (((3,), (2,)), ((0, 1), (0, 1)))
_TN = (((2,), (2,)), ((0, 1), (0, 1)))
_PADDING_POSITION = jnp.iinfo(jnp.int32).max
_MAX_UNROLL = 2
# The code of a probability of 1 whose value has the largest scale of the block.
_ONE = 2.0**8


def _parts(x: Array | ScaledArray, dtype) -> tuple[Array, Array | None]:
    """Operand for a dot and its scales [..., 1] in ``dtype`` (None if unscaled)."""
    if isinstance(x, ScaledArray):
        return x.codes, x.scales.astype(dtype)
    return x, None


def _num_blocks_and_size(num_keys: int) -> tuple[int, int]:
    size = min(BLOCK, num_keys)
    return -(-num_keys // size), size


def _slice(x: Array, block: Int[Array, ""], size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _visible(
    q_positions: Int[Array, "B T"],
    q_segments: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    kv_segments: Int[Array, "B S"],
    groups: int,
    block: Int[Array, ""],
    size: int,
):
    """Causal mask of one block of keys within a segment, [B, 1, G*T, size]."""
    kv_positions = _slice(kv_positions, block, size, 1)
    kv_segments = _slice(kv_segments, block, size, 1)
    causal = kv_positions[:, None, :] <= q_positions[:, :, None]
    same = kv_segments[:, None, :] == q_segments[:, :, None]
    return jnp.tile(causal & same, (1, groups, 1))[:, None]


def _pad_keys(k, v, kv_positions, kv_segments):
    """Pads the key axis to whole blocks; padded keys are visible to no query."""
    size = min(BLOCK, kv_positions.shape[1])
    extra = -kv_positions.shape[1] % size
    if not extra:
        return k, v, kv_positions, kv_segments

    def pad(x):
        if isinstance(x, ScaledArray):
            return ScaledArray(
                pad_to_multiple(x.codes, (size, 1)),
                pad_to_multiple(x.scales, (size, 1)),
                x.block,
            )
        return pad_to_multiple(x, (size, 1))

    positions = jnp.pad(
        kv_positions, ((0, 0), (0, extra)), constant_values=_PADDING_POSITION
    )
    return pad(k), pad(v), positions, jnp.pad(kv_segments, ((0, 0), (0, extra)))


def attention_forward(
    q: Float[Array, "B K GT H"] | ScaledArray,
    k: Float[Array, "B K S H"] | ScaledArray,
    v: Float[Array, "B K S H"] | ScaledArray,
    q_positions: Int[Array, "B T"],
    q_segments: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    kv_segments: Int[Array, "B S"],
    out_dtype: jnp.dtype,
) -> tuple[Float[Array, "B K GT H"], Float[Array, "B K GT"]]:
    """Causal attention within segments, blocks of keys ascending.

    With ScaledArray operands both products run on FP8 codes. A probability, relative to
    the running maximum, is multiplied by its value's scale over the largest that the
    query sees in the block, and by 2^8, before it becomes a code: codes hold 2^-17 to
    1, and masked keys never influence a scale.

    Args:
      q: query rows of a KV head, G query heads by T positions; if FP8, one scale a
        row, a power of two like the others.
      k: keys after QK-norm and RoPE; one scale per token and head if FP8.
      v: values, likewise.
      q_positions: position of each query in its sequence.
      q_segments: segment id of each query; keys of other segments are invisible.
      kv_positions: likewise for keys.
      kv_segments: likewise for keys.
      out_dtype: dtype of the output.

    Returns:
      Output [B, K, G*T, H] and the natural-log sum of exponentials [B, K, G*T]
      (float32; +inf where a query sees no key, whose output is 0).
    """
    rows, head_dim = q.shape[2:]
    groups = rows // q_positions.shape[1]
    num_blocks, size = _num_blocks_and_size(kv_positions.shape[1])
    keys = _pad_keys(k, v, kv_positions, kv_segments)
    fp8 = isinstance(q, ScaledArray)

    def forward(dtype, q, k, v, q_positions, q_segments, kv_positions, kv_segments):
        (q, q_scales), (k, k_scales), (v, v_scales) = (
            _parts(x, dtype) for x in (q, k, v)
        )

        def visible_keys(block):
            return _visible(
                q_positions,
                q_segments,
                kv_positions,
                kv_segments,
                groups,
                block,
                size,
            )

        def scores(block, visible):
            s = numerics.dot(dtype, q, _slice(k, block, size, 2), _QK)
            if fp8:
                s = s * (q_scales * _slice(k_scales, block, size, 2).mT)
            return jnp.where(visible, s * head_dim**-0.5, -jnp.inf)

        def weighted_values(p, block, visible):
            values = _slice(v, block, size, 2)
            if not fp8:
                return numerics.dot(dtype, round_to(p, values.dtype), values, _PV)
            scales = jnp.where(visible, _slice(v_scales, block, size, 2).mT, 0.0)
            largest = jnp.max(scales, -1, keepdims=True)
            largest = jnp.where(largest == 0.0, 1.0, largest)
            p = round_to(p * (scales * (_ONE / largest)), jnp.float32)
            codes = round_e4m3(p).astype(E4M3)
            return numerics.dot(dtype, codes, values, _PV) * (largest / _ONE)

        def step(carry, block):
            maximum, total, accumulator = carry
            visible = visible_keys(block)
            s = scores(block, visible)
            new_maximum = jnp.maximum(maximum, jnp.max(s, -1))
            # A row that has seen no key yet keeps -inf; exp(-inf - 0) is 0.
            safe = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)
            p = jnp.exp(s - safe[..., None])
            decay = jnp.exp(maximum - safe)
            total = total * decay + jnp.sum(p, -1)
            accumulator = accumulator * decay[..., None]
            accumulator += weighted_values(p, block, visible)
            return (new_maximum, total, accumulator), None

        # Zeros derived from q vary over the same mesh axes as q inside shard_map.
        zero = jnp.zeros_like(q, dtype)
        carry = (zero[..., 0] - jnp.inf, zero[..., 0], zero)
        (maximum, total, accumulator), _ = lax.scan(
            step,
            carry,
            jnp.arange(num_blocks, dtype=jnp.int32),
            unroll=num_blocks if num_blocks <= _MAX_UNROLL else 1,
        )
        empty = total == 0.0
        divisor = jnp.where(empty, 1.0, total)
        lse = round_to(maximum + jnp.log(divisor), jnp.float32)
        out = round_to(accumulator / divisor[..., None], out_dtype)
        return out, jnp.where(empty, jnp.inf, lse)

    return by_platform(forward, q, *keys[:2], q_positions, q_segments, *keys[2:])


def attention_backward(
    d_out: Float[Array, "B K GT H"],
    out: Float[Array, "B K GT H"],
    lse: Float[Array, "B K GT"],
    q: Float[Array, "B K GT H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_positions: Int[Array, "B T"],
    q_segments: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    kv_segments: Int[Array, "B S"],
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`attention_forward` by the values that its operands stand for.

    Straight-through for the quantisation of probabilities: they are recomputed from the
    log-sum-exp, D = rowsum(dO * O). Operands of the products are rounded to
    ``d_out.dtype``.

    Returns:
      dq, dk, dv, in ``d_out.dtype`` and the shapes of q, k and v.
    """
    dtype_out = d_out.dtype
    rows, head_dim = q.shape[2:]
    groups = rows // q_positions.shape[1]
    num_keys = kv_positions.shape[1]
    num_blocks, size = _num_blocks_and_size(num_keys)
    keys = _pad_keys(k, v, kv_positions, kv_segments)

    def backward(
        dtype,
        d_out,
        out,
        lse,
        q,
        k,
        v,
        q_positions,
        q_segments,
        kv_positions,
        kv_segments,
    ):
        delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), -1, keepdims=True)

        def step(dq, block):
            k_block, v_block = _slice(k, block, size, 2), _slice(v, block, size, 2)
            s = numerics.dot(dtype, q, k_block, _QK) * head_dim**-0.5
            visible = _visible(
                q_positions,
                q_segments,
                kv_positions,
                kv_segments,
                groups,
                block,
                size,
            )
            p = jnp.where(visible, jnp.exp(s - lse[..., None].astype(dtype)), 0.0)
            dp = numerics.dot(dtype, d_out, v_block, _QK)
            ds = round_to(p * (dp - delta) * head_dim**-0.5, dtype_out)
            p = round_to(p, dtype_out)
            dv = round_to(numerics.dot(dtype, p, d_out, _TN), dtype_out)
            dk = round_to(numerics.dot(dtype, ds, q, _TN), dtype_out)
            return dq + numerics.dot(dtype, ds, k_block, _PV), (dk, dv)

        dq, (dk, dv) = lax.scan(
            step,
            jnp.zeros_like(q, dtype),
            jnp.arange(num_blocks, dtype=jnp.int32),
            unroll=num_blocks if num_blocks <= _MAX_UNROLL else 1,
        )

        def join(blocks):
            joined = jnp.moveaxis(blocks, 0, 2).reshape(k.shape)
            return joined[:, :, :num_keys]

        return round_to(dq, dtype_out), join(dk), join(dv)

    return by_platform(
        backward, d_out, out, lse, q, *keys[:2], q_positions, q_segments, *keys[2:]
    )
