"""The kernel of paged decode attention on Hopper, for sequences and for their groups.

The products are swapped, so that the tokens of a page are the rows of wgmma and the
query heads of a KV head its columns: S^T [128 tokens, columns] = K q^T, then
O^T [H, columns] += V^T P^T.

A producer warpgroup fills a ring of pages and runs ahead over the borders of items;
compute warpgroups, each with columns of its own, follow. An item is a KV head of a
sequence, or of a group of sequences over the pages that they share. A thread block
takes several, dealt in a snake from the longest to the shortest.

The arithmetic of a row is that of the prefill kernel, operation by operation, so that
the result has the same bits; it depends neither on the other rows nor on their order.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from fp8rl_jax.kernels.hopper_decode_softmax import (
    HEADS,
    NUM_RESIDUES,
    P_EXPONENT,
    PAGE,
    RESIDUES,
    TILE_ROWS,
    TOKENS,
    WGMMA,
    exp2,
    fma,
    load_transposed,
    over_power_of_two,
    store_p,
    store_sums,
    store_transposed,
    sum_residues,
    transpose,
)
from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, Interpret, ptx, smem
from fp8rl_jax.kernels.hopper_value_pages import HEAD_DIM, multiply_transposed

NUM_SMS = 132  # of an H100 SXM or H200
_REGISTERS = 512  # of a multiprocessor, for each thread of a warpgroup
_PRODUCER_REGISTERS = 40
_TMA_ALIGNMENT = 128  # bytes
_SCORE_PITCH = PAGE + 4  # floats; conflict-free for the fragment's transposed store
_LOG2_SCALE = float(np.float32(HEAD_DIM**-0.5 * math.log2(math.e)))


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut; it changes the speed of the kernel, not its result.

    Attributes:
      stages: pages that are loaded ahead.
      blocks_per_sm: thread blocks of a multiprocessor, each of which takes several
        items; None for one thread block an item.
      columns: queries of a compute warpgroup, over shared pages.
    """

    stages: int = 3
    blocks_per_sm: int | None = 2
    columns: int = 32


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the query rows of the items lie in the columns of wgmma.

    Attributes:
      rows: of an item; those of all items are contiguous.
      width: of the tiles in which rows are loaded, one a compute warpgroup.
      softmax: neighbours that softmax takes together: 4 or a multiple of 8.
      warpgroups: tiles of an item, or 1 where items share a tile.
    """

    rows: int
    width: int
    softmax: int
    warpgroups: int


class State(NamedTuple):
    """Of online softmax, before the next page; rows of nobody before and after.

    What the kernel writes for a group begins with the row ``TILE_ROWS``.
    """

    acc: Float[Array, "rows H"]
    maximum: Float[Array, "rows"]
    sums: Float[Array, "rows 8"]


class Start(NamedTuple):
    """Where sequences go on.

    Attributes:
      state: what the kernel returned for the groups.
      first: int32: each sequence's first page that is not in the state.
      place: int32: its number among the members of all groups, if ``first`` > 0.
      members: of a group.
      stride: rows of the state from a KV head to the next.
    """

    state: State
    first: Int[Array, "B"]
    place: Int[Array, "B"]
    members: int
    stride: int


class Tables(NamedTuple):
    """int32: the pages and tokens of each sequence, or group, and the layer [1]."""

    pages: Int[Array, "B max_pages"]
    lengths: Int[Array, "B"]
    order: Int[Array, "B"]
    layer: Int[Array, "1"]


def launch(
    queries: list[Array],
    pages: list[Array],
    tables: Tables,
    columns: Columns,
    *,
    num_kv: int,
    num_pages: int,
    group: int | None,
    config: DecodeConfig,
    interpret: Interpret,
    start: Start | None = None,
) -> BFloat16[Array, "items group H"] | State:
    """Attends the queries of every item to its pages.

    Args:
      queries: tiles [tiles, width, H], and of codes their scales [tiles, width].
      pages: keys and values of all layers, pages and KV heads, and their scales.
      tables: what belongs to which sequence.
      columns: where its queries are.
      num_kv: KV heads.
      num_pages: of a layer.
      group: query heads of a KV head; None to return the state.
      config: how the work is cut.
      interpret: parameters of interpret mode; None on a GPU.
      start: states to go on from, of some sequences.
    """
    dtype = queries[0].dtype
    fp8 = dtype == E4M3
    stages = config.stages
    num_seqs, max_pages = tables.pages.shape
    num_items = num_seqs * num_kv
    num_blocks = num_items
    if config.blocks_per_sm is not None:
        num_blocks = min(num_items, NUM_SMS * config.blocks_per_sm)
    heads, width, warpgroups = columns.softmax, columns.width, columns.warpgroups
    shape = (heads, PAGE)
    operand = smem((warpgroups, width, PAGE), dtype)
    operands = [*queries, *pages, *tables]
    if start is not None:
        operands += [start.first, start.place, *start.state]
    if group is None:
        rows = num_items * columns.rows + 2 * TILE_ROWS
        shapes = State((rows, HEAD_DIM), (rows,), (rows, NUM_RESIDUES))
        out_type = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    else:
        out_type = [jax.ShapeDtypeStruct((num_items, group, HEAD_DIM), jnp.bfloat16)]

    def body(*refs):
        refs = list(refs)

        def take(n):
            return [refs.pop(0) for _ in range(n)]

        queries_g, pages_g = take(len(queries)), take(len(pages))
        page_table, lengths, order, layer = take(4)
        if start is not None:
            first_page, place = take(2)
            state = State(*take(3))
        out, (q_s, k_s, v_s) = take(len(out_type)), take(3)
        (scores_s, out_s), p_s, vectors_s, q_full, full, empty = take(6)
        if fp8:
            q_scales_s, scales_s = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("block")

        def share_registers(action):
            """The producer leaves what it can to several compute warpgroups."""
            if warpgroups > 1:
                few = _PRODUCER_REGISTERS
                each = _REGISTERS // (1 + warpgroups) // 8 * 8
                many = each + (each - few) // warpgroups // 8 * 8
                count = few if action == "decrease" else many
                plgpu.set_max_registers(count, action=action)

        def for_each_item(visit):
            """Calls visit(sequence, KV head, (first, end), exists, base, items).

            Page i of the item is step base + i of the thread block.
            """

            def deal(i, carry):
                backwards = num_blocks - 1 - block
                rank = i * num_blocks + jnp.where(i % 2 == 0, block, backwards)
                exists = rank < num_items
                rank = jnp.minimum(rank, num_items - 1)
                seq = order[lax.div(rank, num_kv)]
                end = lax.div(lengths[seq] + PAGE - 1, PAGE)
                end = jnp.where(exists, end, 0)
                first = 0 if start is None else jnp.minimum(first_page[seq], end)
                steps, items = carry
                base = steps - first
                visit(seq, lax.rem(rank, num_kv), (first, end), exists, base, items)
                return base + end, items + jnp.where(end > first, 1, 0)

            zeros = (jnp.int32(0), jnp.int32(0))
            return lax.fori_loop(0, pl.cdiv(num_items, num_blocks), deal, zeros)

        @pl.when(wg == warpgroups)
        def _produce():
            share_registers("decrease")
            offset = layer[0] * num_pages

            def copy(sources, targets, barrier):
                for source, target in zip(sources, targets, strict=True):
                    plgpu.copy_gmem_to_smem(source, target, barrier)

            def visit(seq, head, pages, exists, base, item):
                del exists
                first, end = pages
                tile = lax.div((seq * num_kv + head) * columns.rows, width)

                def load(i, page):
                    step = base + i
                    slot = lax.rem(step, stages)
                    # Its latency passes while the slot is waited for.
                    following = page_table[seq, jnp.minimum(i + 1, max_pages - 1)]
                    page = (offset + page) * num_kv + head

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(empty.at[slot])

                    # As many slots as pages have: each query's last page is released
                    # before its slot's next turn, since every query has a page.
                    @pl.when(i == first)
                    def _load_query():
                        slot = lax.rem(item, stages)
                        for w in range(warpgroups):
                            targets = [q_s.at[slot, w]]
                            if fp8:
                                scales = q_scales_s.at[slot, w, pl.ds(0, width)]
                                targets.append(scales)
                            sources = [x.at[tile + w] for x in queries_g]
                            copy(sources, targets, q_full.at[slot])

                    targets = [k_s.at[slot], v_s.at[slot]]
                    if fp8:
                        targets += [scales_s.at[slot, j] for j in range(2)]
                    copy([x.at[page] for x in pages_g], targets, full.at[slot])
                    return following

                lax.fori_loop(first, end, load, page_table[seq, first])

            steps, _ = for_each_item(visit)

            # Every completed phase of a barrier must be observed.
            def drain(i, _):
                @pl.when(steps + i >= stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[lax.rem(steps + i, stages)])

            lax.fori_loop(0, stages, drain, None)

        @pl.when(wg != warpgroups)
        def _compute():
            share_registers("increase")
            own = 0 if warpgroups == 1 else wg  # tile of an item

            def by_token(x):
                return lax.broadcast_in_dim(x, shape, [1])

            def by_head(x):
                return lax.broadcast_in_dim(x, shape, [0])

            def column(i):
                """A value a head, for the accumulator O^T."""
                x = plgpu.load(vectors_s.at[own, i], layout=WGMMA.reduce(0))
                return lax.broadcast_in_dim(x, (HEAD_DIM, width), [1])

            def set_column(i, x):
                vectors_s.at[own, i, pl.ds(0, heads)][...] = x

            def product(a, b):
                def scoped(acc):
                    plgpu.wgmma(acc, a, b)
                    return acc[...]

                return pl.run_scoped(scoped, plgpu.ACC((PAGE, width)))

            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TOKENS)

            def nothing_yet():
                acc = jnp.zeros((HEAD_DIM, width), jnp.float32)
                m = jnp.full((heads,), -jnp.inf, jnp.float32)
                sums = jnp.zeros((heads, NUM_RESIDUES), jnp.float32)
                return (
                    plgpu.layout_cast(acc, WGMMA),
                    plgpu.layout_cast(m, HEADS),
                    plgpu.layout_cast(sums, RESIDUES),
                )

            def begin(seq, head, first, row):
                """The state of a KV head whose first row is ``row`` of softmax."""
                if start is None:
                    return nothing_yet()

                def load():
                    group = lax.div(place[seq], start.members)
                    member = lax.rem(place[seq], start.members)
                    at = (group * num_kv + head) * start.stride + TILE_ROWS
                    at += member * columns.rows - row
                    some = pl.ds(at, heads)
                    return (
                        load_transposed(state.acc.at[pl.ds(at, width)], interpret),
                        plgpu.load(
                            state.maximum.at[some], layout=HEADS, optimized=False
                        ),
                        plgpu.load(
                            state.sums.at[some], layout=RESIDUES, optimized=False
                        ),
                    )

                return lax.cond(first > 0, load, nothing_yet)

            def visit(seq, head, pages, exists, base, item):
                first, end = pages
                query = lax.rem(item, stages)
                # The first row of this KV head in its tile, and of the softmax.
                row = lax.rem((seq * num_kv + head) * columns.rows, width)
                rows = pl.ds(lax.div(row, heads) * heads, heads)
                length = lengths[seq]
                carry = begin(seq, head, first, lax.rem(row, heads))

                @pl.when(end > first)
                def _wait():
                    plgpu.barrier_wait(q_full.at[query])

                if fp8:
                    scales = q_scales_s.at[query, own, rows]
                    q_scale = plgpu.load(scales, layout=HEADS)

                def attend(i, carry):
                    acc, m, sums = carry
                    slot = lax.rem(base + i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    scores = product(k_s.at[slot], q_s.at[query, own].T)
                    s = transpose(
                        scores, scores_s.at[own], rows.start, heads, interpret
                    )
                    visible = token < length - i * PAGE
                    if fp8:
                        k_scale, v_scale = (
                            by_token(plgpu.load(x, layout=TOKENS.reduce(0)))
                            for x in (scales_s.at[slot, j] for j in range(2))
                        )
                        s *= by_head(q_scale) * k_scale
                    s = jnp.where(visible, s, -jnp.inf)
                    m_new = jnp.maximum(m, jnp.max(s, axis=1))
                    minus_mc = m_new * -_LOG2_SCALE
                    p = fma(s, _LOG2_SCALE, by_head(minus_mc), TOKENS, interpret)
                    p = exp2(p, TOKENS, interpret)
                    decay = fma(m, _LOG2_SCALE, minus_mc, HEADS, interpret)
                    decay = exp2(decay, HEADS, interpret)
                    sums = fma(
                        sums,
                        lax.broadcast_in_dim(decay, sums.shape, [0]),
                        sum_residues(p, interpret),
                        RESIDUES,
                        interpret,
                    )
                    set_column(0, decay)
                    if fp8:
                        v_scale = jnp.where(visible, v_scale, 0.0)
                        v_norm = jnp.max(v_scale, axis=1)
                        p *= v_scale * by_head(over_power_of_two(v_norm))
                        set_column(1, v_norm * 2.0**-P_EXPONENT)
                    p_own = p_s.at[own]
                    store_p(p_own, p, operand.transforms, interpret)
                    plgpu.commit_smem()
                    if fp8:
                        part = multiply_transposed(
                            v_s.at[slot], p_own, operand.transforms, interpret
                        )
                    else:
                        part = product(v_s.at[slot].T, p_own.T)
                    plgpu.barrier_arrive(empty.at[slot])
                    if fp8:
                        part *= column(1)
                    acc = fma(acc, column(0), part, WGMMA, interpret)
                    return acc, m_new, sums

                # The store of the result before may still read its buffer.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                acc, m, sums = lax.fori_loop(first, end, attend, carry)
                if group is None:
                    at = (seq * num_kv + head) * columns.rows + own * width

                    @pl.when(end > first)
                    def _store_state():
                        rows = pl.ds(TILE_ROWS + at, width)
                        state = State(*(x.at[rows] for x in out))
                        store_transposed(state.acc, acc, interpret)
                        state.maximum[...] = m
                        store_sums(state.sums, sums, interpret)

                    return
                total = jnp.sum(sums, axis=1)
                if interpret is None:
                    inverse = ptx("rcp.rn.f32", total, layout=HEADS)
                else:
                    inverse = 1.0 / total
                set_column(2, jnp.where(total == 0.0, 0.0, inverse))
                plgpu.commit_smem()
                out_t = (acc * column(2)).astype(jnp.bfloat16)
                store_transposed(out_s, out_t, interpret)
                plgpu.commit_smem()

                @pl.when(exists)
                def _store():
                    plgpu.copy_smem_to_gmem(
                        out_s.at[pl.ds(lax.rem(row, heads), group)],
                        out[0].at[seq * num_kv + head],
                    )

            for_each_item(visit)
            plgpu.wait_smem_to_gmem(0)

    page_shapes = [(stages, *x.shape[1:]) for x in pages]
    scratch = [
        smem((stages, warpgroups, *queries[0].shape[1:]), dtype),
        smem(page_shapes[0], dtype),
        (plgpu.SMEM if fp8 else smem)(page_shapes[1], dtype),
        plgpu.RefUnion(
            plgpu.SMEM((warpgroups, width, _SCORE_PITCH), jnp.float32),
            plgpu.SMEM((TILE_ROWS, HEAD_DIM), jnp.bfloat16),
        ),
        operand,
        plgpu.SMEM((warpgroups, 3, width), jnp.float32),
        plgpu.Barrier(num_arrivals=warpgroups * len(queries), num_barriers=stages),
        plgpu.Barrier(num_arrivals=len(pages), num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    ]
    if fp8:
        # TMA wants its targets at multiples of 128 bytes.
        line = pl.cdiv(4 * width, _TMA_ALIGNMENT) * _TMA_ALIGNMENT // 4
        scratch += [
            plgpu.SMEM((stages, warpgroups, line), jnp.float32),
            plgpu.SMEM((stages, 2, PAGE), jnp.float32),
        ]
    out = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=1 + warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
        ),
        interpret=interpret,
    )(*operands)
    return State(*out) if group is None else out[0]
