"""Queries, keys and values in blocks of a token and head, for Hopper (Mosaic GPU).

The quantisation is that of `hopper_kv_store`: one power-of-two scale for the 128 values
of a token and head. Bound by memory; a row's bits depend on that row alone.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from fp8rl_jax.kernels.hopper_kv_store import (
    HEAD_DIM,
    token_amax,
    token_codes,
    token_scales,
    token_values,
)
from fp8rl_jax.kernels.hopper_quantize_tiles import E4M3, Interpret, pad, wide_rows

_TOKENS = 32  # of a thread block, which has one head of them


def quantize_tokens(
    x: BFloat16[Array, "T N 128"],
    *,
    with_values: bool = False,
    interpret: Interpret = None,
) -> tuple[Array, ...]:
    """Codes and scales.

    Args:
      x: padded (a copy) unless T is a multiple of 32.
      with_values: whether to return what the codes stand for as well.
      interpret: parameters of Pallas' GPU interpret mode, which runs the kernel on CPU.

    Returns:
      e4m3 codes [T, N, 128] and float32 scales [N, T]. With values, the dequantised
      ones, exact, bfloat16 [T, N, 128].

    Raises:
      ValueError: ``x`` has another dtype or head dimension.
    """
    if x.dtype != jnp.bfloat16 or x.shape[2:] != (HEAD_DIM,):
        raise ValueError(
            f"Tokens must be bfloat16 [T, N, {HEAD_DIM}], got {x.dtype.name} {x.shape}."
        )
    num_tokens = x.shape[0]
    x = pad(x, (_TOKENS, 1, 1))
    layout = wide_rows(x.dtype)

    def body(x, codes_out, scales_out, *values_out):
        tokens = pl.ds(lax.axis_index("tokens") * _TOKENS, _TOKENS)
        head = lax.axis_index("head")
        tile = plgpu.load(x.at[tokens, head], layout=layout, optimized=False)
        scales = token_scales(token_amax(tile))
        codes = token_codes(tile, scales, 0)
        codes_out.at[tokens, head][...] = codes
        scales_out.at[head, tokens][...] = scales
        for out in values_out:
            out.at[tokens, head][...] = token_values(codes, scales)

    types = [(x.shape, E4M3), (x.shape[1::-1], jnp.float32)]
    types += [(x.shape, x.dtype)] * with_values
    codes, scales, *values = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*t) for t in types],
        grid=(x.shape[0] // _TOKENS, x.shape[1]),
        grid_names=("tokens", "head"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x)
    return codes[:num_tokens], scales[:, :num_tokens], *(v[:num_tokens] for v in values)
