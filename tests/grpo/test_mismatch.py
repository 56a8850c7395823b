import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import grpo
from fp8rl_jax.grpo import Normalizer, combine_metrics

mismatch_metrics = jax.jit(grpo.mismatch_metrics)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def compare(train, rollout, mask=None):
    train, rollout = f32(train), f32(rollout)
    mask = jnp.ones(train.shape, bool) if mask is None else jnp.asarray(mask)
    return mismatch_metrics(train, rollout, mask, Normalizer.from_mask(mask).tokens)


def test_golden_example_of_nemo_rls_guide():
    metrics = compare([[-15]], [[-5]])
    np.testing.assert_allclose(metrics["gen_kl_error"], 9.00, atol=5e-3)
    np.testing.assert_allclose(metrics["policy_kl_error"], 22015, rtol=1e-4)
    # By the formula; the guide says about 9.
    np.testing.assert_allclose(metrics["js_divergence_error"], 4.307, atol=1e-3)
    np.testing.assert_allclose(metrics["logprob_abs_diff"], 10)
    np.testing.assert_allclose(metrics["token_mult_prob_error"], np.exp(10), rtol=1e-6)


def test_golden_raw_importance_ratio():
    metrics = compare([[-1, -1, -1]], [[-0.5, -1.5, -0.8]])
    np.testing.assert_allclose(metrics["sampling_importance_ratio"], 1.0247, atol=1e-4)


def test_golden_sequence_error():
    d = np.zeros((3, 9))
    d[:, :4] = np.array([[0.1], [-0.5], [1.0]])
    for row, expected in zip(d, (1.047, 1.288, 1.764), strict=True):
        metrics = compare([row], np.zeros((1, 9)))
        np.testing.assert_allclose(
            metrics["seq_mult_prob_error_max"], expected, atol=1e-3
        )
    metrics = compare(d, np.zeros((3, 9)))
    np.testing.assert_allclose(metrics["seq_mult_prob_error_max"], 1.764, atol=1e-3)


def test_formulas_in_f64():
    rng = np.random.default_rng(0)
    train = -1 + 0.3 * rng.standard_normal((4, 6))
    rollout = -1 + 0.3 * rng.standard_normal((4, 6))
    train, rollout = (x.astype(np.float32).astype(np.float64) for x in (train, rollout))
    mask = rng.random((4, 6)) < 0.6
    d = (train - rollout)[mask]
    mixture = np.log((np.exp(train) + np.exp(rollout)) / 2)[mask]
    a, b = train[mask] - mixture, rollout[mask] - mixture
    expected = {
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "logprob_abs_diff": np.abs(d).mean(),
        "logprob_abs_diff_max": np.abs(d).max(),
        "gen_kl_error": (np.exp(d) - d - 1).mean(),
        "policy_kl_error": (np.exp(-d) + d - 1).mean(),
        "js_divergence_error": (np.exp(a) - a - 1 + np.exp(b) - b - 1).mean() / 2,
        "sampling_importance_ratio": np.exp(d).mean(),
    }
    metrics = compare(train, rollout, mask)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_equal_log_probs_give_exact_values():
    log_probs = [[-0.3, -2.7, -11.0]]
    metrics = compare(log_probs, log_probs)
    ones = {
        "token_mult_prob_error",
        "sampling_importance_ratio",
        "seq_mult_prob_error_max",
    }
    for name in metrics.keys() - {"js_divergence_error"}:
        assert metrics[name] == (1.0 if name in ones else 0.0), name
    np.testing.assert_allclose(metrics["js_divergence_error"], 0, atol=1e-12)


@pytest.mark.parametrize("junk", [1e3, np.nan, np.inf])
def test_padding_does_not_count(junk):
    mask = [[True, True, False], [False, False, False]]
    with_junk = compare(
        [[-1, -2, junk], [junk] * 3], [[-1.5, -1, -junk], [0] * 3], mask
    )
    clean = compare([[-1, -2]], [[-1.5, -1]])
    for name, value in clean.items():
        np.testing.assert_allclose(with_junk[name], value, rtol=1e-6, err_msg=name)


def test_micro_batches_combine():
    rng = np.random.default_rng(0)
    train, rollout = f32(rng.standard_normal((2, 8, 5)))
    mask = jnp.asarray(rng.random((8, 5)) < 0.5)
    tokens = Normalizer.from_mask(mask).tokens
    whole = mismatch_metrics(train, rollout, mask, tokens)
    parts = [
        mismatch_metrics(train[i : i + 2], rollout[i : i + 2], mask[i : i + 2], tokens)
        for i in range(0, 8, 2)
    ]
    stacked = {name: jnp.stack([part[name] for part in parts]) for name in whole}
    combined = combine_metrics(stacked)
    assert combined.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(combined[name], value, rtol=1e-5, err_msg=name)
