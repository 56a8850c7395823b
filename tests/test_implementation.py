"""Dispatch: which implementation a program gets, under every transformation."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fp8rl_jax import implementation as dispatch
from fp8rl_jax.fp8 import ACTIVATION_BLOCK, WEIGHT_BLOCK, ScaledArray
from fp8rl_jax.fp8.dot_general import fp8_dot_general
from fp8rl_jax.fp8.matmul import add_scaled_matmul_nt, scaled_matmul_nt
from fp8rl_jax.fp8.quantize import quantize, quantize_both, quantize_weight
from fp8rl_jax.implementation import PlatformFunction, one_at_a_time, resolve

NT = (((1,), (1,)), ((), ()))
E4M3 = jnp.float8_e4m3fn


# A product whose implementations show in the lowered text.
outer = PlatformFunction(
    "outer",
    lambda a, b, *, times: [((a[0], b[0]), jnp.float32), (a, jnp.float32)],
    lambda a, b, *, times: (times * a[:, None] * b[None, :], a),
    {
        "mosaic": lambda a, b, *, times: (jnp.sin(a)[:, None] * b[None, :], a),
        "triton": lambda a, b, *, times: (jnp.cos(a)[:, None] * b[None, :], a),
    },
)
MARKS = {"mosaic": "stablehlo.sine", "triton": "stablehlo.cosine", "reference": None}


def lower(fn, *args, platform="cuda"):
    traced = jax.jit(fn).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def assert_holds(text, implementation):
    for name, mark in MARKS.items():
        assert mark is None or (mark in text) == (name == implementation), name


@pytest.fixture
def device(monkeypatch):
    """device(capability, with_jax_triton): what the program is lowered for."""

    def set_device(capability, with_jax_triton):
        spec = object() if with_jax_triton else None
        monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return set_device


ALL, NO_TRITON = ("reference", "mosaic", "triton"), ("reference", "mosaic")


@pytest.mark.parametrize(
    ("capability", "with_jax_triton", "available", "implementation", "expected"),
    [
        ("9.0", False, ALL, None, "mosaic"),
        ("9.0", True, ALL, None, "mosaic"),
        ("9.0", True, ALL, "triton", "triton"),
        ("9.0", True, ALL, "reference", "reference"),
        ("9.0", True, NO_TRITON, "triton", "reference"),
        ("9.0", True, ("reference", "triton"), None, "triton"),
        ("8.0", False, ALL, None, "reference"),
        ("8.0", True, ALL, None, "triton"),
        ("8.0", True, NO_TRITON, None, "reference"),
        ("10.0", True, ALL, None, "triton"),
    ],
)
def test_resolve(
    capability, with_jax_triton, available, implementation, expected, device
):
    device(capability, with_jax_triton)
    assert resolve(implementation, available) == expected


def test_empty_arrays_are_left_to_the_reference():
    text = lower(lambda a, b: outer(a, b, times=2.0), jnp.ones(0), jnp.ones(3))
    assert_holds(text, "reference")
    rows = quantize(jnp.ones((0, 256), jnp.bfloat16))
    weight = quantize(jnp.ones((128, 256)), WEIGHT_BLOCK)
    product = functools.partial(scaled_matmul_nt, out_dtype=jnp.float32)
    assert jax.jit(product)(rows, weight).shape == (0, 128)
    assert "mosaic_gpu" not in lower(product, rows, weight)


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_mosaic_needs_a_hopper_gpu(capability, device):
    device(capability, True)
    with pytest.raises(ValueError, match=f"needs a Hopper GPU.* has {capability}"):
        resolve("mosaic", ALL)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a CUDA device")
def test_a_program_lowered_without_a_device_is_for_hopper():
    assert dispatch.compute_capability() == "9.0"


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"'cutlass'.*mosaic, triton, reference"):
        outer(jnp.ones(2), jnp.ones(3), times=2.0, implementation="cutlass")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_gpu_kernel_for_another_platform_is_refused(implementation, platform):
    fn = functools.partial(outer, times=2.0, implementation=implementation)
    with pytest.raises(ValueError, match=f"{implementation}' of outer runs on NVIDIA"):
        lower(fn, jnp.ones(2), jnp.ones(3), platform=platform)


@pytest.mark.parametrize(
    ("platform", "implementation", "expected"),
    [
        ("cpu", None, "reference"),
        ("cpu", "reference", "reference"),
        ("tpu", None, "reference"),
        ("tpu", "reference", "reference"),
        ("cuda", None, "mosaic"),
        ("cuda", "mosaic", "mosaic"),
        ("cuda", "triton", "triton"),
        ("cuda", "reference", "reference"),
    ],
)
def test_the_platform_decides_when_the_program_is_lowered(
    platform, implementation, expected
):
    fn = functools.partial(outer, times=2.0, implementation=implementation)
    text = lower(fn, jnp.ones(2), jnp.ones(3), platform=platform)
    assert_holds(text, expected)


def test_only_the_chosen_implementation_is_traced():
    def refuse(x):
        raise AssertionError("traced")

    def out_types(x):
        return [(x, jnp.float32)]

    one = PlatformFunction("one", out_types, lambda x: (x + 1,), {"mosaic": refuse})
    assert one(jnp.ones(2))[0].sum() == 4  # eagerly, too
    lower(lambda x: one(x, implementation="reference"), jnp.ones(2))
    with pytest.raises(AssertionError, match="traced"):
        lower(one, jnp.ones(2))


def on_shards(fn):
    """``fn(a, b)`` with the rows of ``a`` over eight devices and ``b`` on each."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    specs = dict(in_specs=(rows, everywhere), out_specs=rows)
    return jax.shard_map(fn, mesh=mesh, **specs)


def over_leading(a, b, fn):
    return jax.lax.scan(lambda _, x: (None, fn(x, b)), None, a)[1]


def product(a, b):
    return outer(a, b, times=2.0)


A, B = np.arange(32.0, dtype=np.float32), np.arange(3.0, dtype=np.float32)
A4, B4 = A.reshape(4, 8), np.arange(12.0, dtype=np.float32).reshape(4, 3)
# Name: function, arguments, what it computes but for the factor.
TRANSFORMED = {
    "eager": (product, A, B, "i,j->ij"),
    "jit": (jax.jit(product), A, B, "i,j->ij"),
    "remat": (jax.checkpoint(product), A, B, "i,j->ij"),
    "scan": (functools.partial(over_leading, fn=product), A4, B, "ti,j->tij"),
    "shard_map": (on_shards(product), A, B, "i,j->ij"),
    "vmap of both": (jax.vmap(product), A4, B4, "vi,vj->vij"),
    "vmap of the first": (jax.vmap(product, (0, None)), A4, B, "vi,j->vij"),
    "vmap of the second": (jax.vmap(product, (None, 0)), A, B4, "i,vj->vij"),
    "vmap of the last axis": (jax.vmap(product, (1, 1)), A4.T, B4.T, "iv,jv->vij"),
    "vmap of vmap": (
        jax.vmap(jax.vmap(product, (None, 0)), (0, None)),
        A4,
        B4,
        "ui,vj->uvij",
    ),
    "remat of scan of vmap": (
        jax.checkpoint(
            functools.partial(over_leading, fn=jax.vmap(product, (0, None)))
        ),
        A.reshape(2, 4, 4),
        B,
        "tvi,j->tvij",
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_under_transforms(transform):
    fn, a, b, subscripts = TRANSFORMED[transform]
    y, a_out = fn(a, b)
    assert (y.dtype, a_out.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(y, 2 * np.einsum(subscripts, a, b))
    assert a_out.shape == y.shape[:-1]
    assert_holds(lower(fn, a, b), "mosaic")
    assert_holds(lower(fn, a, b, platform="tpu"), "reference")


def test_the_parameters_tell_programs_apart():
    a, b = jnp.ones(2), jnp.ones(3)
    totals = [outer(a, b, times=t)[0].sum() for t in (1.0, 2.0)]
    assert totals == [6.0, 12.0]


def test_there_is_no_derivative():
    with pytest.raises(NotImplementedError, match="'outer' not implemented"):
        jax.grad(lambda a, b: product(a, b)[0].sum())(jnp.ones(2), jnp.ones(3))


def product_and_gradients(x, w, dy, implementation):
    def fn(x, w):
        return fp8_dot_general(x, w, NT, implementation=implementation)

    y, vjp = jax.vjp(fn, x, w)
    return y, *vjp(dy)


def scaled(m, k, block):
    scales = jnp.ones((-(-m // block[0]), -(-k // block[1])))
    return ScaledArray(jnp.ones((m, k), E4M3), scales, block)


# Name: function of ``implementation``, arguments, dispatched operations (forward, dgrad
# and wgrad; both layouts of x, w and dy).
M, N, K = 256, 384, 512
X, W, DY = jnp.ones((M, K), jnp.bfloat16), jnp.ones((N, K)), jnp.ones((M, N))
ROWS, WEIGHT = scaled(M, K, ACTIVATION_BLOCK), scaled(N, K, WEIGHT_BLOCK)
OPERATIONS = {
    "rows": (quantize, (X,), 1),
    "blocks": (functools.partial(quantize, block=WEIGHT_BLOCK), (X,), 1),
    "both layouts": (quantize_both, (X,), 1),
    "stacked weights": (quantize_weight, (jnp.ones((2, N, K)),), 1),
    "product": (
        functools.partial(scaled_matmul_nt, out_dtype=jnp.bfloat16),
        (ROWS, WEIGHT),
        1,
    ),
    "product in place": (
        add_scaled_matmul_nt,
        (jnp.ones((2, M, M)), jnp.int32(1), ROWS, ROWS),
        1,
    ),
    "a linear layer's products": (
        product_and_gradients,
        (X, W, DY.astype(jnp.bfloat16)),
        6,
    ),
}


@pytest.mark.parametrize("implementation", [None, "mosaic", "triton", "reference"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_pass_the_implementation_on(operation, implementation):
    fn, args, count = OPERATIONS[operation]
    fn = functools.partial(fn, implementation=implementation)
    chosen = re.findall(r"\bimplementation=(\w+)", str(jax.make_jaxpr(fn)(*args)))
    assert chosen == [str(implementation)] * count


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_hold_kernels_when_lowered_for_cuda(operation):
    fn, args, count = OPERATIONS[operation]

    def calls(implementation, platform):
        call = functools.partial(fn, implementation=implementation)
        return lower(call, *args, platform=platform).count("custom_call @mosaic_gpu")

    assert calls(None, "cuda") == calls("mosaic", "cuda") == count
    assert calls("reference", "cuda") == calls(None, "tpu") == calls(None, "cpu") == 0
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs only"):
        calls("mosaic", "tpu")


def test_an_eager_call_is_traced_once():
    traced = []

    def reference(x):
        traced.append(x.shape)
        return (x,)

    types = [((3,), jnp.float32)]
    function = PlatformFunction("traced_once", lambda x: types, reference, {})
    for _ in range(3):
        function(jnp.ones((3,)))
    assert traced == [(3,)]


def test_vmap_loops_over_a_kernel_without_a_batching_rule():
    def kernel(x, *, by):
        assert x.ndim == 1
        return (x * by,)

    run = jax.vmap(functools.partial(one_at_a_time(kernel), by=3.0))
    np.testing.assert_array_equal(run(jnp.ones((4, 2)))[0], np.full((4, 2), 3.0))


def test_older_gpus_than_ampere_do_not_get_triton(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for capability, expected in (("7.5", "reference"), ("8.0", "triton")):
        monkeypatch.setattr(
            "fp8rl_jax.implementation.compute_capability", lambda c=capability: c
        )
        assert resolve(None, {"triton", "reference"}) == expected
