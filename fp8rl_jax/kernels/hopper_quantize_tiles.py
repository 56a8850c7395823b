"""Quantisation of 128x128 tiles to float8_e4m3fn for Hopper (Pallas Mosaic GPU).

Bound by memory: each element is read once and each code written once. A CTA quantises a
tile in shared memory, after an elementwise transform if there is one. Column codes come
from the transposed view of the tile: `ldmatrix.trans` hands a thread pairs that are
adjacent along the rows, so the column pass is the row pass again and nothing is
shuffled.

Codes and scales equal the reference quantisation bit for bit: maxima propagate NaN,
reciprocals are correctly rounded, codes are rounded to nearest even and saturate.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn

E4M3 = jnp.float8_e4m3fn
BLOCK = 128
_E4M3_MAX = 448.0
_ONE_OVER_MAX = np.float32(1.0 / _E4M3_MAX)
# Below this amax the scale would be subnormal; such a block is zero for our purposes.
_AMAX_FLOOR = _E4M3_MAX * 2.0**-126
# TMA moves swizzled tiles of eight rows and drops only whole ones out of bounds.
_TMA_ROWS = 8
# A CTA has 128 threads and an SM of Hopper, of which there are 132, holds 2048.
_MAX_RESIDENT_TILES = 132 * 16
# Rows that the transform of a tile works on at a time.
_TRANSFORM_ROWS = 32
# Of shared memory, for maxima over the warps.
SCRATCH_BYTES = 4096
WGMMA = plgpu.Layout.WGMMA

Interpret = plgpu.InterpretGPUParams | None


class Quantized(NamedTuple):
    """Codes and scales of 1x128 blocks; None where not asked for.

    Attributes:
      codes: e4m3 [M, K], blocks along K.
      scales: float32 [K/128, M], of ``codes``.
      codes_t: e4m3 [K, M], the transpose in blocks along M.
      scales_t: float32 [ceil(M/128), K], of ``codes_t``.
    """

    codes: Float8e4m3fn[Array, "M K"] | None = None
    scales: Float[Array, "K/128 M"] | None = None
    codes_t: Float8e4m3fn[Array, "K M"] | None = None
    scales_t: Float[Array, "M/128 K"] | None = None


class Tiles(NamedTuple):
    """An operand of :func:`quantize_tiles`: blocks of 128 columns of ``array``.

    Attributes:
      array: [M, columns].
      stride: from one block that is read to the next, in blocks.
      first: the first of them.
    """

    array: Float[Array, "M _"]
    stride: int = 1
    first: int = 0


def quantize_tiles(
    operands: Sequence[Tiles],
    columns: int,
    transform: Callable[..., Sequence[Array]] | None = None,
    *,
    row_vectors: Sequence[Float[Array, "M"]] = (),
    column_vectors: Sequence[Float[Array, "K"]] = (),
    num_outputs: int = 1,
    by_row: bool = True,
    by_column: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """Quantises what ``transform`` makes of the operands, elementwise.

    Args:
      operands: one or more of a dtype and of M rows.
      columns: K, a multiple of 128.
      transform: receives equal tiles of the operands, then of the row and the column
        vectors, all in the layout ``wide_rows``; returns ``num_outputs`` tiles in the
        operands' dtype. None quantises the only operand.
      row_vectors: float32 [M], one value a row.
      column_vectors: float32 [K], one value a column.
      num_outputs: how many the transform has, at most as many as there are operands.
        Their blocks of 128 columns take turns in the result, which has
        K * num_outputs columns.
      by_row: whether to return the codes of blocks along K.
      by_column: whether to return the codes of blocks along M (bfloat16 only).
    """
    m = operands[0].array.shape[0]
    operands = [t._replace(array=pad(t.array, (_TMA_ROWS, 1))) for t in operands]
    dtype = operands[0].array.dtype
    k_tiles = columns // BLOCK
    tile_rows = BLOCK if by_column else _tile_rows(m, k_tiles)
    layout = WGMMA if tile_rows == BLOCK else wide_rows(dtype)
    m_tiles = pl.cdiv(m, tile_rows)
    # Zeros past the end, whichever kind of copy Mosaic picks.
    row_vectors = [pad(v, (tile_rows,)) for v in row_vectors]
    # Output i is left where an operand was; its codes go to the buffer before, whose
    # contents are dead by then.
    spare = max(num_outputs + 1 - len(operands), 0)

    def body(*refs):
        refs = list(refs)

        def take(n):
            return [refs.pop(0) for _ in range(n)]

        arrays, row_refs = take(len(operands)), take(len(row_vectors))
        column_refs = take(len(column_vectors))
        row_outs, column_outs = take(2 * by_row), take(2 * by_column)
        buffers, scales_s, row_s, column_s, loaded = refs
        codes_s = buffers[:spare] + [buffer[1] for buffer in buffers[spare:]]
        tiles = [buffer[0] for buffer in buffers[spare:]]
        outputs = tiles[len(tiles) - num_outputs :]
        mi, ki = lax.axis_index("m"), lax.axis_index("k")
        ms, ks = pl.ds(mi * tile_rows, tile_rows), pl.ds(ki * BLOCK, BLOCK)

        for operand, ref, tile in zip(operands, arrays, tiles, strict=True):
            block = ki * operand.stride + operand.first
            part = pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(ref.at[ms, part], tile, loaded)
        for i, ref in enumerate(row_refs):
            plgpu.copy_gmem_to_smem(ref.at[ms], row_s.at[i], loaded)
        for i, ref in enumerate(column_refs):
            plgpu.copy_gmem_to_smem(ref.at[ks], column_s.at[i], loaded)
        plgpu.barrier_wait(loaded)

        if transform is not None:
            wide = wide_rows(dtype)
            # Small steps, so that the intermediates of few elements are alive at once.
            step = min(_TRANSFORM_ROWS, tile_rows)

            def spread(ref, axis):
                layout = wide.reduce(1 - axis)
                vector = plgpu.load(ref, layout=layout, optimized=False)
                return lax.broadcast_in_dim(vector, (step, BLOCK), [axis])

            for start in range(0, tile_rows, step):
                rows = pl.ds(start, step)
                args = [plgpu.load(tile.at[rows], layout=wide) for tile in tiles]
                args += [spread(row_s.at[i, rows], 0) for i in range(len(row_refs))]
                args += [spread(column_s.at[i], 1) for i in range(len(column_refs))]
                for ref, y in zip(outputs, transform(*args), strict=True):
                    ref[rows] = y

        for i, y in enumerate(outputs):
            ki_out = ki * num_outputs + i
            ks = pl.ds(ki_out * BLOCK, BLOCK)
            passes = []
            if by_row:
                passes.append((y, layout, *row_outs, ms, ki_out, ks))
            if by_column:
                passes.append((y.T, WGMMA, *column_outs, ks, mi, ms))
            for j, (view, view_layout, *_) in enumerate(passes):
                x = plgpu.load(view, layout=view_layout)
                codes, scales = quantize_values(x, view_layout, interpret)
                codes_s[i].at[j][...] = codes
                scales_s.at[i, j][...] = scales
            plgpu.commit_smem()
            for j, (_, _, codes, scales, rows, block, part) in enumerate(passes):
                plgpu.copy_smem_to_gmem(codes_s[i].at[j], codes.at[rows, part])
                plgpu.copy_smem_to_gmem(scales_s.at[i, j], scales.at[block, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    n, padded_m = columns * num_outputs, m_tiles * tile_rows
    out_types = []
    if by_row:
        # Scales in whole tiles: what Mosaic makes a bulk copy is not clipped.
        rows = operands[0].array.shape[0]
        out_types += [((rows, n), E4M3), ((n // BLOCK, padded_m), jnp.float32)]
    if by_column:
        out_types += [((n, padded_m), E4M3), ((m_tiles, n), jnp.float32)]
    codes_s = smem((by_row + by_column, tile_rows, BLOCK), E4M3)
    tile_s = plgpu.RefUnion(smem((tile_rows, BLOCK), dtype), codes_s)
    num_loads = len(operands) + len(row_vectors) + len(column_vectors)
    outs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*t) for t in out_types],
        grid=(m_tiles, k_tiles),
        grid_names=("m", "k"),
        scratch_types=(
            [codes_s] * spare + [tile_s] * len(operands),
            plgpu.SMEM((num_outputs, 2, tile_rows), jnp.float32),
            plgpu.SMEM((max(len(row_vectors), 1), tile_rows), jnp.float32),
            plgpu.SMEM((max(len(column_vectors), 1), BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=num_loads),
        ),
        compiler_params=plgpu.CompilerParams(
            # For the transform's exponential.
            approx_math=True,
            reduction_scratch_bytes=SCRATCH_BYTES,
        ),
        interpret=interpret,
    )(*[t.array for t in operands], *row_vectors, *column_vectors)
    out = Quantized()
    if by_row:
        out = out._replace(codes=outs[0][:m], scales=outs[1][:, :m])
    if by_column:
        out = out._replace(codes_t=outs[-2][:, :m], scales_t=outs[-1])
    return out


def _tile_rows(m: int, k_tiles: int) -> int:
    """The smallest tiles that are all resident at once: latency before throughput."""
    for rows in (8, 32):
        if pl.cdiv(m, rows) * k_tiles <= _MAX_RESIDENT_TILES:
            return rows
    return BLOCK


def pad(x: Array, multiples: tuple[int, ...], value: float = 0) -> Array:
    """Pads axes up to multiples with ``value``; ``x`` itself if none needs it."""
    widths = [
        (0, -n % multiple) for n, multiple in zip(x.shape, multiples, strict=True)
    ]
    if not any(after for _, after in widths):
        return x
    return jnp.pad(x, widths, constant_values=value)


def wide_rows(dtype: jnp.dtype) -> Any:
    """The layout of [rows, 128] in which a thread holds 16 bytes of a row."""
    vector = 16 // jnp.dtype(dtype).itemsize
    if vector == 4:
        tiling, warps, lanes = ((4, BLOCK), (vector,)), -3, (-2,)
    else:
        tiling, warps, lanes = ((8, BLOCK), (2, BLOCK), (vector,)), -5, (-3, -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=(warps,), lane_dims=lanes, vector_dim=-1
    )


def ptx(name: str, x: Float[Array, "..."], *, layout: Any) -> Float[Array, "..."]:
    """A unary float32 instruction for every element."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def apply(_, x):
        return x._pointwise(x._lift_fast_instr(name))

    return apply(x)


def quantize_values(
    x: Float[Array, "*rows 128"], layout: Any, interpret: Interpret
) -> tuple[Float8e4m3fn[Array, "*rows 128"], Float[Array, "*rows"]]:
    """Codes and scales of blocks along the last axis of values in registers."""
    axis = x.ndim - 1
    amax = jnp.max(jnp.abs(x), axis=axis).astype(jnp.float32)
    scale, inverse = scale_and_inverse(amax, layout.reduce(axis), interpret)
    inverse = lax.broadcast_in_dim(inverse, x.shape, range(axis))
    return (x.astype(jnp.float32) * inverse).astype(E4M3), scale


def scale_and_inverse(
    amax: Float[Array, "..."], layout: Any, interpret: Interpret
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The scale of a block and its correctly rounded reciprocal."""
    scale = amax * _ONE_OVER_MAX
    scale = jnp.where(amax < _AMAX_FLOOR, jnp.ones_like(scale), scale)
    if interpret is None:
        # Mosaic's division is approximate.
        return scale, ptx("rcp.rn.f32", scale, layout=layout)
    return scale, 1.0 / scale


def smem(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory in tiles of 8 rows of 128 bytes, swizzled."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
