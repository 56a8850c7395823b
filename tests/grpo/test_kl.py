import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.grpo import kl_estimate, kl_penalized_rewards

LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.5])
REFERENCE_LOGITS = np.array([-0.4, 0.6, 0.2, -0.9, 0.5])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize(
    ("kl_type", "values", "clamped"),
    [
        ("k1", [-1, 14, 29], [-1, 10, 10]),
        ("k2", [0.5, 98, 420.5], [0.5, 10, 10]),
        ("k3", [0.7183, 13, 28], [0.7183, 10, 10]),
    ],
)
def test_golden_values_of_nemo_rl(kl_type, values, clamped):
    log_probs, reference = f32([-1, -1, -1]), f32([0, -15, -30])
    unclamped = kl_estimate(
        log_probs, reference, kl_type, input_clamp=None, output_clamp=None
    )
    np.testing.assert_allclose(unclamped, values, atol=1e-4)
    np.testing.assert_allclose(
        kl_estimate(log_probs, reference, kl_type), clamped, atol=1e-4
    )


def test_k3_keeps_the_digits_of_small_divergences():
    # δ = 2^-12: k3 = δ²/2 − δ³/6; exp(−δ) + δ − 1 in f32 is off by 2e-8 of 3e-8.
    delta = 2.0**-12
    estimate = kl_estimate(f32([delta]), f32([0]), "k3")
    np.testing.assert_allclose(estimate, delta**2 / 2 - delta**3 / 6, rtol=1e-3)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("delta", [15.0, 100.0, -100.0, np.inf, -np.inf])
def test_extreme_differences_are_finite_with_no_gradient(kl_type, delta):
    # NeMo-RL#874, #876: NaN. #2958: gradients where a clamp acts.
    def total(log_probs, rollout):
        return kl_estimate(
            log_probs, f32([-1]), kl_type, rollout_log_probs=rollout
        ).sum()

    # A weight of 1, where it has one, has a gradient of its own.
    sampled_from = f32([delta - 1 if np.isfinite(delta) else -1])
    for rollout in (None, sampled_from):
        value, gradient = jax.value_and_grad(total)(f32([delta - 1]), rollout)
        assert np.isfinite(value)
        np.testing.assert_array_equal(gradient, [0])


def expected_gradient(kl_type, weighted):
    """∇ of E_π[estimate] as an optimiser sees it: samples from π, π itself constant."""

    def objective(logits):
        log_probs = jax.nn.log_softmax(logits)
        sampled_from = jax.lax.stop_gradient(log_probs)
        estimate = kl_estimate(
            log_probs,
            jax.nn.log_softmax(f32(REFERENCE_LOGITS)),
            kl_type,
            rollout_log_probs=sampled_from if weighted else None,
        )
        return jnp.sum(jnp.exp(sampled_from) * estimate)

    return jax.grad(objective)(f32(LOGITS))


def exact_gradients():
    """Closed forms in f64: ∇KL(π‖π_ref) = π(δ − KL), ∇KL(π_ref‖π) = π − π_ref."""
    log_p, log_q = log_softmax(LOGITS), log_softmax(REFERENCE_LOGITS)
    p, delta = np.exp(log_p), log_p - log_q
    return p * (delta - (p * delta).sum()), p - np.exp(log_q)


@pytest.mark.parametrize(
    ("kl_type", "weighted", "target"),
    [
        ("k1", False, "zero"),
        ("k2", False, "reverse"),
        ("k3", False, "forward"),
        ("k1", True, "reverse"),
        ("k3", True, "reverse"),
    ],
)
def test_expected_gradient_is_that_of_the_documented_divergence(
    kl_type, weighted, target
):
    # NeMo-RL#2506: without the score term k3's gradient is not that of the KL.
    reverse, forward = exact_gradients()
    expected = {"zero": 0 * reverse, "reverse": reverse, "forward": forward}[target]
    np.testing.assert_allclose(
        expected_gradient(kl_type, weighted), expected, atol=2e-7
    )
    # The three are told apart.
    assert np.abs(reverse - forward).max() > 0.05


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_weighted_estimate_is_unbiased_off_policy(kl_type):
    log_p, log_q = log_softmax(LOGITS), log_softmax(REFERENCE_LOGITS)
    log_mu = log_softmax(np.array([0.0, 0.3, -0.2, 0.5, -0.1]))
    estimate = kl_estimate(
        f32(log_p), f32(log_q), kl_type, rollout_log_probs=f32(log_mu)
    )
    exact = (np.exp(log_p) * (log_p - log_q)).sum()
    np.testing.assert_allclose((np.exp(log_mu) * estimate).sum(), exact, rtol=1e-6)


def test_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="kl_type='kl'"):
        kl_estimate(f32([0]), f32([0]), "kl")


@pytest.mark.parametrize("junk", [1e3, np.nan, -np.inf])
def test_reward_penalty_is_the_masked_sum_of_k1(junk):
    log_probs = f32([[-1, -2, junk], [-0.5, junk, junk]])
    reference = f32([[-1.5, -1, junk], [-0.25, 0, junk]])
    mask = f32([[1, 1, 0], [1, 0, 0]])
    rewards = kl_penalized_rewards(f32([[1, 0]]), log_probs, reference, mask, 0.1)
    # Σ k1: 0.5 − 1 and −0.25.
    np.testing.assert_allclose(rewards, [[1.05, 0.025]], rtol=1e-6)


def test_reward_penalty_follows_the_order_of_rows():
    log_probs = f32(np.arange(6))[:, None]
    rewards = kl_penalized_rewards(
        jnp.zeros((2, 3), jnp.float32), log_probs, 0 * log_probs, log_probs >= 0, 1.0
    )
    np.testing.assert_array_equal(rewards, [[0, -1, -2], [-3, -4, -5]])
    with pytest.raises(ValueError, match="6 rows"):
        kl_penalized_rewards(
            jnp.zeros((2, 2), jnp.float32), log_probs, log_probs, log_probs >= 0, 1.0
        )
