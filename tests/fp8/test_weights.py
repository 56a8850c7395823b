"""The forms of a linear weight, and the recipes that choose them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.fp8 import (
    RECIPES,
    WEIGHT_BLOCK,
    LinearPrecision,
    Precision,
    ScaledArray,
    get_recipe,
)
from fp8rl_jax.fp8.recipe import BF16_LINEAR, FP8_LINEAR
from fp8rl_jax.fp8.weights import (
    CodedWeight,
    linear,
    quantize_weights,
    sampling_weights,
    training_weights,
)


@pytest.fixture
def params(normal):
    return {
        "embed": {"embedding": normal((32, 260), 1, jnp.float32)},
        "layers": {
            "mlp": {"up_proj": {"kernel": normal((2, 24, 260), 2, jnp.float32)}},
            "norm": {"scale": normal((2, 260), 3, jnp.float32)},
        },
        "lm_head": {"kernel": normal((32, 260), 4, jnp.float32)},
    }


def up_proj(tree):
    return tree["layers"]["mlp"]["up_proj"]["kernel"]


def test_only_linear_kernels_are_quantised_per_layer(params, ref, assert_same_bits):
    codes = jax.jit(quantize_weights)(params)
    assert len(jax.tree.leaves(codes)) == 4  # codes and scales in both layouts
    assert codes["lm_head"]["kernel"] is None and codes["embed"]["embedding"] is None
    for layer in range(2):
        expected, scales = ref.quantize(up_proj(params)[layer], WEIGHT_BLOCK)
        for q, turn in (
            (up_proj(codes).codes, False),
            (up_proj(codes).transposed, True),
        ):
            q = q.mT if turn else q
            assert_same_bits(q.codes[layer], expected)
            assert_same_bits(q.scales[layer], scales)
    alone = jax.eval_shape(lambda p: quantize_weights(p, transposed=False), params)
    assert up_proj(alone).transposed is None


@pytest.mark.parametrize("precision", [FP8_LINEAR, BF16_LINEAR], ids=["fp8", "bf16"])
def test_sampling_and_training_read_the_same_weights(
    precision, params, normal, assert_same_bits
):
    codes = jax.jit(quantize_weights)(params)
    sampling = sampling_weights(params, codes, precision)
    training = training_weights(params, codes, precision)
    assert isinstance(up_proj(sampling), ScaledArray) == precision.forward
    assert isinstance(up_proj(training), CodedWeight) == precision.forward
    assert sampling["lm_head"]["kernel"].dtype == jnp.bfloat16
    assert training["lm_head"]["kernel"] is params["lm_head"]["kernel"]
    run = jax.jit(linear, static_argnums=2)
    x = normal((3, 4, 260), 5)
    expected = run(x, up_proj(params)[0], precision)
    for tree in (sampling, training):
        weight = jax.tree.map(lambda a: a[0], up_proj(tree))
        assert_same_bits(run(x, weight, precision), expected)


def test_gradient_goes_to_the_master(params, normal, assert_same_bits):
    codes = jax.jit(quantize_weights)(params)
    x = normal((3, 4, 260), 5)

    def loss(master, code):
        weight = CodedWeight(master, code) if code is not None else master
        return linear(x, weight, FP8_LINEAR).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))
    master = up_proj(params)[0]
    code = jax.tree.map(lambda a: a[0], up_proj(codes))
    assert np.any(gradient(master, code))
    assert_same_bits(gradient(master, code), gradient(master, None))


def test_the_ladder_of_recipes():
    # One policy: sampler and trainer evaluate the same function.
    assert {name for name, recipe in RECIPES.items() if recipe.one_policy} == {
        "bf16",
        "fp8",
    }
    rollouts = [
        (r.linear.forward, r.kv_cache, r.attention)
        for r in (
            get_recipe(name).rollout
            for name in ("bf16", "fp8_rollout_linear", "fp8_rollout", "fp8")
        )
    ]
    assert rollouts == [
        (False, False, False),
        (True, False, False),
        (True, True, True),
        (True, True, True),
    ]
    for name in ("bf16", "fp8_rollout_linear", "fp8_rollout"):
        assert get_recipe(name).train == get_recipe("bf16").train
    assert get_recipe("fp8").train.linear == LinearPrecision(True, True, True)


def test_bad_recipes_are_named():
    with pytest.raises(ValueError, match="choose one of bf16, fp8, fp8_rollout"):
        get_recipe("fp9")
    with pytest.raises(ValueError, match="needs an FP8 KV cache"):
        Precision(FP8_LINEAR, kv_cache=False, attention=True)
