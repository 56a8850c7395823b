"""The rows of the fused projections: their order, their codes, their shards."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.fp8 import quantize
from fp8rl_jax.fp8.quantize import WEIGHT_BLOCK
from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config, param_shapes
from fp8rl_jax.models.qwen3.fuse import (
    fuse,
    gate_up_widths,
    qkv_widths,
    rows_of_parts,
    split_fused,
)
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import named_sharding

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=384,
    tie_word_embeddings=False,
)
D, L, H = CONFIG.hidden_size, CONFIG.num_layers, CONFIG.head_dim


def qkv_labels(num_kv_heads, group, head_dim):
    """(matrix, row) of every row of the fused kernel, one head after the other."""
    labels = []
    for kv_head in range(num_kv_heads):
        heads = [("q", kv_head * group + g) for g in range(group)]
        heads += [("k", kv_head), ("v", kv_head)]
        labels += [
            (name, head * head_dim + i) for name, head in heads for i in range(head_dim)
        ]
    return labels


def gate_up_labels(f, block):
    return [
        (name, start + i)
        for start in range(0, f, block)
        for name in ("gate", "up")
        for i in range(block)
    ]


# Config, widths, the order of the rows.
LAYOUTS = {
    "qkv": (CONFIG, qkv_widths, qkv_labels(2, 2, 128)),
    "no groups": (
        dataclasses.replace(CONFIG, num_kv_heads=4, head_dim=8),
        qkv_widths,
        qkv_labels(4, 1, 8),
    ),
    "gate and up": (CONFIG, gate_up_widths, gate_up_labels(384, 128)),
    "ragged": (
        dataclasses.replace(CONFIG, intermediate_size=200),
        gate_up_widths,
        gate_up_labels(200, 8),
    ),
}


def kernels(labels, columns=3, seed=0):
    """A random kernel for each matrix, and the fused kernel row by row."""
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(name for name, _ in labels))
    parts = {}
    for name in names:
        rows = sum(label[0] == name for label in labels)
        parts[name] = rng.standard_normal((L, rows, columns)).astype(np.float32)
    fused = np.stack([parts[name][:, row] for name, row in labels], 1)
    return list(parts.values()), fused


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_rows_lie_in_groups(layout, array):
    config, widths, labels = LAYOUTS[layout]
    parts, expected = kernels(labels)
    fused = fuse([array(part) for part in parts], widths(config))
    np.testing.assert_array_equal(fused, expected)
    again = split_fused(array(expected), widths(config), axis=-2)
    places = rows_of_parts(widths(config), expected.shape[1])
    for part, split, rows in zip(parts, again, places, strict=True):
        np.testing.assert_array_equal(split, part)
        np.testing.assert_array_equal(expected[:, rows], part)


@pytest.mark.parametrize("size", QWEN3_SIZES)
def test_groups_of_the_published_sizes(size):
    config = QWEN3_SIZES[size]
    layers = param_shapes(config)["layers"]
    rows = {
        "qkv": layers["attention"]["qkv_proj"]["kernel"][1],
        "gate_up": layers["mlp"]["gate_up_proj"]["kernel"][1],
    }
    assert rows["qkv"] == config.num_kv_heads * sum(qkv_widths(config))
    assert gate_up_widths(config) == (128, 128)
    assert rows["gate_up"] == 2 * config.intermediate_size


@pytest.mark.parametrize("layout", ["qkv", "gate and up"])
def test_codes_are_those_of_the_separate_matrices(layout):
    config, widths, labels = LAYOUTS[layout]
    parts, fused = kernels(labels, columns=256)
    codes = quantize(jnp.asarray(fused), WEIGHT_BLOCK)
    found = split_fused(codes.codes, widths(config), axis=-2)
    blocks = [width // 128 for width in widths(config)]
    scales = split_fused(codes.scales, blocks, axis=-2)
    for part, found_codes, found_scales in zip(parts, found, scales, strict=True):
        expected = quantize(jnp.asarray(part), WEIGHT_BLOCK)
        np.testing.assert_array_equal(
            np.asarray(found_codes).view(np.uint8),
            np.asarray(expected.codes).view(np.uint8),
        )
        np.testing.assert_array_equal(found_scales, expected.scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_parts_are_copied(layout):
    """No sum of zero-padded parts: the transpose is one concatenation."""
    config, widths, labels = LAYOUTS[layout]
    parts, fused = kernels(labels)
    primal = jnp.asarray(fused.mT, jnp.bfloat16)

    def backward(cotangents):
        _, vjp = jax.vjp(lambda x: split_fused(x, widths(config)), primal)
        return vjp(cotangents)[0]

    cotangents = [jnp.asarray(part.mT, jnp.bfloat16) for part in parts]
    np.testing.assert_array_equal(backward(cotangents), fused.mT.astype(jnp.bfloat16))
    text = str(jax.make_jaxpr(backward)(cotangents))
    assert "concatenate" in text and "add" not in text and "pad" not in text


@pytest.mark.parametrize("tensor", [2, 4])
def test_whole_groups_on_a_device_move_no_data(tensor):
    """From x to what o and down take in, forward and backward."""
    mesh = make_mesh(data=1, tensor=tensor, devices=jax.devices()[:tensor])
    config = dataclasses.replace(
        CONFIG, num_heads=8, num_kv_heads=4, intermediate_size=512
    )
    axes = param_axes(tie_word_embeddings=False)["layers"]
    shapes = param_shapes(config)["layers"]

    def placed(shape, axes):
        sharding = named_sharding(mesh, DEFAULT_RULES, axes)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def kernel(module, name):
        _, *shape = shapes[module][name]["kernel"]
        return placed(tuple(shape), axes[module][name]["kernel"][1:])

    x = placed((2, 16, D), ("batch", "length", "features"))
    out = placed((2, 16, 8 * H), ("batch", "length", "heads"))
    product = placed((2, 16, 512), ("batch", "length", "mlp"))

    def attend(x, w, cotangent):
        def forward(w):
            q, k, v = (
                part.reshape(2, 16, -1, H)
                for part in split_fused(x @ w.T, qkv_widths(config))
            )
            q = q.reshape(2, 16, 4, 2, H)
            return ((q * k[:, :, :, None]) + v[:, :, :, None]).reshape(2, 16, -1)

        out, vjp = jax.vjp(forward, w)
        return out, vjp(cotangent)

    def gate(x, w, cotangent):
        def forward(w):
            gate, up = split_fused(x @ w.T, gate_up_widths(config))
            return gate * up

        out, vjp = jax.vjp(forward, w)
        return out, vjp(cotangent)

    for fn, args in (
        (attend, (x, kernel("attention", "qkv_proj"), out)),
        (gate, (x, kernel("mlp", "gate_up_proj"), product)),
    ):
        with jax.set_mesh(mesh):
            compiled = jax.jit(fn).lower(*args).compile()
        moves = re.findall(r"all-\w+|collective-\w+|reduce-scatter", compiled.as_text())
        assert not moves, moves
        assert compiled.output_shardings[0].is_equivalent_to(args[2].sharding, 3)


def test_random_weights_do_not_depend_on_what_is_fused():
    """Each matrix is drawn by its own key: its rank among all of them by name."""
    key = jax.random.key(5)
    params = jax.tree.map(np.asarray, init_params(CONFIG, key)["layers"])
    qkv = params["attention"]["qkv_proj"]["kernel"].reshape(L, 2, 4, H, D)
    gate_up = params["mlp"]["gate_up_proj"]["kernel"].reshape(L, 3, 2, 128, D)

    @jax.jit(static_argnums=2)
    def draw(key, std, shape):
        return std * jax.random.normal(key, shape, jnp.float32)

    # 0 and 1 are the embedding and the final norm, then come attention, mlp, norms.
    drawn = {
        3: qkv[:, :, 2],  # k_proj, after k_norm
        4: params["attention"]["o_proj"]["kernel"],
        6: qkv[:, :, :2],  # q_proj, after q_norm
        7: qkv[:, :, 3],  # v_proj
        9: params["mlp"]["down_proj"]["kernel"],
        10: gate_up[:, :, 0],
        11: gate_up[:, :, 1],
    }
    for rank, found in drawn.items():
        found = found.reshape(L, -1, found.shape[-1])
        expected = draw(jax.random.fold_in(key, rank), 0.02, found.shape)
        np.testing.assert_array_equal(found, expected)
