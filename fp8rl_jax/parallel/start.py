"""Start-up of several processes, through plain `jax.distributed`."""

import os
from collections.abc import Mapping

import jax

from fp8rl_jax.parallel.failure import LastWords

# A process that has sent no heartbeat for so long is dead, and the others end.
_HEARTBEAT_TIMEOUT_S = 30


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
    *,
    initialization_timeout: int = 300,
) -> None:
    """Joins the processes of one run; call before any other use of JAX.

    From then on a process that dies ends the others, after 30 s without a heartbeat at
    the latest.

    Args:
      coordinator_address: ``host:port`` of process 0, where nothing detects it.
      num_processes: Number of processes, likewise.
      process_id: This process's index, likewise.
      detect: True asks `jax.distributed` to detect the cluster (needed where the
        environment does not give the size, as on Kubernetes and bare TPU VMs),
        False stays with one process, None looks at the environment.
      initialization_timeout: Seconds to wait for the other processes.

    Raises:
      ValueError: if only some of the three explicit values are given, they cannot be
        right, or no cluster is detected. (If the processes do not meet in time,
        `jax.distributed` aborts this one; stderr ends with what to do.)
    """
    explicit = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in explicit):
        if any(value is None for value in explicit):
            raise ValueError(
                "coordinator_address, num_processes and process_id go together; got "
                f"{explicit}"
            )
        _check_explicit(coordinator_address, num_processes, process_id)
        if num_processes > 1:
            _initialize(initialization_timeout, *explicit)
        return
    if detect is None:
        detect = cluster_size_hint(os.environ) > 1
    if detect:
        _initialize(initialization_timeout)


def _check_explicit(coordinator_address: str, num_processes: int, process_id: int):
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id={process_id} must be at least 0 and below "
            f"num_processes={num_processes}"
        )
    host, _, port = coordinator_address.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(
            f"coordinator_address={coordinator_address!r} must be HOST:PORT, where "
            "process 0 runs"
        )


def _initialize(timeout: int, *explicit) -> None:
    if explicit:
        where = f"the {explicit[1]} processes did not meet at {explicit[0]}"
    else:
        where = "the processes that jax.distributed detects did not meet"
    failure = (
        f"{where} within initialization_timeout={timeout} s: start all of them, where "
        "they can reach process 0"
    )
    words = LastWords(f"error: {failure}.")  # Out of time it aborts the process.
    try:
        jax.distributed.initialize(
            *explicit,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        )
    except ValueError as error:
        raise ValueError(
            f"jax.distributed detects no cluster ({error}): give coordinator_address, "
            "num_processes and process_id"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{failure} ({error})") from error
    finally:
        words.release()


def is_primary() -> bool:
    """Returns whether this process writes the logs and talks to the user."""
    return jax.process_index() == 0
