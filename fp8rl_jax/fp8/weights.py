"""Linear weights in the three forms that a model runs on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from fp8rl_jax.fp8.dot_general import fp8_dot_general
from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.quantize import quantize_weight
from fp8rl_jax.fp8.recipe import LinearPrecision
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.numerics import round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightCodes:
    """A weight's 128x128-block codes in the two layouts that products read.

    Attributes:
      codes: [..., out, in], for the forward product, in sampling and in training.
      transposed: [..., in, out], the same codes, for dgrad; None if it is not wanted.
    """

    codes: ScaledArray
    transposed: ScaledArray | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedWeight:
    """A master weight and the FP8 codes that stand in for it in the products.

    Attributes:
      master: [..., out, in], high precision; receives the gradient.
      codes: not differentiated.
    """

    master: Float[Array, "... out in"]
    codes: WeightCodes

    @classmethod
    def of(cls, master: Float[Array, "... out in"]) -> "CodedWeight":
        """Quantises a master."""
        return cls(master, WeightCodes(*quantize_weight(master)))


LinearWeight = Float[Array, "... out in"] | ScaledArray | CodedWeight


def linear(
    x: Float[Array, "*batch in"],
    weight: LinearWeight,
    passes: LinearPrecision,
    gradient_ref: GradientRef | None = None,
) -> Float[Array, "*batch out"]:
    """x weight^T.

    Args:
      x: activations.
      weight: [out, in]: a plain array (quantised here if ``passes.forward``), codes
        alone (sampling), or a master with its codes (training).
      passes: which products run in FP8.
      gradient_ref: where the backward pass adds the weight's gradient instead of
        returning it.
    """
    codes = transposed = None
    if isinstance(weight, CodedWeight):
        codes, transposed = weight.codes.codes, weight.codes.transposed
        weight = weight.master
    return fp8_dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        codes=codes,
        transposed_codes=transposed,
        gradient_ref=gradient_ref,
        passes=passes,
    )


def _is_linear_kernel(path: tuple[Any, ...]) -> bool:
    """Kernels named ``*_proj`` run through :func:`linear`; the head does not."""
    return len(path) > 1 and str(path[-2].key).endswith("_proj")


def quantize_weights(
    params: PyTree[Array], transposed: bool = True
) -> PyTree[WeightCodes | None]:
    """Codes of every linear kernel, None in place of everything else.

    To be run once per optimiser step; the same codes then serve sampling and the
    trainer's forward and dgrad products.

    Args:
      params: the masters.
      transposed: also lay them out for dgrad, which doubles their memory.
    """

    def codes(path, x):
        if not _is_linear_kernel(path):
            return None
        codes, codes_t = quantize_weight(x)
        return WeightCodes(codes, codes_t if transposed else None)

    return jax.tree.map_with_path(codes, params)


def sampling_weights(
    params: PyTree[Array],
    codes: PyTree[WeightCodes | None],
    precision: LinearPrecision,
    dtype: jnp.dtype = jnp.bfloat16,
) -> PyTree[Array | ScaledArray]:
    """What the sampler reads: FP8 codes where the recipe says so, else ``dtype``.

    Norm scales stay as they are: the trainer multiplies by them unrounded.
    """

    def pick(path, x, code):
        if code is not None and precision.forward:
            return code.codes
        return x if path[-1].key == "scale" else round_to(x, dtype)

    return jax.tree.map_with_path(pick, params, codes)


def training_weights(
    params: PyTree[Array],
    codes: PyTree[WeightCodes | None],
    precision: LinearPrecision,
) -> PyTree[Array | CodedWeight]:
    """Masters, paired with their codes where the trainer's forward runs in FP8."""

    def pair(x, code):
        if code is not None and precision.forward:
            return CodedWeight(x, code)
        return x

    return jax.tree.map(pair, params, codes)


def freeze_linear_kernels(params: PyTree[Array]) -> PyTree[Array]:
    """Makes the linear kernels constants of differentiation."""

    def freeze(path, x):
        return lax.stop_gradient(x) if _is_linear_kernel(path) else x

    return jax.tree.map_with_path(freeze, params)
