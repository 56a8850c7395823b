"""Lazy reading and sharded writing of a folder of safetensors files.

Knows the Hugging Face folder layout (one `model.safetensors`, or shards and
`model.safetensors.index.json`) and nothing about any model.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# safetensors' name of each weight format that is read and written.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class CheckpointError(ValueError):
    """A model folder that cannot be read or written as asked."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor, known without reading its data."""

    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsFolder(contextlib.AbstractContextManager):
    """The tensors of one folder: every header is checked, no data is read.

    Attributes:
      folder: the folder.
      specs: shape and dtype of every tensor, by name.
    """

    def __init__(self, folder: str | Path):
        """Opens all files and reads their headers.

        Raises:
          CheckpointError: no safetensors file; a bad index; a missing, truncated or
            corrupt shard; a tensor in two shards, or not where the index says; a dtype
            other than f32, f16 and bf16.
        """
        self.folder = Path(folder)
        self.specs: dict[str, TensorSpec] = {}
        self._files = {}  # tensor name -> open file
        self._stack = contextlib.ExitStack()
        try:
            self._open_all()
        except BaseException:
            self._stack.close()
            raise

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads one block of one tensor; only its bytes are copied.

        Args:
          name: a key of `specs`.
          index: one slice of step 1 for each axis.
        """
        return self._files[name].get_slice(name)[index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def _open_all(self):
        weight_map = _read_index(self.folder)
        names = [SINGLE_FILE] if weight_map is None else sorted({*weight_map.values()})
        holder = {}
        for file_name in names:
            file = self._open(file_name)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in holder:
                    raise CheckpointError(
                        f"{self.folder}: tensor {name} is in both {holder[name]} and "
                        f"{file_name}; keep one"
                    )
                view = file.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{self.folder / file_name}: tensor {name} has dtype "
                        f"{view.get_dtype()}; supported are {', '.join(DTYPES)}"
                    )
                holder[name] = file_name
                self._files[name] = file
                self.specs[name] = TensorSpec(
                    tuple(view.get_shape()), DTYPES[view.get_dtype()]
                )
        for name, file_name in (weight_map or {}).items():
            if holder.get(name) != file_name:
                raise CheckpointError(
                    f"{self.folder}: {INDEX_FILE} places tensor {name} in {file_name}, "
                    "which does not hold it; download the folder again"
                )

    def _open(self, file_name: str):
        path = self.folder / file_name
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder}: shard {file_name}, named in {INDEX_FILE}, is missing; "
                "download it again"
            )
        try:
            return self._stack.enter_context(safetensors.safe_open(path, "np"))
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt, or is a Git LFS pointer ({error}); "
                "download it again"
            ) from error


def write_safetensors(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    get_tensor: Callable[[str], np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Writes tensors as one file, or as shards and an index.

    Holds one shard in memory at a time. A tensor larger than `max_shard_bytes` gets a
    shard of its own.

    Args:
      folder: an existing folder.
      specs: shape and dtype of every tensor, in the order to write.
      get_tensor: returns a tensor, of its spec's shape and dtype.
      max_shard_bytes: largest size of one file's data.
    """
    sizes = {
        name: int(np.prod(spec.shape)) * spec.dtype.itemsize
        for name, spec in specs.items()
    }
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size

    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file_name = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        path = folder / file_name
        path.touch()
        mode = path.stat().st_mode
        # transformers refuses a file without this metadata.
        safetensors_numpy.save_file(
            {name: get_tensor(name) for name in names}, path, metadata={"format": "pt"}
        )
        path.chmod(mode)  # safetensors makes its files readable by the owner only
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _read_index(folder: Path) -> dict[str, str] | None:
    """Returns tensor name -> file name, or None for a single-file folder."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file() and index.is_file():
        raise CheckpointError(
            f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the stale one"
        )
    if single.is_file():
        return None
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a model "
            "folder with safetensors weights"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {*weight_map.values()}
        well_formed = all(Path(name).name == name for name in names) and names
    except (ValueError, TypeError, KeyError, AttributeError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(
            f"{index} is not a safetensors index (a JSON object whose weight_map gives "
            "each tensor's file); download it again"
        )
    return weight_map
