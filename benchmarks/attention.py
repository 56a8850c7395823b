"""Speed of causal attention in training, forward and backward, beside cuDNN's.

    python -m benchmarks.attention

Qwen3-8B's heads (32 query, 8 KV, head_dim 128). Times are of the kernels alone, median
and [fastest, slowest]. TFLOP/s count 4 T^2 / 2 N H a sequence for the forward pass and
3.5 times that for both passes. ``attention`` takes bfloat16 queries, keys and values
and quantises them itself; ``kernel`` is its attention kernel alone.

Hardware: one Hopper GPU; half a minute.
"""

import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags
from jaxtyping import Array

from benchmarks.device_time import device_time
from fp8rl_jax.attention import attention
from fp8rl_jax.attention.layout import quantize_tokens
from fp8rl_jax.console import print_table
from fp8rl_jax.fp8 import BLOCK, get_recipe
from fp8rl_jax.kernels.hopper_kv_store import quantize_kv_pages
from fp8rl_jax.kernels.hopper_paged_attention import paged_attention

_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls.", lower_bound=1)
_SHAPES = ((4, 4096), (1, 16384))
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


def operands(batch: int, length: int) -> tuple[Array, ...]:
    """Random queries, keys, values and output gradients."""
    shapes = [(batch, length, n, _HEAD_DIM) for n in (_HEADS, _KV_HEADS, _KV_HEADS)]
    shapes.append(shapes[0])
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def ours(q, k, v, name) -> Array:
    """The model's attention under a recipe."""
    positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    positions = jnp.broadcast_to(positions, q.shape[:2])
    return attention(q, k, v, positions, None, get_recipe(name).train)


def cudnn(q, k, v) -> Array:
    """cuDNN's, in bfloat16."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def both(fn: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """The gradients of ``fn`` with its forward pass."""
    return lambda q, k, v, d_out: jax.vjp(fn, q, k, v)[1](d_out)


@functools.partial(jax.jit, static_argnames="fp8")
def kernel_operands(q, k, v, fp8):
    """What the attention kernel reads."""
    batch, length = q.shape[:2]
    blocks = batch * length // BLOCK
    own = jnp.arange(blocks, dtype=jnp.int32)
    first = own // (length // BLOCK) * (length // BLOCK)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    extra = {}
    if fp8:
        codes = quantize_tokens(q)
        q = codes.codes
        k, v, k_scales, v_scales = (x[None] for x in quantize_kv_pages(k, v))
        extra = {
            "q_scales": codes.scales[..., 0].T,
            "k_scales": k_scales,
            "v_scales": v_scales,
        }
    else:
        k, v = (
            x.reshape(blocks, BLOCK, *x.shape[1:]).swapaxes(1, 2)[None] for x in (k, v)
        )
    schedule = own[None], jnp.zeros_like(own), first, own, jnp.int32(0)
    return (q, k, v, *schedule), extra


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    rows = []
    for batch, length in _SHAPES:
        *qkv, d_out = operands(batch, length)
        flops = 4 * batch * length**2 / 2 * _HEADS * _HEAD_DIM

        def add(name, fn, args, passes, flops=flops, shape=f"{batch} x {length}"):
            times = device_time(fn, [args], repeats=_REPEATS.value)
            us, *ends = (1e6 * f(times) for f in (statistics.median, min, max))
            rows.append(
                {
                    "causal": shape,
                    "attention": name,
                    "us": f"{us:.0f} [{ends[0]:.0f}, {ends[1]:.0f}]",
                    "TFLOP/s": f"{passes * flops / us / 1e6:.0f}",
                }
            )
            print(rows[-1], flush=True)

        for name in ("fp8", "bf16"):
            args = kernel_operands(*qkv, fp8=name == "fp8")
            run = lambda args, extra: paged_attention(*args, **extra)  # noqa: E731
            add(f"{name} kernel, forward", run, args, 1)
            add(f"{name}, forward", functools.partial(ours, name=name), qkv, 1)
        add("cuDNN bf16, forward", cudnn, qkv, 1)
        for name in ("fp8", "bf16"):
            fn = both(functools.partial(ours, name=name))
            add(f"{name}, forward + backward", fn, (*qkv, d_out), 3.5)
        add("cuDNN bf16, forward + backward", both(cudnn), (*qkv, d_out), 3.5)
    print_table(rows, f"Causal attention, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    app.run(main)
