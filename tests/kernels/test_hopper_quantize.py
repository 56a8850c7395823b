"""Quantisation kernels in GPU interpret mode, against numpy and the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec
from numpy_quantize import (
    assert_codes,
    assert_same,
    awkward,
    blocks,
    normal,
    taking_turns,
    to_bf16,
    wide,
)

from fp8rl_jax.fp8 import quantize
from fp8rl_jax.kernels import hopper_norm_quantize as norm
from fp8rl_jax.kernels import hopper_quantize as hopper
from fp8rl_jax.kernels import hopper_silu_quantize as silu

INTERPRET = plgpu.InterpretGPUParams()
BF16 = jnp.bfloat16


def run(kernel, *args, **static):
    """Interprets a kernel without XLA's licence to drop roundings to bfloat16."""
    fn = functools.partial(kernel, interpret=INTERPRET, **static)
    fn = jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})
    return fn(*args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("m", "k"), [(5, 256), (20, 200), (136, 128)])
def test_rows(m, k, dtype):
    x = awkward(0, m, k, dtype)
    codes, scales = run(hopper.quantize_rows, x)
    expected_codes, expected_scales = blocks(x)
    assert_same(codes, expected_codes)
    assert_same(scales, expected_scales.T)


@pytest.mark.parametrize(("m", "k"), [(13, 128), (200, 128), (128, 200)])
def test_both(m, k):
    x = awkward(1, m, k, BF16)
    out = run(hopper.quantize_both, x)
    assert_codes(out, x)
    assert_codes(
        hopper.Quantized(None, None, *run(hopper.quantize_columns, x)), x, False
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_codes_are_the_references(dtype):
    x = normal(2, 24, 256, dtype=dtype)
    expected = jax.jit(quantize)(x)
    codes, scales = run(hopper.quantize_rows, x)
    assert_same(codes, expected.codes)
    assert_same(scales, expected.scales.T)


@pytest.mark.parametrize("shape", [(128, 256), (2, 128, 128), (200, 72)])
def test_weight(shape):
    w = normal(3, *shape, dtype=jnp.float32)
    codes, scales, codes_t = run(hopper.quantize_weight, w)
    expected = jax.jit(lambda w: quantize(w, (128, 128)))(w)
    assert_same(codes, expected.codes)
    assert_same(scales, expected.scales)
    assert_same(codes_t, expected.codes.mT)


def test_weight_of_awkward_blocks():
    w = awkward(4, 128, 384, jnp.float32)
    # XLA's maximum of float32 drops NaN on CPU; tests/gpu has one.
    w = jnp.where(jnp.isnan(w), jnp.ones_like(w), w)
    codes, scales, codes_t = run(hopper.quantize_weight, w)
    expected_codes, expected_scales = blocks(w, (128, 128))
    assert_same(codes, expected_codes)
    assert_same(scales, expected_scales)
    assert_same(codes_t, expected_codes.T)


def silu_mul(gate, up):
    sigmoid = 1 / (1 + np.exp(-gate))
    return sigmoid, to_bf16(gate * sigmoid * up)


@pytest.mark.parametrize(
    ("m", "rows", "columns"), [(24, True, False), (136, True, True), (16, False, True)]
)
def test_silu_mul(m, rows, columns):
    gate, up = normal(5, m, 256) * 3, normal(6, m, 256)
    gate_up = jnp.asarray(taking_turns(gate, up))
    out = run(silu.silu_mul_quantize, gate_up, rows=rows, columns=columns)
    assert_codes(out, silu_mul(wide(gate), wide(up))[1], rows, columns)


@pytest.mark.parametrize("f", [128, 256])
def test_silu_mul_backward(f):
    gate, up, dy = normal(7, 24, f) * 2, normal(8, 24, f), normal(9, 24, f)
    gate_up = jnp.asarray(taking_turns(gate, up))
    out = run(silu.silu_mul_backward_quantize, dy, gate_up)
    gate, up, dy = wide(gate), wide(up), wide(dy)
    sigmoid, _ = silu_mul(gate, up)
    dgate = dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    assert_codes(out, to_bf16(taking_turns(dgate, dy * gate * sigmoid)))


# One, two, four and eight blocks: each way of laying rows over a warpgroup.
@pytest.mark.parametrize("k", [128, 256, 512, 1024])
def test_add_norm(k):
    residual, update = normal(8, 11, k) * 3, normal(9, 11, k)
    scale = jnp.exp(0.2 * normal(10, k, dtype=jnp.float32))
    out = run(
        norm.add_norm_quantize, residual, update, scale, eps=1e-6, columns=k == 256,
        normed=True,
    )  # fmt: skip
    total = to_bf16(wide(residual) + wide(update))
    assert_same(out.residual, total)
    inverse = 1 / np.sqrt((wide(total) ** 2).mean(axis=1) + 1e-6)
    np.testing.assert_allclose(out.inverse_rms, inverse, rtol=1e-6)
    normed = to_bf16(wide(total) * inverse[:, None] * wide(scale))
    # A float32 sum decides now and then which way bfloat16 rounds.
    assert (wide(out.normed) != wide(normed)).mean() < 1e-3
    np.testing.assert_allclose(wide(out.normed), wide(normed), rtol=2.0**-7)
    assert_codes(out.codes, out.normed, columns=k == 256)


def test_add_norm_returns_only_what_is_asked_for():
    x, scale = normal(11, 8, 256), jnp.ones(256)
    out = run(norm.add_norm_quantize, x, x, scale, eps=1e-6, rows=False)
    assert out.normed is None
    assert out.codes == hopper.Quantized()


def test_norm_of_a_row_does_not_depend_on_the_others():
    residual, update, scale = normal(12, 24, 512), normal(13, 24, 512), jnp.ones(512)
    fn = functools.partial(run, norm.add_norm_quantize, eps=1e-6)
    every, some = fn(residual, update, scale), fn(residual[9:14], update[9:14], scale)
    assert_same(some.inverse_rms, every.inverse_rms[9:14])
    assert_same(some.codes.codes, every.codes.codes[9:14])
    assert_same(some.codes.scales, every.codes.scales[:, 9:14])


@pytest.mark.parametrize("k", [128, 256, 512, 1024])
def test_add_norm_backward(k):
    residual, dnormed, dresidual = (normal(seed, 11, k) for seed in (14, 15, 16))
    scale = jnp.exp(0.2 * normal(17, k, dtype=jnp.float32))
    dsum, dscale = run(
        norm.add_norm_backward, dnormed, dresidual, residual, scale, eps=1e-6
    )
    x, dy = wide(residual), wide(dnormed)
    inverse = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    unit, dunit = x * inverse, dy * wide(scale)
    dx = inverse * (dunit - unit * (dunit * unit).mean(axis=1, keepdims=True))
    expected = to_bf16(wide(dresidual) + wide(to_bf16(dx)))
    assert (wide(dsum) != wide(expected)).mean() < 1e-3
    np.testing.assert_allclose(wide(dsum), wide(expected), rtol=2.0**-6, atol=1e-6)
    # Eleven terms of order one, summed in float32.
    np.testing.assert_allclose(dscale, (dy * unit).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_vmap():
    x = normal(18, 2, 16, 128)
    out = jax.vmap(functools.partial(run, hopper.quantize_both))(x)
    for i in range(2):
        assert_codes(jax.tree.map(lambda a, i=i: a[i], out), x[i])


def test_scan():
    x = normal(19, 2, 16, 128)

    def step(_, x):
        return None, hopper.quantize_rows(x, interpret=INTERPRET)

    codes, scales = jax.jit(lambda x: jax.lax.scan(step, None, x)[1])(x)
    for i in range(2):
        expected_codes, expected_scales = blocks(x[i])
        assert_same(codes[i], expected_codes)
        assert_same(scales[i], expected_scales.T)


def test_shard_map_lowers():
    """Lowered only: interpret mode does not run two devices side by side."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, columns = PartitionSpec("data"), PartitionSpec(None, "data")
    out_specs = hopper.Quantized(rows, columns, columns, rows)
    fn = jax.shard_map(
        hopper.quantize_both, mesh=mesh, in_specs=rows, out_specs=out_specs
    )
    x = jax.ShapeDtypeStruct((1024, 128), BF16)
    lowered = jax.jit(fn).trace(x).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hopper.quantize_rows(jnp.ones((8, 128), jnp.float16)), "float16"),
        (lambda: hopper.quantize_both(jnp.ones((8, 128))), "float32"),
        (lambda: hopper.quantize_weight(jnp.ones((128, 128), BF16)), "bfloat16"),
        (lambda: silu.silu_mul_quantize(jnp.ones((8, 200), BF16)), "200"),
    ],
)
def test_bad_operands(call, message):
    with pytest.raises(ValueError, match=message):
        call()
