"""Logical axes of arrays and trees, turned into shardings on a mesh.

A dimension that does not divide is an error, never a silent replication: a tree
that quietly stops being sharded shows up only as running out of memory.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from fp8rl_jax.parallel.rules import DEFAULT_RULES, AxisRules, LogicalAxes


def named_sharding(mesh: Mesh, rules: AxisRules, axes: LogicalAxes) -> NamedSharding:
    """Returns the sharding of an array whose dimensions have these logical axes."""
    return NamedSharding(mesh, rules.spec(axes))


def num_shards(mesh: Mesh, rules: AxisRules, name: str | None) -> int:
    """Into how many parts the mesh cuts a logical axis."""
    return math.prod(mesh.shape[axis] for axis in rules.mesh_axes(name))


def tree_shardings(
    mesh: Mesh, rules: AxisRules, axes: PyTree, tree: PyTree
) -> PyTree[NamedSharding]:
    """Returns the shardings of a tree of arrays.

    Args:
      mesh: The mesh.
      rules: Logical axis to mesh axes.
      axes: Tree of tuples of logical axis names, for example
        `fp8rl_jax.models.qwen3.axes.param_axes()`.
      tree: Arrays or `jax.ShapeDtypeStruct`s with the same structure.

    Returns:
      The same structure with a `NamedSharding` at every leaf.

    Raises:
      ValueError: naming the first leaf whose rank differs from its axes or whose
        dimension does not divide by the number of shards; or if the structures
        differ.
    """

    def leaf(path, names, x):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        if len(names) != len(x.shape):
            raise ValueError(f"{where}: shape {x.shape} has other axes than {names}")
        for name, size in zip(names, x.shape, strict=True):
            if size % (shards := num_shards(mesh, rules, name)):
                raise ValueError(
                    f"{where}: axis {name!r} of shape {x.shape} has size {size}, "
                    f"which does not divide into {shards} shards "
                    f"({rules.mesh_axes(name)}); change the mesh sizes"
                )
        return named_sharding(mesh, rules, names)

    return jax.tree_util.tree_map_with_path(
        leaf, axes, tree, is_leaf=lambda node: isinstance(node, tuple)
    )


def scale_sharding(
    mesh: Mesh,
    rules: AxisRules,
    axes: LogicalAxes,
    shape: tuple[int, ...],
    block: tuple[int, int] = (128, 128),
) -> NamedSharding:
    """Returns the sharding of a quantised kernel's scales.

    The scales ``[..., ceil(out / 128), ceil(in / 128)]`` follow their kernel
    ``[..., out, in]`` along each dimension whose shards hold whole blocks. Along
    the others they are replicated: a block split between two devices has one
    scale, which both need.

    Args:
      mesh: The mesh.
      rules: Logical axis to mesh axes.
      axes: Logical axes of the kernel; leading ones (layers) keep theirs.
      shape: Shape of the kernel.
      block: Block sizes of the last two dimensions.

    Raises:
      ValueError: if `axes` and `shape` differ in length or have fewer than two.
    """
    if len(axes) != len(shape) or len(shape) < 2:
        raise ValueError(f"kernel of shape {shape} has other axes than {axes}")
    *leading, out_axis, in_axis = axes
    kept = [
        name if size % (width * num_shards(mesh, rules, name)) == 0 else None
        for name, size, width in zip(
            (out_axis, in_axis), shape[-2:], block, strict=True
        )
    ]
    return named_sharding(mesh, rules, (*leading, *kept))


def shard_batch(
    mesh: Mesh, rules: AxisRules, arrays: PyTree[np.ndarray]
) -> PyTree[Array]:
    """Puts host arrays on the mesh, rows split over the batch axes.

    Args:
      mesh: The mesh.
      rules: Logical axis to mesh axes.
      arrays: Tree of host arrays ``[rows, ...]``: all rows, on every process. A
        process copies those of its own devices.

    Returns:
      Global arrays of the same shapes.

    Raises:
      ValueError: if the row count does not divide into the batch shards.
    """
    shards = num_shards(mesh, rules, "batch")
    sharding = named_sharding(mesh, rules, ("batch",))

    def put(x: Shaped[np.ndarray, "rows ..."]) -> Array:
        if x.shape[0] % shards:
            raise ValueError(
                f"a batch of {x.shape[0]} rows does not divide into {shards} shards "
                f"({rules.batch}); pad it or change the mesh sizes"
            )
        return jax.make_array_from_process_local_data(sharding, x, x.shape)

    return jax.tree.map(put, arrays)


def constrain(
    x: Shaped[Array, "..."], axes: LogicalAxes, rules: AxisRules = DEFAULT_RULES
) -> Shaped[Array, "..."]:
    """Constrains an activation's sharding under the active mesh.

    Use inside a jitted function called under ``jax.set_mesh(mesh)``. Does nothing
    without a mesh, and inside `shard_map`, where arrays are local already.

    Args:
      x: Any array.
      axes: One logical axis name, or None, per dimension.
      rules: Logical axis to mesh axes.

    Raises:
      ValueError: if `axes` and `x` differ in rank, or a dimension does not divide.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"array of shape {x.shape} has other axes than {axes}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return x
    return jax.lax.with_sharding_constraint(x, rules.spec(axes))
