"""Layout of the cache, and what it stores."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.attention import KVCache, SharedPrefix, page_size
from fp8rl_jax.attention.layout import place_of, stored_values

LAYERS, HEADS, PAGE, HEAD_DIM = 2, 2, 16, 64
# Three rows of at most two pages; page 0 is nobody's.
TABLE = np.array([[3, 1], [5, -1], [2, 4]], np.int32)
NUM_PAGES = 6


@jax.jit
def store(cache, layer, k, v, positions):
    return cache.store(layer, k, v, cache.place(positions))


@pytest.fixture
def empty(precisions):
    def make(name):
        table = jnp.asarray(TABLE)
        shape = LAYERS, NUM_PAGES, HEADS, PAGE, HEAD_DIM
        return KVCache.create(*shape, table, precisions[name])

    return make


@pytest.fixture
def new():
    """Keys and values [B, T, K, H] whose sizes differ by token."""
    rng = np.random.default_rng(0)

    def draw():
        x = rng.standard_normal((3, 4, HEADS, HEAD_DIM))
        x *= 2.0 ** rng.integers(-8, 8, (3, 4, HEADS, 1))
        return jnp.asarray(x, jnp.bfloat16)

    return draw(), draw()


def f64(x):
    return np.asarray(x, np.float64)


def stored(cache):
    """Keys and values that the pages stand for, [L, P, K, page, H]."""
    if cache.k_scales is None:
        return f64(cache.k), f64(cache.v)
    k = f64(cache.k) * f64(cache.k_scales)[..., None]
    return k, f64(stored_values(cache.v, cache.v_scales))


def quantised(x):
    """Each token and head on its own: power-of-two scale >= amax / 448, e4m3 codes."""
    x = f64(x)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 448))
    return f64((x / scale).astype(ml_dtypes.float8_e4m3fn)) * scale


@pytest.mark.parametrize(
    ("num_tokens", "platform", "size"),
    [(1, "gpu", 128), (129, "gpu", 128), (129, "cpu", 128), (128, "tpu", 128)]
    + [(17, "cpu", 32)],
)
def test_page_size(num_tokens, platform, size):
    assert page_size(num_tokens, platform) == size


def test_layout(empty):
    shape = (LAYERS, NUM_PAGES, HEADS, PAGE, HEAD_DIM)
    cache = empty("bf16")
    assert [(x.shape, x.dtype) for x in cache.arrays()] == [(shape, jnp.bfloat16)] * 2
    for name in ("fp8_kv", "fp8"):
        k, v, *scales = empty(name).arrays()
        assert (k.shape, k.dtype) == (shape, jnp.float8_e4m3fn)
        groups = (*shape[:3], PAGE // 16, HEAD_DIM, 16)
        assert (v.shape, v.dtype) == (groups, jnp.float8_e4m3fn)
        for x in scales:
            assert (x.shape, x.dtype) == (shape[:4], jnp.float32)
    assert cache.page_size == PAGE


def test_places_of_values():
    # Column 4 t + i of group j holds slot 16 j + 2 t + (i & 1) + 8 (i >> 1).
    slots = [
        16 * j + 2 * t + (i & 1) + 8 * (i >> 1)
        for j in range(2)
        for t in range(4)
        for i in range(4)
    ]
    places = place_of(np.array(slots))
    np.testing.assert_array_equal(places, np.divmod(np.arange(32), 16))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_tokens_go_to_their_pages(name, empty, new):
    # Row 0 begins a page, row 1 goes anywhere and where it has no page, row 2 partly
    # outside: dropped there, as is a negative position.
    positions = np.array([[0, 1, 2, 3], [15, 4, 16, 7], [30, 31, 32, -1]], np.int32)
    cache = store(empty(name), jnp.int32(1), *new, jnp.asarray(positions))
    for x, pages in zip(new, stored(cache), strict=True):
        values = f64(x) if name == "bf16" else quantised(x)
        expected = np.zeros((LAYERS, NUM_PAGES, HEADS, PAGE, HEAD_DIM))
        for row, t in np.ndindex(positions.shape):
            entry, slot = divmod(positions[row, t], PAGE)
            page = TABLE[row, entry] if 0 <= entry < 2 else -1
            if page >= 0:
                expected[1, page, :, slot] = values[row, t]
        np.testing.assert_array_equal(pages, expected)


def test_values_are_exact_in_bfloat16(empty, new):
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (3, 1))
    for pages in stored(store(empty("fp8"), jnp.int32(0), *new, positions)):
        np.testing.assert_array_equal(pages, pages.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_token_has_codes_0_and_scale_nan(bad, empty, new):
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (3, 1))
    k, v = (x.at[0, 2, 1, 5].set(bad) for x in new)
    cache = store(empty("fp8"), jnp.int32(0), k, v, positions)
    at = 0, TABLE[0, 0], 1
    assert np.isnan(cache.k_scales[*at, 2]) and np.isnan(cache.v_scales[*at, 2])
    assert not np.any(f64(cache.k)[*at, 2])
    group, column = place_of(2)
    assert not np.any(f64(cache.v)[*at, group, :, column])
    assert np.isfinite(cache.k_scales).sum() == cache.k_scales.size - 1


def test_an_entry_is_quantised_once(empty, new):
    # Token by token or at once: the same bits; what is stored is not touched again.
    layer = jnp.int32(0)
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (3, 1))
    at_once = store(empty("fp8"), layer, *new, positions)
    cache = empty("fp8")
    for t in range(4):
        one = (x[:, t : t + 1] for x in new)
        cache = store(cache, layer, *one, positions[:, t : t + 1])
    for a, b in zip(cache.arrays(), at_once.arrays(), strict=True):
        np.testing.assert_array_equal(f64(a), f64(b))


def test_rows_with_most_work_come_first(empty):
    where = empty("bf16").place(jnp.array([[3], [-1], [20]], jnp.int32))
    np.testing.assert_array_equal(where.order, [2, 0, 1])
    # Of 20 and 19 tokens they share 16.
    groups, pages = jnp.array([[2, 0]], jnp.int32), jnp.array([1], jnp.int32)
    shared = SharedPrefix.create(groups, pages, jnp.asarray(TABLE))
    cache = empty("bf16").with_table(jnp.asarray(TABLE), shared)
    where = cache.place(jnp.array([[18], [7], [19]], jnp.int32))
    np.testing.assert_array_equal(where.order, [1, 2, 0])


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_copied_pages(name, empty, new):
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (3, 1))
    cache = store(empty(name), jnp.int32(1), *new, positions)
    source, target = np.array([3, 0, 5]), np.array([0, -1, 4])
    copied = jax.jit(KVCache.copy_pages)(cache, source, target)
    for old, now in zip(stored(cache), stored(copied), strict=True):
        np.testing.assert_array_equal(now[:, [0, 4]], old[:, [3, 5]])
        np.testing.assert_array_equal(now[:, [1, 2, 3, 5]], old[:, [1, 2, 3, 5]])
    table = jnp.asarray(TABLE[::-1].copy())
    assert copied.with_table(table) == dataclasses.replace(copied, page_table=table)


def test_a_page_holds_whole_groups(precisions):
    with pytest.raises(ValueError, match="multiple of 16 tokens, got 24"):
        KVCache.create(1, 1, 1, 24, 64, jnp.zeros((1, 1), jnp.int32), precisions["fp8"])
