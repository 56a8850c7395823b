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
