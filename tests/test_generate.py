"""Completing prompts: the command, its files, and where the weights come from."""

import dataclasses
import functools
import io
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fp8rl_jax import console, experiment, generation
from fp8rl_jax.checkpoint import Checkpointer
from fp8rl_jax.completions import CompletionPrinter, CompletionWriter, TextStream
from fp8rl_jax.console import RolloutProgress
from fp8rl_jax.data.tokenizer import ByteTokenizer
from fp8rl_jax.experiment import build, build_model
from fp8rl_jax.generation import Options, generate
from fp8rl_jax.jobs import JobReader, sample_ids
from fp8rl_jax.models.qwen3.checkpoint import export_hf
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.rollout import Completion, FinishReason, SamplingParams
from fp8rl_jax.rollout.capacity import Capacity
from fp8rl_jax.sampler_weights import load_weights

TINY = Path(__file__).parent / "tiny_config.py"
TOKENIZER = ByteTokenizer()
NEW = 20  # tokens, where a test does not say
SAMPLING = SamplingParams(1.0, NEW, TOKENIZER.stop_ids)


def tiny_config(**changes):
    config = runpy.run_path(str(TINY))["get_config"]()
    with config.unlocked():
        config.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in changes.items()}
        )
    return config


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Programs for one of the eight devices compile faster."""
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:1]
        patch.setattr(
            experiment, "make_mesh", functools.partial(make_mesh, devices=devices)
        )
        yield


def run(config=None, **options):
    """Runs `generate` with prompts as they are."""
    options = {"raw": True, "max_new_tokens": NEW} | options
    return generate(config or tiny_config(), Options(**options))


def complete(folder, lines, config=None, **options):
    """The rows that come out for the rows that go in."""
    source, target = folder / "prompts.jsonl", folder / "completions.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(config, input=str(source), output=str(target), **options)
    return [json.loads(line) for line in target.read_text().splitlines()]


def reader(**kwargs):
    return JobReader(
        **{"tokenizer": TOKENIZER, "sampling": SAMPLING, "max_length": 100} | kwargs
    )


def test_a_seed_repeats_what_is_printed(capsys):
    printed = []
    for seed in (3, 3, 4):
        assert run(prompt="1+2=", seed=seed)
        out, err = capsys.readouterr()
        printed.append(out)
        assert err.count("KV cache: ") == 1 and "Weights: random" in err
    assert printed[0] == printed[1] != printed[2]


def test_a_stream_prints_the_same(capsys):
    run(prompt="1+2=")
    printed = capsys.readouterr().out
    run(prompt="1+2=", stream=True)
    assert capsys.readouterr().out == printed


LINES = [
    {"prompt": "1+2=", "id": "first", "num_samples": 3},
    {"tokens": [49, 43, 50], "max_new_tokens": 2},
    {"prompt": "é", "temperature": 0, "id": 7},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return complete(tmp_path_factory.mktemp("rows"), LINES)


def test_rows_come_in_the_order_of_the_prompts(rows):
    order = [(row["id"], row["sample"]) for row in rows]
    assert order == [("first", 0), ("first", 1), ("first", 2), (2, 0), (7, 0)]
    for row in rows:
        assert list(row) == [
            *("id", "sample", "text", "tokens", "log_probs", "finish_reason")
        ]
        assert row["text"] == TOKENIZER.decode(row["tokens"])
        assert len(row["log_probs"]) == len(row["tokens"]) and max(row["log_probs"]) < 0
        stopped = row["tokens"][-1] in TOKENIZER.stop_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
    assert len({tuple(row["tokens"]) for row in rows[:3]}) == 3
    assert len(rows[3]["tokens"]) <= 2 and len(rows[4]["tokens"]) <= NEW


def test_a_prompt_has_the_same_completions_alone(rows, tmp_path):
    config = tiny_config(sampling__max_slots=2, sampling__decode_steps=3)
    assert complete(tmp_path, [LINES[2], LINES[0]], config) == [rows[4], *rows[:3]]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "completions.jsonl",
        "prompts.jsonl",
    ]


def test_greedy_takes_the_argmax_of_the_full_forward(rows):
    config, setup = tiny_config(), build_model(tiny_config())
    weights, _ = load_weights(config, setup)
    tokens = TOKENIZER.encode("é") + rows[4]["tokens"]
    inputs = jnp.asarray(tokens[:-1], jnp.int32)[None]
    positions = jnp.arange(len(tokens) - 1, dtype=jnp.int32)[None]
    with jax.set_mesh(setup.mesh):
        forward = jax.jit(
            lambda w: Qwen3(setup.model, w)(inputs, positions, setup.recipe.rollout)[0]
        )
        hidden = np.asarray(forward(weights)[0], np.float64)
    head = np.asarray(weights["embed"]["embedding"], np.float64)
    logits = (hidden @ head.T)[1:, : TOKENIZER.vocab_size]
    np.testing.assert_array_equal(rows[4]["tokens"], logits.argmax(-1))
    expected = logits.max(-1) - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(rows[4]["log_probs"], expected, atol=1e-4, rtol=0)


def test_a_stop_string_ends_a_completion(rows, tmp_path):
    tokens = rows[0]["tokens"]
    at = next(i for i, t in enumerate(tokens) if i and t < 128 and t not in tokens[:i])
    (row,) = complete(
        tmp_path, [LINES[0] | {"num_samples": 1}], stop=["never there", chr(tokens[at])]
    )
    assert row["tokens"] == tokens[: at + 1] and row["finish_reason"] == "stop"
    assert row["log_probs"] == rows[0]["log_probs"][: at + 1]
    assert row["text"].endswith(chr(tokens[at]))


def test_a_signal_keeps_what_has_ended(monkeypatch, tmp_path, capsys):
    """Two completions of one token have ended after the first step."""

    class Guard(generation.PreemptionGuard):
        steps = 0

        def should_stop(self):
            self.steps += 1
            return self.steps > 1

    monkeypatch.setattr(generation, "PreemptionGuard", Guard)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b", "num_samples": 2, "max_new_tokens": 1}]
    source.write_text("\n".join(map(json.dumps, lines)))
    target.write_text("of a run before")
    assert not run(input=str(source), output=str(target))
    assert target.read_text() == "of a run before"
    kept = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    found = [(json.loads(row)["id"], json.loads(row)["sample"]) for row in kept]
    assert {(2, 0), (2, 1)} <= {*found}
    assert f"The {len(kept)} completions that had ended" in capsys.readouterr().err


def completion(job, sample, log_prob=-1.0):
    tokens = np.array([65, 257], np.int32)
    log_probs = np.array([log_prob, -2.0], np.float32)
    return Completion(job, sample, tokens, log_probs, FinishReason.STOP)


def test_several_samples_are_told_apart(capsys):
    with CompletionPrinter(TOKENIZER.decode) as printer:
        printer.add(0, completion(0, 1))
        printer.add(0, completion(0, 0))
        assert capsys.readouterr().out == ""
        printer.finish()
    assert capsys.readouterr().out == (
        "--- sample 0, 2 tokens, stop\nA\n--- sample 1, 2 tokens, stop\nA\n"
    )


def test_the_writer_is_all_or_partial(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    record = {"prompt": "a", "num_samples": 2}
    jobs = [reader(raw=True).job(record, name) for name in ("x", "y")]
    with CompletionWriter(path, jobs, TOKENIZER.decode) as writer:
        assert writer.kept() == "Nothing has been written."
    assert not any(path.parent.iterdir())
    with CompletionWriter(path, jobs, TOKENIZER.decode) as writer:
        for job, sample in ((1, 0), (0, 1), (0, 0)):
            writer.add(job, completion(job, sample))
        with pytest.raises(FloatingPointError, match="'y' is not finite"):
            writer.add(1, completion(1, 1, np.nan))
        ids = [json.loads(x)["id"] for x in writer.partial.read_text().splitlines()]
        assert ids == ["y", "x", "x"] and not path.exists()
        writer.finish()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["id"], r["sample"]) for r in rows] == [("x", 0), ("x", 1), ("y", 0)]
    assert rows[0]["text"] == "A" and [p.name for p in path.parent.iterdir()] == [
        "out.jsonl"
    ]


def test_a_stream_waits_for_whole_characters():
    pieces = []
    with TextStream(TOKENIZER.decode, pieces.append) as stream:
        for token in (65, *"é".encode(), 195, 257):
            stream.on_tokens(0, 0, np.array([token]), np.zeros(1))
    assert pieces == ["A", "é", "\ufffd", "\n"]


BAD = [
    ("{'prompt': 1}", "not JSON"),
    ('"text"', "not a JSON object"),
    ("\udcff", "not UTF-8"),
    ('{"id": 1}', "needs one of prompt, messages, tokens, and has []"),
    ('{"prompt": "a", "tokens": [1]}', "and has ['prompt', 'tokens']"),
    ('{"prompt": "a", "top_k": 3}', "unknown field 'top_k', there are prompt"),
    ('{"prompt": 3}', "the prompt 3 is not a text"),
    ('{"prompt": ""}', "The prompt is empty"),
    ('{"tokens": []}', "The prompt is empty"),
    ('{"tokens": "ab"}', "not a list of integers"),
    ('{"tokens": [1, true]}', "not a list of integers"),
    ('{"tokens": [258]}', "token 258 is not among the tokenizer's 258"),
    ('{"messages": []}', "not a list of turns"),
    ('{"messages": [{"role": "user"}]}', "not a role and a content"),
    ('{"messages": [{"role": "user", "content": 1}]}', "not a role and a content"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no chat template"),
    ('{"prompt": "a", "id": 1.5}', "the id 1.5 is neither"),
    ('{"prompt": "a", "id": 1}', "line 1 has the id 1 too"),
    ('{"prompt": "a", "num_samples": 0}', "num_samples must be >= 1, got 0"),
    ('{"prompt": "a", "num_samples": "2"}', "num_samples '2' is not an integer"),
    ('{"prompt": "a", "max_new_tokens": 2.0}', "max_new_tokens 2.0 is not an integer"),
    ('{"prompt": "a", "temperature": -1}', "temperature must be >= 0"),
    ('{"prompt": "a", "temperature": NaN}', "temperature nan is not a number"),
    ('{"prompt": "a", "max_new_tokens": 100}', "a prompt of 1 tokens and"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[b[0] for b in BAD])
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    text = f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "b"}}'
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError) as error:
        reader(raw=True).read(path)
    text = str(error.value)
    assert text.startswith(f"{path}:3: ") and message in text
    assert text.endswith("correct or remove this line")


def test_bad_input_comes_before_the_weights(monkeypatch, tmp_path):
    def load(*_):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(generation, "load_weights", load)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for text, message in (
        (None, "no such file"),
        ("\n", "the file has no prompts"),
        ('{"prompt": 1}', "in.jsonl:1: "),
    ):
        if text is not None:
            source.write_text(text)
        with pytest.raises(ValueError, match=message):
            run(input=str(source), output=str(target))
    with pytest.raises(ValueError, match=r"no chat template.*--raw"):
        run(prompt="a", raw=False)
    source.write_text('{"prompt": "a"}')
    with pytest.raises(OSError):
        run(input=str(source), output=str(source / "out.jsonl"))


def test_no_data_are_needed(capsys):
    assert run(tiny_config(task__name="gsm8k"), prompt="1+2=")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either --prompt=TEXT or --input=FILE"),
        ({"prompt": "a", "input": "b"}, "either --prompt=TEXT or --input=FILE"),
        ({"input": "a"}, "--input needs --output"),
        ({"input": "a", "output": "./a"}, "would replace --input"),
        ({"prompt": "a", "stream": True, "num_samples": 2}, "--stream prints one"),
        ({"prompt": "a", "step": 3}, "--step needs --checkpoint"),
        ({"prompt": "a", "seed": -1}, "--seed=-1 must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_options_go_before_the_configuration():
    config = tiny_config(sampling__temperature=0.5, sampling__top_k=7)
    options = Options("a", temperature=0.0, top_p=0.9, stop=["x"], num_samples=2)
    assert options.sampling(config, (5,)) == SamplingParams(
        0.0, 3, (5,), 2, top_k=7, top_p=0.9, stop_strings=("x",)
    )


class ChatTokenizer(ByteTokenizer):
    def apply_chat_template(self, messages, **kwargs):
        if messages[0]["role"] == "nobody":
            raise RuntimeError("no such role")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def test_a_prompt_is_a_users_message_unless_raw():
    chat = reader(tokenizer=ChatTokenizer())
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "é"},
    ]
    for record, text in (
        ({"prompt": "2+2"}, "<user>2+2"),
        ({"messages": turns}, "<system>s<user>é"),
        ({"tokens": [52]}, "4"),
    ):
        prompt = chat.job(record, 1).request.prompt
        assert TOKENIZER.decode(prompt) == text
    raw = dataclasses.replace(chat, raw=True)
    assert TOKENIZER.decode(raw.job({"prompt": "2+2"}, 1).request.prompt) == "2+2"
    turns[0]["role"] = "nobody"
    with pytest.raises(ValueError, match=r"chat template fails \(no such role\)"):
        chat.job({"messages": turns}, 1)


def test_sample_ids_are_the_prompts_own():
    assert sample_ids("a", 3)[:2] == sample_ids("a", 2)
    assert len({*sample_ids("a", 9), *sample_ids(1, 9), *sample_ids("1", 9)}) == 27
    assert all(0 <= i < 2**31 for name in range(50) for i in sample_ids(name, 3))


def learner_weights(learner, params):
    return learner.rollout_weights(params, learner.quantize(params))


def assert_same_tree(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_weights_are_the_learners(recipe, tmp_path):
    config = tiny_config(recipe=recipe)
    e = build(config)
    setup = build_model(config)
    params = e.initial_params()
    expected = learner_weights(e.learner, params)
    assert_same_tree(load_weights(config, setup)[0], expected)
    for dtype in (jnp.float32, jnp.bfloat16):
        folder = tmp_path / dtype.__name__
        export_hf(params, e.model, folder, dtype=dtype)
        at = tiny_config(recipe=recipe, model__path=str(folder))
        found, source = load_weights(at, build_model(at))
        assert_same_tree(found, learner_weights(e.learner, build(at).initial_params()))
        assert source == str(folder)


def test_a_mesh_holds_whole_copies():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    config = tiny_config(model__custom__num_kv_heads=2)
    setup = dataclasses.replace(build_model(config), mesh=mesh)
    weights, _ = load_weights(config, setup)
    assert_same_tree(weights, load_weights(config, build_model(config))[0])
    assert weights["embed"]["embedding"].sharding.shard_shape((384, 128)) == (192, 128)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two checkpoints, as the loop writes them; the parameters of each."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config()
    e = build(config)
    saved = {}
    with Checkpointer(folder / "checkpoints") as checkpointer:
        for step in (1, 4):
            key = jax.random.key(100 + step)
            shardings = e.learner.state_shardings().params
            params = init_params(e.model, key, shardings, std=0.05)
            state = {"train": e.learner.init(params), "reference": {"x": jnp.ones(3)}}
            checkpointer.save(step, state, {"config": config.to_dict()})
            saved[step] = learner_weights(e.learner, params)
    return folder, saved


def test_weights_of_a_run(run_dir):
    folder, saved = run_dir
    config, setup = tiny_config(), build_model(tiny_config())
    weights, source = load_weights(config, setup, folder)
    assert source == f"{folder}, step 4"
    assert_same_tree(weights, saved[4])
    assert_same_tree(load_weights(config, setup, folder, 1)[0], saved[1])
    other = tiny_config(recipe="bf16")
    _, source = load_weights(other, build_model(other), folder)
    assert source.endswith("trained with recipe fp8")


def test_a_run_is_sampled(run_dir, capsys):
    assert run(prompt="1+2=", checkpoint=str(run_dir[0]), step=1)
    assert "step 1, 147,968 parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"step": 3}, r"no checkpoint 3 in .*; there are \[1, 4\]"),
        ({}, {"checkpoint": "nowhere"}, "no checkpoint directory .*nowhere"),
        ({"model__custom__num_layers": 2}, {}, r"does not fit this run: .*\[1,"),
        (
            {"model__custom__tie_word_embeddings": False},
            {},
            "lm_head/kernel is absent",
        ),
        (
            {"model__custom__head_dim": 32, "model__custom__num_heads": 4},
            {},
            "does not fit this run|head_dim: 64 in the checkpoint, 32 now",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(run_dir, changes, options, message):
    options = {"checkpoint": str(run_dir[0])} | options
    with pytest.raises(ValueError, match=message):
        run(tiny_config(**changes), prompt="a", **options)


class FakeSession:
    """Two devices of four slots; each step draws 80 of 96 tokens."""

    capacity = Capacity(2, 16, 8, 4, 4, 64, 1, 64, 4, 1024, 16, None)

    def __init__(self):
        self.steps = 0

    def metrics(self):
        self.steps += 1
        return {
            "rollout/generated_tokens": 80.0 * self.steps,
            "rollout/slot_use": 80 / 96,
        }


def show_progress(monkeypatch, terminal):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock.now)
    out = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    session = FakeSession()
    with RolloutProgress(40, out) as progress:
        for step in range(24):
            clock.now = step * 2.0
            progress(session, [completion(0, step)])
    return out.file.getvalue()


def test_progress_is_a_line_every_ten_seconds(monkeypatch):
    assert show_progress(monkeypatch, False).splitlines() == [
        f"samples {done}/40  tok/s 40  slots 7/8" for done in (6, 11, 16, 21)
    ]


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    text = show_progress(monkeypatch, True)
    assert "━" in text and "24/40" in text and "tok/s 40  slots 7/8" in text


def command(*arguments):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.generate", f"--config={TINY}", *arguments],
        env=environment,
        capture_output=True,
        timeout=120,
    )
    # As it is: text mode would turn a drawn "\r" into "\n".
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_command(capsys):
    status, out, err = command(
        *("--prompt=1+2=", "--raw", "--max_new_tokens=20", "--stop=never"),
        *("--seed=3", "--temperature=0.7", "--top_k=40", "--stop=there"),
    )
    assert status == 0, err
    run(prompt="1+2=", seed=3, temperature=0.7, top_k=40, stop=["never", "there"])
    assert out == capsys.readouterr().out
    assert err.count("KV cache: ") == 1 and "tokens, " in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "error: give either --prompt=TEXT or --input=FILE"),
        (("--prompt=a", "again"), "Unexpected arguments: again"),
        (("--prompt=a", "--config.sed=1"), "error: unknown option 'sed'. Did you"),
    ],
)
def test_the_command_ends_with_one_line(arguments, line):
    status, out, err = command(*arguments)
    assert status == 1 and out == ""
    (text,) = err.splitlines()
    assert text.startswith(line)
