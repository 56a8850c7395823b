"""Pieces of online softmax over a page of keys, for query columns of wgmma on Hopper.

S^T [128 tokens, columns] crosses shared memory once, after which a warp owns whole rows
of [heads, 128 tokens] and softmax needs no other warp.

In interpret mode, which cannot inline Mosaic's own code, they are plain JAX.

References:
  Milakov and Gimelshein. "Online normalizer calculation for softmax", arXiv:1805.02867.
  Shah et al. "FlashAttention-3", arXiv:2407.08608, on FP8 layouts of P and V.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, ptx
from fp8rl_jax.kernels.hopper_value_pages import in_columns

PAGE = 128  # tokens
TILE_ROWS = 8  # of a swizzled tile
NUM_RESIDUES = 8  # partial sums of a row
# P is scaled by 2^8, the largest power below 448, before its cast to e4m3.
P_EXPONENT = 8

WGMMA = plgpu.Layout.WGMMA
# [heads, 128 tokens]: a warp owns heads, lane 4J + t tokens 16J + {2t, 2t+1, 2t+8,
# 2t+9}.
TOKENS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, PAGE), (16,), (8,), (2,))),
    warp_dims=(-5,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
# [heads, 8]: sums over the tokens of a residue modulo 8, in the lanes that hold them.
RESIDUES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 8), (2,))),
    warp_dims=(-3,),
    lane_dims=(fa.Replicated(8), -2),
    vector_dim=-1,
)
HEADS = TOKENS.reduce(1)


def fma(x, y, z, layout, interpret):
    """x * y + z, rounded once; y may be a number."""
    if interpret is not None:
        return x * y + z
    arrays = (x, z) if isinstance(y, float) else (x, z, y)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(arrays),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def apply(_, x, z, y=y):
        return x._pointwise(x._lift_fast_instr("fma.rn.f32"), y, z)

    return apply(*arrays)


def exp2(x, layout, interpret):
    """2^x, as the hardware approximates it."""
    if interpret is not None:
        return jnp.exp2(x)
    return ptx("ex2.approx.ftz.f32", x, layout=layout)


def sum_residues(p, interpret):
    """[heads, 128] -> [heads, 8]: over tokens equal modulo 8, bits 3 to 6 in turn."""
    heads = p.shape[0]
    if interpret is not None:
        return p.reshape(heads, PAGE // 8, 8).sum(1)

    @plgpu.inline_mgpu(
        arg_types=(TOKENS,),
        return_type=plgpu.ShapeDtypeStruct((heads, 8), jnp.float32, layout=RESIDUES),
    )
    def apply(_, p):
        layout = RESIDUES.to_mgpu()
        registers = np.empty((heads // 4,), dtype=object)
        for i, (low, high) in enumerate(p.registers.reshape(-1, 2)):
            x = arith.addf(low, high)
            for lanes in (4, 8, 16):
                x = arith.addf(x, mgpu.utils.shfl_bfly(x, lanes))
            registers[i] = x
        return fa.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((heads, 8))),
            _layout=layout,
            _is_signed=None,
        )

    return apply(p)


def store_transposed(ref, x, interpret):
    """ref[j, i] = x[i, j] of an accumulator."""
    if interpret is not None:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def apply(_, ref, x):
        x.foreach(lambda element, index: memref.store(element, ref, index[::-1]))

    apply(ref, x)


def load_transposed(ref, interpret):
    """An accumulator x[i, j] = ref[j, i]."""
    if interpret is not None:
        return ref[...].T
    shape = ref.shape[::-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA),
    )
    def apply(_, ref):
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        return fa.FragmentedArray.splat(zero, shape, fa.WGMMA_LAYOUT).foreach(
            lambda _, index: memref.load(ref, index[::-1]), create_array=True
        )

    return apply(ref)


def store_sums(ref, sums, interpret):
    """ref[...] = sums, in global memory."""
    if interpret is not None:
        ref[...] = sums
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), RESIDUES))
    def apply(_, ref, sums):
        sums.foreach(lambda element, index: memref.store(element, ref, index))

    apply(ref, sums)


def transpose(x, scratch, first, heads, interpret):
    """Columns ``first`` to ``first + heads`` of an accumulator [128, columns] as rows.

    In the layout of softmax; all warps must be done with what was in ``scratch``.
    """
    shape = (heads, PAGE)
    if interpret is not None:
        return lax.dynamic_slice(x.T, (first, 0), shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), WGMMA, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TOKENS),
    )
    def apply(_, ref, x, first):
        x.foreach(lambda element, index: memref.store(element, ref, index[::-1]))
        mgpu.utils.warpgroup_barrier()
        first = arith.index_cast(ir.IndexType.get(), first.registers.item())
        rows = mgpu.utils.memref_slice(
            ref, (mgpu.utils.ds(first, heads), slice(0, PAGE))
        )
        layout = TOKENS.to_mgpu()
        return fa.FragmentedArray.load_untiled(rows, layout=layout, optimized=False)

    return apply(scratch, x, first)


def store_p(p_s, p, transforms, interpret):
    """Casts P [heads, 128] and writes it to the first rows of the operand ``p_s``.

    The columns of codes are permuted as the tokens of V are: a lane's four tokens are
    four bytes next to each other.
    """
    heads, dtype = p.shape[0], p_s.dtype
    if interpret is not None:
        if dtype == E4M3:
            p = in_columns(p)
        p_s[:heads] = p.astype(dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), TOKENS))
    def apply(_, ref, p):
        i32 = ir.IntegerType.get_signless(32)
        i8 = ir.IntegerType.get_signless(8)

        def const(x):
            return arith.constant(i32, x)

        base = mgpu.utils.memref_ptr(ref)
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, const(32))
        warp = arith.remui(arith.divui(thread, const(32)), const(4))
        group = arith.divui(lane, const(4))  # J
        column = arith.muli(arith.remui(lane, const(4)), const(4))  # bytes, of t
        codes = p.astype(mgpu.utils.dtype_to_ir_type(dtype))
        tiles = PAGE * dtype.itemsize // 128  # side by side
        for i, pair in enumerate(codes.registers.reshape(-1, 2)):
            first_tile, row = divmod(4 * i, TILE_ROWS)
            row = arith.addi(warp, const(row))
            line = arith.addi(arith.muli(row, const(128)), column)
            line = arith.addi(line, const(first_tile * tiles * 1024))
            if dtype == E4M3:
                words = [(group, mgpu.utils.vector_concat(list(pair)))]
            else:
                # 64 tokens fill the rows of a tile.
                tile = arith.divui(group, const(4))
                line = arith.addi(line, arith.muli(tile, const(1024)))
                chunk = arith.muli(arith.remui(group, const(4)), const(2))
                words = [(arith.addi(chunk, const(j)), pair[j]) for j in range(2)]
            for chunk, word in words:
                swizzled = arith.muli(arith.xori(chunk, row), const(16))
                address = mgpu.utils.getelementptr(
                    base, [arith.addi(line, swizzled)], i8
                )
                llvm.store(mgpu.utils.bitcast(word, i32), address)

    apply(p_s, p)


def over_power_of_two(x):
    """2^8 / x, exactly, for powers of two: the exponents subtracted."""
    bits = np.int32((P_EXPONENT + 2 * 127 << 23) - 2**32)
    return lax.bitcast_convert_type(
        bits - lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    )
