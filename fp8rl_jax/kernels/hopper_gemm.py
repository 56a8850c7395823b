"""Block-scaled FP8 matrix products for Hopper: wgmma on e4m3 codes, fed by TMA.

One persistent, warp-specialised kernel serves every product. A producer warpgroup fills
a ring of stages in shared memory; every other warpgroup owns 64 rows of the tile. For
every block of 128 along K, ascending, a fresh accumulator takes four wgmma instructions
and is promoted, ``acc += partial * (a_scale * b_scale)`` in float32, because Hopper's
FP8 accumulator keeps only some 14 bits. An element of the result sees the same
operations in the same order whatever the tile, the cluster and the number of rows:
configurations differ in speed, never in a bit.

References:
  DeepSeek-AI. "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Int

from fp8rl_jax.kernels import tuning
from fp8rl_jax.kernels.hopper_quantize_tiles import BLOCK, E4M3, pad

_SLAB = 64  # rows of one wgmma instruction: what a compute warpgroup owns
_ROW = 128  # bytes of a swizzled row of shared memory
_Layout = plgpu.Layout
# Registers a thread, by number of compute warpgroups, out of 65,536 a multiprocessor.
_COMPUTE_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = 24
_NUM_SMS = 132  # of an H100 SXM or H200; others only run a second, partial wave


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """How the work is cut; it changes the speed of the kernel, not its result.

    Attributes:
      warpgroups: compute warpgroups of a thread block: 64 rows of the tile each.
      tile_n: columns of the tile: 32, 64, 128 or 192.
      stages: K blocks that are loaded ahead.
      unroll: K blocks unrolled: ptxas then promotes one while the next multiplies, and
        the scales of the weight are fetched that far ahead. Where it does not divide
        K/128, their greatest common divisor takes its place.
      in_flight: partial products that a warpgroup has in flight; more than one needs
        small tiles.
      cluster: thread blocks that share loads by multicast: neighbours along
        ``cluster_axis``, which read the same operand on the other axis.
      cluster_axis: "m" or "n".
      raster: tiles along M that are visited before the next step along N.
    """

    warpgroups: int = 3
    tile_n: int = 128
    stages: int = 4
    unroll: int = 2
    in_flight: int = 1
    cluster: int = 2
    cluster_axis: Literal["m", "n"] = "n"
    raster: int = 16


def _swizzled(dtype: jnp.dtype, columns: int) -> tuple:
    """TMA and wgmma layout of rows of ``columns`` elements."""
    row = min(_ROW, columns * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, row // jnp.dtype(dtype).itemsize))
    return tiling, plgpu.SwizzleTransform(row)


def scaled_gemm(
    a: Float8e4m3fn[Array, "M K"],
    b: Float8e4m3fn[Array, "N K"],
    a_scales: Float[Array, "k M"],
    b_scales: Float[Array, "n k"],
    *,
    out_dtype: jnp.dtype = jnp.bfloat16,
    b_block_rows: Literal[1, 128] = BLOCK,
    config: GemmConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "M N"]:
    """a b^T of block-scaled codes: forward and dgrad, or wgrad.

    Args:
      a: codes, K a multiple of 128.
      b: codes.
      a_scales: float32 [K/128, M]: one per row and block of K.
      b_scales: float32 [ceil(N/128), K/128] if ``b_block_rows`` is 128 (a weight), or
        [K/128, N] if it is 1 (activations, in wgrad).
      out_dtype: bfloat16 or float32.
      b_block_rows: rows of ``b`` that share a scale.
      config: how to cut the work; :func:`choose_config` if None.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Raises:
      ValueError: shapes do not fit.
    """
    _check(a, b, a_scales, b_scales, b_block_rows)
    m, n = a.shape[0], b.shape[0]
    by_row = b_block_rows == 1
    config = config or choose_config(m, n, a.shape[1], by_row)
    # The rows past the end of a partly filled tile cost more to clip than to read.
    rows = _SLAB if m < _SLAB else 8
    a, a_scales = pad(a, (rows, 1)), pad(a_scales, (1, rows))
    b = pad(b, (BLOCK, 1))
    if by_row:
        b_scales = pad(b_scales, (1, BLOCK))
    out = _launch(
        a,
        b,
        a_scales,
        b_scales,
        b_by_row=by_row,
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )
    return out if out.shape == (m, n) else out[:m, :n]


def scaled_gemm_into(
    buffer: jax.Ref,
    layer: Int[Array, ""],
    a: Float8e4m3fn[Array, "M K"],
    b: Float8e4m3fn[Array, "N K"],
    a_scales: Float[Array, "k M"],
    b_scales: Float[Array, "k N"],
    *,
    config: GemmConfig | None = None,
) -> None:
    """buffer[layer] += a b^T in place: wgrad accumulated over micro-batches.

    The product is added where it is stored (TMA reduction), so the sum costs no pass of
    its own and no array of the product's size exists.

    Args:
      buffer: reference to a float32 array [L, M, N], M and N multiples of 128.
      layer: index into it.
      a: codes, K a multiple of 128.
      b: codes.
      a_scales: float32 [K/128, M].
      b_scales: float32 [K/128, N].
      config: how to cut the work; :func:`choose_config` if None.

    Raises:
      ValueError: shapes do not fit.
    """
    _check(a, b, a_scales, b_scales, 1)
    m, n = a.shape[0], b.shape[0]
    blocks = m % BLOCK == n % BLOCK == 0
    if buffer.shape[1:] != (m, n) or buffer.dtype != jnp.float32 or not blocks:
        raise ValueError(
            f"The buffer must be float32 [L, {m}, {n}] with whole blocks of {BLOCK}, "
            f"got {buffer.dtype} {buffer.shape}."
        )
    config = config or choose_config(m, n, a.shape[1], True)
    _launch(
        a,
        b,
        a_scales,
        b_scales,
        b_by_row=True,
        out_dtype=jnp.float32,
        config=config,
        into=buffer,
        layer=layer,
    )


def choose_config(m: int, n: int, k: int, b_by_row: bool) -> GemmConfig:
    """The configuration of a product: tuned for its shape, else that of a rule."""
    if b_by_row:
        return GemmConfig(unroll=1)
    tuned = tuning.lookup("hopper_gemm", m, n, k)
    if tuned is not None:
        return GemmConfig(**tuned)
    # A decode step reads weights: enough thread blocks to pull from all of the memory,
    # then tiles as large as that allows.
    wide = n >= 12288
    if m <= 64:
        tile_n, stages = (64, 12) if n >= 6144 else (32, 16)
        return GemmConfig(1, tile_n, stages, unroll=4, in_flight=4, cluster=1)
    if m <= 128 and not wide:
        return GemmConfig(1, 64, 12, unroll=4, in_flight=4, cluster=1)
    if m <= 512 and (wide or (m > 256 and n >= 6144)):
        return GemmConfig(2, 192, 4, unroll=1, cluster=1)
    if m <= 256:
        return GemmConfig(2, 64, 8, unroll=4, in_flight=2, cluster=1)
    return GemmConfig(2, 128, 5) if m <= 512 else GemmConfig()


def _check(a, b, a_scales, b_scales, b_block_rows):
    (m, k), n, num_k = a.shape, b.shape[0], a.shape[1] // BLOCK
    expected = {
        "b": (b, E4M3, (n, k)),
        "a_scales": (a_scales, jnp.float32, (num_k, m)),
        "b_scales": (
            b_scales,
            jnp.float32,
            (num_k, n) if b_block_rows == 1 else (pl.cdiv(n, BLOCK), num_k),
        ),
    }
    if a.dtype != E4M3 or k % BLOCK or not k:
        raise ValueError(
            f"a must be e4m3 [M, K] with K in blocks of {BLOCK}, got {a.dtype.name} "
            f"{a.shape}."
        )
    for name, (x, dtype, shape) in expected.items():
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name} {shape} for a of shape "
                f"{a.shape}, got {x.dtype.name} {x.shape}."
            )


def _launch(
    a,
    b,
    a_scales,
    b_scales,
    *,
    b_by_row,
    out_dtype,
    config,
    into=None,
    layer=None,
    interpret=None,
):
    c = config
    (m, k), n = a.shape, b.shape[0]
    num_k = k // BLOCK
    tile_m, tile_n = _SLAB * c.warpgroups, c.tile_n
    along_m, along_n = (c.cluster, 1) if c.cluster_axis == "m" else (1, c.cluster)
    grid = (pl.cdiv(m, tile_m * along_m), pl.cdiv(n, tile_n * along_n))
    unroll = math.gcd(num_k, c.unroll)
    in_flight = math.gcd(unroll, c.in_flight)
    # Columns that share the scale of a weight: a tile of 192 straddles its blocks.
    group_n = 64 if tile_n % BLOCK and tile_n > BLOCK else tile_n
    groups = [pl.ds(j, group_n) for j in range(0, tile_n, group_n)]
    # Columns that one store takes, and whether two stores can be under way: where the
    # stages leave shared memory for them.
    itemsize = jnp.dtype(out_dtype).itemsize
    store_n = min(group_n, _ROW // itemsize)
    buffers = 2 if c.warpgroups < 3 and store_n < tile_n and itemsize == 2 else 1

    def body(a, b, a_scales, b_scales, *refs):
        if into is None:
            out, a_s, b_s, a_scales_s, b_scales_s, out_s, full, empty = refs
        else:
            layer, a_s, b_s, a_scales_s, b_scales_s, out_s, full, empty = refs
            out = into.at[layer[0]]
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

            def visit(first_m, first_n, first_step):
                rows, columns = pl.ds(first_m, tile_m), pl.ds(first_n, tile_n)

                def load(ki, _):
                    step = first_step + ki
                    slot = lax.rem(step, c.stages)

                    @pl.when(step >= c.stages)
                    def _wait():
                        plgpu.barrier_wait(empty.at[slot])

                    def copy(source, target, multicast=False):
                        plgpu.copy_gmem_to_smem(
                            source,
                            target.at[slot],
                            full.at[slot],
                            collective_axes="cluster" if multicast else None,
                        )

                    block = pl.ds(ki * BLOCK, BLOCK)
                    copy(a.at[rows, block], a_s, multicast=along_n > 1)
                    copy(b.at[columns, block], b_s, multicast=along_m > 1)
                    copy(a_scales.at[ki, rows], a_scales_s)
                    if b_by_row:
                        copy(b_scales.at[ki, columns], b_scales_s)

                lax.fori_loop(0, num_k, load, None)

            step_count = for_each_tile(visit)

            # Every completed phase of a barrier must be observed.
            def drain(i, _):
                @pl.when(step_count + i >= c.stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[lax.rem(step_count + i, c.stages)])

            lax.fori_loop(0, c.stages, drain, None)

        @pl.when(wg < c.warpgroups)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[c.warpgroups], action="increase")
            slab = pl.ds(wg * _SLAB, _SLAB)

            def visit(first_m, first_n, first_step):
                def weight_scales(ki):
                    """One per group of columns; nothing where every row has its own."""
                    if b_by_row:
                        return ()
                    ki = jnp.minimum(ki, num_k - 1)
                    blocks = [(first_n + g.start) // BLOCK for g in groups]
                    last = b_scales.shape[0] - 1
                    return tuple(b_scales[jnp.minimum(i, last), ki] for i in blocks)

                def promote(accs, partial, slot, weights):
                    shape = (_SLAB, group_n)
                    rows = plgpu.load(
                        a_scales_s.at[slot, slab], layout=_Layout.WGMMA.reduce(1)
                    )
                    if b_by_row:
                        columns = plgpu.load(
                            b_scales_s.at[slot], layout=_Layout.WGMMA.reduce(0)
                        )
                        scale = lax.broadcast_in_dim(rows, shape, [0])
                        scale *= lax.broadcast_in_dim(columns, shape, [1])
                        return (accs[0] + partial * scale,)
                    return tuple(
                        acc
                        + partial[:, g.start : g.start + group_n]
                        * lax.broadcast_in_dim(rows * weight, shape, [0])
                        for acc, g, weight in zip(accs, groups, weights, strict=True)
                    )

                def multiply(i, carry):
                    """``unroll`` blocks of K, ``in_flight`` of them at a time."""
                    accs, weights = carry
                    first = i * unroll
                    following = [
                        weight_scales(first + unroll + j) for j in range(unroll)
                    ]

                    def issue(j, pending, accs):
                        if len(pending) == in_flight:
                            for wait_n, (partial, slot, weight) in zip(
                                reversed(range(in_flight)), pending, strict=True
                            ):
                                value = plgpu.wgmma_accumulator_load(
                                    partial, wait_n=wait_n
                                )
                                accs = promote(accs, value, slot, weight)
                                plgpu.barrier_arrive(empty.at[slot])
                            return accs
                        slot = lax.rem(first_step + first + j, c.stages)
                        plgpu.barrier_wait(full.at[slot])

                        def scoped(partial):
                            plgpu.wgmma(partial, a_s.at[slot, slab], b_s.at[slot].T)
                            return issue(
                                j + 1, [*pending, (partial, slot, weights[j])], accs
                            )

                        return pl.run_scoped(
                            scoped, plgpu.ACC((_SLAB, tile_n), jnp.float32)
                        )

                    for j in range(0, unroll, in_flight):
                        accs = issue(j, [], accs)
                    return accs, following

                zeros = jnp.zeros((_SLAB, group_n), jnp.float32)
                accs = tuple(plgpu.layout_cast(zeros, _Layout.WGMMA) for _ in groups)
                weights = [weight_scales(j) for j in range(unroll)]
                accs, _ = lax.fori_loop(0, num_k // unroll, multiply, (accs, weights))
                store([acc.astype(out_dtype) for acc in accs], first_m, first_n)

            def store(groups, first_m, first_n):
                rows = pl.ds(first_m + wg * _SLAB, _SLAB)
                for i in range(tile_n // store_n):
                    group, j = divmod(i * store_n, group_n)
                    buffer = out_s.at[wg, i % buffers]
                    # The first one may meet the last of the tile before in its buffer.
                    under_way = buffers - 1 if i else 0
                    plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
                    buffer[...] = groups[group][:, j : j + store_n]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        buffer,
                        out.at[rows, pl.ds(first_n + i * store_n, store_n)],
                        reduction_op=None if into is None else "add",
                    )

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    arrivals = dict(num_arrivals=c.warpgroups, num_barriers=c.stages)
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
    else:
        empty = plgpu.Barrier(**arrivals)

    def smem(shape, dtype, swizzled=False):
        transforms = _swizzled(dtype, shape[-1]) if swizzled else ()
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    operands = (a, b, a_scales, b_scales)
    if into is not None:
        operands += (jnp.reshape(layer, (1,)),)
    return plgpu.kernel(
        body,
        out_type=() if into is not None else jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(_NUM_SMS // c.cluster,),
        grid_names=("sm",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            smem((c.stages, tile_m, BLOCK), E4M3, swizzled=True),
            smem((c.stages, tile_n, BLOCK), E4M3, swizzled=True),
            smem((c.stages, tile_m), jnp.float32),
            # Not used with weights, whose scales are read from global memory.
            smem((c.stages, tile_n) if b_by_row else (1, 32), jnp.float32),
            smem((c.warpgroups, buffers, _SLAB, store_n), out_dtype, swizzled=True),
            plgpu.Barrier(num_arrivals=3 + b_by_row, num_barriers=c.stages),
            empty,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(*operands)
