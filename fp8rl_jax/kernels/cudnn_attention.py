"""The gradient of causal attention by cuDNN, given a forward pass of another's making.

JAX's public attention differentiates its own forward pass only. What is used here is
the primitive behind it, which takes the output and the log-sum-exp as operands.
"""

import jax.numpy as jnp

# Private to JAX: no public function takes the output and the log-sum-exp.
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxtyping import Array, BFloat16, Float, Int

BLOCK = 128
# A query that saw no key; cuDNN subtracts it from scores before the exponential.
_NO_KEY = 1e30


def attention_backward(
    d_out: BFloat16[Array, "B T N H"],
    out: BFloat16[Array, "B T N H"],
    q: BFloat16[Array, "B T N H"],
    k: BFloat16[Array, "B T K H"],
    v: BFloat16[Array, "B T K H"],
    lse: Float[Array, "B N T"],
    starts: Int[Array, "B T/128"] | None = None,
    lengths: Int[Array, "B T/128"] | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v: P = exp(q k^T / sqrt(H) - lse), D = rowsum(dO * O).

    Args:
      d_out: gradient of the output.
      out: output of the forward pass.
      q: queries.
      k: keys; query head n attends to key head n // (N / K).
      v: values.
      lse: float32, natural log-sum-exp of every query's scores; inf where a query saw
        no key.
      starts: of rows that hold several sequences, each from a multiple of 128 on: the
        first token of each; -1 in the entries left over. None for one a row.
      lengths: int32, tokens of each sequence.

    Returns:
      dq, dk, dv, bfloat16; undefined outside of the sequences that ``starts`` names.
    """
    lse = jnp.minimum(lse, _NO_KEY)
    none = jnp.zeros(0, q.dtype)
    mask, seqlens, offsets = cudnn.MaskType.CAUSAL, none, none
    if starts is not None:
        mask, seqlens = (
            cudnn.MaskType.PADDING_CAUSAL,
            jnp.where(starts < 0, -1, lengths),
        )
        offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
        lse = _by_sequence(lse, starts)
    return tuple(
        cudnn._dot_product_attention_bwd_impl(
            *(q, k, v, none),
            *(seqlens, seqlens, offsets, offsets),
            *(none, none),
            *(lse, out, d_out),
            scale=q.shape[-1] ** -0.5,
            seed=0,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=mask,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=None,
        )
    )


def _by_sequence(
    lse: Float[Array, "B N T"], starts: Int[Array, "B S"]
) -> Float[Array, "B*S N T"]:
    """One row a sequence, as cuDNN wants it; those left over come last."""
    batch, num_heads, length = lse.shape
    begins = starts + length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    begins = jnp.where(starts < 0, -1, begins).reshape(-1)
    (order,) = jnp.nonzero(begins >= 0, size=begins.size, fill_value=0)
    tokens = begins[order][:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    flat = jnp.moveaxis(lse, 1, 0).reshape(num_heads, -1)
    rows = jnp.take(flat, jnp.clip(tokens, 0, flat.shape[1] - 1), axis=1)
    return jnp.moveaxis(rows, 0, 1)
