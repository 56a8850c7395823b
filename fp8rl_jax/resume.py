"""Whether a run may resume from a checkpoint made with another configuration."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.checkpoint import CheckpointError


def check_config_compatible(
    saved: Mapping[str, Any], current: Mapping[str, Any], keys: Sequence[str]
) -> None:
    """Checks that a run may resume from a checkpoint made with another config.

    Args:
      saved: Nested configuration from the checkpoint's meta.
      current: Nested configuration of this run; JSON values only.
      keys: Dotted names of the parts that must agree, for example ``"model"`` or
        ``"optimizer.b2"``. What is not named may change freely.

    Raises:
      CheckpointError: naming every value that differs, old and new.
      ValueError: if neither configuration has one of the `keys`.
    """
    current = json.loads(json.dumps(current))
    saved, current = _flatten(saved), _flatten(current)
    different = []
    for key in keys:
        names = {
            name
            for name in saved.keys() | current.keys()
            if name == key or name.startswith(f"{key}.")
        }
        if not names:
            raise ValueError(f"no {key!r} in the configuration to compare")
        different += [
            f"{name}: {saved.get(name, 'absent')!r} in the checkpoint, "
            f"{current.get(name, 'absent')!r} now"
            for name in sorted(names)
            if name not in saved or name not in current or saved[name] != current[name]
        ]
    if different:
        raise CheckpointError(
            "the configuration differs from the checkpoint's ("
            + "; ".join(different)
            + "): set it back, or start in another directory"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a nested mapping under dotted names."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
