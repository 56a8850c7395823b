"""Checkpoints of a run: asynchronous, atomic and bit-exact.

One checkpoint is a directory named after its step with two items: ``state``, a tree
of arrays, and ``meta``, JSON (data position, configuration, seeds, metrics). Orbax
writes it under a temporary name and renames it when complete, so a run killed while
saving leaves nothing that could be mistaken for a checkpoint.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, PyTree
from orbax.checkpoint import checkpoint_managers as policies

_log = logging.getLogger(__name__)


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
        options = ocp.CheckpointManagerOptions(
            best_fn=None if best_metric is None else _value,
            best_mode=best_mode,
            preservation_policy=policies.AnyPreservationPolicy(kept),
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
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
        for unfinished in self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
            _log.warning("%s is an unfinished save and is not used", unfinished)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def save(
        self,
        step: int,
        state: PyTree,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; returns once the arrays are copied off the devices.

        The state's buffers may be donated afterwards. Waits for a previous save.

        Args:
          step: Number of completed steps, larger than that of any checkpoint here.
          state: Tree of arrays, on any mesh.
          meta: What else a resumed run needs; JSON values only.
          metrics: Metrics of this step; only `best_metric` is looked at.

        Raises:
          CheckpointError: if `meta` is not JSON, the step is not new, the directory
            is read only, or this or the previous save could not be written.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} is open for reading only")
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
        """Waits for the save in progress and frees the threads."""
        with self._writing():
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns whatever stops a write into one error that says what to do."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # From Orbax's threads, of any type.
            raise CheckpointError(
                f"could not write a checkpoint in {self.directory} (is the disk "
                f"full?); the earlier ones are untouched: {error}"
            ) from error


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
