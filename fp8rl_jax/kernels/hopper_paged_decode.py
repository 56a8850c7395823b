"""Decode attention over a paged cache for Hopper: one query a sequence.

Bound by memory: every visible key and value is read once. The products are swapped, so
that the tokens of a page are the rows of wgmma and the few query heads of a KV head its
columns: S^T [128 tokens, 8] = K q^T, then O^T [H, 8] += V^T P^T. S^T crosses shared
memory once, after which a warp owns whole heads and softmax needs no other warp.

A producer warpgroup fills a ring of pages and runs ahead over the borders of sequences;
a compute warpgroup follows. A thread block takes several pairs of sequence and KV head,
dealt in a snake from the longest to the shortest.

The arithmetic of a row is that of the prefill kernel, operation by operation, so that
the result has the same bits; it depends neither on the other sequences nor on their
order.

References:
  Milakov and Gimelshein. "Online normalizer calculation for softmax", arXiv:1805.02867.
  Shah et al. "FlashAttention-3", arXiv:2407.08608, on FP8 layouts of P and V.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import Array, BFloat16, Float, Int

from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, ptx, smem
from fp8rl_jax.kernels.hopper_value_pages import (
    HEAD_DIM,
    VALUE_PAGE,
    for_copies,
    in_columns,
    multiply_transposed,
)

PAGE = 128  # tokens
_TMA_ALIGNMENT = 128  # bytes
_TILE_ROWS = 8  # of a swizzled tile: query heads that one wgmma multiplies
_NUM_SMS = 132  # of an H100 SXM or H200
_SCORE_PITCH = PAGE + 4  # floats; conflict-free for the fragment's transposed store
_LOG2_SCALE = float(np.float32(HEAD_DIM**-0.5 * math.log2(math.e)))
# P is scaled by 2^8, the largest power below 448, before its cast to e4m3.
_P_EXPONENT = 8

_WGMMA = plgpu.Layout.WGMMA
# [heads, 128 tokens]: a warp owns heads, lane 4J + t tokens 16J + {2t, 2t+1, 2t+8,
# 2t+9}.
_TOKENS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, PAGE), (16,), (8,), (2,))),
    warp_dims=(-5,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
# [heads, 8]: sums over the tokens of a residue modulo 8, in the lanes that hold them.
_RESIDUES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 8), (2,))),
    warp_dims=(-3,),
    lane_dims=(fa.Replicated(8), -2),
    vector_dim=-1,
)
_HEADS = _TOKENS.reduce(1)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut; it changes the speed of the kernel, not its result.

    Attributes:
      stages: pages that are loaded ahead.
      blocks_per_sm: thread blocks of a multiprocessor, each of which takes several
        pairs of sequence and KV head; None for one thread block a pair.
    """

    stages: int = 3
    blocks_per_sm: int | None = 2


def paged_decode(
    q: Float[Array, "B K G H"],
    k: Float[Array, "L P K T H"],
    v: Float[Array, "L P K *page"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
    layer: Int[Array, ""],
    *,
    q_scales: Float[Array, "B K G"] | None = None,
    k_scales: Float[Array, "L P K T"] | None = None,
    v_scales: Float[Array, "L P K T"] | None = None,
    order: Int[Array, "B"] | None = None,
    config: DecodeConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> BFloat16[Array, "B K G H"]:
    """softmax(q K^T / sqrt(H)) V of one query a sequence over its pages of the cache.

    Args:
      q: e4m3 codes, or bfloat16; at most 8 query heads a KV head, H = 128.
      k: e4m3 codes, or bfloat16: pages of T = 128 tokens of every layer.
      v: e4m3 [L, P, K, T/16, H, 16], see `hopper_value_pages`; or bfloat16
        [L, P, K, T, H].
      page_table: int32: which page holds tokens 128 i to 128 i + 127 of a sequence.
      lengths: int32: keys visible to the query. The output of an empty slot (0) is 0.
      layer: int32: index into the pools, which are neither sliced nor copied.
      q_scales: float32 powers of two; with codes only, like the other scales.
      k_scales: float32 powers of two, tokens in their own order.
      v_scales: likewise.
      order: int32: the sequences by descending length; sorted here if None.
      config: how to cut the work; chosen by dtype if None.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    scales = (q_scales, k_scales, v_scales)
    if order is None:
        order = jnp.argsort(-lengths)
    _check(q, k, v, scales, page_table, lengths, order)
    fp8 = q.dtype == E4M3
    if config is None:
        config = DecodeConfig() if fp8 else DecodeConfig(blocks_per_sm=1)
    num_seqs, num_kv, group, _ = q.shape
    num_pages = k.shape[1]
    # A KV head's queries must not straddle the tiles of eight rows.
    padded = 1 << (group - 1).bit_length()
    rows = num_seqs * num_kv * padded

    def tiles(x):
        """Query rows in tiles of eight."""
        x = x.reshape(num_seqs * num_kv, group, -1)
        if padded != group:
            x = jnp.pad(x, ((0, 0), (0, padded - group), (0, 0)))
        x = x.reshape(rows, -1)
        if rows % _TILE_ROWS:
            x = jnp.pad(x, ((0, -rows % _TILE_ROWS), (0, 0)))
        return x.reshape(-1, _TILE_ROWS, x.shape[-1])

    def flat(x):
        return x.reshape(-1, *x.shape[3:])

    queries, pages = [tiles(q)], [flat(k), flat(for_copies(v) if fp8 else v)]
    if fp8:
        queries += [tiles(q_scales)[..., 0]]
        pages += [flat(k_scales), flat(v_scales)]
    out = _launch(
        queries,
        pages,
        (page_table, lengths, order, jnp.reshape(layer, (1,))),
        num_kv=num_kv,
        num_pages=num_pages,
        group=group,
        padded=padded,
        config=config,
        interpret=interpret,
    )
    return out.reshape(q.shape)


def _check(q, k, v, scales, page_table, lengths, order):
    num_seqs, num_kv, group, _ = q.shape
    fp8 = q.dtype == E4M3
    pages = (*k.shape[:2], num_kv, PAGE)
    if group > _TILE_ROWS or q.dtype not in (E4M3, jnp.bfloat16):
        raise ValueError(
            f"q must be e4m3 or bfloat16 with at most {_TILE_ROWS} heads a KV head, "
            f"got {q.dtype.name} {q.shape}."
        )
    expected = {
        "q": (q, q.dtype, (num_seqs, num_kv, group, HEAD_DIM)),
        "k": (k, q.dtype, (*pages, HEAD_DIM)),
        "v": (v, q.dtype, (*pages[:3], *(VALUE_PAGE if fp8 else (PAGE, HEAD_DIM)))),
        "page_table": (page_table, jnp.int32, (num_seqs, page_table.shape[-1])),
        "lengths": (lengths, jnp.int32, (num_seqs,)),
        "order": (order, jnp.int32, (num_seqs,)),
    }
    if fp8 != all(s is not None for s in scales) or fp8 == all(
        s is None for s in scales
    ):
        raise ValueError("All three scales go with codes, none with bfloat16.")
    if fp8:
        shapes = (q.shape[:3], pages, pages)
        for name, x, shape in zip("qkv", scales, shapes, strict=True):
            expected[f"{name}_scales"] = (x, jnp.float32, shape)
    for name, (x, dtype, shape) in expected.items():
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name} {shape}, got {x.dtype.name} "
                f"{x.shape}."
            )


def _fma(x, y, z, layout, interpret):
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


def _exp2(x, layout, interpret):
    if interpret is not None:
        return jnp.exp2(x)
    return ptx("ex2.approx.ftz.f32", x, layout=layout)


def _sum_residues(p, interpret):
    """[heads, 128] -> [heads, 8]: over tokens equal modulo 8, bits 3 to 6 in turn."""
    heads = p.shape[0]
    if interpret is not None:
        return p.reshape(heads, PAGE // 8, 8).sum(1)

    @plgpu.inline_mgpu(
        arg_types=(_TOKENS,),
        return_type=plgpu.ShapeDtypeStruct((heads, 8), jnp.float32, layout=_RESIDUES),
    )
    def apply(_, p):
        layout = _RESIDUES.to_mgpu()
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


def _store_transposed(ref, x, interpret):
    """ref[j, i] = x[i, j] of an accumulator."""
    if interpret is not None:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
    def apply(_, ref, x):
        x.foreach(lambda element, index: memref.store(element, ref, index[::-1]))

    apply(ref, x)


def _transpose(x, scratch, first, heads, interpret):
    """Columns ``first`` to ``first + heads`` of an accumulator [128, 8] as rows.

    In the layout of softmax; all warps must be done with what was in ``scratch``.
    """
    shape = (heads, PAGE)
    if interpret is not None:
        return lax.dynamic_slice(x.T, (first, 0), shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _WGMMA, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_TOKENS),
    )
    def apply(_, ref, x, first):
        x.foreach(lambda element, index: memref.store(element, ref, index[::-1]))
        mgpu.utils.warpgroup_barrier()
        first = arith.index_cast(ir.IndexType.get(), first.registers.item())
        rows = mgpu.utils.memref_slice(
            ref, (mgpu.utils.ds(first, heads), slice(0, PAGE))
        )
        layout = _TOKENS.to_mgpu()
        return fa.FragmentedArray.load_untiled(rows, layout=layout, optimized=False)

    return apply(scratch, x, first)


def _store_p(p_s, p, transforms, interpret):
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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _TOKENS))
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
        for i, pair in enumerate(codes.registers.reshape(-1, 2)):
            row = arith.addi(warp, const(4 * i))
            line = arith.addi(arith.muli(row, const(128)), column)
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


def _launch(
    queries, pages, tables, *, num_kv, num_pages, group, padded, config, interpret
):
    dtype = queries[0].dtype
    fp8 = dtype == E4M3
    stages = config.stages
    num_seqs, max_pages = tables[0].shape
    num_items = num_seqs * num_kv
    num_blocks = num_items
    if config.blocks_per_sm is not None:
        num_blocks = min(num_items, _NUM_SMS * config.blocks_per_sm)
    # Rows of softmax: one warp has one head, or two.
    heads = 4 if padded <= 4 else 8
    shape = (heads, PAGE)
    operand = smem((_TILE_ROWS, PAGE), dtype)

    def body(*refs):
        refs = list(refs)

        def take(n):
            return [refs.pop(0) for _ in range(n)]

        queries_g, pages_g = take(len(queries)), take(len(pages))
        page_table, lengths, order, layer, out, q_s, k_s, v_s = take(8)
        (scores_s, out_s), p_s, vectors_s, q_full, full, empty = take(6)
        if fp8:
            q_scales_s, scales_s = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("block")

        def for_each_item(visit):
            """Calls visit(sequence, KV head, pages, exists, steps so far, items)."""

            def deal(i, carry):
                backwards = num_blocks - 1 - block
                rank = i * num_blocks + jnp.where(i % 2 == 0, block, backwards)
                exists = rank < num_items
                rank = jnp.minimum(rank, num_items - 1)
                seq = order[lax.div(rank, num_kv)]
                pages = lax.div(lengths[seq] + PAGE - 1, PAGE)
                pages = jnp.where(exists, pages, 0)
                steps, items = carry
                visit(seq, lax.rem(rank, num_kv), pages, exists, steps, items)
                return steps + pages, items + jnp.where(pages > 0, 1, 0)

            zeros = (jnp.int32(0), jnp.int32(0))
            return lax.fori_loop(0, pl.cdiv(num_items, num_blocks), deal, zeros)

        @pl.when(wg == 1)
        def _produce():
            first_page = layer[0] * num_pages

            def copy(sources, targets, barrier):
                for source, target in zip(sources, targets, strict=True):
                    plgpu.copy_gmem_to_smem(source, target, barrier)

            def visit(seq, head, pages, exists, first_step, item):
                del exists
                tile = lax.div((seq * num_kv + head) * padded, _TILE_ROWS)

                def load(i, page):
                    step = first_step + i
                    slot = lax.rem(step, stages)
                    # Its latency passes while the slot is waited for.
                    following = page_table[seq, jnp.minimum(i + 1, max_pages - 1)]
                    page = (first_page + page) * num_kv + head

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(empty.at[slot])

                    # As many slots as pages have: each query's last page is released
                    # before its slot's next turn, since every query has a page.
                    @pl.when(i == 0)
                    def _load_query():
                        slot = lax.rem(item, stages)
                        targets = [q_s.at[slot]]
                        if fp8:
                            targets.append(q_scales_s.at[slot, pl.ds(0, _TILE_ROWS)])
                        sources = [x.at[tile] for x in queries_g]
                        copy(sources, targets, q_full.at[slot])

                    targets = [k_s.at[slot], v_s.at[slot]]
                    if fp8:
                        targets += [scales_s.at[slot, j] for j in range(2)]
                    copy([x.at[page] for x in pages_g], targets, full.at[slot])
                    return following

                lax.fori_loop(0, pages, load, page_table[seq, 0])

            steps, _ = for_each_item(visit)

            # Every completed phase of a barrier must be observed.
            def drain(i, _):
                @pl.when(steps + i >= stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[lax.rem(steps + i, stages)])

            lax.fori_loop(0, stages, drain, None)

        @pl.when(wg == 0)
        def _compute():
            def by_token(x):
                return lax.broadcast_in_dim(x, shape, [1])

            def by_head(x):
                return lax.broadcast_in_dim(x, shape, [0])

            def column(i):
                """A value a head, for the accumulator O^T."""
                x = plgpu.load(vectors_s.at[i], layout=_WGMMA.reduce(0))
                return lax.broadcast_in_dim(x, (HEAD_DIM, _TILE_ROWS), [1])

            def set_column(i, x):
                vectors_s.at[i, pl.ds(0, heads)][...] = x

            def product(a, b):
                def scoped(acc):
                    plgpu.wgmma(acc, a, b)
                    return acc[...]

                return pl.run_scoped(scoped, plgpu.ACC((PAGE, _TILE_ROWS)))

            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TOKENS)

            def visit(seq, head, pages, exists, first_step, item):
                query = lax.rem(item, stages)
                # The first row of this KV head in its tile, and of the softmax.
                row = lax.rem((seq * num_kv + head) * padded, _TILE_ROWS)
                rows = pl.ds(lax.div(row, heads) * heads, heads)
                length = lengths[seq]

                @pl.when(pages > 0)
                def _wait():
                    plgpu.barrier_wait(q_full.at[query])

                if fp8:
                    q_scale = plgpu.load(q_scales_s.at[query, rows], layout=_HEADS)

                def attend(i, carry):
                    acc, m, sums = carry
                    slot = lax.rem(first_step + i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    scores = product(k_s.at[slot], q_s.at[query].T)
                    s = _transpose(scores, scores_s, rows.start, heads, interpret)
                    visible = token < length - i * PAGE
                    if fp8:
                        k_scale, v_scale = (
                            by_token(plgpu.load(x, layout=_TOKENS.reduce(0)))
                            for x in (scales_s.at[slot, j] for j in range(2))
                        )
                        s *= by_head(q_scale) * k_scale
                    s = jnp.where(visible, s, -jnp.inf)
                    m_new = jnp.maximum(m, jnp.max(s, axis=1))
                    minus_mc = m_new * -_LOG2_SCALE
                    p = _fma(s, _LOG2_SCALE, by_head(minus_mc), _TOKENS, interpret)
                    p = _exp2(p, _TOKENS, interpret)
                    decay = _fma(m, _LOG2_SCALE, minus_mc, _HEADS, interpret)
                    decay = _exp2(decay, _HEADS, interpret)
                    sums = _fma(
                        sums,
                        lax.broadcast_in_dim(decay, sums.shape, [0]),
                        _sum_residues(p, interpret),
                        _RESIDUES,
                        interpret,
                    )
                    set_column(0, decay)
                    if fp8:
                        v_scale = jnp.where(visible, v_scale, 0.0)
                        v_norm = jnp.max(v_scale, axis=1)
                        p *= v_scale * by_head(_over_power_of_two(v_norm))
                        set_column(1, v_norm * 2.0**-_P_EXPONENT)
                    _store_p(p_s, p, operand.transforms, interpret)
                    plgpu.commit_smem()
                    if fp8:
                        part = multiply_transposed(
                            v_s.at[slot], p_s, operand.transforms, interpret
                        )
                    else:
                        part = product(v_s.at[slot].T, p_s.T)
                    plgpu.barrier_arrive(empty.at[slot])
                    if fp8:
                        part *= column(1)
                    acc = _fma(acc, column(0), part, _WGMMA, interpret)
                    return acc, m_new, sums

                acc = jnp.zeros((HEAD_DIM, _TILE_ROWS), jnp.float32)
                m = jnp.full((heads,), -jnp.inf, jnp.float32)
                sums = jnp.zeros((heads, 8), jnp.float32)
                # The store of the result before may still read its buffer.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                carry = (
                    plgpu.layout_cast(acc, _WGMMA),
                    plgpu.layout_cast(m, _HEADS),
                    plgpu.layout_cast(sums, _RESIDUES),
                )
                acc, _, sums = lax.fori_loop(0, pages, attend, carry)
                total = jnp.sum(sums, axis=1)
                if interpret is None:
                    inverse = ptx("rcp.rn.f32", total, layout=_HEADS)
                else:
                    inverse = 1.0 / total
                set_column(2, jnp.where(total == 0.0, 0.0, inverse))
                plgpu.commit_smem()
                out_t = (acc * column(2)).astype(jnp.bfloat16)
                _store_transposed(out_s, out_t, interpret)
                plgpu.commit_smem()

                @pl.when(exists)
                def _store():
                    plgpu.copy_smem_to_gmem(
                        out_s.at[pl.ds(lax.rem(row, heads), group)],
                        out.at[seq * num_kv + head],
                    )

            for_each_item(visit)
            plgpu.wait_smem_to_gmem(0)

    scratch = [smem((stages, *x.shape[1:]), dtype) for x in (queries[0], pages[0])]
    v_smem = plgpu.SMEM if fp8 else smem
    scratch += [
        v_smem((stages, *pages[1].shape[1:]), dtype),
        plgpu.RefUnion(
            plgpu.SMEM((_TILE_ROWS, _SCORE_PITCH), jnp.float32),
            plgpu.SMEM((_TILE_ROWS, HEAD_DIM), jnp.bfloat16),
        ),
        operand,
        plgpu.SMEM((3, _TILE_ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=len(queries), num_barriers=stages),
        plgpu.Barrier(num_arrivals=len(pages), num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    ]
    if fp8:
        scratch += [
            # TMA wants its targets at multiples of 128 bytes.
            plgpu.SMEM((stages, _TMA_ALIGNMENT // 4), jnp.float32),
            plgpu.SMEM((stages, 2, PAGE), jnp.float32),
        ]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_items, group, HEAD_DIM), jnp.bfloat16),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
        ),
        interpret=interpret,
    )(*queries, *pages, *tables)


def _over_power_of_two(x):
    """2^8 / x, exactly, for powers of two: the exponents subtracted."""
    bits = np.int32((_P_EXPONENT + 2 * 127 << 23) - 2**32)
    return lax.bitcast_convert_type(
        bits - lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    )
