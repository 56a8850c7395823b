"""`lax.dot_general` with block-scaled FP8 operands, forward and backward.

References:
  DeepSeek-AI. "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.matmul import matmul_nt, scaled_matmul_nt, xla_matmul_nt
from fp8rl_jax.fp8.quantize import (
    WEIGHT_BLOCK,
    dequantize,
    quantize,
    quantize_both,
    quantize_weight,
)
from fp8rl_jax.fp8.recipe import FP8_LINEAR, LinearPrecision
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.implementation import Implementation
from fp8rl_jax.numerics import round_to, unify_varying


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."] | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jnp.dtype | None = None,
    *,
    out_sharding: jax.sharding.NamedSharding | None = None,
    codes: ScaledArray | None = None,
    transposed_codes: ScaledArray | None = None,
    gradient_ref: GradientRef | None = None,
    passes: LinearPrecision = FP8_LINEAR,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """A drop-in for `lax.dot_general` that computes in block-scaled FP8.

    ``lhs`` holds activations, quantised 1x128 along the contraction; ``rhs`` holds the
    weight, quantised 128x128. Stateless: usable as ``nnx.Linear(dot_general=...)``,
    ``nnx.LinearGeneral`` and ``linen.Dense(dot_general=...)``. Quantisation is
    straight-through in the backward pass, whose two products run in FP8 as well:
    ``dlhs`` from output gradients quantised 1x128 and the transposed weight codes,
    ``drhs`` from operands quantised 1x128 along tokens.

    Args:
      lhs: activations, bfloat16 or float32.
      rhs: the weight, any floating dtype; receives the gradient. Or a ScaledArray of
        shape [N, K] in 128x128 blocks, contracted over its last axis, when no gradient
        is wanted (sampling).
      dimension_numbers: as in `lax.dot_general`; several contracting, batch and free
        axes are allowed.
      precision: ignored; the precision is what this function is for.
      preferred_element_type: dtype of the result; ``lhs.dtype`` if None.
      out_sharding: sharding of the result under a mesh with explicit axes.
      codes: ready-made codes of ``rhs`` laid out [N, K] (K-major), used in its place
        and not differentiated. Only without batch axes.
      transposed_codes: the transpose of ``codes``, [K, N], for dgrad; made from
        ``codes`` in the backward pass if None.
      gradient_ref: where the backward pass adds ``drhs``, laid out [N, K], instead of
        returning it: ``rhs`` then is a constant of differentiation. Only without batch
        axes.
      passes: which of the three products run in FP8; the others run with operands of
        ``lhs.dtype`` and wide accumulation.
      implementation: "mosaic" (Hopper GPUs), "triton" (other NVIDIA GPUs, with
        jax-triton) or "reference"; None takes the best that runs on the platform that
        the program is lowered for.

    Returns:
      The product, batch axes first, then the free axes of ``lhs`` and of ``rhs``.

    Raises:
      ValueError: shapes or dtypes do not match, ``codes`` or ``gradient_ref`` do not
        fit ``rhs``, or the implementation cannot run on the platform.
    """
    del precision
    out_dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if isinstance(rhs, ScaledArray):
        if rhs.ndim != 2 or tuple(rhs_contract) != (1,) or rhs_batch:
            raise ValueError(
                "A ScaledArray weight must be [N, K] and contracted over axis 1, got "
                f"shape {rhs.shape} and dimension numbers {dimension_numbers}."
            )
        if codes is not None:
            raise ValueError("Pass codes= or a ScaledArray weight, not both.")
    if lhs.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"lhs must be bfloat16 or float32, got {lhs.dtype}.")
    x, x_free = _canonical(lhs, lhs_batch, lhs_contract)
    if isinstance(rhs, ScaledArray):
        w, codes, w_free = None, rhs, rhs.shape[:1]
    else:
        w, w_free = _canonical(rhs, rhs_batch, rhs_contract)
    k, w_shape = x.shape[-1], (codes if w is None else w).shape
    if w_shape[-1] != k or (w is not None and w.shape[:-2] != x.shape[:-2]):
        raise ValueError(
            f"Contracting or batch sizes differ: lhs {lhs.shape}, rhs {rhs.shape}, "
            f"dimension numbers {dimension_numbers}."
        )
    if codes is not None:
        if not passes.forward:
            raise ValueError("codes were given, but passes.forward is False.")
        if codes.shape != w_shape or codes.block != WEIGHT_BLOCK or lhs_batch:
            raise ValueError(
                f"codes must be [N, K] = {w_shape} in blocks {WEIGHT_BLOCK} and need a "
                f"product without batch axes, got {codes.shape} in {codes.block}."
            )
    if gradient_ref is not None:
        if w is None or gradient_ref.shape != w.shape or lhs_batch:
            raise ValueError(
                f"gradient_ref must be [N, K] = {w_shape} and needs a weight with a "
                f"gradient and a product without batch axes, got {gradient_ref.shape}."
            )
        w = lax.stop_gradient(w)
    matmul = functools.partial(_matmul, _Static(passes, out_dtype, implementation))
    for _ in lhs_batch:
        matmul = jax.vmap(matmul, in_axes=(0, 0, None, None, None))
    y = matmul(*unify_varying(x, w, codes, transposed_codes), gradient_ref)
    y = y.reshape(*x.shape[:-2], *x_free, *w_free)
    if out_sharding is not None:
        y = jax.sharding.reshard(y, out_sharding)
    return y


def _canonical(x: Array, batch, contract) -> tuple[Array, tuple[int, ...]]:
    """Transposes and merges to [*batch, free, contract]; also the free sizes."""
    free = [i for i in range(x.ndim) if i not in (*batch, *contract)]
    free_shape = tuple(x.shape[i] for i in free)
    x = x.transpose(*batch, *free, *contract)
    lead = x.shape[: len(batch)]
    k = math.prod(x.shape[len(batch) + len(free) :])
    return x.reshape(*lead, math.prod(free_shape), k), free_shape


@dataclasses.dataclass(frozen=True)
class _Static:
    """What does not depend on values: hashable, outside of differentiation."""

    passes: LinearPrecision
    out_dtype: jnp.dtype
    implementation: Implementation | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    static: _Static,
    x: Float[Array, "M K"],
    w: Float[Array, "N K"] | None,
    codes: ScaledArray | None,
    transposed: ScaledArray | None,
    gradient_ref: GradientRef | None,
) -> Float[Array, "M N"]:
    if not static.passes.forward:
        return matmul_nt(x, round_to(w, x.dtype), static.out_dtype)
    if codes is None:
        codes = quantize(w, WEIGHT_BLOCK, implementation=static.implementation)
    rows = quantize(x, implementation=static.implementation)
    return scaled_matmul_nt(
        rows, codes, static.out_dtype, implementation=static.implementation
    )


def _matmul_fwd(static, x, w, codes, transposed, gradient_ref):
    passes, choice = static.passes, dict(implementation=static.implementation)
    if codes is None and (passes.forward or passes.dgrad):
        codes, transposed = quantize_weight(w, **choice)
    # Residuals are FP8 wherever the backward product is: no bf16 copy is kept.
    rows, columns = None, x
    if passes.forward and passes.wgrad:
        rows, columns = quantize_both(x, **choice)
    elif passes.forward:
        rows = quantize(x, **choice)
    elif passes.wgrad:
        columns = quantize(x.T, **choice)
    if passes.forward:
        y = scaled_matmul_nt(rows, codes, static.out_dtype, **choice)
    else:
        y = matmul_nt(x, round_to(w, x.dtype), static.out_dtype)
    if passes.dgrad:
        w_residual = codes.mT if transposed is None else transposed
    else:
        w_residual = codes if passes.forward else w
    like = (_empty_like(x), None if w is None else _empty_like(w))
    return y, (columns, w_residual, like, gradient_ref)


def _matmul_bwd(static, residuals, dy):
    x, w, (x_like, w_like), gradient_ref = residuals
    passes, choice = static.passes, dict(implementation=static.implementation)
    wgrad = passes.wgrad and w_like is not None
    rows = columns = None
    if passes.dgrad and wgrad:
        rows, columns = quantize_both(dy, **choice)
    elif passes.dgrad:
        rows = quantize(dy, **choice)
    elif wgrad:
        columns = quantize(dy.T, **choice)
    if passes.dgrad:
        dx = scaled_matmul_nt(rows, w, x_like.dtype, **choice)
    else:
        w = dequantize(w, dy.dtype) if isinstance(w, ScaledArray) else w
        dx = xla_matmul_nt(dy, round_to(w, dy.dtype).T, x_like.dtype)
    dw = None
    if wgrad and gradient_ref is not None:
        gradient_ref.add_product(columns, x, static.implementation)
    elif wgrad:
        dw = scaled_matmul_nt(columns, x, w_like.dtype, **choice)
    elif w_like is not None:
        dw = xla_matmul_nt(dy.T, round_to(x, dy.dtype).T, w_like.dtype)
        if gradient_ref is not None:
            gradient_ref.add(dw)
            dw = None
    return dx, dw, None, None, None


def _empty_like(x: Array) -> Array:
    """A zero-size array that carries a dtype through the residuals."""
    return jnp.zeros((0,), x.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
