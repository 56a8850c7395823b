"""SIGKILL at random points: the run ends where an uninterrupted one does, bit for bit.

A run is killed while it imports, compiles, restores, trains, writes metrics and saves,
each time resumed by the same command.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from orbax.checkpoint.utils import TMP_DIR_SUFFIX
from test_loop import (
    bf16_config,
    check_equal,
    command,
    grpo_lines,
    restore,
    without_clocks,
)

from fp8rl_jax.metrics import read_metrics

# The entry point, with rewards that random weights earn: an even first token.
PROGRAM = """
from fp8rl_jax import grpo_step, train
from fp8rl_jax.tasks.base import Grade

def grade(rollouts, examples, tokenizer, pool):
    even = [bool(row[0] % 2 == 0) for row in rollouts.tokens]
    return [Grade(float(x), x) for x in even], ["?"] * len(even)

grpo_step.grade_rollouts = grade
train.run()
"""


class Life:
    """One process of a run, from its start to its end or its SIGKILL."""

    def __init__(self, config, options, log: Path):
        self.run_dir = Path(config.run_dir)
        self._log = log
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        arguments = command(config, **options)
        arguments[1:3] = ["-c", PROGRAM]  # in place of -m fp8rl_jax.train
        with log.open("w") as file:
            self._process = subprocess.Popen(
                arguments,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self) -> None:
        assert self._process.wait(timeout=300) == 0, self._log.read_text()[-5000:]

    def wait_until(self, condition) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self._process.poll() is None, self._log.read_text()[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def kill(self) -> None:
        assert self._process.poll() is None, "ended before it was killed"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def num_steps(self) -> int:
        return self._log.read_text().count("\ngrpo ")

    def saving(self) -> set[Path]:
        return set((self.run_dir / "checkpoints").glob(f"*{TMP_DIR_SUFFIX}*"))


def kill_somewhere(life: Life, moment: str, rng: random.Random) -> None:
    """Lets a process live for a while, counted from some event, and kills it."""
    if moment == "start":
        time.sleep(rng.uniform(0.0, 5.0))  # imports, compilation, the first steps
    elif moment == "step":
        steps = rng.randint(1, 3)
        life.wait_until(lambda: life.num_steps() >= steps)
        time.sleep(rng.uniform(0.0, 0.1))
    else:
        old = life.saving()  # what the last kill left
        life.wait_until(lambda: life.saving() - old)
        time.sleep(rng.uniform(0.0, 0.03))
    life.kill()


def run_with_kills(tmp_path: Path, moments: list[str], seed: int) -> None:
    rng = random.Random(seed)
    options = {
        "recipe": "bf16",
        "warm_start__enabled": False,
        "validation__period": 0,
        "checkpoint__period": 1,
        "grpo__num_epochs": 1,
        "logging__samples_period": 0,
        # More than the processes to be killed can take.
        "grpo__num_steps": 4 * len(moments) + 12 * moments.count("start"),
        "compilation_cache": str(tmp_path / "programs"),
    }
    straight, killed = (
        bf16_config(tmp_path / name, **options) for name in ("straight", "killed")
    )
    Life(straight, options, tmp_path / "straight.log").wait()
    assert any((tmp_path / "programs").iterdir())  # so that the others start fast
    for number, moment in enumerate(moments):
        life = Life(killed, options, tmp_path / f"life_{number}.log")
        kill_somewhere(life, moment, rng)
    Life(killed, options, tmp_path / "last_life.log").wait()

    last = options["grpo__num_steps"]
    assert list(grpo_lines(killed.run_dir)) == list(range(1, last + 1))
    lines, expected = (
        [without_clocks(line) for line in read_metrics(f"{c.run_dir}/metrics.jsonl")]
        for c in (killed, straight)
    )
    assert lines == expected
    assert len({line["train/reward"] for line in lines}) > 3  # it is no empty run
    (state, meta), (straight_state, straight_meta) = (
        restore(config, last) for config in (killed, straight)
    )
    check_equal(state, straight_state)
    for name in ("prompts", "accuracy", "skipped_updates"):
        assert meta[name] == straight_meta[name]
    assert {path.name for path in Path(killed.run_dir, "checkpoints").iterdir()} == {
        str(last - 1),
        str(last),
    }


def test_three_kills(tmp_path):
    run_with_kills(tmp_path, ["start", "step", "save"], seed=0)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    moments = ["start", "step", "save", "save"] * 5
    random.Random(1).shuffle(moments)
    run_with_kills(tmp_path, moments, seed=1)
