"""Causal attention over pages of keys and values for Hopper: prefill and training.

A query block of 128 positions attends to the pages of its sequence up to its own. One
persistent, warp-specialised kernel: a producer warpgroup fills rings of K and V pages
in shared memory by TMA, every other warpgroup owns 64 query rows of one head. Scores
stay in registers: their accumulator, cast, is the A operand of the second product.

Every float32 operation on a row is fixed: pages in ascending order, a fresh accumulator
for both products of a page, an explicit tree for the sum of the probabilities, explicit
fused multiply-adds. So a row's bits depend on nothing but the row, its keys and values:
configurations differ in speed, and decoding the same row gives the same bits.

References:
  Shah et al. "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
    Low-precision", arXiv:2407.08608.
  Kwon et al. "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", arXiv:2309.06180.
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
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float, Int

from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3
from fp8rl_jax.kernels.hopper_value_pages import (
    HEAD_DIM,
    VALUE_PAGE,
    finish_multiply,
    for_copies,
    in_columns,
    start_multiply,
)

PAGE = 128  # key positions of a page, query positions of a block
_ROW = 128  # bytes of a swizzled row of shared memory
_SLAB = 64  # rows of one wgmma instruction: what a compute warpgroup owns
_LANES = 8  # partial sums of a row: columns of a tile of the accumulator
_PART = 32  # columns whose scales are in registers at a time
_LOG2E = math.log2(math.e)
_SCALE = np.float32(HEAD_DIM**-0.5 * _LOG2E)
# Registers a thread, by number of compute warpgroups, out of 65,536 a multiprocessor.
_COMPUTE_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = 24
_NUM_SMS = 132  # of an H100 SXM or H200
_WGMMA = plgpu.Layout.WGMMA
_ROWS, _COLUMNS = _WGMMA.reduce(1), _WGMMA.reduce(0)
# Probabilities, at most 1, are cast to e4m3 times this over the largest V scale.
_P_SCALE = 2.0**8
_P_SCALE_AND_ONE = np.int32(0x43800000 + 0x3F800000 - 2**32)  # sum of their bits


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How the work is cut; it changes the speed of the kernel, not its result.

    Attributes:
      warpgroups: compute warpgroups of a thread block, which share its pages: 64 rows
        of one head each, first the two halves of a head, then the next head.
      stages: pages of K, and of V, that are loaded ahead.
      overlap: whether a warpgroup multiplies for the next page and for the last while
        it computes probabilities; else only other warpgroups fill the tensor cores.
      persistent: whether a thread block takes several tiles, loading ahead over their
        borders; else there is one for each.
    """

    warpgroups: int = 2
    stages: int = 4
    overlap: bool = True
    persistent: bool = True


def default_config(dtype: jnp.dtype) -> PagedAttentionConfig:
    """The configuration for queries, keys and values of this dtype."""
    if dtype == E4M3:
        return PagedAttentionConfig(persistent=False)
    return PagedAttentionConfig(stages=2, overlap=False)


def paged_attention(
    q: Float[Array, "Tq N 128"],
    k: Float[Array, "L P K 128 128"],
    v: Float[Array, "L P K *page"],
    page_table: Int[Array, "R pages"],
    table_row: Int[Array, "blocks"],
    first_page: Int[Array, "blocks"],
    own_page: Int[Array, "blocks"],
    layer: Int[Array, ""],
    *,
    q_scales: Float[Array, "N Tq"] | None = None,
    k_scales: Float[Array, "L P K 128"] | None = None,
    v_scales: Float[Array, "L P K 128"] | None = None,
    config: PagedAttentionConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "Tq N 128"], Float[Array, "N Tq"]]:
    """Attention of blocks of 128 queries over the pages of their sequences.

    Block i is q[128 i : 128 (i + 1)], positions of one sequence from a multiple of 128
    on. It sees the pages ``page_table[table_row[i], first_page[i] : own_page[i]]``
    whole, and of page ``own_page[i]``, which holds its own positions, slot j from row
    t >= j on. Head n reads KV head n // (N / K).

    Args:
      q: e4m3 codes, or bfloat16.
      k: keys [layer, page, KV head, slot, :], in the dtype of ``q``.
      v: values: bfloat16 like ``k``, or e4m3 [layer, page, KV head, 8, :, 16], see
        `hopper_value_pages`. Codes in slots that no query sees must be finite.
      page_table: int32.
      table_row: int32.
      first_page: int32.
      own_page: int32; a block with a negative one is padding and reads nothing.
      layer: int32.
      q_scales: float32 powers of two, also for padding. Codes only, like those below.
      k_scales: float32 powers of two, in the order of the slots.
      v_scales: likewise.
      config: how to cut the work; :func:`default_config` if None.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Returns:
      The result, bfloat16, and the natural logarithm of the sum of the exponentials of
      a row's scores, float32; zeros and infinity for padding.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    _check(q, k, v, q_scales, scales, table_row, first_page, own_page)

    def flat(pool):
        return pool.reshape(-1, *pool.shape[2:])

    pools = [flat(k), flat(v)]
    if q.dtype == E4M3:
        pools[1] = for_copies(pools[1])
        pools += [q_scales, *map(flat, scales.values())]
        # By entry of the table: the largest scale of a page up to each slot.
        of_table = jnp.asarray(v_scales)[layer][page_table]
        pools += [flat(lax.cummax(of_table, axis=3))]
    schedule = (page_table, table_row, first_page, own_page)
    return _launch(
        q,
        *pools,
        *schedule,
        jnp.reshape(layer * k.shape[1], (1,)),
        config=config or default_config(q.dtype),
        interpret=interpret,
    )


def _check(q, k, v, q_scales, scales, table_row, first_page, own_page):
    if q.dtype not in (E4M3, jnp.bfloat16) or q.shape[0] % PAGE:
        raise ValueError(
            f"q must be e4m3 or bfloat16 in blocks of {PAGE} rows, got {q.dtype.name} "
            f"{q.shape}."
        )
    codes, (rows, heads, _) = q.dtype == E4M3, q.shape
    pool = (*k.shape[:3], PAGE, HEAD_DIM)
    expected = {
        "q": (q, q.dtype, (rows, heads, HEAD_DIM)),
        "k": (k, q.dtype, pool),
        "v": (v, q.dtype, (*pool[:3], *VALUE_PAGE) if codes else pool),
        "table_row": (table_row, jnp.int32, (rows // PAGE,)),
        "first_page": (first_page, jnp.int32, (rows // PAGE,)),
        "own_page": (own_page, jnp.int32, (rows // PAGE,)),
    }
    for name, x in {"q_scales": q_scales, **scales}.items():
        if (x is not None) != codes:
            raise ValueError(f"{name} must {'' if codes else 'not '}be given.")
        if codes:
            shape = (heads, rows) if name == "q_scales" else pool[:4]
            expected[name] = (x, jnp.float32, shape)
    for name, (x, dtype, shape) in expected.items():
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name} {shape} for q of shape "
                f"{q.shape} and k of shape {k.shape}, got {x.dtype.name} {x.shape}."
            )
    if heads % pool[2]:
        raise ValueError(f"{heads} query heads do not divide among {pool[2]} KV heads.")


def _instruction(name: str, *args: Array, interpret: bool) -> Array:
    """A float32 PTX instruction for every element, so that no compiler has a say."""
    if interpret:
        emulations = {
            "fma.rn.f32": lambda x, y, z: x * y + z,
            "ex2.approx.ftz.f32": jnp.exp2,
            "rcp.rn.f32": lambda x: 1.0 / x,
        }
        return emulations[name](*args)
    layout = _WGMMA if args[0].ndim == 2 else _ROWS

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(args),
        return_type=plgpu.ShapeDtypeStruct(args[0].shape, jnp.float32, layout=layout),
    )
    def apply(_, x, *others):
        return x._pointwise(x._lift_fast_instr(name), *others)

    return apply(*args)


def _tiles(x):
    """The columns of a slab in tiles of the accumulator."""
    return [x[:, j : j + _LANES] for j in range(0, PAGE, _LANES)]


def _lane_sums(p: Float[Array, "64 128"], interpret: bool) -> Float[Array, "64 8"]:
    """Sums over the columns that are equal modulo 8: a tree over bits 3, 4, 5 and 6."""

    def tree(p):
        parts = _tiles(p)
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [even + odd for even, odd in pairs]
        return parts[0]

    if interpret:
        return tree(p)
    # The same in one operation: dozens take the inference of layouts seconds.
    struct = plgpu.ShapeDtypeStruct((_SLAB, _LANES), jnp.float32, layout=_WGMMA)
    inline = plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=struct)
    return inline(lambda _, p: tree(p))(p)


@plgpu.inline_mgpu(
    arg_types=(_WGMMA,),
    return_type=plgpu.ShapeDtypeStruct(
        (_SLAB, PAGE), E4M3, layout=plgpu.Layout.WGMMA_8BIT
    ),
)
def _to_operand(_, p):
    """Casts an accumulator to e4m3 and takes its registers as those of an A operand.

    A thread's columns of two adjacent tiles become its four of a tile of 16, so column
    16J + 4t + i of the operand is column 16J + 2t + (i & 1) + 8 (i >> 1) of ``p``:
    the order of the columns of V.
    """
    tiles = p.astype(ir.Float8E4M3FNType.get()).registers.reshape(PAGE // 8, 2)
    registers = np.empty((PAGE // 16, 2), dtype=object)
    for j, half in np.ndindex(registers.shape):
        pair = [tiles[2 * j, half], tiles[2 * j + 1, half]]
        registers[j, half] = mgpu.utils.vector_concat(pair)
    layout = fa.WGMMA_LAYOUT_8BIT
    return fa.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((_SLAB, PAGE))),
        _layout=layout,
        _is_signed=None,
    )


def _zeros(columns: int, interpret: bool) -> Float[Array, "64 columns"]:
    """Zeros of their own for an accumulator.

    LLVM would have all accumulators copy one register, and ptxas, which sees the copies
    and no constant, would clear them instead of starting the product afresh.
    """
    if interpret:
        return jnp.zeros((_SLAB, columns), jnp.float32)

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((_SLAB, columns), jnp.float32, layout=_WGMMA)
    )
    def zeros(_):
        f32 = ir.F32Type.get()
        zero = mgpu.utils.c(0.0, f32)
        splat = fa.FragmentedArray.splat(zero, (_SLAB, columns), fa.WGMMA_LAYOUT)
        registers = np.empty_like(splat.registers)
        for index, register in np.ndenumerate(splat.registers):
            parts = [
                llvm.inline_asm(f32, [], "mov.b32 $0, 0;", "=f", has_side_effects=True)
                for _ in range(2)
            ]
            registers[index] = vector.from_elements(register.type, parts)
        return fa.FragmentedArray(
            _registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None
        )

    return zeros()


def _scale_over(norm: Float[Array, "n"]) -> Float[Array, "n"]:
    """2^8 / norm of powers of two, exactly: exponents subtract."""
    bits = lax.bitcast_convert_type(norm, jnp.int32)
    return lax.bitcast_convert_type(_P_SCALE_AND_ONE - bits, jnp.float32)


def _launch(q, *operands, config, interpret):
    c, codes, emulate = config, q.dtype == E4M3, interpret is not None
    (num_queries, heads, _), num_kv_heads = q.shape, operands[0].shape[1]
    group = heads // num_kv_heads
    num_blocks = num_queries // PAGE
    num_slabs = group * PAGE // _SLAB  # of a block and KV head
    splits = pl.cdiv(num_slabs, c.warpgroups)
    num_tiles = num_blocks * num_kv_heads * splits
    num_ctas = min(_NUM_SMS, num_tiles) if c.persistent else num_tiles
    num_scales = 3 if codes else 0
    # Columns of the result at a time: with fewer registers, half of them.
    width = HEAD_DIM if c.warpgroups < 3 else HEAD_DIM // 2

    def body(*refs):
        refs = list(refs)

        def take(n):
            return [refs.pop(0) for _ in range(n)]

        (q,), pools = take(1), take(2)
        (q_scales,) = take(1) if codes else (None,)
        scales = take(num_scales)
        page_table, table_row, first_page, own_page, layer, out, lse = take(7)
        q_s, k_s, v_s, q_scales_s, scales_s, out_s, lse_s = take(7)
        q_full, k_full, v_full, k_empty, v_empty = take(5)
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")

        def place(index):
            """Block, KV head and part of its slabs of a tile.

            Blocks with many pages, late in their sequences, come first. Every other
            round of tiles goes to the thread blocks in reverse, which evens out their
            numbers of pages.
            """
            start = index - cta
            reverse = jnp.minimum(num_tiles - start, num_ctas) - 1 - cta
            odd = lax.rem(lax.div(start, num_ctas), 2) == 1
            tile = start + jnp.where(odd, reverse, cta)
            block = num_blocks - 1 - lax.div(tile, num_kv_heads * splits)
            rest = lax.rem(tile, num_kv_heads * splits)
            return block, lax.div(rest, splits), lax.rem(rest, splits)

        def for_each_tile(visit):
            """visit(index of the tile, its number of pages, steps before it)."""

            @plgpu.nd_loop((num_tiles,), collective_axes="cta", init_carry=jnp.int32(0))
            def step_count(loop_info, carry):
                index = loop_info.index[0]
                block, _, _ = place(index)
                own = own_page[block]
                pages = jnp.where(own < 0, 0, own - first_page[block] + 1)
                visit(index, pages, carry)
                return carry + pages

            return step_count

        def slot_of(step):
            return lax.rem(step, c.stages)

        @pl.when(wg == c.warpgroups)
        def _produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def visit(index, pages, first_step):
                block, kv_head, _ = place(index)
                row, first = table_row[block], first_page[block]

                def load(i, _):
                    entry = row * page_table.shape[1] + first + i
                    page = layer[0] + page_table[row, first + i]
                    step = first_step + i
                    slot = slot_of(step)

                    def copy(pool, target, full, page=page):
                        source = pool.at[page, kv_head]
                        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

                    def wait(empty):
                        @pl.when(step >= c.stages)
                        def _wait():
                            plgpu.barrier_wait(empty.at[slot])

                    wait(k_empty)
                    copy(pools[0], k_s, k_full)
                    at = (page, page, entry)[:num_scales]
                    for source, target, index in zip(scales, scales_s, at, strict=True):
                        copy(source, target, k_full, index)
                    wait(v_empty)
                    copy(pools[1], v_s, v_full)

                lax.fori_loop(0, pages, load, None)

            step_count = for_each_tile(visit)

            # Every completed phase of a barrier must be observed.
            def drain(i, _):
                @pl.when(step_count + i >= c.stages)
                def _wait():
                    plgpu.barrier_wait(k_empty.at[slot_of(step_count + i)])
                    plgpu.barrier_wait(v_empty.at[slot_of(step_count + i)])

            lax.fori_loop(0, c.stages, drain, None)

        def ptx(name, *args):
            return _instruction(name, *args, interpret=emulate)

        def rows(x, columns=PAGE):
            return lax.broadcast_in_dim(x, (_SLAB, columns), [0])

        def constant(value, shape, layout=_ROWS):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def times_columns(x, vectors, slot, factor=None):
            """x times a vector along its columns, in parts: it takes few registers."""
            parts = []
            for j in range(0, PAGE, _PART):
                part = x[:, j : j + _PART]
                columns = plgpu.load(vectors.at[slot, pl.ds(j, _PART)], layout=_COLUMNS)
                if factor is not None:
                    columns *= factor
                parts.append(part * lax.broadcast_in_dim(columns, part.shape, [1]))
            return jnp.concatenate(parts, axis=1)

        @pl.when(wg < c.warpgroups)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[c.warpgroups], action="increase")

            def slab_of(wg, index):
                """Head, first row in its block, and rows of a warpgroup."""
                block, kv_head, part = place(index)
                # The last warpgroups repeat a slab where they do not divide them.
                slab = jnp.minimum(part * c.warpgroups + wg, num_slabs - 1)
                head = kv_head * group + lax.div(slab, 2)
                offset = lax.rem(slab, 2) * _SLAB
                return head, offset, pl.ds(block * PAGE + offset, _SLAB)

            def load_queries(wg, index):
                head, _, positions = slab_of(wg, index)
                copies = [(q.at[positions, head], q_s)]
                if codes:
                    copies.append((q_scales.at[head, positions], q_scales_s))
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target.at[wg], q_full.at[wg])

            def visit(index, pages, first_step):
                # What follows from the warpgroup's number is worked out for every tile:
                # kept all the time, it would take the registers of the loop over pages.
                compute(lax.optimization_barrier(wg), index, pages, first_step)

            def compute(wg, index, pages, first_step):
                head, offset, positions = slab_of(wg, index)

                def load_next():
                    plgpu.commit_smem()  # no warp reads the queries any more

                    @pl.when(index + num_ctas < num_tiles)
                    def _load():
                        load_queries(wg, index + num_ctas)

                def store(values, logsumexp):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_s.at[wg][...] = values.astype(jnp.bfloat16)
                    lse_s.at[wg][...] = logsumexp
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_s.at[wg], out.at[positions, head])
                    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse.at[head, positions])

                plgpu.barrier_wait(q_full.at[wg])

                @pl.when(pages == 0)
                def _padding():
                    load_next()
                    zeros = constant(0.0, (_SLAB, HEAD_DIM), _WGMMA)
                    store(zeros, constant(np.inf, (_SLAB,)))

                @pl.when(pages > 0)
                def _attend():
                    scale = constant(_SCALE, (_SLAB,))
                    if codes:
                        scale *= plgpu.load(q_scales_s.at[wg], layout=_ROWS)
                    store(*attend(wg, scale, offset, pages, first_step, load_next))

            def attend(wg, scale, offset, pages, first_step, after_queries):
                """Result and log-sum-exp of a slab, whose queries are in ``q_s``.

                Calls ``after_queries`` when these are not needed any more.

                The maximum is kept without the query's scale, the result over that of
                V: powers of two, which change no rounding.
                """

                def slot_at(i):
                    return slot_of(first_step + i)

                def multiply_qk(i, accumulator):
                    plgpu.wgmma(accumulator, q_s.at[wg], k_s.at[slot_at(i)].T)

                def multiply_pv(i, p, columns, meanwhile=lambda: None):
                    """What ``meanwhile`` returns, and then P V for these columns."""
                    values, first = v_s.at[slot_at(i)], columns.start
                    if codes:
                        zeros = _zeros(columns.size, emulate)
                        started = start_multiply(zeros, p, values, first, interpret)
                        return meanwhile(), finish_multiply(started, interpret)
                    values = values.at[:, columns]
                    if emulate:
                        return meanwhile(), jnp.dot(
                            p, values[...], preferred_element_type=jnp.float32
                        )

                    def scoped(accumulator):
                        accumulator[...] = _zeros(columns.size, emulate)
                        plgpu.wgmma(accumulator, p, values)
                        other = meanwhile()
                        return other, plgpu.wgmma_accumulator_load(accumulator)

                    return pl.run_scoped(scoped, plgpu.ACC((_SLAB, columns.size)))

                def scaled(i, s, best, masked):
                    """Scores without the query's scale and their maximum so far.

                    ``masked`` admits the page of the block itself, not only pages
                    before it.
                    """
                    if codes:
                        s = times_columns(s, scales_s[0], slot_at(i))
                    if masked:
                        # By tiles, whose columns are constants to the compiler: it
                        # would keep those of the whole slab in registers.
                        row, column = (
                            plgpu.broadcasted_iota(
                                jnp.int32, (_SLAB, _LANES), axis, layout=_WGMMA
                            )
                            for axis in (0, 1)
                        )
                        last = row + offset + jnp.where(i == pages - 1, 0, PAGE)
                        parts = [
                            jnp.where(last - column >= _LANES * j, part, -jnp.inf)
                            for j, part in enumerate(_tiles(s))
                        ]
                        s = jnp.concatenate(parts, axis=1)
                    return s, jnp.maximum(best, s.max(axis=1))

                def probabilities(i, s, new_best, state, masked):
                    """P as an operand, the decay of the result, the new state."""
                    best, sums, norm = state
                    slot = slot_at(i)
                    shift = -(new_best * scale)
                    p = ptx("fma.rn.f32", s, rows(scale), rows(shift))
                    p = ptx("ex2.approx.ftz.f32", p)
                    decay = ptx("fma.rn.f32", best, scale, shift)
                    decay = ptx("ex2.approx.ftz.f32", decay)
                    lanes = _lane_sums(p, interpret=emulate)
                    sums = ptx("fma.rn.f32", sums, rows(decay, _LANES), lanes)
                    if not codes:
                        plgpu.barrier_arrive(k_empty.at[slot])
                        return p.astype(jnp.bfloat16), decay, (new_best, sums, norm)
                    _, v_scales_s, v_norms_s = scales_s
                    page_norm = v_norms_s[slot, PAGE - 1]
                    new_norm = constant(page_norm, (_SLAB,))
                    if masked:
                        own = plgpu.load(
                            v_norms_s.at[slot, pl.ds(offset, _SLAB)], layout=_ROWS
                        )
                        diagonal = jnp.full(own.shape, i == pages - 1)
                        new_norm = jnp.where(diagonal, own, new_norm)
                        # Zeros stay zeros, whatever the scales of slots to come.
                        p = times_columns(
                            p * rows(_scale_over(new_norm)), v_scales_s, slot
                        )
                    else:
                        factor = constant(page_norm, (_PART,), _COLUMNS)
                        p = times_columns(p, v_scales_s, slot, _scale_over(factor))
                    plgpu.barrier_arrive(k_empty.at[slot])
                    decay *= norm * _scale_over(new_norm) * (1.0 / _P_SCALE)
                    p = in_columns(p).astype(E4M3) if emulate else _to_operand(p)
                    return p, decay, (new_best, sums, new_norm)

                def add(acc, decay, partial):
                    return ptx("fma.rn.f32", acc, rows(decay, acc.shape[1]), partial)

                # Waits come before an accumulator's scope: so close to the product its
                # zeros cost nothing.
                def scores(i):
                    plgpu.barrier_wait(k_full.at[slot_at(i)])

                    def scoped(accumulator):
                        multiply_qk(i, accumulator)
                        return accumulator[...]

                    return pl.run_scoped(scoped, plgpu.ACC((_SLAB, PAGE)))

                def collect(i, acc, p, decay):
                    plgpu.barrier_wait(v_full.at[slot_at(i)])

                    def columns_from(first):
                        _, partial = multiply_pv(i, p, pl.ds(first, width))
                        return add(acc[:, first : first + width], decay, partial)

                    parts = [columns_from(j) for j in range(0, HEAD_DIM, width)]
                    plgpu.barrier_arrive(v_empty.at[slot_at(i)])
                    return jnp.concatenate(parts, axis=1)

                def in_turn(i, carry, masked):
                    acc, state = carry
                    s, best = scaled(i, scores(i), state[0], masked)
                    p, decay, state = probabilities(i, s, best, state, masked)
                    return collect(i, acc, p, decay), state

                def overlapped(i, carry, masked):
                    """Scores of page i and result of the page before it."""
                    acc, p, decay, state = carry

                    plgpu.barrier_wait(k_full.at[slot_at(i)])
                    plgpu.barrier_wait(v_full.at[slot_at(i - 1)])

                    def with_scores(scores_acc):
                        multiply_qk(i, scores_acc)

                        def scale():
                            s = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                            s, best = scaled(i, s, state[0], masked)
                            return lax.optimization_barrier((s, best))

                        # The result frees its registers, and those of p, before the
                        # new p needs some.
                        columns = pl.ds(0, HEAD_DIM)
                        (s, best), partial = multiply_pv(i - 1, p, columns, scale)
                        plgpu.barrier_arrive(v_empty.at[slot_at(i - 1)])
                        return add(acc, decay, partial), s, best

                    acc, s, best = pl.run_scoped(with_scores, plgpu.ACC((_SLAB, PAGE)))
                    return acc, *probabilities(i, s, best, state, masked)

                def for_pages(first, step, carry):
                    """Every page from ``first`` on, the last of them masked."""

                    def part(masked):
                        return lambda i, carry: step(i, carry, masked)

                    last = jnp.maximum(pages - 1, first)
                    carry = lax.fori_loop(first, last, part(False), carry)
                    return lax.fori_loop(last, pages, part(True), carry)

                acc = constant(0.0, (_SLAB, HEAD_DIM), _WGMMA)
                state = (
                    constant(-np.inf, (_SLAB,)),
                    constant(0.0, (_SLAB, _LANES), _WGMMA),
                    constant(1.0, (_SLAB,)),
                )
                if c.overlap:
                    s, best = scaled(0, scores(0), state[0], masked=True)
                    p, decay, state = probabilities(0, s, best, state, masked=True)
                    carry = for_pages(1, overlapped, (acc, p, decay, state))
                    acc, p, decay, state = carry
                    after_queries()
                    acc = collect(pages - 1, acc, p, decay)
                else:
                    acc, state = for_pages(0, in_turn, (acc, state))
                    after_queries()
                best, sums, norm = state
                total = sums.sum(axis=1)
                inverse = ptx("rcp.rn.f32", total)
                if codes:
                    inverse *= norm * (1.0 / _P_SCALE)
                lse = (best * scale + jnp.log2(total)) * np.float32(math.log(2))
                return acc * rows(inverse), lse

            load_queries(wg, cta)
            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    def smem(leading, rows, dtype):
        """In the layout of TMA and wgmma."""
        tiling = plgpu.TilingTransform((8, _ROW // jnp.dtype(dtype).itemsize))
        transforms = (tiling, plgpu.SwizzleTransform(_ROW))
        return plgpu.SMEM((leading, rows, HEAD_DIM), dtype, transforms=transforms)

    def vectors(leading, size):
        return plgpu.SMEM((leading, size), jnp.float32)

    def barrier(num_arrivals, num_barriers=c.stages):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((heads, num_queries), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=c.warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            smem(c.warpgroups, _SLAB, q.dtype),
            smem(c.stages, PAGE, q.dtype),
            plgpu.SMEM((c.stages, PAGE, HEAD_DIM), E4M3)
            if codes
            else smem(c.stages, PAGE, q.dtype),
            vectors(c.warpgroups, _SLAB) if codes else None,
            [vectors(c.stages, PAGE)] * num_scales,
            smem(c.warpgroups, _SLAB, jnp.bfloat16),
            vectors(c.warpgroups, _SLAB),
            barrier(1 + codes, c.warpgroups),
            barrier(1 + num_scales),
            barrier(1),
            barrier(c.warpgroups),
            barrier(c.warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # no reduction crosses a warp
        ),
        interpret=interpret,
    )(q, *operands)
