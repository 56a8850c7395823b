"""Every intermediate of the model, op by op, for comparing two ways to evaluate it.

`trace` runs the model's own modules one op at a time, chained as `Qwen3.__call__`
chains them, and returns what each op gives in every layer. With ``recorded`` values an
op reads those instead of what the op before it gave, so that a difference in its output
is its own and not inherited.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from fp8rl_jax import numerics
from fp8rl_jax.attention import (
    KVCache,
    Rotation,
    attention,
    cached_attention,
    split_and_rotate,
)
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.logprobs import VOCAB_CHUNK, token_log_probs
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.fuse import gate_up_widths, split_fused
from fp8rl_jax.models.qwen3.model import Block, Qwen3, rope_tables

Values = dict[str, Array]
_NT = (((1,), (1,)), ((), ()))

# Outputs in the order of evaluation.
LAYER_OPS = (
    "input_norm",
    "qkv",
    "q_norm_rope",
    "k_norm_rope",
    "v",
    "attention",
    "o_proj",
    "post_attention_norm",
    "gate",
    "up",
    "silu_product",
    "down_proj",
)
HEAD_OPS = ("final_norm", "logits", "log_probs")


def trace(
    config: Qwen3Config,
    precision: Precision,
    weights: PyTree,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache | None,
    *,
    vocab_size: int,
    recorded: tuple[Values, Values] | None = None,
) -> tuple[tuple[Values, Values], KVCache | None]:
    """Evaluates the model and keeps the output of every op.

    Args:
      config: the model.
      precision: what runs in FP8.
      weights: as `Qwen3` takes them.
      tokens: inputs, one sequence a row.
      targets: the token after each.
      positions: position of each token.
      cache: None for the trainer's path; else the sampler's path, over this cache.
      vocab_size: ids that have a probability.
      recorded: what an earlier trace gave for these positions; every op then reads its
        inputs from there.

    Returns:
      The values of the layers, each [L, B, T, ...], and of the head, [B, T, ...]
      (``logits`` of the first vocabulary chunk only); and the updated cache.
    """
    model = Qwen3(config, weights)
    dtype = jnp.dtype(config.dtype)
    embedding = model.embed.embedding.get_value()
    embedded = numerics.round_to(jnp.take(embedding, tokens, axis=0), dtype)
    rope = rope_tables(positions, config.head_dim, config.rope_theta)
    graph, stacked = nnx.split(model.layers)

    def layer_step(carry, xs):
        layer, weights, known = xs
        residual, update, cache = carry
        values = {"residual_in": residual, "update_in": update}
        block = nnx.merge(graph, weights)
        cache = _layer(
            block, values, known, rope, positions, cache, layer, precision, config
        )
        return (values["residual"], values["down_proj"], cache), values

    known_layers, known_head = recorded or (None, None)
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    carry = (embedded, jnp.zeros_like(embedded), cache)
    xs = (indices, stacked, known_layers)
    (residual, update, cache), layers = lax.scan(layer_step, carry, xs)
    head = {"residual_in": residual, "update_in": update}
    evaluate = _evaluator(head, known_head)

    def final_norm(residual, update):
        return model.final_norm.add_and_norm(residual, update)[1]

    def log_probs(hidden):
        return token_log_probs(
            hidden, model.head, targets, temperature=1.0, vocab_size=vocab_size
        )

    evaluate("final_norm", final_norm, "residual_in", "update_in")
    evaluate("logits", lambda x: _logits(x, model.head), "final_norm")
    evaluate("log_probs", log_probs, "final_norm")
    return (layers, head), cache


def _evaluator(values: Values, known: Values | None) -> Callable[..., None]:
    """Returns evaluate(names of the outputs, fn, *names of the inputs)."""
    source = values if known is None else known

    def evaluate(outputs: str, fn: Callable[..., Any], *inputs: str) -> None:
        names = outputs.split()
        out = fn(*(source[name] for name in inputs))
        values.update(zip(names, out if len(names) > 1 else [out], strict=True))

    return evaluate


def _layer(
    block: Block,
    values: Values,
    known: Values | None,
    rope: tuple[Float[Array, "B T h"], Float[Array, "B T h"]],
    positions: Int[Array, "B T"],
    cache: KVCache | None,
    layer: Int[Array, ""],
    precision: Precision,
    config: Qwen3Config,
) -> KVCache | None:
    """Fills ``values`` with one layer's ops; returns the cache."""
    evaluate = _evaluator(values, known)
    self_attention, mlp = block.attention, block.mlp

    def linear(module):
        return lambda x: module(x, precision)

    def fused(module, widths):
        return lambda x: split_fused(module(x, precision), widths)

    def norm_rope(qkv):
        norms = self_attention.q_norm, self_attention.k_norm
        scales = (norm.scale.get_value() for norm in norms)
        rotation = Rotation(*scales, *rope)
        groups = self_attention.groups
        return split_and_rotate(qkv, rotation, groups, norms[0].eps)

    def attend(q, k, v):
        nonlocal cache
        if cache is None:
            out = attention(q, k, v, positions, None, precision)
        else:
            where = cache.place(positions)
            cache = cache.store(layer, k, v, where)
            out = cached_attention(q, cache, layer, where, precision)
        return out.reshape(*out.shape[:2], -1)

    def silu_product(gate, up):
        return numerics.wide(
            lambda g, u: g * jax.nn.sigmoid(g) * u, gate.dtype, gate, up
        )

    norm_1, norm_2 = block.input_norm, block.post_attention_norm
    evaluate("attended input_norm", norm_1.add_and_norm, "residual_in", "update_in")
    evaluate("qkv", linear(self_attention.qkv_proj), "input_norm")
    evaluate("q_norm_rope k_norm_rope v", norm_rope, "qkv")
    evaluate("attention", attend, "q_norm_rope", "k_norm_rope", "v")
    evaluate("o_proj", linear(self_attention.o_proj), "attention")
    evaluate("residual post_attention_norm", norm_2.add_and_norm, "attended", "o_proj")
    gate_up = fused(mlp.gate_up_proj, gate_up_widths(config))
    evaluate("gate up", gate_up, "post_attention_norm")
    evaluate("silu_product", silu_product, "gate", "up")
    evaluate("down_proj", linear(mlp.down_proj), "silu_product")
    return cache


def _logits(hidden: Float[Array, "B T D"], head: Float[Array, "V D"]):
    """float32 logits of the first vocabulary chunk, as `logprobs` computes them."""

    def product(dtype, hidden, rows):
        rows = numerics.round_to(rows, hidden.dtype)
        return numerics.round_to(numerics.dot(dtype, hidden, rows, _NT), jnp.float32)

    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = numerics.by_platform(product, flat, head[:VOCAB_CHUNK])
    return logits.reshape(*hidden.shape[:2], -1)
