"""Stores into the paged pool in GPU interpret mode, against numpy and the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.kernels import hopper_kv_store as kv_store

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
INTERPRET = plgpu.InterpretGPUParams()
LAYERS, PAGES = 2, 3


def run(fn, *args):
    """Interprets a kernel without XLA's licence to drop roundings to bfloat16."""
    fn = functools.partial(fn, interpret=INTERPRET)
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})(*args)


def stored(store, pool, *args):
    """The pool after ``store``."""

    def fn(pool, *args, interpret):
        refs = [jax.new_ref(x) for x in pool]
        store(refs, *args, interpret=interpret)
        return [jax.freeze(ref) for ref in refs]

    return run(fn, pool, *args)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def awkward(seed, tokens, heads):
    """Tokens of very different size; zeros, tiny and huge ones; inf and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, heads, 128))
    x *= np.exp(4 * rng.standard_normal((tokens, heads, 1)))
    x = x.reshape(-1, 128)
    special = rng.permutation(len(x))[:9]
    x[special[0]] = 0
    x[special[1], 5] = np.nan
    x[special[2], 127] = np.inf
    x[special[3], 64] = -np.inf
    x[special[4]] *= 3e38 / np.abs(x[special[4]]).max()
    # Just below the least amax that is not taken for zero, and two exact scales.
    for row, amax in zip(special[5:], (1e-39, 5e-36, 2.0**-117, 448), strict=True):
        x[row] *= amax / np.abs(x[row]).max()
    x[np.abs(x) < 2.0**-126] = 0  # which XLA:CPU takes subnormal values for
    return x.reshape(tokens, heads, 128).astype(BF16)


def quantized(x):
    """Codes and scales of the last axis, in float64."""
    x = x.astype(np.float64)
    amax = np.abs(x).max(-1)
    finite = np.isfinite(amax)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = 2 ** np.ceil(np.log2(amax / 448))
        scales = np.where(amax < 448 * 2.0**-126, 1, scales)
        codes = np.where(finite[..., None], x / scales[..., None], 0)
    assert np.abs(codes).max() <= 448
    return codes.astype(E4M3), np.where(finite, scales, np.nan).astype(np.float32)


def place(slot):
    """The group and the column whose token, as the layout is defined, is in a slot."""
    group = [2 * t + (i & 1) + 8 * (i >> 1) for t in range(4) for i in range(4)]
    return slot // 16, group.index(slot % 16)


def old_pool(heads, fp8):
    """A pool that holds something everywhere."""
    shape = (LAYERS, PAGES, heads, 128, 128)
    if not fp8:
        return [normal(seed, *shape) for seed in range(2)]
    shapes = shape, (*shape[:3], 8, 128, 16)
    codes = [normal(seed, *shape).astype(E4M3) for seed, shape in enumerate(shapes)]
    return codes + [abs(normal(3, *shape[:-1])).astype(np.float32)] * 2


def updated(pool, k, v, pages, slots, layer):
    """What numpy makes of the pool."""
    pool = [x.copy() for x in pool]
    for t in range(len(k)):
        if pages[t] < 0:
            continue
        k_page, v_page, *scales = (x[layer, pages[t]] for x in pool)
        if not scales:
            k_page[:, slots[t]], v_page[:, slots[t]] = k[t], v[t]
            continue
        k_page[:, slots[t]], scales[0][:, slots[t]] = quantized(k[t])
        group, column = place(slots[t])
        v_page[:, group, :, column], scales[1][:, slots[t]] = quantized(v[t])
    return pool


def assert_same(actual, expected):
    """Equal bits, any NaN for any NaN."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(
            np.asarray(a).astype(np.float32), e.astype(np.float32)
        )


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("heads", [2, 3])
def test_tokens(heads, fp8):
    k, v = awkward(1, 6, heads), awkward(2, 6, heads)
    pages, slots = np.int32([2, 0, -1, 1, 0, 2]), np.int32([5, 127, 3, 0, 40, 14])
    args = (k, v, pages, slots, np.int32(1))
    pool = old_pool(heads, fp8)
    assert_same(stored(kv_store.store_kv, pool, *args), updated(pool, *args))


def test_every_slot_of_a_group():
    k, v = normal(3, 16, 1), normal(4, 16, 1)
    k, v = (np.repeat(x[..., None], 128, -1) for x in (k, v))
    args = (k, v, np.zeros(16, np.int32), np.arange(32, 48, dtype=np.int32))
    pool = old_pool(1, True)
    out = stored(kv_store.store_kv, pool, *args, np.int32(0))
    assert_same(out, updated(pool, *args, 0))


@pytest.mark.parametrize("fp8", [True, False])
def test_pages(fp8):
    k, v = awkward(5, 256, 2), awkward(6, 256, 2)
    pool, pages, layer = old_pool(2, fp8), np.int32([2, -1]), np.int32(1)
    out = stored(kv_store.store_kv_pages, pool, k, v, pages, layer)
    slots = np.arange(256) % 128
    assert_same(out, updated(pool, k, v, np.repeat(pages, 128), slots, layer))


def test_new_pages():
    k, v = awkward(7, 256, 2), awkward(8, 256, 2)
    out = run(kv_store.quantize_kv_pages, k, v)
    pool = [x[:, :2] for x in old_pool(2, True)]
    tokens = np.arange(256)
    expected = updated(pool, k, v, tokens // 128, tokens % 128, 0)
    assert_same(out, [x[0] for x in expected])
    with_values = functools.partial(kv_store.quantize_kv_pages, with_values=True)
    *again, keys, values = run(with_values, k, v)
    assert_same(again, out)
    for rounded, x in ((keys, k), (values, v)):
        codes, scales = quantized(x)
        codes = codes.astype(np.float64) * scales[..., None]
        assert_same(rounded, codes.astype(rounded.dtype))


def test_codes_are_the_references():
    k = normal(9, 128, 1, 128)
    codes, _, scales, _ = run(kv_store.quantize_kv_pages, k, k)
    expected = quantize_tokens(jnp.asarray(k[None]).swapaxes(1, 2))
    assert_same(
        [codes, scales[..., None]],
        [np.asarray(expected.codes), np.asarray(expected.scales)],
    )


def test_scan_over_layers_in_a_while_loop():
    """What a sampler does, though here with nothing in between."""
    k, v = normal(10, LAYERS, 2, 1, 128), normal(11, LAYERS, 2, 1, 128)
    pool = old_pool(1, True)
    pages, slots = np.int32([1, 0]), np.int32([7, 15])

    def fn(pool, k, v, interpret):
        def layer(pool, inputs):
            refs = [jax.new_ref(x) for x in pool]
            k, v, slots, index = inputs
            kv_store.store_kv(refs, k, v, pages, slots, index, interpret=interpret)
            return [jax.freeze(ref) for ref in refs], None

        def step(carry):
            i, pool = carry
            indices = jnp.arange(LAYERS, dtype=jnp.int32)
            at = jnp.broadcast_to(slots + i, (LAYERS, 2))
            return i + 1, jax.lax.scan(layer, pool, (k, v, at, indices))[0]

        return jax.lax.while_loop(lambda c: c[0] < 2, step, (jnp.int32(0), pool))[1]

    expected = pool
    for i in range(2):
        for n in range(LAYERS):
            expected = updated(expected, k[n], v[n], pages, slots + i, n)
    assert_same(run(fn, pool, k, v), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=np.zeros((4, 1, 64), BF16)), r"\(4, 1, 64\)"),
        (dict(v=np.zeros((4, 1, 128), np.float32)), "float32"),
        (dict(pages=np.zeros(3, np.int32)), r"\(4,\), got \[\(3,\), \(4,\)\]"),
        (dict(pool=old_pool(2, True)), "the pool must be"),
    ],
)
def test_bad_operands(change, message):
    args = dict(
        pool=old_pool(1, True),
        k=normal(12, 4, 1, 128),
        v=normal(13, 4, 1, 128),
        pages=np.zeros(4, np.int32),
        slots=np.arange(4, dtype=np.int32),
        layer=np.int32(0),
    )
    with pytest.raises(ValueError, match=message):
        stored(kv_store.store_kv, *(args | change).values())


def test_pages_take_whole_runs():
    x = normal(14, 130, 1, 128)
    with pytest.raises(ValueError, match="multiple of 128"):
        kv_store.quantize_kv_pages(x, x)
