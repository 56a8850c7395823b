"""Pages of FP8 values for Hopper: how they lie in memory, and products with them.

A page of 128 tokens is [8, H, 16]: for each group of 16 tokens its columns, so that the
product with the probabilities reads them as it must, along the tokens, and yet a token
is within 2 KB of memory. In a group, token 2t + (i & 1) + 8 (i >> 1) is in column
4t + i (t, i = 0..3): the order in which the threads of a warpgroup hold the
probabilities that wgmma left in their registers.

In shared memory the same bytes are what wgmma takes without swizzle: core matrices of 8
rows of H and 16 tokens, each contiguous. As Pallas has no wgmma without swizzle, the
products are written here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm
from jaxtyping import Array, Float, Float8e4m3fn, Int

from fp8rl_jax.kernels.hopper_quantize_tiles import BLOCK, WGMMA, Interpret

HEAD_DIM = 128
GROUP = 16  # tokens of one byte each: a row of a core matrix
VALUE_PAGE = (BLOCK // GROUP, HEAD_DIM, GROUP)
_CORE_ROWS = 8
_GROUP_BYTES = HEAD_DIM * GROUP
_SLAB = 64  # rows of the result of an instruction
_TOKENS = 32  # that it multiplies
_SWIZZLE = BLOCK  # bytes: a row of the probabilities


def value_place(slot: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Group and column of a slot, whose bits 3, 2, 1 go to bits 1, 3, 2."""
    return slot >> 4, (slot & 1) | ((slot & 6) << 1) | ((slot & 8) >> 2)


def for_copies(pages: Float8e4m3fn[Array, "*lead 8 128 16"]) -> Array:
    """The same bytes in rows of 128 [*lead, 128, 128]: TMA is slow on rows of 16."""
    return pages.reshape(*pages.shape[:-3], BLOCK, HEAD_DIM)


def in_columns(x: Float[Array, "rows 128"]) -> Float[Array, "rows 128"]:
    """What belongs to the tokens of a page, in the order of its columns."""
    groups = x.reshape(-1, BLOCK // GROUP, 2, 4, 2)
    return groups.swapaxes(2, 3).reshape(x.shape)


def multiply_transposed(
    values: jax.Ref, p: jax.Ref, transforms: Sequence[Any], interpret: Interpret
) -> Float[Array, "128 8"]:
    """V^T P^T of a page, both operands in shared memory.

    Args:
      values: the page, as :func:`for_copies` gives it.
      p: e4m3 [8, 128], in the order of the page's columns.
      transforms: of ``p``: rows of 128 bytes, swizzled.
      interpret: parameters of interpret mode; None on a GPU.
    """
    if interpret is not None:
        return _emulated(p[...], values).T
    shape = HEAD_DIM, p.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(tuple(transforms))),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA),
    )
    def multiply(_, values, p):
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        zeros = fa.FragmentedArray.splat(zero, shape, fa.WGMMA_LAYOUT)
        p = mma_utils.encode_descriptor(p, 0, _CORE_ROWS * _SWIZZLE, _SWIZZLE)
        slabs = [_descriptor(values, row) for row in range(0, HEAD_DIM, _SLAB)]
        strides = dict(a_k_stride=_TOKENS // GROUP * _GROUP_BYTES, b_k_stride=_TOKENS)
        started = _start(wgmma_fence(zeros), slabs, p, a_transpose=False, **strides)
        return _finish(started)

    return multiply(values, p)


def start_multiply(
    zeros: Float[Array, "64 columns"],
    p: Float8e4m3fn[Array, "64 128"],
    values: jax.Ref,
    first: int,
    interpret: Interpret,
) -> Float[Array, "64 columns"]:
    """Issues P V of a page for some columns of V.

    Args:
      zeros: float32 accumulator.
      p: in registers, in the order of the page's columns.
      values: the page in shared memory, as :func:`for_copies` gives it.
      first: of the columns of V, as many as there are zeros in a row.
      interpret: parameters of interpret mode; None on a GPU.

    Returns:
      What only :func:`finish_multiply` may read.
    """
    if interpret is not None:
        return _emulated(p, values)[:, first : first + zeros.shape[1]]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.Layout.WGMMA_8BIT, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(zeros.shape, jnp.float32, layout=WGMMA),
    )
    def multiply(_, zeros, p, values):
        zeros, p = fa.optimization_barrier(zeros, p)
        nvvm.wgmma_fence_aligned()
        strides = dict(a_k_stride=None, b_k_stride=_TOKENS // GROUP * _GROUP_BYTES)
        values = _descriptor(values, first)
        return _start(zeros, [p], values, a_transpose=None, **strides)

    return multiply(zeros, p, values)


def finish_multiply(
    started: Float[Array, "64 columns"], interpret: Interpret
) -> Float[Array, "64 columns"]:
    """The product, once all that were issued are there."""
    if interpret is not None:
        return started
    struct = plgpu.ShapeDtypeStruct(started.shape, jnp.float32, layout=WGMMA)
    inline = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=struct)
    return inline(lambda _, started: _finish(started))(started)


def _emulated(p, values):
    values = values[...].reshape(VALUE_PAGE).swapaxes(1, 2).reshape(BLOCK, HEAD_DIM)
    return p.astype(jnp.float32) @ values.astype(jnp.float32)


def _descriptor(values, row):
    """Of the rows of a page's groups from ``row`` on, without swizzle."""
    base = mma_utils.encode_descriptor(
        values,
        leading_byte_offset=_GROUP_BYTES,  # from tokens to tokens
        stride_byte_offset=_CORE_ROWS * GROUP,  # from rows to rows
        swizzle=None,
    )
    offset = mma_utils.encode_addr(row * GROUP)
    return arith.addi(base, mgpu.utils.c(offset, base.type))


def _start(zeros, slabs, b, **strides):
    """Issues and commits the products of all tokens, 64 rows after the other."""
    dtype = ir.Float8E4M3FNType.get()
    registers = zeros.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT).registers.copy()
    for i, a in enumerate(slabs):
        registers[i : i + 1] = wgmma_m64(
            registers[i : i + 1],
            a,
            b,
            b_transpose=False,
            n=zeros.shape[1],
            swizzle=_SWIZZLE,  # for it, the bytes of all its instructions
            a_element_type=dtype,
            b_element_type=dtype,
            **strides,
        )
    nvvm.wgmma_commit_group_sync_aligned()
    started = fa.FragmentedArray(
        _registers=registers, _layout=fa.WGMMA_LAYOUT_ACC_32BIT, _is_signed=None
    )
    return started.to_layout(fa.WGMMA_LAYOUT)


def _finish(started):
    nvvm.wgmma_wait_group_sync_aligned(0)
    # LLVM knows of no dependency and could use the registers before.
    return fa.optimization_barrier(started)
