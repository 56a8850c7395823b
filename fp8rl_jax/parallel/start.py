"""Start-up of several processes, through plain `jax.distributed`."""

import os
from collections.abc import Mapping

import jax


def cluster_size_hint(environ: Mapping[str, str]) -> int:
    """Returns how many processes the launcher started, as its variables say.

    Understands what `jax.distributed` detects by itself and announces its size:
    SLURM steps, Open MPI and TPU pods. Without any of them the answer is 1.

    Args:
      environ: The environment, usually ``os.environ``.
    """
    counts = [
        int(environ.get(name, "1"))
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    ]
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")
    slices = int(environ.get("MEGASCALE_NUM_SLICES", "1"))
    return max(*counts, len(hosts) * slices)


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    detect: bool | None = None,
) -> None:
    """Joins the processes of one run; call before any other use of JAX.

    Args:
      coordinator_address: ``host:port`` of process 0, where nothing detects it.
      num_processes: Number of processes, likewise.
      process_id: This process's index, likewise.
      detect: True asks `jax.distributed` to detect the cluster (needed where the
        environment does not give the size, as on Kubernetes and bare TPU VMs),
        False stays with one process, None looks at the environment.

    Raises:
      ValueError: if only some of the three explicit values are given.
    """
    explicit = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in explicit):
        if any(value is None for value in explicit):
            raise ValueError(
                "coordinator_address, num_processes and process_id go together; got "
                f"{explicit}"
            )
        if num_processes > 1:
            jax.distributed.initialize(*explicit)
        return
    if detect is None:
        detect = cluster_size_hint(os.environ) > 1
    if detect:
        jax.distributed.initialize()


def is_primary() -> bool:
    """Returns whether this process writes the logs and talks to the user."""
    return jax.process_index() == 0
