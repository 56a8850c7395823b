"""SiLU(gate) * up and its gradient, quantised, for Hopper (Pallas Mosaic GPU).

Gate and up are the output of one projection, ``gate_up`` [M, 2 F], in which blocks of
128 columns of gate and of up take turns.

The arithmetic is float32, each value is rounded once to bfloat16 and quantised from
there. The sigmoid is made of `ex2.approx` and `rcp.approx`: relative error below 2^-18
for gates down to -32. On an H200 one code in 500,000 differs from those of the float64
formula.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

from fp8rl_jax.kernels.hopper_quantize_tiles import (
    BLOCK,
    Interpret,
    Quantized,
    Tiles,
    ptx,
    quantize_tiles,
    wide_rows,
)

_LOG2_E = 1.4426950408889634


@functools.partial(jax.jit, static_argnames=("rows", "columns", "interpret"))
def silu_mul_quantize(
    gate_up: BFloat16[Array, "M 2F"],
    *,
    rows: bool = True,
    columns: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """Codes of silu(gate) * up.

    Args:
      gate_up: [M, 2 F], F a multiple of 128. Padded (a copy) unless M is a multiple of
        8.
      rows: whether to return codes [M, F].
      columns: whether to return transposed codes [F, M].

    Raises:
      ValueError: F is not a multiple of 128.
    """
    width = _half_width(gate_up)

    def silu_mul(gate, up):
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return ((gate * _sigmoid(gate, interpret) * up).astype(jnp.bfloat16),)

    return quantize_tiles(
        (Tiles(gate_up, 2, 0), Tiles(gate_up, 2, 1)),
        width,
        silu_mul,
        by_row=rows,
        by_column=columns,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("rows", "columns", "interpret"))
def silu_mul_backward_quantize(
    dy: BFloat16[Array, "M F"],
    gate_up: BFloat16[Array, "M 2F"],
    *,
    rows: bool = True,
    columns: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """Codes of the gradient of ``gate_up``, in the same order of columns.

    Args:
      dy: [M, F], the gradient of silu(gate) * up.
      gate_up: [M, 2 F], as in :func:`silu_mul_quantize`.
      rows: whether to return codes [M, 2 F].
      columns: whether to return transposed codes [2 F, M].

    Raises:
      ValueError: F is not a multiple of 128.
    """
    width = _half_width(gate_up)

    def backward(dy, gate, up):
        dy, gate, up = (x.astype(jnp.float32) for x in (dy, gate, up))
        sigmoid = _sigmoid(gate, interpret)
        silu = gate * sigmoid
        dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
        return dgate.astype(jnp.bfloat16), (dy * silu).astype(jnp.bfloat16)

    return quantize_tiles(
        (Tiles(dy), Tiles(gate_up, 2, 0), Tiles(gate_up, 2, 1)),
        width,
        backward,
        num_outputs=2,
        by_row=rows,
        by_column=columns,
        interpret=interpret,
    )


def _half_width(gate_up):
    if gate_up.shape[1] % (2 * BLOCK):
        raise ValueError(
            f"gate_up needs pairs of blocks of {BLOCK} columns, got {gate_up.shape}."
        )
    return gate_up.shape[1] // 2


def _sigmoid(x, interpret):
    y = 1.0 + jnp.exp2(x * -_LOG2_E)
    if interpret is not None:
        return 1.0 / y
    # Mosaic's division scales its operands, twice the instructions, for subnormals.
    return ptx("rcp.approx.ftz.f32", y, layout=wide_rows(jnp.bfloat16))
