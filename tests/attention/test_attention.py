"""Forward attention: float64 bounds, block exactness, masks and scales."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.attention import KVCache, attention, cached_attention, page_size
from fp8rl_jax.attention.layout import place_of, stored_values

attend = jax.jit(attention, static_argnums=5)


@functools.partial(jax.jit, static_argnums=3)
def attend_cache(q, cache, positions, precision):
    where = cache.place(positions)
    return cached_attention(q, cache, jnp.int32(0), where, precision)


def f64(x):
    return np.asarray(x, np.float64)


def assert_same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype == jnp.bfloat16
    np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


def one_segment(batch, length):
    positions = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (batch, length)
    )
    return positions, jnp.ones_like(positions)


def filled(k, v, precision, num_slots=None):
    """One layer's cache that holds k and v at positions 0, 1, ... in shuffled pages."""
    batch, length, heads, head_dim = k.shape
    num_slots = num_slots or length
    page = page_size(num_slots, "cpu")
    pages = -(-num_slots // page)
    table = np.random.default_rng(9).permutation(batch * pages + 1)[1:]
    table = jnp.asarray(table.reshape(batch, pages), jnp.int32)

    @jax.jit
    def fill(k, v):
        cache = KVCache.create(
            1, batch * pages + 1, heads, page, head_dim, table, precision
        )
        where = cache.place(one_segment(batch, length)[0])
        return cache.store(jnp.int32(0), k, v, where)

    return fill(k, v)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_error_against_f64_softmax(length, name, precisions, qkv, reference, causal):
    q, k, v = qkv(length)
    out = attend(q, k, v, *one_segment(2, length), precisions[name])
    assert out.dtype == jnp.bfloat16 and out.shape == q.shape
    expected = reference(q, k, v, causal(length), name)
    assert (abs(f64(out) - expected.out()) <= expected.out_bound()).all()


def e4m3(x):
    x = np.clip(x.astype(np.float32), -448, 448)
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def blocked_reference(q, k, v):
    """The documented FP8 block order for one head, rows [T, H]; numpy float64."""

    def quantised(x):
        amax = np.abs(x).max(-1, keepdims=True)
        scale = amax.astype(np.float32) * np.float32(1 / 448)
        scale = scale.astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.where(amax == 0, 1.0, scale)))
        return e4m3(x / scale), scale

    (q, q_scale), (k, k_scale), (v, v_scale) = (quantised(f64(x)) for x in (q, k, v))
    length, head_dim = q.shape
    maximum, total, accumulator = np.full((length, 1), -np.inf), 0.0, 0.0
    for start in range(0, length, 128):
        keys = np.s_[start : start + 128]
        s = (q @ k[keys].T) * head_dim**-0.5 * (q_scale * k_scale[keys].T)
        visible = np.tri(length, dtype=bool)[:, keys]
        s = np.where(visible, s, -np.inf)
        new_maximum = np.maximum(maximum, s.max(-1, keepdims=True))
        p, decay = np.exp(s - new_maximum), np.exp(maximum - new_maximum)
        scales = np.where(visible, v_scale[keys].T, 0)
        largest = scales.max(-1, keepdims=True)
        largest = np.where(largest == 0, 1, largest)
        codes, scale = e4m3(p * (scales * (256 / largest))), largest / 256
        total = total * decay + p.sum(-1, keepdims=True)
        accumulator = accumulator * decay + codes @ v[keys] * scale
        maximum = new_maximum
    return accumulator / total


def test_fp8_equals_the_block_ordered_reference(precisions, qkv):
    q, k, v = qkv(300, batch=1, heads=1, kv_heads=1)
    out = attend(q, k, v, *one_segment(1, 300), precisions["fp8"])
    expected = blocked_reference(*(x[0, :, 0] for x in (q, k, v)))
    assert_same_bits(out[0, :, 0], expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_query_heads_share_their_kv_head(
    heads, kv_heads, name, precisions, qkv, reference, causal
):
    q, k, v = qkv(20, heads=heads, kv_heads=kv_heads)
    out = attend(q, k, v, *one_segment(2, 20), precisions[name])
    expected = reference(q, k, v, causal(20), name)
    assert (abs(f64(out) - expected.out()) <= expected.out_bound()).all()


@pytest.mark.parametrize("length", [40, 300])
def test_cached_attention_is_attention_bit_for_bit(length, name, precisions, qkv):
    precision = precisions[name]
    q, k, v = qkv(length)
    positions, segments = one_segment(2, length)
    expected = attend(q, k, v, positions, segments, precision)
    # Prefill at once, and in a longer cache.
    for num_slots in (length, length + 128):
        cache = filled(k, v, precision, num_slots)
        assert_same_bits(attend_cache(q, cache, positions, precision), expected)
    # One token at a time, rows at different positions.
    for t in (0, 17, length - 1):
        at = jnp.array([[t], [length - 1 - t]], jnp.int32)
        out = attend_cache(
            jnp.take_along_axis(q, at[:, :, None, None], 1), cache, at, precision
        )
        assert_same_bits(out, jnp.take_along_axis(expected, at[:, :, None, None], 1))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_prefix_does_not_depend_on_what_follows(name, precisions, qkv):
    q, k, v = qkv(300)
    whole = attend(q, k, v, *one_segment(2, 300), precisions[name])
    for length in (50, 128):
        part = (x[:1, :length] for x in (q, k, v))
        out = attend(*part, *one_segment(1, length), precisions[name])
        assert_same_bits(out, whole[:1, :length])


def test_packed_segments_equal_unpacked_rows(name, precisions, qkv):
    # Segments of 100, 128 and 60 tokens from multiples of 128 on, garbage between.
    q, k, v = (x[:1] for x in qkv(384, seed=3))
    lengths = [100, 128, 60]
    positions, segments = np.zeros((1, 384), np.int32), np.zeros((1, 384), np.int32)
    for i, length in enumerate(lengths):
        positions[0, 128 * i : 128 * i + length] = np.arange(length)
        segments[0, 128 * i : 128 * i + length] = i + 1
    packed = attend(
        q, k, v, jnp.asarray(positions), jnp.asarray(segments), precisions[name]
    )
    for i, length in enumerate(lengths):
        rows = np.s_[:, 128 * i : 128 * i + length]
        alone = attend(
            q[rows], k[rows], v[rows], *one_segment(1, length), precisions[name]
        )
        assert_same_bits(packed[rows], alone)


@pytest.mark.parametrize("garbage", [3e4, -3e4])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_masked_keys_change_nothing(garbage, name, precisions, qkv):
    q, k, v = qkv(200)
    positions, segments = one_segment(2, 200)
    segments = segments.at[:, 150:].set(0)
    clean = attend(q, k, v, positions, segments, precisions[name])
    k, v = (x.at[:, 150:].set(garbage) for x in (k, v))
    dirty = attend(q, k, v, positions, segments, precisions[name])
    assert_same_bits(dirty[:, :150], clean[:, :150])


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_unwritten_slots_change_nothing(name, precisions, qkv):
    precision = precisions[name]
    q, k, v = qkv(200)
    at = jnp.array([[99], [99]], jnp.int32)
    clean = attend_cache(
        q[:, 99:100], filled(k[:, :100], v[:, :100], precision, 256), at, precision
    )
    dirty_k, dirty_v = (x.at[:, 100:].multiply(100) for x in (k, v))
    stale = filled(dirty_k, dirty_v, precision, 256)
    assert_same_bits(attend_cache(q[:, 99:100], stale, at, precision), clean)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_query_that_sees_no_key_gives_zero(precisions, qkv, name):
    q, k, v = qkv(20)
    cache = filled(k, v, precisions[name])
    out = attend_cache(
        q[:, :1], cache, jnp.full((2, 1), -1, jnp.int32), precisions[name]
    )
    np.testing.assert_array_equal(f64(out), np.zeros(out.shape))


def corrupt(**changes):
    """Replaces arrays of a cache by functions of the cache."""

    def apply(cache):
        return dataclasses.replace(cache, **{k: fn(cache) for k, fn in changes.items()})

    return apply


def repeat_slot(x):
    """The first slot of every row once more, in its last."""
    return x.at[..., 127].set(x[..., 0])


def repeat_value(x):
    """As :func:`repeat_slot`, of FP8 values."""
    (last, to), (first, column) = map(place_of, (127, 0))
    return x.at[..., last, :, to].set(x[..., first, :, column])


CORRUPTIONS = {
    "key scales doubled": corrupt(k_scales=lambda c: c.k_scales * 2),
    "value scales doubled": corrupt(v_scales=lambda c: c.v_scales * 2),
    "value scales left at 1": corrupt(v_scales=lambda c: jnp.ones_like(c.v_scales)),
    "scales of neighbouring slots swapped": corrupt(
        v_scales=lambda c: jnp.roll(c.v_scales, 1, axis=3)
    ),
    "scales of the heads swapped": corrupt(k_scales=lambda c: c.k_scales[:, :, ::-1]),
    "scales of keys and values swapped": corrupt(
        k_scales=lambda c: c.v_scales, v_scales=lambda c: c.k_scales
    ),
    "stale value slot": corrupt(
        v=lambda c: repeat_value(c.v),
        v_scales=lambda c: repeat_slot(c.v_scales),
    ),
    "stale key slot": corrupt(
        k=lambda c: repeat_slot(c.k.mT).mT,
        k_scales=lambda c: repeat_slot(c.k_scales),
    ),
    "values not permuted": corrupt(
        v=lambda c: c.v[..., place_of(jnp.arange(16, dtype=jnp.int32))[1]]
    ),
    "stale page": corrupt(page_table=lambda c: c.page_table.at[:, 1].set(0)),
    "pages swapped": corrupt(page_table=lambda c: c.page_table[:, ::-1]),
    "pages of another row": corrupt(page_table=lambda c: c.page_table[::-1]),
}


@pytest.mark.parametrize("corruption", [None, *CORRUPTIONS])
def test_a_wrong_scale_or_stale_page_breaks_the_bound(
    corruption, precisions, qkv, reference, causal
):
    # The bound of the first test holds for the true cache and for no other.
    length = 256
    q, k, v = qkv(length)
    expected = reference(q, k, v, causal(length), "fp8")
    cache = filled(k, v, precisions["fp8"])
    if corruption:
        cache = CORRUPTIONS[corruption](cache)
    positions, _ = one_segment(2, length)
    out = attend_cache(q, cache, positions, precisions["fp8"])
    error = abs(f64(out) - expected.out())
    assert (error <= expected.out_bound()).all() == (corruption is None)


def test_a_non_finite_token_reaches_nobody_else(precisions, qkv):
    # A page that was another sequence's, with a NaN and an inf past our length.
    precision = precisions["fp8"]
    q, k, v = qkv(200)
    at = jnp.array([[99], [99]], jnp.int32)
    clean = attend_cache(q[:, 99:100], filled(k, v, precision), at, precision)
    bad_k, bad_v = (x.at[:, 120].set(jnp.nan).at[:, 130].set(jnp.inf) for x in (k, v))
    dirty = filled(bad_k, bad_v, precision)
    assert_same_bits(attend_cache(q[:, 99:100], dirty, at, precision), clean)
    # Its own sequence sees it.
    later = jnp.array([[121], [121]], jnp.int32)
    out = attend_cache(q[:, 121:122], dirty, later, precision)
    assert not np.isfinite(f64(out)).any()


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_uniform_attention_over_4096_keys(precisions, qkv, name):
    _, k, v = qkv(4096, batch=1, heads=1, kv_heads=1)
    v = jnp.abs(v)
    cache = filled(k, v, precisions[name])
    out = attend_cache(
        jnp.zeros((1, 1, 1, 64), jnp.bfloat16),
        cache,
        jnp.full((1, 1), 4095, jnp.int32),
        precisions[name],
    )
    # Equal probabilities: an FP8 one, times a power-of-two scale, is exact.
    values = f64(v)
    if precisions[name].kv_cache:
        rows = f64(stored_values(cache.v, cache.v_scales))[0, cache.page_table[0], 0]
        values = rows.reshape(1, -1, 1, 64)
    np.testing.assert_allclose(f64(out)[0], values.mean(1), rtol=2.0**-8)


def test_small_probabilities_survive(precisions, reference):
    # One key of probability 1/2; the other half spread over 4095 keys at 1.2e-4 each:
    # with one scale for all of them e4m3 (smallest value 2^-9) would drop that half.
    head_dim, num_keys, gap = 64, 4096, np.log(4095)
    k = np.zeros((1, num_keys, 1, head_dim), np.float32)
    k[0, 0, 0, 0] = np.sqrt(head_dim)
    q = np.zeros((1, 1, 1, head_dim), np.float32)
    q[..., 0] = gap
    v = np.ones((1, num_keys, 1, head_dim), np.float32)
    v[0, 0] = -1
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    out = attend_cache(
        q,
        filled(k, v, precisions["fp8"]),
        jnp.full((1, 1), num_keys - 1, jnp.int32),
        precisions["fp8"],
    )
    expected = reference(q, k, v, np.ones((1, num_keys), bool), "fp8")
    assert (abs(f64(out) - expected.out()) <= expected.out_bound()).all()
    # The 127 keys that share a block with the large one are lost (1.5 % of the mass).
    assert abs(f64(out) - expected.out()).max() < 0.03
    assert expected.probs()[..., 1:].sum() > 0.45
