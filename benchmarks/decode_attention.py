"""Speed of paged decode attention and of storing a step's keys and values.

    python -m benchmarks.decode_attention

Qwen3-8B's heads (32 query, 8 KV, head_dim 128), one layer, random pages of a pool much
larger than the L2 cache. Times are of the kernels alone, median and [fastest, slowest].
The share of 4.8 TB/s counts the keys, values and scales of the visible tokens once.
Stores are measured alone, and as the model has them: in one kernel with the split of
the projection, norms, RoPE and the quantisation of queries.
Mixed contexts are drawn between 64 and 16,384 tokens, uniformly or log-uniformly. In a
table of their own, groups of 16 sequences share the pages of their first tokens: each
sequence reads them, or they are read once for the group.

Hardware: one Hopper GPU with 80 GB free; one minute.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Int

from benchmarks.device_time import device_time
from fp8rl_jax.attention import KVCache, SharedPrefix
from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.console import print_table
from fp8rl_jax.fp8 import Precision, get_recipe
from fp8rl_jax.kernels.hopper_kv_store import store_kv
from fp8rl_jax.kernels.hopper_paged_decode import paged_decode
from fp8rl_jax.kernels.hopper_qkv import qkv_store

_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls.", lower_bound=1)
_BATCHES = flags.DEFINE_multi_integer("batch", [64, 256, 512], "Sequences.")
_PEAK = flags.DEFINE_float("peak", 4.8, "Memory bandwidth in TB/s.")

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE = 32, 8, 128, 128
_LONGEST = 16384
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
_GROUP = 16  # samples of a prompt
# Tokens that they share, and own.
SHARED = ((256, 768), (1024, 1024), (2048, 256), (2048, 1024))


def lengths_of(kind: str | int, batch: int) -> Int[np.ndarray, "B"]:
    """Context lengths of a batch; an int makes all equal."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return rng.integers(64, _LONGEST + 1, batch)
    if kind == "log-uniform":
        return np.exp(rng.uniform(np.log(64), np.log(_LONGEST), batch)).astype(int)
    return np.full(batch, kind)


def token_bytes(precision: Precision) -> int:
    """Of a token's keys, values and scales in one layer."""
    return _KV_HEADS * 2 * (_HEAD_DIM + 4 if precision.kv_cache else 2 * _HEAD_DIM)


@functools.partial(jax.jit, static_argnames=("num_pages", "precision"))
def make_cache(num_pages: int, precision: Precision) -> KVCache:
    """One layer of pages: a few random ones, over and over."""
    few = 128
    table = jnp.arange(few, dtype=jnp.int32)[:, None]
    cache = KVCache.create(1, few, _KV_HEADS, _PAGE, _HEAD_DIM, table, precision)
    positions = jnp.broadcast_to(jnp.arange(_PAGE, dtype=jnp.int32)[None], (few, _PAGE))
    shape = few, _PAGE, _KV_HEADS, _HEAD_DIM
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (0, 1))
    cache = cache.store(jnp.int32(0), k, v, cache.place(positions))
    repeats = 1, num_pages // few
    return jax.tree.map(lambda x: jnp.tile(x, repeats + (1,) * (x.ndim - 2)), cache)


def _tables(lengths, num_pages, seed, shared=0) -> Int[np.ndarray, "B pages"]:
    """Random pages of the pool; groups have those of ``shared`` tokens in common."""
    pages = np.random.default_rng(seed).permutation(num_pages)
    table = np.full((len(lengths), _LONGEST // _PAGE), -1, np.int32)
    used = 0
    for row, length in zip(table, lengths, strict=True):
        count = -(-length // _PAGE)
        row[:count] = pages[used : used + count]
        used += count
    prompts = table[::_GROUP, : shared // _PAGE]
    table[:, : shared // _PAGE] = np.repeat(prompts, _GROUP, 0)
    return table


def attend(q, pool, table, where, shared=None) -> Array:
    """The kernels: one token a sequence, in one layer."""
    extra = {}
    if len(pool) == 4:
        q, scales = q
        names = "q_scales", "k_scales", "v_scales"
        extra = dict(zip(names, (scales, *pool[2:]), strict=True))
    lengths = where.positions[:, 0] + 1
    tables = table, lengths, jnp.int32(0)
    return paged_decode(
        q, *pool[:2], *tables, order=where.order, shared=shared, **extra
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _queries(batch, precision):
    shape = batch, _KV_HEADS, _HEADS // _KV_HEADS, _HEAD_DIM
    q = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
    if not precision.attention:
        return q
    q = quantize_tokens(q)
    return q.codes, q.scales[..., 0]


@jax.jit
def _place(cache, table, at, groups, num_shared):
    """Where the sequences' last tokens are, and what groups of sequences share."""
    shared = None
    if groups is not None:
        shared = SharedPrefix.create(groups, num_shared, table)
    return cache.with_table(table, shared).place(at), shared


def _microseconds(cache, precision, lengths, shared=0, together=False):
    """Median, fastest and slowest call; groups have ``shared`` tokens in common."""
    batch, num_pages = len(lengths), cache.k.shape[1]
    q = _queries(batch, precision)
    at = jnp.asarray(lengths - 1, jnp.int32)[:, None]
    groups = num_shared = None
    if together:
        groups = jnp.arange(batch, dtype=jnp.int32).reshape(-1, _GROUP)
        num_shared = jnp.full(len(groups), shared // _PAGE, jnp.int32)
    different = int(lengths.sum()) - shared * (batch - batch // _GROUP)
    # So many tables that a call finds nothing of the last one in the cache.
    num_sets = max(2, min(8, int(4e8 // (different * token_bytes(precision))) + 1))
    sets = []
    for seed in range(num_sets):
        table = jnp.asarray(_tables(lengths, num_pages, seed, shared))
        where = _place(cache, table, at, groups, num_shared)
        sets.append((q, cache.arrays(), table, *where))
    times = device_time(attend, sets, repeats=_REPEATS.value)
    return [1e6 * f(times) for f in (statistics.median, min, max)]


def rows(name: str, cache: KVCache) -> list[dict[str, str]]:
    """The table's rows of a recipe."""
    precision = get_recipe(name).rollout
    out = []
    for batch in _BATCHES.value:
        for kind in (*CONTEXTS, "uniform", "log-uniform"):
            lengths = lengths_of(kind, batch)
            moved = int(lengths.sum()) * token_bytes(precision)
            us, *ends = _microseconds(cache, precision, lengths)
            out.append(
                {
                    "pages": name,
                    "batch": str(batch),
                    "contexts": str(kind),
                    "us": f"{us:.0f} [{ends[0]:.0f}, {ends[1]:.0f}]",
                    "TB/s": f"{moved / us / 1e6:.2f}",
                    "% of peak": f"{100 * moved / us / 1e6 / _PEAK.value:.1f}",
                }
            )
            print(out[-1], flush=True)
    return out


def shared_rows(name: str, cache: KVCache) -> list[dict[str, str]]:
    """The rows of a recipe in the table of shared pages."""
    precision = get_recipe(name).rollout
    out = []
    for batch in _BATCHES.value:
        for shared, own in SHARED:
            lengths = lengths_of(shared + own, batch)
            saved = shared * (1 - 1 / _GROUP) / (shared + own)
            row = {
                "pages": name,
                "batch": str(batch),
                "tokens": f"{shared} shared + {own}",
                "% saved": f"{100 * saved:.1f}",
            }
            for label, together in (("us, each", False), ("us, once", True)):
                us, *ends = _microseconds(cache, precision, lengths, shared, together)
                row[label] = f"{us:.1f} [{ends[0]:.1f}, {ends[1]:.1f}]"
            out.append(row)
            print(out[-1], flush=True)
    return out


def store(pool, k, v, *where):
    """Quantises and stores a step's keys and values."""
    refs = tuple(jax.new_ref(x) for x in pool)
    store_kv(refs, k, v, *where)
    return tuple(jax.freeze(ref) for ref in refs), ()


def project_and_store(pool, qkv, norm, cos, sin, *where):
    """From the projection to stored keys and values, and to queries."""
    refs = tuple(jax.new_ref(x) for x in pool)
    tables = norm, norm, cos, sin
    groups = _HEADS // _KV_HEADS
    queries = qkv_store(refs, qkv, *tables, *where, groups=groups, eps=1e-6)
    return tuple(jax.freeze(ref) for ref in refs), queries


def store_rows(name: str) -> list[dict[str, str]]:
    """The rows of a recipe in the table of stores."""
    precision = get_recipe(name).rollout
    num_pages = max(_BATCHES.value) * _LONGEST // _PAGE
    out = []
    for batch in _BATCHES.value:
        sets = []
        for seed in range(8):
            rng = np.random.default_rng(seed)
            keys = jax.random.split(jax.random.key(seed))
            where = (
                jnp.asarray(rng.permutation(num_pages)[:batch], jnp.int32),
                jnp.asarray(rng.integers(0, _PAGE, batch), jnp.int32),
                jnp.int32(0),
            )
            shape = batch, _HEADS + 2 * _KV_HEADS, _HEAD_DIM
            x = jax.random.normal(keys[0], shape, jnp.bfloat16)
            angles = jax.random.normal(keys[1], (2, batch, _HEAD_DIM // 2))
            sets.append((x, jnp.ones((_HEAD_DIM,)), *angles, where))
        alone = [(x[:, :_KV_HEADS], x[:, -_KV_HEADS:], *w) for x, _, _, _, w in sets]
        fused = [(x.reshape(batch, -1), *rest, *w) for x, *rest, w in sets]
        for label, fn, operands in (
            ("quantise and store", store, alone),
            ("split, norm, RoPE, quantise and store", project_and_store, fused),
        ):
            pool = make_cache(num_pages, precision).arrays()
            times = device_time(fn, operands, state=pool, repeats=_REPEATS.value)
            us, *ends = (1e6 * f(times) for f in (statistics.median, min, max))
            out.append(
                {
                    "pages": name,
                    "tokens": str(batch),
                    "kernel": label,
                    "us": f"{us:.1f} [{ends[0]:.1f}, {ends[1]:.1f}]",
                }
            )
            print(out[-1], flush=True)
    return out


def main(argv: list[str]) -> None:
    """Prints the tables."""
    del argv
    device = jax.devices()[0].device_kind
    stores = [row for name in ("fp8", "bf16") for row in store_rows(name)]
    print_table(stores, f"One layer's keys and values of a step, {device}")
    num_pages = max(_BATCHES.value) * _LONGEST // _PAGE
    alone, shared = [], []
    for name in ("fp8", "bf16"):
        cache = make_cache(num_pages, get_recipe(name).rollout)
        alone += rows(name, cache)
        shared += shared_rows(name, cache)
    print_table(alone, f"Paged decode attention, {device}")
    print_table(shared, f"Pages that 16 sequences share, {device}")


if __name__ == "__main__":
    app.run(main)
