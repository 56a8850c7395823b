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
    lengths: Int[Array, "B"] | None = None,
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
      lengths: int32, tokens of each row, padding comes after them; None if that is
        never looked at.

    Returns:
      dq, dk, dv, bfloat16; undefined beyond ``lengths``.
    """
    lse = jnp.minimum(lse, _NO_KEY)
    none = jnp.zeros(0, q.dtype)
    mask, lengths = (
        (cudnn.MaskType.CAUSAL, none)
        if lengths is None
        else (cudnn.MaskType.PADDING_CAUSAL, lengths)
    )
    return tuple(
        cudnn._dot_product_attention_bwd_impl(
            *(q, k, v, none),
            *(lengths, lengths, none, none),
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
