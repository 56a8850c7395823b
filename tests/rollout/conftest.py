"""The policy's weights, once for all tests of the engine."""

import jax
import pytest
from rollout_policy import CONFIG, policy

from fp8rl_jax.models.qwen3.init import init_params


@pytest.fixture(scope="package")
def params():
    return init_params(CONFIG, jax.random.key(0), std=0.1)


@pytest.fixture(scope="package")
def weights(params):
    return policy(params)
