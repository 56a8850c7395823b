import asyncio
import collections
import dataclasses
import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.path import atomicity

from fp8rl_jax import checkpoint
from fp8rl_jax.checkpoint import (
    Checkpointer,
    CheckpointError,
    all_finite,
)
from fp8rl_jax.parallel.mesh import make_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A training state with every kind of leaf a run has."""

    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(seed=0, sharding=None):
    noise = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
    params = {
        "kernel": jax.device_put(noise, sharding),
        "half": jnp.asarray(noise, jnp.bfloat16),
        "codes": jnp.asarray(noise, jnp.float8_e4m3fn),
    }
    opt_state = optax.adamw(1e-3, mu_dtype=jnp.bfloat16).init(params)
    return State(jnp.int32(seed), params, opt_state, jax.random.key(seed))


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding if sharding is None else sharding
        ),
        state,
    )


def leaf_bytes(tree):
    def one(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [one(x) for x in jax.tree.leaves(tree)]


def test_bit_exact_and_same_types(tmp_path):
    state = make_state()
    special = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    state.params["special"] = jnp.asarray(special)
    meta = {"data": {"position": [3, 17]}, "config": {"lr": 1e-6}, "seed": 2**63}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, meta)
        restored, restored_meta = checkpointer.restore(abstract(state))
    assert restored_meta == meta
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(restored)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]
    assert leaf_bytes(restored) == leaf_bytes(state)
    np.testing.assert_array_equal(
        jax.random.bits(restored.key, (4,)), jax.random.bits(state.key, (4,))
    )


def test_onto_another_mesh(tmp_path):
    wide = NamedSharding(make_mesh(fsdp=8, data=1), P("fsdp", None))
    state = {"kernel": make_state(sharding=wide).params["kernel"]}
    narrow = NamedSharding(
        make_mesh(tensor=2, devices=jax.devices()[:4]), P("tensor", "data")
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
    with Checkpointer(tmp_path) as checkpointer:
        restored, _ = checkpointer.restore(abstract(state, narrow))
    assert restored["kernel"].sharding == narrow
    assert restored["kernel"].addressable_shards[0].data.shape == (8, 4)
    assert leaf_bytes(restored) == leaf_bytes(state)


def test_donating_the_state_after_save_does_not_reach_the_checkpoint(tmp_path):
    state = {"kernel": jnp.full((512, 512), 2.0, jnp.float32)}
    train = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        shape = abstract(state)
        checkpointer.save(1, state, {})
        jax.block_until_ready(train(state))
        restored, _ = checkpointer.restore(shape)
    np.testing.assert_array_equal(np.asarray(restored["kernel"]), 2.0)


def save_all(directory, accuracies, **options):
    with Checkpointer(directory, **options) as checkpointer:
        for step, accuracy in enumerate(accuracies, start=1):
            metrics = {} if accuracy is None else {"accuracy": accuracy}
            checkpointer.save(step, {"x": jnp.float32(step)}, {}, metrics)
        checkpointer.wait()
        return checkpointer.all_steps(), checkpointer.best_step()


@pytest.mark.parametrize(
    ("accuracies", "mode", "steps", "best"),
    [
        ([0.1, 0.9, 0.3, 0.2, 0.5], "max", [2, 4, 5], 2),
        ([0.1, 0.9, 0.3, 0.2, 0.5], "min", [1, 4, 5], 1),
        ([0.9, 0.9, 0.1, 0.1], "max", [2, 3, 4], 2),  # ties: the newest
        ([0.1, 0.1, 0.9, 0.9], "min", [2, 3, 4], 2),
        ([0.5, 0.2, None, None], "max", [1, 3, 4], 1),  # latest without metric
        ([0.5, 0.2, 0.2, float("nan")], "max", [1, 3, 4], 1),
        ([None, None, None], "max", [2, 3], None),
    ],
)
def test_what_is_kept(tmp_path, accuracies, mode, steps, best):
    options = {"keep": 2, "best_metric": "accuracy", "best_mode": mode}
    assert save_all(tmp_path, accuracies, **options) == (steps, best)
    with Checkpointer(tmp_path, **options) as reopened:
        assert (reopened.all_steps(), reopened.best_step()) == (steps, best)
        assert reopened.latest_step() == len(accuracies)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == steps


def test_no_ranking_without_a_metric(tmp_path):
    assert save_all(tmp_path, [0.9, 0.1, 0.1], keep=2) == ([2, 3], None)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_a_half_written_checkpoint_is_not_seen(tmp_path, caplog):
    save_all(tmp_path, [0.1])
    partial = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", partial)
    (partial / "_CHECKPOINT_METADATA").unlink()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [1]
        assert "2.orbax-checkpoint-tmp is an unfinished save" in caplog.text
        restored, _ = checkpointer.restore(abstract({"x": jnp.float32(0)}))
        assert float(restored["x"]) == 1.0
        checkpointer.save(2, {"x": jnp.float32(5)}, {})
        restored, _ = checkpointer.restore(abstract({"x": jnp.float32(0)}))
        assert float(restored["x"]) == 5.0


def test_reading_beside_a_run_that_is_saving(tmp_path):
    save_all(tmp_path, [0.1])
    partial = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", partial)
    with Checkpointer(tmp_path, read_only=True) as reader:
        restored, _ = reader.restore(abstract({"x": jnp.float32(0)}))
        assert float(restored["x"]) == 1.0
        with pytest.raises(CheckpointError, match="reading only"):
            reader.save(2, {"x": jnp.float32(0)}, {})
    assert partial.exists()  # the other run is still writing it
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        Checkpointer(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_killed_while_saving(tmp_path):
    """SIGKILL at the moment of the rename leaves the previous checkpoint in force."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        import jax.numpy as jnp
        from orbax.checkpoint._src.path import atomicity
        from fp8rl_jax.checkpoint import Checkpointer

        checkpointer = Checkpointer(sys.argv[1])
        checkpointer.save(1, {"x": jnp.float32(1)}, {"data": 1})
        checkpointer.wait()

        async def die(self):
            if self.get_final().name == "2":
                os.kill(os.getpid(), signal.SIGKILL)
            return await finalize(self)

        finalize = atomicity.AtomicRenameTemporaryPath.finalize
        atomicity.AtomicRenameTemporaryPath.finalize = die
        checkpointer.save(2, {"x": jnp.float32(2)}, {"data": 2})
        checkpointer.wait()
        """
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    assert run.returncode == -9
    assert any(p.name.startswith("2.") for p in tmp_path.iterdir())
    with Checkpointer(tmp_path) as checkpointer:
        restored, meta = checkpointer.restore(abstract({"x": jnp.float32(0)}))
    assert (float(restored["x"]), meta) == (1.0, {"data": 1})


def damaging_files(step_directory):
    """Files without which the arrays or the meta cannot be read back."""
    return [
        max(step_directory.rglob("d/*"), key=lambda p: p.stat().st_size),
        step_directory / "meta" / "metadata",
        step_directory / "state" / "manifest.ocdbt",
        step_directory / "state" / "array_metadatas" / "process_0",
    ]


# Orbax's readers of the other arrays are dropped when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_damaged_checkpoint_is_an_error_and_not_a_fresh_start(
    tmp_path, index, damage
):
    state = make_state()
    state.params["large"] = jnp.arange(50_000, dtype=jnp.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, {})
        checkpointer.save(4, state, {})
    victim = damaging_files(tmp_path / "4")[index]
    if damage == "delete":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"4 is damaged.*\[3\]"):
            checkpointer.restore(abstract(state))
        restored, _ = checkpointer.restore(abstract(state), step=3)
    assert leaf_bytes(restored) == leaf_bytes(state)


def test_nothing_to_restore(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            checkpointer.restore({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": jnp.zeros((16, 4), jnp.float32)}, r"float32\[16,8\], not .*16,4"),
        ({"kernel": jnp.zeros((16, 8), jnp.bfloat16)}, r"float32.*, not bfloat16"),
        ({"extra": jnp.zeros((2,), jnp.float32)}, r"params/extra is absent"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, change, message):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        other = dataclasses.replace(state, params={**state.params, **change})
        with pytest.raises(CheckpointError, match=message):
            checkpointer.restore(abstract(other))
        fewer = {k: v for k, v in state.params.items() if k != "half"}
        with pytest.raises(CheckpointError, match="params/half is bfloat16"):
            checkpointer.restore(abstract(dataclasses.replace(state, params=fewer)))


def test_steps_only_go_up_and_meta_is_json(tmp_path):
    state = {"x": jnp.float32(0)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state, {})
        with pytest.raises(CheckpointError, match="5 is not newer than 5"):
            checkpointer.save(5, state, {})
        with pytest.raises(CheckpointError, match="not JSON"):
            checkpointer.save(6, state, {"position": np.arange(3)})


def test_a_full_disk_is_reported_and_spares_the_earlier_checkpoint(tmp_path):
    small, large = (
        {"x": jnp.zeros(4, jnp.float32)},
        {"x": jax.random.normal(jax.random.key(0), (1 << 20,), jnp.float32)},
    )
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small, {})
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="disk full"):
            checkpointer.save(2, large, {})
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Checkpointer(tmp_path) as reopened:
        assert reopened.all_steps() == [1]
        restored, _ = reopened.restore(abstract(small))
    assert leaf_bytes(restored) == leaf_bytes(small)


@pytest.fixture
def storage(monkeypatch):
    """Storage to break: what to do, in Orbax's thread, to complete a step's folder."""
    hooks = {}
    finalize = atomicity.AtomicRenameTemporaryPath.finalize

    async def hooked(self):
        if hook := hooks.get(self.get_final().name):
            await hook()
        return await finalize(self)

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", hooked)
    return hooks


async def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_failed_save_the_next_one_is_as_if_it_had_not_been(
    tmp_path, storage, caplog
):
    """What was to be replaced still counts, and nothing of the failed save stays."""
    storage["3"] = storage["5"] = disk_full
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": jnp.float32(step)}, {})
        with pytest.raises(CheckpointError, match=r"disk full.*No space left"):
            checkpointer.wait()
        assert checkpointer.all_steps() == [2]
        assert [p.name for p in tmp_path.iterdir()] == ["2"]
        checkpointer.save(4, {"x": jnp.float32(4)}, {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [4]
        caplog.clear()
        checkpointer.save(5, {"x": jnp.float32(5)}, {})
        checkpointer.save(6, {"x": jnp.float32(6)}, {})  # takes the place of 5
        assert "could not write a checkpoint" in caplog.text
        restored, _ = checkpointer.restore(abstract({"x": jnp.float32(0)}))
        assert float(restored["x"]) == 6.0
    assert [p.name for p in tmp_path.iterdir()] == ["6"]


def test_the_error_that_ends_the_context_is_not_hidden(tmp_path, storage, caplog):
    storage["1"] = disk_full
    with pytest.raises(KeyError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.float32(1)}, {})
        raise KeyError
    assert "could not write a checkpoint" in caplog.text
    with pytest.raises(CheckpointError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.float32(1)}, {})


def test_waiting_for_slow_storage_is_said(tmp_path, storage, caplog, monkeypatch):
    async def slow():
        await asyncio.sleep(0.5)

    monkeypatch.setattr(checkpoint, "_SLOW_SAVE_S", 0.2)
    storage["1"] = slow
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.float32(1)}, {})
        checkpointer.save(2, {"x": jnp.float32(2)}, {})
    assert "saving step 2 waited" in caplog.text
    assert "saving step 1 waited" not in caplog.text


@pytest.mark.parametrize(
    ("saved", "num_saves", "count"),
    [(0, 1, 1), (0, 3, 3), (0, 9, 4), (1, 9, 3), (3, 9, 1), (3, 0, 0)],
)
def test_the_disk_must_hold_the_checkpoints_to_come(
    tmp_path, monkeypatch, saved, num_saves, count
):
    """Two newest, the best, and one being written: four at a time."""
    state = {"x": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    usage = collections.namedtuple("usage", "free")
    with Checkpointer(tmp_path, keep=2, best_metric="accuracy") as checkpointer:
        for step in range(saved):
            metrics = {"accuracy": 1.0 - step}
            checkpointer.save(step, {"x": jnp.float32(0)}, {}, metrics)
        checkpointer.wait()
        needed = round(count * 4e6 * 1.05)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(needed))
        checkpointer.check_space(state, num_saves)
        if not count:
            return
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(needed - 1))
        with pytest.raises(CheckpointError) as error:
            checkpointer.check_space(state, num_saves)
    for part in (
        f"{count} more checkpoint",
        f"({needed:,} bytes) and",
        f"({needed - 1:,} bytes) are free",
        "lower checkpoint.keep or give another run_dir",
    ):
        assert part in str(error.value)


def test_a_save_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(), {})
        checkpointer.wait()
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _: collections.namedtuple("u", "free")(100)
        )
        with pytest.raises(CheckpointError, match=r"1 more checkpoint .*\(100 bytes"):
            checkpointer.save(2, make_state(), {})
        monkeypatch.undo()
        checkpointer.save(3, make_state(), {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 3]


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use"):
        Checkpointer(tmp_path / "file")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_all_finite(dtype, bad):
    state = make_state()
    assert bool(all_finite(state))
    assert bool(all_finite({"n": jnp.int32(1)}))
    state.params["bad"] = jnp.asarray([1.0, bad], dtype)
    assert not bool(all_finite(state))
