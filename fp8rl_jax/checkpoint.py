"""Checkpoints of a run: asynchronous, atomic and bit-exact.

One checkpoint is a directory named after its step with two items: ``state``, a tree
of arrays, and ``meta``, JSON (data position, configuration, seeds, metrics). Orbax
writes it under a temporary name and renames it when complete, so a run killed while
saving leaves nothing that could be mistaken for a checkpoint. A save that fails leaves
the earlier checkpoints as they were, and the next one starts clean.
"""

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, PyTree
from orbax.checkpoint import checkpoint_managers as policies

_log = logging.getLogger(__name__)

# Of the arrays' bytes: file headers, indices and metadata.
_SPACE_MARGIN = 1.05
# Waiting longer than this for the previous save is worth a line.
_SLOW_SAVE_S = 5.0


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used by this run."""


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    The newest `keep` checkpoints stay, and the best one by `best_metric` whatever
    its age. Of equally good ones the newest is the best. A checkpoint saved without
    the metric, or with one that is not finite, can be the latest but not the best.

    Use as a context manager, or call `close`: saving goes on in the background.

    Args:
      directory: Where the checkpoints are; made if missing.
      keep: How many of the newest to keep.
      best_metric: Name of the metric, in what is passed to `save`, that ranks
        checkpoints; None ranks none.
      best_mode: Whether a larger or a smaller value is better.
      read_only: Opens the checkpoints of a run that may be going on, as evaluation
        and export do. Otherwise what an interrupted save left is removed.

    Raises:
      CheckpointError: if the directory cannot be made, or read only does not exist.
      ValueError: if `keep` is below 1.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        read_only: bool = False,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least the latest checkpoint")
        self.directory = Path(directory).absolute()
        self.best_metric = best_metric
        self._keep = keep
        self._read_only = read_only
        kept = [policies.LatestN(keep)]
        if best_metric is not None:
            kept.append(
                policies.BestN(
                    get_metric_fn=_value,
                    reverse=best_mode == "min",
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._options = ocp.CheckpointManagerOptions(
            best_fn=None if best_metric is None else _value,
            best_mode=best_mode,
            preservation_policy=policies.AnyPreservationPolicy(kept),
            read_only=read_only,
            create=not read_only,
            save_interval_steps=0 if read_only else 1,
        )
        if read_only and not self.directory.is_dir():
            raise CheckpointError(f"no checkpoint directory {self.directory}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot use {self.directory} for checkpoints: {error}"
            ) from error
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        """Removes unfinished saves; returns Orbax's manager of what stands."""
        for unfinished in self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
            _log.warning("%s is an unfinished save and is not used", unfinished)
            # Not left to Orbax, which does it later, when `check_space` has looked.
            if not self._read_only and jax.process_index() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
        return ocp.CheckpointManager(
            self.directory,
            options=self._options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def check_space(self, state: PyTree, num_saves: int = 1) -> None:
        """Checks that the checkpoints to come fit on the disk.

        A checkpoint is written before the one it replaces is deleted, so one more than
        are kept stand at a time.

        Args:
          state: Tree of arrays or `jax.ShapeDtypeStruct`s, as `save` will get it. All
            of it is counted, whichever process writes a part: they share the disk.
          num_saves: How many saves are to come.

        Raises:
          CheckpointError: if they do not fit.
        """
        at_once = self._keep + (self.best_metric is not None) + 1
        count = min(num_saves, max(at_once - len(self.all_steps()), 1))
        leaves = jax.tree.leaves(state)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        needed = int(count * size * _SPACE_MARGIN)
        free = shutil.disk_usage(self.directory).free
        fits = needed <= free
        if jax.process_count() > 1:  # All must decide alike, or the others would wait.
            fits = bool(multihost_utils.broadcast_one_to_all(np.array(fits)))
        if not fits:
            raise CheckpointError(
                f"{count} more checkpoint{'s' * (count > 1)} in {self.directory} need "
                f"{_gigabytes(needed)} and {_gigabytes(free)} are free: make room, "
                "lower checkpoint.keep or give another run_dir"
            )

    def save(
        self,
        step: int,
        state: PyTree,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; returns once the arrays are copied off the devices.

        The state's buffers may be donated afterwards. Waits for a previous save, and
        says so if that takes long. If the previous one failed, this one takes its
        place: the failure is a warning here.

        Args:
          step: Number of completed steps, larger than that of any checkpoint here.
          state: Tree of arrays, on any mesh.
          meta: What else a resumed run needs; JSON values only.
          metrics: Metrics of this step; only `best_metric` is looked at.

        Raises:
          CheckpointError: if `meta` is not JSON, the step is not new, the directory
            is read only, or the checkpoint does not fit on the disk or cannot be
            written. The earlier ones stand, and a later step can be saved.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} is open for reading only")
        start = time.monotonic()
        try:
            self.wait()
        except CheckpointError as error:
            _log.warning("%s", error)
        waited = time.monotonic() - start
        if waited > _SLOW_SAVE_S:
            _log.warning(
                "saving step %d waited %.0f s for the checkpoint before it: the "
                "storage is slow; raise checkpoint.period",
                step,
                waited,
            )
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"checkpoint {step} is not newer than {latest} in {self.directory}: "
                "resume from that one, or save elsewhere"
            )
        try:
            meta = json.loads(json.dumps(dict(meta)))
        except TypeError as error:
            raise CheckpointError(f"checkpoint meta is not JSON: {error}") from error
        value = None if metrics is None else metrics.get(self.best_metric)
        ranked = value is not None and math.isfinite(value)
        if self.best_metric is not None and not ranked:
            _log.warning(
                "checkpoint %d has no finite %s and cannot become the best",
                step,
                self.best_metric,
            )
        self.check_space(state)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
                ),
                metrics={"value": float(value)} if ranked else None,
            )

    def restore(
        self, abstract_state: PyTree, step: int | None = None, partial: bool = False
    ) -> tuple[PyTree, dict[str, Any]]:
        """Reads one checkpoint, bit-exactly, onto the wanted shardings.

        A damaged checkpoint is an error rather than a reason to take an older one:
        saving is atomic, so the damage came from outside the run.

        Args:
          abstract_state: The state as `jax.ShapeDtypeStruct`s with shardings, which
            may lie on another mesh than the one saved from.
          step: Which checkpoint; the latest if omitted.
          partial: Whether `abstract_state` may leave out arrays, which are then not
            read. It is made of dicts alone, and so is the result.

        Returns:
          The state and the meta.

        Raises:
          CheckpointError: if there is no such checkpoint, it is damaged, or its
            arrays have other names, shapes or dtypes than `abstract_state`.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None or step not in self.all_steps():
            wanted = "checkpoint" if step is None else f"checkpoint {step}"
            raise CheckpointError(
                f"no {wanted} in {self.directory}; there are {self.all_steps()}"
            )
        try:
            saved = self._manager.item_metadata(step).state
            _check_same_arrays(saved, abstract_state, partial)
            wanted = {"meta": ocp.args.JsonRestore()}
            if not partial:
                wanted["state"] = ocp.args.StandardRestore(abstract_state)
            restored = self._manager.restore(step, args=ocp.args.Composite(**wanted))
            if partial:
                state = _restore_part(self.directory / str(step), abstract_state)
            else:
                state = restored.state
            # Orbax reads a random key as plain integers if its metadata is lost.
            _check_key_types(state, abstract_state)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} does not fit this run: "
                f"{error}"
            ) from None
        except jax.errors.JaxRuntimeError:
            raise  # The devices' trouble (out of memory), not the checkpoint's.
        except Exception as error:  # Orbax raises bare Exceptions for missing chunks.
            others = [other for other in self.all_steps() if other != step]
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged; move it away "
                f"to resume from another (there are {others}): {error}"
            ) from error
        return state, restored.meta

    def all_steps(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint, or None without any."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint, or None if none is ranked."""
        return None if self.best_metric is None else self._manager.best_step()

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
          CheckpointError: if it could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and frees the threads.

        Raises:
          CheckpointError: if it could not be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            _log.warning("%s", error)  # What ended the context matters more.

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns whatever stops a write into one error that says what to do."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # From Orbax's threads, of any type.
            # Orbax has already taken those to be deleted off its list, and keeps what
            # it had written on a disk that may be full: begin anew.
            with contextlib.suppress(Exception):
                self._manager.close()
            with contextlib.suppress(Exception):  # Tried again after the next save.
                self._manager = self._open()
            raise CheckpointError(
                f"could not write a checkpoint in {self.directory} (is the disk "
                f"full?); the earlier ones are untouched: {error}"
            ) from error


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3g} GB ({count:,} bytes)"


def _value(metrics: Mapping[str, float]) -> float:
    return metrics["value"]


def _describe(tree: PyTree) -> dict[str, str]:
    """Returns ``dtype[shape]`` of every array, by path."""

    def one(x):
        if isinstance(x, jax.ShapeDtypeStruct | jax.Array) and jnp.issubdtype(
            x.dtype, jax.dtypes.prng_key
        ):
            x = jax.eval_shape(jax.random.key_data, x)  # As it is stored.
        return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"

    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): one(x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _restore_part(folder: Path, abstract_state: PyTree) -> PyTree:
    """Reads the arrays of `abstract_state` alone, which the manager cannot."""
    args = ocp.args.PyTreeRestore(
        abstract_state,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract_state),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder / "state", args=args)


def _check_same_arrays(saved: PyTree, wanted: PyTree, partial: bool) -> None:
    """Raises `CheckpointError` naming up to four arrays that differ."""
    saved, wanted = _describe(saved), _describe(wanted)
    if partial:
        saved = {name: array for name, array in saved.items() if name in wanted}
    different = [
        f"{name} is {saved.get(name, 'absent')}, not {wanted.get(name, 'wanted')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        more = f" and {len(different) - 4} more" if len(different) > 4 else ""
        raise CheckpointError("; ".join(different[:4]) + more)


def _check_key_types(restored: PyTree, wanted: PyTree) -> None:
    """Raises `TypeError` if random keys came back as something else."""

    def check(path, x, y):
        if x.dtype != y.dtype:
            raise TypeError(f"{jax.tree_util.keystr(path)} is {x.dtype}, not {y.dtype}")

    jax.tree_util.tree_map_with_path(check, restored, wanted)


@jax.jit
def all_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Returns whether every floating-point array of a tree is free of inf and NaN.

    Integers and random keys count as finite. Check a state with this before saving
    it: a checkpoint that holds a NaN ends the run at the next resume.
    """
    finite = [
        jnp.all(jnp.isfinite(x))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack([jnp.bool_(True), *finite]))
