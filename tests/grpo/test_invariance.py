"""Loss, gradients and metrics belong to the batch, not to how it is laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.grpo import (
    LossConfig,
    LossInputs,
    Normalizer,
    combine_metrics,
    policy_loss,
)

RULES = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm")
# Every term at once: clip, weight, KL, all metrics.
CONFIG = LossConfig(
    max_response_length=64,
    dual_clip=1.5,
    kl_coefficient=0.1,
    tis_ratio=1.1,
    old_policy="recomputed",
)


@functools.partial(jax.jit, static_argnames="config")
def evaluate(log_probs, inputs, normalizer, config=CONFIG):
    """Returns (loss, metrics, gradient) of one micro-batch under each rule."""

    def of_rule(rule):
        rule_config = dataclasses.replace(config, aggregation=rule)

        def loss_fn(x):
            return policy_loss(x, inputs, normalizer, rule_config)

        (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
        return loss, metrics, grad

    return {rule: of_rule(rule) for rule in RULES}


def evaluate_batch(log_probs, inputs, config=CONFIG):
    return evaluate(log_probs, inputs, Normalizer.from_mask(inputs.mask), config=config)


def assert_same(actual, expected, restore=lambda grad: grad):
    """Compares to 1e-6 of the size of the terms, which is 1 for losses and metrics."""
    for rule in RULES:
        (loss, metrics, grad), target = actual[rule], expected[rule]
        np.testing.assert_allclose(
            restore(np.asarray(grad)),
            target[2],
            rtol=1e-6,
            atol=1e-6 * np.abs(target[2]).max(),
            err_msg=rule,
        )
        for name, value in (metrics | {"": loss}).items():
            np.testing.assert_allclose(
                value,
                (target[1] | {"": target[0]})[name],
                rtol=1e-6,
                atol=1e-6,
                err_msg=f"{rule} {name}",
            )


def take_rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_micro_batches_in_a_scan(ragged_batch, splits):
    # trl#3021, #6024, #3938; ms-swift#10117; NeMo-RL#212, #266, #3791; verl#3332: the
    # loss, or one of its terms, was scaled by the number of micro-batches. One of the
    # rows is empty, so that a micro-batch can be (open-instruct#1161).
    log_probs, inputs = ragged_batch
    normalizer = Normalizer.from_mask(inputs.mask)
    stacked = jax.tree.map(
        lambda x: jnp.asarray(x.reshape(splits, -1, *x.shape[1:])), ragged_batch
    )

    def body(carry, micro_batch):
        return carry, evaluate(*micro_batch, normalizer)

    _, parts = jax.lax.scan(body, None, stacked)
    actual = {
        rule: (loss.sum(), combine_metrics(metrics), grads)
        for rule, (loss, metrics, grads) in parts.items()
    }
    expected = evaluate_batch(log_probs, inputs)
    assert_same(actual, expected, lambda grads: grads.reshape(log_probs.shape))


def test_ragged_lengths():
    # open-instruct#1137, UniRL#448: rows of 1 and of 1000 tokens, one micro-batch each.
    rng = np.random.default_rng(0)
    mask = np.arange(1000)[None] < np.array([[1], [1000]])
    log_probs, *others = (-1 + 0.3 * rng.standard_normal((4, 2, 1000))).astype("f4")
    inputs = LossInputs(mask, np.array([1, -0.5], np.float32), *others)
    normalizer = Normalizer.from_mask(mask)
    whole = evaluate(log_probs, inputs, normalizer)
    parts = [
        evaluate(*take_rows((log_probs, inputs), slice(i, i + 1)), normalizer)
        for i in range(2)
    ]
    # The one token of the first row weighs, by the definitions, 1 of 1001 tokens,
    # 1 of 2 rows, 1 of 2·64 tokens.
    weights = dict(zip(RULES, (1 / 1001, 1 / 2, 1 / 128), strict=True))
    for rule in RULES:
        loss = parts[0][rule][0] + parts[1][rule][0]
        np.testing.assert_allclose(loss, whole[rule][0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            parts[0][rule][2][0, 0] / parts[0]["token_mean"][2][0, 0],
            weights[rule] / weights["token_mean"],
            rtol=1e-5,
        )


def test_order_of_rows(ragged_batch):
    # trl#3231: the loss depended on the device a row landed on.
    order = np.random.default_rng(0).permutation(8)
    assert_same(
        evaluate_batch(*take_rows(ragged_batch, order)),
        evaluate_batch(*ragged_batch),
        lambda grad: grad[np.argsort(order)],
    )


def test_eight_devices(ragged_batch):
    # trl#5619, prime-rl#2562, Megatron-LM#7513: denominators of one rank's tokens.
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    sharded = jax.device_put(ragged_batch, sharding)
    assert_same(evaluate_batch(*sharded), evaluate_batch(*ragged_batch))


@pytest.mark.parametrize("columns", [3, 17])
def test_padding_columns_and_empty_rows(ragged_batch, columns):
    # torchtune#2425. The empty rows do not enter N; the columns do not enter L, for
    # which verl's default takes the padded width.
    padded = jax.tree.map(
        lambda x: np.pad(x, [(0, 2), (0, columns)][: x.ndim]), ragged_batch
    )
    actual = evaluate_batch(*padded)
    assert_same(actual, evaluate_batch(*ragged_batch), lambda grad: grad[:8, :-columns])
    for _, _, grad in actual.values():
        assert not grad[8:].any() and not grad[:, -columns:].any()


@pytest.mark.parametrize("old_policy", ["recomputed", "rollout", "current"])
@pytest.mark.parametrize("junk", [1e3, np.nan, np.inf, -np.inf])
def test_what_padding_holds(ragged_batch, old_policy, junk):
    # AReaL#1346, trl#6654, tunix#2310; tunix 4f8d7237: reference log-probs without the
    # mask; NeMo-RL#3778: filtered tokens leaked into the on-policy ratio.
    tis_ratio = None if old_policy == "rollout" else 1.1
    config = dataclasses.replace(CONFIG, old_policy=old_policy, tis_ratio=tis_ratio)
    log_probs, inputs = ragged_batch
    if old_policy != "recomputed":
        inputs = inputs._replace(old_log_probs=None)
    mask = inputs.mask

    def fill(x):
        valid = mask if x.ndim == 2 else mask.any(axis=1)
        return x if x.dtype == bool else np.where(valid, x, np.float32(junk))

    actual = evaluate_batch(*jax.tree.map(fill, (log_probs, inputs)), config=config)
    expected = evaluate_batch(log_probs, inputs, config=config)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for loss, _, grad in actual.values():
        assert np.isfinite(loss) and not np.asarray(grad)[~mask].any()


def test_masked_inner_tokens_and_stop_token(ragged_batch):
    # Search-R1#21: tokens of tools inside a response are no part of the loss.
    # reasoning-from-scratch#185, prime-rl#108: the stop token, last of the mask, is.
    log_probs, inputs = ragged_batch
    mask = inputs.mask.copy()
    mask[1, 4:7] = False
    config = dataclasses.replace(CONFIG, clip_ratio_low=1.0, clip_ratio_high=9.0)
    config = dataclasses.replace(config, dual_clip=None)
    actual = evaluate_batch(log_probs, inputs._replace(mask=mask), config=config)
    for _, _, grad in actual.values():
        np.testing.assert_array_equal(np.asarray(grad) != 0, mask)


def test_mask_of_floats_is_a_mask_of_bools(ragged_batch):
    log_probs, inputs = ragged_batch
    as_floats = inputs._replace(mask=inputs.mask.astype(np.float32))
    assert_same(evaluate_batch(log_probs, as_floats), evaluate_batch(log_probs, inputs))


def test_no_valid_token_at_all(ragged_batch):
    log_probs, inputs = ragged_batch
    inputs = inputs._replace(mask=np.zeros_like(inputs.mask))
    for loss, metrics, grad in evaluate_batch(log_probs, inputs).values():
        assert loss == 0 and not grad.any()
        assert metrics["probs_ratio_max"] == -np.inf


def test_gradient_flows_through_the_current_log_probs_only(ragged_batch):
    log_probs, inputs = ragged_batch

    def losses(floats):
        parts = evaluate_batch(log_probs, LossInputs(inputs.mask, *floats))
        return sum(loss for loss, _, _ in parts.values())

    for grad in jax.grad(losses)(tuple(inputs[1:])):
        assert not grad.any()
