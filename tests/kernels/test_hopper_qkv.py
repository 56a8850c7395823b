"""Norm, RoPE and split of the fused projection in GPU interpret mode, against numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.kernels import hopper_qkv
from fp8rl_jax.kernels.hopper_kv_store import store_kv

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
INTERPRET = plgpu.InterpretGPUParams()
EPS = 1e-6
LAYERS, PAGES = 2, 3


def run(fn, *args):
    """Interprets a kernel without XLA's licence to drop roundings to bfloat16."""
    fn = functools.partial(fn, interpret=INTERPRET)
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})(*args)


def projected(seed, tokens, heads, groups):
    """The operands of the kernels; heads of very different size."""
    rng = np.random.default_rng(seed)
    shape = (tokens, heads, groups + 2, 128)
    x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((*shape[:3], 1)))
    norms = rng.uniform(0.5, 2, (2, 128)).astype(np.float32)
    angles = rng.uniform(0, 6, (tokens, 64))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return x.reshape(tokens, -1).astype(BF16), *norms, *tables


def rows(*operands, groups):
    fn = functools.partial(hopper_qkv.qkv_rows, groups=groups, eps=EPS)
    return run(fn, *operands)


def rotated(x, scale, cos, sin):
    """Norm and RoPE of [T, heads, 128] in float64."""
    x, cos, sin = x.astype(np.float64), cos[:, None], sin[:, None]
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale
    x1, x2 = np.split(x, 2, -1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def old_pool(heads, fp8):
    """A pool that holds something everywhere."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, PAGES, heads, 128, 128)
    dtype = E4M3 if fp8 else BF16
    pool = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    if fp8:
        pool[1] = pool[1].reshape(*shape[:3], 8, 128, 16)
        pool += [rng.standard_normal(shape[:-1]).astype(np.float32) for _ in range(2)]
    return pool


def with_refs(fn, pool, *args, interpret):
    """What ``fn`` returns, and the pool after it."""
    refs = [jax.new_ref(x) for x in pool]
    out = fn(refs, *args, interpret=interpret)
    return out, [jax.freeze(ref) for ref in refs]


def store(pool, *args, groups):
    fn = functools.partial(hopper_qkv.qkv_store, groups=groups, eps=EPS)
    return run(functools.partial(with_refs, fn), pool, *args)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


@pytest.mark.parametrize(
    ("tokens", "heads", "groups"),
    [(3, 1, 1), (16, 1, 2), (20, 2, 3)],
)
def test_rows(tokens, heads, groups):
    operands = projected(tokens, tokens, heads, groups)
    qkv, q_norm, k_norm, *tables = operands
    q, k, v = rows(*operands, groups=groups)
    parts = qkv.reshape(tokens, heads, groups + 2, 128)
    np.testing.assert_array_equal(np.asarray(v), parts[:, :, -1])
    for actual, x, norm in (
        (q, parts[:, :, :-2], q_norm),
        (k, parts[:, :, -2], k_norm),
    ):
        expected = rotated(x.reshape(tokens, -1, 128), norm, *tables)
        actual = np.asarray(actual)
        assert actual.dtype == BF16
        assert actual.shape == expected.shape
        np.testing.assert_allclose(
            actual.astype(np.float64), expected, rtol=2.0**-8, atol=1e-6
        )
        # But for the odd tie, the nearest.
        assert np.mean(actual != expected.astype(np.float32).astype(BF16)) < 1e-3


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(1, 2), (2, 1), (8, 2)])
def test_store_is_rows_then_store(heads, groups, fp8):
    operands = projected(1, 3, heads, groups)
    q, k, v = rows(*operands, groups=groups)
    places = np.int32([2, -1, 0]), np.int32([5, 127, 14]), np.int32(1)
    pool = old_pool(heads, fp8)
    expected_pool = run(functools.partial(with_refs, store_kv), pool, k, v, *places)[1]
    queries, new_pool = store(pool, *operands, *places, groups=groups)
    assert_same(new_pool, expected_pool)
    q = jnp.asarray(q).reshape(3, heads, groups, 128)
    if fp8:
        q = quantize_tokens(q)
        assert_same(queries, (q.codes, q.scales[..., 0]))
    else:
        assert_same(queries, (q,))


def test_what_is_not_finite_stays_so():
    operands = projected(2, 2, 1, 1)
    operands[0].reshape(2, 3, 128)[0, :, 7] = np.nan
    places = np.int32([0, 1]), np.int32([0, 0]), np.int32(0)
    queries, pool = store(old_pool(1, True), *operands, *places, groups=1)
    for scales in (queries[1], pool[2][0, :2, 0, 0], pool[3][0, :2, 0, 0]):
        np.testing.assert_array_equal(np.isnan(np.ravel(scales)), [True, False])


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((4, 400), BF16), r"\(4, 400\)"),
        (0, np.zeros((4, 384), np.float32), "float32"),
        (1, np.zeros(128, BF16), "q_norm must be float32"),
        (3, np.zeros((3, 64), np.float32), r"cos must be float32 \(4, 64\)"),
    ],
)
def test_bad_operands(index, value, message):
    operands = list(projected(0, 4, 1, 1))
    operands[index] = value
    with pytest.raises(ValueError, match=message):
        rows(*operands, groups=1)
    places = np.zeros(4, np.int32), np.arange(4, dtype=np.int32), np.int32(0)
    with pytest.raises(ValueError, match=message):
        store(old_pool(1, True), *operands, *places, groups=1)


def test_the_pool_must_fit():
    operands = projected(0, 4, 1, 1)
    places = np.zeros(4, np.int32), np.arange(4, dtype=np.int32), np.int32(0)
    with pytest.raises(ValueError, match="the pool must be"):
        store(old_pool(2, True), *operands, *places, groups=1)
