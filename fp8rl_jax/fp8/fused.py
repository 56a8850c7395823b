"""What Qwen3 computes around its projections, fused with their quantisation.

A norm or a gated product that feeds an FP8 projection need not exist in bfloat16: on
Hopper one kernel computes it and writes its codes, and one computes the gradient of the
gated product as codes. Elsewhere, and where a product does not run in FP8, the same
values come from plain JAX. The rounding points are the same everywhere.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.matmul import scaled_matmul_nt
from fp8rl_jax.fp8.quantize import (
    ACTIVATION_BLOCK,
    BLOCK,
    WEIGHT_BLOCK,
    both_types,
    from_kernel,
    quantize,
    quantize_both,
    row_types,
)
from fp8rl_jax.fp8.recipe import FP8_LINEAR, LinearPrecision
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.fp8.weights import CodedWeight, LinearWeight, linear
from fp8rl_jax.implementation import PlatformFunction
from fp8rl_jax.kernels import hopper_norm_quantize, hopper_silu_quantize
from fp8rl_jax.numerics import by_platform, round_to, unify_varying, wide


def rms_norm(
    x: Float[Array, "... K"], scale: Float[Array, "K"], eps: float
) -> Float[Array, "... K"]:
    """x / rms(x) * scale over the last axis, in the dtype of ``x``."""
    inverse = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return x * inverse * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def add_and_norm(
    residual: Float[Array, "... K"],
    update: Float[Array, "... K"],
    scale: Float[Array, "K"],
    eps: float,
) -> tuple[Float[Array, "... K"], Float[Array, "... K"]]:
    """residual + update, and its norm; each rounded once.

    The norm is taken of the rounded sum, which is what the next layer adds to.
    """
    *lead, k = residual.shape
    rows = residual.reshape(-1, k), update.reshape(-1, k)
    outs = _add_and_norm(eps, *unify_varying(*rows, scale))
    return tuple(x.reshape(*lead, k) for x in outs)


def _add_and_norm_reference(residual, update, scale, *, eps, dtype, scale_dtype):
    def add(wide_dtype, x, y):
        return round_to(x.astype(wide_dtype) + y.astype(wide_dtype), dtype)

    total = by_platform(add, residual, update)
    return total, _norm(total, scale, eps)


def _norm(x, scale, eps):
    return wide(lambda x, scale: rms_norm(x, scale, eps), x.dtype, x, scale)


def silu_mul(gate_up: Float[Array, "... 2F"], block: int) -> Float[Array, "... F"]:
    """silu(gate) * up, rounded once; gate and up take turns in blocks of columns."""
    *lead, width = gate_up.shape
    pairs = gate_up.reshape(*lead, -1, 2 * block)
    gate, up = (x.reshape(*lead, width // 2) for x in jnp.split(pairs, 2, axis=-1))
    return wide(lambda g, u: g * jax.nn.sigmoid(g) * u, gate_up.dtype, gate, up)


def norm_linear(
    residual: Float[Array, "*batch K"],
    update: Float[Array, "*batch K"],
    scale: Float[Array, "K"],
    eps: float,
    weight: LinearWeight,
    passes: LinearPrecision,
    gradient_ref: GradientRef | None = None,
) -> tuple[Float[Array, "*batch K"], Float[Array, "*batch N"]]:
    """:func:`add_and_norm`, then the product of the norm with a weight [N, K].

    Args:
      residual: what the layers have summed so far.
      update: what the last layer adds.
      scale: of the norm.
      eps: of the norm.
      weight: see `fp8.weights.linear`.
      passes: which products run in FP8.
      gradient_ref: see `fp8.weights.linear`.

    Returns:
      residual + update, and the product.
    """
    if not _fusible(residual, update, scale, passes, weight):
        residual, x = add_and_norm(residual, update, scale, eps)
        return residual, linear(x, weight, passes, gradient_ref)
    *lead, k = residual.shape
    rows = residual.reshape(-1, k), update.reshape(-1, k)
    arrays = unify_varying(*rows, scale, _Weight.of(weight))
    total, y = _norm_linear(eps, *arrays, gradient_ref)
    return total.reshape(*lead, k), y.reshape(*lead, -1)


def norm_gated_mlp(
    residual: Float[Array, "*batch K"],
    update: Float[Array, "*batch K"],
    scale: Float[Array, "K"],
    eps: float,
    gate_up: LinearWeight,
    down: LinearWeight,
    passes: LinearPrecision,
    block: int = BLOCK,
    gradient_refs: tuple[GradientRef | None, GradientRef | None] = (None, None),
) -> tuple[Float[Array, "*batch K"], Float[Array, "*batch K"]]:
    """:func:`add_and_norm`, then down(silu(gate) * up) of the norm.

    Args:
      residual: what the layers have summed so far.
      update: what the last layer adds.
      scale: of the norm.
      eps: of the norm.
      gate_up: weight [2F, K]; its rows are blocks of gate and of up in turn.
      down: weight [K, F].
      passes: which products run in FP8.
      block: rows of such a block.
      gradient_refs: of both weights, see `fp8.weights.linear`.

    Returns:
      residual + update, and the result, which the next layer adds to it.
    """
    front = residual, update, scale
    if block != BLOCK or not _fusible(*front, passes, gate_up, down):
        total, hidden = norm_linear(*front, eps, gate_up, passes, gradient_refs[0])
        return total, linear(silu_mul(hidden, block), down, passes, gradient_refs[1])
    *lead, k = residual.shape
    rows = residual.reshape(-1, k), update.reshape(-1, k)
    weights = _Weight.of(gate_up), _Weight.of(down)
    arrays = unify_varying(*rows, scale, weights)
    total, y = _norm_gated_mlp(eps, *arrays, gradient_refs)
    return total.reshape(*lead, k), y.reshape(*lead, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Weight:
    """Codes; the master that they stand for if it has a gradient; codes for dgrad."""

    codes: ScaledArray | None
    master: Float[Array, "N K"] | None = None
    transposed: ScaledArray | None = None

    @classmethod
    def of(cls, weight: ScaledArray | CodedWeight) -> "_Weight":
        if isinstance(weight, ScaledArray):
            return cls(weight)
        return cls(weight.codes.codes, weight.master, weight.codes.transposed)

    def product(self, x: ScaledArray) -> Float[Array, "M N"]:
        return scaled_matmul_nt(x, self.codes, jnp.bfloat16)

    def backward(
        self,
        dy: tuple[ScaledArray, ScaledArray],
        x_columns: ScaledArray,
        gradient_ref: GradientRef | None,
    ) -> tuple[Float[Array, "M K"], "_Weight"]:
        """Gradients of the product's input and of the weight."""
        rows, columns = dy
        transposed = self.codes.mT if self.transposed is None else self.transposed
        dx = scaled_matmul_nt(rows, transposed, jnp.bfloat16)
        dw = None
        if gradient_ref is not None:
            gradient_ref.add_product(columns, x_columns, None)
        elif self.master is not None:
            dw = scaled_matmul_nt(columns, x_columns, self.master.dtype)
        return dx, _Weight(None, dw)


def _fusible(residual, update, scale, passes, *weights: LinearWeight) -> bool:
    """Whether kernels may have it: FP8 products of ready codes in whole blocks."""
    dtypes = residual.dtype, update.dtype, scale.dtype
    if passes != FP8_LINEAR or dtypes != (jnp.bfloat16, jnp.bfloat16, jnp.float32):
        return False
    if not all(isinstance(w, ScaledArray | CodedWeight) for w in weights):
        return False
    codes = [_Weight.of(w).codes for w in weights]
    return all(
        q.block == WEIGHT_BLOCK and q.ndim == 2 and not any(n % BLOCK for n in q.shape)
        for q in codes
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_and_norm(eps, residual, update, scale):
    dtypes = dict(dtype=residual.dtype, scale_dtype=scale.dtype)
    return _add_norm(residual, update, scale, eps=eps, **dtypes)


def _add_and_norm_fwd(eps, residual, update, scale):
    total, normed = _add_and_norm(eps, residual, update, scale)
    return (total, normed), (total, scale)


def _add_and_norm_bwd(eps, residuals, cotangents):
    dtotal, dnormed = cotangents
    dtotal, dscale = _norm_gradient(dnormed, dtotal, *residuals, eps)
    return dtotal, dtotal, dscale


_add_and_norm.defvjp(_add_and_norm_fwd, _add_and_norm_bwd)


def _norm_gradient(dnormed, dtotal, total, scale, eps):
    """Gradients of the sum and of the norm's scale."""
    dtypes = dict(dtype=total.dtype, scale_dtype=scale.dtype)
    return _add_norm_backward(dnormed, dtotal, total, scale, eps=eps, **dtypes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_linear(eps, residual, update, scale, weight, gradient_ref):
    total, x = _add_norm_codes(residual, update, scale, eps)
    return total, weight.product(x)


def _norm_linear_fwd(eps, residual, update, scale, weight, gradient_ref):
    total, x, x_columns = _add_norm_both(residual, update, scale, eps)
    residuals = total, scale, x_columns, weight, gradient_ref
    return (total, weight.product(x)), residuals


def _norm_linear_bwd(eps, residuals, cotangents):
    total, scale, x_columns, weight, gradient_ref = residuals
    dtotal, dy = cotangents
    dx, dweight = weight.backward(quantize_both(dy), x_columns, gradient_ref)
    dtotal, dscale = _norm_gradient(dx, dtotal, total, scale, eps)
    return dtotal, dtotal, dscale, dweight, None


_norm_linear.defvjp(_norm_linear_fwd, _norm_linear_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_gated_mlp(eps, residual, update, scale, weights, gradient_refs):
    gate_up, down = weights
    total, x = _add_norm_codes(residual, update, scale, eps)
    hidden = _scaled(*_silu_mul_rows(gate_up.product(x)))
    return total, down.product(hidden)


def _norm_gated_mlp_fwd(eps, residual, update, scale, weights, gradient_refs):
    gate_up, down = weights
    total, x, x_columns = _add_norm_both(residual, update, scale, eps)
    pre = gate_up.product(x)
    hidden, hidden_columns = _both_scaled(_silu_mul_both(pre))
    residuals = total, scale, x_columns, pre, hidden_columns, weights, gradient_refs
    return (total, down.product(hidden)), residuals


def _norm_gated_mlp_bwd(eps, residuals, cotangents):
    total, scale, x_columns, pre, hidden_columns, weights, refs = residuals
    dtotal, dy = cotangents
    dhidden, ddown = weights[1].backward(quantize_both(dy), hidden_columns, refs[1])
    dpre = _both_scaled(_silu_mul_backward(dhidden, pre))
    dx, dgate_up = weights[0].backward(dpre, x_columns, refs[0])
    dtotal, dscale = _norm_gradient(dx, dtotal, total, scale, eps)
    return dtotal, dtotal, dscale, (dgate_up, ddown), None


_norm_gated_mlp.defvjp(_norm_gated_mlp_fwd, _norm_gated_mlp_bwd)


def _scaled(codes, scales):
    return ScaledArray(codes, scales, ACTIVATION_BLOCK)


def _both_scaled(outs):
    return _scaled(*outs[:2]), _scaled(*outs[2:])


def _add_norm_codes(residual, update, scale, eps):
    total, *rows = _add_norm_rows(residual, update, scale, eps=eps)
    return total, _scaled(*rows)


def _add_norm_both(residual, update, scale, eps):
    total, *both = _add_norm_rows_and_columns(residual, update, scale, eps=eps)
    return total, *_both_scaled(both)


def _arrays(*quantised: ScaledArray) -> tuple[Array, ...]:
    return tuple(x for q in quantised for x in (q.codes, q.scales))


def _reference_rows(x):
    return _arrays(quantize(x, implementation="reference"))


def _reference_both(x):
    return _arrays(*quantize_both(x, implementation="reference"))


def _form(columns):
    """Types of the codes, and their reference, of rows alone or of rows and columns."""
    if columns:
        return both_types, _reference_both
    return row_types, _reference_rows


def _add_and_norm_on_hopper(residual, update, scale, *, eps, dtype, scale_dtype):
    del dtype, scale_dtype
    out = hopper_norm_quantize.add_norm_quantize(
        residual, update, scale, eps=eps, rows=False, normed=True
    )
    return out.residual, out.normed


def _add_norm_backward_on_hopper(
    dnormed, dtotal, total, scale, *, eps, dtype, scale_dtype
):
    del dtype, scale_dtype
    return hopper_norm_quantize.add_norm_backward(
        dnormed, dtotal, total, scale, eps=eps
    )


def _no_norm_kernel(residual, *_, eps, dtype, scale_dtype):
    del eps
    if (dtype, scale_dtype) != (jnp.bfloat16, jnp.float32) or residual[1] % BLOCK:
        return (
            f"The norm's kernel takes bfloat16 rows of a multiple of {BLOCK} and a "
            "float32 scale."
        )
    return None


def _add_norm_function(name, columns):
    types, quantise = _form(columns)

    def reference(residual, update, scale, *, eps):
        total, x = _add_and_norm_reference(
            residual,
            update,
            scale,
            eps=eps,
            dtype=residual.dtype,
            scale_dtype=scale.dtype,
        )
        return total, *quantise(x)

    def on_hopper(residual, update, scale, *, eps):
        out = hopper_norm_quantize.add_norm_quantize(
            residual, update, scale, eps=eps, columns=columns
        )
        return out.residual, *from_kernel(out.codes)

    return PlatformFunction(
        name,
        lambda shape, *_, eps: [(shape, jnp.bfloat16), *types(shape)],
        reference,
        {"mosaic": on_hopper},
    )


def _add_norm_backward_reference(
    dnormed, dtotal, total, scale, *, eps, dtype, scale_dtype
):
    _, vjp = jax.vjp(lambda x, scale: _norm(x, scale, eps), total, scale)
    dx, dscale = vjp(dnormed)

    def add(wide_dtype, x, y):
        return round_to(x.astype(wide_dtype) + y.astype(wide_dtype), dtype)

    return by_platform(add, dtotal, dx), dscale


def _silu_mul_function(name, columns):
    types, quantise = _form(columns)

    def on_hopper(gate_up):
        q = hopper_silu_quantize.silu_mul_quantize(gate_up, columns=columns)
        return from_kernel(q)

    return PlatformFunction(
        name,
        lambda shape: types((shape[0], shape[1] // 2)),
        lambda gate_up: quantise(silu_mul(gate_up, BLOCK)),
        {"mosaic": on_hopper},
    )


def _silu_mul_backward_reference(dy, gate_up):
    _, vjp = jax.vjp(lambda x: silu_mul(x, BLOCK), gate_up)
    return _reference_both(*vjp(dy))


def _silu_mul_backward_on_hopper(dy, gate_up):
    q = hopper_silu_quantize.silu_mul_backward_quantize(dy, gate_up)
    return from_kernel(q)


_add_norm_rows = _add_norm_function("add_norm_quantize_rows", columns=False)
_add_norm_rows_and_columns = _add_norm_function("add_norm_quantize", columns=True)
_add_norm = PlatformFunction(
    "add_and_norm",
    lambda shape, *_, dtype, **_static: [(shape, dtype), (shape, dtype)],
    _add_and_norm_reference,
    {"mosaic": _add_and_norm_on_hopper},
    no_kernel=_no_norm_kernel,
)
_add_norm_backward = PlatformFunction(
    "add_norm_backward",
    lambda shape, *_, dtype, scale_dtype, **_static: [
        (shape, dtype),
        (shape[1:], scale_dtype),
    ],
    _add_norm_backward_reference,
    {"mosaic": _add_norm_backward_on_hopper},
    no_kernel=_no_norm_kernel,
)
_silu_mul_rows = _silu_mul_function("silu_mul_quantize_rows", columns=False)
_silu_mul_both = _silu_mul_function("silu_mul_quantize", columns=True)
_silu_mul_backward = PlatformFunction(
    "silu_mul_backward_quantize",
    lambda _, shape: both_types(shape),
    _silu_mul_backward_reference,
    {"mosaic": _silu_mul_backward_on_hopper},
)
