"""Two real processes of two devices each, joined by `jax.distributed`."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

WORKER = textwrap.dedent(
    """
    import os, signal, sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from fp8rl_jax.checkpoint import Checkpointer, all_finite
    from fp8rl_jax.parallel.mesh import make_mesh
    from fp8rl_jax.parallel.processes import check_same, exchange, fetch, own_share
    from fp8rl_jax.parallel.rules import DEFAULT_RULES
    from fp8rl_jax.parallel.sharding import named_sharding, shard_batch
    from fp8rl_jax.parallel.start import initialize_distributed, is_primary
    from fp8rl_jax.preemption import PreemptionGuard

    port, rank, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    initialize_distributed(f"localhost:{port}", num_processes=2, process_id=rank)
    assert is_primary() == (rank == 0)
    mesh = make_mesh(data=2, fsdp=2)

    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    batch = shard_batch(mesh, DEFAULT_RULES, rows)
    assert batch.shape == (8, 2)
    for shard in batch.addressable_shards:
        assert np.array_equal(shard.data, rows[shard.index])
    assert float(jax.jit(jnp.sum)(batch)) == 120.0
    assert not batch.is_fully_addressable
    assert np.array_equal(fetch({"rows": batch}, mesh)["rows"], rows)

    samples = ["a", "b", "c", "d", "e"]
    share = own_share(samples)
    assert share == (["c", "d", "e"] if rank else ["a", "b"])
    graded = exchange([x * 100 ** rank for x in share])  # of other sizes
    assert graded == [["a", "b"], ["c" * 100, "d" * 100, "e" * 100]]
    check_same({"seed": 1, "step": None}, "unused")
    try:
        check_same({"seed": 1, "step": rank or None}, "share a file system")
    except ValueError as error:
        expected = "step is None on process 0 and 1 on process 1: share a file system."
        assert str(error) == expected, error
    else:
        raise AssertionError("not noticed")

    sharding = named_sharding(mesh, DEFAULT_RULES, ("mlp", "embed"))
    make = jax.jit(
        lambda: jnp.arange(32, dtype=jnp.float32).reshape(4, 8), out_shardings=sharding
    )
    state = {"kernel": make()}
    abstract = {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)}
    with Checkpointer(directory, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, {"position": 5})
        restored, meta = checkpointer.restore(abstract)
        assert checkpointer.all_steps() == [2] and meta == {"position": 5}
    same = jax.jit(lambda x, y: (x == y).all())(restored["kernel"], state["kernel"])
    assert bool(same) and bool(all_finite(restored))

    with PreemptionGuard() as guard:
        assert not guard.should_stop()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert guard.should_stop()  # both stop after the same step
    jax.distributed.shutdown()
    print("done", rank)
    """
)


def test_start_batches_checkpoint_and_preemption(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    env = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, port, str(rank), str(tmp_path / "run")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0 and f"done {rank}" in output, output
