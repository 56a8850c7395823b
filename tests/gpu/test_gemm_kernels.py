"""The block-scaled products on a Hopper GPU: bounds, bits, transformations."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fp8rl_jax.fp8 import ACTIVATION_BLOCK, WEIGHT_BLOCK, ScaledArray, fp8_dot_general
from fp8rl_jax.fp8.matmul import add_scaled_matmul_nt, scaled_matmul_nt
from fp8rl_jax.fp8.quantize import quantize, quantize_both, quantize_weight
from fp8rl_jax.kernels.hopper_gemm import GemmConfig, scaled_gemm

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
NT = (((1,), (1,)), ((), ()))

mosaic = functools.partial(scaled_matmul_nt, implementation="mosaic")
multiply = jax.jit(mosaic, static_argnums=2)
reference_quantize = jax.jit(
    functools.partial(quantize, implementation="reference"), static_argnums=1
)


def wide(x):
    return np.asarray(x).astype(np.float64)


def scale_rows(q):
    """One scale per row and block of K, [rows, K/128]."""
    return wide(q.scales).repeat(q.block[0], 0)[: q.shape[0]]


class Bounds:
    """The product of two ScaledArrays in float64, and how far Hopper's may be off.

    An instruction multiplies 32 codes and keeps 14 bits of the terms: it aligns the
    32 products and the accumulator to the largest of them and cuts each of these 33,
    and the sum, below 2^-13 of that one. Four instructions make a block; what follows
    is float32.

    Attributes:
      product: exact.
      worst: bound of the error of each element, whatever the data: every cut loses a
        whole step.
      rms: root mean square over the elements of the error if the cuts are independent
        and uniform within a step, as for data of random sign.
    """

    def __init__(self, a, b):
        codes = [wide(q.codes) for q in (a, b)]
        scales = [scale_rows(q) for q in (a, b)]
        blocks = scales[0].shape[1]
        product = worst = variance = magnitude = 0.0
        for i in range(blocks):
            partial, cuts, squares = np.zeros((a.shape[0], b.shape[0])), 0.0, 0.0
            for k in range(128 * i, min(128 * (i + 1), a.shape[1]), 32):
                x, y = (c[:, k : k + 32] for c in codes)
                terms = x[:, None, :] * y[None, :, :]
                total = partial + terms.sum(-1)
                largest = np.maximum(abs(partial), abs(total))
                step = 2.0**-13 * np.maximum(largest, abs(terms).max(-1))
                cuts, squares = cuts + 34 * step, squares + 34 / 3 * step**2
                partial = total
            scale = scales[0][:, i, None] * scales[1][None, :, i]
            product, magnitude = (
                product + partial * scale,
                magnitude + abs(partial * scale),
            )
            worst, variance = worst + cuts * scale, variance + squares * scale**2
        self.product = product
        # One rounding of every sum, two of what is added.
        self.worst = worst + 2.0**-24 * (blocks + 2) * (magnitude + worst)
        self.rms = np.sqrt(variance.mean())

    def check(self, out):
        """Judges a result; one in bfloat16 is rounded once more."""
        bound = self.worst
        if out.dtype == BF16:
            bound = bound + 2.0**-8 * (abs(self.product) + bound)
        assert out.shape == self.product.shape
        assert np.all(abs(wide(out) - self.product) <= bound)


def assert_same(actual, expected):
    np.testing.assert_array_equal(wide(actual), wide(expected))


def normal(shape, seed, dtype=F32):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def heavy_tailed(shape, seed):
    """Student's t with 1.5 degrees of freedom."""
    x = np.random.default_rng(seed).standard_t(1.5, shape)
    return jnp.asarray(x.astype(np.float32))


def positive(shape, seed):
    """No sign ever cancels what the accumulator cuts off."""
    return abs(normal(shape, seed))


def outlier_a_block(shape, seed):
    """One value of each 1x128 block is 1000 times the others."""
    x = np.array(normal(shape, seed))
    rng = np.random.default_rng(seed)
    for start in range(0, shape[1], 128):
        x[np.arange(shape[0]), start + rng.integers(128, size=shape[0])] *= 1000
    return jnp.asarray(x)


@pytest.mark.parametrize("b_block", [WEIGHT_BLOCK, ACTIVATION_BLOCK])
@pytest.mark.parametrize("data", [normal, heavy_tailed, positive, outlier_a_block])
def test_product_is_within_the_bounds_of_the_accumulator(data, b_block):
    a = reference_quantize(data((72, 1024), 1), ACTIVATION_BLOCK)
    b = reference_quantize(data((264, 1024), 2), b_block)
    bounds = Bounds(a, b)
    out = multiply(a, b, F32)
    bounds.check(out)
    if data is not positive:
        assert np.sqrt(((wide(out) - bounds.product) ** 2).mean()) < bounds.rms
    # The same accumulator, rounded once.
    assert_same(multiply(a, b, BF16), out.astype(BF16))
    bounds.check(jax.jit(scaled_matmul_nt, static_argnums=2)(a, b, F32))


@pytest.mark.parametrize("data", [normal, heavy_tailed])
def test_long_sums(data):
    a = reference_quantize(data((40, 12288), 3), ACTIVATION_BLOCK)
    b = reference_quantize(data((136, 12288), 4), WEIGHT_BLOCK)
    Bounds(a, b).check(multiply(a, b, F32))


def test_large_sums_that_cancel_leave_the_small_ones_exact():
    # Powers of two: every partial product and every float32 sum is exact, 14 bits over
    # all of K would lose what is left in the end.
    k = 12288
    x = np.ones((8, k), np.float32)
    x[:, : k // 2 - 64] = 256
    x[:, k // 2 - 64 : k - 128] = -256
    x[:, k - 128 :] *= 2.0 ** np.arange(-4, 4)[:, None]
    scales = jnp.ones((8, k // 128))
    a = ScaledArray(jnp.asarray(x).astype(E4M3), scales, ACTIVATION_BLOCK)
    b = ScaledArray(
        jnp.ones((128, k), E4M3), jnp.ones((1, k // 128)), WEIGHT_BLOCK
    )  # fmt: skip
    expected = np.broadcast_to(128 * 2.0 ** np.arange(-4, 4)[:, None], (8, 128))
    assert_same(multiply(a, b, F32), expected)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_operand(rows, k, block):
    """Normal codes and scales between 1/2 and 1."""
    key = jax.random.key(rows)
    blocks = -(-rows // block[0]), k // 128
    scales = jax.random.uniform(key, blocks, minval=0.5)
    return ScaledArray(jax.random.normal(key, (rows, k)).astype(E4M3), scales, block)


# The narrow and the wide products of a decode step have different rules.
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (24576, 4096)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(n, k):
    whole = random_operand(2048, k, ACTIVATION_BLOCK)
    weight = random_operand(n, k, WEIGHT_BLOCK)

    def rows(part):
        return jax.tree.map(lambda x: x[part], whole)

    parts = [np.s_[:]]
    parts += [np.s_[2043 - m : 2043] for m in (1, 7, 64, 128, 200, 256, 1024)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        run = functools.partial(multiply, b=weight, out_dtype=F32)
        expected, *some = pool.map(run, [rows(part) for part in parts])
    for part, out in zip(parts[1:], some, strict=True):
        assert jnp.array_equal(out, expected[part]), part


# Those of benchmarks/gemm.py and of the rules, and clusters along M.
CONFIGS = [
    GemmConfig(raster=8, cluster=1),
    GemmConfig(raster=8),
    GemmConfig(cluster_axis="m"),
    GemmConfig(unroll=1),
    GemmConfig(1, 32, 16, unroll=4, in_flight=4, cluster=1),
    GemmConfig(1, 64, 12, unroll=4, in_flight=4, cluster=1),
    GemmConfig(2, 32, 10, unroll=4, in_flight=4, cluster=1),
    GemmConfig(2, 64, 8, unroll=4, in_flight=2, cluster=1),
    GemmConfig(2, 128, 5, unroll=2),
    GemmConfig(2, 192, 4, unroll=1, cluster=1),
]
WGRAD_CONFIGS = [
    GemmConfig(raster=8, cluster=1, unroll=1),
    GemmConfig(cluster_axis="m", unroll=1),
    GemmConfig(2, 128, 4, unroll=1),
]


@pytest.mark.parametrize(
    ("b_block_rows", "configs"), [(128, CONFIGS), (1, WGRAD_CONFIGS)]
)
def test_configurations_give_the_same_bits(b_block_rows, configs):
    m, n, k = 1160, 840, 1024
    a = random_operand(m, k, ACTIVATION_BLOCK)
    b = random_operand(n, k, (b_block_rows, 128))
    args = a.codes, b.codes, a.scales.T, b.scales.T if b_block_rows == 1 else b.scales

    def run(config):
        gemm = functools.partial(scaled_gemm, out_dtype=F32, b_block_rows=b_block_rows)
        return jax.jit(functools.partial(gemm, config=config))(*args)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        outs = list(pool.map(run, configs))
    expected = multiply(a, b, F32)
    for config, out in zip(configs, outs, strict=True):
        assert jnp.array_equal(out, expected), dataclasses.asdict(config)


def test_tiles_that_follow_one_another_at_once_do_not_meet_in_their_buffers():
    # One block of K and some twenty tiles a thread block: stores wait for each other.
    a = random_operand(2048, 128, ACTIVATION_BLOCK)
    b = random_operand(6144, 128, WEIGHT_BLOCK)
    expected = multiply(a, b, F32).astype(BF16)
    for config in (GemmConfig(2, 192, 4, unroll=1, cluster=1), GemmConfig(2, 128, 5)):
        gemm = functools.partial(scaled_gemm, out_dtype=BF16, config=config)
        out = jax.jit(gemm)(a.codes, b.codes, a.scales.T, b.scales)
        assert jnp.array_equal(out, expected), config


def test_wgrad_is_added_in_place():
    a, b = (random_operand(n, 1000 // 128 * 128, ACTIVATION_BLOCK) for n in (256, 384))
    product = wide(multiply(a, b, F32))
    add = jax.jit(
        functools.partial(add_scaled_matmul_nt, implementation="mosaic"),
        donate_argnums=0,
    )
    zeros = add(jnp.zeros((3, 256, 384)), jnp.int32(1), a, b)
    assert_same(zeros, np.stack([0 * product, product, 0 * product]))
    buffer = normal((3, 256, 384), 5) * 100
    before = wide(buffer)
    after = wide(add(buffer, jnp.int32(2), a, b))
    assert_same(after[:2], before[:2])
    exact = before[2] + product
    assert np.all(abs(after[2] - exact) <= 2.0**-23 * abs(exact) + 2.0**-149)


def test_wgrad_of_ragged_sizes_is_added():
    # The store cannot be padded there: product and sum are two.
    a, b = (random_operand(n, 256, ACTIVATION_BLOCK) for n in (200, 136))
    buffer = normal((200, 136), 6)
    total = jax.jit(add_scaled_matmul_nt)(buffer, None, a, b)
    expected = wide(buffer) + wide(multiply(a, b, F32))
    assert_same(total, expected.astype(np.float32))


def test_micro_batches_and_layers_are_added_under_scan():
    a, b = (random_operand(n, 256, ACTIVATION_BLOCK) for n in (128, 256))
    layers = jnp.array([0, 1, 1], jnp.int32)

    def step(buffer, layer):
        return add_scaled_matmul_nt(buffer, layer, a, b), None

    total = jax.jit(lambda x: jax.lax.scan(step, x, layers)[0])(
        jnp.zeros((2, 128, 256))
    )
    product = wide(multiply(a, b, F32))
    assert_same(total, np.stack([product, 2 * product]))


def test_same_bits_under_transforms():
    m, n, k, count = 72, 384, 512, 3
    a = random_operand(m, k, ACTIVATION_BLOCK)
    weights = [
        reference_quantize(normal((n, k), i), WEIGHT_BLOCK) for i in range(count)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *weights)
    mesh = jax.make_mesh(
        (1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)
    )
    rows, everywhere = PartitionSpec("data"), PartitionSpec()

    def product(a, b):
        return mosaic(a, b, F32)

    def over_leading(a, b):
        return jax.lax.scan(lambda _, w: (None, product(a, w)), None, b)[1]

    def sharded(a, b):
        fn = jax.shard_map(
            product, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows
        )
        first = jax.tree.map(lambda x: x[0], b)
        return fn(a, first)[None]

    @jax.jit
    def transformed(a, b):
        mapped = jax.vmap(product, (None, 0))
        return {
            "vmap": mapped(a, b),
            "scan": over_leading(a, b),
            "remat": jax.checkpoint(over_leading)(a, b),
            "shard_map": sharded(a, b),
        }

    expected = [multiply(a, w, F32) for w in weights]
    for name, outs in transformed(a, stacked).items():
        for out, same in zip(outs, expected, strict=False):
            assert jnp.array_equal(out, same), name


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_rows_are_spread_over_devices_by_shard_map():
    a = random_operand(2 * 512, 1024, ACTIVATION_BLOCK)
    b = random_operand(768, 1024, WEIGHT_BLOCK)
    expected = multiply(a, b, F32)
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,)
    )
    rows, everywhere = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows
    )
    def product(a, b):
        return mosaic(a, b, F32)

    out = product(a, b)
    assert len({shard.device for shard in out.addressable_shards}) == 2
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=everywhere
    )
    def summed_wgrad(dy, x):
        parts = [quantize_both(part)[1] for part in (dy, x)]
        return jax.lax.psum(mosaic(*parts, F32), "data")

    dy, x = normal((1024, 384), 21, BF16), normal((1024, 256), 22, BF16)
    parts = [[quantize_both(z[i : i + 512])[1] for z in (dy, x)] for i in (0, 512)]
    expected = sum(wide(multiply(*p, F32)) for p in parts)
    np.testing.assert_allclose(summed_wgrad(dy, x), expected, rtol=1e-6, atol=1e-4)


def layer_operands():
    """x [M, K], dy [M, N] in bfloat16 and w [N, K] in float32, ragged."""
    m, n, k = 200, 136, 328
    return normal((m, k), 7, BF16), normal((n, k), 8), normal((m, n), 9, BF16)


@functools.partial(jax.jit, static_argnames=("implementation", "remat"))
def layer(x, w, dy, codes=None, transposed=None, implementation=None, remat=False):
    def fn(x, w):
        return fp8_dot_general(
            x,
            w,
            NT,
            codes=codes,
            transposed_codes=transposed,
            implementation=implementation,
        )

    y, vjp = jax.vjp(jax.checkpoint(fn) if remat else fn, x, w)
    return y, *vjp(dy)


def test_fp8_dot_general_and_both_gradients():
    x, w, dy = layer_operands()
    blocks = ACTIVATION_BLOCK, WEIGHT_BLOCK, ACTIVATION_BLOCK, ACTIVATION_BLOCK
    x_rows, w_codes, dy_rows, dy_columns = (
        reference_quantize(source, block)
        for source, block in zip((x, w, dy, dy.T), blocks, strict=True)
    )
    x_columns = reference_quantize(x.T, ACTIVATION_BLOCK)
    bounds = [
        Bounds(x_rows, w_codes),
        Bounds(dy_rows, w_codes.mT),
        Bounds(dy_columns, x_columns),
    ]
    for implementation in (None, "mosaic", "reference"):
        outs = layer(x, w, dy, implementation=implementation)
        assert [out.dtype for out in outs] == [BF16, BF16, F32]
        for out, bound in zip(outs, bounds, strict=True):
            bound.check(out)


def test_a_layer_of_ready_made_codes_and_a_checkpointed_one_have_the_same_bits():
    x, w, dy = layer_operands()
    expected = layer(x, w, dy)
    codes, transposed = jax.jit(quantize_weight)(w)
    for kwargs in (
        dict(codes=codes),
        dict(codes=codes, transposed=transposed),
        dict(remat=True),
    ):
        for out, same in zip(layer(x, w, dy, **kwargs), expected, strict=True):
            assert_same(out, same)


def test_both_layouts_are_those_of_the_reference_on_the_cpu():
    x, w, _ = layer_operands()

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, w, implementation):
        choice = dict(implementation=implementation)
        return quantize_both(x, **choice), quantize_weight(w, **choice)

    with jax.default_device(jax.devices("cpu")[0]):
        x_there, w_there = np.asarray(x), np.asarray(w)
        there = jax.tree.leaves(run(x_there, w_there, None))
    for implementation in ("mosaic", "reference"):
        here = jax.tree.leaves(run(x, w, implementation))
        for array, expected in zip(here, there, strict=True):
            assert_same(array, expected)
