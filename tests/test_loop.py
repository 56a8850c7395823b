"""Whole runs of a one-layer model: what they write, and how they stop and resume."""

import collections
import dataclasses
import errno
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from orbax.checkpoint._src.path import atomicity

from fp8rl_jax import experiment, grpo_step
from fp8rl_jax.checkpoint import Checkpointer, CheckpointError
from fp8rl_jax.loop import train
from fp8rl_jax.metrics import read_metrics
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.rollout import ContinuousRolloutEngine
from fp8rl_jax.tasks.base import Grade

TINY = Path(__file__).parent / "tiny_config.py"
# Figures of a machine and a moment rather than of the run.
CLOCKS = re.compile(
    "time$|timing/|performance/|memory/|rollout/(tokens_per_sec|prefill_share)"
)
MISMATCH = {
    "train/token_mult_prob_error": 1.0,
    "train/seq_mult_prob_error_max": 1.0,
    "train/sampling_importance_ratio": 1.0,
    "train/logprob_abs_diff": 0.0,
    "train/logprob_abs_diff_max": 0.0,
    "train/gen_kl_error": 0.0,
    "train/policy_kl_error": 0.0,
    "train/js_divergence_error": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    """Compiles a program once for all the runs of this module, subprocesses too."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}

    def use(options):
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(options)
    yield {name.upper(): str(value) for name, value in options.items()}
    use(before)


def use_one_device(patch):
    """Runs in this process use one of its eight devices: they compile faster."""
    patch.setattr(
        experiment,
        "make_mesh",
        lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]),
    )


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch)


def tiny_config(run_dir, **changes):
    """The tiny configuration, with options given as ``grpo__num_steps=1``."""
    config = runpy.run_path(str(TINY))["get_config"]()
    config.run_dir = str(run_dir)
    with config.unlocked():
        config.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in changes.items()}
        )
    return config


def grpo_lines(run_dir) -> dict[int, dict]:
    lines = read_metrics(Path(run_dir) / "metrics.jsonl", "grpo")
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    return dict(zip(steps, lines, strict=True))


def without_clocks(line):
    return {name: value for name, value in line.items() if not CLOCKS.match(name)}


def restore(config, step):
    """The learner's state (nested dicts) in a run's checkpoint, and its meta."""
    folder = Path(config.run_dir, "checkpoints", str(step))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(folder / "state")
    meta = json.loads((folder / "meta" / "metadata").read_text())
    return jax.device_get(state["train"]), meta


def check_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def differ(tree, other) -> bool:
    equal = jax.tree.map(np.array_equal, tree, other)
    return not jax.tree.all(equal)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run: warm start, ten FP8 steps of two epochs, two mini-batches.

    Returns:
      Its configuration and result.
    """
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        config = tiny_config(tmp_path_factory.mktemp("straight"))
        return config, train(config)


def test_a_run_ends_with_all_its_files(straight):
    config, result = straight
    assert result.finished and result.step == 10
    assert list(result.accuracy) == [
        "at the start",
        "after the warm start",
        "after GRPO",
    ]
    assert 0.1 <= result.accuracy["after the warm start"] <= 0.9
    run_dir = Path(config.run_dir)
    assert result.run_dir == run_dir
    png = (run_dir / "learning_curve.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n") and len(png) > 1000
    # The newest two, and step 0 only if validation fell ever since.
    saved = {int(p.name) for p in (run_dir / "checkpoints").iterdir()}
    assert {5, 10} <= saved <= {0, 5, 10}


def test_metric_names_and_values(straight):
    config, _ = straight
    phases = [line["phase"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")]
    assert phases == sorted(phases, reverse=True)  # warm_start, then grpo
    lines = grpo_lines(config.run_dir)
    assert list(lines) == list(range(11))
    validated = [step for step, line in lines.items() if "validation/accuracy" in line]
    assert validated == [0, 4, 8, 10]
    assert {
        "train/loss",
        "train/reward",
        "train/grad_norm",
        "train/lr",
        "train/global_valid_seqs",
        "train/global_valid_toks",
        "train/mean_prompt_length",
        "train/mean_gen_tokens_per_sample",
        "train/truncation_rate",
        "train/natural_termination_rate",
        "train/total_num_tokens",
        "train/probs_ratio",
        "train/probs_ratio_min",
        "train/probs_ratio_max",
        "train/probs_ratio_clamped",
        "train/approx_entropy",
        "train/token_mult_prob_error",
        "train/gen_kl_error",
        "train/policy_kl_error",
        "train/js_divergence_error",
        "train/sampling_importance_ratio",
        "timing/train/generation",
        "timing/train/policy_training",
        "timing/train/reward_calculation",
        "timing/train/total_step_time",
        "performance/tokens_per_sec",
        "performance/tokens_per_sec_per_gpu",
        "performance/generation_tokens_per_sec",
    } <= lines[4].keys()
    for step in range(1, 11):
        line = lines[step]
        assert line["train/finite"] == 1.0 and line["train/grading_failures"] == 0
        assert line["train/global_valid_seqs"] == 8  # of each of the mini-batches
        assert 0 <= line["train/reward"] == line["train/accuracy"] <= 1
        rate = line["train/truncation_rate"]
        assert 0 <= rate <= 1 and line["train/natural_termination_rate"] == 1 - rate
        assert line["train/mean_prompt_length"] == 4  # "a+b="
        phases = sum(
            line[f"timing/train/{name}"]
            for name in ("generation", "reward_calculation", "policy_training")
        )
        assert phases <= line["timing/train/total_step_time"]
    # Several updates share a rollout, so the policy leaves it.
    assert any(
        line["train/probs_ratio_max"] > 1.01 for line in list(lines.values())[1:]
    )


def test_one_policy_samples_and_trains(straight):
    config, _ = straight
    for step, line in grpo_lines(config.run_dir).items():
        if step:
            assert {name: line[name] for name in MISMATCH} == MISMATCH


def test_every_mini_batch_of_every_epoch_is_a_step_of_the_schedule(straight):
    config, _ = straight
    lines = grpo_lines(config.run_dir)
    # Warm-up over two optimiser steps, of the four of the first rollout.
    first = 1e-3 * np.mean([0.1, 0.55, 1.0, 1.0])
    np.testing.assert_allclose(lines[1]["train/lr"], first, rtol=1e-5)
    np.testing.assert_allclose(lines[2]["train/lr"], 1e-3, rtol=1e-5)
    state, meta = restore(config, 10)
    assert state["step"] == 10 * 2 * 2
    assert meta["prompts"]["position"] == 10 * 4


def command(config, **changes):
    options = [
        f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()
    ]
    return [
        *(sys.executable, "-m", "fp8rl_jax.train", f"--config={TINY}"),
        *(f"--config.run_dir={config.run_dir}", *options),
    ]


def test_sigterm_saves_and_the_same_command_resumes(
    straight, tmp_path, shared_programs, one_device
):
    """The interrupted run ends bit for bit where the straight one did."""
    config = tiny_config(tmp_path / "run", checkpoint__period=0)
    environment = os.environ | shared_programs
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    arguments = command(config, checkpoint__period=0)
    metrics = tmp_path / "run" / "metrics.jsonl"
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 180
        while not (metrics.exists() and '"grpo", "step": 1' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, (
                log.read_text()
            )
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "the same command resumes the run" in log.read_text()
    stopped = max(grpo_lines(config.run_dir))
    assert 1 <= stopped < 10
    assert (tmp_path / "run" / "checkpoints" / str(stopped)).is_dir()

    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert f"Resuming after step {stopped}" in done.stdout
    straight_config, _ = straight
    resumed, reference = (
        [without_clocks(line) for line in read_metrics(f"{c.run_dir}/metrics.jsonl")]
        for c in (config, straight_config)
    )
    assert resumed == reference
    (state, meta), (straight_state, straight_meta) = (
        restore(config, 10),
        restore(straight_config, 10),
    )
    check_equal(state, straight_state)
    assert meta["prompts"] == straight_meta["prompts"]
    assert meta["accuracy"] == straight_meta["accuracy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer__learning_rate": 2e-3},
            r"optimizer.learning_rate: 0.001 in the checkpoint, 0.002 now",
        ),
        ({"seed": 1}, "seed: 0 in the checkpoint, 1 now"),
        (
            {"grpo__num_generations_per_prompt": 8},
            "grpo.num_generations_per_prompt: 4 in the checkpoint, 8 now",
        ),
        (
            {"task__max_operand": 5},
            "made with other prompts: num_prompts was 18 and is 29",
        ),
        ({"model__custom__num_layers": 2}, "does not fit this run"),
    ],
)
def test_a_changed_configuration_does_not_resume(
    straight, one_device, changes, message
):
    config, _ = straight
    before = Path(config.run_dir, "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        train(tiny_config(config.run_dir, **changes))
    assert Path(config.run_dir, "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_left_as_it_is(straight, one_device):
    config, result = straight
    before = restore(config, 10)[0]
    again = train(config)
    assert again.finished and again.step == 10 and again.accuracy == result.accuracy
    check_equal(restore(config, 10)[0], before)


@pytest.fixture
def graded(monkeypatch, one_device):
    """Rewards that random weights can earn: an even first token.

    Returns:
      A list of functions to call with the number of each grading, from 1.
    """
    calls, hooks = [], []

    def grade(rollouts, examples, tokenizer, pool):
        calls.append(len(examples))
        for hook in hooks:
            hook(len(calls))
        grades = [
            Grade(reward=float(row[0] % 2 == 0), correct=bool(row[0] % 2 == 0))
            for row in rollouts.tokens
        ]
        return grades, ["?"] * len(examples)

    monkeypatch.setattr(grpo_step, "grade_rollouts", grade)
    return hooks


def bf16_config(run_dir, **changes):
    """Random weights, no validation, several updates a rollout."""
    return tiny_config(
        run_dir,
        **{
            "recipe": "bf16",
            "warm_start__enabled": False,
            "validation__period": 0,
            "validation__at_start": False,
            "validation__at_end": False,
            "checkpoint__period": 0,
            "grpo__num_steps": 2,
            "optimizer__warmup_steps": 0,
        }
        | changes,
    )


def test_kl_in_the_loss_and_its_reference_after_a_resume(tmp_path, graded):
    kl = {
        "loss__kl_coefficient": 0.5,
        "grpo__num_steps": 3,
        "grpo__num_epochs": 1,
        "grpo__num_mini_batches": 1,
    }
    config = bf16_config(tmp_path / "straight", **kl)
    assert train(config).finished
    lines = grpo_lines(config.run_dir)
    # The reference is the policy that the run started with, and stays.
    assert lines[1]["train/kl_penalty"] == 0.0
    assert 0.0 < lines[2]["train/kl_penalty"] < lines[3]["train/kl_penalty"]
    for step in (1, 2, 3):
        assert {name: lines[step][name] for name in MISMATCH} == MISMATCH

    # SIGTERM while step 1, the fourth grading here, is graded: it is still finished.
    def interrupt(call):
        if call == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    resumed = bf16_config(tmp_path / "resumed", **kl)
    graded.append(interrupt)
    result = train(resumed)
    assert result.step == 1 and not result.finished
    assert train(resumed).finished
    again = grpo_lines(resumed.run_dir)
    assert list(map(without_clocks, again.values())) == list(
        map(without_clocks, lines.values())
    )
    check_equal(restore(resumed, 3)[0], restore(config, 3)[0])

    stronger = bf16_config(tmp_path / "stronger", **kl | {"loss__kl_coefficient": 50.0})
    train(stronger)
    assert differ(restore(stronger, 3)[0]["params"], restore(config, 3)[0]["params"])
    # And it holds the policy to the reference.
    penalties = grpo_lines(stronger.run_dir)
    assert penalties[3]["train/kl_penalty"] < lines[3]["train/kl_penalty"]


def test_kl_in_the_reward_with_recomputed_old_log_probs(tmp_path, graded):
    options = {
        "loss__kl_placement": "reward",
        "loss__kl_type": "k1",
        "loss__old_policy": "recomputed",
    }
    states = []
    for coefficient in (0.0, 0.5):
        config = bf16_config(
            tmp_path / str(coefficient), loss__kl_coefficient=coefficient, **options
        )
        assert train(config).finished
        states.append(restore(config, 2)[0]["params"])
        for step, line in grpo_lines(config.run_dir).items():
            assert {name: line[name] for name in MISMATCH} == MISMATCH, step
            assert "train/kl_penalty" not in line  # it is not part of the loss
    assert differ(*states)


def test_the_sampler_and_the_recomputed_policy_are_one(tmp_path, graded):
    """With one policy, old log-probs from either source give the same run."""
    finals = []
    for source in ("rollout", "recomputed"):
        config = bf16_config(tmp_path / source, loss__old_policy=source)
        train(config)
        finals.append(restore(config, 2)[0])
    check_equal(*finals)


@pytest.fixture
def poisoned(monkeypatch, graded):
    """Steps, from 1, whose advantages are NaN: so are their losses and gradients."""
    steps, gradings = set(), []
    graded.append(gradings.append)
    loss_inputs = grpo_step.LossInputs

    def poison(mask, advantages, *log_probs):
        if len(gradings) in steps:
            advantages = np.full_like(advantages, np.nan)
        return loss_inputs(mask, advantages, *log_probs)

    monkeypatch.setattr(grpo_step, "LossInputs", poison)
    return steps


def test_a_non_finite_update_is_skipped_counted_and_kept(tmp_path, poisoned, caplog):
    poisoned.update({2, 3, 5})
    config = bf16_config(
        tmp_path, grpo__num_steps=5, checkpoint__period=1, checkpoint__keep=10
    )
    assert train(config).finished
    lines = grpo_lines(tmp_path)
    assert [lines[step]["train/finite"] for step in range(1, 6)] == [1, 0, 0, 1, 0]
    skipped = [lines[step]["train/skipped_updates"] for step in range(1, 6)]
    assert skipped == [0, 4, 8, 8, 12]  # of two epochs of two mini-batches
    (first, meta), (second, _), (third, _), (fourth, later) = (
        restore(config, step) for step in (1, 2, 3, 4)
    )
    check_equal(second["params"], first["params"])
    check_equal(third["opt_state"], first["opt_state"])
    assert differ(fourth["params"], third["params"])
    assert (meta["skipped_updates"], later["skipped_updates"]) == (0, 8)
    warnings = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(warnings) == 3
    folder = tmp_path / "non_finite"
    assert warnings[0] == (
        "Step 2 skipped 4 update(s), 1 step(s) in a row: loss nan, gradient norm nan; "
        f"its batch is in {folder / 'step_2.npz'}"
    )
    with np.load(folder / "step_2.npz") as file:
        kept = dict(file)
    rows = kept["tokens"].shape
    assert rows[0] == 16
    for name in ("targets", "positions", "mask", "rollout_log_probs"):
        assert kept[name].shape == rows
    for name in ("advantages", "rewards", "prompts"):
        assert kept[name].shape == rows[:1]
    assert np.isnan(kept["advantages"]).all()
    assert np.isfinite(kept["rollout_log_probs"]).all()
    assert [bytes(row[:4]).decode() for row in kept["tokens"].astype(np.uint8)] == (
        kept["prompts"].tolist()
    )
    assert len(json.loads(kept["metrics"].item())) == 4  # updates


def test_too_many_skipped_updates_stop_the_run_with_its_state_saved(tmp_path, poisoned):
    poisoned.update({2, 3})
    config = bf16_config(
        tmp_path, grpo__num_steps=5, train__max_skipped_updates=2, checkpoint__period=3
    )
    with pytest.raises(FloatingPointError, match=r"The last 2 step.*Step 3 is saved"):
        train(config)
    assert list(grpo_lines(tmp_path)) == [1, 2, 3]
    state, meta = restore(config, 3)
    assert meta["skipped_updates"] == 8
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state["params"]))
    poisoned.clear()
    assert train(config).finished  # with the next batch and a fresh allowance
    assert grpo_lines(tmp_path)[5]["train/skipped_updates"] == 8


def test_non_finite_sampled_log_probs_skip_the_step(tmp_path, graded, monkeypatch):
    generate = ContinuousRolloutEngine.generate

    def poisoned(self, weights, prompts, sampling, key):
        rollouts = generate(self, weights, prompts, sampling, key)
        if key[1] in (1, 3, 4, 5):
            log_probs = rollouts.log_probs.copy()
            log_probs[0, 0] = np.nan
            return dataclasses.replace(rollouts, log_probs=log_probs)
        return rollouts

    monkeypatch.setattr(ContinuousRolloutEngine, "generate", poisoned)
    config = bf16_config(tmp_path, grpo__num_steps=9)
    with pytest.raises(FloatingPointError, match=r"The last 3 step.*Step 6 is saved"):
        train(config)
    lines = grpo_lines(tmp_path)
    skipped = [lines[step]["train/skipped_updates"] for step in range(1, 7)]
    assert skipped == [0, 4, 4, 8, 12, 16]
    assert lines[2]["train/finite"] == 0 and "train/loss" not in lines[2]
    assert restore(config, 6)[0]["step"] == 2 * 4
    with np.load(tmp_path / "non_finite" / "step_4.npz") as file:
        kept = dict(file)
    assert np.isnan(kept["rollout_log_probs"]).sum() == 1
    assert kept["mask"][np.isnan(kept["rollout_log_probs"])].all()
    assert kept["tokens"].shape == kept["mask"].shape
    files = sorted(path.name for path in (tmp_path / "non_finite").iterdir())
    assert files == ["step_4.npz", "step_5.npz", "step_6.npz"]


@pytest.fixture
def full_disk(monkeypatch):
    """Steps whose checkpoint fails in the background, when Orbax completes it."""
    steps = set()
    finalize = atomicity.AtomicRenameTemporaryPath.finalize

    async def fail(self):
        if self.get_final().name in map(str, steps):
            raise OSError(errno.ENOSPC, "No space left on device")
        return await finalize(self)

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", fail)
    return steps


def test_a_failed_save_does_not_end_the_run(tmp_path, graded, full_disk, caplog):
    full_disk.update({1, 3})
    config = bf16_config(tmp_path, grpo__num_steps=4, checkpoint__period=1)
    assert train(config).finished
    assert list(grpo_lines(tmp_path)) == [1, 2, 3, 4]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"2", "4"}
    failures = [r for r in caplog.records if "No space left" in r.getMessage()]
    assert len([r for r in failures if r.name == "fp8rl_jax.checkpoint"]) == 2


def test_a_failed_last_save_is_tried_again_and_then_ends_the_run(
    tmp_path, graded, full_disk, monkeypatch
):
    full_disk.add(2)
    config = bf16_config(tmp_path, checkpoint__period=1)
    saves = []
    save = Checkpointer.save

    def record(self, step, *arguments):
        saves.append(step)
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpointer, "save", record)
    with pytest.raises(CheckpointError, match=r"earlier ones are untouched.*No space"):
        train(config)
    assert saves == [0, 1, 2, 2]
    assert list(grpo_lines(tmp_path)) == [1, 2]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"0", "1"}
    full_disk.clear()
    assert train(config).finished
    assert restore(config, 2)[0]["step"] == 2 * 4


@pytest.mark.parametrize(
    ("period", "num_steps", "saves"), [(1, 4, 3), (0, 9, 2), (5, 5, 2)]
)
def test_a_disk_that_is_too_small_ends_the_run_before_it_compiles(
    tmp_path, graded, monkeypatch, period, num_steps, saves
):
    """Two are kept and one is being written, or fewer if the run saves fewer."""

    def usage(free):
        return lambda _: collections.namedtuple("usage", "free")(free)

    monkeypatch.setattr(experiment.Experiment, "initial_params", None)
    monkeypatch.setattr(shutil, "disk_usage", usage(1_000_000))
    config = bf16_config(tmp_path, checkpoint__period=period, grpo__num_steps=num_steps)
    with pytest.raises(CheckpointError, match=rf"^{saves} more checkpoints .* free"):
        train(config)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_shuffled_rewards_are_the_same_rewards(tmp_path, monkeypatch, graded):
    """The negative control deals each batch's rewards to other samples."""
    dealt = []
    step_metrics = grpo_step.step_metrics

    def record(batch, rollouts, grades, rewards, advantages):
        dealt.append(([g.reward for g in grades], rewards.ravel().tolist()))
        return step_metrics(batch, rollouts, grades, rewards, advantages)

    def distinct(rollouts, examples, tokenizer, pool):
        count = len(examples)
        return [Grade(float(i), False) for i in range(count)], ["?"] * count

    monkeypatch.setattr(grpo_step, "step_metrics", record)
    monkeypatch.setattr(grpo_step, "grade_rollouts", distinct)
    train(bf16_config(tmp_path, grpo__shuffle_rewards=True))
    (graded_first, first), (graded_second, second) = dealt
    assert graded_first == graded_second == sorted(first) == sorted(second)
    assert first != second  # another deal at every step
    assert np.mean(np.array(first) == graded_first) < 0.5


def test_run_dir_is_required():
    with pytest.raises(ValueError, match=r"--config.run_dir=DIR"):
        train(tiny_config(""))


@pytest.mark.slow
def test_a_run_on_eight_devices_resumes_on_one(tmp_path, graded, monkeypatch):
    """Sharded over every axis; the checkpoint fits another mesh."""
    monkeypatch.setattr(experiment, "make_mesh", make_mesh)
    options = {
        "recipe": "fp8",
        "model__custom__num_kv_heads": 2,
        "loss__kl_coefficient": 0.5,
    }
    config = bf16_config(
        tmp_path, mesh__data=2, mesh__fsdp=2, mesh__tensor=2, **options
    )
    assert train(config).finished
    use_one_device(monkeypatch)
    config = bf16_config(tmp_path, grpo__num_steps=3, **options)
    assert train(config).step == 3
    assert list(grpo_lines(tmp_path)) == [1, 2, 3]
