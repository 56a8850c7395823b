"""A tiny policy that the engine's tests sample from."""

import jax

from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.fp8.weights import quantize_weights, sampling_weights
from fp8rl_jax.models.qwen3.config import Qwen3Config

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    tie_word_embeddings=True,
)
VOCAB_SIZE = 90  # six more rows are padding
PRECISION = get_recipe("fp8").rollout
NEVER_DRAWN = 95


@jax.jit
def policy(params):
    """What the engine reads."""
    return sampling_weights(params, quantize_weights(params), PRECISION.linear)
