import errno
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from fp8rl_jax.metrics import (
    JsonlSink,
    MetricWriter,
    TensorBoardSink,
    open_metrics,
    read_metrics,
)


def write_steps(run_dir, steps, phase="grpo", resume_step=None, value=0.0):
    with open_metrics(run_dir, phase, ("jsonl",), resume_step) as writer:
        for step in steps:
            writer.write(step, {"train/reward": value + step})


def steps_in(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(line["phase"], line["step"]) for line in map(json.loads, lines)]


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_one_strict_json_line_per_step(tmp_path):
    with open_metrics(tmp_path, "grpo", ("jsonl",)) as writer:
        writer.write(
            1,
            {
                "loss": math.nan,
                "grad_norm": jnp.float32(jnp.inf),
                "train/reward": np.float64(-np.inf),
                "lr": jnp.asarray(0.5, jnp.bfloat16),
                "total_num_tokens": np.int32(7),
                "skipped": True,
            },
        )
        writer.write(2, {"loss": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first = strict(lines[0])
    assert 1.6e9 < first.pop("time") < 1e10
    assert first == {
        "phase": "grpo",
        "step": 1,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "train/reward": "-Infinity",
        "lr": 0.5,
        "total_num_tokens": 7,
        "skipped": 1,
    }
    assert strict(lines[1])["loss"] == 0.25 and len(lines) == 2
    back = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back[0]["loss"])
    assert (back[0]["grad_norm"], back[0]["train/reward"]) == (math.inf, -math.inf)


def test_resume_writes_no_step_twice(tmp_path):
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 9), resume_step=4, value=100.0)
    assert steps_in(tmp_path) == [("grpo", step) for step in range(1, 9)]
    rewards = [x["train/reward"] for x in read_metrics(tmp_path / "metrics.jsonl")]
    assert rewards == [1, 2, 3, 4, 105, 106, 107, 108]


def test_resume_keeps_earlier_phases_and_drops_later_ones(tmp_path):
    write_steps(tmp_path, (5, 10), phase="warm_start")
    write_steps(tmp_path, (0, 1, 2))
    write_steps(tmp_path, (2,), resume_step=1)
    warm = [("warm_start", 5), ("warm_start", 10)]
    assert steps_in(tmp_path) == [*warm, ("grpo", 0), ("grpo", 1), ("grpo", 2)]
    write_steps(tmp_path, (0,))  # GRPO afresh
    assert steps_in(tmp_path) == [*warm, ("grpo", 0)]
    write_steps(tmp_path, (), phase="warm_start", resume_step=10)
    assert steps_in(tmp_path) == warm
    write_steps(tmp_path, (6,), phase="warm_start", resume_step=5)
    assert steps_in(tmp_path) == [("warm_start", 5), ("warm_start", 6)]


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    write_steps(tmp_path, (1, 2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [line["step"] for line in read_metrics(path)] == [1]
    write_steps(tmp_path, (2, 3), resume_step=1)
    assert [step for _, step in steps_in(tmp_path)] == [1, 2, 3]


def test_a_damaged_line_is_named(tmp_path):
    write_steps(tmp_path, (1, 2, 3))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_metrics(path)
    with pytest.raises(ValueError, match="line 2: not JSON"):
        write_steps(tmp_path, (4,), resume_step=3)


def test_lines_reach_the_file_at_once(tmp_path):
    writer = open_metrics(tmp_path, "grpo", ("jsonl",))
    writer.write(1, {"loss": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    writer.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a//b", 1.0, "metric name 'a//b'"),
        ("/a", 1.0, "metric name"),
        ("a b", 1.0, "metric name"),
        ("step", 1.0, "none of"),
        ("a", {"b": 1.0}, "not one number"),
        ("a", np.ones(2), "not one number"),
        ("a", "1.5", "not one number"),
        ("a", None, "not one number"),
    ],
)
def test_bad_metrics(name, value, message):
    with pytest.raises(ValueError, match=message):
        MetricWriter(()).write(1, {name: value})


def test_number_of_names_is_bounded():
    writer = MetricWriter((), max_names=3)
    writer.write(1, {"a": 1, "b": 1})
    writer.write(2, {"b": 1, "c": 1})
    with pytest.raises(ValueError, match="more than 3 metric names with 'd'"):
        writer.write(3, {"c": 1, "d": 1})


def test_steps_only_go_up():
    writer = MetricWriter(())
    writer.write(3, {})
    with pytest.raises(ValueError, match="step 3 after those of step 3"):
        writer.write(3, {})


def test_unknown_sink(tmp_path):
    with pytest.raises(ValueError, match="wandb"):
        open_metrics(tmp_path, "grpo", ("wandb",))


def read_events(directory):
    """Reads TFRecords: length u64, crc u32, data, crc u32."""
    (path,) = directory.glob("events*")
    data, scalars = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return scalars


def test_tensorboard_has_the_same_scalars(tmp_path):
    with open_metrics(tmp_path, "grpo", ("jsonl", "tensorboard")) as writer:
        writer.write(1, {"train/reward": 0.5, "timing/train/generation": 2})
        writer.write(2, {"train/reward": 0.75})
    assert read_events(tmp_path / "tensorboard" / "grpo") == [
        (1, "train/reward", 0.5),
        (1, "timing/train/generation", 2.0),
        (2, "train/reward", 0.75),
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


class FullDisk:
    """A raw file of which the disk takes some bytes at a time, or none."""

    def __init__(self, file):
        self._file = file
        self.name = file.name
        self.room = 0

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[: self.room])

    def close(self):
        self._file.close()


def test_lines_wait_for_a_full_disk(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "metrics.jsonl", "grpo")
    sink._file = disk = FullDisk(sink._file)
    sink.write(1, {"loss": 1.0})
    sink.write(2, {"loss": 2.0})
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
    assert "No space left" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    disk.room = 7
    sink.write(3, {"loss": 3.0})
    sink.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["loss"]) for x in lines] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_does_not_block(tmp_path, caplog):
    sink = TensorBoardSink(tmp_path, "grpo")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sink._thread._record_writer.write_event = fail
    for step in range(3):
        sink.write(step, {f"m{i}": 0.0 for i in range(30)})
    sink._thread.join(timeout=60)
    sink.write(3, {"loss": 1.0})
    sink.write(4, {"loss": 1.0})
    sink.close()
    assert len(caplog.records) == 1 and "disk full" in caplog.text
