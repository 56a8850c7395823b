"""Attention on a Hopper GPU: one set of bits for decode, prefill and training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    FP8_BOUNDS,
    decode_last,
    exact_last,
    operands,
    relative_error,
    values,
)

from fp8rl_jax.attention import KVCache, attention, cached_attention
from fp8rl_jax.fp8.recipe import BF16, FP8

BATCH, HEADS, KV_HEADS = 3, 32, 8
PRECISIONS = pytest.mark.parametrize("precision", [FP8, BF16], ids=["fp8", "bf16"])
LAYER = jnp.int32(1)


def qkv(length, batch=BATCH, seed=0):
    """Queries, keys, values; sizes differ by token."""
    rng = np.random.default_rng(seed)

    def draw(heads, spread):
        sizes = np.exp2(rng.uniform(-spread, spread, (batch, length, heads, 1)))
        x = rng.standard_normal((batch, length, heads, 128)) * sizes
        return jnp.asarray(x, jnp.bfloat16)

    return draw(HEADS, 0.5), draw(KV_HEADS, 1), draw(KV_HEADS, 3)


def positions_of(x):
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return jnp.broadcast_to(positions, x.shape[:2])


def assert_same_bits(a, b):
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (a, b)))


def f64(x):
    return np.asarray(x, np.float64)


@functools.partial(jax.jit, static_argnames=("precision", "implementation"))
def train(q, k, v, positions, segments, precision, implementation=None):
    return attention(
        q, k, v, positions, segments, precision, implementation=implementation
    )


@functools.partial(jax.jit, static_argnames="precision")
def prefill(q, k, v, cache, precision, first=0):
    """Stores tokens from position ``first`` on and attends; whole pages."""
    where = cache.place(positions_of(q) + first)
    cache = cache.store(LAYER, k, v, where)
    return cached_attention(q, cache, LAYER, where, precision), cache


@functools.partial(jax.jit, static_argnames="precision")
def decode(q, k, v, cache, at, precision):
    """Stores one token a row at positions ``at`` and attends."""
    where = cache.place(at)
    cache = cache.store(LAYER, k, v, where)
    return cached_attention(q, cache, LAYER, where, precision), cache


def empty_cache(batch, pages, precision):
    table = np.random.default_rng(2).permutation(batch * pages + 2)[: batch * pages]
    table = jnp.asarray(table.reshape(batch, pages), jnp.int32)
    return KVCache.create(2, batch * pages + 2, KV_HEADS, 128, 128, table, precision)


@PRECISIONS
@pytest.mark.parametrize("length", [1024, 8192])
def test_decode_and_prefill_have_the_bits_of_the_trainer(length, precision):
    batch = BATCH if length == 1024 else 1
    q, k, v = qkv(length, batch)
    trained = train(q, k, v, positions_of(q), None, precision)
    cache = empty_cache(batch, length // 128 + 1, precision)
    whole, cache = prefill(q, k, v, cache, precision)
    assert_same_bits(whole, trained)
    # The second half over pages that hold the first.
    half = length // 2
    rest, _ = prefill(*(x[:, half:] for x in (q, k, v)), cache, precision, half)
    assert_same_bits(rest, trained[:, half:])
    # Around every border of a page, each row elsewhere. What is stored again is the
    # same, so the cache stays as it is.
    borders = [b + d for b in range(0, length, 128) for d in (-1, 0, 1) if b + d >= 0]
    for t in borders[:: 1 if length == 1024 else 7]:
        at = jnp.asarray([[t], [length - 1 - t], [t // 2]][:batch], jnp.int32)
        new = [jnp.take_along_axis(x, at[:, :, None, None], 1) for x in (q, k, v)]
        out, cache = decode(*new, cache, at, precision)
        expected = jnp.take_along_axis(trained, at[:, :, None, None], 1)
        assert_same_bits(out, expected)


@PRECISIONS
def test_tokens_stored_one_by_one_are_those_of_whole_pages(precision):
    q, k, v = qkv(256)
    cache = empty_cache(BATCH, 2, precision)
    _, whole = prefill(q, k, v, cache, precision)

    @jax.jit
    def one_by_one(k, v, cache):
        def step(i, cache):
            new = (jax.lax.dynamic_slice_in_dim(x, i, 1, 1) for x in (k, v))
            where = cache.place(jnp.full((BATCH, 1), i, jnp.int32))
            return cache.store(LAYER, *new, where)

        return jax.lax.fori_loop(0, 256, step, cache)

    for a, b in zip(one_by_one(k, v, cache).arrays(), whole.arrays(), strict=True):
        np.testing.assert_array_equal(f64(a), f64(b))


@PRECISIONS
def test_a_row_does_not_depend_on_the_others(precision):
    q, k, v = qkv(512, batch=5)
    many = train(q, k, v, positions_of(q), None, precision)
    one = [x[3:4, :200] for x in (q, k, v)]
    assert_same_bits(
        train(*one, positions_of(one[0]), None, precision), many[3:4, :200]
    )
    cache = empty_cache(5, 5, precision)
    _, cache = prefill(q, k, v, cache, precision)
    at = jnp.asarray([[100], [-1], [511], [300], [0]], jnp.int32)
    new = [
        jnp.take_along_axis(x, jnp.maximum(at, 0)[:, :, None, None], 1)
        for x in (q, k, v)
    ]
    out, _ = decode(*new, cache, at, precision)
    assert not np.any(f64(out[1]))  # an idle row
    alone = cache.with_table(cache.page_table[3:4])
    out_alone, _ = decode(*(x[3:4] for x in new), alone, at[3:4], precision)
    assert_same_bits(out[3:4], out_alone)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("case", CASES)
def test_fp8_on_hard_data_against_float64(case, length):
    q, k, v = operands(case, length)
    out = decode_last(q, k, v, FP8, implementation="mosaic")
    bounds = FP8_BOUNDS[case]
    # Hopper adds products of codes with 14 bits.
    assert relative_error(out, exact_last(*map(values, (q, k, v)))) < bounds[0] + 0.01
    assert relative_error(out, exact_last(q, k, v)) < bounds[1] + 0.01
    reference = decode_last(q, k, v, FP8, implementation="reference")
    assert relative_error(out, reference) < 0.02


def test_uniform_attention_over_16k_tokens():
    q, k, v = operands("uniform", 16384)
    out = decode_last(q, k, v, FP8, implementation="mosaic")
    assert relative_error(out, exact_last(q, k, v)) < 0.01


def test_stale_pages_with_non_finite_tokens_reach_nobody():
    q, k, v = qkv(256)
    cache = empty_cache(BATCH, 2, FP8)
    bad = [x.at[:, 130:].set(jnp.nan).at[:, 140].set(jnp.inf) for x in (k, v)]
    _, dirty = prefill(q, *bad, cache, FP8)
    _, clean = prefill(q, k, v, cache, FP8)
    at = jnp.full((BATCH, 1), 129, jnp.int32)
    new = [x[:, 129:130] for x in (q, k, v)]
    out, expected = (decode(*new, c, at, FP8)[0] for c in (dirty, clean))
    assert np.isfinite(f64(out)).all()
    assert_same_bits(out, expected)
    later = jnp.full((BATCH, 1), 150, jnp.int32)
    new = [x[:, 150:151] for x in (q, k, v)]
    assert not np.isfinite(f64(decode(*new, dirty, later, FP8)[0])).any()


def packed(length=1024):
    """Segments of several lengths a row, each from a multiple of 128 on.

    Returns:
      Positions, segments and the index of the tokens of each.
    """
    positions, segments = (np.zeros((BATCH, length), np.int32) for _ in range(2))
    index = np.full((BATCH, 5, 320), -1, np.int32)
    for row in range(BATCH):
        start = 0
        for i, n in enumerate([100, 128, 300, 250][: 4 - row % 2], 1):
            positions[row, start : start + n] = np.arange(n)
            segments[row, start : start + n] = i
            index[row, i - 1, :n] = np.arange(start, start + n)
            start = -(-(start + n) // 128) * 128
    return tuple(map(jnp.asarray, (positions, segments, index)))


@PRECISIONS
def test_packed_segments_have_the_bits_of_rows_of_their_own(precision):
    q, k, v = qkv(1024)
    positions, segments, _ = packed()
    whole = train(q, k, v, positions, segments, precision)
    third = np.s_[:1, 256:556]  # the first row's third segment
    alone = [x[third] for x in (q, k, v)]
    out = train(*alone, positions_of(alone[0]), None, precision)
    assert_same_bits(whole[third], out)


@PRECISIONS
@pytest.mark.parametrize("rows", ["whole", "packed", "short"])
def test_values_and_gradients_are_close_to_those_on_the_cpu(rows, precision):
    length = 200 if rows == "short" else 1024 if rows == "packed" else 512
    q, k, v = (x[:, :, ::4] for x in qkv(length))  # 8 and 2 heads
    positions, segments, index = positions_of(q), None, None
    if rows == "packed":
        positions, segments, index = packed()
    d_out = qkv(length, seed=5)[0][:, :, ::4]
    if segments is not None:
        real = (segments != 0)[:, :, None, None]
        d_out = jnp.where(real, d_out, jnp.zeros_like(d_out))

    def run(q, k, v, d_out):
        def fn(q, k, v):
            out = attention(q, k, v, positions, segments, precision, index=index)
            return out if segments is None else jnp.where(real, out, 0)

        out, vjp = jax.vjp(fn, q, k, v)
        return out, *vjp(d_out)

    here = jax.device_get(jax.jit(run)(q, k, v, d_out))
    cpu = jax.devices("cpu")[0]
    positions, segments, index = jax.device_put((positions, segments, index), cpu)
    if segments is not None:
        real = jax.device_put(real, cpu)
    with jax.default_device(cpu):
        there = jax.device_get(jax.jit(run)(*jax.device_put((q, k, v, d_out), cpu)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), here, there, strict=True):
        assert np.isfinite(f64(a)).all()
        # Sums of 14 bits move one e4m3 code of a probability in a few hundred.
        assert relative_error(f64(a), f64(b)) < 8e-3, name
