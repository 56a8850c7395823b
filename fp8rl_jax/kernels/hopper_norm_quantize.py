"""Residual sum, RMSNorm and quantisation for Hopper (Pallas Mosaic GPU).

A row stays in the registers of one warpgroup, which therefore reads it once: the sum,
its norm and the codes of its 1x128 blocks come from one kernel whatever the number of
rows, and a row's bits depend on nothing but that row and its length. Column codes need
the inverse RMS of 128 rows first and come from a second kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from fp8rl_jax.kernels.hopper_quantize_tiles import (
    BLOCK,
    E4M3,
    SCRATCH_BYTES,
    Interpret,
    Quantized,
    Tiles,
    pad,
    quantize_tiles,
    quantize_values,
)

_NUM_SMS = 132
# Elements whose registers an SM has room for, and CTAs that it runs at most.
_FORWARD_RESIDENCY = (16384, 8)
_BACKWARD_RESIDENCY = (12288, 5)
# A warpgroup takes up to eight rows at a time.
_ROWS = 8


class NormedRows(NamedTuple):
    """The residual sum and its norm.

    Attributes:
      residual: bfloat16 [M, K], the sum.
      inverse_rms: float32 [M].
      normed: bfloat16 [M, K], or None.
      codes: the codes of ``normed``.
    """

    residual: BFloat16[Array, "M K"]
    inverse_rms: Float[Array, "M"]
    normed: BFloat16[Array, "M K"] | None
    codes: Quantized


@functools.partial(
    jax.jit, static_argnames=("eps", "rows", "columns", "normed", "interpret")
)
def add_norm_quantize(
    residual: BFloat16[Array, "M K"],
    update: BFloat16[Array, "M K"],
    scale: Float[Array, "K"],
    *,
    eps: float,
    rows: bool = True,
    columns: bool = False,
    normed: bool = False,
    interpret: Interpret = None,
) -> NormedRows:
    """The norm of residual + update, in bfloat16, as codes, or both.

    The sum is rounded to bfloat16 and the norm is taken of the rounded sum, in float32
    with one rounding to bfloat16, which is what is quantised.

    Args:
      residual: [M, K], K a multiple of 128. Padded (a copy) unless M is a multiple of
        8; so is ``update``.
      update: [M, K].
      scale: float32 [K].
      eps: added to the mean square.
      rows: whether to return codes [M, K].
      columns: whether to return transposed codes [K, M].
      normed: whether to return the norm itself.

    Raises:
      ValueError: K is not a multiple of 128.
    """
    m, k = residual.shape
    step, layout = _rows_layout(k)

    def body(scale, residual, update, total, inverse_rms, *outs):
        weight = plgpu.load(scale, layout=layout.reduce(0), optimized=False)

        def one(at, _):
            x = plgpu.load(residual.at[at], layout=layout, optimized=False)
            x += plgpu.load(update.at[at], layout=layout, optimized=False)
            total[at] = x
            x = x.astype(jnp.float32)
            inverse = lax.rsqrt(_row_mean(x * x) + eps)
            inverse_rms[at] = inverse
            y = x * lax.broadcast_in_dim(inverse, x.shape, [0])
            y = y * lax.broadcast_in_dim(weight, x.shape, [1, 2])
            y = y.astype(jnp.bfloat16)
            if normed:
                outs[0][at] = y
            if rows:
                codes, scales = outs[-2:]
                codes[at], s = quantize_values(y, layout, interpret)
                scales.at[:, at].T[...] = s

        _for_rows(residual.shape[0] // step, step, one, None)

    residual, update = (pad(x, (_ROWS, 1)) for x in (residual, update))
    blocked = (residual.shape[0], k // BLOCK, BLOCK)
    out_types = [(blocked, jnp.bfloat16), (blocked[:1], jnp.float32)]
    if normed:
        out_types += [(blocked, jnp.bfloat16)]
    if rows:
        out_types += [(blocked, E4M3), ((blocked[1], blocked[0]), jnp.float32)]
    total, inverse_rms, *outs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*t) for t in out_types],
        grid=(_num_ctas(blocked[0], step, k, _FORWARD_RESIDENCY),),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=SCRATCH_BYTES),
        interpret=interpret,
    )(scale.reshape(blocked[1:]), residual.reshape(blocked), update.reshape(blocked))
    total = total.reshape(residual.shape)
    out = NormedRows(total[:m], inverse_rms[:m], None, Quantized())
    if normed:
        out = out._replace(normed=outs[0].reshape(residual.shape)[:m])
    if columns:
        out = out._replace(
            codes=quantize_tiles(
                (Tiles(out.residual),),
                k,
                _norm,
                row_vectors=(out.inverse_rms,),
                column_vectors=(scale,),
                by_row=False,
                interpret=interpret,
            )
        )
    if rows:
        codes = outs[-2].reshape(residual.shape)[:m]
        out = out._replace(
            codes=out.codes._replace(codes=codes, scales=outs[-1][:, :m])
        )
    return out


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm_backward(
    dnormed: BFloat16[Array, "M K"],
    dresidual: BFloat16[Array, "M K"],
    residual: BFloat16[Array, "M K"],
    scale: Float[Array, "K"],
    *,
    eps: float,
    interpret: Interpret = None,
) -> tuple[BFloat16[Array, "M K"], Float[Array, "K"]]:
    """The gradients of residual + update and of the norm's scale.

    The norm's own gradient is rounded to bfloat16 before it is added to ``dresidual``,
    and the sum once more. ``dscale`` is summed in an order that depends on M alone.

    Args:
      dnormed: [M, K], the gradient of the norm. Padded (a copy) like the others unless
        M is a multiple of 8.
      dresidual: [M, K], the gradient that reaches the sum past the norm.
      residual: [M, K], the sum that :func:`add_norm_quantize` returned.
      scale: float32 [K].
      eps: as in the forward pass.

    Returns:
      The gradient of the sum, bfloat16 [M, K], and of the scale, float32 [K].

    Raises:
      ValueError: K is not a multiple of 128.
    """
    m, k = residual.shape
    step, layout = _rows_layout(k)

    def body(scale, dnormed, dresidual, residual, dtotal, dscale, scale_s):
        # Not in registers, which the gradient of the scale takes up.
        scale_s[...] = plgpu.load(scale, layout=layout.reduce(0), optimized=False)

        def one(at, dscale):
            def load(ref):
                return plgpu.load(ref.at[at], layout=layout, optimized=False)

            dy, x = (
                load(dnormed).astype(jnp.float32),
                load(residual).astype(jnp.float32),
            )
            past = load(dresidual)
            inverse = lax.rsqrt(_row_mean(x * x) + eps)
            inverse = lax.broadcast_in_dim(inverse, x.shape, [0])
            x = x * inverse
            dscale += dy * x
            weight = plgpu.load(scale_s, layout=layout.reduce(0), optimized=False)
            dy = dy * lax.broadcast_in_dim(weight, x.shape, [1, 2])
            dx = dy - x * lax.broadcast_in_dim(_row_mean(dy * x), x.shape, [0])
            dtotal[at] = past + (dx * inverse).astype(jnp.bfloat16)
            return dscale

        zeros = jnp.zeros((step, k // BLOCK, BLOCK), jnp.float32)
        zeros = plgpu.layout_cast(zeros, layout)
        partial = _for_rows(residual.shape[0] // step, step, one, zeros)
        dscale[lax.axis_index("cta")] = partial

    operands = [pad(x, (_ROWS, 1)) for x in (dnormed, dresidual)]
    # Ones: the inverse RMS of a padded row is finite even if eps is 0.
    operands.append(pad(residual, (_ROWS, 1), 1))
    blocked = (operands[0].shape[0], k // BLOCK, BLOCK)
    num_ctas = _num_ctas(blocked[0], step, k, _BACKWARD_RESIDENCY)
    dtotal, dscale = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(blocked, jnp.bfloat16),
            jax.ShapeDtypeStruct((num_ctas, step, *blocked[1:]), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        scratch_types=(plgpu.SMEM(blocked[1:], jnp.float32),),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=SCRATCH_BYTES),
        interpret=interpret,
    )(scale.reshape(blocked[1:]), *(x.reshape(blocked) for x in operands))
    dscale = jnp.sum(dscale.reshape(num_ctas * step, k), axis=0)
    return dtotal.reshape(operands[0].shape)[:m], dscale


def _norm(x, inverse_rms, scale):
    """The norm of a tile, rounded where the kernel over rows rounds it."""
    return ((x.astype(jnp.float32) * inverse_rms * scale).astype(jnp.bfloat16),)


def _for_rows(num_steps, step, fn, carry):
    """``fn(rows, carry)`` over the CTA's rows, ``step`` at a time."""
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    count = pl.cdiv(num_steps - cta, num_ctas)

    def body(i, carry):
        return fn(pl.ds((cta + i * num_ctas) * step, step), carry)

    return lax.fori_loop(0, count, body, carry)


def _num_ctas(m, step, k, residency):
    """As many as run at once, so that none waits for another to finish."""
    elements, most = residency
    per_sm = max(min(elements // (step * k), most), 1)
    return min(m // step, per_sm * _NUM_SMS)


def _row_mean(x: Float[Array, "rows K/128 128"]) -> Float[Array, "rows"]:
    """Means in an order that is a function of K alone."""
    return jnp.sum(jnp.sum(x, axis=2), axis=1) * (1 / (x.shape[1] * x.shape[2]))


def _rows_layout(k: int) -> tuple[int, Any]:
    """Rows at a time, and the layout of [rows, K/128, 128] bfloat16.

    Sixteen lanes hold a block, 16 bytes each. The eight halves of the four warps lie
    along as many blocks as divide K/128, and along rows otherwise.
    """
    if k % BLOCK:
        raise ValueError(f"The norm needs rows of a multiple of {BLOCK}, got {k}.")
    num_blocks = k // BLOCK
    if num_blocks % 8 == 0:
        tiling, warps, lanes = ((1, 8, BLOCK), (2, BLOCK), (8,)), (-5,), (-3, -2)
    elif num_blocks % 4 == 0:
        tiling, warps, lanes = ((2, 4, BLOCK), (2, 1, BLOCK), (8,)), (-6,), (-4, -2)
    elif num_blocks % 2 == 0:
        tiling, warps, lanes = ((4, 2, BLOCK), (2, 1, BLOCK), (8,)), (-7, -6), (-4, -2)
    else:
        tiling, warps, lanes = ((8, 1, BLOCK), (2, 1, BLOCK), (8,)), (-7,), (-4, -2)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warps, lane_dims=lanes, vector_dim=-1
    )
    return tiling[0][0], layout
