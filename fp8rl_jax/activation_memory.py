"""What the programs of a step hold beside their arguments, in bytes per device.

The compiler decides this, so the coefficients are measured: `Learner.update`,
`Learner.score` and the engine's programs were compiled for an H200 without one, and the
sizes that the compiler reports (``memory_analysis``) fitted from above;
tests/test_memory_plan.py has them. Over several devices nothing has been fitted: the
formulas then assume that rows stay on their device and that the weights of one layer
are gathered at a time.

Axis letters: D model, N query heads, K key/value heads, H head dim, F feed-forward,
V vocabulary.
"""

import dataclasses

from fp8rl_jax.fp8 import LinearPrecision
from fp8rl_jax.logprobs import chunking
from fp8rl_jax.models.qwen3.config import Qwen3Config

_BF16, _F32 = 2, 4
# Of a vocabulary chunk's logits, four arrays in float32; of the hidden states, their
# gradient in float32 and three arrays in bfloat16.
_HEAD_CHUNK, _HEAD_STREAM = 16, 10


@dataclasses.dataclass(frozen=True)
class Shards:
    """Into how many parts the mesh cuts the weights.

    Attributes:
      fsdp: along the model dimension; gathered when used.
      tensor: heads and feed-forward columns; the work is cut too.
    """

    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class _PerToken:
    """Bytes of a token, as multiples of widths.

    Attributes:
      stream: of D.
      heads: of (2 N + 2 K) H, what the attention's projections read and write.
      mlp: of F.
    """

    stream: float
    heads: float
    mlp: float

    def bytes(self, model: Qwen3Config, tensor: int) -> int:
        split = self.heads * _heads_width(model) + self.mlp * model.intermediate_size
        return int(self.stream * model.hidden_size + split / tensor)


# By whether the linear layers run in FP8. One layer's backward pass, its forward pass
# included; beside it, copies of the layer's weights, bytes a parameter.
_BACKWARD = {True: _PerToken(17, 0, 11), False: _PerToken(4, 0, 12)}
_WEIGHT_COPIES = {True: 1.2, False: 5}
_FORWARD = {True: _PerToken(2.5, 0, 5), False: _PerToken(2, 0, 8)}
# What a layer keeps for its backward pass, by rematerialisation policy.
_KEPT = {
    ("full", True): _PerToken(2 * _BF16, 0, 0),
    ("full", False): _PerToken(2 * _BF16, 0, 0),
    # The projection; queries, keys and values again, rounded; the result.
    ("attention", True): _PerToken(2 * _BF16, 3.4, 0),
    ("attention", False): _PerToken(2 * _BF16, 3.4, 0),
    ("dots", True): _PerToken(2 * _BF16, 0, 0),  # products by kernels are no dots
    ("dots", False): _PerToken(2 * _BF16, 0, 0),
    ("none", True): _PerToken(6, 3.7, 5),
    ("none", False): _PerToken(8, 4.5, 8),
}
# Of gathered weights, bytes a parameter, of this layer and the next: FP8 codes in both
# layouts, or float32; beside them the layer's whole float32 gradient.
_GATHERED = {True: 4, False: 2 * _F32}


def kept_bytes(
    model: Qwen3Config, linear: LinearPrecision, tokens: int, remat: str, tensor: int
) -> int:
    """What the forward pass of an update keeps for the backward pass, all layers.

    Args:
      model: its shape.
      linear: precision of the trainer's linear layers.
      tokens: of a micro-batch, on one device.
      remat: a name of `models.qwen3.model.REMAT_POLICIES`.
      tensor: shards of heads and feed-forward columns.
    """
    kept = _KEPT[remat, linear.forward].bytes(model, tensor)
    return model.num_layers * tokens * kept


def backward_bytes(
    model: Qwen3Config, linear: LinearPrecision, tokens: int, shards: Shards
) -> int:
    """The backward pass of one layer or of the head, whichever takes more.

    Args:
      model: its shape.
      linear: precision of the trainer's linear layers.
      tokens: of a micro-batch, on one device.
      shards: of the mesh.
    """
    layer = tokens * _BACKWARD[linear.forward].bytes(model, shards.tensor)
    weights = _layer_parameters(model) // shards.tensor
    layer += int(weights * _WEIGHT_COPIES[linear.forward])
    _, chunk = chunking(model.vocab_size)
    head = tokens * (_HEAD_CHUNK * chunk + _HEAD_STREAM * model.hidden_size)
    if shards.fsdp > 1:
        layer += weights * (_GATHERED[linear.forward] + _F32)
        # The head and its gradient, or the gradient of the embeddings, as wide.
        vocabulary = model.vocab_size * model.hidden_size // shards.tensor
        layer, head = (x + 2 * _F32 * vocabulary for x in (layer, head))
    return max(layer, head)


def forward_bytes(
    model: Qwen3Config, linear: LinearPrecision, tokens: int, shards: Shards
) -> int:
    """A forward pass without gradients: scoring, a prefill or a decode step.

    Args:
      model: its shape.
      linear: precision of the linear layers.
      tokens: of a micro-batch, a prefill or a decode step, on one device.
      shards: of the mesh; for the engine without ``fsdp``: its programs run on weights
        that are gathered already.
    """
    forward = tokens * _FORWARD[linear.forward].bytes(model, shards.tensor)
    if shards.fsdp > 1:
        weights = _layer_parameters(model) + model.vocab_size * model.hidden_size
        forward += weights // shards.tensor * _GATHERED[linear.forward]
    return forward


def _heads_width(model: Qwen3Config) -> int:
    return 2 * (model.num_heads + model.num_kv_heads) * model.head_dim


def _layer_parameters(model: Qwen3Config) -> int:
    """Of the linear kernels of one layer."""
    heads, mlp = _heads_width(model), 3 * model.intermediate_size
    return model.hidden_size * (heads + mlp)
