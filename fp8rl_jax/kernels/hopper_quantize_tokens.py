"""Queries, keys and values in blocks of a token and head, for Hopper (Mosaic GPU).

The quantisation is that of `hopper_kv_store`: one power-of-two scale for the 128 values
of a token and head. Bound by memory; a row's bits depend on that row alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn

from fp8rl_jax.kernels.hopper_kv_store import (
    HEAD_DIM,
    token_amax,
    token_codes,
    token_scales,
)
from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, Interpret, pad, wide_rows

_TOKENS = 32  # of a thread block, which has one head of them


def quantize_tokens(
    x: BFloat16[Array, "T N 128"], *, interpret: Interpret = None
) -> tuple[Float8e4m3fn[Array, "T N 128"], Float[Array, "N T"]]:
    """Codes and scales.

    Args:
      x: padded (a copy) unless T is a multiple of 32.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.
    """

    def store(at, codes, scales, outs):
        tokens, head = at
        outs[0].at[tokens, head][...] = codes
        outs[1].at[head, tokens][...] = scales

    num_tokens = x.shape[0]
    x = pad(x, (_TOKENS, 1, 1))
    types = [(x.shape, E4M3), (x.shape[1::-1], jnp.float32)]
    codes, scales = _launch(x, types, store, interpret)
    return codes[:num_tokens], scales[:, :num_tokens]


def round_tokens(
    x: BFloat16[Array, "T N 128"], *, interpret: Interpret = None
) -> BFloat16[Array, "T N 128"]:
    """The values that the codes of ``x`` stand for, which bfloat16 holds exactly.

    Args:
      x: padded (a copy) unless T is a multiple of 32.
      interpret: see :func:`quantize_tokens`.
    """

    def store(at, codes, scales, outs):
        # There is no direct conversion; float16 holds every code.
        values = codes.astype(jnp.float16).astype(jnp.float32)
        values *= lax.broadcast_in_dim(scales, values.shape, [0])
        outs[0].at[at[0], at[1]][...] = values.astype(jnp.bfloat16)

    num_tokens = x.shape[0]
    x = pad(x, (_TOKENS, 1, 1))
    (values,) = _launch(x, [(x.shape, jnp.bfloat16)], store, interpret)
    return values[:num_tokens]


def _launch(x, out_types, store: Callable[..., None], interpret):
    """``store((tokens, head), codes, scales, outs)`` for every tile, in registers."""
    if x.dtype != jnp.bfloat16 or x.shape[2:] != (HEAD_DIM,):
        raise ValueError(
            f"Tokens must be bfloat16 [T, N, {HEAD_DIM}], got {x.dtype.name} {x.shape}."
        )
    layout = wide_rows(x.dtype)

    def body(x, *outs):
        tokens = pl.ds(lax.axis_index("tokens") * _TOKENS, _TOKENS)
        head = lax.axis_index("head")
        tile = plgpu.load(x.at[tokens, head], layout=layout, optimized=False)
        scales = token_scales(token_amax(tile))
        store((tokens, head), token_codes(tile, scales, 0), scales, outs)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*t) for t in out_types],
        grid=(x.shape[0] // _TOKENS, x.shape[1]),
        grid_names=("tokens", "head"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x)
