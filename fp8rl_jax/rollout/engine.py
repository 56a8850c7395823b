"""The static-batch rollout engine: a whole batch inside one jitted program."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from fp8rl_jax.attention import KVCache, page_size
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.logprobs import sample_tokens
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import shard_batch
from fp8rl_jax.rollout.static_pages import lay_out, padded_length
from fp8rl_jax.rollout.types import FinishReason, Prompts, Rollouts, SamplingParams


class StaticRolloutEngine:
    """Samples all rows in lockstep until every one has finished.

    The prompt is prefilled once for its G samples, which share its full pages; each key
    and value is quantised once, when it enters the cache. One program per (prompt
    count, padded prompt length, sampling parameters).

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
        (device, *_) = jax.tree.leaves(weights)[0].devices()
        arrays, static = self._program(prompts, sampling, device.platform)
        if self._mesh is not None:
            arrays = shard_batch(self._mesh, DEFAULT_RULES, arrays)
        seed, step = (np.uint32(k) for k in key)
        out = _generate(weights, arrays, seed, step, **static)
        rows = len(prompts.tokens) * sampling.num_samples
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

    def _program(
        self, prompts: Prompts, sampling: SamplingParams, platform: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Host arrays and static arguments of :func:`_generate`."""
        _check_prompts(prompts, sampling, self._vocab_size)
        num_prompts, shards = len(prompts.tokens), _batch_shards(self._mesh)
        padded = -(-num_prompts // shards) * shards
        longest = max(map(len, prompts.tokens))
        page = page_size(longest + sampling.max_new_tokens, platform)
        tokens, lengths = _pad(prompts.tokens, padded, padded_length(longest, page))
        pages, num_pages = lay_out(lengths, tokens.shape[1], sampling, page, shards)
        sample_ids = np.zeros((padded, sampling.num_samples), np.int32)
        sample_ids[:num_prompts] = prompts.sample_ids
        arrays = {
            "tokens": tokens,
            "lengths": lengths,
            "sample_ids": sample_ids,
            "active": np.arange(padded) < num_prompts,
            "pages": pages,
        }
        static = {
            "config": self._config,
            "precision": self._precision,
            "sampling": sampling,
            "vocab_size": self._vocab_size,
            "page": page,
            "num_pages": num_pages,
            "mesh": self._mesh,
        }
        return arrays, static


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


def _pad(prompts: list[list[int]], rows: int, length: int):
    """Right-padded tokens [rows, length] and lengths; filler rows hold one token."""
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
    jax.jit,
    static_argnames=(
        "config",
        "precision",
        "sampling",
        "vocab_size",
        "page",
        "num_pages",
        "mesh",
    ),
)
def _generate(weights, prompts, seed, step, *, mesh=None, **static):
    """:func:`_generate_rows` on every device's rows, or on all without a mesh."""
    if mesh is None:
        return _generate_rows(weights, prompts, seed, step, **static)
    batch, everywhere = DEFAULT_RULES.spec(("batch",)), PartitionSpec()
    # Devices that share a row's arithmetic must take the same steps, and the compiler
    # may let all devices of the mesh take part in what they exchange.
    shared = math.prod(mesh.shape.values()) > _batch_shards(mesh)
    together = DEFAULT_RULES.batch if shared else ()
    return jax.shard_map(
        functools.partial(_generate_rows, together=together, **static),
        mesh=mesh,
        in_specs=(everywhere, batch, everywhere, everywhere),
        out_specs=batch,
        axis_names=set(DEFAULT_RULES.batch),
        check_vma=False,
    )(weights, prompts, seed, step)


def _generate_rows(
    weights,
    prompts,
    seed,
    step,
    *,
    config,
    precision,
    sampling,
    vocab_size,
    page,
    num_pages,
    together=(),
):
    """Prefill and decoding of a batch.

    ``together`` names mesh axes whose devices end at the same step.

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

    pages = prompts["pages"]
    cache = KVCache.create(
        config.num_layers,
        num_pages,
        config.num_kv_heads,
        page,
        config.head_dim,
        pages.prompt_table,
        precision,
        dtype,
    )
    positions = jnp.broadcast_to(
        jnp.arange(prompt_slots, dtype=jnp.int32)[None], prompts["tokens"].shape
    )
    hidden, cache = model(prompts["tokens"], positions, precision, cache=cache)
    last = jnp.take_along_axis(hidden, prompts["lengths"][:, None, None] - 1, axis=1)
    cache = cache.copy_pages(pages.copy_source, pages.copy_target)
    cache = cache.with_table(pages.row_table)

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
        running = jnp.any(~stopped)
        if together:
            running = lax.pmax(running.astype(jnp.int32), together) > 0
        return (t < limit) & running

    def decode(carry):
        state, token, cache = carry
        t, *_, stopped = state
        position = prompt_lengths + t
        # A row that has ended reads and writes nothing.
        at = jnp.where(stopped, -1, position - 1)
        hidden, cache = model(token[:, None], at[:, None], precision, cache=cache)
        token, log_prob = draw(hidden[:, 0], position)
        return record(state, token, log_prob), token, cache

    state, _, _ = lax.while_loop(some_running, decode, (state, token, cache))
    return state[1:]
