"""Paged decode attention in GPU interpret mode against float64; arguments, lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels import hopper_decode_kernel
from fp8rl_jax.kernels.hopper_paged_decode import (
    DecodeConfig,
    SharedPrefix,
    paged_decode,
)

INTERPRET = plgpu.InterpretGPUParams()
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
T = H = 128
# The token in every column of all groups of a page of V's codes.
TOKENS = np.array(
    [
        16 * j + 2 * t + (i & 1) + 8 * (i >> 1)
        for j in range(8)
        for t in range(4)
        for i in range(4)
    ]
)


def cache(lengths, num_kv, group, dtype, seed=0):
    """Arguments of paged_decode: two layers, disordered pages, garbage past the end."""
    rng = np.random.default_rng(seed)
    batch, max_pages = len(lengths), max(1, max(-(-n // T) for n in lengths))
    num_pages = batch * max_pages + 1
    pages = (2, num_pages, num_kv, T)
    table = 1 + rng.permutation(batch * max_pages).reshape(batch, max_pages)
    args = {
        "page_table": table.astype(np.int32),
        "lengths": np.asarray(lengths, np.int32),
        "layer": np.int32(1),
    }
    queries = (batch, num_kv, group)
    shapes = {"q": (*queries, H), "k": (*pages, H), "v": (*pages, H)}
    if dtype == BF16:
        for name, shape in shapes.items():
            args[name] = rng.standard_normal(shape).astype(BF16)
        return args
    for name, shape in shapes.items():
        args[name] = (60 * rng.standard_normal(shape)).clip(-448, 448).astype(E4M3)
    args["v"] = args["v"].reshape(*pages[:3], T // 16, H, 16)
    # The maximum moves from block to block; the scales of values are anything.
    for name, shape, low, high in (
        ("q", queries, -6, -3),
        ("k", pages, -6, -3),
        ("v", pages, -9, 7),
    ):
        exponents = rng.integers(low, high, shape)
        args[f"{name}_scales"] = np.exp2(exponents).astype(np.float32)
    # Scales that were never written.
    for name in ("k_scales", "v_scales"):
        for row, n in zip(table, lengths, strict=True):
            for i, page in enumerate(row):
                args[name][1, page, :, max(0, n - i * T) :] = np.nan
    return args


def float64(x):
    return np.asarray(x).astype(np.float64)


def reference(args):
    """Attention over the dequantised cache, and a bound of the kernel's error.

    P is rounded to e4m3, 3 bits of mantissa down to 2^-6 and then steps of 2^-9, after
    a scaling that takes the largest scale of the block's values to 2^8; in bfloat16 to
    7 bits. The result is bfloat16, and float32 carries the rest.
    """
    fp8 = "q_scales" in args
    queries = float64(args["q"])
    out, bound = np.zeros(queries.shape), np.zeros(queries.shape)
    for b, n in enumerate(args["lengths"]):
        pages = args["page_table"][b, : -(-n // T)]
        for head in range(queries.shape[1] if n else 0):
            q = queries[b, head]
            k = float64(args["k"][1, pages, head]).reshape(-1, H)[:n]
            v = float64(args["v"][1, pages, head])
            step = np.zeros(n)
            if fp8:
                stored, v = (
                    v.swapaxes(-1, -2).reshape(-1, T, H),
                    np.empty((len(v), T, H)),
                )
                v[:, TOKENS] = stored
                scales = [
                    float64(args[name][1, pages, head]).reshape(-1)[:n]
                    for name in ("k_scales", "v_scales")
                ]
                q = q * float64(args["q_scales"][b, head])[:, None]
                k = k * scales[0][:, None]
                for first in range(0, n, T):
                    block = slice(first, first + T)
                    step[block] = 2.0**-10 * scales[1][block].max() / 2.0**8
                step /= scales[1]
            v = v.reshape(-1, H)[:n]
            if fp8:
                v = v * scales[1][:, None]
            s = q @ k.T / np.sqrt(H)
            p = np.exp(s - s.max(1, keepdims=True))
            total = p.sum(1, keepdims=True)
            relative = 2.0**-4 if fp8 else 2.0**-8
            error = (relative + 1e-4) * p + step
            out[b, head] = p @ v / total
            bound[b, head] = error @ np.abs(v) / total
    return out, bound + 2.0**-8 * (np.abs(out) + bound)


def run(args, **kwargs):
    return paged_decode(**args, interpret=INTERPRET, **kwargs)


# One head and eight; a group that is padded; an empty slot; both sides of a border of
# pages; more pages than stages; a tile of eight queries that heads share.
@pytest.mark.parametrize(
    ("lengths", "num_kv", "group", "dtype"),
    [
        ((1, 129), 1, 4, E4M3),
        ((128, 127), 1, 8, E4M3),
        ((0, 300), 2, 1, E4M3),
        ((5,), 2, 3, E4M3),
        ((129, 1), 1, 4, BF16),
        ((0, 128), 1, 8, BF16),
    ],
)
def test_attention_is_close_to_float64(lengths, num_kv, group, dtype):
    args = cache(lengths, num_kv, group, dtype)
    out = run(args)
    expected, bound = reference(args)
    assert out.shape == expected.shape and out.dtype == BF16
    assert np.all(np.abs(float64(out) - expected) <= bound)


def test_a_block_that_takes_several_sequences_returns_the_same_bits(monkeypatch):
    args = cache((1, 0, 260, 129), 1, 2, E4M3)
    apart = run(args, config=DecodeConfig(blocks_per_sm=None))
    monkeypatch.setattr(hopper_decode_kernel, "NUM_SMS", 1)
    for order in (None, jnp.array([1, 3, 0, 2], jnp.int32)):
        together = run(args, order=order, config=DecodeConfig(2, blocks_per_sm=1))
        np.testing.assert_array_equal(float64(together), float64(apart))


def test_a_sequence_alone_has_the_same_bits():
    args = cache((140, 3), 1, 4, E4M3)
    alone = args | {n: args[n][:1] for n in ("q", "q_scales", "page_table", "lengths")}
    np.testing.assert_array_equal(float64(run(alone)[0]), float64(run(args)[0]))


# Rows of no group, a missing member, a group of one and one without pages, an empty
# slot, no keys of its own; columns of one warpgroup and of two, the last not filled.
# On CPU the order of a product's sums depends on its columns: codes have exact sums.
@pytest.mark.parametrize(
    ("lengths", "num_kv", "group", "dtype", "groups", "pages", "columns"),
    [
        ((300, 129, 270), 1, 4, E4M3, [[2, 0, -1]], [1], 8),
        ((128, 0, 400, 300), 2, 2, E4M3, [[3, -1, 0, 1], [2, -1, -1, -1]], [1, 3], 8),
        ((260, 300), 1, 3, E4M3, [[1, 0], [-1, -1]], [2, 0], 32),
        ((129, 140, 5), 3, 1, BF16, [[1, -1, 0]], [1], 8),
    ],
)
def test_pages_read_once_for_a_group_give_the_same_bits(
    lengths, num_kv, group, dtype, groups, pages, columns
):
    args = cache(lengths, num_kv, group, dtype)
    for rows, n in zip(groups, pages, strict=True):
        for row in rows:
            if row >= 0:
                args["page_table"][row, :n] = args["page_table"][rows[0], :n]
    operands = np.int32(groups), np.int32(pages), args["page_table"]
    shared = SharedPrefix.create(*map(jnp.asarray, operands))
    config = DecodeConfig(2, blocks_per_sm=1, columns=columns)
    together = run(args, shared=shared, shared_config=config)
    np.testing.assert_array_equal(float64(together), float64(run(args)))


def test_arguments_that_do_not_fit_are_refused():
    args = cache((1,), 1, 4, E4M3)
    for change, match in (
        ({"q": args["q"].astype(np.float32)}, "q must be e4m3 or bfloat16"),
        ({"v_scales": None}, "All three scales"),
        ({"k": args["k"][:, :, :, :64]}, "k must be float8_e4m3fn"),
        ({"k_scales": args["k_scales"][:1]}, "k_scales must be float32"),
        ({"page_table": args["page_table"][0]}, "page_table must be int32"),
        ({"order": jnp.zeros(2, jnp.int32)}, "order must be int32"),
    ):
        with pytest.raises(ValueError, match=match):
            run(args | change)


def test_a_group_of_too_many_queries_is_refused():
    args = cache((300,) * 9, 1, 5, BF16)
    groups, pages = jnp.arange(9, dtype=jnp.int32)[None], jnp.array([2], jnp.int32)
    shared = SharedPrefix.create(groups, pages, args["page_table"])
    with pytest.raises(ValueError, match="at most 8 members with 5 heads"):
        run(args, shared=shared)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_kernel_lowers_for_cuda(dtype, group, shared):
    args = cache((300,) * 3, 4, group, dtype)
    if shared:
        # As many as there is shared memory for.
        groups = jnp.full((1, SharedPrefix.max_members(group)), -1, jnp.int32)
        groups = groups.at[0, :3].set(jnp.arange(3, dtype=jnp.int32))
        pages = jnp.array([2], jnp.int32)
        args["shared"] = SharedPrefix.create(groups, pages, args["page_table"])
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    names, values = zip(*structs.items(), strict=True)

    def fn(*values):
        return paged_decode(**dict(zip(names, values, strict=True)))

    lowered = jax.jit(fn).trace(*values).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
