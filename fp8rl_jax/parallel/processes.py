"""What the processes of one run tell each other, and how each sees the whole.

All of them run the same host program. Whatever decides what it does next must be the
same on every process: these functions are how results of the devices and of one
process's own work become so. With one process they do nothing.
"""

import functools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree


@functools.partial(jax.jit, static_argnames="mesh")
def _replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    return lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def fetch(tree: PyTree[jax.Array], mesh: Mesh | None) -> PyTree[np.ndarray]:
    """Copies arrays to the host, in full on every process.

    With several processes this is a collective: all call it with the same arrays.

    Args:
      tree: Arrays, on any devices of the mesh.
      mesh: Where they are; None for one device.

    Returns:
      The same structure of numpy arrays.
    """
    if mesh is not None and jax.process_count() > 1:
        tree = _replicate(tree, mesh)
    return jax.device_get(tree)


def exchange[T](value: T) -> list[T]:
    """Returns every process's value, in the order of processes; a collective.

    Args:
      value: Anything that pickles; of any size.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32))
    padded = np.pad(data, (0, int(sizes.max()) - len(data)))
    rows = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(row[: int(size)].tobytes())
        for row, size in zip(rows, sizes.ravel(), strict=True)
    ]


def own_share[T](items: Sequence[T]) -> Sequence[T]:
    """Returns the consecutive items that are this process's to work on.

    The shares of all processes, in their order, are the items.
    """
    index, count = jax.process_index(), jax.process_count()
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def check_same(values: Mapping[str, Any], remedy: str) -> None:
    """Checks that all processes have the same values; a collective.

    Args:
      values: By name; what pickles and compares.
      remedy: What to do if they differ.

    Raises:
      ValueError: on every process, naming what differs and between which two.
    """
    first, *others = exchange(dict(values))
    for process, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"{name} is {value!r} on process 0 and {other[name]!r} on process "
                    f"{process}: {remedy}."
                )
