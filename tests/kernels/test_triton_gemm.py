"""Arguments, the missing extra, the kernel in Triton's interpreter, CUDA lowering."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.kernels.triton_gemm import Tile, choose_tile, scaled_gemm

CAPABILITIES = (80, 89, 90, 100, 120)


def operands(m, n, k, b_block_rows=128, seed=0):
    """Codes of every bit pattern but NaN, and scales over five orders of magnitude."""
    rng = np.random.default_rng(seed)
    finite = [c for c in range(256) if c & 0x7F != 0x7F]
    blocks = -(-k // 128)
    by_row = (blocks, n)
    b_scales = by_row if b_block_rows == 1 else (-(-n // 128), blocks)
    codes = [rng.choice(finite, s).astype(np.uint8) for s in ((m, k), (n, k))]
    scales = [
        10.0 ** rng.uniform(-4, 1, s).astype(np.float32)
        for s in ((blocks, m), b_scales)
    ]
    return *(c.view(jnp.float8_e4m3fn) for c in codes), *scales


def expected(a, b, a_scales, b_scales, b_block_rows):
    """The product of the dequantised operands and that of their magnitudes, float64."""
    k, n = a.shape[1], b.shape[0]
    k_block, n_block = np.arange(k) // 128, np.arange(n) // 128
    rows = b_scales.T if b_block_rows == 1 else b_scales[n_block]
    x = a.astype(np.float64) * a_scales.T[:, k_block].astype(np.float64)
    y = b.astype(np.float64) * rows[:, k_block].astype(np.float64)
    return x @ y.T, np.abs(x) @ np.abs(y).T


def structs(*args):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]


def test_the_module_imports_without_triton():
    code = (
        "import sys, fp8rl_jax.kernels.triton_gemm as _; "
        "assert not {'triton', 'jax_triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ImportError, match=r"fp8rl_jax\[triton,cuda13\]"):
        jax.eval_shape(
            lambda *x: scaled_gemm(*x, compute_capability=90),
            *structs(*operands(64, 128, 128)),
        )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a CUDA device")
def test_without_a_device_the_capability_is_asked_for():
    with pytest.raises(ValueError, match="compute_capability"):
        scaled_gemm(*operands(64, 128, 128))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[None], "M, K"),
        (0, lambda x: x[:, :128], "M, K"),
        (0, lambda x: x.astype(jnp.bfloat16), "a must be float8_e4m3fn"),
        (0, lambda x: x[:0], "empty"),
        (1, lambda x: x.astype(jnp.float8_e5m2), "b must be float8_e4m3fn"),
        (2, lambda x: x.T, r"a_scales must be float32 \[2, 64\]"),
        (2, lambda x: x.astype(np.float64), "a_scales must be float32"),
        (3, lambda x: x[:1], r"b_scales must be float32 \[3, 2\]"),
    ],
)
def test_bad_arrays_are_refused(index, change, message):
    args = list(operands(64, 300, 200))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        scaled_gemm(*args, compute_capability=90)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"b_block_rows": 64}, "b_block_rows"),
        ({"b_block_rows": 1}, r"b_scales must be float32 \[2, 300\]"),
        ({"out_dtype": jnp.float16}, "out_dtype"),
        ({"compute_capability": 75}, "capability 80, got 75"),
        ({"tile": Tile(16, 64, 1, 4, 4)}, "block_m"),
        ({"tile": Tile(64, 256, 1, 4, 4)}, "block_n"),
    ],
)
def test_bad_keywords_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        scaled_gemm(*operands(64, 300, 200), **{"compute_capability": 90} | keywords)


@pytest.mark.parametrize("compute_capability", CAPABILITIES)
@pytest.mark.parametrize("b_block_rows", [1, 128])
@pytest.mark.parametrize("n", [1000, 4096, 24576])
@pytest.mark.parametrize("m", [1, 64, 65, 256, 8192])
def test_tiles_fit_the_shared_memory(m, n, b_block_rows, compute_capability):
    tile = choose_tile(m, n, b_block_rows, compute_capability)
    stage = (tile.block_m * tile.num_dots + tile.block_n) * 128
    limit = 227 if compute_capability in (90, 100) else 99
    assert stage * tile.num_stages <= limit * 1024 - 2048
    assert tile.block_m >= 64 and 128 % tile.block_n == 0


class HostTensor:
    """As much of a torch tensor as Triton's interpreter asks for."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return HostTensor(self.array)

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    storage_offset = size = stride = lambda self: None


@pytest.fixture
def interpreted_kernel(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = "fp8rl_jax.kernels.triton_gemm_kernel"
    monkeypatch.delitem(sys.modules, module, raising=False)
    __import__(module)
    yield sys.modules[module].scaled_gemm_kernel
    del sys.modules[module]


@pytest.mark.parametrize("b_block_rows", [1, 128])
@pytest.mark.parametrize(
    ("shape", "num_dots", "operand"),
    [
        ((64, 128, 128), 1, "fp8"),
        ((128, 64, 256), 2, "uint8"),
        ((150, 200, 300), 1, "uint8"),
        ((150, 200, 300), 2, "fp8"),
        ((1, 24, 40), 1, "fp8"),
    ],
)
def test_interpreted(interpreted_kernel, shape, num_dots, operand, b_block_rows):
    m, n, k = shape
    args = operands(*shape, b_block_rows)
    codes = [x.view(np.uint8) if operand == "uint8" else x for x in args[:2]]
    out = np.full((m + 1, n), np.nan, np.float32)  # a row more than may be written
    interpreted_kernel[(-(-m // (64 * num_dots)) * -(-n // 64),)](
        *(HostTensor(x) for x in (*codes, *args[2:])),
        m,
        HostTensor(out),
        N=n,
        K=k,
        B_BLOCK_ROWS=b_block_rows,
        BLOCK_M=64,
        BLOCK_N=64,
        NUM_DOTS=num_dots,
        GROUP_M=2,
    )
    product, magnitude = expected(*args, b_block_rows)
    # One rounding for each of 128 terms of a block, one for each of the blocks, and
    # the scale's and the product's.
    bound = 2.0**-24 * (130 + -(-k // 128)) * magnitude
    assert np.all(np.abs(out[:m] - product) <= bound)
    assert np.isnan(out[m]).all()


@pytest.mark.parametrize("compute_capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("shape", "b_block_rows", "out_dtype"),
    [
        ((1, 512, 256), 128, jnp.bfloat16),
        ((512, 384, 256), 128, jnp.bfloat16),
        ((300, 200, 300), 1, jnp.float32),
    ],
)
def test_lowers_for_cuda(shape, b_block_rows, out_dtype, compute_capability):
    pytest.importorskip(
        "jax_triton",
        reason="jax-triton or JAX's CUDA plugin is not installed here",
        exc_type=ImportError,
    )

    @jax.jit
    def gemm(*args):
        return scaled_gemm(
            *args,
            out_dtype,
            b_block_rows=b_block_rows,
            compute_capability=compute_capability,
        )

    args = structs(*operands(*shape, b_block_rows))
    text = gemm.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    assert gemm.eval_shape(*args).dtype == out_dtype
