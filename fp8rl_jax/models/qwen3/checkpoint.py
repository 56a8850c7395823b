"""Hugging Face checkpoints of Qwen3: load into a sharded layout, export, resolve."""

import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fp8rl_jax.models.qwen3.config import Qwen3Config, param_shapes
from fp8rl_jax.models.qwen3.fuse import parts_of, rows_of_parts, split_fused
from fp8rl_jax.models.qwen3.safetensors_folder import (
    DTYPES,
    CheckpointError,
    SafetensorsFolder,
    TensorSpec,
    write_safetensors,
)

_EMBED = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"

# Every file that a Hugging Face tokenizer folder may hold.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load_hf(
    folder: str | Path,
    config: Qwen3Config,
    shardings: PyTree[jax.sharding.Sharding] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> PyTree[Float[Array, "..."]]:
    """Loads the weights of a Hugging Face folder straight into their sharded layout.

    Each device's block is read from the files by itself, so the host holds at most the
    blocks of one (stacked) leaf, never a second model. All headers are checked before
    any weight is read.

    Args:
      folder: holds `model.safetensors`, or shards and their index; f32, f16 or bf16.
      config: the model, usually `Qwen3Config.from_hf_folder(folder)`.
      shardings: tree of shardings like `param_shapes(config)`, or None for the default
        device.
      dtype: parameter dtype; bf16 and f16 files are exact in the default f32.

    Returns:
      Parameter tree of `param_shapes(config)`.

    Raises:
      CheckpointError: no safetensors files; a missing, truncated or corrupt shard; a
        missing, unexpected, duplicate or wrongly shaped tensor; a tied model whose file
        holds an `lm_head.weight` other than its embedding.
    """
    leaves, treedef = _leaves(config)
    places = (
        [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    )
    with SafetensorsFolder(folder) as tensors:
        _check_tensors(tensors, config)
        params = [
            _load_leaf(tensors, leaf, place, np.dtype(dtype))
            for leaf, place in zip(leaves, places, strict=True)
        ]
    return treedef.unflatten(params)


def weights_dtype(folder: str | Path) -> np.dtype:
    """The smallest dtype that holds every weight of a Hugging Face folder exactly.

    Raises:
      CheckpointError: no safetensors files; a missing, truncated or corrupt shard.
    """
    with SafetensorsFolder(folder) as tensors:
        dtypes = {spec.dtype for spec in tensors.specs.values()}
    return functools.reduce(jnp.promote_types, dtypes)


def export_hf(
    params: PyTree[Float[Array, "..."]],
    config: Qwen3Config,
    folder: str | Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    max_shard_bytes: int = 4 * 2**30,
    tokenizer_folder: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder that transformers reads, with all its files or not at all.

    Weights come to the host one layer's kernel at a time; the host holds at most that
    and one file's worth. The folder appears under its name only when complete.

    Args:
      params: parameter tree of `param_shapes(config)`, sharded or not.
      config: the model.
      folder: the folder to create.
      dtype: dtype of the files: float32, bfloat16 or float16.
      max_shard_bytes: largest size of one safetensors file.
      tokenizer_folder: copy the tokenizer files found here into the folder.
      overwrite: replace `folder` where it already holds a model.

    Raises:
      CheckpointError: the folder exists; `params` is not this model's tree or is spread
        over several processes; a value does not fit `dtype`; no tokenizer.json.
    """
    folder, dtype = Path(folder).resolve(), np.dtype(dtype)
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"cannot export dtype {dtype}; choose float32, bfloat16 or float16"
        )
    _check_params(params, config)
    _check_target(folder, overwrite)
    if (
        tokenizer_folder is not None
        and not Path(tokenizer_folder, "tokenizer.json").is_file()
    ):
        raise CheckpointError(f"{tokenizer_folder} has no tokenizer.json")

    leaves, _ = _leaves(config)
    arrays = jax.tree.leaves(params)  # in the same order
    sources = _hf_tensors(config)

    @functools.lru_cache(maxsize=1)  # for the parts of a fused kernel
    def get_layer(number, layer):
        return np.asarray(_take_layer(arrays[number], layer))

    def get_tensor(name):
        number, layer, part, _ = sources[name]
        if layer is None:
            tensor = np.asarray(arrays[number])
        else:
            leaf, kernel = leaves[number], get_layer(number, layer)
            parts = split_fused(kernel, leaf.widths, axis=0)
            tensor = parts[leaf.parts.index(part)]
        # Rounded on the host: denormals survive whatever the device does with them.
        with np.errstate(over="ignore"):
            tensor = np.ascontiguousarray(tensor.astype(dtype))
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"{name} holds values that are not finite in {dtype}")
        return tensor

    specs = {name: TensorSpec(shape, dtype) for name, (*_, shape) in sources.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.incomplete-{os.getpid()}")
    temporary.mkdir()
    try:
        write_safetensors(temporary, specs, get_tensor, max_shard_bytes)
        _write_json(temporary / "config.json", config.to_hf(param_dtype=dtype.name))
        if config.eos_token_ids:
            _write_json(
                temporary / "generation_config.json",
                {"eos_token_id": list(config.eos_token_ids)},
            )
        if tokenizer_folder is not None:
            for file_name in _TOKENIZER_FILES:
                if (source := Path(tokenizer_folder, file_name)).is_file():
                    shutil.copyfile(source, temporary / file_name)
        _replace(folder, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def resolve_model(name_or_path: str | Path) -> Path:
    """Returns the local folder of a model.

    Args:
      name_or_path: a folder, or (with the `hub` extra) a model name `owner/name` to
        download from the Hugging Face Hub.

    Raises:
      CheckpointError: neither a folder nor a model that could be downloaded.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    name = str(name_or_path)
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise CheckpointError(f"model folder {name} does not exist")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{name} is not a folder; to download a model by name, install "
            "fp8rl_jax[hub]"
        ) from error
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]
        )
    except Exception as error:  # the client raises many unrelated types
        raise CheckpointError(
            f"{name} is neither a folder nor a model that could be downloaded ({error})"
        ) from error
    return Path(snapshot)


class _Leaf(NamedTuple):
    """A parameter and the Hugging Face tensors that it holds.

    Attributes:
      template: name of the tensors, with {layer} if there is one for each layer, and
        with {part} if the parameter is fused.
      shape: shape of the parameter.
      parts: names of the parts, as `fuse` has them; one unless fused.
      widths: their widths.
    """

    template: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        """Whether the layers are the first axis."""
        return "{layer}" in self.template

    def tensor_shape(self, part: str) -> tuple[int, ...]:
        """Shape of the tensors of one part."""
        rows, *rest = self.shape[self.stacked :]
        width = self.widths[self.parts.index(part)]
        return (rows // sum(self.widths) * width, *rest)


def _leaves(config: Qwen3Config) -> tuple[list[_Leaf], jax.tree_util.PyTreeDef]:
    """The parameters in the order of the flattened tree, and the tree."""
    block = "model.layers.{layer}."
    names = {
        "embed": {"embedding": _EMBED},
        "layers": {
            "input_norm": {"scale": block + "input_layernorm.weight"},
            "attention": {
                "qkv_proj": {"kernel": block + "self_attn.{part}.weight"},
                "o_proj": {"kernel": block + "self_attn.o_proj.weight"},
                "q_norm": {"scale": block + "self_attn.q_norm.weight"},
                "k_norm": {"scale": block + "self_attn.k_norm.weight"},
            },
            "post_attention_norm": {"scale": block + "post_attention_layernorm.weight"},
            "mlp": {
                "gate_up_proj": {"kernel": block + "mlp.{part}.weight"},
                "down_proj": {"kernel": block + "mlp.down_proj.weight"},
            },
        },
        "final_norm": {"scale": "model.norm.weight"},
    }
    if not config.tie_word_embeddings:
        names["lm_head"] = {"kernel": _LM_HEAD}
    shapes, treedef = jax.tree.flatten_with_path(
        param_shapes(config), is_leaf=lambda node: isinstance(node, tuple)
    )
    leaves = []
    for (path, shape), name in zip(shapes, treedef.flatten_up_to(names), strict=True):
        parts = parts_of(config, path[-2].key)
        leaves.append(_Leaf(name, shape, tuple(parts), tuple(parts.values())))
    return leaves, treedef


def _hf_tensors(
    config: Qwen3Config,
) -> dict[str, tuple[int, int | None, str, tuple[int, ...]]]:
    """HF name -> (leaf number, layer or None, part, shape), layer after layer."""
    leaves, _ = _leaves(config)
    return {
        leaf.template.format(layer=layer, part=part): (
            number,
            layer,
            part,
            leaf.tensor_shape(part),
        )
        for layer in (None, *range(config.num_layers))
        for number, leaf in enumerate(leaves)
        if leaf.stacked == (layer is not None)
        for part in leaf.parts
    }


def _check_tensors(tensors: SafetensorsFolder, config: Qwen3Config) -> None:
    """Checks that the files hold exactly the tensors of the model."""
    folder, found = tensors.folder, tensors.specs
    expected = {name: shape for name, (*_, shape) in _hf_tensors(config).items()}
    missing = [name for name in expected if name not in found]
    if missing:
        hint = (
            "; if the model has no output head, set tie_word_embeddings to true"
            if missing == [_LM_HEAD]
            else ""
        )
        raise CheckpointError(f"{folder}: missing {_listed(missing)}{hint}")
    extra = [name for name in found if name not in expected]
    if config.tie_word_embeddings and _LM_HEAD in extra:
        # Published tied models carry a copy of the embedding under this name.
        _check_tied_head(tensors)
        extra.remove(_LM_HEAD)
    if extra:
        raise CheckpointError(
            f"{folder}: unexpected {_listed(extra)}, which a Qwen3 model of "
            f"num_hidden_layers={config.num_layers} does not have"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {found[name].shape}, but "
                f"config.json asks for {shape}"
            )


def _check_tied_head(tensors: SafetensorsFolder) -> None:
    equal = tensors.specs[_LM_HEAD].shape == tensors.specs[_EMBED].shape
    rows = tensors.specs[_EMBED].shape[0] if equal else 0
    for start in range(0, rows, 8192):  # a copy of the embedding is never held whole
        block = (slice(start, min(start + 8192, rows)), slice(None))
        equal = equal and np.array_equal(
            tensors.read(_LM_HEAD, block), tensors.read(_EMBED, block)
        )
    if not equal:
        raise CheckpointError(
            f"{tensors.folder}: {_LM_HEAD} differs from {_EMBED}, but "
            "tie_word_embeddings is true; if the model has its own output head, set it "
            "to false"
        )


def _load_leaf(
    tensors: SafetensorsFolder,
    leaf: _Leaf,
    sharding: jax.sharding.Sharding | None,
    dtype: np.dtype,
) -> Array:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not leaf.stacked:
            return tensors.read(leaf.template, index).astype(dtype, copy=False)
        layers, rows, *rest = (
            range(n)[i] for n, i in zip(leaf.shape, index, strict=True)
        )
        block = np.empty([len(axis) for axis in (layers, rows, *rest)], dtype)
        places = rows_of_parts(leaf.widths, leaf.shape[1])
        for part, place in zip(leaf.parts, places, strict=True):
            # A part's rows within the block are neighbours in its tensor.
            start, stop = np.searchsorted(place, (rows.start, rows.stop)).tolist()
            if start == stop:
                continue
            here, wanted = place[start:stop] - rows.start, slice(start, stop)
            for row, layer in enumerate(layers):
                name = leaf.template.format(layer=layer, part=part)
                block[row, here] = tensors.read(name, (wanted, *index[2:]))
        return block

    if sharding is None:
        return jax.device_put(read((slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, sharding, read)


@jax.jit
def _take_layer(stacked: Array, layer: int) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _check_params(params: PyTree, config: Qwen3Config) -> None:
    """Checks that `params` is the model's tree and wholly on this process."""

    def flat(tree, **kwargs):
        return dict(jax.tree.leaves_with_path(tree, **kwargs))

    expected = flat(param_shapes(config), is_leaf=lambda node: isinstance(node, tuple))
    found = flat(params)
    for path in expected.keys() | found.keys():
        shape = found[path].shape if path in found else None
        if shape != expected.get(path):
            raise CheckpointError(
                f"parameter {jax.tree_util.keystr(path)} has shape {shape}, but the "
                f"model's tree asks for {expected.get(path)}"
            )
        if isinstance(found[path], jax.Array) and not found[path].is_fully_addressable:
            raise CheckpointError(
                "parameters are spread over several processes; load the training "
                "checkpoint in one process and export there"
            )


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{folder} exists; choose another or ask to overwrite it")
    # Replacing deletes the folder: refuse anything that is not a model.
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} exists and is not a model; it is not replaced")


def _replace(folder: Path, complete: Path) -> None:
    """Renames `complete` to `folder`, dropping an older `folder`."""
    if not folder.exists():
        complete.rename(folder)
        return
    old = folder.with_name(f"{complete.name}.old")
    folder.rename(old)
    complete.rename(folder)
    shutil.rmtree(old)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{rest}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
