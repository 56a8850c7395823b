"""Block-scaled FP8: arrays, quantisation, recipes and `fp8_dot_general`."""

from fp8rl_jax.fp8.dot_general import fp8_dot_general
from fp8rl_jax.fp8.quantize import (
    ACTIVATION_BLOCK,
    BLOCK,
    WEIGHT_BLOCK,
    dequantize,
    quantize,
)
from fp8rl_jax.fp8.recipe import (
    RECIPES,
    LinearPrecision,
    Precision,
    Recipe,
    get_recipe,
)
from fp8rl_jax.fp8.scaled_array import ScaledArray

__all__ = [
    "ACTIVATION_BLOCK",
    "BLOCK",
    "RECIPES",
    "WEIGHT_BLOCK",
    "LinearPrecision",
    "Precision",
    "Recipe",
    "ScaledArray",
    "dequantize",
    "fp8_dot_general",
    "get_recipe",
    "quantize",
]
