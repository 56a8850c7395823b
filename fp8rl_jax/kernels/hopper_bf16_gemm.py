"""Bfloat16 matrix products for Hopper whose bits depend on no shape.

Libraries pick a kernel, and splits of K, by the number of rows, so a sampler and a
trainer get different last bits for the same row. Here an element of the product is one
chain of wgmma instructions over K, ascending, in one float32 accumulator, whatever the
tile, the cluster and the number of rows: configurations differ in speed, never in a
bit.

One persistent, warp-specialised kernel: a producer warpgroup fills a ring of stages in
shared memory, each of the others multiplies 64 rows of the tile.

:func:`head_logits` ends in the statistics that a log-sum-exp needs, per 128 columns:
they too are computed in one order.

References:
  He and Thinking Machines Lab. "Defeating Nondeterminism in LLM Inference", 2025.
  Milakov and Gimelshein. "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import dataclasses
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from fp8rl_jax.kernels.hopper_quantize_tiles import pad

STATISTICS_COLUMNS = 128  # that share a maximum and a sum of exponentials

_SLAB = 64  # rows of one wgmma instruction: what a compute warpgroup owns
_STEP = 64  # of K in a stage: 128 bytes, a swizzled row of shared memory
_ROW = 128  # bytes of it
_TMA_ROWS = 8  # TMA moves swizzled tiles of so many rows and drops only whole ones
_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
# Registers a thread, by number of compute warpgroups, out of 65,536 a multiprocessor.
_COMPUTE_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = 24
_NUM_SMS = 132  # of an H100 SXM or H200; others only run a second, partial wave
_MAX_STAGES = 16
# Shared memory of a thread block for stages and results: barriers and gaps set aside.
_SMEM_BYTES = 232_448 - 3 * 1024
_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256)
_LOG2_E = float(np.float32(math.log2(math.e)))


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """How the work is cut; it changes the speed of the kernel, not its result.

    Attributes:
      warpgroups: compute warpgroups of a thread block: 64 rows of the tile each.
      tile_n: columns of the tile: a multiple of 16 up to 256; of 128 for
        :func:`head_logits`.
      cluster: thread blocks that share loads by multicast: neighbours along
        ``cluster_axis``, which read the same operand on the other axis.
      cluster_axis: "m" or "n".
      stages: steps of K that are loaded ahead; as many as fit if None.
      raster: clusters along M that are visited before the next step along N.
    """

    warpgroups: int = 2
    tile_n: int = 256
    cluster: int = 2
    cluster_axis: Literal["m", "n"] = "m"
    stages: int | None = None
    raster: int = 8


def bf16_gemm(
    a: BFloat16[Array, "M K"],
    b: BFloat16[Array, "N K"],
    *,
    out_dtype: jnp.dtype = jnp.bfloat16,
    config: GemmConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "M N"]:
    """a b^T, of which an element's bits depend on its row of a and of b alone.

    Args:
      a: of any number of rows. Copied where M is below 64 or no multiple of 8.
      b: copied where N is no multiple of 8; both where K is no multiple of 64.
      out_dtype: bfloat16 or float32.
      config: how to cut the work; :func:`choose_config` if None.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    _check("b", a, b)
    m, n = a.shape[0], b.shape[0]
    out = _launch(
        _pad_rows(a),
        pad(b, (_TMA_ROWS, _STEP)),
        n=n,
        out_dtype=out_dtype,
        config=config or choose_config(m, n),
        interpret=interpret,
    )
    return out if out.shape == (m, n) else out[:m, :n]


def head_logits(
    hidden: BFloat16[Array, "M D"],
    head: BFloat16[Array, "V D"],
    bounds: Int[Array, "N 3"],
    index: Int[Array, ""],
    inverse_temperature: Float[Array, "M"],
    *,
    num_columns: int = 4096,
    config: GemmConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "M C"], Float[Array, "2 C/128 M"]]:
    """Logits of a chunk of the vocabulary and, per 128 of them, their exponentials.

    The bits of a row depend on this row alone. The sum of a tile of 128 columns is
    that of ex2((logit - maximum) * log2 e): a tree over columns equal modulo 8, then
    over these.

    Args:
      hidden: final hidden states.
      head: the whole output head: of it C rows are read and none is copied, if V is a
        multiple of 8.
      bounds: int32: of each chunk, the first of these rows, a multiple of 8; the first
        column, counted from it, that counts; and where those that count end. The
        others are masked.
      index: int32: the chunk. (The table is an operand, so that a loop over chunks
        needs no kernel to take its bounds from it.)
      inverse_temperature: float32: what a row's logits are multiplied by.
      num_columns: C, a multiple of 128.
      config: how to cut the work; :func:`choose_config` if None.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Returns:
      float32 logits, -inf where masked; the maximum of each tile and, after all of
      these, the sum of exp(logit - maximum). -inf and 0 for a tile that is masked as a
      whole.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    _check("head", hidden, head)
    if num_columns % STATISTICS_COLUMNS or not num_columns:
        raise ValueError(
            f"The columns come in tiles of {STATISTICS_COLUMNS}, got {num_columns}."
        )
    m, tiles = hidden.shape[0], num_columns // STATISTICS_COLUMNS
    if config is None:
        config = choose_config(m, num_columns, (128, 256))
    if config.tile_n % STATISTICS_COLUMNS:
        raise ValueError(
            f"Tiles of {config.tile_n} columns hold no whole {STATISTICS_COLUMNS}."
        )
    logits, statistics = _launch(
        _pad_rows(hidden),
        pad(head, (_TMA_ROWS, _STEP)),
        n=num_columns,
        out_dtype=jnp.float32,
        config=config,
        chunk=(bounds, index.reshape(1)),
        factors=inverse_temperature,
        interpret=interpret,
    )
    if logits.shape[0] != m:
        logits = logits[:m]
    return logits, statistics[:, :tiles, :m]


def choose_config(m: int, n: int, widths: tuple[int, ...] = _WIDTHS) -> GemmConfig:
    """The configuration of a product, by a rule.

    A tile's step of K takes as long as it multiplies or loads, whichever is longer, and
    a little more. The tiles are those that need the least time in all; ties go to the
    larger. Pairs of thread blocks share the longer operand where that leaves none
    without a partner.
    """

    def counts(tile):
        warpgroups, width = tile
        return {"m": pl.cdiv(m, _SLAB * warpgroups), "n": pl.cdiv(n, width)}

    def cost(tile):
        rows, width = _SLAB * tile[0], tile[1]
        waves = pl.cdiv(math.prod(counts(tile).values()), _NUM_SMS)
        # In cycles, of 2048 multiply-adds or 64 bytes from the L2 cache each.
        return waves * (64 + max(rows * width / 32, 2 * (rows + width)))

    tiles = itertools.product((2, 1), sorted(widths, reverse=True))
    warpgroups, width = tile = min(tiles, key=cost)
    for axis in ("m", "n") if width >= _SLAB * warpgroups else ("n", "m"):
        if counts(tile)[axis] % 2 == 0:
            return GemmConfig(warpgroups, width, 2, axis)
    return GemmConfig(warpgroups, width, 1)


def _check(name, a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1:] != b.shape[1:] or not a.shape[1]:
        raise ValueError(f"{a.shape} and {name} {b.shape} are no [M, K] and [N, K].")
    if a.dtype != jnp.bfloat16 or b.dtype != jnp.bfloat16:
        raise ValueError(
            f"The operands must be bfloat16, got {a.dtype.name} and {b.dtype.name}."
        )


def _pad_rows(a):
    # The rows past the end of a partly filled tile cost more to clip than to read.
    return pad(a, (_SLAB if a.shape[0] < _SLAB else _TMA_ROWS, _STEP))


def _smem(shape, dtype):
    """Shared memory in the layout of TMA and wgmma, rows of up to 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    row = min(_ROW, shape[-1] * itemsize)
    tiling = plgpu.TilingTransform((8, row // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row)))


def _sum_exp(x, maxima, interpret):
    """[64, 128] -> [64]: sums of exp(x - maximum).

    In explicit instructions and one order, so that no compiler has a say.
    """
    if interpret is not None:
        return jnp.sum(jnp.exp2((x - maxima[:, None]) * _LOG2_E), 1)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA),
        return_type=plgpu.ShapeDtypeStruct((_SLAB,), jnp.float32, layout=_ROWS),
    )
    def apply(_, x, maxima):
        for name, *operands in (
            ("sub.rn.f32", maxima),
            ("mul.rn.f32", _LOG2_E),
            ("ex2.approx.ftz.f32",),
        ):
            x = x._pointwise(x._lift_fast_instr(name), *operands)
        parts = [x[:, j : j + 8] for j in range(0, STATISTICS_COLUMNS, 8)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [even + odd for even, odd in pairs]
        return parts[0].reduce("add", 1)

    return apply(x, lax.broadcast_in_dim(maxima, x.shape, [0]))


def _launch(
    a,
    b,
    *,
    n,
    out_dtype,
    config,
    chunk=None,
    factors=None,
    interpret=None,
):
    c, with_statistics = config, chunk is not None
    m, k = a.shape
    num_k = k // _STEP
    tile_m, tile_n = _SLAB * c.warpgroups, c.tile_n
    along_m, along_n = (c.cluster, 1) if c.cluster_axis == "m" else (1, c.cluster)
    grid = (pl.cdiv(m, tile_m * along_m), pl.cdiv(n, tile_n * along_n))
    groups = tile_n // STATISTICS_COLUMNS if with_statistics else 0
    # Columns that one store takes; two stores are under way where memory is left.
    itemsize = jnp.dtype(out_dtype).itemsize
    store_n = math.gcd(tile_n, _ROW // itemsize)
    store_bytes = c.warpgroups * _SLAB * store_n * itemsize
    stage_bytes = (tile_m + tile_n) * _STEP * 2
    free = _SMEM_BYTES - tile_m * 2 * groups * 4 - store_bytes
    stages = c.stages or min(free // stage_bytes, _MAX_STAGES)
    buffers = 2 if free - stages * stage_bytes >= store_bytes else 1

    def body(a, b, *refs):
        if with_statistics:
            bounds, index, factors, out, statistics, *scratch, statistics_s = refs
        else:
            out, *scratch = refs
        a_s, b_s, out_s, full, empty = scratch
        wg, cta = lax.axis_index("wg"), lax.axis_index("cluster")

        def for_each_tile(visit):
            """Calls visit(first row, first column, step): the same walk for all."""

            @plgpu.nd_loop(
                (math.prod(grid),), collective_axes="sm", init_carry=jnp.int32(0)
            )
            def step_count(loop_info, carry):
                mi, ni = plgpu.planar_snake(loop_info.index[0], grid, 0, c.raster)
                mi = mi * along_m + (cta if along_m > 1 else 0)
                ni = ni * along_n + (cta if along_n > 1 else 0)
                visit(mi * tile_m, ni * tile_n, carry)
                return carry + num_k

            return step_count

        @pl.when(wg == c.warpgroups)
        def _produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            start = bounds[index[0], 0] if with_statistics else 0

            def visit(first_m, first_n, first_step):
                rows = pl.ds(first_m, tile_m)
                columns = pl.ds(pl.multiple_of(start + first_n, _TMA_ROWS), tile_n)

                def load(ki, _):
                    step = first_step + ki
                    slot = lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(empty.at[slot])

                    def copy(source, target, multicast):
                        plgpu.copy_gmem_to_smem(
                            source,
                            target.at[slot],
                            full.at[slot],
                            collective_axes="cluster" if multicast else None,
                        )

                    part = pl.ds(ki * _STEP, _STEP)
                    copy(a.at[rows, part], a_s, along_n > 1)
                    copy(b.at[columns, part], b_s, along_m > 1)

                lax.fori_loop(0, num_k, load, None)

            step_count = for_each_tile(visit)

            # Every completed phase of a barrier must be observed.
            def drain(i, _):
                @pl.when(step_count + i >= stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[lax.rem(step_count + i, stages)])

            lax.fori_loop(0, stages, drain, None)

        @pl.when(wg < c.warpgroups)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[c.warpgroups], action="increase")
            slab = pl.ds(wg * _SLAB, _SLAB)
            if with_statistics:
                first, last = (bounds[index[0], i] for i in (1, 2))

            def visit(first_m, first_n, first_step):
                if with_statistics:  # under way while the tile is multiplied
                    factor = plgpu.load(
                        factors.at[pl.ds(first_m + wg * _SLAB, _SLAB)],
                        layout=_ROWS,
                        optimized=False,
                    )

                def multiply(acc):
                    def issue(step):
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, a_s.at[slot, slab], b_s.at[slot].T)

                    def release(step):
                        plgpu.barrier_arrive(empty.at[lax.rem(step, stages)])

                    def advance(ki, _):
                        issue(first_step + ki)
                        plgpu.wgmma_wait(1)
                        release(first_step + ki - 1)

                    issue(first_step)
                    lax.fori_loop(1, num_k, advance, None)
                    product = acc[...]
                    release(first_step + num_k - 1)
                    return product

                product = pl.run_scoped(
                    multiply, plgpu.ACC((_SLAB, tile_n), jnp.float32)
                )
                # The stores of the tile before have long read their buffers.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if with_statistics:
                    parts = [judge(product, factor, i, first_n) for i in range(groups)]
                else:
                    parts = [product.astype(out_dtype)]
                store(parts, first_m, first_n)

            def judge(product, factor, group, first_n):
                """Masked logits of a group of columns; keeps their statistics."""
                start = group * STATISTICS_COLUMNS
                logits = product[:, start : start + STATISTICS_COLUMNS]
                logits *= lax.broadcast_in_dim(factor, logits.shape, [0])
                ids = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_WGMMA)
                ids += first_n + start
                counts = (ids >= first) & (ids < last)
                logits = jnp.where(counts, logits, -jnp.inf)
                maxima = jnp.max(logits, axis=1)
                # Where all is masked, exponentials of -inf minus a number.
                finite = jnp.where(maxima == -jnp.inf, 0.0, maxima)
                statistics_s.at[wg, 0, group][...] = maxima
                statistics_s.at[wg, 1, group][...] = _sum_exp(logits, finite, interpret)
                return logits

            def store(parts, first_m, first_n):
                rows = pl.ds(first_m + wg * _SLAB, _SLAB)
                width = tile_n // len(parts)
                for i in range(tile_n // store_n):
                    part, j = divmod(i * store_n, width)
                    buffer = out_s.at[wg, i % buffers]
                    if i >= buffers:
                        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                    buffer[...] = parts[part][:, j : j + store_n]
                    plgpu.commit_smem()
                    columns = pl.ds(first_n + i * store_n, store_n)
                    plgpu.copy_smem_to_gmem(buffer, out.at[rows, columns])
                if with_statistics:
                    tiles = pl.ds(first_n // STATISTICS_COLUMNS, groups)
                    plgpu.copy_smem_to_gmem(
                        statistics_s.at[wg], statistics.at[:, tiles, rows]
                    )

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    arrivals = dict(num_arrivals=c.warpgroups, num_barriers=stages)
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
    else:
        empty = plgpu.Barrier(**arrivals)
    scratch = [
        _smem((stages, tile_m, _STEP), jnp.bfloat16),
        _smem((stages, tile_n, _STEP), jnp.bfloat16),
        _smem((c.warpgroups, buffers, _SLAB, store_n), out_dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty,
    ]
    # TMA drops only whole tiles of columns; statistics are stored in whole tiles.
    columns = n + -n % store_n
    out_type = jax.ShapeDtypeStruct((m, columns), out_dtype)
    operands = (a, b)
    if with_statistics:
        shape = (c.warpgroups, 2, groups, _SLAB)
        scratch.append(plgpu.SMEM(shape, jnp.float32))
        rows = grid[0] * along_m * tile_m
        tiles = grid[1] * along_n * groups
        out_type = (out_type, jax.ShapeDtypeStruct((2, tiles, rows), jnp.float32))
        operands += (*chunk, pad(factors, (rows,)))
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(_NUM_SMS // c.cluster,),
        grid_names=("sm",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*operands)
