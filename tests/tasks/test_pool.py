import importlib
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from fp8rl_jax.tasks.arithmetic import ArithmeticTask
from fp8rl_jax.tasks.base import Grade
from fp8rl_jax.tasks.pool import GradingPool


@pytest.fixture
def misbehaving(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent)
    return importlib.import_module("misbehaving")


def samples(module, *texts):
    return [(module.EXAMPLE, text, [1, i]) for i, text in enumerate(texts)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_order_and_speed():
    task = ArithmeticTask()
    sources = [task.train_source[i % 150] for i in range(512)]
    work = [(e, e.answer if i % 3 else "", [1]) for i, e in enumerate(sources)]
    with GradingPool(task, num_workers=2, timeout_s=60.0) as pool:
        grades = pool.grade(work)
        start = time.perf_counter()
        assert pool.grade(work) == grades
        # About 0.05 s; the bound allows for a busy machine.
        assert time.perf_counter() - start < 2.0
        assert pool.grade([]) == []
        assert pool.num_failures == 0
    assert [g.reward for g in grades] == [float(i % 3 > 0) for i in range(512)]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("raise", "RuntimeError: xxx"),
        ("sys.exit", "SystemExit: 3"),
        ("os._exit", "ended its process"),
        ("hang", "longer than 1 s"),
        ("hang in a child", "longer than 1 s"),
        ("many components", "components"),
        ("allocate", "MemoryError"),
        ("recurse", "RecursionError"),
        ("nan", "not finite"),
        ("tuple", "not a Grade"),
        ("say failure", "no verdict"),
        ("not a float", "ValueError"),
    ],
)
def test_failure_costs_one_sample(misbehaving, text, failure):
    with GradingPool(misbehaving.MisbehavingTask(), 1, timeout_s=1.0) as pool:
        grades = pool.grade(samples(misbehaving, "1", "2", text, "3", text, "4"))
        assert [g.reward for g in grades] == [1, 2, 0, 3, 0, 4]
        for i, grade in enumerate(grades):
            if i in (2, 4):
                assert failure in grade.failure
                assert len(grade.failure) <= 500
                assert not grade.correct
            else:
                assert grade == Grade(float(grade.reward), True, {"ids": 1.0 + i})
        assert pool.num_failures == 2
        assert pool.grade(samples(misbehaving, "5"))[0].reward == 5.0


def test_failures_in_many_chunks(misbehaving):
    texts = ["os._exit" if i % 20 == 7 else str(i) for i in range(100)]
    with GradingPool(misbehaving.MisbehavingTask(), 3, timeout_s=30.0) as pool:
        grades = pool.grade(samples(misbehaving, *texts))
    expected = [0 if i % 20 == 7 else i for i in range(100)]
    assert [g.reward for g in grades] == expected
    assert pool.num_failures == 5


def test_a_worker_killed_from_outside_costs_the_sample_it_was_at(misbehaving):
    """As the kernel does when memory runs out. Starting or idle it was at none."""
    with GradingPool(misbehaving.MisbehavingTask(), 1, timeout_s=60.0) as pool:

        def kill():
            pool._workers[0].process.kill()

        for _ in range(2):
            kill()
            pool._workers[0].process.wait()
            assert [g.reward for g in pool.grade(samples(misbehaving, *"12"))] == [1, 2]
        killer = threading.Timer(0.5, kill)
        killer.start()
        grades = pool.grade(samples(misbehaving, "1", "hang", *"345"))
    assert [g.reward for g in grades] == [1, 0, 3, 4, 5]
    assert "ended its process" in grades[1].failure
    assert pool.num_failures == 1


def test_workers_that_never_start_are_an_error(misbehaving, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        GradingPool(misbehaving.MisbehavingTask(), 1, timeout_s=60.0) as pool,
        pytest.raises(RuntimeError, match="do not start"),
    ):
        pool.grade(samples(misbehaving, "1"))


def test_timeout_is_per_sample(misbehaving):
    with GradingPool(misbehaving.MisbehavingTask(), 1, timeout_s=1.4) as pool:
        grades = pool.grade(samples(misbehaving, *["slow"] * 4))
    # 2 s together; each then fails to be a number.
    assert all("could not convert" in g.failure for g in grades)


def test_worker_is_light_and_its_output_is_dropped(misbehaving, capfd):
    with GradingPool(misbehaving.MisbehavingTask(), 1, timeout_s=30.0) as pool:
        modules, printed = pool.grade(samples(misbehaving, "modules", "print"))
    assert modules.components == {}
    assert printed.reward == 1.0
    assert capfd.readouterr().out == ""


def test_interrupted_call_leaves_the_pool_usable(misbehaving):
    broken = [(misbehaving.EXAMPLE, lambda: None, [])]  # Cannot be pickled.
    with GradingPool(misbehaving.MisbehavingTask(), 2, timeout_s=30.0) as pool:
        with pytest.raises(Exception, match=r"pickle|local object"):
            pool.grade(samples(misbehaving, "7", "8") + broken)
        grades = pool.grade(samples(misbehaving, "1", "2", "3"))
        assert [g.reward for g in grades] == [1, 2, 3]


def test_close_ends_the_workers(misbehaving):
    pool = GradingPool(misbehaving.MisbehavingTask(), 2, timeout_s=30.0)
    pids = [w.process.pid for w in pool._workers]
    assert all(map(alive, pids))
    pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade([])


def test_grader_that_cannot_be_loaded(misbehaving):
    with (
        GradingPool(misbehaving.UnloadableTask(), 1, timeout_s=30.0) as pool,
        pytest.raises(RuntimeError, match=r"cannot load the grader[\s\S]*invalid lit"),
    ):
        pool.grade(samples(misbehaving, "1"))


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (1, 0.0)])
def test_bad_arguments(workers, timeout):
    with pytest.raises(ValueError, match="num_workers must be >= 1"):
        GradingPool(ArithmeticTask(), workers, timeout)


PROGRAM = """
print("the main program runs", flush=True)
import sys
from fp8rl_jax.tasks.arithmetic import ArithmeticTask
from fp8rl_jax.tasks.pool import GradingPool

class InlineTask(ArithmeticTask):
    @staticmethod
    def grade(example, completion, token_ids):
        raise NotImplementedError

task = ArithmeticTask()
example = task.train_source[0]
with GradingPool(task, 2, 60.0) as pool:
    print([g.reward for g in pool.grade([(example, example.answer, [])] * 3)])
try:
    GradingPool(InlineTask(), 1, 1.0)
except ValueError as e:
    print(e)
"""


def test_main_program_is_not_run_again(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "program"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, second, third = run.stdout.splitlines()
    assert first == "the main program runs"
    assert second == "[1.0, 1.0, 1.0]"
    assert "move the task into a module" in third


ORPHANING_PROGRAM = """
import os, threading, time
from fp8rl_jax.tasks.pool import GradingPool
from misbehaving import EXAMPLE, MisbehavingTask

pool = GradingPool(MisbehavingTask(), 1, 600.0)
pool.grade([(EXAMPLE, "1", [])])
work = [(EXAMPLE, "hang", [])]
threading.Thread(target=pool.grade, args=(work,), daemon=True).start()
time.sleep(0.3)
print(pool._workers[0].process.pid, flush=True)
os._exit(0)
"""


def test_hanging_worker_ends_with_its_parent():
    here = pathlib.Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", ORPHANING_PROGRAM],
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    deadline = time.monotonic() + 30.0
    while alive(int(run.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(run.stdout))
