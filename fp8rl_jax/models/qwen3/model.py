"""Qwen3, dense: one forward pass for sampling and for training.

References:
  Qwen3 Technical Report, arXiv:2505.09388, section 2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from fp8rl_jax.attention import (
    ATTENDED,
    KVCache,
    Placement,
    Rotation,
    attention,
    cached_attention,
    decode_step,
    split_and_rotate,
)
from fp8rl_jax.fp8 import Precision
from fp8rl_jax.fp8.fused import add_and_norm, norm_gated_mlp, norm_linear
from fp8rl_jax.fp8.gradient_ref import GradientRef
from fp8rl_jax.fp8.weights import CodedWeight, linear
from fp8rl_jax.models.qwen3.config import Qwen3Config, param_shapes
from fp8rl_jax.models.qwen3.fuse import gate_up_widths
from fp8rl_jax.numerics import by_platform, round_to
from fp8rl_jax.parallel.sharding import constrain

PROJECTED = "qkv"
# "attention" keeps what attention reads and writes: neither it nor the projection
# before it runs a second time. 32 KB a token and layer at 8B.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(PROJECTED, ATTENDED),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Rows(NamedTuple):
    """Which tokens of a batch without a cache belong together.

    Attributes:
      positions: int32 [B, T], within the sequence.
      segments: int32 [B, T], the sequence; None if a row is one.
      index: int32 [B, S, R], where each sequence's tokens are; None likewise.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    index: Int[Array, "B S R"] | None


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, scale: Float[Array, "D"], eps: float):
        self.scale = nnx.Param(scale)
        self.eps = eps

    def add_and_norm(
        self, residual: Float[Array, "B T D"], update: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """residual + update, and its norm."""
        return add_and_norm(residual, update, self.scale.get_value(), self.eps)


class Linear(nnx.Module):
    """A bias-free linear layer; its kernel [out, in] may be FP8 codes."""

    def __init__(self, kernel: Any):
        self.kernel = nnx.Param(kernel)
        self.gradient_ref = nnx.data(None)

    def __call__(
        self, x: Float[Array, "B T in"], precision: Precision
    ) -> Float[Array, "B T out"]:
        """x kernel^T under the precision's linear passes."""
        return linear(x, self.kernel.get_value(), precision.linear, self.gradient_ref)


class Attention(nnx.Module):
    """Grouped-query attention with norms on queries and keys, then RoPE."""

    def __init__(self, config: Qwen3Config, params: PyTree):
        self.groups = config.num_heads // config.num_kv_heads
        self.qkv_proj = Linear(params["qkv_proj"]["kernel"])
        self.o_proj = Linear(params["o_proj"]["kernel"])
        self.q_norm = RMSNorm(params["q_norm"]["scale"], config.rms_norm_eps)
        self.k_norm = RMSNorm(params["k_norm"]["scale"], config.rms_norm_eps)

    def __call__(
        self,
        qkv: Float[Array, "B T E"],
        rope: tuple[Float[Array, "B T h"], Float[Array, "B T h"]],
        tokens: Rows | Placement,
        cache: KVCache | None,
        layer: Int[Array, ""],
        precision: Precision,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Self-attention of projected tokens, over ``cache`` if there is one."""
        batch, length, _ = qkv.shape
        norms = (norm.scale.get_value() for norm in (self.q_norm, self.k_norm))
        projected = qkv, Rotation(*norms, *rope), self.groups, self.q_norm.eps
        if cache is not None and length == 1:
            out, cache = decode_step(*projected, cache, layer, tokens, precision)
        else:
            q, k, v = split_and_rotate(*projected)
            if cache is None:
                out = attention(
                    q,
                    k,
                    v,
                    tokens.positions,
                    tokens.segments,
                    precision,
                    index=tokens.index,
                )
            else:
                cache = cache.store(layer, k, v, tokens)
                out = cached_attention(q, cache, layer, tokens, precision)
        return self.o_proj(out.reshape(batch, length, -1), precision), cache


class MLP(nnx.Module):
    """The projections of down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config, params: PyTree):
        self.block = gate_up_widths(config)[0]
        self.gate_up_proj = Linear(params["gate_up_proj"]["kernel"])
        self.down_proj = Linear(params["down_proj"]["kernel"])


class Block(nnx.Module):
    """One decoder layer; the residual sum waits for the next norm.

    Each norm is computed together with the projection that it feeds.
    """

    def __init__(self, config: Qwen3Config, params: PyTree):
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(params["input_norm"]["scale"], eps)
        self.attention = Attention(config, params["attention"])
        self.post_attention_norm = RMSNorm(params["post_attention_norm"]["scale"], eps)
        self.mlp = MLP(config, params["mlp"])

    def __call__(self, residual, update, rope, tokens, cache, layer, p):
        """Returns the residual, the update still to be added to it, and the cache."""
        norm, qkv_proj = self.input_norm, self.attention.qkv_proj
        residual, qkv = norm_linear(
            residual,
            update,
            norm.scale.get_value(),
            norm.eps,
            qkv_proj.kernel.get_value(),
            p.linear,
            qkv_proj.gradient_ref,
        )
        qkv = checkpoint_name(qkv, PROJECTED)
        update, cache = self.attention(qkv, rope, tokens, cache, layer, precision=p)
        norm = self.post_attention_norm
        projections = self.mlp.gate_up_proj, self.mlp.down_proj
        residual, update = norm_gated_mlp(
            residual,
            update,
            norm.scale.get_value(),
            norm.eps,
            *(proj.kernel.get_value() for proj in projections),
            p.linear,
            self.mlp.block,
            tuple(proj.gradient_ref for proj in projections),
        )
        return residual, update, cache


def _add_gradients_to(block: Block, gradients: PyTree[jax.Ref], layer: Array) -> None:
    """Has the backward pass add the linear kernels' gradients to stacked buffers."""
    # Not by way of the scanned weights: a scan cuts a layer out of a Ref and puts it
    # back, and an nnx.Variable holds no Ref.
    for path, module in nnx.iter_modules(block):
        if isinstance(module, Linear):
            ref = functools.reduce(lambda tree, key: tree[key], path, gradients)
            module.gradient_ref = nnx.data(GradientRef(ref["kernel"], layer))


def _code_masters(block: Block) -> None:
    """Pairs masters that come without their FP8 codes with them."""
    # Once, where a layer begins: products of ready codes have kernels of their own.
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Linear):
            kernel = module.kernel.get_value()
            if isinstance(kernel, jax.Array):
                module.kernel.set_value(CodedWeight.of(kernel))


class Embedding(nnx.Module):
    """Token embedding [V, D]."""

    def __init__(self, embedding: Float[Array, "V D"]):
        self.embedding = nnx.Param(embedding)


class Qwen3(nnx.Module):
    """A dense Qwen3 language model over a tree of weights.

    The layers' weights are stacked and scanned. A model is a thin view: build it from
    any tree of `param_shapes(config)`, whose linear kernels may be arrays, FP8 codes or
    masters with codes (`fp8.weights`).

    Args:
      config: the model's shape.
      weights: nested dict as declared by `param_shapes(config)`.
    """

    def __init__(self, config: Qwen3Config, weights: PyTree):
        self.config = config
        self.embed = Embedding(weights["embed"]["embedding"])
        self.layers = Block(config, weights["layers"])
        self.final_norm = RMSNorm(weights["final_norm"]["scale"], config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(weights["lm_head"]["kernel"])

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output head: `lm_head`, or the embedding if tied."""
        if self.config.tie_word_embeddings:
            return self.embed.embedding.get_value()
        return self.lm_head.kernel.get_value()

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        precision: Precision,
        *,
        segments: Int[Array, "B T"] | None = None,
        index: Int[Array, "B S R"] | None = None,
        cache: KVCache | None = None,
        remat: str = "none",
        gradients: PyTree[jax.Ref] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Hidden states after the final norm.

        Without a cache, tokens attend causally within their segment of the row
        (training, scoring). With one, they are stored at their positions and attend to
        every slot up to their own (prefill and decoding): one token a row, or
        consecutive ones from a multiple of the cache's page size on.

        Args:
          tokens: token ids.
          positions: position of each token in its sequence, from 0.
          precision: what runs in FP8.
          segments: id of each token's sequence; 0 marks padding. None: one sequence a
            row, perhaps with padding after it.
          index: where the tokens of each segment are, see `attention.attention`.
          cache: key-value cache of the batch.
          remat: name of the rematerialisation policy, of REMAT_POLICIES.
          gradients: buffers like the layers' weights. If given, the backward pass adds
            the gradients of the linear kernels to theirs, and the kernels must be
            constants of differentiation.

        Returns:
          Hidden states in the activation dtype and the updated cache (None without).
        """
        dtype = jnp.dtype(self.config.dtype)
        embedding = self.embed.embedding.get_value()
        # Rows stay on their devices: nothing else says so to the compiler, which would
        # rather split features as the weights are and have every device see all rows.
        stay = functools.partial(constrain, axes=("batch", "length", "features"))
        residual = stay(round_to(jnp.take(embedding, tokens, axis=0), dtype))
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        rows = Rows(positions, segments, index)
        where = rows if cache is None else cache.place(positions)
        graph, stacked = nnx.split(self.layers)

        def layer_step(carry, xs):
            layer, weights = xs
            residual, update, cache = carry
            block = nnx.merge(graph, weights)
            if precision.linear.forward:
                _code_masters(block)
            if gradients is not None:
                _add_gradients_to(block, gradients, layer)
            residual, update, cache = block(
                residual, update, rope, where, cache, layer, precision
            )
            return (stay(residual), stay(update), cache), None

        if remat != "none":
            layer_step = jax.checkpoint(layer_step, policy=REMAT_POLICIES[remat])
        carry = (residual, jnp.zeros_like(residual), cache)
        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        carry, _ = lax.scan(layer_step, carry, (indices, stacked))
        residual, update, cache = carry
        return self.final_norm.add_and_norm(residual, update)[1], cache


def rope_tables(
    positions: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosines and sines of the rotary angles, float32, h = head_dim / 2.

    References:
      Su et al. "RoFormer", arXiv:2104.09864, equation 15.
    """

    # By numpy: a compiler may fold a power of its own into one program and not another.
    # In two parts, whose sum has 48 bits in float64 and is the first in float32.
    exact = theta ** -(np.arange(0, head_dim, 2) / head_dim)[None, None]
    first = exact.astype(np.float32)
    second = (exact - first).astype(np.float32)

    def tables(dtype, positions, first, second):
        frequencies = first.astype(dtype) + second.astype(dtype)
        angles = positions[..., None].astype(dtype) * frequencies
        return tuple(round_to(f(angles), jnp.float32) for f in (jnp.cos, jnp.sin))

    return by_platform(tables, positions, jnp.asarray(first), jnp.asarray(second))


def abstract_params(config: Qwen3Config, dtype=jnp.float32) -> PyTree:
    """The parameter tree as `jax.ShapeDtypeStruct`, allocating nothing."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
