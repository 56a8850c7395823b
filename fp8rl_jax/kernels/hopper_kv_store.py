"""New keys and values into the paged pool, in place, for Hopper (Pallas Mosaic GPU).

A pool of L layers and P pages of 128 slots for each of K KV heads is either

* bfloat16: ``(k, v)``, both [L, P, K, 128, H]; or
* FP8: ``(k, v, k_scales, v_scales)``, e4m3 codes k [L, P, K, 128, H] and
  v [L, P, K, 8, H, 16], laid out as `hopper_value_pages` says, float32 scales
  [L, P, K, 128] in the order of slots.

A token and head has one scale, amax / 448 rounded up to a power of two, and its codes
depend on nothing else. If any of its values is inf or NaN, the scale is NaN and the
codes are zeros: what is not finite stays visible to whoever attends to the token, and a
stale page has no code that would make 0 * code NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Int

from fp8rl_jax.kernels.hopper_quantize_tiles import (
    BLOCK,
    E4M3,
    WGMMA,
    Interpret,
    smem,
    wide_rows,
)
from fp8rl_jax.kernels.hopper_value_pages import (
    GROUP,
    HEAD_DIM,
    VALUE_PAGE,
    in_columns,
    value_place,
)

WARPS = 4  # of a warpgroup
_HEADS = 4  # of a token that a warpgroup takes: one a warp
_ONE_OVER_MAX = np.float32(1.0 / 448)
# Below this amax the scale would be subnormal; such a token is zero for our purposes.
_AMAX_FLOOR = 448 * 2.0**-126


def store_kv(
    refs: Sequence[jax.Ref],
    k: BFloat16[Array, "T K 128"],
    v: BFloat16[Array, "T K 128"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
    layer: Int[Array, ""],
    *,
    interpret: Interpret = None,
) -> None:
    """Stores each token in a slot of its own: a decode step.

    The bytes of an FP8 value, 16 apart, go straight from registers.

    Args:
      refs: the pool, see the module; written in place.
      k: new keys after RoPE.
      v: new values.
      pages: int32 page of each token; negative for none, the token is dropped.
      slots: int32 slot in that page, 0..127. No two tokens may share one.
      layer: int32 scalar.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    num_tokens, num_heads = check_operands(refs, k, v, (pages, slots))
    heads = math.gcd(num_heads, _HEADS)
    fp8 = is_fp8(refs)
    # The values of an FP8 pool are apart: a store takes one of each thread.
    layouts = [one_head_a_warp(heads, vector) for vector in (4, 1 if fp8 else 4)]

    def body(k, v, pages, slots, layer):
        token = lax.axis_index("token")
        group = pl.ds(lax.axis_index("heads") * heads, heads)
        page, slot, layer_index = pages[token], slots[token], layer[0]

        # While those are on their way:
        new = [
            plgpu.load(ref.at[token, group], layout=layout, optimized=False)
            for ref, layout in zip((k, v), layouts, strict=True)
        ]
        if fp8:
            scales = [token_scales(token_amax(x)) for x in new]
            new = [token_codes(x, s, 0) for x, s in zip(new, scales, strict=True)]

        # The sign is the page's. Were the other two not in the condition, they would be
        # fetched after it: twice the latency.
        @pl.when((page | slot | layer_index) >= 0)
        def _store():
            outs = [ref.at[layer_index, page, group] for ref in refs]
            outs[0].at[:, slot][...] = new[0]
            if not fp8:
                outs[1].at[:, slot][...] = new[1]
                return
            row_group, column = value_place(slot)
            outs[1].at[:, row_group, :, column][...] = new[1]
            for ref, scale in zip(outs[2:], scales, strict=True):
                ref.at[:, slot][...] = scale

    plgpu.kernel(
        body,
        grid=(num_tokens, num_heads // heads),
        grid_names=("token", "heads"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(k, v, pages, slots, jnp.reshape(layer, (1,)))


def store_kv_pages(
    refs: Sequence[jax.Ref],
    k: BFloat16[Array, "T K 128"],
    v: BFloat16[Array, "T K 128"],
    pages: Int[Array, "T/128"],
    layer: Int[Array, ""],
    *,
    interpret: Interpret = None,
) -> None:
    """Stores runs of 128 tokens as whole pages: prefill.

    Args:
      refs: the pool, see the module; written in place.
      k: new keys after RoPE, T a multiple of 128.
      v: new values.
      pages: int32 page of each run; negative for none, the run is dropped. No two runs
        may share one.
      layer: int32 scalar.
      interpret: see :func:`store_kv`.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    check_operands(refs, k, v, (pages,), BLOCK)
    _launch_pages(k, v, (refs, pages, layer), False, interpret)


def quantize_kv_pages(
    k: BFloat16[Array, "T K 128"],
    v: BFloat16[Array, "T K 128"],
    *,
    with_values: bool = False,
    interpret: Interpret = None,
) -> tuple[Array, ...]:
    """The pages that :func:`store_kv_pages` stores in an FP8 pool, as new arrays.

    Args:
      k: keys after RoPE, T a multiple of 128.
      v: values.
      with_values: whether to return what the codes stand for as well.
      interpret: see :func:`store_kv`.

    Returns:
      Codes of keys [T/128, K, 128, 128] and of values [T/128, K, 8, 128, 16], float32
      scales of keys and of values [T/128, K, 128]: one layer's pool of T/128 pages.
      With values, the dequantised keys and values, exact, bfloat16 [T, K, 128].

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    _check_new(k, v, BLOCK)
    pages = _launch_pages(k, v, None, with_values, interpret)
    return (*pages[:4], *(x.reshape(k.shape) for x in pages[4:]))


def _launch_pages(k, v, into, with_values, interpret):
    num_tokens, num_heads, _ = k.shape
    num_pages = num_tokens // BLOCK
    refs, pages, layer = into or (None, None, None)
    fp8 = into is None or is_fp8(refs)

    def body(k, v, *rest):
        run, head = lax.axis_index("run"), lax.axis_index("head")
        if into is None:
            *outs, buffers, scales_s, loaded = rest
            page, outs, rounded = run, [x.at[run, head] for x in outs[:4]], outs[4:]
        else:
            pages, layer, buffers, scales_s, loaded = rest
            page, rounded = pages[run], ()
            outs = [ref.at[layer[0], page, head] for ref in refs]

        @pl.when(page >= 0)
        def _store():
            tokens = pl.ds(run * BLOCK, BLOCK)
            columns = pl.ds(head * HEAD_DIM, HEAD_DIM)
            tiles, keys_s, values_s = buffers
            # Where the tiles were, each of which is in registers by then.
            codes_s = keys_s, values_s.at[2]
            for i, ref in enumerate((k, v)):
                source = ref.at[tokens, columns]
                plgpu.copy_gmem_to_smem(source, tiles.at[i], loaded.at[i])
            for i in range(2):
                plgpu.barrier_wait(loaded.at[i])
                if not fp8:
                    plgpu.copy_smem_to_gmem(tiles.at[i], outs[i])
                    continue
                layout = wide_rows(jnp.bfloat16)
                x = plgpu.load(tiles.at[i], layout=layout)
                scales = token_scales(token_amax(x))
                scales_s[i] = scales
                if rounded:
                    values = token_values(token_codes(x, scales, 0), scales)
                    rounded[i].at[tokens, columns][...] = values
                if i == 0:
                    codes_s[i][...] = token_codes(x, scales, 0)
                else:
                    x = plgpu.load(tiles.at[i].T, layout=WGMMA)
                    scales = plgpu.load(scales_s.at[i], layout=WGMMA.reduce(0))
                    _store_page(codes_s[i], token_codes(x, scales, 1), interpret)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(codes_s[i], outs[i])
                plgpu.copy_smem_to_gmem(scales_s.at[i], outs[2 + i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    page_shape = (num_pages, num_heads, BLOCK, HEAD_DIM)
    out_types = []
    operands = [x.reshape(num_tokens, num_heads * HEAD_DIM) for x in (k, v)]
    if into is None:
        keys, values = (
            jax.ShapeDtypeStruct((*page_shape[:2], *page), E4M3)
            for page in (page_shape[2:], VALUE_PAGE)
        )
        scales = jax.ShapeDtypeStruct(page_shape[:-1], jnp.float32)
        out_types = [keys, values, scales, scales]
        if with_values:
            out_types += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    else:
        operands += [pages, jnp.reshape(layer, (1,))]
    tile = (BLOCK, HEAD_DIM)
    return plgpu.kernel(
        body,
        out_type=out_types,
        grid=(num_pages, num_heads),
        grid_names=("run", "head"),
        scratch_types=(
            plgpu.RefUnion(
                smem((2, *tile), jnp.bfloat16),
                smem(tile, E4M3),
                plgpu.SMEM((3, *VALUE_PAGE), E4M3),  # two are as large as a tile
            ),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ),
        interpret=interpret,
    )(*operands)


def _check_new(k, v, multiple=1):
    if k.ndim != 3 or k.shape[2] != HEAD_DIM or k.shape[0] % multiple:
        raise ValueError(
            f"New keys must be [T, K, {HEAD_DIM}] with T a multiple of {multiple}, got "
            f"{k.shape}."
        )
    if v.shape != k.shape or not k.dtype == v.dtype == jnp.bfloat16:
        raise ValueError(
            f"New keys and values must be bfloat16 of one shape, got {k.dtype.name} "
            f"{k.shape} and {v.dtype.name} {v.shape}."
        )
    return k.shape[:2]


def check_operands(refs, k, v, indices, multiple=1):
    """Raises a ValueError unless they fit; returns the numbers of tokens and heads."""
    num_tokens, num_heads = _check_new(k, v, multiple)
    needed = (num_tokens // multiple,)
    if any(index.shape != needed for index in indices):
        raise ValueError(
            f"{num_tokens} tokens go to places of shape {needed}, got "
            f"{[index.shape for index in indices]}."
        )
    tile = (*refs[0].shape[:2], num_heads, BLOCK, HEAD_DIM)
    if is_fp8(refs):
        values = (*tile[:3], *VALUE_PAGE)
        expected = [(tile, E4M3), (values, E4M3)] + [(tile[:-1], jnp.float32)] * 2
    else:
        expected = [(tile, jnp.bfloat16)] * 2
    expected = [(shape, jnp.dtype(dtype)) for shape, dtype in expected]
    actual = [(ref.shape, ref.dtype) for ref in refs]
    if actual != expected:
        raise ValueError(
            f"For keys {k.shape} the pool must be {expected}, got {actual}."
        )
    return num_tokens, num_heads


def is_fp8(refs) -> bool:
    """Whether the pool holds codes."""
    return refs[0].dtype == E4M3


def token_amax(x: BFloat16[Array, "rows 128"]) -> Float[Array, "rows"]:
    """The largest magnitude of each row, NaN if it holds one."""
    return jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)


def token_scales(amax: Float[Array, "..."]) -> Float[Array, "..."]:
    """amax / 448, up to a power of two; NaN if it is not finite."""
    scale = amax * _ONE_OVER_MAX
    scale = jnp.where(amax < _AMAX_FLOOR, jnp.ones_like(scale), scale)
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(amax < jnp.inf, up, jnp.full_like(up, jnp.nan))


def token_codes(
    x: BFloat16[Array, "rows columns"], scales: Float[Array, "_"], axis: int
) -> Float8e4m3fn[Array, "rows columns"]:
    """Codes of rows or columns (axis 0, 1) with these scales; 0 where one is NaN."""
    # The reciprocal of a power of two, exactly.
    bits = 0x7F000000 - lax.bitcast_convert_type(scales, jnp.int32)
    inverse = lax.bitcast_convert_type(bits, jnp.float32)
    scaled = x.astype(jnp.float32) * lax.broadcast_in_dim(inverse, x.shape, [axis])
    finite = lax.broadcast_in_dim(scales == scales, x.shape, [axis])
    return jnp.where(finite, scaled, jnp.zeros_like(scaled)).astype(E4M3)


def token_values(
    codes: Float8e4m3fn[Array, "rows 128"], scales: Float[Array, "rows"]
) -> BFloat16[Array, "rows 128"]:
    """What codes of rows stand for, which bfloat16 holds exactly."""
    # There is no direct conversion; float16 holds every code.
    values = codes.astype(jnp.float16).astype(jnp.float32)
    values *= lax.broadcast_in_dim(scales, values.shape, [0])
    return values.astype(jnp.bfloat16)


def one_head_a_warp(heads: int, vector: int) -> Any:
    """The layout of [heads, 128] in which a thread holds ``vector`` adjacent values.

    If there are fewer heads than warps, several warps hold and store the same.
    """
    rows = math.gcd(heads, WARPS)
    tiles = [(rows, HEAD_DIM), (vector * 32,), (vector,)]
    if vector * 32 == HEAD_DIM:
        del tiles[1]
    warps = [] if rows == 1 else [-1 - len(tiles)]
    if rows < WARPS:
        warps.append(plgpu.Replicated(WARPS // rows))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=tuple(warps),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _store_page(
    ref: jax.Ref, codes: Float8e4m3fn[Array, "128 128"], interpret: Interpret
) -> None:
    """Stores codes of values [H, tokens] as a page.

    A thread holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a group, which is what it
    must hold as 4t to 4t + 3: only the names of its registers change.
    """
    rows, columns = codes.shape
    if interpret is not None:
        ref[...] = in_columns(codes).reshape(rows, -1, GROUP).swapaxes(0, 1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_, ref, codes):
        # By slab of 64 rows, group of 16 columns, half of it, and half of the rows.
        pairs = codes.registers.reshape(rows // 64, columns // GROUP, 2, 2)
        quads = np.empty((rows // 64, columns // GROUP, 2), dtype=object)
        for i in np.ndindex(quads.shape):
            slab, group, half = i
            quads[i] = mgpu.utils.vector_concat(list(pairs[slab, group, :, half]))
        layout = fa.WGMMA_LAYOUT_8BIT
        codes = fa.FragmentedArray(
            _registers=quads.reshape(layout.registers_shape(codes.shape)),
            _layout=layout,
            _is_signed=None,
        )
        # Until no warp reads what was there: Pallas waits for its own stores only.
        mgpu.utils.warpgroup_barrier()
        # [rows, columns] in one tile of rows and 16 columns after the other.
        codes.store_tiled(mgpu.utils.memref_unsqueeze(ref, 0), swizzle=GROUP)

    store(ref, codes)
