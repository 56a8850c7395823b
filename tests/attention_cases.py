"""Keys and values that are hard on an FP8 cache, and float64 attention over them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.attention import KVCache, cached_attention
from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.fp8 import dequantize

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 128, 128


def _normal(rng, length, heads):
    return rng.standard_normal((1, length, heads, HEAD_DIM))


def plain(rng, length):
    """Standard normal queries, keys and values."""
    return tuple(_normal(rng, length, n) for n in (HEADS, KV_HEADS, KV_HEADS))


def heavy_tailed(rng, length):
    """Student's t with two degrees of freedom."""
    q, _, _ = plain(rng, length)
    k, v = (rng.standard_t(2, (1, length, KV_HEADS, HEAD_DIM)) for _ in range(2))
    return q, 0.15 * k, v


def outlier_channels(rng, length):
    """Two channels of the keys and of the values 30 times the others."""
    q, k, v = plain(rng, length)
    k[..., [3, 77]] *= 30
    v[..., [5, 99]] *= 30
    q[..., [3, 77]] /= 10
    return q, k, v


def unequal_scales(rng, length):
    """Tokens whose keys and values differ in size, independently, by 2^15."""
    q, k, v = plain(rng, length)
    k, v = (
        x * np.exp2(rng.uniform(low, high, (1, length, KV_HEADS, 1)))
        for x, low, high in ((k, -9, 0), (v, -9, 6))
    )
    return q, k, v


def uniform(rng, length):
    """Queries of zero: every key has the same probability."""
    q, k, v = plain(rng, length)
    return 0 * q, k, v + 0.5


def dominant_key(rng, length):
    """One key takes half of the last query's mass, the others share the rest."""
    q, k, v = plain(rng, length)
    unit = np.zeros(HEAD_DIM)
    unit[0] = 1.0
    q[:] = unit * math.sqrt(HEAD_DIM)
    k[..., 0] = 0.0
    k[:, length // 3, :, 0] = math.log(max(length - 1, 1))
    return q, k, v + 1.0


CASES = {
    f.__name__: f
    for f in (
        plain,
        heavy_tailed,
        outlier_channels,
        unequal_scales,
        uniform,
        dominant_key,
    )
}


def operands(case, length, seed=0):
    """bfloat16 q, k, v of one sequence, [1, length, heads, 128]."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in CASES[case](rng, length))


@functools.partial(jax.jit, static_argnames=("precision", "implementation"))
def _decode_last(q, k, v, table, precision, implementation):
    length, pages = k.shape[1], table.shape[1]
    shape = 1, pages + 2, KV_HEADS, PAGE, HEAD_DIM
    cache = KVCache.create(*shape, table, precision)
    layer, at = jnp.int32(0), jnp.arange(pages * PAGE, dtype=jnp.int32)[None]
    where = cache.place(at)
    extra = ((0, 0), (0, pages * PAGE - length), (0, 0), (0, 0))
    padded = (jnp.pad(x, extra) for x in (k, v))
    cache = cache.store(layer, *padded, where, implementation=implementation)
    where = cache.place(jnp.full((1, 1), length - 1, jnp.int32))
    out = cached_attention(
        q[:, -1:], cache, layer, where, precision, implementation=implementation
    )
    return out[0, 0]


def decode_last(q, k, v, precision, implementation=None):
    """Attention of the last token over a cache of shuffled pages, [N, H]."""
    pages = -(-k.shape[1] // PAGE)
    table = np.random.default_rng(1).permutation(pages + 2)[:pages]
    table = jnp.asarray(table[None], jnp.int32)
    return np.asarray(
        _decode_last(q, k, v, table, precision, implementation), np.float64
    )


def values(x):
    """What quantised tokens stand for, float64."""
    return np.asarray(dequantize(quantize_tokens(x), jnp.float32), np.float64)


def exact_last(q, k, v):
    """Softmax attention of the last token in float64, [N, H]."""
    q, k, v = (np.asarray(x, np.float64)[0] for x in (q[:, -1:], k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.einsum("nh,snh->ns", q[0], k) / math.sqrt(HEAD_DIM)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("ns,snh->nh", p / p.sum(-1, keepdims=True), v)


def relative_error(out, expected):
    """In Frobenius norm."""
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


# Relative error of FP8 attention over the dequantised and over the unquantised cache:
# e4m3 rounds each probability, and each key and value, by up to 2^-4, 2^-5.2 in root
# mean square, and averages over keys. A score of 30, as
# heavy-tailed keys have, is off by one.
FP8_BOUNDS = {
    "plain": (0.03, 0.06),
    "heavy_tailed": (0.06, 0.6),
    "outlier_channels": (0.05, 0.15),
    "unequal_scales": (0.05, 0.1),
    "uniform": (0.01, 0.03),
    "dominant_key": (0.03, 0.05),
}
