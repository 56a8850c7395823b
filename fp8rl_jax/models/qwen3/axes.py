"""Logical axes of the Qwen3 parameters.

Kernels are stored ``[out, in]``, as FP8 codes are, and stacked over layers. The
projections' head axes are flat: ``heads`` has size N*H, ``kv_heads`` K*H.
"""

from typing import Any

_LAYER_NORM = {"scale": ("layers", "norm")}

PARAM_AXES: dict[str, Any] = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "input_norm": _LAYER_NORM,
        "attention": {
            "q_proj": {"kernel": ("layers", "heads", "embed")},
            "k_proj": {"kernel": ("layers", "kv_heads", "embed")},
            "v_proj": {"kernel": ("layers", "kv_heads", "embed")},
            "o_proj": {"kernel": ("layers", "embed", "heads")},
            "q_norm": _LAYER_NORM,
            "k_norm": _LAYER_NORM,
        },
        "post_attention_norm": _LAYER_NORM,
        "mlp": {
            "gate_proj": {"kernel": ("layers", "mlp", "embed")},
            "up_proj": {"kernel": ("layers", "mlp", "embed")},
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
