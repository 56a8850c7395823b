"""Speed of the block-scaled FP8 products, and the table of tuned configurations.

    python -m benchmarks.gemm            # the table of docs/benchmarks.md
    python -m benchmarks.gemm --implementation=triton   # what other NVIDIA GPUs run
    python -m benchmarks.gemm --tune     # writes fp8rl_jax/kernels/hopper_gemm.json

Times are of the kernels alone, median and [fastest, slowest]; weights rotate through
more memory than the L2 cache holds, as they do in a model. Beside every product, in the
same run: XLA's bf16 product of the same shape, the codes dequantised to bf16 and then
multiplied, and, where PyTorch has it, cuBLASLt's FP8 product with the same scaling
(1x128 by 128x128).

Hardware: one Hopper GPU with 40 GB free; two minutes, ten to tune.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jaxtyping import Array

from benchmarks.device_time import device_time
from fp8rl_jax.console import print_table
from fp8rl_jax.kernels import hopper_gemm, triton_gemm
from fp8rl_jax.kernels.hopper_gemm import BLOCK, E4M3, GemmConfig, scaled_gemm
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config

_TUNE = flags.DEFINE_bool("tune", False, "Measure configurations and write the table.")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", "mosaic", ["mosaic", "triton"], "Kernel to measure."
)
_SIZES = flags.DEFINE_list("sizes", ["8b"], "Models whose shapes are tuned.")
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls.", lower_bound=1)

_L2_BYTES = 50 * 2**20
_TABLE = pathlib.Path(hopper_gemm.__file__).with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class Product:
    """[M, K] by [N, K]; ``kind`` is "forward" (dgrad is the same) or "wgrad"."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """As printed."""
        return f"{self.kind} {self.m}x{self.n}x{self.k}"

    @property
    def wgrad(self) -> bool:
        """Whether both operands have a scale per row, and the result is float32."""
        return self.kind == "wgrad"


PRODUCTS = (
    Product("forward", 8192, 12288, 4096),
    Product("forward", 8192, 4096, 12288),
    Product("forward", 16384, 24576, 4096),
    Product("wgrad", 12288, 4096, 8192),
    Product("wgrad", 4096, 12288, 8192),
    Product("wgrad", 24576, 4096, 16384),
    Product("forward", 64, 24576, 4096),
    Product("forward", 256, 24576, 4096),
    Product("forward", 64, 4096, 12288),
    Product("forward", 64, 6144, 4096),
    Product("forward", 64, 4096, 4096),
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _codes(rows: int, k: int, seed: Array) -> Array:
    return jax.random.normal(jax.random.key(seed), (rows, k)).astype(E4M3)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scales(rows: int, columns: int, seed: Array) -> Array:
    return jax.random.uniform(jax.random.key(seed), (rows, columns), minval=0.5)


def operands(product: Product) -> list[tuple[Array, ...]]:
    """(a, b, a_scales, b_scales), as often as the cache demands."""
    p, blocks = product, product.k // BLOCK
    count = min(max(2 * _L2_BYTES // (p.n * p.k), 1), 12) + 1 if p.m <= 512 else 1
    a, a_scales = _codes(p.m, p.k, jnp.uint32(0)), _scales(blocks, p.m, jnp.uint32(1))
    shape = (blocks, p.n) if p.wgrad else (p.n // BLOCK, blocks)
    b_scales = _scales(*shape, jnp.uint32(2))
    return [
        (a, _codes(p.n, p.k, jnp.uint32(3 + i)), a_scales, b_scales)
        for i in range(count)
    ]


def kernel(product: Product, config: GemmConfig | None = None) -> Callable[..., Array]:
    """The product as a function of :func:`operands`; tuned unless configured."""
    return functools.partial(
        scaled_gemm,
        out_dtype=jnp.float32 if product.wgrad else jnp.bfloat16,
        b_block_rows=1 if product.wgrad else BLOCK,
        config=config,
    )


def implementation(product: Product) -> Callable[..., Array]:
    """The kernel that the command asks for."""
    if _IMPLEMENTATION.value == "mosaic":
        return kernel(product)
    return functools.partial(
        triton_gemm.scaled_gemm,
        out_dtype=jnp.float32 if product.wgrad else jnp.bfloat16,
        b_block_rows=1 if product.wgrad else BLOCK,
    )


def _dot(product, a, b):
    out_dtype = jnp.float32 if product.wgrad else jnp.bfloat16
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=out_dtype)


def dequantize_then_dot(product: Product) -> Callable[..., Array]:
    """XLA's product of the codes, dequantised to bfloat16 in the same program."""

    def wide(codes, scales):
        blocks = codes.astype(jnp.float32).reshape(codes.shape[0], -1, BLOCK)
        return (blocks * scales[:, :, None]).reshape(codes.shape).astype(jnp.bfloat16)

    def fn(a, b, a_scales, b_scales):
        per_row = b_scales.T if product.wgrad else jnp.repeat(b_scales, BLOCK, axis=0)
        return _dot(product, wide(a, a_scales.T), wide(b, per_row))

    return fn


def bf16_time(product: Product, sets: list[tuple[Array, ...]]) -> list[float]:
    """XLA's product of bfloat16 operands of the same shape, seconds."""
    wide = [tuple(x.astype(jnp.bfloat16) for x in s[:2]) for s in sets]
    return device_time(functools.partial(_dot, product), wide, repeats=_REPEATS.value)


def cublaslt_time(product: Product, num_weights: int) -> list[float] | None:
    """cuBLASLt's FP8 product with 1x128 and 128x128 scales through PyTorch, seconds.

    Replays of a CUDA graph, so its launch gaps of about a microsecond count. None where
    PyTorch or the product is missing.
    """
    try:
        import torch
    except ImportError:
        return None
    p = product
    if p.wgrad or not torch.cuda.is_available():
        return None
    blocks = p.k // BLOCK

    def codes(rows):
        x = torch.randn(rows, p.k, device="cuda", dtype=torch.bfloat16)
        return x.to(torch.float8_e4m3fn)

    a, a_scales = codes(p.m), torch.rand(blocks, p.m, device="cuda").t()
    weights = [codes(p.n).t() for _ in range(num_weights)]
    b_scales = torch.rand(p.n // BLOCK, blocks, device="cuda").t()

    def run():
        for w in weights:
            torch._scaled_mm(
                a, w, scale_a=a_scales, scale_b=b_scales, out_dtype=torch.bfloat16
            )

    try:
        run()
    except (RuntimeError, ValueError) as e:
        print(f"PyTorch refuses {p.name}: {str(e).splitlines()[0]}")
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(max(_REPEATS.value // num_weights, 3) + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / num_weights)
    del graph
    torch.cuda.empty_cache()
    return times[1:]


def report() -> None:
    """Prints the table."""
    rows = []
    for product in PRODUCTS:
        sets = operands(product)
        flops = 2 * product.m * product.n * product.k

        def show(times, flops=flops):
            if times is None:
                return "missing"
            us, *ends = (1e6 * f(times) for f in (statistics.median, min, max))
            return f"{us:.1f} [{ends[0]:.1f}, {ends[1]:.1f}] {flops / us / 1e6:.0f}"

        ours = device_time(implementation(product), sets, repeats=_REPEATS.value)
        wide = device_time(dequantize_then_dot(product), sets, repeats=_REPEATS.value)
        bf16 = bf16_time(product, sets)
        num_weights = len(sets)
        del sets
        median = statistics.median
        rows.append(
            {
                "product": product.name,
                "FP8, us and TFLOP/s": show(ours),
                "XLA bf16": show(bf16),
                "dequantised": show(wide),
                "cuBLASLt FP8": show(cublaslt_time(product, num_weights)),
                "x bf16": f"{median(bf16) / median(ours):.2f}",
                "weight TB/s": f"{product.n * product.k / median(ours) / 1e12:.2f}",
            }
        )
        print(rows[-1], flush=True)
    title = f"Block-scaled products, {_IMPLEMENTATION.value}"
    print_table(rows, f"{title}, {jax.devices()[0].device_kind}")


def linear_shapes(config: Qwen3Config) -> list[tuple[int, int]]:
    """(out, in) of a layer's four projections."""
    heads = config.num_heads + 2 * config.num_kv_heads
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    return [(heads * h, d), (d, config.num_heads * h), (2 * f, d), (d, f)]


def candidates(product: Product) -> list[GemmConfig]:
    """Configurations worth a try, none of which spills registers."""
    if product.m > 512:
        return [
            GemmConfig(raster=r, cluster=c)
            for r, c in itertools.product((8, 16), (1, 2))
        ]
    few = dict(cluster=1, unroll=4)
    return [
        GemmConfig(1, 32, 16, in_flight=4, **few),
        GemmConfig(1, 64, 12, in_flight=4, **few),
        GemmConfig(2, 32, 10, in_flight=4, **few),
        GemmConfig(2, 64, 8, in_flight=2, **few),
        GemmConfig(2, 128, 5, unroll=2),
        GemmConfig(2, 192, 4, unroll=1, cluster=1),
        GemmConfig(),
    ][0 if product.m <= 128 else 2 :]


def tune() -> None:
    """Measures every candidate and writes the fastest of each shape.

    Entries of other shapes stay in the table.
    """
    shapes = [s for name in _SIZES.value for s in linear_shapes(QWEN3_SIZES[name])]
    products = [
        Product("forward", m, n, k)
        for m, (n, k) in itertools.product((64, 128, 256, 512, 8192), shapes)
    ]

    def compile_all(product: Product) -> list[tuple[GemmConfig, Any]]:
        sets = operands(product)
        compiled = []
        for config in candidates(product):
            fn = jax.jit(kernel(product, config))
            compiled.append((config, fn.lower(*sets[0]).compile()))
        return compiled

    entries = json.loads(_TABLE.read_text())
    table = {(e["m"], e["n"], e["k"]): e["config"] for e in entries}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled_products = pool.map(compile_all, products)
    for product, compiled in zip(products, compiled_products, strict=True):
        sets = operands(product)
        times = [
            statistics.median(device_time(fn, sets, repeats=_REPEATS.value))
            for _, fn in compiled
        ]
        best = min(range(len(times)), key=times.__getitem__)
        shape = product.m, product.n, product.k
        table[shape] = dataclasses.asdict(compiled[best][0])
        microseconds = ", ".join(f"{1e6 * t:.1f}" for t in times)
        print(f"{product.name}: {microseconds} us; {compiled[best][0]}", flush=True)
        entries = [
            {"m": m, "n": n, "k": k, "config": config}
            for (m, n, k), config in sorted(table.items())
        ]
        _TABLE.write_text(json.dumps(entries, indent=1) + "\n")


def main(argv: list[str]) -> None:
    """Prints the table, or tunes."""
    del argv
    tune() if _TUNE.value else report()


if __name__ == "__main__":
    app.run(main)
