"""Shape and constants of a dense Qwen3 model, and its Hugging Face config.json.

Axis letters: D model, N query heads, K key/value heads, H head dim, F feed-forward,
V vocabulary, L layers.

References:
  Qwen3 Technical Report, https://arxiv.org/abs/2505.09388, section 2 and table 1.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

_ARCHITECTURE = "Qwen3ForCausalLM"

# config.json switches that change the function, with the one value implemented here.
_FIXED_KEYS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """A dense Qwen3 model.

    Attributes:
      vocab_size: V, rows of the embedding, padding rows included.
      hidden_size: D.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides N.
      head_dim: H; not D / N in general. Even, for RoPE.
      intermediate_size: F.
      tie_word_embeddings: the output head is the embedding, and there is no `lm_head`.
      rms_norm_eps: epsilon of every RMSNorm, the query and key norms included.
      rope_theta: base wavelength of the rotary embedding.
      max_position_embeddings: longest sequence the model was trained for, in tokens.
      eos_token_ids: ids that end a completion.
      dtype: activation dtype, "bfloat16" or "float32"; parameters have their own.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value <= 0):
                raise ValueError(
                    f"{field.name} must be a positive integer, got {value!r}"
                )
            if field.type is float and not (
                type(value) in (int, float) and 0 < value < math.inf
            ):
                raise ValueError(
                    f"{field.name} must be a positive number, got {value!r}"
                )
        if type(self.tie_word_embeddings) is not bool:
            raise ValueError(
                "tie_word_embeddings must be true or false, got "
                f"{self.tie_word_embeddings!r}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for RoPE")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(
                f"dtype={self.dtype!r} is not an activation dtype; "
                'choose "bfloat16" or "float32"'
            )
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_ids holds {token!r}, which is not a token id below "
                    f"vocab_size={self.vocab_size}"
                )

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        shapes = jax.tree.leaves(
            param_shapes(self), is_leaf=lambda x: isinstance(x, tuple)
        )
        return sum(math.prod(shape) for shape in shapes)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, dtype: str = "bfloat16") -> Self:
        """Builds the config from the contents of a Hugging Face `config.json`.

        Reads the key names of transformers 4 (`rope_theta`, `rope_scaling`) and of
        transformers 5 (`rope_parameters`).

        Args:
          hf: the parsed `config.json`.
          dtype: activation dtype; the file's own `dtype` is that of its weights.

        Raises:
          ValueError: another architecture, a feature that is not implemented, or a
            missing or malformed key; names the key.
        """
        _check_architecture(hf)

        def required(key):
            if hf.get(key) is None:
                raise ValueError(f"{key} is missing")
            return hf[key]

        num_heads = required("num_attention_heads")
        return cls(
            vocab_size=required("vocab_size"),
            hidden_size=required("hidden_size"),
            num_layers=required("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=required("num_key_value_heads"),
            # As in transformers where a key is absent.
            head_dim=hf.get("head_dim", 128),
            intermediate_size=required("intermediate_size"),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(hf),
            max_position_embeddings=hf.get("max_position_embeddings", 32768),
            eos_token_ids=_as_ids(hf.get("eos_token_id")),
            dtype=dtype,
        )

    @classmethod
    def from_hf_folder(cls, folder: str | Path, *, dtype: str = "bfloat16") -> Self:
        """Builds the config from a Hugging Face model folder.

        The end-of-sequence ids come from `generation_config.json` where it has them.

        Args:
          folder: holds `config.json`, perhaps `generation_config.json`.
          dtype: activation dtype.

        Raises:
          ValueError: no readable `config.json`, or as for `from_hf`; names the folder.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no config.json; give a Hugging Face model folder"
            )
        hf = _read_json(path)
        generation = folder / "generation_config.json"
        if generation.is_file():
            ids = _read_json(generation).get("eos_token_id")
            hf = hf if ids is None else {**hf, "eos_token_id": ids}
        try:
            return cls.from_hf(hf, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self, *, param_dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns a `config.json` that transformers 4.5x and 5.x both read.

        Args:
          param_dtype: dtype of the exported weights.
        """
        eos = list(self.eos_token_ids)
        return {
            "architectures": [_ARCHITECTURE],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "rope_theta": self.rope_theta,
                "rope_type": "default",
            },
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": param_dtype,  # transformers 5 reads this older name too
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def param_shapes(config: Qwen3Config) -> dict[str, Any]:
    """Declares the parameter tree: the shape of every parameter.

    Kernels are stored [out, in], as in Hugging Face files, and those of all layers are
    stacked on axis 0. `fuse` says how the rows of `qkv_proj` and `gate_up_proj` lie.
    The model, the loader, the exporter, the initialiser and the shardings all follow
    this tree.

    Returns:
      Nested dict whose leaves are shape tuples; `lm_head` only when untied.
    """
    d, f, v, layers = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_layers,
    )
    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {
        "embed": {"embedding": (v, d)},
        "layers": {
            "input_norm": {"scale": (layers, d)},
            "attention": {
                "qkv_proj": {"kernel": (layers, (n + 2 * k) * h, d)},
                "o_proj": {"kernel": (layers, d, n * h)},
                "q_norm": {"scale": (layers, h)},
                "k_norm": {"scale": (layers, h)},
            },
            "post_attention_norm": {"scale": (layers, d)},
            "mlp": {
                "gate_up_proj": {"kernel": (layers, 2 * f, d)},
                "down_proj": {"kernel": (layers, d, f)},
            },
        },
        "final_norm": {"scale": (d,)},
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = {"kernel": (v, d)}
    return shapes


def _check_architecture(hf: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json that `Qwen3Config` cannot express."""
    architectures = hf.get("architectures") or [_ARCHITECTURE]
    if hf.get("model_type") != "qwen3" or architectures != [_ARCHITECTURE]:
        raise ValueError(
            f"model_type={hf.get('model_type')!r}, architectures={architectures!r} is "
            f"not supported; supported is the dense Qwen3 model: model_type='qwen3', "
            f"architectures=[{_ARCHITECTURE!r}]"
        )
    for key, supported in _FIXED_KEYS.items():
        value = hf.get(key, supported)
        if value != supported:
            raise ValueError(
                f"{key}={value!r} is not supported; supported is {supported!r}"
            )
    layer_types = set(hf.get("layer_types") or ())
    if not layer_types <= {"full_attention"}:
        raise ValueError(
            f"layer_types has {sorted(layer_types)}; supported is 'full_attention' only"
        )


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """Reads rope_theta under its old or new name; rejects any RoPE scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"{key} has rope_type={kind!r}; supported is 'default' (no scaling)"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{key} has partial_rotary_factor; supported is 1.0")
    new = (hf.get("rope_parameters") or {}).get("rope_theta")
    old = hf.get("rope_theta")
    if new is not None and old is not None and new != old:
        raise ValueError(
            f"rope_theta={old!r} contradicts rope_parameters.rope_theta={new!r}"
        )
    theta = old if new is None else new
    if theta is None:
        raise ValueError("rope_theta and rope_parameters.rope_theta are missing")
    return theta


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _published(layers, d, n, k, f, tied) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=d,
        num_layers=layers,
        num_heads=n,
        num_kv_heads=k,
        head_dim=128,
        intermediate_size=f,
        tie_word_embeddings=tied,
        eos_token_ids=(151645, 151643),  # <|im_end|>, <|endoftext|>
    )


# The published dense sizes: L, D, N, K, F, tied.
QWEN3_SIZES: dict[str, Qwen3Config] = {
    "0.6b": _published(28, 1024, 16, 8, 3072, True),
    "1.7b": _published(28, 2048, 16, 8, 6144, True),
    "4b": _published(36, 2560, 32, 8, 9728, True),
    "8b": _published(36, 4096, 32, 8, 12288, False),
    "14b": _published(40, 5120, 40, 8, 17408, False),
    "32b": _published(64, 5120, 64, 8, 25600, False),
}
