import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import grpo
from fp8rl_jax.grpo import AdvantageConfig, group_baseline_and_std

group_advantages = jax.jit(grpo.group_advantages, static_argnums=1)

MEAN = AdvantageConfig()
LEAVE_ONE_OUT = AdvantageConfig(baseline="leave_one_out")
CONFIGS = [
    MEAN,
    LEAVE_ONE_OUT,
    AdvantageConfig(normalize_std=False),
    AdvantageConfig(baseline="leave_one_out", normalize_std=False),
]


def f32(x):
    return jnp.asarray(x, jnp.float32)


def advantages_f64(rewards, config):
    """The formulas, sample by sample in f64, for groups that are not constant."""
    rewards = np.asarray(rewards, np.float64)
    out = np.empty_like(rewards)
    for p, group in enumerate(rewards):
        for i, reward in enumerate(group):
            peers = group
            if config.baseline == "leave_one_out":
                peers = np.delete(group, i)
            out[p, i] = reward - peers.mean()
            if config.normalize_std:
                out[p, i] /= peers.std(ddof=1) + config.eps
    return out


@pytest.mark.parametrize("config", CONFIGS)
def test_matches_the_formula_in_f64(config):
    rewards = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    np.testing.assert_allclose(
        group_advantages(rewards, config), advantages_f64(rewards, config), rtol=2e-5
    )


def test_golden_leave_one_out_of_nemo_rl():
    baseline, std = group_baseline_and_std(
        f32([[1, 2, 3], [4, 5, 6]]), baseline="leave_one_out"
    )
    np.testing.assert_allclose(baseline, [[2.5, 2, 1.5], [5.5, 5, 4.5]])
    np.testing.assert_allclose(std, [[0.7071, 1.4142, 0.7071]] * 2, atol=1e-4)


def test_golden_leave_one_out_does_not_divide_by_a_std_of_zero():
    rewards = f32([[5, 5, 2]])
    baseline, std = group_baseline_and_std(rewards, baseline="leave_one_out")
    np.testing.assert_allclose(baseline, [[3.5, 3.5, 5]])
    np.testing.assert_allclose(std, [[2.1213, 2.1213, 0]], atol=1e-4)
    advantages = group_advantages(rewards, LEAVE_ONE_OUT)
    np.testing.assert_allclose(advantages, [[0.7071, 0.7071, -3]], atol=1e-4)


def test_golden_one_valid_sample_is_its_own_baseline():
    rewards, valid = f32([[3, 7, 9]]), jnp.asarray([[False, True, False]])
    for rule in ("mean", "leave_one_out"):
        baseline, std = group_baseline_and_std(rewards, valid, baseline=rule)
        assert baseline[0, 1] == 7 and std[0, 1] == 0
    np.testing.assert_array_equal(group_advantages(rewards, MEAN, valid), [[0, 0, 0]])


def test_golden_std_has_bessel_correction():
    # jnp.std's default, ddof = 0, gives ±1.
    np.testing.assert_allclose(
        group_advantages(f32([[1, 3]]), MEAN), [[-0.7071, 0.7071]], atol=1e-4
    )


def test_leave_one_out_of_two_samples_is_their_difference():
    advantages = group_advantages(f32([[1, 4]]), LEAVE_ONE_OUT)
    np.testing.assert_array_equal(advantages, [[-3, 3]])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("group_size", [1, 2, 7])
def test_constant_groups_give_exactly_zero(config, group_size):
    rewards = f32([0.0, 1.0, 0.1, 0.35, -7.3, 1e6 / 3])
    rewards = jnp.broadcast_to(rewards[:, None], (6, group_size))
    assert not group_advantages(rewards, config).any()


def test_constant_peers_leave_no_residue():
    # NeMo-RL#4161: E[x²] − E[x]² left a std of 1.5e-4 among the seven equal rewards,
    # an advantage of 4000 and a gradient norm of 35.
    rewards = f32([[0.95] + [0.35] * 7])
    _, std = group_baseline_and_std(rewards, baseline="leave_one_out")
    assert std[0, 0] == 0
    advantages = group_advantages(rewards, LEAVE_ONE_OUT)
    np.testing.assert_allclose(advantages[0, 0], 0.6, rtol=1e-6)
    # The others: mean (0.95 + 6·0.35)/7, std sqrt(Σ(r − mean)²/6) = 0.22678.
    np.testing.assert_allclose(advantages[0, 1:], -0.0857143 / 0.2267787, rtol=1e-4)


@pytest.mark.parametrize("config", [MEAN, LEAVE_ONE_OUT])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_std_of_rounding_size_hits_the_floor(config, size):
    ulp = np.spacing(np.float32(0.35 * size))
    rewards = f32([[0.35 * size, 0.35 * size, 0.35 * size + 2 * ulp, 0.35 * size]])
    assert np.abs(group_advantages(rewards, config)).max() <= 4 * ulp


def test_small_but_real_differences_are_normalised():
    rewards = f32([[0.1, 0.101, 0.102, 0.103]])
    np.testing.assert_allclose(
        group_advantages(rewards, MEAN), advantages_f64(rewards, MEAN), rtol=1e-3
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_do_not_see_each_other(config):
    # grpo-flat#2, Liger-Kernel#553: mean and std over the batch. Here the rewards of
    # the groups are disjoint, and both groups have the same prompt: a row is a prompt
    # instance (NeMo-RL#3882, #2176 merged equal prompts or equal lengths).
    low, high = f32([[0, 1, 0, 0]]), f32([[100, 103, 101, 100]])
    both = group_advantages(jnp.concatenate([low, high]), config)
    np.testing.assert_allclose(both[:1], group_advantages(low, config), rtol=1e-6)
    np.testing.assert_allclose(both[1:], group_advantages(high, config), rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("junk", [1e3, np.nan, np.inf])
def test_invalid_samples_do_not_count(config, junk):
    rewards = f32([[0.2, junk, 0.9, 0.4, junk]])
    valid = jnp.asarray([[True, False, True, True, False]])
    advantages = group_advantages(rewards, config, valid)
    np.testing.assert_array_equal(advantages[0, ~valid[0]], [0, 0])
    np.testing.assert_allclose(
        advantages[:, valid[0]],
        advantages_f64(rewards[:, valid[0]], config),
        rtol=1e-5,
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_a_nan_reward_stays_visible_in_its_group_only(config):
    advantages = group_advantages(f32([[1, np.nan, 0], [1, 2, 0]]), config)
    assert np.isnan(advantages[0]).any() and np.isfinite(advantages[1]).all()


def test_order_of_samples_does_not_matter():
    rewards = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    order = np.random.default_rng(2).permutation(8)
    np.testing.assert_allclose(
        group_advantages(rewards[:, order], LEAVE_ONE_OUT),
        group_advantages(rewards, LEAVE_ONE_OUT)[:, order],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        (np.zeros(4, np.float32), None),
        (np.zeros((2, 2), np.float64), None),
        (np.zeros((2, 2), np.int32), None),
        (np.zeros((2, 2), np.float32), np.ones((2, 3), bool)),
        (np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors(rewards, valid):
    with pytest.raises(ValueError, match="must be"):
        grpo.group_advantages(rewards, MEAN, valid)
