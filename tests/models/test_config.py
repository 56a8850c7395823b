"""Qwen3Config: published sizes, both generations of config.json, refusals."""

import dataclasses
import json
from pathlib import Path

import pytest

from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config, param_shapes

GOLDENS = Path(__file__).parent / "goldens"
TINY = dict(
    vocab_size=128,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    tie_word_embeddings=True,
)

# The published config.json of Qwen3-8B, in transformers 4's key names.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


# The parameter counts of the published safetensors files; those of the tied 0.6B and
# 1.7B hold the embedding a second time, as lm_head.weight.
@pytest.mark.parametrize(
    "size, published, copied_head",
    [
        ("0.6b", 751_632_384, 151936 * 1024),
        ("1.7b", 2_031_739_904, 151936 * 2048),
        ("4b", 4_022_468_096, 0),
        ("8b", 8_190_735_360, 0),
        ("14b", 14_768_307_200, 0),
        ("32b", 32_762_123_264, 0),
    ],
)
def test_published_sizes(size, published, copied_head):
    config = QWEN3_SIZES[size]
    assert config.num_parameters == published - copied_head
    assert ("lm_head" in param_shapes(config)) is not config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 1e6)


def test_reads_transformers_4_keys():
    config = Qwen3Config.from_hf(QWEN3_8B)
    assert config == dataclasses.replace(QWEN3_SIZES["8b"], eos_token_ids=(151645,))


def test_reads_transformers_5_keys():
    config = Qwen3Config.from_hf_folder(GOLDENS / "qwen3", dtype="float32")
    assert config == Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=256,
        dtype="float32",
    )
    assert config.num_parameters == 131_520


def test_generation_config_gives_all_eos_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert Qwen3Config.from_hf_folder(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [151645, 151643]})
    )
    assert Qwen3Config.from_hf_folder(tmp_path) == QWEN3_SIZES["8b"]


@pytest.mark.parametrize("size", QWEN3_SIZES)
def test_to_hf_round_trip(size):
    config = dataclasses.replace(QWEN3_SIZES[size], rope_theta=5e5, rms_norm_eps=1e-5)
    hf = json.loads(json.dumps(config.to_hf()))
    assert Qwen3Config.from_hf(hf) == config
    # One generation's keys are enough.
    old = {k: v for k, v in hf.items() if k != "rope_parameters"}
    new = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling")}
    assert Qwen3Config.from_hf(old) == Qwen3Config.from_hf(new) == config


def test_transformers_reads_to_hf(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = Qwen3Config(**TINY, rope_theta=5e5, rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(hf).__name__ == "Qwen3Config"
    assert hf.hidden_size == 32
    assert hf.head_dim == 16
    assert hf.num_key_value_heads == 2
    assert hf.intermediate_size == 64
    assert hf.tie_word_embeddings is True
    assert hf.rms_norm_eps == 1e-5
    assert hf.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    assert hf.layer_types == ["full_attention"] * 2
    assert str(hf.dtype).removeprefix("torch.") == "bfloat16"
    assert Qwen3Config.from_hf(hf.to_dict()) == config


@pytest.mark.parametrize(
    "change, named",
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"model_type": None}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradicts"),
        ({"rope_theta": None}, "rope_theta"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_refuses_config_json(change, named):
    with pytest.raises(ValueError, match=named):
        Qwen3Config.from_hf({**QWEN3_8B, **change})


def test_refuses_moe_folder():
    with pytest.raises(ValueError, match=r"config\.json: .*qwen3_moe.*dense Qwen3"):
        Qwen3Config.from_hf_folder(GOLDENS / "qwen3moe")


def test_refuses_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        Qwen3Config.from_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        Qwen3Config.from_hf_folder(tmp_path)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"num_layers": 0}, "num_layers"),
        ({"head_dim": 15}, "head_dim"),
        ({"dtype": "float16"}, "dtype"),
        ({"eos_token_ids": (128,)}, "eos_token_ids"),
    ],
)
def test_refuses_values(change, named):
    with pytest.raises(ValueError, match=named):
        Qwen3Config(**{**TINY, **change})
