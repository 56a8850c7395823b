"""Attention over pages in GPU interpret mode against float64; arguments, lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels import hopper_paged_attention
from fp8rl_jax.kernels.hopper_paged_attention import (
    PagedAttentionConfig,
    paged_attention,
)

INTERPRET = plgpu.InterpretGPUParams()
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
LAYERS, LAYER = 2, 1
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


@pytest.fixture(autouse=True)
def two_thread_blocks(monkeypatch):
    """Few of them, so that each visits several tiles."""
    monkeypatch.setattr(hopper_paged_attention, "_NUM_SMS", 2)


def powers(rng, low, high, shape):
    return np.exp2(rng.integers(low, high, shape, endpoint=True)).astype(np.float32)


def with_values(pools, v):
    """The pools with these values [L, P, K, 128, H] in the layout of the kernel."""
    if v.dtype == E4M3:
        groups = v.reshape(*v.shape[:3], 8, 16, 128)[..., ORDER, :]
        return pools | {"v": np.swapaxes(groups, -1, -2)}
    return pools | {"v": v}


def operands(dtype, blocks, pages, heads, kv_heads, seed=0):
    """Arguments but the schedule, and the values in the order of the slots."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        return np.array(jnp.asarray(rng.normal(size=shape) * 30, dtype))

    pool = (LAYERS, pages, kv_heads, 128)
    q = numbers(blocks * 128, heads, 128)
    args = {"k": numbers(*pool, 128)}
    v = numbers(*pool, 128)
    if dtype == E4M3:
        args["q_scales"] = powers(rng, -9, -6, (heads, blocks * 128))
        args["k_scales"] = powers(rng, -9, -3, pool)
        args["v_scales"] = powers(rng, -9, 6, pool)
    else:
        q = (q.astype(np.float32) / 256).astype(BF16)
    return {"q": q, "layer": np.int32(LAYER), **with_values(args, v)}, v


def schedule(table, *blocks):
    """Of blocks (row of the table, first page, own page)."""
    columns = np.array(blocks, np.int32).T
    names = ("table_row", "first_page", "own_page")
    return {
        "page_table": np.array(table, np.int32),
        **dict(zip(names, columns, strict=True)),
    }


def attention(args, config=None):
    args = dict(args)
    names = ("q", "k", "v", "page_table", "table_row", "first_page", "own_page")
    positional = [args.pop(name) for name in (*names, "layer")]
    out, lse = paged_attention(*positional, **args, config=config, interpret=INTERPRET)
    assert out.dtype == BF16
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def assert_close(results, args, v):
    """Against float64 attention over the dequantised keys and values."""
    out, lse = results
    codes = v.dtype == E4M3
    q, k, heads = args["q"].astype(np.float64), args["k"][LAYER], args["q"].shape[1]
    k, v = k.astype(np.float64), v[LAYER].astype(np.float64)
    subnormal = np.zeros(k.shape[:-1])
    if codes:
        q = q * args["q_scales"].T[..., None]
        k = k * args["k_scales"][LAYER][..., None]
        v = v * args["v_scales"][LAYER][..., None]
        # Half the smallest code, in units of the page's largest scale over 2^8; rows of
        # the diagonal page have smaller ones.
        scales = args["v_scales"][LAYER]
        subnormal = 2.0**-18 * scales.max(-1, keepdims=True) / scales
    blocks = zip(args["table_row"], args["first_page"], args["own_page"], strict=True)
    for i, (row, first, own) in enumerate(blocks):
        rows = slice(128 * i, 128 * (i + 1))
        if own < 0:
            assert np.all(out[rows] == 0) and np.all(lse[:, rows] == np.inf)
            continue
        pages = args["page_table"][row, first : own + 1]
        visible = np.tri(128, 128 * len(pages), 128 * (len(pages) - 1))
        for head in range(heads):
            kv_head = head // (heads // k.shape[1])
            keys, values, small = (
                np.concatenate(x[pages, kv_head]) for x in (k, v, subnormal)
            )
            s = q[rows, head] @ keys.T / np.sqrt(128)
            s = np.where(visible, s, -np.inf)
            best = s.max(axis=1, keepdims=True)
            p = np.exp(s - best) / np.exp(s - best).sum(axis=1, keepdims=True)
            # Of p in the second product: 2^-4 or 2^-9 for the cast, its smallest code
            # (over a sum of at least 1), and float32: the exponent is an f32 of some
            # tens, the rest a few roundings.
            error = (2.0**-4 if codes else 2.0**-8) * p + small * visible + 2e-5 * p
            bound = error @ np.abs(values)
            expected = p @ values
            bound += 2.0**-8 * (np.abs(expected) + bound)
            assert np.all(np.abs(out[rows, head] - expected) <= bound)
            expected = best[:, 0] + np.log(np.exp(s - best).sum(axis=1))
            assert np.all(
                np.abs(lse[head, rows] - expected) <= 1e-5 + 2e-6 * np.abs(expected)
            )


# A new sequence; one whose chunk goes on behind pages that others wrote; padding. Their
# pages are scattered and in two tables.
CHUNKS = schedule([[3, 0, 9], [4, 2, 1]], (0, 0, 0), (1, 0, 2), (0, 0, -1))


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_pages_of_several_sequences(dtype):
    """In configurations that agree in every bit."""
    args, v = operands(dtype, 3, 5, heads=2, kv_heads=1)
    args |= CHUNKS
    first = attention(args, PagedAttentionConfig(2, 2))
    assert_close(first, args, v)
    for config in (
        PagedAttentionConfig(3, 3, overlap=False),
        PagedAttentionConfig(1, 2, persistent=False),
    ):
        for x, y in zip(first, attention(args, config), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_packed_segments(dtype):
    args, v = operands(dtype, 3, 3, heads=2, kv_heads=2)
    args |= schedule([[0, 1, 2]], (0, 0, 0), (0, 0, 1), (0, 2, 2))
    assert_close(attention(args), args, v)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_a_row_does_not_depend_on_others(dtype):
    """Nor on where its pages lie, nor on keys and values that it does not see."""
    args, v = operands(dtype, 1, 5, heads=1, kv_heads=1)
    out, lse = attention(args | schedule([[4, 2, 1]], (0, 0, 2)))
    # Other rows from 70 on, other keys and values behind theirs, pages moved about.
    others, other_v = operands(dtype, 2, 5, heads=1, kv_heads=1, seed=1)
    moves, seen = {4: 0, 2: 3, 1: 4}, 70
    for name in {"k", "k_scales", "v_scales"} & args.keys():
        for page, target in moves.items():
            end = seen if page == 1 else 128
            others[name][:, target, :, :end] = args[name][:, page, :, :end]
    for page, target in moves.items():
        end = seen if page == 1 else 128
        other_v[:, target, :, :end] = v[:, page, :, :end]
    others = with_values(others, other_v)
    others["q"][128 : 128 + seen] = args["q"][:seen]
    if dtype == E4M3:
        others["q_scales"][:, 128 : 128 + seen] = args["q_scales"][:, :seen]
    others |= schedule([[1, 2, 1], [0, 3, 4]], (0, 0, 1), (1, 0, 2))
    other_out, other_lse = attention(others)
    np.testing.assert_array_equal(other_out[128 : 128 + seen], out[:seen])
    np.testing.assert_array_equal(other_lse[:, 128 : 128 + seen], lse[:, :seen])
    assert np.any(other_out[128 + seen :] != out[seen:])


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_lowers_for_cuda(dtype):
    args, _ = operands(dtype, 3, 5, heads=8, kv_heads=2)
    positional = ("q", "k", "v", *CHUNKS, "layer")
    args |= CHUNKS
    positional = [args.pop(name) for name in positional]
    fn = functools.partial(paged_attention, **args)
    lowered = jax.jit(fn).trace(*positional).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 1


def test_refuses_what_does_not_fit():
    args, _ = operands(E4M3, 3, 5, heads=3, kv_heads=2)
    args |= CHUNKS
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        attention(args)
    with pytest.raises(ValueError, match="v_scales must be given"):
        attention(args | {"v_scales": None})
    with pytest.raises(ValueError, match="k_scales must be float32"):
        attention(args | {"k_scales": args["k_scales"][..., :64]})
    with pytest.raises(ValueError, match="blocks of 128 rows"):
        attention(args | {"q": args["q"][:100]})
    with pytest.raises(ValueError, match="own_page must be int32"):
        attention(args | {"own_page": args["own_page"][:2]})
