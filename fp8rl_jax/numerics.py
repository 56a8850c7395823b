"""Rounding points and accumulation width: the ground that exactness stands on.

XLA is free to reorder sums, contract ``a * b + c`` and drop a down-cast that an up-cast
follows, and it decides per fusion. Two programs that evaluate the same formula (cached
decoding and the training forward) then differ in the last bits, and FP8 quantisation
turns last bits into different codes. Two rules remove the freedom:

* a value is rounded only by :func:`round_to`, which is `lax.reduce_precision` and hence
  never elided;
* between two rounding points everything is computed in the *accumulation dtype*:
  float64 on CPU and float32 elsewhere. A reordered or contracted float64 expression
  moves by about 2^-52, which the rounding to float32 or bfloat16 hides.

On CPU a program lowered from here therefore gives the same bits for a row whatever the
batch, the padding and the fusion around it. docs/numerics.md has the bounds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_BITS = {"bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}

CPU_ACCUMULATION_DTYPE = "float64"


def round_to(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Rounds to nearest even; no compiler pass removes it.

    float64 reaches bfloat16 by way of float32.

    Args:
      x: any floating array, normally in the accumulation dtype.
      dtype: bfloat16, float32 or float64.

    Returns:
      ``x`` rounded and cast to ``dtype``.
    """
    dtype = jnp.dtype(dtype)
    if jnp.finfo(x.dtype).nmant <= jnp.finfo(dtype).nmant:
        return x.astype(dtype)
    if x.dtype == jnp.float64 and dtype == jnp.bfloat16:
        # Through float32, four times faster on CPU; the cast cannot be dropped
        # because reduce_precision stands between it and the next.
        x = x.astype(jnp.float32)
    exponent, mantissa = _BITS[dtype.name]
    return lax.reduce_precision(x, exponent, mantissa).astype(dtype)


def is_float(x: Any) -> bool:
    """Whether ``x`` is an array of a floating dtype (FP8 included)."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def unify_varying(*args: Any) -> tuple[Any, ...]:
    """Marks arrays as varying over every mesh axis over which any of them varies.

    Inside `jax.shard_map` a custom_vjp must return cotangents that vary over the same
    axes as its arguments. Casting a replicated argument (a weight) beforehand makes its
    cotangent be summed over the devices. A no-op outside `jax.shard_map`.
    """
    axes = frozenset().union(
        *(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(args))
    )

    def cast(a):
        missing = tuple(axes - jax.typeof(a).manual_axis_type.varying)
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, args)


def by_platform(fn: Callable[..., Any], *args: Any) -> Any:
    """Runs ``fn(dtype, *args)`` with the accumulation dtype of the lowering platform.

    The choice is made when the program is lowered, so a program lowered for ``cuda`` or
    ``tpu`` on a CPU machine holds no float64. ``fn`` must cast to ``dtype`` itself and
    return arrays of 32 bits or fewer. Not differentiable: see :func:`wide`.
    """

    def on_cpu(*args):
        with jax.enable_x64(True):
            return fn(jnp.dtype(CPU_ACCUMULATION_DTYPE), *args)

    def elsewhere(*args):
        return fn(jnp.dtype("float32"), *args)

    # Autodiff of an enclosing scan splits a conditional into what depends on the scan's
    # constants alone and the rest, and keeps the former (the attention masks of all KV
    # blocks, float64 zeros) as residuals. Under checkpoint it keeps nothing.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def choose(*args):
        return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)

    return choose(*args)


def wide(fn: Callable[..., Any], out_dtypes: Any, *args: Array) -> Any:
    """Evaluates ``fn(*args)`` in the accumulation dtype and rounds each result once.

    The backward pass differentiates the same wide expression and rounds each cotangent
    once to its argument's dtype, so gradients are as reproducible as values.

    Args:
      fn: a function of arrays; floating arguments arrive in the accumulation dtype,
        others unchanged. It must not close over traced arrays.
      out_dtypes: dtypes of the results, one per array that ``fn`` returns.
      *args: arrays; gradients flow to the floating ones.
    """
    floating = [is_float(a) for a in args]
    float_dtypes = [a.dtype for a, f in zip(args, floating, strict=True) if f]

    def round_all(xs, dtypes):
        return jax.tree.map(round_to, xs, dtypes)

    def forward(dtype, *args):
        return round_all(
            fn(*[a.astype(dtype) if is_float(a) else a for a in args]), out_dtypes
        )

    def backward(dtype, cotangents, *args):
        def of_floats(*floats):
            remaining = iter(floats)
            return fn(*[next(remaining) if is_float(a) else a for a in args])

        _, vjp = jax.vjp(of_floats, *[a.astype(dtype) for a in args if is_float(a)])
        grads = vjp(jax.tree.map(lambda c: c.astype(dtype), cotangents))
        return round_all(list(grads), float_dtypes)

    @jax.custom_vjp
    def call(*args):
        return by_platform(forward, *args)

    def call_fwd(*args):
        return call(*args), args

    def call_bwd(args, cotangents):
        grads = iter(by_platform(backward, cotangents, *args))
        return tuple(next(grads) if f else None for f in floating)

    call.defvjp(call_fwd, call_bwd)
    return call(*unify_varying(*args))


def dot(
    dtype: jnp.dtype,
    a: Array,
    b: Array,
    dimension_numbers: lax.DotDimensionNumbers,
) -> Array:
    """`lax.dot_general` with the sum in ``dtype``; for use inside :func:`by_platform`.

    With float64 a sum of up to 2^10 products of FP8 codes is exact, so its order cannot
    matter; a sum of bfloat16 products is off by about 2^-52 relative to its largest
    term. With float32, FP8 operands go in as bfloat16, which holds them exactly, and
    tensor cores accumulate in float32.
    """
    if dtype == jnp.float64:
        return lax.dot_general(a.astype(dtype), b.astype(dtype), dimension_numbers)
    if a.dtype == jnp.float8_e4m3fn:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(
        a,
        b,
        dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
