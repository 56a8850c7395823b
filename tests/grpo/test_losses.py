import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.grpo import (
    LossConfig,
    LossInputs,
    Normalizer,
    clipped_surrogate,
    policy_loss,
    truncated_importance_weight,
)

RECOMPUTED = LossConfig(old_policy="recomputed")


def f32(x):
    return jnp.asarray(x, jnp.float32)


def loss_and_metrics(log_probs, inputs, config):
    return policy_loss(log_probs, inputs, Normalizer.from_mask(inputs.mask), config)


def gradient(log_probs, inputs, config):
    return jax.grad(lambda x: loss_and_metrics(x, inputs, config)[0])(log_probs)


# Golden values of NeMo RL's unit tests.


def test_golden_clip(nemo_case):
    current, old, _, inputs = nemo_case
    inputs = inputs._replace(old_log_probs=old)
    loss, metrics = loss_and_metrics(current, inputs, RECOMPUTED)
    np.testing.assert_allclose(loss, -0.6333, atol=1e-4)
    expected = {
        "loss": -0.6333,
        "probs_ratio": 1.0,
        "probs_ratio_min": 0.5,
        "probs_ratio_max": 1.5,
        # r = .5, 1, 1.5 clipped to [.8, 1.2].
        "probs_ratio_clamped": 1.0,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        # Only the third: the first is below the range, but with A > 0 it may rise.
        "clip_fraction": 1 / 3,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-4, err_msg=name)


def test_golden_on_policy(nemo_case):
    current, _, _, inputs = nemo_case
    loss, metrics = loss_and_metrics(current, inputs, LossConfig())
    np.testing.assert_allclose(loss, -0.6667, atol=1e-4)
    # With one update per rollout the ratio is 1 and nothing is clipped.
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("tis_ratio", "expected", "out_of_bounds"),
    [(math.inf, -0.2065, 0), (0.8, -0.4744, 2 / 3)],
)
def test_golden_importance_weight(nemo_case, tis_ratio, expected, out_of_bounds):
    current, old, rollout, inputs = nemo_case
    inputs = inputs._replace(old_log_probs=old, rollout_log_probs=rollout)
    config = dataclasses.replace(RECOMPUTED, tis_ratio=tis_ratio)
    loss, metrics = loss_and_metrics(current, inputs, config)
    np.testing.assert_allclose(loss, expected, atol=1e-4)
    np.testing.assert_allclose(metrics["is_oob_ratio"], out_of_bounds, rtol=1e-6)
    # Before truncation, whatever C.
    np.testing.assert_allclose(metrics["sampling_importance_ratio"], 1.0247, atol=1e-4)


def test_golden_importance_weight_and_weighted_kl(nemo_case):
    current, old, rollout, inputs = nemo_case
    inputs = inputs._replace(
        old_log_probs=old, rollout_log_probs=rollout, reference_log_probs=old
    )
    config = dataclasses.replace(
        RECOMPUTED, tis_ratio=math.inf, kl_coefficient=0.1, kl_importance_weighting=True
    )
    loss, _ = loss_and_metrics(current, inputs, config)
    np.testing.assert_allclose(loss, -0.2004457, atol=2e-6)


def test_golden_truncated_weights(nemo_case):
    _, old, rollout, _ = nemo_case
    weight, raw = truncated_importance_weight(old, rollout, 1.0)
    np.testing.assert_allclose(weight, [[0.6065, 1, 0.8187]], atol=1e-4)
    np.testing.assert_allclose(raw, [[0.6065, 1.6487, 0.8187]], atol=1e-4)


def test_golden_kl_penalty():
    ones = f32([[1, 1, 1]])
    inputs = LossInputs(ones, advantages=0 * ones, reference_log_probs=-ones)
    loss, metrics = loss_and_metrics(
        f32([[0, -1, -2]]), inputs, LossConfig(kl_coefficient=0.1)
    )
    np.testing.assert_allclose(loss, 0.0362, atol=1e-4)
    np.testing.assert_allclose(metrics["kl_penalty"], 0.3620, atol=1e-4)


def test_golden_dual_clip():
    # A = −2, r = 5, c = 3: max(10, 2.4) = 10, min(10, 6) = 6.
    ratio, advantages = f32([[5, 5, 0.5]]), f32([[-2, 2, -2]])
    surrogate = clipped_surrogate(ratio, advantages, 0.2, 0.2, dual_clip=3.0)
    np.testing.assert_allclose(surrogate.loss, [[6, -2.4, 1.6]], rtol=1e-6)
    np.testing.assert_array_equal(surrogate.is_dual_clipped, [[True, False, False]])

    log_probs, ones = jnp.log(ratio), f32([[1, 1, 1]])
    inputs = LossInputs(ones, advantages, old_log_probs=0 * ones)
    config = dataclasses.replace(RECOMPUTED, dual_clip=3.0)
    _, metrics = loss_and_metrics(log_probs, inputs, config)
    np.testing.assert_allclose(metrics["dual_clip_fraction"], 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(gradient(log_probs, inputs, config), 0 * ones)


# The formulas, in f64.


def loss_f64(log_probs, inputs, config):
    """Loss of a whole batch and its gradient by the definitions, row by row in f64."""
    names = ("old_log_probs", "rollout_log_probs", "reference_log_probs")
    lp = np.asarray(log_probs, np.float64)
    old, rollout, ref = (np.asarray(getattr(inputs, n), np.float64) for n in names)
    mask = np.asarray(inputs.mask)
    if config.old_policy != "recomputed":
        old = rollout if config.old_policy == "rollout" else lp
    advantages = np.broadcast_to(
        np.asarray(inputs.advantages, np.float64)[:, None], mask.shape
    )
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    r = np.exp(lp - old)
    unclipped, clipped = -r * advantages, -np.clip(r, low, high) * advantages
    loss = np.maximum(unclipped, clipped)
    # d(−r A)/d lp = −r A, where the unclipped branch is the larger.
    grad = np.where(unclipped >= clipped, unclipped, 0)
    weight = 1.0
    if config.tis_ratio is not None:
        weight = np.minimum(np.exp(old - rollout), config.tis_ratio)
    delta = lp - ref
    loss = weight * loss + config.kl_coefficient * (np.exp(-delta) + delta - 1)
    grad = weight * grad + config.kl_coefficient * (1 - np.exp(-delta))

    lengths = mask.sum(1, keepdims=True)
    rows = (lengths > 0).sum()
    share = {
        "token_mean": 1 / mask.sum() + 0 * lengths,
        "sequence_mean_token_mean": 1 / (rows * np.maximum(lengths, 1)),
        "sequence_mean_token_sum_norm": 1 / (rows * 64) + 0 * lengths,
    }[config.aggregation]
    return (share * loss * mask).sum(), share * grad * mask


AGGREGATIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"old_policy": "current"},
        {"old_policy": "current", "tis_ratio": 1.1},
        {"old_policy": "rollout", "clip_ratio_high": 0.28},
        {"old_policy": "recomputed", "tis_ratio": 1.1, "kl_coefficient": 0.3},
    ],
)
def test_loss_and_gradient_match_the_formulas(ragged_batch, aggregation, options):
    log_probs, inputs = ragged_batch
    config = LossConfig(aggregation=aggregation, max_response_length=64, **options)
    expected_loss, expected_gradient = loss_f64(log_probs, inputs, config)
    if config.old_policy != "recomputed":
        inputs = inputs._replace(old_log_probs=None)
    loss, metrics = loss_and_metrics(log_probs, inputs, config)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-5)
    assert metrics["loss"] == loss
    np.testing.assert_allclose(
        gradient(log_probs, inputs, config), expected_gradient, rtol=1e-5, atol=1e-8
    )


# Modes.


def test_on_policy_gradient_is_reinforce(nemo_case):
    current, _, _, inputs = nemo_case
    np.testing.assert_allclose(
        gradient(current, inputs, LossConfig()), [[-1 / 3, 1 / 3, -2 / 3]], rtol=1e-6
    )


@pytest.mark.parametrize("old_policy", ["recomputed", "rollout"])
def test_stale_data_have_a_ratio_other_than_one(nemo_case, old_policy):
    # torchforge#571: lp − detach(lp) stood for the ratio on stale data.
    current, old, _, inputs = nemo_case
    field = "old_log_probs" if old_policy == "recomputed" else "rollout_log_probs"
    _, metrics = loss_and_metrics(
        current, inputs._replace(**{field: old}), LossConfig(old_policy=old_policy)
    )
    np.testing.assert_allclose(metrics["probs_ratio_max"], 1.5, rtol=1e-4)


def test_old_log_probs_stay_fixed_over_mini_batches():
    # open-instruct#755: old log-probs were dropped after the first mini-batch. Here the
    # third step stops at the clip, exp(0.3) > 1.2, which counts from the first.
    log_probs, old, ones = f32([[-1.0]]), f32([[-1.0]]), f32([[1.0]])
    inputs = LossInputs(ones, advantages=ones, old_log_probs=old)
    steps = []
    for _ in range(4):
        steps.append(float(gradient(log_probs, inputs, RECOMPUTED)[0, 0]))
        log_probs = log_probs + 0.1
    np.testing.assert_allclose(steps, [-1, -np.exp(0.1), 0, 0], rtol=1e-5)


def test_mismatch_is_measured_against_the_start_of_the_update(nemo_case):
    current, old, rollout, inputs = nemo_case
    inputs = inputs._replace(rollout_log_probs=rollout)
    at_start = np.abs(old - rollout).mean()
    drifted = np.abs(current - rollout).mean()
    for config, given, expected in (
        (RECOMPUTED, inputs._replace(old_log_probs=old), at_start),
        (LossConfig(), inputs, drifted),
        (LossConfig(old_policy="rollout"), inputs, drifted),
    ):
        _, metrics = loss_and_metrics(current, given, config)
        np.testing.assert_allclose(metrics["logprob_abs_diff"], expected, rtol=1e-5)
        np.testing.assert_allclose(
            metrics["approx_entropy"],
            -(np.exp(current - rollout) * current).mean(),
            rtol=1e-5,
        )


def test_exact_sampler_needs_no_correction(nemo_case):
    # The package's flagship case: sampler and trainer agree to the bit, and all modes
    # are one.
    current, _, _, inputs = nemo_case
    inputs = inputs._replace(rollout_log_probs=current)
    plain = gradient(current, inputs, LossConfig())
    for config in (LossConfig(tis_ratio=2.0), LossConfig(old_policy="rollout")):
        np.testing.assert_array_equal(gradient(current, inputs, config), plain)
        _, metrics = loss_and_metrics(current, inputs, config)
        assert metrics["logprob_abs_diff_max"] == 0
        assert metrics["sampling_importance_ratio"] == 1


def test_overflowing_importance_ratio_gets_the_largest_weight():
    weight, raw = truncated_importance_weight(f32([0, -1e30]), f32([-1e3, 0]), 2.0)
    np.testing.assert_allclose(weight, [2.0, 0.0], atol=1e-8)
    assert np.isfinite(raw).all()


def test_a_nan_importance_ratio_is_not_hidden(nemo_case):
    current, old, rollout, inputs = nemo_case
    inputs = inputs._replace(
        old_log_probs=old, rollout_log_probs=rollout.at[0, 1].set(np.nan)
    )
    config = dataclasses.replace(RECOMPUTED, tis_ratio=2.0)
    assert np.isnan(loss_and_metrics(current, inputs, config)[0])


def test_extreme_ratios_do_not_overflow():
    log_probs, ones = f32([[0, -1e3]]), f32([[1, 1]])
    inputs = LossInputs(ones, advantages=-ones, old_log_probs=f32([[-1e3, 0]]))
    loss, _ = loss_and_metrics(log_probs, inputs, RECOMPUTED)
    assert np.isfinite(loss)
    np.testing.assert_array_equal(gradient(log_probs, inputs, RECOMPUTED), [[0, 0]])


# KL in the loss.


@pytest.mark.parametrize("kl_type", ["k2", "k3"])
def test_penalty_reduces_the_divergence(kl_type):
    # Logic-RL#58, RAGEN#58: the KL was maximised. Every token of a small vocabulary is
    # weighted by its probability through the advantage-free loss.
    reference = jax.nn.log_softmax(f32([[0.5, -0.5, 1.0, 0.0]]))
    config = LossConfig(kl_coefficient=1.0, kl_type=kl_type)
    inputs = LossInputs(
        jnp.ones((1, 4), bool), f32(np.zeros(1)), reference_log_probs=reference
    )
    logits = f32([[-1.0, 1.0, 0.0, 0.3]])

    def divergence(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - reference))

    @jax.jit
    def step(logits):
        def loss(x):
            return loss_and_metrics(jax.nn.log_softmax(x), inputs, config)[0]

        return logits - 0.5 * jax.grad(loss)(logits)

    before = divergence(logits)
    for _ in range(50):
        logits = step(logits)
    assert divergence(logits) < 0.1 * before


def test_coefficient_is_not_ignored(nemo_case):
    # slime#397, #1247: the coefficient had no effect.
    current, old, _, inputs = nemo_case
    inputs = inputs._replace(reference_log_probs=old)
    losses = [
        float(loss_and_metrics(current, inputs, LossConfig(kl_coefficient=beta))[0])
        for beta in (0.0, 0.5, 1.0)
    ]
    # k3 = .30685, 0, .07213 at π_ref/π = 2, 1, 2/3: a mean of 0.12633.
    np.testing.assert_allclose(np.diff(losses), [0.12633 / 2] * 2, rtol=1e-3)


def test_penalty_in_the_reward_leaves_the_loss_alone(nemo_case):
    current, _, _, inputs = nemo_case
    config = LossConfig(kl_coefficient=0.5, kl_type="k1", kl_placement="reward")
    loss, metrics = loss_and_metrics(current, inputs, config)
    assert loss == loss_and_metrics(current, inputs, LossConfig())[0]
    assert "kl_penalty" not in metrics


def test_constant_groups_still_feel_the_penalty(nemo_case):
    # trl#7068: an advantage of 0 does not take a row out of the KL term.
    current, old, _, inputs = nemo_case
    inputs = inputs._replace(reference_log_probs=old, advantages=0 * inputs.advantages)
    grad = gradient(current, inputs, LossConfig(kl_coefficient=1.0))
    np.testing.assert_allclose(grad, [[-1 / 3, 0, 1 / 9]], atol=1e-5)


def test_advantages_are_taken_as_they_are(nemo_case):
    # gem#113: normalised a second time on the way to the loss.
    current, _, _, inputs = nemo_case
    loss, _ = loss_and_metrics(current, inputs, LossConfig())
    inputs = inputs._replace(advantages=10 * inputs.advantages + 1)
    shifted, _ = loss_and_metrics(current, inputs, LossConfig())
    np.testing.assert_allclose(shifted, 10 * loss - 1, rtol=1e-6)


# Inputs.


@pytest.mark.parametrize(
    ("replace", "config", "message"),
    [
        ({}, RECOMPUTED, "old_log_probs"),
        ({"old_log_probs": "ok"}, LossConfig(), "old_policy='current'"),
        ({}, LossConfig(old_policy="rollout"), "rollout_log_probs"),
        ({}, LossConfig(tis_ratio=2.0), "tis_ratio needs"),
        ({}, LossConfig(kl_coefficient=0.1), "reference_log_probs"),
        ({"advantages": np.zeros(2, np.float32)}, LossConfig(), "advantages"),
        ({"mask": np.ones((3, 1), bool)}, LossConfig(), "mask"),
        ({"advantages": np.zeros(1, np.float64)}, LossConfig(), "float64"),
        ({"rollout_log_probs": np.zeros((1, 2), np.float32)}, LossConfig(), "rollout"),
        ({"rollout_log_probs": jnp.zeros((1, 3), jnp.bfloat16)}, LossConfig(), "bf"),
    ],
)
def test_bad_inputs_are_errors_that_name_the_array(nemo_case, replace, config, message):
    current, old, _, inputs = nemo_case
    replace = {k: old if isinstance(v, str) else v for k, v in replace.items()}
    with pytest.raises(ValueError, match=message):
        loss_and_metrics(current, inputs._replace(**replace), config)
