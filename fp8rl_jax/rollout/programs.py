"""The rollout engine's programs: prefills, copies of pages, bursts of decode steps.

They take the pool of pages donated and give it back, so that it stays in its buffers.
With a mesh every device has its own rows and its own pages, numbered from 0.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from fp8rl_jax.attention import KVCache, SharedPrefix
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import num_shards, shard_batch
from fp8rl_jax.rollout.plans import SharedPages
from fp8rl_jax.sampling import sample_tokens

Pool = tuple[Array, ...]


class Policy(NamedTuple):
    """What is sampled from, and where.

    Attributes:
      config: the model.
      precision: what runs in FP8.
      vocab_size: ids from here on are never drawn.
      mesh: rows and pages are split over its batch axes; None for one device.
    """

    config: Qwen3Config
    precision: Precision
    vocab_size: int
    mesh: Mesh | None = None

    @property
    def num_shards(self) -> int:
        """Devices that rows and pages are split over."""
        if self.mesh is None:
            return 1
        return num_shards(self.mesh, DEFAULT_RULES, "batch")


class Chunks(NamedTuple):
    """Runs of consecutive tokens to store, R rows over all shards.

    Attributes:
      tokens: int32 [R, C], C a multiple of the page size.
      start: int32 [R], position of the first; a multiple of the page size.
      page_table: int32 [R, W]; all -1 in an idle row.
    """

    tokens: Int[Array, "R C"]
    start: Int[Array, "R"]
    page_table: Int[Array, "R W"]


class Rows(NamedTuple):
    """Sequences to decode, R rows over all shards.

    Attributes:
      tokens: int32 [R], the last token of each.
      positions: int32 [R], its position; -1 in an idle row.
      limits: int32 [R], the last position that a token may be drawn for.
      sample_ids: int32 [R].
      temperature: float32 [R]; 0: the most likely token.
      top_k: int32 [R]; 0: all.
      top_p: float32 [R].
      min_p: float32 [R].
      stop_ids: int32 [R, K]; -1: none.
      page_table: int32 [R, W].
      shared: pages to read once for several rows; None: read all for each row.
    """

    tokens: Int[Array, "R"]
    positions: Int[Array, "R"]
    limits: Int[Array, "R"]
    sample_ids: Int[Array, "R"]
    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    stop_ids: Int[Array, "R K"]
    page_table: Int[Array, "R W"]
    shared: SharedPages | None = None


class Copies(NamedTuple):
    """Pages to copy, as many of each shard.

    Attributes:
      source: int32 [N].
      target: int32 [N]; -1: nothing to copy.
    """

    source: Int[Array, "N"]
    target: Int[Array, "N"]


class Drawn(NamedTuple):
    """What a burst drew.

    Attributes:
      tokens: int32 [R, T], 0 after a row's last.
      log_probs: float32 [R, T], likewise.
      counts: int32 [R], tokens of each row.
      stopped: bool [R], whether the last one is a stop id.
    """

    tokens: Int[Array, "R T"]
    log_probs: Float[Array, "R T"]
    counts: Int[Array, "R"]
    stopped: Int[Array, "R"]


def page_bytes(config: Qwen3Config, precision: Precision, page_size: int) -> int:
    """Bytes of a page of all layers."""
    pool = jax.eval_shape(lambda: _empty_pages(config, precision, 1, page_size))
    return sum(x.size * x.dtype.itemsize for x in pool)


@functools.partial(jax.jit, static_argnames=("policy", "num_pages", "page_size"))
def create_pool(policy: Policy, num_pages: int, page_size: int) -> Pool:
    """Empty pages, ``num_pages`` on each shard.

    Returns:
      The arrays of a `KVCache` of all shards' pages.
    """
    num_pages *= policy.num_shards
    pool = _empty_pages(policy.config, policy.precision, num_pages, page_size)
    if policy.mesh is None:
        return pool
    sharding = NamedSharding(policy.mesh, _pool_spec())
    return lax.with_sharding_constraint(pool, sharding)


def _empty_pages(config, precision, num_pages, page_size):
    return KVCache.create(
        config.num_layers,
        num_pages,
        config.num_kv_heads,
        page_size,
        config.head_dim,
        jnp.zeros((1, 1), jnp.int32),
        precision,
        jnp.dtype(config.dtype),
    ).arrays()


def _pool_spec() -> PartitionSpec:
    return DEFAULT_RULES.spec((None, "batch"))


def _on_every_shard(policy: Policy, fn: Callable, num_outputs: int) -> Callable:
    """(weights, pool, rows, *scalars) -> (pool, *outputs), each shard's rows alone."""
    if policy.mesh is None:
        return fn
    rows, pool = DEFAULT_RULES.spec(("batch",)), _pool_spec()
    everywhere = PartitionSpec()

    def sharded(weights, pages, arrays, *scalars):
        return jax.shard_map(
            fn,
            mesh=policy.mesh,
            in_specs=(everywhere, pool, rows, *(everywhere for _ in scalars)),
            out_specs=(pool, *(rows for _ in range(num_outputs))),
            axis_names=set(DEFAULT_RULES.batch),
            check_vma=False,
        )(weights, pages, arrays, *scalars)

    return sharded


def _cache(pool, page_table, shared=None):
    k, v, *scales = pool
    if shared is not None:
        shared = SharedPrefix.create(*shared, page_table)
    return KVCache(k, v, *(scales or (None, None)), page_table, shared)


@functools.partial(jax.jit, static_argnames="policy", donate_argnames="pool")
def prefill(weights: PyTree, pool: Pool, chunks: Chunks, *, policy: Policy) -> Pool:
    """Stores the keys and values of chunks.

    Args:
      weights: as `fp8.weights.sampling_weights` lays them out.
      pool: pages; donated.
      chunks: what to store.
      policy: static.

    Returns:
      The pool.
    """

    def fn(weights, pool, chunks):
        steps = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
        positions = chunks.start[:, None] + steps[None]
        cache = _cache(pool, chunks.page_table)
        model = Qwen3(policy.config, weights)
        _, cache = model(chunks.tokens, positions, policy.precision, cache=cache)
        return (cache.arrays(),)

    return _on_every_shard(policy, fn, 0)(weights, pool, chunks)[0]


@functools.partial(jax.jit, static_argnames="policy", donate_argnames="pool")
def copy_pages(pool: Pool, copies: Copies, *, policy: Policy) -> Pool:
    """Copies pages of all layers; every source is read before a target is written.

    Args:
      pool: pages; donated.
      copies: from where to where.
      policy: static.

    Returns:
      The pool.
    """

    def fn(_, pool, copies):
        cache = _cache(pool, jnp.zeros((1, 1), jnp.int32))
        return (cache.copy_pages(*copies).arrays(),)

    return _on_every_shard(policy, fn, 0)((), pool, copies)[0]


@functools.partial(
    jax.jit,
    static_argnames=("num_steps", "truncated", "policy"),
    donate_argnames="pool",
)
def decode(
    weights: PyTree,
    pool: Pool,
    rows: Rows,
    key: tuple[Int[Array, ""], Int[Array, ""]],
    *,
    num_steps: int,
    truncated: bool,
    policy: Policy,
) -> tuple[Pool, Drawn]:
    """Draws up to ``num_steps`` tokens for every row.

    A row ends with a stop id or at its limit; the burst, once all rows have ended.

    Args:
      weights: as `fp8.weights.sampling_weights` lays them out.
      pool: pages; donated. Each row's hold all tokens before its last.
      rows: the sequences.
      key: uint32 (seed, step) of the sampling noise.
      num_steps: static.
      truncated: whether any row asks for top-k, top-p or min-p; static.
      policy: static.

    Returns:
      The pool and the tokens.
    """
    fn = functools.partial(
        _decode_rows,
        num_steps=num_steps,
        truncated=truncated,
        policy=policy,
        together=_together(policy),
    )
    pool, drawn = _on_every_shard(policy, fn, 1)(weights, pool, rows, *key)
    return pool, drawn


def _together(policy: Policy) -> tuple[str, ...]:
    """Mesh axes whose devices must take the same steps.

    Those that share a row's arithmetic must, and the compiler may let all devices of
    the mesh take part in what they exchange.
    """
    if policy.mesh is None:
        return ()
    shared = math.prod(policy.mesh.shape.values()) > policy.num_shards
    return DEFAULT_RULES.batch if shared else ()


def _row_keys(seed, step, sample_ids):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sample_ids)


def _decode_rows(
    weights, pool, rows, seed, step, *, num_steps, truncated, policy, together
):
    model = Qwen3(policy.config, weights)
    keys = _row_keys(seed, step, rows.sample_ids)
    cache = _cache(pool, rows.page_table, rows.shared)
    num_rows = rows.tokens.shape[0]

    def some_running(carry):
        t, running, *_ = carry
        some = jnp.any(running)
        if together:
            some = lax.pmax(some.astype(jnp.int32), together) > 0
        return (t < num_steps) & some

    def take_step(carry):
        t, running, token, drawn, cache = carry
        position = rows.positions + t
        # A row that has ended reads and writes nothing.
        at = jnp.where(running, position, -1)
        hidden, cache = model(
            token[:, None], at[:, None], policy.precision, cache=cache
        )
        token, log_prob = sample_tokens(
            hidden[:, 0],
            model.head,
            jax.vmap(jax.random.fold_in)(keys, position + 1),
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            vocab_size=policy.vocab_size,
            truncated=truncated,
        )
        is_stop = jnp.any(token[:, None] == rows.stop_ids, -1)

        def write(column, x):
            column = jnp.where(running, column, jnp.zeros_like(column))
            return lax.dynamic_update_slice(x, column[:, None], (0, t))

        drawn = Drawn(
            write(token, drawn.tokens),
            write(log_prob, drawn.log_probs),
            drawn.counts + running.astype(jnp.int32),
            drawn.stopped | (running & is_stop),
        )
        running = running & ~is_stop & (position + 1 < rows.limits)
        return t + 1, running, token, drawn, cache

    nothing = Drawn(
        jnp.zeros((num_rows, num_steps), jnp.int32),
        jnp.zeros((num_rows, num_steps), jnp.float32),
        jnp.zeros((num_rows,), jnp.int32),
        jnp.zeros((num_rows,), bool),
    )
    carry = jnp.int32(0), rows.positions >= 0, rows.tokens, nothing, cache
    *_, drawn, cache = lax.while_loop(some_running, take_step, carry)
    return cache.arrays(), drawn


def put(policy: Policy, rows: Chunks | Copies | Rows) -> Chunks | Copies | Rows:
    """Puts host arrays where the programs want them."""
    if policy.mesh is None:
        return rows
    return shard_batch(policy.mesh, DEFAULT_RULES, rows)
