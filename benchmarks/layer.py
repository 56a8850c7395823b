"""Time and memory of one Qwen3-8B layer, forward and backward, in FP8 and in bf16.

    python -m benchmarks.layer

Four sequences of 2,048 tokens. Both sides run the model's own layer: norms, QK-norm,
RoPE, SiLU and the projections; attention is cuDNN's in bf16 on both, since this table
is about the projections. FP8: quantisation of activations and of output gradients
included, weight codes made once per optimiser step (a row of its own), float32
gradients. bf16: bf16 weights and gradients, which spares that side float32 traffic.
Times are of the kernels alone, median and [fastest, slowest]; transient memory is what
the compiled program holds beside its operands and results.

Hardware: one Hopper GPU with 30 GB free; a minute.
"""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
from absl import app, flags
from jaxtyping import Array

from benchmarks.device_time import device_time
from fp8rl_jax.console import print_table
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.fp8.weights import quantize_weights, training_weights
from fp8rl_jax.models.qwen3 import model as qwen3
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES
from fp8rl_jax.models.qwen3.init import init_params

_BATCH = flags.DEFINE_integer("batch", 4, "Sequences.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens a sequence.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls.", lower_bound=1)


def cudnn_attention(q, k, v, positions, segments, precision) -> Array:
    """Causal attention by cuDNN in place of the model's."""
    del positions, segments, precision
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def gradients(params, codes, inputs, cotangents, *, recipe: str):
    """Gradients of the layer in its weights and both inputs."""
    config = QWEN3_SIZES["8b"]
    precision = get_recipe(recipe).train
    batch, length = inputs[0].shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    rope = qwen3.rope_tables(positions, config.head_dim, config.rope_theta)

    def layer(params, residual, update):
        weights = training_weights(params, codes, precision.linear)
        block = qwen3.Block(config, weights)
        residual, update, _ = block(
            residual,
            update,
            rope,
            positions,
            jnp.ones_like(positions),
            None,
            jnp.int32(0),
            precision,
        )
        return residual, update

    return jax.vjp(layer, params, *inputs)[1](cotangents)


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    qwen3.attention = cudnn_attention
    config = dataclasses.replace(QWEN3_SIZES["8b"], num_layers=1)
    params = init_params(config, jax.random.key(0))["layers"]
    params = jax.tree.map(lambda x: x[0], params)
    shape = (_BATCH.value, _LENGTH.value, config.hidden_size)
    keys = jax.random.split(jax.random.key(1), 4)
    *inputs, dr, du = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
    quantize = jax.jit(quantize_weights)
    codes = quantize(params)
    cast = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    operands = {
        "bf16": (cast(params), jax.tree.map(lambda _: None, params)),
        "fp8": (params, codes),
    }
    rows, medians = [], []
    for recipe, weights in operands.items():
        fn = jax.jit(functools.partial(gradients, recipe=recipe))
        args = (*weights, tuple(inputs), (dr, du))
        compiled = fn.lower(*args).compile()
        times = device_time(compiled, [args], repeats=_REPEATS.value)
        medians.append(statistics.median(times))
        rows.append(
            {
                "": f"{recipe} layer, forward + backward",
                "ms": _milliseconds(times),
                "x bf16": f"{medians[0] / medians[-1]:.2f}",
                "transient GiB": f"{_transient(compiled):.2f}",
            }
        )
    times = device_time(quantize, [(params,)], repeats=_REPEATS.value)
    rows.append(
        {
            "": "fp8 weight codes, once a step",
            "ms": _milliseconds(times),
            "x bf16": "",
            "transient GiB": "",
        }
    )
    title = f"Qwen3-8B layer, {_BATCH.value} x {_LENGTH.value} tokens"
    print_table(rows, f"{title}, {jax.devices()[0].device_kind}")


def _milliseconds(times: list[float]) -> str:
    median, low, high = (1e3 * f(times) for f in (statistics.median, min, max))
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def _transient(compiled: jax.stages.Compiled) -> float:
    """Memory beside operands and results, GiB."""
    return compiled.memory_analysis().temp_size_in_bytes / 2**30


if __name__ == "__main__":
    app.run(main)
