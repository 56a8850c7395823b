"""Random initialisation of a Qwen3 model, directly in its sharded layout."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from fp8rl_jax.models.qwen3.config import Qwen3Config, param_shapes
from fp8rl_jax.models.qwen3.fuse import fuse, parts_of


def init_params(
    config: Qwen3Config,
    key: Key[Array, ""],
    shardings: PyTree[jax.sharding.Sharding] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    std: float = 0.02,
) -> PyTree[Float[Array, "..."]]:
    """Draws the parameters as transformers initialises Qwen3.

    Embeddings and kernels are N(0, std^2), with no extra scaling of the projections
    into the residual stream; norm scales are 1. The values depend neither on the
    shardings nor on which matrices are fused. One leaf is drawn at a time, so that the
    random bits of only one leaf are alive beside the parameters.

    Args:
      config: the model.
      key: a typed key, `jax.random.key(seed)`.
      shardings: tree of shardings like `param_shapes(config)`, or None for the default
        device.
      dtype: parameter dtype.
      std: standard deviation of embeddings and kernels (`initializer_range`).

    Returns:
      Parameter tree of `param_shapes(config)`.
    """
    leaves, treedef = jax.tree.flatten_with_path(
        param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    places = (
        [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    )

    matrices = [_matrices(config, path) for path, _ in leaves]
    # The key of a matrix: its rank among all of them, whichever are fused.
    keys = {
        name: jax.random.fold_in(key, rank)
        for rank, name in enumerate(sorted(itertools.chain(*matrices)))
    }
    params = [
        _draw(place)(
            [keys[name] for name in held],
            tuple(held.values()),
            path[-1].key,
            shape,
            jnp.dtype(dtype),
            std,
        )
        for (path, shape), held, place in zip(leaves, matrices, places, strict=True)
    ]
    return treedef.unflatten(params)


def _matrices(config: Qwen3Config, path) -> dict[tuple[str, ...], int]:
    """Paths of the matrices that a leaf holds and their widths (`fuse`)."""
    *parents, module, leaf = (key.key for key in path)
    parts = parts_of(config, module)
    return {(*parents, name, leaf): width for name, width in parts.items()}


@functools.lru_cache
def _draw(place: jax.sharding.Sharding | None):
    """Returns the jitted draw of one leaf, born in its sharding."""

    def draw(keys, widths, name, shape, dtype, std):
        if name == "scale":
            return jnp.ones(shape, dtype)
        *lead, rows, columns = shape
        groups = rows // sum(widths)

        def normal(key, width):
            shape = (*lead, groups * width, columns)
            # Drawn in f32 and rounded: one function of the key for every dtype. Scaled
            # before it is fused: afterwards the compiler would round otherwise.
            return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

        return fuse(list(map(normal, keys, widths)), widths)

    return jax.jit(draw, static_argnums=(1, 2, 3, 4), out_shardings=place)
