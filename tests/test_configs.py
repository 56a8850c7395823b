"""Every file in configs/: complete, and able to build and to train.

The real tokenizer and GSM8K are used where FP8RL_TOKENIZER (a folder) and FP8RL_GSM8K
(a folder with train.jsonl and test.jsonl) name them; stand-ins made here always are.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import tokenizers
from ml_collections import ConfigDict

from fp8rl_jax.config import base_config
from fp8rl_jax.experiment import build

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 256 + len(SPECIALS)
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 128,
    "intermediate_size": 128,
}


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(config: ConfigDict, prefix=""):
    for name, value in config.items(preserve_field_references=False):
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def run(*args: str) -> str:
    """Runs a module of the package on one device; returns what it printed."""
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer with Qwen's special tokens, in Hugging Face's files."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIALS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 12), ("test", 4)):
        rows = [
            {"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_is_locked_complete_and_says_how_to_run_it(path):
    module = load(path)
    config = module.get_config()
    assert config.is_locked
    with pytest.raises(AttributeError):
        config.grpo.num_stepz = 1
    ours, known = dict(leaves(config)), dict(leaves(base_config()))
    assert ours.keys() == known.keys()
    for name, value in ours.items():
        if known[name] is not None:
            assert type(value) is type(known[name]), name
    command = f"python -m fp8rl_jax.train --config=configs/{path.name}"
    assert command in module.__doc__
    assert config.run_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_builds(path, tokenizer_folder, data_folder):
    config = load(path).get_config()
    if config.task.name == "gsm8k":
        config.tokenizer.path = str(tokenizer_folder)
        config.task.train_path = str(data_folder / "train.jsonl")
        config.task.validation_path = str(data_folder / "test.jsonl")
    experiment = build(config)
    assert experiment.train_prompts.num_dropped == 0
    parameters = {
        "qwen3_0p6b_gsm8k": 596_049_920,
        "qwen3_8b": 8_190_735_360,
    }  # of the published checkpoints
    if path.stem in parameters:
        assert experiment.model.num_parameters == parameters[path.stem]
        assert experiment.tokenizer.stop_ids == (VOCAB_SIZE - 1, VOCAB_SIZE - 3)
    assert experiment.sampling.num_samples == config.grpo.num_generations_per_prompt


def test_the_8b_config_has_nemo_rls_hyperparameters(tokenizer_folder, data_folder):
    """NeMo RL, recipe grpo-qwen3-8b-base-1n8g-fp8-kvcache-megatron."""
    config = load(ROOT / "configs/qwen3_8b.py").get_config()
    config.tokenizer.path = str(tokenizer_folder)
    config.task.train_path = str(data_folder / "train.jsonl")
    config.task.validation_path = str(data_folder / "test.jsonl")
    algorithm = build(config).algorithm
    grpo, loss = config.grpo, algorithm.loss
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt) == (32, 16)
    assert grpo.num_epochs * grpo.num_mini_batches == 1  # one batch of 512 a step
    assert config.task.max_prompt_length == 2048
    assert config.task.max_prompt_length + config.sampling.max_new_tokens == 8192
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.2, 0.2)
    assert (loss.kl_coefficient, loss.kl_type, loss.kl_placement) == (
        0.01,
        "k3",
        "loss",
    )
    assert loss.aggregation == "token_mean" and loss.dual_clip is None
    assert algorithm.advantages.baseline == "leave_one_out"
    assert algorithm.advantages.normalize_std
    optimizer = config.optimizer
    assert optimizer.warmup_start * optimizer.learning_rate == pytest.approx(1e-7)
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-6, 10)
    assert (optimizer.weight_decay, optimizer.decay_steps) == (0.1, 0)
    assert config.validation.period == 20


def train_three_steps(model, data, run_dir):
    """Runs the 0.6B config on another model with few prompts and new tokens.

    Returns:
      The metrics of the GRPO steps.
    """
    printed = run(
        "fp8rl_jax.train",
        "--config=configs/qwen3_0p6b_gsm8k.py",
        f"--config.run_dir={run_dir}",
        f"--config.model.path={model}",
        f"--config.task.train_path={data / 'train.jsonl'}",
        f"--config.task.validation_path={data / 'test.jsonl'}",
        "--config.task.max_prompt_length=512",
        "--config.grpo.num_steps=3",
        "--config.grpo.num_prompts_per_step=2",
        "--config.grpo.num_generations_per_prompt=2",
        "--config.train.micro_batch_size=2",
        "--config.sampling.max_new_tokens=6",
        "--config.validation.max_prompts=2",
        "--config.validation.batch_size=2",
    )
    assert "Learning curve" in printed
    assert (run_dir / "checkpoints" / "3").is_dir()
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["train/finite"] == 1
        # Sampler and trainer are one policy.
        assert row["train/logprob_abs_diff_max"] == 0
        assert row["train/token_mult_prob_error"] == 1
        assert 0 < row["train/mean_gen_tokens_per_sample"] <= 6
        assert row["timing/train/total_step_time"] > 0
    return steps


def test_the_gsm8k_config_trains(tokenizer_folder, data_folder, tmp_path):
    model = tmp_path / "model"
    run(
        "fp8rl_jax.models.qwen3.make_checkpoint",
        f"--out={model}",
        f"--tokenizer={tokenizer_folder}",
        f"--eos_token_ids={VOCAB_SIZE - 1}",
        *(f"--{name}={size}" for name, size in SHAPE.items()),
    )
    train_three_steps(model, data_folder, tmp_path / "run")


@pytest.mark.skipif(
    not {"FP8RL_TOKENIZER", "FP8RL_GSM8K"} <= os.environ.keys(),
    reason="set FP8RL_TOKENIZER to Qwen3's tokenizer folder and FP8RL_GSM8K to a "
    "folder with GSM8K's train.jsonl and test.jsonl",
)
def test_the_gsm8k_config_trains_on_real_data(tmp_path):
    model, data = tmp_path / "model", pathlib.Path(os.environ["FP8RL_GSM8K"])
    run(
        "fp8rl_jax.models.qwen3.make_checkpoint",
        f"--out={model}",
        f"--tokenizer={os.environ['FP8RL_TOKENIZER']}",
    )
    steps = train_three_steps(model, data, tmp_path / "run")
    # A question of GSM8K, the instruction and the chat template.
    assert all(50 < row["train/mean_prompt_length"] < 400 for row in steps)
