"""The device mesh: one mesh, three named axes.

* ``data``: whole replicas of the parameters, each with its own rows.
* ``fsdp``: parameters and optimiser state in shards, gathered when used; rows
  are split over this axis too.
* ``tensor``: heads, feed-forward columns and vocabulary, split.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from fp8rl_jax.parallel.rules import AxisRules

MESH_AXES = ("data", "fsdp", "tensor")
_AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)


def mesh_sizes(data: int, fsdp: int, tensor: int, num_devices: int) -> dict[str, int]:
    """Solves the one size that may be -1.

    Args:
      data: Number of parameter replicas; -1 takes the devices left over.
      fsdp: Number of parameter shards; -1 likewise.
      tensor: Number of shards of heads and feed-forward columns; -1 likewise.
      num_devices: How many there are.

    Returns:
      Axis to size, in the order of ``MESH_AXES``.

    Raises:
      ValueError: if more than one size is -1, a size is 0, or the sizes do not
        multiply to the number of devices.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise ValueError(f"mesh ({shape}): only one axis may be -1, not {unknown}")
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh ({shape}): sizes are positive, or -1 for the rest")
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known or (not unknown and known != num_devices):
        raise ValueError(
            f"mesh ({shape}) needs {'a multiple of ' if unknown else ''}{known} "
            f"devices and there are {num_devices}; choose sizes whose product "
            f"is {num_devices}, or -1 for one axis"
        )
    for axis in unknown:
        sizes[axis] = num_devices // known
    return sizes


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Builds the mesh over all devices of all processes.

    Args:
      data: Number of parameter replicas, see `mesh_sizes`.
      fsdp: Number of parameter shards.
      tensor: Number of shards of heads and feed-forward columns.
      devices: Devices to use, all of them if omitted.

    Returns:
      A mesh with the axes ``("data", "fsdp", "tensor")``, all of type Auto: the
      compiler propagates shardings from the annotated arrays.

    Raises:
      ValueError: as of `mesh_sizes`.
    """
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh(
        tuple(mesh_sizes(data, fsdp, tensor, len(devices)).values()),
        MESH_AXES,
        axis_types=_AXIS_TYPES,
        devices=devices,
    )


def make_abstract_mesh(
    data: int, fsdp: int, tensor: int, num_devices: int
) -> AbstractMesh:
    """The mesh of :func:`make_mesh` over devices that need not be there.

    Arrays have shapes and shards on it; no program runs on it.

    Args:
      data: Number of parameter replicas, see `mesh_sizes`.
      fsdp: Number of parameter shards.
      tensor: Number of shards of heads and feed-forward columns.
      num_devices: How many devices there would be.

    Raises:
      ValueError: as of `mesh_sizes`.
    """
    sizes = mesh_sizes(data, fsdp, tensor, num_devices)
    return AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=_AXIS_TYPES)


def check_divides(mesh: Mesh, rules: AxisRules, sizes: Mapping[str, int]) -> None:
    """Checks that every named size divides into the mesh's shards.

    Heads are given as counts, not as the width of a projection: a head is
    never split between devices.

    Args:
      mesh: The mesh.
      rules: Logical axis to mesh axes.
      sizes: Logical axis to size, for example ``{"batch": 512, "heads": 32,
        "kv_heads": 8, "mlp": 12288, "embed": 4096, "vocab": 151936}``.

    Raises:
      ValueError: naming each size that does not divide, the mesh axes
        responsible and the largest shard count that would do.
    """
    problems = []
    for name, size in sizes.items():
        axes = rules.mesh_axes(name)
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            product = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            problems.append(
                f"{name}={size} does not divide into {shards} shards ({product}); "
                f"{math.gcd(size, shards)} would do"
            )
    if problems:
        raise ValueError(
            "the mesh does not fit; change its sizes or the batch: "
            + "; ".join(problems)
        )
