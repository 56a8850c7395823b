"""Gradients of attention against float64 autodiff of the straight-through function."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8rl_jax.attention import attention

UNIT_BF16 = 2.0**-8


def f64(x):
    return np.asarray(x, np.float64)


def plain_attention(q, k, v, visible):
    """Softmax attention of [B, T, N, H] operands, one key head a query head."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    s = jnp.where(visible, s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)


def autodiff(ref, d_out):
    """dq, dk, dv by jax.vjp in float64; k and v still one a query head."""
    visible = np.broadcast_to(np.expand_dims(ref.visible, -3), ref.probs().shape)
    with jax.enable_x64(True):
        operands = [jnp.asarray(x) for x in (ref.q, ref.k, ref.v)]
        _, vjp = jax.vjp(lambda q, k, v: plain_attention(q, k, v, visible), *operands)
        return [np.asarray(g) for g in vjp(jnp.asarray(f64(d_out)))]


def bounds(ref, d_out):
    """Elementwise bounds on the errors of dq, dk and dv (k, v one a query head).

    P is recomputed exactly; P and dS = P (dP - D) / sqrt(H) enter the products rounded
    to bfloat16, q rounded to bfloat16 as well, and D = rowsum(dO O) inherits the error
    of the forward output (FP8 probabilities included).
    """
    d_out, p = f64(d_out), ref.probs()
    scale = 1 / math.sqrt(ref.q.shape[-1])
    dp = np.einsum("btnh,bsnh->bnts", d_out, ref.v)
    delta = np.einsum("btnh,btnh->bnt", d_out, ref.out())[..., None]
    delta_error = np.einsum("btnh,btnh->bnt", abs(d_out), ref.out_bound())[..., None]
    ds = p * abs(dp - delta) * scale
    # Queries dequantised to bfloat16 shift a score by 2^-8 of its terms.
    shift = np.zeros_like(p)
    if ref.fp8:
        terms = np.einsum("btnh,bsnh->bnts", abs(ref.q), abs(ref.k)) * scale
        shift = np.expm1(UNIT_BF16 * terms)
    ds_error = p * (1 + shift) * delta_error * scale + ds * (shift + UNIT_BF16 + 1e-5)
    p_error = p * (shift + UNIT_BF16 + 1e-5)
    dq = np.einsum("bnts,bsnh->btnh", ds_error, abs(ref.k))
    dk = np.einsum("bnts,btnh->bsnh", ds_error + UNIT_BF16 * ds, abs(ref.q))
    dv = np.einsum("bnts,btnh->bsnh", p_error, abs(d_out))
    return dq, dk, dv


def gradients(q, k, v, positions, segments, d_out, precision):
    def fn(q, k, v):
        return attention(q, k, v, positions, segments, precision)

    return jax.vjp(fn, q, k, v)[1](d_out)


run = jax.jit(gradients, static_argnums=6)


def case(qkv, length, batch=2):
    q, k, v = qkv(length, batch=batch)
    v = (v / 8).astype(jnp.bfloat16)
    d_out = jnp.asarray(np.random.default_rng(5).standard_normal(q.shape), jnp.bfloat16)
    return q, k, v, d_out


def positions_of(q):
    positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    return jnp.tile(positions, (q.shape[0], 1))


@pytest.mark.parametrize("length", [1, 128, 129])
def test_gradients_against_f64_autodiff(
    length, name, precisions, qkv, reference, causal
):
    q, k, v, d_out = case(qkv, length)
    positions = positions_of(q)
    results = run(q, k, v, positions, jnp.ones_like(positions), d_out, precisions[name])
    ref = reference(q, k, v, causal(length), name)
    for result, expected, bound in zip(
        results, autodiff(ref, d_out), bounds(ref, d_out), strict=True
    ):
        if expected.shape != result.shape:  # keys and values: sum over query heads
            shape = (*result.shape[:2], -1, 2, result.shape[-1])
            expected, bound = (x.reshape(shape).sum(3) for x in (expected, bound))
        assert result.dtype == jnp.bfloat16
        bound = bound + UNIT_BF16 * (abs(expected) + bound) + 1e-6 * abs(expected).max()
        error = abs(f64(result) - expected)
        assert (error <= bound).all()
        # In norm, errors of either sign average out: one bfloat16 rounding, or 2 %.
        if length > 1:
            limit = 0.02 if name == "fp8" else UNIT_BF16
            assert np.linalg.norm(error) < limit * np.linalg.norm(expected)


def test_gradients_are_straight_through_the_quantisation(precisions, qkv):
    # Negative control: the bf16 gradient at the same inputs is farther away than the
    # fp8 one's 2 %, so the test above does tell quantised operands from others.
    q, k, v, d_out = case(qkv, 128)
    positions = positions_of(q)
    args = q, k, v, positions, jnp.ones_like(positions), d_out
    for fp8, bf16 in zip(
        run(*args, precisions["fp8"]), run(*args, precisions["bf16"]), strict=True
    ):
        distance = np.linalg.norm(f64(fp8) - f64(bf16)) / np.linalg.norm(f64(bf16))
        assert 0.02 < distance < 0.3


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_packed_segments_have_the_gradients_of_unpacked_rows(name, precisions, qkv):
    q, k, v, d_out = case(qkv, 256, batch=1)
    lengths = [100, 70]
    positions, segments = np.zeros((1, 256), np.int32), np.zeros((1, 256), np.int32)
    weight = np.zeros((1, 256, 1, 1))
    for i, length in enumerate(lengths):
        rows = np.s_[0, 128 * i : 128 * i + length]
        positions[rows], segments[rows], weight[rows] = np.arange(length), i + 1, 1
    d_out = d_out * jnp.asarray(weight, jnp.bfloat16)
    packed = run(
        q, k, v, jnp.asarray(positions), jnp.asarray(segments), d_out, precisions[name]
    )
    for i, length in enumerate(lengths):
        rows = np.s_[:, 128 * i : 128 * i + length]
        part = [x[rows] for x in (q, k, v)]
        at = positions_of(part[0])
        alone = run(*part, at, jnp.ones_like(at), d_out[rows], precisions[name])
        for whole, expected in zip(packed, alone, strict=True):
            np.testing.assert_array_equal(f64(whole[rows]), f64(expected))
            assert not np.any(f64(whole[:, 128 * i + length : 128 * (i + 1)]))


def under_remat(precision, *args):
    *arrays, d_out = args

    def fn(q, k, v):
        return attention(q, k, v, *arrays[3:], precision)

    return jax.vjp(jax.checkpoint(fn), *arrays[:3])[1](d_out)


def under_shard_map(precision, *args):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = functools.partial(gradients, precision=precision)
    rows = P("data")
    return jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows)(*args)


def under_scan(precision, *args):
    def step(_, xs):
        return None, gradients(*(x[None] for x in xs), precision)

    grads = jax.lax.scan(step, None, args)[1]
    return [g[:, 0] for g in grads]


@pytest.mark.parametrize("transformed", [under_remat, under_shard_map, under_scan])
def test_same_bits_under_transforms(transformed, precisions, qkv):
    q, k, v, d_out = case(qkv, 20, batch=8)
    positions = positions_of(q)
    args = q, k, v, positions, jnp.ones_like(positions), d_out
    expected = run(*args, precisions["fp8"])
    results = jax.jit(transformed, static_argnums=0)(precisions["fp8"], *args)
    for result, same in zip(results, expected, strict=True):
        np.testing.assert_array_equal(f64(result), f64(same))
