"""Runs of several processes: the same figures as one process, and common ends."""

import json
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fp8rl_jax.config import base_config
from fp8rl_jax.metrics import read_metrics

TESTS = Path(__file__).parent
CLOCKS = re.compile(
    "time$|timing/|performance/|memory/|rollout/(tokens_per_sec|prefill_share)"
)
# Two epochs, so that the ratio leaves 1, and old log-probs scored by the trainer.
OPTIONS = {
    "recipe": "bf16",
    "loss.old_policy": "recomputed",
    "warm_start.enabled": False,
    "validation.period": 2,
    "checkpoint.period": 2,
    "grpo.num_mini_batches": 1,
}


class Run:
    """A run of the tiny configuration, once or several times in one folder.

    Args:
      folder: holds the run directory and a log per process.
      options: changes to the configuration.
    """

    def __init__(self, folder: Path, **options):
        self.folder = folder
        self._options = options

    def start(self, num_processes: int, devices: int, **options):
        """Starts training processes, each with so many devices."""
        options = self._options | options | {"run_dir": self.folder / "run"}
        program = "import parity_task; parity_task.run()"
        flags = [f"--config.{name}={value}" for name, value in options.items()]
        return self.start_program(program, flags, num_processes, devices)

    def start_program(self, program, flags, num_processes: int, devices: int):
        """Starts processes of a program with the tiny configuration."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            # A program is compiled once for all the runs of a test.
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        }
        processes = []
        for process in range(num_processes):
            arguments = [f"--config={TESTS / 'tiny_config.py'}", *flags]
            if num_processes > 1:
                arguments += [
                    f"--coordinator_address=localhost:{port}",
                    f"--num_processes={num_processes}",
                    f"--process_id={process}",
                ]
            with self._log(process).open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", program, *arguments],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return processes

    def _log(self, process: int) -> Path:
        return self.folder / f"log{process}"

    def log(self, process: int) -> str:
        """What a process has printed."""
        return self._log(process).read_text()

    def finish(self, processes, timeout=240):
        """Waits for success."""
        try:
            for i, process in enumerate(processes):
                assert process.wait(timeout) == 0, self.log(i)
        finally:
            kill(processes)

    def lines(self):
        """The metrics that do not depend on the machine, a dict a step."""
        return [
            {name: value for name, value in line.items() if not CLOCKS.match(name)}
            for line in read_metrics(self.folder / "run" / "metrics.jsonl")
        ]


def kill(processes):
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def make_run(tmp_path):
    def make(name, **options):
        (tmp_path / name).mkdir()
        return Run(tmp_path / name, **options)

    return make


def last_step(run):
    metrics = run.folder / "run" / "metrics.jsonl"
    if not metrics.exists():
        return -1
    lines = metrics.read_text().splitlines(keepends=True)
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("\n") else -1


def test_two_processes_train_as_one_and_end_together(make_run):
    """One is killed: the other ends and says what to do, and one process resumes."""
    run = make_run("two", **OPTIONS)
    processes = run.start(2, 1, **{"grpo.num_steps": 1000})
    try:
        deadline = time.monotonic() + 180
        while last_step(run) < 3:
            assert all(p.poll() is None for p in processes), run.log(0) + run.log(1)
            assert time.monotonic() < deadline, run.log(0)
            time.sleep(0.05)
        processes[1].kill()
        assert processes[0].wait(60) != 0
    finally:
        kill(processes)
    remedy = f"Restart: the run resumes from the last checkpoint in {run.folder}"
    for process in (0, 1):
        error = run.log(process).splitlines()[-1]
        assert error.startswith(f"error: process {process} of 2 failed, or lost")
        assert remedy in error
    assert "grpo 1/1000" in run.log(0) and "grpo" not in run.log(1)

    total = last_step(run) + 1
    run.finish(run.start(1, 2, **{"grpo.num_steps": total}))
    assert re.search(r"Resuming after step [2-9]\d* ", run.log(0)), run.log(0)

    straight = make_run("one", **OPTIONS)
    straight.finish(straight.start(1, 2, **{"grpo.num_steps": total}))
    lines = straight.lines()
    assert [line["step"] for line in lines] == list(range(total + 1))
    assert any(0 < line["train/reward"] < 1 for line in lines[1:])
    assert any(line["train/loss"] != 0 for line in lines[1:])
    assert lines[1]["train/reward_length"] > 0
    assert run.lines() == lines  # exactly


@pytest.mark.slow
def test_four_processes_train_as_one(make_run):
    """FP8, after a warm start, with parameters in shards."""
    options = {
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "grpo.num_steps": 2,
        "warm_start.eval_period": 1,
        "warm_start.stop_accuracy": 0.0,  # after its first step
        "warm_start.max_accuracy": 1.0,
    }
    four, one = make_run("four", **options), make_run("one", **options)
    four.finish(four.start(4, 1), timeout=600)
    one.finish(one.start(1, 4), timeout=600)
    lines = one.lines()
    assert any(line.get("train/probs_ratio_max", 1.0) > 1.0 for line in lines)
    # Sums over four devices are in another order: a loss moves by its last bit.
    for found, expected in zip(four.lines(), lines, strict=True):
        assert found.pop("phase") == expected.pop("phase")
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_two_processes_complete_prompts_as_one(make_run):
    prompts = make_run("prompts").folder / "prompts.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt": "{i}+{i}=", "num_samples": {i}}}\n' for i in (1, 2, 3))
    )
    outputs = []
    for count in (1, 2):
        run = make_run(str(count))
        output = run.folder / "completions.jsonl"
        flags = [f"--input={prompts}", f"--output={output}", "--raw"]
        program = "from fp8rl_jax.generate import run; run()"
        run.finish(run.start_program(program, flags, count, 2 // count))
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 6


def test_cluster_files_are_well_formed():
    folder = TESTS.parent / "docs" / "clusters"
    subprocess.run(["bash", "-n", folder / "slurm.sbatch"], check=True)
    spec = yaml.safe_load((folder / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    flags = container["command"][-1]
    assert job["parallelism"] == job["completions"] == 2
    assert "--num_processes=2 " in flags and "fp8rl-workers-0-0.fp8rl:8476" in flags
    for text in (flags, (folder / "slurm.sbatch").read_text()):
        for name in re.findall(r"--config\.([\w.]+)=", text):
            operator.attrgetter(name)(base_config())
