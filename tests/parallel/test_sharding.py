import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8rl_jax.models.qwen3.axes import PARAM_AXES, param_axes
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES, AxisRules
from fp8rl_jax.parallel.sharding import (
    constrain,
    named_sharding,
    scale_sharding,
    shard_batch,
    tree_shardings,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def qwen3_shapes(layers=2, vocab=384, d=256, q=256, qkv=512, f=384, h=128):
    """Shapes of the parameter tree, written down independently of its axes."""

    def kernel(*shape):
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def scale(*shape):
        return {"scale": jax.ShapeDtypeStruct(shape, jnp.float32)}

    return {
        "embed": {"embedding": jax.ShapeDtypeStruct((vocab, d), jnp.float32)},
        "layers": {
            "input_norm": scale(layers, d),
            "post_attention_norm": scale(layers, d),
            "attention": {
                "qkv_proj": kernel(layers, qkv, d),
                "o_proj": kernel(layers, d, q),
                "q_norm": scale(layers, h),
                "k_norm": scale(layers, h),
            },
            "mlp": {
                "gate_up_proj": kernel(layers, 2 * f, d),
                "down_proj": kernel(layers, d, f),
            },
        },
        "final_norm": scale(d),
        "lm_head": kernel(vocab, d),
    }


def test_shard_shapes_of_the_parameter_tree(mesh):
    shapes = qwen3_shapes()
    shardings = tree_shardings(mesh, DEFAULT_RULES, PARAM_AXES, shapes)
    shard = jax.tree.map(lambda s, x: s.shard_shape(x.shape), shardings, shapes)
    attention, mlp = shard["layers"]["attention"], shard["layers"]["mlp"]
    assert shard["embed"]["embedding"] == (192, 128)
    assert attention["qkv_proj"]["kernel"] == (2, 256, 128)
    assert attention["o_proj"]["kernel"] == (2, 128, 128)
    assert attention["q_norm"]["scale"] == (2, 128)
    assert mlp["gate_up_proj"]["kernel"] == (2, 384, 128)
    assert mlp["down_proj"]["kernel"] == (2, 128, 192)
    assert shard["final_norm"]["scale"] == (256,)


def test_the_sharded_product_equals_the_local_one(mesh):
    x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(384, 256)).astype(np.float32)
    sharded = jax.device_put(w, named_sharding(mesh, DEFAULT_RULES, ("mlp", "embed")))
    rows = shard_batch(mesh, DEFAULT_RULES, x)

    @jax.jit
    def project(x, w):
        return constrain(jnp.einsum("BD,FD->BF", x, w), ("batch", "mlp"))

    with jax.set_mesh(mesh):
        y = project(rows, sharded)
    assert y.sharding.is_equivalent_to(
        NamedSharding(mesh, P(("data", "fsdp"), "tensor")), 2
    )
    np.testing.assert_allclose(np.asarray(y), x @ w.T, rtol=1e-4, atol=1e-4)


def test_tied_embeddings_have_no_head(mesh):
    axes = param_axes(tie_word_embeddings=True)
    assert "lm_head" not in axes and axes.keys() | {"lm_head"} == PARAM_AXES.keys()
    assert param_axes(tie_word_embeddings=False) == PARAM_AXES


def test_a_dimension_that_does_not_divide_names_its_leaf(mesh):
    with pytest.raises(
        ValueError, match=r"qkv_proj/kernel: axis 'kv_heads' .* size 511"
    ):
        tree_shardings(mesh, DEFAULT_RULES, PARAM_AXES, qwen3_shapes(qkv=511))


def test_a_leaf_of_another_rank_is_named(mesh):
    tree = qwen3_shapes()
    tree["final_norm"]["scale"] = jax.ShapeDtypeStruct((1, 256), jnp.float32)
    with pytest.raises(ValueError, match="final_norm/scale"):
        tree_shardings(mesh, DEFAULT_RULES, PARAM_AXES, tree)


def test_trees_of_different_structure_are_refused(mesh):
    tree = qwen3_shapes()
    del tree["lm_head"]
    with pytest.raises(ValueError, match="lm_head"):
        tree_shardings(mesh, DEFAULT_RULES, PARAM_AXES, tree)


def test_rules_name_unknown_and_doubled_axes():
    with pytest.raises(ValueError, match="unknown logical axis 'head'"):
        DEFAULT_RULES.spec(("batch", "head"))
    with pytest.raises(ValueError, match="one mesh axis cannot shard two"):
        DEFAULT_RULES.spec(("batch", "length", "embed"))
    assert AxisRules(layers=("data",)).spec(("layers", None)) == P("data", None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 512, 256), P(None, "tensor", "fsdp")),  # whole blocks in every shard
        ((2, 384, 256), P(None, None, "fsdp")),  # 192 rows a shard: block is split
        ((2, 512, 250), P(None, "tensor", None)),  # ragged: 125 columns a shard
    ],
)
def test_scales_follow_the_kernel_where_blocks_stay_whole(mesh, shape, expected):
    axes = ("layers", "mlp", "embed")
    sharding = scale_sharding(mesh, DEFAULT_RULES, axes, shape)
    assert sharding.spec == expected
    blocks = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    jax.device_put(jnp.ones(blocks, jnp.float32), sharding)  # must divide


def test_shard_batch_splits_rows_over_data_and_fsdp(mesh):
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
    weights = np.arange(8, dtype=np.float32)
    batch = shard_batch(mesh, DEFAULT_RULES, {"tokens": tokens, "weights": weights})
    np.testing.assert_array_equal(np.asarray(batch["tokens"]), tokens)
    assert batch["tokens"].addressable_shards[0].data.shape == (2, 3)
    assert batch["weights"].addressable_shards[0].data.shape == (2,)
    with pytest.raises(ValueError, match=r"batch of 6 rows .* 4 shards"):
        shard_batch(mesh, DEFAULT_RULES, tokens[:6])


def test_constrain_without_a_mesh_and_inside_shard_map(mesh):
    x = jnp.ones((4, 2), jnp.float32)
    assert constrain(x, ("batch", None)) is x
    with pytest.raises(ValueError, match="other axes"):
        constrain(x, ("batch",))
    with jax.set_mesh(mesh):
        local = jax.shard_map(
            lambda x: constrain(x, ("batch", None)) * 2,
            in_specs=P(("data", "fsdp")),
            out_specs=P(("data", "fsdp")),
        )
        np.testing.assert_array_equal(np.asarray(jax.jit(local)(x)), 2.0)
