"""Bandwidth of the quantisation kernels.

    python -m benchmarks.quantize

The bytes are those that must move: operands and results once, scales included. (The
norm with columns reads its sum once more than that.)
``% of copy`` is the share of what a copy (XLA's negation of a bfloat16 array) moves a
second in the same run; ``x XLA`` is the time of plain JAX over that of the kernel.
Times are of the kernels alone, median and [fastest, slowest].

Hardware: one Hopper GPU with 20 GB free; a minute.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax
from jaxtyping import Array

from benchmarks.device_time import device_time
from fp8rl_jax import fp8
from fp8rl_jax.console import print_table
from fp8rl_jax.kernels.hopper_norm_quantize import add_norm_backward, add_norm_quantize
from fp8rl_jax.kernels.hopper_quantize import (
    quantize_both,
    quantize_rows,
    quantize_weight,
)
from fp8rl_jax.kernels.hopper_silu_quantize import (
    silu_mul_backward_quantize,
    silu_mul_quantize,
)

_quantize = functools.partial(fp8.quantize, implementation="reference")

_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls.", lower_bound=1)
_BF16 = jnp.bfloat16
_EPS = 1e-6
# What a kernel's sets of operands take together, four times the L2 cache.
_MIN_TOTAL_BYTES = 4 * 50 * 2**20
_MAX_SETS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
      name: of the kernel.
      shape: of its first operand.
      operands: shapes and dtypes.
      kernel: what is measured.
      reference: the same in plain JAX, or None.
    """

    name: str
    shape: tuple[int, ...]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    kernel: Callable[..., Any]
    reference: Callable[..., Any] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of operands and results."""
        results = jax.eval_shape(self.kernel, *self.operands)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(results)) + sum(
            x.size * x.dtype.itemsize for x in self.operands
        )


@functools.partial(jax.jit, static_argnums=0)
def _draw(operands: tuple[jax.ShapeDtypeStruct, ...], seed: Array) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(operands))
    return [
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, operands, strict=True)
    ]


def sets_of_operands(operands: tuple[jax.ShapeDtypeStruct, ...]) -> list[list[Array]]:
    """Random operands, as often as the cache demands."""
    total = sum(x.size * x.dtype.itemsize for x in operands)
    count = min(max(_MIN_TOTAL_BYTES // total, 2), _MAX_SETS)
    return [_draw(operands, jnp.uint32(seed)) for seed in range(count)]


def _quantize_both(x: Array) -> Any:
    return _quantize(x), _quantize(x.T)


def _silu_mul(gate_up: Array) -> Array:
    blocks = gate_up.astype(jnp.float32).reshape(gate_up.shape[0], -1, 2, fp8.BLOCK)
    gate, up = blocks[:, :, 0], blocks[:, :, 1]
    y = (gate * jax.nn.sigmoid(gate) * up).astype(_BF16)
    return y.reshape(gate_up.shape[0], -1)


def _silu_mul_backward(dy: Array, gate_up: Array) -> Array:
    return jax.vjp(_silu_mul, gate_up)[1](dy)[0]


def _norm(residual: Array, scale: Array) -> Array:
    x = residual.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + _EPS)
    return (x * scale[None]).astype(_BF16)


def _add_norm(residual: Array, update: Array, scale: Array) -> tuple[Array, Array]:
    residual = residual + update
    return residual, _norm(residual, scale)


def _add_norm_backward(
    dnormed: Array, dresidual: Array, residual: Array, scale: Array
) -> tuple[Array, Array]:
    dx, dscale = jax.vjp(_norm, residual, scale)[1](dnormed)
    return dresidual + dx, dscale


def cases() -> Iterator[Case]:
    """The layers of Qwen3-8B in training and in sampling."""

    def struct(*shape, dtype=_BF16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def case(name, kernel, reference, *operands):
        return Case(name, operands[0].shape, operands, kernel, reference)

    yield case("copy", lambda x: -x, None, struct(8192, 12288))
    for k in (4096, 12288):
        yield case("rows and columns", quantize_both, _quantize_both, struct(8192, k))
    for m in (8192, 64):
        yield case("rows", quantize_rows, _quantize, struct(m, 4096))
    w = struct(24576, 4096, dtype=jnp.float32)
    yield case("weight", quantize_weight, lambda w: _quantize(w, fp8.WEIGHT_BLOCK), w)

    add_norm = functools.partial(add_norm_quantize, eps=_EPS)
    scale = struct(4096, dtype=jnp.float32)

    def codes_of_norm(quantize):
        def fn(*args):
            residual, y = _add_norm(*args)
            return residual, quantize(y)

        return fn

    x = struct(8192, 4096)
    yield case(
        "norm: rows and columns",
        functools.partial(add_norm, columns=True),
        codes_of_norm(_quantize_both),
        x, x, scale,
    )  # fmt: skip
    for m in (8192, 64):
        x = struct(m, 4096)
        yield case("norm: rows", add_norm, codes_of_norm(_quantize), x, x, scale)
    x = struct(8192, 4096)
    only_norm = functools.partial(add_norm, rows=False, normed=True)
    yield case("norm: bfloat16", only_norm, _add_norm, x, x, scale)
    backward = functools.partial(add_norm_backward, eps=_EPS)
    yield case("norm: gradient", backward, _add_norm_backward, x, x, x, scale)

    gate_up, dy = struct(8192, 2 * 12288), struct(8192, 12288)
    yield case(
        "silu: rows and columns",
        silu_mul_quantize,
        lambda x: _quantize_both(_silu_mul(x)),
        gate_up,
    )
    only_rows = functools.partial(silu_mul_quantize, columns=False)
    x = struct(64, 2 * 12288)
    yield case("silu: rows", only_rows, lambda x: _quantize(_silu_mul(x)), x)
    yield case(
        "silu: gradient",
        silu_mul_backward_quantize,
        lambda dy, x: _quantize_both(_silu_mul_backward(dy, x)),
        dy, gate_up,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    rows, copy_bandwidth = [], None
    for case in cases():
        operands = sets_of_operands(case.operands)
        times = device_time(case.kernel, operands, repeats=_REPEATS.value)
        seconds = statistics.median(times)
        bandwidth = case.num_bytes / seconds
        # The first case is the copy.
        copy_bandwidth = copy_bandwidth or bandwidth
        speedup = ""
        if case.reference is not None:
            reference = device_time(case.reference, operands, repeats=_REPEATS.value)
            speedup = f"{statistics.median(reference) / seconds:.2f}"
        rows.append(
            {
                "kernel": case.name,
                "shape": "x".join(map(str, case.shape)),
                "us": f"{seconds * 1e6:.1f}",
                "spread": f"[{min(times) * 1e6:.1f}, {max(times) * 1e6:.1f}]",
                "TB/s": f"{bandwidth / 1e12:.2f}",
                "% of copy": f"{100 * bandwidth / copy_bandwidth:.0f}",
                "x XLA": speedup,
            }
        )
    print_table(rows, f"{jax.devices()[0].device_kind}, jax {jax.__version__}")


if __name__ == "__main__":
    app.run(main)
