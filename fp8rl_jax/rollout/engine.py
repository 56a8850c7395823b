"""The static-batch rollout engine: a whole batch inside one jitted program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from fp8rl_jax.attention import KVCache, cache_length
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.logprobs import sample_tokens
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import constrain, shard_batch
from fp8rl_jax.rollout.types import FinishReason, Prompts, Rollouts, SamplingParams


class StaticRolloutEngine:
    """Samples all rows in lockstep until every one has finished.

    The prompt is prefilled once for its G samples; each key and value is quantised
    once, when it enters the cache. One program per (prompt count, padded prompt length,
    sampling parameters).

    Args:
      config: the model.
      precision: what runs in FP8 while sampling.
      vocab_size: the tokenizer's ids; ids from here up to the model's vocabulary are
        padding and are never drawn.
      mesh: rows are split over its batch axes; None for one device.
    """

    def __init__(
        self,
        config: Qwen3Config,
        precision: Precision,
        vocab_size: int,
        mesh: Mesh | None = None,
    ):
        if not 0 < vocab_size <= config.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} must be positive and at most the model's "
                f"{config.vocab_size}."
            )
        self._config = config
        self._precision = precision
        self._vocab_size = vocab_size
        self._mesh = mesh

    def generate(
        self,
        weights: PyTree,
        prompts: Prompts,
        sampling: SamplingParams,
        key: tuple[int, int],
    ) -> Rollouts:
        """Draws completions; see `RolloutEngine.generate`.

        Raises:
          ValueError: an empty prompt, a token outside the vocabulary, or sample ids of
            the wrong shape.
        """
        num_prompts = len(prompts.tokens)
        _check_prompts(prompts, sampling, self._vocab_size)
        row_multiple = _batch_shards(self._mesh)
        padded = -(-num_prompts // row_multiple) * row_multiple
        tokens, lengths = _pad(prompts.tokens, padded)
        sample_ids = np.zeros((padded, sampling.num_samples), np.int32)
        sample_ids[:num_prompts] = prompts.sample_ids
        arrays = {
            "tokens": tokens,
            "lengths": lengths,
            "sample_ids": sample_ids,
            "active": np.arange(padded) < num_prompts,
        }
        if self._mesh is not None:
            arrays = shard_batch(self._mesh, DEFAULT_RULES, arrays)
        seed, step = (np.uint32(k) for k in key)
        out = _generate(
            weights,
            arrays,
            seed,
            step,
            config=self._config,
            precision=self._precision,
            sampling=sampling,
            vocab_size=self._vocab_size,
        )
        rows = num_prompts * sampling.num_samples
        tokens, log_probs, lengths, stopped = (
            np.asarray(x)[:rows] for x in jax.device_get(out)
        )
        reasons = np.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
        return Rollouts(
            tokens,
            log_probs,
            lengths,
            reasons.astype(np.int32),
            np.asarray(prompts.sample_ids, np.int32).reshape(-1),
        )


def _check_prompts(prompts: Prompts, sampling: SamplingParams, vocab_size: int):
    expected = (len(prompts.tokens), sampling.num_samples)
    if np.shape(prompts.sample_ids) != expected:
        raise ValueError(
            f"sample_ids must have shape (prompts, samples) = {expected}, got "
            f"{np.shape(prompts.sample_ids)}."
        )
    if not prompts.tokens:
        raise ValueError("There are no prompts to sample from.")
    for i, tokens in enumerate(prompts.tokens):
        if not tokens:
            raise ValueError(f"Prompt {i} is empty: give it at least one token.")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(
                f"Prompt {i} has token ids outside [0, {vocab_size}): is its tokenizer "
                "the model's?"
            )


def _batch_shards(mesh: Mesh | None) -> int:
    if mesh is None:
        return 1
    return int(np.prod([mesh.shape[axis] for axis in DEFAULT_RULES.batch]))


def _pad(prompts: list[list[int]], rows: int):
    """Right-padded tokens [rows, T] and lengths; filler rows hold one token."""
    length = cache_length(max(map(len, prompts)))
    tokens = np.zeros((rows, length), np.int32)
    lengths = np.ones((rows,), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return tokens, lengths


def _row_keys(seed, step, sample_ids: Int[Array, "R"]):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sample_ids)


@functools.partial(
    jax.jit, static_argnames=("config", "precision", "sampling", "vocab_size")
)
def _generate(weights, prompts, seed, step, *, config, precision, sampling, vocab_size):
    """Prefill and decoding of a batch.

    Returns tokens [R, T], log-probs [R, T], lengths [R] and whether each row stopped.
    """
    model = Qwen3(config, weights)
    dtype = jnp.dtype(config.dtype)
    num_prompts, prompt_slots = prompts["tokens"].shape
    group, limit = sampling.num_samples, sampling.max_new_tokens
    keys = _row_keys(seed, step, prompts["sample_ids"].reshape(-1))
    prompt_lengths = jnp.repeat(prompts["lengths"], group)

    def draw(hidden, position):
        """Draws the token at ``position`` of every row."""
        return sample_tokens(
            hidden,
            model.head,
            jax.vmap(jax.random.fold_in)(keys, position),
            temperature=sampling.temperature,
            vocab_size=vocab_size,
        )

    def split_rows(x):
        return constrain(x, (None, "batch", *[None] * (x.ndim - 2)))

    cache = KVCache.create(
        config.num_layers,
        num_prompts,
        config.num_kv_heads,
        cache_length(prompt_slots + limit),
        config.head_dim,
        precision,
        dtype,
    )
    cache = jax.tree.map(split_rows, cache)
    positions = jnp.broadcast_to(
        jnp.arange(prompt_slots, dtype=jnp.int32)[None], prompts["tokens"].shape
    )
    hidden, cache = model(prompts["tokens"], positions, precision, cache=cache)
    last = jnp.take_along_axis(hidden, prompts["lengths"][:, None, None] - 1, axis=1)
    cache = jax.tree.map(split_rows, cache.repeat_rows(group))

    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    def record(state, token, log_prob):
        """Writes column t of every row that is still running."""
        t, tokens, log_probs, lengths, stopped = state
        running = (lengths == t) & ~stopped
        column = jnp.where(running, token, 0)
        tokens = lax.dynamic_update_slice(tokens, column[:, None], (0, t))
        column = jnp.where(running, log_prob, 0.0)
        log_probs = lax.dynamic_update_slice(log_probs, column[:, None], (0, t))
        is_stop = jnp.any(token[:, None] == stop_ids[None], -1)
        return (
            t + 1,
            tokens,
            log_probs,
            lengths + running.astype(jnp.int32),
            stopped | (running & is_stop),
        )

    rows = num_prompts * group
    state = (
        jnp.int32(0),
        jnp.zeros((rows, limit), jnp.int32),
        jnp.zeros((rows, limit), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
        # Filler rows are born finished.
        ~jnp.repeat(prompts["active"], group),
    )
    token, log_prob = draw(jnp.repeat(last[:, 0], group, axis=0), prompt_lengths)
    state = record(state, token, log_prob)

    def some_running(carry):
        (t, *_, stopped), _, _ = carry
        return (t < limit) & ~jnp.all(stopped)

    def decode(carry):
        state, token, cache = carry
        position = prompt_lengths + state[0]
        hidden, cache = model(
            token[:, None], position[:, None] - 1, precision, cache=cache
        )
        token, log_prob = draw(hidden[:, 0], position)
        return record(state, token, log_prob), token, cache

    state, _, _ = lax.while_loop(some_running, decode, (state, token, cache))
    return state[1:]
