"""One table from logical axis names to mesh axes."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import PartitionSpec

LogicalAxes = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Mesh axes that shard each logical axis; an empty tuple replicates.

    Parameters use ``vocab``, ``embed``, ``heads``, ``kv_heads``, ``mlp``,
    ``layers`` and ``norm``. Activations use ``batch``, ``length`` and ``features``
    (the model dimension of an activation, which cannot be split over ``fsdp`` as
    ``embed`` is, because its rows already are) together with ``heads``,
    ``kv_heads``, ``head_dim``, ``mlp`` and ``vocab``.
    """

    batch: tuple[str, ...] = ("data", "fsdp")
    length: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ("tensor",)
    embed: tuple[str, ...] = ("fsdp",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    head_dim: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ("tensor",)
    layers: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """Returns the mesh axes of one logical axis; of None, no axis.

        Raises:
          ValueError: if the table has no such logical axis.
        """
        if name is None:
            return ()
        known = [field.name for field in dataclasses.fields(self)]
        if name not in known:
            raise ValueError(f"unknown logical axis {name!r}; the table has {known}")
        return getattr(self, name)

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes.

        Raises:
          ValueError: if an axis is unknown or two dimensions want one mesh axis.
        """
        mesh_axes = [self.mesh_axes(name) for name in axes]
        used = [axis for entry in mesh_axes for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(
                f"logical axes {tuple(axes)} map to {mesh_axes}: one mesh axis "
                "cannot shard two dimensions of one array"
            )
        return PartitionSpec(
            *(entry[0] if len(entry) == 1 else entry or None for entry in mesh_axes)
        )


DEFAULT_RULES = AxisRules()
