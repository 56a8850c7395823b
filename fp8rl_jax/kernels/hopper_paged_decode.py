"""Decode attention over a paged cache for Hopper: one query a sequence.

Bound by memory: every visible key and value is read once. Pages that several sequences
share can be read once for all of them: a first kernel runs over those pages with the
queries of the whole group and keeps the state of each query's softmax, a second one
goes on from there with each sequence's own pages. It is the state that it would have
come to itself, so the result has the same bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from fp8rl_jax.kernels.hopper_decode_kernel import (
    Columns,
    DecodeConfig,
    Start,
    Tables,
    launch,
)
from fp8rl_jax.kernels.hopper_decode_softmax import PAGE, TILE_ROWS
from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3
from fp8rl_jax.kernels.hopper_value_pages import HEAD_DIM, VALUE_PAGE, for_copies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """Groups of sequences whose first pages are the same; the same in every layer.

    Attributes:
      groups: int32: the rows of each group in the batch, -1 for none. Groups do not
        overlap.
      page_table: int32: the pages that a group shares, its first ``num_pages``.
      num_pages: int32: how many; 0 for a group of nobody.
      order: int32: groups by descending number of pages.
      first: int32: each sequence's first page that is not shared.
      place: int32: its place in ``groups``, flattened; -1 for none.
    """

    groups: Int[Array, "groups members"]
    page_table: Int[Array, "groups max_pages"]
    num_pages: Int[Array, "groups"]
    order: Int[Array, "groups"]
    first: Int[Array, "B"]
    place: Int[Array, "B"]

    @staticmethod
    def max_members(group: int) -> int:
        """Sequences of a group, for ``group`` query heads a KV head.

        More queries than two warpgroups take do not fit into shared memory.
        """
        return 2 * DecodeConfig.columns // _padded(group)

    @classmethod
    def create(
        cls,
        groups: Int[Array, "groups members"],
        num_pages: Int[Array, "groups"],
        page_table: Int[Array, "B max_pages"],
    ) -> "SharedPrefix":
        """The groups' tables.

        Args:
          groups: int32: rows of the batch, -1 for none; the first of a group that has
            pages is not -1.
          num_pages: int32: full pages that the rows of a group share. All their keys
            are visible to a row, or the row has none (an empty slot).
          page_table: int32: of the batch.
        """
        num_seqs = page_table.shape[0]
        members = groups.shape[1]
        # Out of bounds, hence dropped, where there is no row.
        rows = jnp.where(groups < 0, num_seqs, groups).reshape(-1)
        places = jnp.arange(rows.size, dtype=jnp.int32)
        none = jnp.full((num_seqs,), -1, jnp.int32)
        place = none.at[rows].set(places, mode="drop")
        first = jnp.where(place < 0, 0, num_pages[place // members])
        return cls(
            groups=groups,
            page_table=page_table[jnp.maximum(groups[:, 0], 0)],
            num_pages=num_pages,
            order=jnp.argsort(-num_pages).astype(jnp.int32),
            first=first,
            place=place,
        )


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
    shared: SharedPrefix | None = None,
    shared_config: DecodeConfig | None = None,
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
      order: int32: the sequences by descending length, of what is not shared; sorted
        here if None. Only the speed depends on it.
      config: how to cut the work; chosen by dtype if None.
      shared: sequences that share pages, which are then read once. It changes the speed
        of the call, not its result.
      shared_config: how to cut the work on these pages.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    scales = (q_scales, k_scales, v_scales)
    if order is None:
        own = lengths if shared is None else lengths - shared.first * PAGE
        order = jnp.argsort(-own)
    _check(q, k, v, scales, page_table, lengths, order, shared)
    fp8 = q.dtype == E4M3
    if config is None:
        config = DecodeConfig() if fp8 else DecodeConfig(blocks_per_sm=1)
    num_seqs, num_kv, group, _ = q.shape
    padded = _padded(group)
    queries, pages = [q], [_flat(k), _flat(for_copies(v) if fp8 else v)]
    if fp8:
        queries += [q_scales]
        pages += [_flat(k_scales), _flat(v_scales)]
    layer = jnp.reshape(layer, (1,))
    static = dict(num_kv=num_kv, num_pages=k.shape[1], interpret=interpret)
    start = None
    if shared is not None:
        if shared_config is None:
            shared_config = DecodeConfig(4 if fp8 else 2, blocks_per_sm=1)
        start = _attend_shared(
            queries, pages, layer, shared, padded, shared_config, static
        )

    def tiles(x):
        x = _pad(x.reshape(num_seqs * num_kv, group, *x.shape[3:]), 1, padded)
        x = _pad(x.reshape(-1, *x.shape[2:]), 0, TILE_ROWS)
        return x.reshape(-1, TILE_ROWS, *x.shape[1:])

    # Rows of softmax: one warp has one head, or two.
    heads = 4 if padded <= 4 else 8
    out = launch(
        [tiles(x) for x in queries],
        pages,
        Tables(page_table, lengths, order, layer),
        Columns(rows=padded, width=TILE_ROWS, softmax=heads, warpgroups=1),
        group=group,
        config=config,
        start=start,
        **static,
    )
    return out.reshape(q.shape)


def _padded(group):
    """Rows of a KV head's queries, which must not straddle the tiles of eight."""
    return 1 << (group - 1).bit_length()


def _flat(x):
    """Layers, pages and KV heads in one dimension."""
    return x.reshape(-1, *x.shape[3:])


def _pad(x, axis, multiple):
    """Zeros up to a multiple."""
    extra = -x.shape[axis] % multiple
    if not extra:
        return x
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])


def _attend_shared(queries, pages, layer, shared, padded, config, static) -> Start:
    """The state of all members of groups after the pages that they share."""
    num_groups, members = shared.groups.shape
    warpgroups = pl.cdiv(members * padded, config.columns)
    width = pl.cdiv(members * padded, warpgroups * TILE_ROWS) * TILE_ROWS
    stride = warpgroups * width

    def tiles(x):
        """Rows of a KV head of a group together: its members, of each the heads."""
        x = jnp.take(x, shared.groups, axis=0, mode="clip").swapaxes(1, 2)
        x = _pad(x, 3, padded)
        x = x.reshape(num_groups * x.shape[1], members * padded, *x.shape[4:])
        return _pad(x, 1, stride).reshape(-1, width, *x.shape[2:])

    state = launch(
        [tiles(x) for x in queries],
        pages,
        Tables(shared.page_table, shared.num_pages * PAGE, shared.order, layer),
        Columns(rows=stride, width=width, softmax=width, warpgroups=warpgroups),
        group=None,
        config=config,
        **static,
    )
    return Start(state, shared.first, shared.place, members, stride)


def _check(q, k, v, scales, page_table, lengths, order, shared):
    num_seqs, num_kv, group, _ = q.shape
    fp8 = q.dtype == E4M3
    pages = (*k.shape[:2], num_kv, PAGE)
    if group > TILE_ROWS or q.dtype not in (E4M3, jnp.bfloat16):
        raise ValueError(
            f"q must be e4m3 or bfloat16 with at most {TILE_ROWS} heads a KV head, "
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
    if shared is not None:
        members, most = shared.groups.shape[1], SharedPrefix.max_members(group)
        if members > most:
            raise ValueError(
                f"Groups have at most {most} members with {group} heads a KV head, got "
                f"{members}."
            )
        for name in ("first", "place"):
            expected[f"shared.{name}"] = getattr(shared, name), jnp.int32, (num_seqs,)
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
