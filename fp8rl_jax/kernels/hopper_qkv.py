"""What stands between the fused projection and attention, for Hopper (Mosaic GPU).

QK-norm, RoPE, the split into queries, keys and values and, in a decode step, their
quantisation and the store into the paged pool: one kernel, bound by memory.

Every float32 operation on a row is an instruction chosen here, the mean square a tree
over the bits of the feature's index: the half, then bit 0 to bit 5. So a row's bits
depend on that row alone and are the same in a decode step and in a forward pass,
however many lanes of a warp share the row.

References:
  Zhang and Sennrich. "Root Mean Square Layer Normalization", arXiv:1910.07467.
  Su et al. "RoFormer", arXiv:2104.09864, equation 15.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors
from jaxtyping import Array, BFloat16, Float, Int

from fp8rl_jax.kernels.hopper_kv_store import (
    HEAD_DIM,
    WARPS,
    check_operands,
    is_fp8,
    one_head_a_warp,
    token_amax,
    token_codes,
    token_scales,
)
from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, Interpret
from fp8rl_jax.kernels.hopper_value_pages import value_place

_HALF = HEAD_DIM // 2
_LANES = 32  # of a warp
# Adjacent values of each half of a row that a thread holds, which decides how many rows
# a warpgroup takes. A decode step takes the first that its number of KV heads allows.
_VECTOR = 4
_DECODE_VECTORS = (4, 2)


def qkv_rows(
    qkv: BFloat16[Array, "T _"],
    q_norm: Float[Array, "128"],
    k_norm: Float[Array, "128"],
    cos: Float[Array, "T 64"],
    sin: Float[Array, "T 64"],
    *,
    groups: int,
    eps: float,
    interpret: Interpret = None,
) -> tuple[
    BFloat16[Array, "T N 128"], BFloat16[Array, "T K 128"], BFloat16[Array, "T K 128"]
]:
    """Queries, keys and values of projected tokens: training and prefill.

    Args:
      qkv: [T, K (G + 2) 128]: for each KV head its G queries, its key, its value.
        Padded (a copy), like ``cos`` and ``sin``, if T is less than 8.
      q_norm: float32 scale of the norm of queries.
      k_norm: float32 scale of the norm of keys.
      cos: float32 cosines of the rotary angles.
      sin: float32 sines.
      groups: G, query heads a KV head.
      eps: added to the mean square.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Returns:
      Queries (N = K G heads) and keys after norm and RoPE, rounded once, and values.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    num_tokens, num_heads = _check_qkv(qkv, q_norm, k_norm, cos, sin, groups)
    step = _most_rows(_VECTOR)
    layout = _rows_by_halves(step, _VECTOR)
    missing = max(step - num_tokens, 0)
    if missing:
        qkv, cos, sin = (jnp.pad(x, ((0, missing), (0, 0))) for x in (qkv, cos, sin))
    rows = num_tokens + missing

    def body(qkv, q_norm, k_norm, cos, sin, q, k, v):
        head = lax.axis_index("head")
        # The last tokens may be another block's as well, which stores the same.
        start = jnp.minimum(lax.axis_index("block") * step, rows - step)
        tokens = pl.ds(start, step)

        def load(ref, layout=layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        def scale(ref):
            x = load(ref, layout.reduce(0))
            return lax.broadcast_in_dim(x, (step, HEAD_DIM), [1])

        # All of them before the first store, which no load may pass.
        angles = load(cos.at[tokens]), load(sin.at[tokens])
        *heads, value = (load(qkv.at[tokens, head, i]) for i in range(groups + 2))
        norms = [scale(q_norm)] * groups + [scale(k_norm)]
        outs = [q.at[tokens, head, i] for i in range(groups)] + [k.at[tokens, head]]
        v.at[tokens, head][...] = value
        for x, norm, out in zip(heads, norms, outs, strict=True):
            out[...] = _norm_and_rotate(x, norm, *angles, eps, layout, interpret)

    kv_type = jax.ShapeDtypeStruct((rows, num_heads, HEAD_DIM), jnp.bfloat16)
    q_type = jax.ShapeDtypeStruct((rows, num_heads, groups, HEAD_DIM), jnp.bfloat16)
    q, k, v = plgpu.kernel(
        body,
        out_type=(q_type, kv_type, kv_type),
        grid=(pl.cdiv(rows, step), num_heads),
        grid_names=("block", "head"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(
        qkv.reshape(rows, num_heads, groups + 2, HEAD_DIM),
        q_norm,
        k_norm,
        cos,
        sin,
    )
    q = q.reshape(rows, num_heads * groups, HEAD_DIM)
    return q[:num_tokens], k[:num_tokens], v[:num_tokens]


def qkv_store(
    refs: Sequence[jax.Ref],
    qkv: BFloat16[Array, "T _"],
    q_norm: Float[Array, "128"],
    k_norm: Float[Array, "128"],
    cos: Float[Array, "T 64"],
    sin: Float[Array, "T 64"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
    layer: Int[Array, ""],
    *,
    groups: int,
    eps: float,
    interpret: Interpret = None,
) -> tuple[Array, ...]:
    """Queries of a decode step, whose keys and values go to the pool.

    The bits are those of :func:`qkv_rows` with `hopper_kv_store.store_kv` and, for an
    FP8 pool, the queries' quantisation, which is that of keys, behind it.

    Args:
      refs: the pool, see `hopper_kv_store`; written in place.
      qkv: see :func:`qkv_rows`, also for the next four.
      q_norm: float32 scale.
      k_norm: float32 scale.
      cos: float32 cosines.
      sin: float32 sines.
      pages: int32 page of each token; negative for none: it has a query all the same.
      slots: int32 slot in that page, 0..127. No two tokens may share one.
      layer: int32 scalar.
      groups: G, query heads a KV head.
      eps: added to the mean square.
      interpret: see :func:`qkv_rows`.

    Returns:
      For an FP8 pool, e4m3 codes [T, K, G, 128] and float32 scales [T, K, G], each a
      power of two. Otherwise, bfloat16 [T, K, G, 128] alone.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    num_tokens, num_heads = _check_qkv(qkv, q_norm, k_norm, cos, sin, groups)
    new = jax.ShapeDtypeStruct((num_tokens, num_heads, HEAD_DIM), qkv.dtype)
    check_operands(refs, new, new, (pages, slots))
    fp8 = is_fp8(refs)
    heads, layout = _heads_and_layout(num_heads)
    # The values of an FP8 pool are apart: a store takes one of each thread.
    v_layout = one_head_a_warp(heads, 1 if fp8 else 4)

    def body(qkv, q_norm, k_norm, cos, sin, pages, slots, layer, *queries):
        token = lax.axis_index("token")
        group = pl.ds(lax.axis_index("heads") * heads, heads)
        page, slot, layer_index = pages[token], slots[token], layer[0]

        def load(ref, layout=layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        def spread(ref):
            x = load(ref, layout.reduce(0))
            return lax.broadcast_in_dim(x, (heads, *x.shape), [1])

        # All of them before the first store, which no load may pass.
        xs = [load(qkv.at[token, group, i]) for i in range(groups + 1)]
        value = load(qkv.at[token, group, groups + 1], v_layout)
        angles = spread(cos.at[token]), spread(sin.at[token])
        norms = [spread(q_norm)] * groups + [spread(k_norm)]

        xs = [
            _norm_and_rotate(x, norm, *angles, eps, layout, interpret)
            for x, norm in zip(xs, norms, strict=True)
        ]
        if fp8:
            *scales, v_scales = (token_scales(token_amax(x)) for x in (*xs, value))
            xs = [token_codes(x, s, 0) for x, s in zip(xs, scales, strict=True)]
            value = token_codes(value, v_scales, 0)
        for i in range(groups):
            queries[0].at[token, group, i][...] = xs[i]
            if fp8:
                queries[1].at[token, group, i][...] = scales[i]

        # The sign is the page's. Were the other two not in the condition, they would be
        # fetched after it: twice the latency.
        @pl.when((page | slot | layer_index) >= 0)
        def _store():
            outs = [ref.at[layer_index, page, group] for ref in refs]
            outs[0].at[:, slot][...] = xs[-1]
            if not fp8:
                outs[1].at[:, slot][...] = value
                return
            row_group, column = value_place(slot)
            outs[1].at[:, row_group, :, column][...] = value
            outs[2].at[:, slot][...] = scales[-1]
            outs[3].at[:, slot][...] = v_scales

    shape = (num_tokens, num_heads, groups, HEAD_DIM)
    out_types = [jax.ShapeDtypeStruct(shape, E4M3 if fp8 else jnp.bfloat16)]
    if fp8:
        out_types.append(jax.ShapeDtypeStruct(shape[:-1], jnp.float32))
    return tuple(
        plgpu.kernel(
            body,
            out_type=out_types,
            grid=(num_tokens, num_heads // heads),
            grid_names=("token", "heads"),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(
            qkv.reshape(num_tokens, num_heads, groups + 2, HEAD_DIM),
            q_norm,
            k_norm,
            cos,
            sin,
            pages,
            slots,
            jnp.reshape(layer, (1,)),
        )
    )


def _check_qkv(qkv, q_norm, k_norm, cos, sin, groups):
    width = (groups + 2) * HEAD_DIM
    if qkv.ndim != 2 or qkv.shape[1] % width or qkv.dtype != jnp.bfloat16:
        raise ValueError(
            f"Projected tokens must be bfloat16 [T, K {width}] for {groups} queries a "
            f"KV head, got {qkv.dtype.name} {qkv.shape}."
        )
    num_tokens = qkv.shape[0]
    expected = {
        "q_norm": (q_norm, (HEAD_DIM,)),
        "k_norm": (k_norm, (HEAD_DIM,)),
        "cos": (cos, (num_tokens, _HALF)),
        "sin": (sin, (num_tokens, _HALF)),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape or x.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 {shape}, got {x.dtype.name} {x.shape}."
            )
    return num_tokens, qkv.shape[1] // width


def _most_rows(vector: int) -> int:
    """Rows of a warpgroup whose threads hold ``vector`` values of each half of one."""
    return WARPS * _LANES * vector // _HALF


def _rows_by_halves(rows: int, vector: int) -> Any:
    """The layout of [rows, 128] or [rows, 64] for norm and RoPE.

    A thread holds ``vector`` adjacent values of each half. If there are too few rows
    for all warps, several hold and store the same.
    """
    warps = WARPS * rows // _most_rows(vector)
    in_warp = rows // warps
    tiles = [(rows, _HALF), (in_warp, _HALF), (vector,)]
    warp, lanes = -5, (-3, -2)
    if in_warp == 1:
        del tiles[1]
        warp, lanes = -3, (-2,)
    warp_dims = [] if warps == 1 else [warp]
    if warps < WARPS:
        warp_dims.append(plgpu.Replicated(WARPS // warps))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=tuple(warp_dims),
        lane_dims=lanes,
        vector_dim=-1,
    )


def _heads_and_layout(num_heads: int) -> tuple[int, Any]:
    """KV heads that a thread block of a decode step takes, and their layout."""
    for vector in _DECODE_VECTORS:
        heads = _most_rows(vector)
        if num_heads % heads == 0:
            break
    else:
        heads = math.gcd(num_heads, heads)
    return heads, _rows_by_halves(heads, vector)


def _norm_and_rotate(
    x: BFloat16[Array, "rows 128"],
    scale: Float[Array, "rows 128"],
    cos: Float[Array, "rows 64"],
    sin: Float[Array, "rows 64"],
    eps: float,
    layout: Any,
    interpret: Interpret,
) -> BFloat16[Array, "rows 128"]:
    """Norm and RoPE of one register tile, rounded once."""
    if interpret is not None:
        x = x.astype(jnp.float32)
        x1, x2 = jnp.split(x, 2, axis=1)
        total = x1 * x1 + x2 * x2
        while total.shape[1] > 1:
            total = total[:, ::2] + total[:, 1::2]
        inverse = lax.rsqrt(total / HEAD_DIM + eps)
        y1, y2 = jnp.split(x * inverse * scale, 2, axis=1)
        y = jnp.concatenate([y1 * cos - y2 * sin, y2 * cos + y1 * sin], axis=1)
        return y.astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * 4,
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def apply(_, x, scale, cos, sin):
        halves = [_floats(register) for register in x.registers.flat]
        weights = [_elements(register) for register in scale.registers.flat]
        cos, sin = _elements(cos.registers.item()), _elements(sin.registers.item())

        sums = [_fma(a, a, _mul(b, b)) for a, b in zip(*halves, strict=True)]
        lanes = _HALF // len(sums)
        while len(sums) > 1:
            sums = [_add(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
        (total,) = sums
        for bit in range(lanes.bit_length() - 1):
            total = _add(total, mosaic_utils.shfl_bfly(total, 1 << bit))
        mean, epsilon = (mosaic_utils.c(c, total.type) for c in (1 / HEAD_DIM, eps))
        inverse = _rsqrt(_fma(total, mean, epsilon))
        halves = [
            [_mul(_mul(a, inverse), b) for a, b in zip(half, weight, strict=True)]
            for half, weight in zip(halves, weights, strict=True)
        ]
        rotated = [
            (_fma(a, c, arith.negf(_mul(b, s))), _fma(b, c, _mul(a, s)))
            for a, b, c, s in zip(*halves, cos, sin, strict=True)
        ]
        registers = np.empty(x.registers.shape, dtype=object)
        registers.flat = [_round(half) for half in zip(*rotated, strict=True)]
        return fa.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    return apply(x, scale, cos, sin)


def _instruction(name):
    # With a rounding mode named, ptxas neither contracts nor reorders.
    return fa.FragmentedArray._lift_fast_instr(f"{name}.f32")


_add, _mul, _fma = map(_instruction, ("add.rn", "mul.rn", "fma.rn"))
_rsqrt = _instruction("rsqrt.approx")


def _elements(register):
    """The elements of a vector."""
    (size,) = register.type.shape
    return [
        vectors.extract(register, dynamic_position=[], static_position=[i])
        for i in range(size)
    ]


def _floats(register):
    """A vector of bfloat16 as single float32 values."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    (size,) = register.type.shape
    words = mosaic_utils.bitcast(register, ir.VectorType.get((size // 2,), i32))
    bits = []
    for word in _elements(words):
        bits.append(arith.shli(word, mosaic_utils.c(16, i32)))
        bits.append(arith.andi(word, mosaic_utils.c(-(1 << 16), i32)))
    return [arith.bitcast(f32, x) for x in bits]


def _round(values):
    """Single float32 values as a vector of bfloat16."""
    i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()
    words = [
        llvm.inline_asm(i32, pair, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
        for pair in zip(values[1::2], values[::2], strict=True)
    ]
    words = vectors.from_elements(ir.VectorType.get((len(words),), i32), words)
    return mosaic_utils.bitcast(words, ir.VectorType.get((len(values),), bf16))
