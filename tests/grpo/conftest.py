import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.grpo import LossInputs


@pytest.fixture
def nemo_case():
    """The three tokens of NeMo RL's loss tests.

    r = .5, 1, 1.5 and ρ = .6065, 1.6487, .8187. Returns (current log-probs, old,
    rollout, inputs with the advantages only).
    """

    def row(*x):
        return jnp.asarray([x], jnp.float32)

    current = row(-1.69315, -1.0, -0.59453)
    old = row(-1.0, -1.0, -1.0)
    rollout = row(-0.5, -1.5, -0.8)
    inputs = LossInputs(mask=jnp.ones((1, 3), bool), advantages=row(1.0, -1.0, 2.0))
    return current, old, rollout, inputs


@pytest.fixture
def ragged_batch():
    """Eight rows of length 1 to 16 (one empty), every kind of log-prob, f32 numpy."""
    rng = np.random.default_rng(0)
    lengths = np.array([1, 16, 3, 0, 9, 2, 12, 5])
    mask = np.arange(16)[None] < lengths[:, None]

    def log_probs(scale):
        return (-1.0 + scale * rng.standard_normal(mask.shape)).astype(np.float32)

    current = log_probs(0.4)
    inputs = LossInputs(
        mask=mask,
        advantages=rng.standard_normal(8).astype(np.float32),
        old_log_probs=log_probs(0.4),
        rollout_log_probs=log_probs(0.4),
        reference_log_probs=log_probs(0.4),
    )
    return current, inputs
