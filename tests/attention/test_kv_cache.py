"""Layout of the cache, and what `write_kv` stores."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.attention import KVCache, cache_length, write_kv

LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM = 2, 3, 2, 16, 64
write = jax.jit(write_kv)


@pytest.fixture
def empty(precisions):
    def make(name):
        return KVCache.create(LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM, precisions[name]).k

    return make


@pytest.fixture
def new():
    """[B, T, K, H] keys whose sizes differ by token."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 4, HEADS, HEAD_DIM))
    x *= 2.0 ** rng.integers(-8, 8, (BATCH, 4, HEADS, 1))
    return jnp.asarray(x, jnp.bfloat16)


def values(entries):
    if hasattr(entries, "codes"):
        codes, scales = (
            np.asarray(x, np.float64) for x in (entries.codes, entries.scales)
        )
        return codes * scales
    return np.asarray(entries, np.float64)


def reference_values(x):
    """Each token and head on its own: power-of-two scale >= amax / 448, e4m3 codes."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 448))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize(
    ("num_tokens", "slots"), [(1, 8), (16, 16), (17, 24), (128, 128), (129, 256)]
)
def test_cache_length_is_whole_blocks(num_tokens, slots):
    assert cache_length(num_tokens) == slots


def test_layout(empty):
    shape = (LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM)
    assert (empty("bf16").shape, empty("bf16").dtype) == (shape, jnp.bfloat16)
    for name in ("fp8_kv", "fp8"):
        entries = empty(name)
        assert (entries.shape, entries.codes.dtype) == (shape, jnp.float8_e4m3fn)
        assert entries.scales.shape == (*shape[:-1], 1)
        assert entries.block == (1, HEAD_DIM)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_tokens_go_to_their_positions(name, empty, new):
    # Row 0 writes at its start, row 1 anywhere, row 2 partly outside: dropped there.
    positions = np.array([[0, 1, 2, 3], [15, 4, 9, 7], [14, 15, 16, 40]], np.int32)
    entries = write(empty(name), jnp.int32(1), new, jnp.asarray(positions))
    stored = np.asarray(new, np.float64) if name == "bf16" else reference_values(new)
    expected = np.zeros((LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM))
    for row in range(BATCH):
        for t, position in enumerate(positions[row]):
            if position < SLOTS:
                expected[1, row, :, position] = stored[row, t]
    np.testing.assert_array_equal(values(entries), expected)


def test_values_are_exact_in_bfloat16(empty, new):
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (BATCH, 1))
    stored = values(write(empty("fp8"), jnp.int32(0), new, positions))
    np.testing.assert_array_equal(stored, stored.astype(ml_dtypes.bfloat16))


def test_an_entry_is_quantised_once(empty, new):
    # Token by token or at once: the same bits; what is stored is not touched again.
    at_once = write(
        empty("fp8"),
        jnp.int32(0),
        new,
        jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (BATCH, 1)),
    )
    entries = empty("fp8")
    for t in range(4):
        at = jnp.full((BATCH, 1), t, jnp.int32)
        entries = write(entries, jnp.int32(0), new[:, t : t + 1], at)
    for a, b in zip(jax.tree.leaves(entries), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_repeat_rows_keeps_samples_of_a_prompt_together(name, empty, new):
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32)[None], (BATCH, 1))
    k = write(empty(name), jnp.int32(0), new, positions)
    v = write(empty(name), jnp.int32(1), new, positions)
    repeated = KVCache(k, v).repeat_rows(2)
    for entries, original in ((repeated.k, k), (repeated.v, v)):
        for row in range(2 * BATCH):
            np.testing.assert_array_equal(
                values(entries)[:, row], values(original)[:, row // 2]
            )
