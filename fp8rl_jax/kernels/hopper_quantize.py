"""Quantisation of activations, gradients and weights for Hopper (Pallas Mosaic GPU).

Activation scales are laid out [K/128, M], which is how the products read them. Every
function takes ``interpret``: parameters of Pallas' GPU interpret mode, which runs a
kernel on CPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn

from fp8rl_jax.kernels.hopper_quantize_tiles import (
    BLOCK,
    E4M3,
    SCRATCH_BYTES,
    WGMMA,
    Interpret,
    Quantized,
    Tiles,
    pad,
    quantize_tiles,
    scale_and_inverse,
    smem,
)


def quantize_rows(
    x: Float[Array, "M K"], *, interpret: Interpret = None
) -> tuple[Float8e4m3fn[Array, "M K"], Float[Array, "K/128 M"]]:
    """Codes and scales of the 1x128 blocks along K.

    Args:
      x: [M, K], bfloat16 or float32. Padded with zeros (a copy) unless M is a multiple
        of 8 and K of 128.

    Raises:
      ValueError: ``x`` is of another dtype.
    """
    out = _quantize(x, by_column=False, interpret=interpret)
    return out.codes, out.scales


def quantize_columns(
    x: Float[Array, "M K"], *, interpret: Interpret = None
) -> tuple[Float8e4m3fn[Array, "K M"], Float[Array, "M/128 K"]]:
    """Codes and scales of the 1x128 blocks of ``x``'s transpose, along M.

    Args:
      x: bfloat16 [M, K]. The codes come in whole blocks of rows: unless M is a multiple
        of 128, cutting them costs a copy, which a caller avoids by padding with zeros.

    Raises:
      ValueError: ``x`` is not bfloat16.
    """
    out = _quantize(x, by_row=False, interpret=interpret)
    return out.codes_t, out.scales_t


def quantize_both(x: Float[Array, "M K"], *, interpret: Interpret = None) -> Quantized:
    """:func:`quantize_rows` and :func:`quantize_columns` in one pass over ``x``."""
    return _quantize(x, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("by_row", "by_column", "interpret"))
def _quantize(x, *, by_row=True, by_column=True, interpret):
    if x.dtype != jnp.bfloat16 and (by_column or x.dtype != jnp.float32):
        raise ValueError(
            f"Rows of bfloat16 or float32 and columns of bfloat16 can be quantised, "
            f"got {x.dtype}."
        )
    k = x.shape[1]
    x = pad(x, (1, BLOCK))
    out = quantize_tiles(
        (Tiles(x),), x.shape[1], by_row=by_row, by_column=by_column, interpret=interpret
    )
    if x.shape[1] == k:
        return out
    if by_row:
        out = out._replace(codes=out.codes[:, :k])
    if by_column:
        out = out._replace(codes_t=out.codes_t[:k], scales_t=out.scales_t[:, :k])
    return out


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_weight(
    w: Float[Array, "*L N K"], *, interpret: Interpret = None
) -> tuple[
    Float8e4m3fn[Array, "*L N K"],
    Float[Array, "*L N/128 K/128"],
    Float8e4m3fn[Array, "*L K N"],
]:
    """Codes and scales of 128x128 blocks, and the codes' transpose.

    Args:
      w: float32 [..., N, K]. Padded with zeros (a copy) unless N and K are multiples of
        128.

    Raises:
      ValueError: ``w`` is not float32.
    """
    if w.dtype != jnp.float32:
        raise ValueError(f"Weights are quantised from float32, got {w.dtype}.")
    if w.ndim > 2:
        return jax.vmap(functools.partial(quantize_weight, interpret=interpret))(w)
    n, k = w.shape
    w = pad(w, (BLOCK, BLOCK))
    padded_n, padded_k = w.shape

    def body(w, codes, scales, codes_t, buffer, codes_s, amax_s, loaded):
        ni, ki = lax.axis_index("n"), lax.axis_index("k")
        ns, ks = pl.ds(ni * BLOCK, BLOCK), pl.ds(ki * BLOCK, BLOCK)
        w_s, halves_s = buffer
        plgpu.copy_gmem_to_smem(w.at[ns, ks], w_s, loaded)
        plgpu.barrier_wait(loaded)
        x = plgpu.load(w_s, layout=WGMMA)
        amax = jnp.max(jnp.max(jnp.abs(x), axis=1), axis=0)
        amax_s[...] = jnp.full(BLOCK, amax)
        amax = plgpu.load(amax_s, layout=WGMMA.reduce(1))
        scale, inverse = scale_and_inverse(amax, WGMMA.reduce(1), interpret)
        amax_s[...] = scale
        y = (x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(E4M3)
        codes_s[0] = y
        # float16 holds every code exactly and is what ldmatrix can transpose.
        halves_s[...] = y.astype(jnp.float16)
        codes_s[1] = plgpu.load(halves_s.T, layout=WGMMA).astype(E4M3)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(codes_s.at[0], codes.at[ns, ks])
        plgpu.copy_smem_to_gmem(codes_s.at[1], codes_t.at[ks, ns])
        scales[ni, ki] = amax_s[0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tile = (BLOCK, BLOCK)
    codes, scales, codes_t = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((padded_n, padded_k), E4M3),
            jax.ShapeDtypeStruct((padded_n // BLOCK, padded_k // BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((padded_k, padded_n), E4M3),
        ),
        grid=(padded_n // BLOCK, padded_k // BLOCK),
        grid_names=("n", "k"),
        scratch_types=(
            # The weights are in registers when their codes are transposed.
            plgpu.RefUnion(smem(tile, jnp.float32), smem(tile, jnp.float16)),
            smem((2, *tile), E4M3),
            plgpu.SMEM((BLOCK,), jnp.float32),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=SCRATCH_BYTES),
        interpret=interpret,
    )(w)
    return codes[:n, :k], scales, codes_t[:k, :n]
