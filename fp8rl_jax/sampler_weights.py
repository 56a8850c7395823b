"""A policy's weights for sampling alone, without a learner."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

from fp8rl_jax.checkpoint import Checkpointer
from fp8rl_jax.experiment import ModelSetup, initial_params
from fp8rl_jax.fp8 import LinearPrecision, ScaledArray
from fp8rl_jax.fp8.weights import quantize_weights, sampling_weights
from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.checkpoint import resolve_model, weights_dtype
from fp8rl_jax.models.qwen3.model import abstract_params
from fp8rl_jax.parallel.rules import DEFAULT_RULES, LogicalAxes
from fp8rl_jax.parallel.sharding import named_sharding, scale_sharding, tree_shardings
from fp8rl_jax.resume import check_config_compatible

# Rows are split over the axis that splits a learner's parameters: whole copies serve
# them, where shards would be gathered for every burst of decode steps.
_RULES = dataclasses.replace(DEFAULT_RULES, embed=())


def load_weights(
    config: ConfigDict,
    setup: ModelSetup,
    checkpoint: str | Path | None = None,
    step: int | None = None,
) -> tuple[PyTree[Array | ScaledArray], str]:
    """The policy as the sampler reads it, the same bits as the learner makes.

    Args:
      config: the configuration.
      setup: made of it.
      checkpoint: a run directory; None takes ``model.path`` or random weights.
      step: of the checkpoint; None for the latest.

    Returns:
      The weights, and where they come from.

    Raises:
      ValueError: weights that cannot be read or do not fit the model.
    """
    axes = param_axes(setup.model.tie_word_embeddings)
    shapes = abstract_params(setup.model)
    shardings = tree_shardings(setup.mesh, DEFAULT_RULES, axes, shapes)
    if checkpoint is not None:
        params, source = _restore(config, shapes, shardings, Path(checkpoint), step)
    elif config.model.path:
        # The learner's masters are float32; the files' own dtype has the same values.
        dtype = weights_dtype(resolve_model(config.model.path))
        params = initial_params(config, setup.model, shardings, dtype)
        source = config.model.path
    else:
        params = initial_params(config, setup.model, shardings)
        source = f"random, size {config.model.size}"
    return _convert(setup, axes, params), source


def _restore(config, shapes, shardings, run_dir: Path, step: int | None):
    """The masters of a checkpoint, without its optimiser state."""
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    with Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        step = checkpointer.latest_step() if step is None else step
        state, meta = checkpointer.restore(
            {"train": {"params": abstract}}, step, partial=True
        )
    if not config.model.path:
        names = ("model.size", "model.custom")
        check_config_compatible(meta["config"], config.to_dict(), names)
    source = f"{run_dir}, step {step}"
    if meta["config"]["recipe"] != config.recipe:
        source += f", trained with recipe {meta['config']['recipe']}"
    return state["train"]["params"], source


def _convert(setup: ModelSetup, axes: PyTree, params: PyTree[Array]) -> PyTree:
    """Quantises and rounds parameters, as far as the recipe says."""
    convert = functools.partial(
        _as_sampled,
        precision=setup.recipe.rollout.linear,
        dtype=jnp.dtype(setup.model.dtype),
    )
    places = jax.tree.map(
        functools.partial(_place, setup.mesh),
        axes,
        jax.eval_shape(convert, params),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return jax.jit(convert, out_shardings=places)(params)


def _as_sampled(params, *, precision: LinearPrecision, dtype: jnp.dtype):
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    codes = jax.tree.map(lambda _: None, params)
    if precision.forward:
        codes = quantize_weights(params, transposed=False)
    return sampling_weights(params, codes, precision, dtype)


def _place(mesh: Mesh, axes: LogicalAxes, x: jax.ShapeDtypeStruct | ScaledArray):
    kernel = named_sharding(mesh, _RULES, axes)
    if not isinstance(x, ScaledArray):
        return kernel
    scales = scale_sharding(mesh, _RULES, axes, x.shape, x.block)
    return ScaledArray(kernel, scales, x.block)
