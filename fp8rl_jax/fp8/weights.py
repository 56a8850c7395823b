"""Linear weights in the three forms that a model runs on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fp8rl_jax.fp8.dot_general import fp8_dot_general
from fp8rl_jax.fp8.quantize import WEIGHT_BLOCK, quantize
from fp8rl_jax.fp8.recipe import LinearPrecision
from fp8rl_jax.fp8.scaled_array import ScaledArray
from fp8rl_jax.numerics import round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedWeight:
    """A master weight and the FP8 codes that stand in for it in the products.

    Attributes:
      master: [..., out, in], high precision; receives the gradient.
      codes: its 128x128-block codes, not differentiated.
    """

    master: Float[Array, "... out in"]
    codes: ScaledArray


LinearWeight = Float[Array, "... out in"] | ScaledArray | CodedWeight


def linear(
    x: Float[Array, "*batch in"], weight: LinearWeight, passes: LinearPrecision
) -> Float[Array, "*batch out"]:
    """x weight^T.

    Args:
      x: activations.
      weight: [out, in]: a plain array (quantised here if ``passes.forward``), codes
        alone (sampling), or a master with its codes (training).
      passes: which products run in FP8.
    """
    dimension_numbers = (((x.ndim - 1,), (1,)), ((), ()))
    codes = None
    if isinstance(weight, CodedWeight):
        weight, codes = weight.master, weight.codes
    return fp8_dot_general(x, weight, dimension_numbers, codes=codes, passes=passes)


def _is_linear_kernel(path: tuple[Any, ...]) -> bool:
    """Kernels named ``*_proj`` run through :func:`linear`; the head does not."""
    return len(path) > 1 and str(path[-2].key).endswith("_proj")


def quantize_weights(params: PyTree[Array]) -> PyTree[ScaledArray | None]:
    """Codes of every linear kernel, None in place of everything else.

    To be run once per optimiser step; the same codes then serve sampling and the
    trainer's forward and dgrad products.
    """

    def codes(path, x):
        return quantize(x, WEIGHT_BLOCK) if _is_linear_kernel(path) else None

    return jax.tree.map_with_path(codes, params)


def sampling_weights(
    params: PyTree[Array],
    codes: PyTree[ScaledArray | None],
    precision: LinearPrecision,
    dtype: jnp.dtype = jnp.bfloat16,
) -> PyTree[Array | ScaledArray]:
    """What the sampler reads: FP8 codes where the recipe says so, else ``dtype``.

    Norm scales stay as they are: the trainer multiplies by them unrounded.
    """

    def pick(path, x, code):
        if code is not None and precision.forward:
            return code
        return x if path[-1].key == "scale" else round_to(x, dtype)

    return jax.tree.map_with_path(pick, params, codes)


def training_weights(
    params: PyTree[Array],
    codes: PyTree[ScaledArray | None],
    precision: LinearPrecision,
) -> PyTree[Array | CodedWeight]:
    """Masters, paired with their codes where the trainer's forward runs in FP8."""

    def pair(x, code):
        if code is not None and precision.forward:
            return CodedWeight(x, code)
        return x

    return jax.tree.map(pair, params, codes)
