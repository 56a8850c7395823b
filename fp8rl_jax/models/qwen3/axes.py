"""Logical axes of the Qwen3 parameters.

Kernels are stored ``[out, in]``, as FP8 codes are, and stacked over layers. Their head
axes are flat: ``heads`` has size N*H, and ``kv_heads`` K*(G+2)*H, since the rows of
`qkv_proj` lie by KV head. A device's share of `qkv_proj` and `gate_up_proj` gives what
its share of `o_proj` and `down_proj` takes in (`fuse`).
"""

from typing import Any

_LAYER_NORM = {"scale": ("layers", "norm")}

PARAM_AXES: dict[str, Any] = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "input_norm": _LAYER_NORM,
        "attention": {
            "qkv_proj": {"kernel": ("layers", "kv_heads", "embed")},
            "o_proj": {"kernel": ("layers", "embed", "heads")},
            "q_norm": _LAYER_NORM,
            "k_norm": _LAYER_NORM,
        },
        "post_attention_norm": _LAYER_NORM,
        "mlp": {
            "gate_up_proj": {"kernel": ("layers", "mlp", "embed")},
            "down_proj": {"kernel": ("layers", "embed", "mlp")},
        },
    },
    "final_norm": {"scale": ("norm",)},
    "lm_head": {"kernel": ("vocab", "embed")},
}


def param_axes(tie_word_embeddings: bool) -> dict[str, Any]:
    """Returns the axes of a model's parameter tree.

    Args:
      tie_word_embeddings: Whether the head is the embedding; the tree then has no
        ``lm_head``.
    """
    if not tie_word_embeddings:
        return PARAM_AXES
    return {name: axes for name, axes in PARAM_AXES.items() if name != "lm_head"}
