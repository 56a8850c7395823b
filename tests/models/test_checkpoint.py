"""Hugging Face checkpoints: loading, sharded loading, export, bad folders."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from fp8rl_jax.models.qwen3 import checkpoint
from fp8rl_jax.models.qwen3.checkpoint import (
    CheckpointError,
    export_hf,
    load_hf,
    resolve_model,
)
from fp8rl_jax.models.qwen3.config import Qwen3Config, param_shapes
from fp8rl_jax.models.qwen3.init import init_params

GOLDEN = Path(__file__).parent / "goldens" / "qwen3"
TIED = Qwen3Config(
    vocab_size=48,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    tie_word_embeddings=True,
    eos_token_ids=(7, 3),
)
UNTIED = dataclasses.replace(TIED, tie_word_embeddings=False)
CONFIGS = pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
DTYPES = pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["f32", "bf16", "f16"]
)

# Written out by hand: where each Hugging Face tensor belongs in our tree; those of
# the fused projections are in `fused_by_hand`.
LAYER_TENSORS = {
    "input_layernorm": ("input_norm", "scale"),
    "post_attention_layernorm": ("post_attention_norm", "scale"),
    "self_attn.o_proj": ("attention", "o_proj", "kernel"),
    "self_attn.q_norm": ("attention", "q_norm", "scale"),
    "self_attn.k_norm": ("attention", "k_norm", "scale"),
    "mlp.down_proj": ("mlp", "down_proj", "kernel"),
}


def hf_tensors(config, dtype):
    """Random tensors under Hugging Face's names, without the code under test."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * h, config.num_kv_heads * h
    shapes = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (d,),
            block + "self_attn.q_proj.weight": (q, d),
            block + "self_attn.k_proj.weight": (kv, d),
            block + "self_attn.v_proj.weight": (kv, d),
            block + "self_attn.o_proj.weight": (d, q),
            block + "self_attn.q_norm.weight": (h,),
            block + "self_attn.k_norm.weight": (h,),
            block + "post_attention_layernorm.weight": (d,),
            block + "mlp.gate_proj.weight": (f, d),
            block + "mlp.up_proj.weight": (f, d),
            block + "mlp.down_proj.weight": (d, f),
        }
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}


def write_folder(folder, config, tensors, *, shards=1):
    """Writes an HF folder by safetensors alone; round-robin over shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def read_all(folder):
    """All tensors of a folder, read by safetensors alone."""
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for file in files for k, v in load_file(file).items()}


def random_params(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def fused_by_hand(config, tensors, layer):
    """The fused kernels of one layer, put together piece by piece."""
    h, group = config.head_dim, config.num_heads // config.num_kv_heads
    block = math.gcd(config.intermediate_size, 128)

    def piece(name, start, rows):
        tensor = tensors[f"model.layers.{layer}.{name}_proj.weight"]
        return tensor[start : start + rows]

    qkv = [
        piece(f"self_attn.{name}", kv_head * rows, rows)
        for kv_head in range(config.num_kv_heads)
        for name, rows in (("q", group * h), ("k", h), ("v", h))
    ]
    gate_up = [
        piece(f"mlp.{name}", start, block)
        for start in range(0, config.intermediate_size, block)
        for name in ("gate", "up")
    ]
    return {
        ("attention", "qkv_proj", "kernel"): np.concatenate(qkv),
        ("mlp", "gate_up_proj", "kernel"): np.concatenate(gate_up),
    }


def assert_same(params, config, tensors, dtype):
    """Checks that `params` holds `tensors`, bit for bit, in `dtype`."""
    expected = {
        ("embed", "embedding"): tensors["model.embed_tokens.weight"],
        ("final_norm", "scale"): tensors["model.norm.weight"],
    }
    for name, path in LAYER_TENSORS.items():
        expected[("layers", *path)] = np.stack(
            [
                tensors[f"model.layers.{layer}.{name}.weight"]
                for layer in range(config.num_layers)
            ]
        )
    fused = [fused_by_hand(config, tensors, i) for i in range(config.num_layers)]
    for path in fused[0]:
        expected[("layers", *path)] = np.stack([layer[path] for layer in fused])
    if not config.tie_word_embeddings:
        expected[("lm_head", "kernel")] = tensors["lm_head.weight"]
    found = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert leaf.dtype == dtype, path
        np.testing.assert_array_equal(
            bits(leaf), bits(expected[path].astype(dtype)), err_msg=str(path)
        )


def shardings_of(config):
    """Two mesh axes over eight devices; every leaf is split."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))

    def place(shape):
        spec = [None] * len(shape)
        spec[-1] = "fsdp"
        if len(shape) == 3:
            spec[1] = "tensor"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(
        place, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )


def test_golden_written_by_transformers():
    config = Qwen3Config.from_hf_folder(GOLDEN)
    params = load_hf(GOLDEN, config)
    assert_same(params, config, read_all(GOLDEN), np.float32)


@CONFIGS
@DTYPES
@pytest.mark.parametrize("shards", [1, 3])
def test_loads_exactly(tmp_path, config, dtype, shards):
    tensors = hf_tensors(config, dtype)
    write_folder(tmp_path, config, tensors, shards=shards)
    assert_same(load_hf(tmp_path, config), config, tensors, np.float32)
    assert_same(load_hf(tmp_path, config, dtype=dtype), config, tensors, dtype)


@CONFIGS
# Shards of one group and a half, of gate or up alone, of whole groups.
@pytest.mark.parametrize("intermediate_size", [24, 32, 256])
def test_loads_into_shardings(tmp_path, config, intermediate_size):
    config = dataclasses.replace(config, intermediate_size=intermediate_size)
    tensors = hf_tensors(config, ml_dtypes.bfloat16)
    write_folder(tmp_path, config, tensors, shards=2)
    shardings = shardings_of(config)
    params = load_hf(tmp_path, config, shardings)
    assert_same(params, config, tensors, np.float32)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings


def test_reads_only_the_blocks_of_each_device(tmp_path, monkeypatch):
    config = dataclasses.replace(UNTIED, intermediate_size=256)
    write_folder(tmp_path, config, hf_tensors(config, np.float32))
    sizes = []
    read = checkpoint.SafetensorsFolder.read

    def counting_read(self, name, index):
        block = read(self, name, index)
        if "mlp" in name:
            sizes.append(block.size)
        return block

    monkeypatch.setattr(checkpoint.SafetensorsFolder, "read", counting_read)
    load_hf(tmp_path, config, shardings_of(config))
    # Eight devices, three layers, three matrices: one eighth of a layer's matrix each.
    assert sizes == [256 * 16 // 8] * (8 * 3 * 3)


@CONFIGS
@DTYPES
@pytest.mark.parametrize("sharded", [False, True], ids=["one-device", "sharded"])
def test_round_trip_is_bit_equal(tmp_path, config, dtype, sharded):
    tensors = hf_tensors(config, dtype)
    # Values that a careless conversion loses: signed zero, denormals, the largest.
    info = ml_dtypes.finfo(dtype)
    edges = np.array([-0.0, info.smallest_subnormal, -info.tiny, info.max], dtype)
    tensors["model.norm.weight"][:4] = edges
    tensors["model.layers.1.mlp.up_proj.weight"][0, :4] = edges
    source = write_folder(tmp_path / "source", config, tensors)
    params = load_hf(source, config, shardings_of(config) if sharded else None)

    for max_shard_bytes, files in [(2**30, 1), (3000, None)]:
        out = tmp_path / f"out-{max_shard_bytes}"
        export_hf(params, config, out, dtype=dtype, max_shard_bytes=max_shard_bytes)
        exported = read_all(out)
        assert exported.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert exported[name].dtype == tensor.dtype
            np.testing.assert_array_equal(bits(exported[name]), bits(tensor), name)
        assert Qwen3Config.from_hf_folder(out) == config
        assert (len(list(out.glob("*.safetensors"))) == 1) is (files == 1)
        again = load_hf(out, config)
        assert_same(again, config, tensors, np.float32)


def test_export_layout(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tokenizer / name).write_text(name)
    params = random_params(UNTIED)
    out = tmp_path / "deep" / "out"
    export_hf(params, UNTIED, out, max_shard_bytes=4000, tokenizer_folder=tokenizer)

    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 2 * UNTIED.num_parameters
    for file in files:
        tensors = load_file(out / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 4000
        assert (out / file).stat().st_mode == (out / "config.json").stat().st_mode
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 3]}
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (out / "notes.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@CONFIGS
def test_mlx_lm_reads_the_export(tmp_path, config):
    utils = pytest.importorskip("mlx_lm.utils")
    tree_flatten = pytest.importorskip("mlx.utils").tree_flatten
    params = random_params(config)
    export_hf(params, config, tmp_path / "out", dtype=np.float32, max_shard_bytes=9000)
    model, _ = utils.load_model(tmp_path / "out")  # strict: the names must all match
    weights = {
        name: np.array(value) for name, value in tree_flatten(model.parameters())
    }
    assert_same(params, config, weights, np.float32)


def test_export_is_all_or_nothing(tmp_path):
    params = random_params(TIED)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[3].set(1e6)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* float16"):
        export_hf(params, TIED, tmp_path / "out", dtype=np.float16)
    assert list(tmp_path.iterdir()) == []


def test_export_overwrites_only_a_model_and_only_when_told(tmp_path):
    params = random_params(TIED)
    out = tmp_path / "out"
    export_hf(params, TIED, out, max_shard_bytes=3000)
    with pytest.raises(CheckpointError, match="exists"):
        export_hf(params, TIED, out)
    export_hf(params, TIED, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not a model"):
        export_hf(params, TIED, other, overwrite=True)
    assert (other / "thesis.tex").exists()


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda p: p.pop("final_norm"), r"\['final_norm'\]\['scale'\] has shape None"),
        (lambda p: p["embed"].update(extra=jnp.zeros(3)), r"\['embed'\]\['extra'\]"),
        (lambda p: p["embed"].update(embedding=jnp.zeros((2, 2))), r"\(48, 16\)"),
    ],
)
def test_export_refuses_another_tree(tmp_path, change, named):
    params = random_params(TIED)
    change(params)
    with pytest.raises(CheckpointError, match=named):
        export_hf(params, TIED, tmp_path / "out")


def test_export_refuses_arguments(tmp_path):
    params = random_params(TIED)
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        export_hf(params, TIED, tmp_path / "out", dtype=jnp.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        export_hf(params, TIED, tmp_path / "out", tokenizer_folder=tmp_path)


def test_tied_file_with_a_copied_head(tmp_path):
    tensors = hf_tensors(TIED, np.float32)
    embedding = tensors["model.embed_tokens.weight"]
    write_folder(tmp_path, TIED, {**tensors, "lm_head.weight": embedding.copy()})
    assert_same(load_hf(tmp_path, TIED), TIED, tensors, np.float32)
    changed = embedding.copy()
    changed[-1, -1] += 1
    for head in (changed, embedding[:-1].copy()):
        write_folder(tmp_path, TIED, {**tensors, "lm_head.weight": head})
        with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
            load_hf(tmp_path, TIED)


SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Q_NORM = "model.layers.2.self_attn.q_norm.weight"


def edit_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def put(folder, name, tensor, *, file=SHARD, index=True):
    """Sets (None: deletes) a tensor in the file that holds it, else in `file`."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    file = weight_map.get(name, file) if index else file
    tensors = load_file(folder / file)
    tensors.pop(name, None)
    weight_map.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
        weight_map[name] = file
    save_file(tensors, folder / file)
    if index:
        edit_index(folder, lambda content: content.update(weight_map=weight_map))


def truncate(folder):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-1])


FAULTS = {
    "missing shard": (
        lambda f: (f / SHARD).unlink(),
        f"shard {SHARD}, named in {INDEX}, is missing",
    ),
    "truncated shard": (truncate, f"{SHARD} is truncated or corrupt"),
    "corrupt header": (
        lambda f: (f / SHARD).write_bytes(b"\xff" * 4096),
        f"{SHARD} is truncated or corrupt",
    ),
    "empty shard": (
        lambda f: (f / SHARD).write_bytes(b""),
        f"{SHARD} is truncated or corrupt",
    ),
    "missing tensor": (lambda f: put(f, Q_NORM, None), f"missing tensor {Q_NORM}"),
    "missing head": (
        lambda f: put(f, "lm_head.weight", None),
        "missing tensor lm_head.weight; .*set tie_word_embeddings to true",
    ),
    "wrong shape": (
        lambda f: put(f, Q_NORM, np.ones(9, np.float32)),
        rf"tensor {Q_NORM} has shape \(9,\), but config.json asks for \(8,\)",
    ),
    "one layer too many": (
        lambda f: put(f, "model.layers.3.mlp.x", np.ones(2, np.float32)),
        "unexpected tensor model.layers.3.mlp.x.*num_hidden_layers=3",
    ),
    "wrong dtype": (
        lambda f: put(f, Q_NORM, np.ones(8, np.float64)),
        f"tensor {Q_NORM} has dtype F64",
    ),
    "tensor in two shards": (
        lambda f: [
            put(f, Q_NORM, np.ones(8, np.float32), file=file.name, index=False)
            for file in f.glob("*.safetensors")
        ],
        f"tensor {Q_NORM} is in both model-00001-.* and {SHARD}",
    ),
    "index names a tensor that its file does not hold": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update(x=SHARD)),
        f"places tensor x in {SHARD}, which does not hold it",
    ),
    "no weights": (lambda f: (f / INDEX).unlink(), "holds neither model.safetensors"),
    "index is not JSON": (
        lambda f: (f / INDEX).write_text("{"),
        "not a safetensors index",
    ),
    "index has no map": (
        lambda f: edit_index(f, lambda c: c.pop("weight_map")),
        "not a safetensors index",
    ),
    "index leaves the folder": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update(x="../x.safetensors")),
        "not a safetensors index",
    ),
    "two sets of weights": (
        lambda f: shutil.copy(f / SHARD, f / "model.safetensors"),
        "holds both",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses_folder(tmp_path, monkeypatch, fault):
    damage, message = FAULTS[fault]
    folder = tmp_path / "model"
    write_folder(folder, UNTIED, hf_tensors(UNTIED, np.float32), shards=3)
    load_hf(folder, UNTIED)
    damage(folder)
    # Found from the headers alone, before a weight is read or a device touched.
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(CheckpointError, match=message) as error:
        load_hf(folder, UNTIED)
    assert str(folder) in str(error.value)


def test_many_missing_tensors_make_one_short_error(tmp_path):
    write_folder(tmp_path, TIED, hf_tensors(TIED, np.float32))
    deeper = dataclasses.replace(TIED, num_layers=9)
    with pytest.raises(
        CheckpointError, match=r"missing tensors .* and 62 more"
    ) as error:
        load_hf(tmp_path, deeper)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_resolve_model(tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(tmp_path / "absent")
    monkeypatch.chdir(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if not installed
    with pytest.raises(CheckpointError, match=re.escape("fp8rl_jax[hub]")):
        resolve_model("Qwen/Qwen3-0.6B")

    hub = types.ModuleType("huggingface_hub")
    asked = []
    hub.snapshot_download = lambda name, **kw: (asked.append(name), str(tmp_path))[1]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B"]

    def offline(name, **kw):
        raise OSError("no network")

    hub.snapshot_download = offline
    with pytest.raises(CheckpointError, match=r"neither a folder nor .*no network"):
        resolve_model("Qwen/Qwen3-0.6B")


def test_init_statistics_and_sharding():
    config = dataclasses.replace(UNTIED, hidden_size=64, intermediate_size=128)
    params = init_params(config, jax.random.key(0))
    for path, leaf in jax.tree.leaves_with_path(params):
        values = np.asarray(leaf, np.float64)
        if path[-1].key == "scale":
            np.testing.assert_array_equal(values, 1.0)
        else:
            error = 0.02 / np.sqrt(values.size)
            assert abs(values.mean()) < 5 * error, path
            assert abs(values.std() - 0.02) < 5 * error, path
    kernels = [leaf.ravel()[:8] for leaf in jax.tree.leaves(params) if leaf.ndim == 3]
    assert len(np.unique(np.concatenate(kernels))) == 8 * len(kernels)

    shardings = shardings_of(config)
    sharded = init_params(config, jax.random.key(0), shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    rounded = init_params(config, jax.random.key(0), dtype=jnp.bfloat16)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)),
        rounded,
        params,
    )


def test_make_checkpoint_command(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    command = [
        sys.executable,
        *("-m", "fp8rl_jax.models.qwen3.make_checkpoint"),
        f"--out={tmp_path / 'model'}",
        f"--tokenizer={tmp_path}",
        *("--size=0.6b", "--vocab_size=256", "--hidden_size=64", "--num_layers=2"),
        *("--eos_token_ids=255", "--seed=3"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = Qwen3Config.from_hf_folder(tmp_path / "model")
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (256, 64, 2)
    assert (config.num_heads, config.head_dim, config.eos_token_ids) == (
        16,
        128,
        (255,),
    )
    assert f"{config.num_parameters:,} parameters" in done.stdout
    params = load_hf(tmp_path / "model", config, dtype=jnp.bfloat16)
    expected = init_params(config, jax.random.key(3), dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert (tmp_path / "model" / "tokenizer.json").exists()

    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.strip().splitlines()[-1].startswith("make_checkpoint: ")
    assert "Traceback" not in again.stderr
