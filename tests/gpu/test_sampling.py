"""On Hopper: the sampler's log-probs are the trainer's, and no row sees its batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.logprobs import token_log_probs
from fp8rl_jax.sampling import sample_tokens

# Three chunks, the last of them moved back, with padding.
ROWS, VOCAB_SIZE, NUM_ROWS, WIDTH = 96, 8200, 8448, 512
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((ROWS, WIDTH))
    head = rng.standard_normal((NUM_ROWS, WIDTH)) * 3 / WIDTH**0.5
    return jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)


@pytest.fixture(scope="module")
def draw(operands):
    """draw(rows, truncated): tokens and log-probs; every other row has no limits."""
    hidden, head = operands
    limited = np.arange(ROWS) % 2 == 1
    parameters = {
        "temperature": np.resize(np.float32(np.repeat(TEMPERATURES, 2)), ROWS),
        "top_k": np.where(limited, 50, 0).astype(np.int32),
        "top_p": np.where(limited, 0.5, 1.0).astype(np.float32),
        "min_p": np.where(limited, 0.01, 0.0).astype(np.float32),
    }
    keys = jax.random.split(jax.random.key(0), ROWS)
    fn = functools.partial(sample_tokens, vocab_size=VOCAB_SIZE)
    fn = jax.jit(fn, static_argnames="truncated")

    def call(rows, truncated):
        arrays = {name: x[rows] for name, x in parameters.items()}
        out = fn(hidden[rows], head, keys[rows], truncated=truncated, **arrays)
        return parameters["temperature"][rows], *map(np.asarray, out)

    return call


@pytest.mark.parametrize("truncated", [False, True])
def test_sampled_log_probs_are_bitwise_those_of_the_trainer(operands, draw, truncated):
    hidden, head = operands
    temperatures, tokens, sampled = draw(np.arange(ROWS), truncated)
    assert (tokens < VOCAB_SIZE).all()
    for temperature in TEMPERATURES:
        fn = functools.partial(
            token_log_probs, temperature=temperature or 1.0, vocab_size=VOCAB_SIZE
        )
        trained = np.asarray(jax.jit(fn)(hidden, head, tokens))
        rows = temperatures == np.float32(temperature)
        np.testing.assert_array_equal(
            sampled[rows].view(np.uint32), trained[rows].view(np.uint32)
        )


@pytest.mark.parametrize("truncated", [False, True])
def test_a_row_does_not_depend_on_its_batch(draw, truncated):
    _, tokens, logp = draw(np.arange(ROWS), truncated)
    for rows in (np.arange(3), np.arange(20, 91)):
        _, alone, alone_logp = draw(rows, truncated)
        np.testing.assert_array_equal(alone, tokens[rows])
        np.testing.assert_array_equal(alone_logp, logp[rows])


def test_a_row_without_limits_draws_the_same_on_both_paths(draw):
    _, tokens, logp = draw(np.arange(ROWS), False)
    _, mixed, mixed_logp = draw(np.arange(ROWS), True)
    np.testing.assert_array_equal(mixed[::2], tokens[::2])
    np.testing.assert_array_equal(mixed_logp[::2], logp[::2])
    assert np.any(mixed[1::2] != tokens[1::2])
