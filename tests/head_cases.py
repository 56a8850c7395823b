"""Output heads for tests, and log softmax in numpy float64."""

import math

import jax.numpy as jnp
import numpy as np

from fp8rl_jax.logprobs import VOCAB_CHUNK

# Rows of the head: one chunk; several, the last of them ragged and part padding.
SMALL = (40, 37)
LARGE = (2 * VOCAB_CHUNK + 130, 2 * VOCAB_CHUNK + 61)


def f64(x):
    return np.asarray(x, np.float64)


def make(num_rows, batch, width=64, dtype=jnp.bfloat16, spread=3.0):
    """Hidden states, a float32 head, and targets that hit every chunk and edge."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((batch, width)), dtype)
    head = rng.standard_normal((num_rows, width)) * spread / math.sqrt(width)
    return hidden, jnp.asarray(head, jnp.float32)


def reference_log_softmax(hidden, head, temperature, vocab_size):
    """log softmax over the ids that count, [B, vocab_size], float64."""
    head = f64(head.astype(hidden.dtype))[:vocab_size]
    logits = f64(hidden) @ head.T / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
