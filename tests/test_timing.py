import jax
import pytest

from fp8rl_jax.timing import Timer, memory_metrics, phase_memory


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_accumulate_nest_and_start_afresh():
    clock = Clock()
    timer = Timer(clock=clock)
    with timer.phase("total_step_time"):
        for seconds in (1.0, 2.5):
            with timer.phase("generation"):
                clock.now += seconds
        clock.now += 0.5
    assert timer.collect() == {
        "timing/train/generation": 3.5,
        "timing/train/total_step_time": 4.0,
    }
    assert timer.collect() == {}


def test_a_phase_that_raises_is_counted():
    clock = Clock()
    timer = Timer(prefix="timing/validation/", clock=clock)
    with pytest.raises(RuntimeError), timer.phase("reward_calculation"):
        clock.now += 3.0
        raise RuntimeError
    with timer.phase("reward_calculation"):
        clock.now += 1.0
    assert timer.collect() == {"timing/validation/reward_calculation": 4.0}


class Device:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_host_memory_where_devices_do_not_count(monkeypatch):
    (item,) = memory_metrics().items()
    assert item[0] == "memory/host_peak_bytes"
    assert 50e6 < item[1] < 1e12  # an interpreter with JAX, in bytes


def test_device_memory_is_the_largest(monkeypatch):
    devices = [Device({"peak_bytes_in_use": n}) for n in (3, 9, 5)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory_metrics() == {"memory/device_peak_bytes": 9}


def test_a_phase_reports_what_is_in_use_and_the_peak_so_far(monkeypatch):
    assert phase_memory("generation") == {}  # a CPU does not count
    devices = [
        Device({"bytes_in_use": n, "peak_bytes_in_use": 20 - n}) for n in (3, 9, 5)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert phase_memory("generation") == {
        "memory/generation_bytes_in_use": 9,
        "memory/generation_peak_bytes": 17,
    }
