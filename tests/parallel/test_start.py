import os
import socket
import subprocess
import sys

import pytest

from fp8rl_jax.parallel.start import (
    cluster_size_hint,
    initialize_distributed,
    is_primary,
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, 1),  # batch script, no srun
        ({"SLURM_STEP_NUM_TASKS": "16"}, 16),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "MEGASCALE_NUM_SLICES": "2"}, 8),
    ],
)
def test_cluster_size_hint(environ, expected):
    assert cluster_size_hint(environ) == expected


def test_one_process_starts_nothing():
    initialize_distributed(detect=False)
    initialize_distributed("localhost:1234", num_processes=1, process_id=0)
    assert is_primary()


def test_partial_flags_are_refused():
    with pytest.raises(ValueError, match="go together"):
        initialize_distributed(coordinator_address="host:1234")


@pytest.mark.parametrize(
    ("address", "process_id", "message"),
    [
        ("host:1234", 2, "process_id=2 must be at least 0 and below num_processes=2"),
        ("host:1234", -1, "process_id=-1 must be"),
        ("host", 0, "coordinator_address='host' must be HOST:PORT"),
        (":1234", 0, "must be HOST:PORT"),
        ("host:port", 0, "must be HOST:PORT"),
    ],
)
def test_wrong_flags_are_refused(address, process_id, message):
    with pytest.raises(ValueError, match=message):
        initialize_distributed(address, num_processes=2, process_id=process_id)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_processes_that_do_not_meet_say_where():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    program = (
        "import sys; from fp8rl_jax.parallel.start import initialize_distributed as f;"
        "f(sys.argv[1], 2, 1, initialization_timeout=1)"
    )
    done = run(program, address)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(
        f"error: the 2 processes did not meet at {address} within "
        "initialization_timeout=1 s: start all of them"
    )


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.abort()", ["do this"]),
        ("os.kill(os.getpid(), 9)", ["do this"]),
        ("raise SystemExit('wrong')", ["wrong", "do this"]),
        ("words.release()", []),
    ],
)
def test_last_words(end, words):
    """They come after all else, however the process ends."""
    program = (
        "import os; from fp8rl_jax.parallel.failure import LastWords;"
        f"words = LastWords('do this'); {end}"
    )
    assert run(program).stderr.splitlines()[-2:] == words
