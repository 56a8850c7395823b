"""The command line, and every kind of bad input: one clear error, nothing compiled."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file, save_file

from fp8rl_jax.experiment import build
from fp8rl_jax.loop import train
from fp8rl_jax.models.qwen3.checkpoint import export_hf
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params

TINY = Path(__file__).parent / "tiny_config.py"
GSM8K_ROW = {"question": "How many are 2 and 3?", "answer": "2 + 3 = 5\n#### 5"}


def tiny_config(**changes):
    """The tiny configuration on the test's eight devices."""
    config = runpy.run_path(str(TINY))["get_config"]()
    options = {
        "train__micro_batch_size": 8,
        "grpo__num_prompts_per_step": 8,
    } | changes
    with config.unlocked():
        config.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in options.items()}
        )
    return config


@pytest.fixture(autouse=True)
def no_program_is_compiled(caplog):
    """Building and refusing a run must not compile any program of it."""
    with jax.log_compiles():
        yield
    messages = "\n".join(record.getMessage() for record in caplog.get_records("call"))
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", messages)
    assert {"_generate", "_quantize", "_score", "_update", "draw"}.isdisjoint(compiled)


def test_the_tiny_configuration_is_good():
    experiment = build(tiny_config())
    assert experiment.learner.abstract_state().step.shape == ()
    assert len(experiment.validation_prompts) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "fp9"}, "Unknown recipe 'fp9': choose one of bf16, fp8"),
        ({"model__size": "0.7b"}, "model.size='0.7b': choose one of 0.6b"),
        ({"model__path": "nowhere"}, "model folder nowhere does not exist"),
        (
            {"model__custom__num_heads": 3, "model__custom__num_kv_heads": 2},
            "num_heads=3 must be a multiple of num_kv_heads=2",
        ),
        (
            {"loss__algorithm": "ppo"},
            "no preset 'ppo': choose from grpo, dr_grpo, dapo",
        ),
        ({"loss__aggregation": "mean"}, "aggregation='mean' is not one of token_mean"),
        ({"loss__kl_type": "k4"}, "kl_type='k4' is not one of k1, k2, k3"),
        (
            {"loss__kl_placement": "reward", "loss__kl_coefficient": 0.1},
            "Set kl_type to 'k1'",
        ),
        ({"loss__tis_ratio": 2.0}, "corrects for the sampler twice"),
        (
            {"loss__old_policy": "current"},
            "each rollout serves 4 updates: set it to 'rollout' or 'recomputed'",
        ),
        ({"mesh__data": 3}, "mesh .data=3, fsdp=1, tensor=1. needs 3 devices"),
        ({"mesh__data": 1, "mesh__fsdp": 3}, "and there are 8"),
        ({"mesh__data": 2, "mesh__fsdp": -1, "mesh__tensor": -1}, "only one axis"),
        (
            {"mesh__tensor": 2},
            r"kv_heads=1 does not divide into 2 shards \(tensor=2\); 1 would do",
        ),
        ({"mesh__tensor": 8}, r"heads=2 does not divide into 8 shards"),
        (
            {"model__custom__hidden_size": 132, "mesh__data": 1, "mesh__fsdp": 8},
            "embed=132 does not divide into 8 shards",
        ),
        (
            {"grpo__num_prompts_per_step": 3},
            "3 prompts x 4 samples = 12 rows do not divide into 2 mini-batches of "
            "micro-batches of 8",
        ),
        (
            {"train__micro_batch_size": 4},
            "batch=4 does not divide into 8 shards",
        ),
        (
            {"grpo__num_prompts_per_step": 12},
            "batch=12 does not divide into 8 shards",
        ),
        ({"warm_start__batch_size": 12}, "warm_start.batch_size=12 does not divide"),
        ({"warm_start__eval_period": 0}, "warm_start.eval_period"),
        ({"train__micro_batch_size": 0}, "train.micro_batch_size"),
        ({"train__max_skipped_updates": 0}, "train.max_skipped_updates must be at"),
        ({"grpo__num_generations_per_prompt": 0}, "must be at least 1, got 0"),
        ({"sampling__max_new_tokens": 50_000}, "exceed the model's 40960 positions"),
        ({"validation__batch_size": 0}, "validation.batch_size"),
        ({"validation__max_prompts": 0}, "validation.max_prompts"),
        ({"validation__num_samples": 0}, "validation.num_samples must be at least 1"),
        ({"validation__temperature": -1.0}, "validation.temperature=-1.0 must be 0"),
        ({"train__remat": "half"}, "Unknown remat policy 'half'"),
        ({"sampling__temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"sampling__max_new_tokens": 0}, "must be"),
        ({"optimizer__learning_rate": -1.0}, "learning_rate"),
        ({"task__name": "chess"}, "task.name='chess': choose gsm8k or arithmetic"),
        ({"task__operators": "/"}, r"operators must be among '\+-\*'"),
        ({"task__num_validation": 99}, "cannot hold out 99 of 25 problems"),
        ({"task__max_prompt_length": 3}, "no prompt is left of 18 rows"),
        ({"task__name": "gsm8k"}, "task.train_path is empty"),
        ({"tokenizer__path": ""}, "tokenizer.path is empty"),
        ({"tokenizer__path": "nowhere"}, "nowhere is not a folder"),
        (
            {"model__custom__vocab_size": 256},
            "the tokenizer has 258 ids but the model only 256",
        ),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ValueError, match=message):
        build(tiny_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grading__num_workers": 0}, "num_workers must be >= 1"),
        ({"checkpoint__keep": 0}, "keep=0"),
    ],
)
def test_bad_options_of_a_run(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_config(run_dir=str(tmp_path), **changes))


def gsm8k_config(folder: Path, rows: list[str], **changes):
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return tiny_config(
        **{
            "task__name": "gsm8k",
            "task__train_path": str(folder / "rows.jsonl"),
            "task__validation_path": str(folder / "rows.jsonl"),
            "task__prompt_format": "plain",
            "task__max_prompt_length": 256,
        }
        | changes
    )


def test_jsonl_rows(tmp_path):
    good = json.dumps(GSM8K_ROW)
    assert len(build(gsm8k_config(tmp_path, [good] * 3)).train_prompts) == 3
    for bad in (
        "{'question': 1}",
        json.dumps({"question": "?"}),
        json.dumps(GSM8K_ROW | {"answer": "five"}),
    ):
        with pytest.raises(ValueError, match=r"rows\.jsonl:3: .*remove this row"):
            build(gsm8k_config(tmp_path, [good, "", bad, good]))
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        build(
            gsm8k_config(
                tmp_path, [good], task__validation_path=str(tmp_path / "none.jsonl")
            )
        )
    with pytest.raises(ValueError, match="no chat template"):
        build(gsm8k_config(tmp_path, [good], task__prompt_format="chat"))


CONFIG = Qwen3Config(
    vocab_size=384,
    hidden_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=128,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A complete model folder of two shards."""
    folder = tmp_path_factory.mktemp("models") / "good"
    params = init_params(CONFIG, jax.random.key(0))
    export_hf(params, CONFIG, folder, max_shard_bytes=150_000)
    return folder


@pytest.fixture
def folder(exported, tmp_path):
    """A copy to damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def shard_of(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


def truncate(folder):
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def remove(folder):
    shard_of(folder).unlink()


def drop_tensor(folder):
    shard = shard_of(folder)
    tensors = load_file(shard)
    tensors.popitem()
    save_file(tensors, shard)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated or corrupt"),
        (remove, "is missing; download it again"),
        (drop_tensor, "which does not hold it"),
    ],
)
def test_damaged_weights(folder, tmp_path, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        train(tiny_config(run_dir=str(tmp_path / "run"), model__path=str(folder)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "Llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ],
)
def test_another_architecture(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        build(tiny_config(model__path=str(folder)))


def word_tokenizer(folder, special_tokens):
    """A Hugging Face tokenizer folder of a few words."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"[UNK]": 0, "<end>": 1, "<pad>": 2, "1": 3},
            "unk_token": "[UNK]",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("special_tokens", "message"),
    [
        ({"pad_token": "<pad>"}, "no stop token: set `eos_token`"),
        ({"eos_token": "<end>"}, "no padding token: set `pad_token`"),
    ],
)
def test_tokenizer_without_the_needed_ids(tmp_path, special_tokens, message):
    word_tokenizer(tmp_path, special_tokens)
    with pytest.raises(ValueError, match=message):
        build(tiny_config(tokenizer__path=str(tmp_path)))


def run_command(*arguments):
    """Runs the entry point on one device."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    return subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.train", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--config must have a value"),
        (["--config=none.py"], "error: .*No such file.*none.py"),
        (["--config=none.py", "--config.seed=1"], "error: .*No such file.*none.py"),
        (
            [f"--config={TINY}", "--config.grpo.num_step=3"],
            "error: unknown option 'num_step'. Did you mean \"num_steps\"",
        ),
        (
            [f"--config={TINY}", "--config.grop.num_steps=3"],
            "error: unknown option 'grop'. Did you mean \"grpo\"",
        ),
        ([f"--config={TINY}", "--config.grpo.num_steps=many"], "num_steps=many"),
        ([f"--config={TINY}", "again"], "Unexpected arguments: again"),
        ([f"--config={TINY}"], "error: run_dir is empty"),
        (
            [f"--config={TINY}", "--config.run_dir=unused", "--config.mesh.data=3"],
            "error: mesh .data=3.* needs 3 devices and there are 1",
        ),
        (
            [f"--config={TINY}", f"--config.compilation_cache={TINY}/folder"],
            "error: compilation_cache='.*/folder' cannot be used: .*Not a directory",
        ),
    ],
)
def test_the_command_ends_with_one_line(arguments, line, tmp_path):
    done = run_command(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [text for text in done.stderr.splitlines() if "--helpshort" not in text]
    assert len(lines) == 1, done.stderr
    assert re.search(line, lines[0]), lines[0]
