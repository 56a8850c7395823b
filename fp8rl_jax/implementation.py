"""Which implementation of an operation a program gets: decided when it is lowered.

A :class:`PlatformFunction` is traced as one primitive and becomes a kernel or the
plain-JAX reference only when its program is lowered for a platform. So a program that
is traced on a CPU machine and lowered for ``cuda`` holds the kernels, nothing looks at
the default backend, and no kernel is traced for a platform that cannot run it.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

Implementation = Literal["mosaic", "triton", "reference"]
IMPLEMENTATIONS = get_args(Implementation)
_HOPPER = "9.0"
_FIRST_WITH_TRITON = 8.0


def compute_capability() -> str:
    """That of the CUDA devices; Hopper's where there are none (cross-lowering)."""
    try:
        return jax.local_devices(backend="cuda")[0].compute_capability
    except RuntimeError:
        return _HOPPER


def resolve(implementation: Implementation | None, available: Any) -> str:
    """What a program lowered for ``cuda`` uses.

    Args:
      implementation: the user's choice; None takes the best that runs.
      available: implementations that the operation has.

    Raises:
      ValueError: an implementation that cannot run on these devices was asked for.
    """
    capability = compute_capability()
    if implementation == "mosaic" and capability != _HOPPER:
        raise ValueError(
            f'implementation="mosaic" needs a Hopper GPU (compute capability '
            f"{_HOPPER}), this one has {capability}: leave implementation unset or "
            'choose "triton" or "reference".'
        )
    if implementation in available:
        return implementation
    if implementation == "triton":  # quantisation is left to XLA there
        return "reference"
    if capability == _HOPPER and "mosaic" in available:
        return "mosaic"
    new_enough = float(capability) >= _FIRST_WITH_TRITON
    if "triton" in available and new_enough and importlib.util.find_spec("jax_triton"):
        return "triton"
    return "reference"


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Has `jax.vmap` loop over a kernel that has no batching rule."""

    def run(*args, **static):
        fn = functools.partial(kernel, **static)
        return jax.custom_batching.sequential_vmap(fn)(*args)

    return run


def _varying(aval: Any) -> frozenset[str]:
    """Manual mesh axes (of `jax.shard_map`) over which an array varies."""
    return aval.manual_axis_type.varying


def _unmap(shapes: list[tuple[int, ...]], maps: tuple) -> tuple[list, list[int]]:
    """Shapes without the axes of `jax.vmap`, and the sizes of those, outer to inner."""
    sizes = []
    for axes in reversed(maps):
        mapped = [axis is not None for axis in axes]
        sizes.append(shapes[mapped.index(True)][0])
        shapes = [s[m:] for s, m in zip(shapes, mapped, strict=True)]
    return shapes, sizes


class PlatformFunction:
    """An operation on arrays with a reference and kernels for NVIDIA GPUs.

    Called as ``fn(*arrays, implementation=None, **static)``. Works under `jax.jit`,
    `jax.vmap`, `jax.checkpoint`, `lax.scan` and `jax.shard_map`; it has no derivative:
    wrap it in a `jax.custom_vjp`.

    Args:
      name: of the primitive, as it shows in jaxprs.
      out_types: ``out_types(*shapes, **static)`` gives shape and dtype of each result.
      reference: ``reference(*arrays, **static)`` in plain JAX, for every platform;
        returns a tuple of arrays.
      kernels: by implementation, functions of the same signature for ``cuda``.
      no_kernel: ``no_kernel(*shapes, **static)`` says why no kernel takes these
        operands, or returns None. The reference runs in its place, unless a kernel was
        asked for, which is an error.
    """

    def __init__(
        self,
        name: str,
        out_types: Callable[..., Sequence[tuple[tuple[int, ...], Any]]],
        reference: Callable[..., tuple[jax.Array, ...]],
        kernels: Mapping[str, Callable[..., tuple[jax.Array, ...]]],
        no_kernel: Callable[..., str | None] = lambda *_, **__: None,
    ):
        self._implementations = {"reference": reference, **kernels}
        self._out_types = out_types
        self._no_kernel = no_kernel
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_impl(
            jax.jit(
                self.primitive.bind,
                static_argnames=("implementation", "maps", "static"),
            )
        )
        self.primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[self.primitive] = self._batch
        mlir.register_lowering(self.primitive, self._lowering(on_cuda=False))
        mlir.register_lowering(
            self.primitive, self._lowering(on_cuda=True), platform="cuda"
        )

    def __call__(
        self, *args: jax.Array, implementation: Implementation | None = None, **static
    ) -> tuple[jax.Array, ...]:
        """Applies the operation; ``static`` are its hashable parameters."""
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"Unknown implementation {implementation!r}: choose one of "
                f"{', '.join(IMPLEMENTATIONS)} or None."
            )
        return tuple(
            self.primitive.bind(
                *args,
                implementation=implementation,
                maps=(),
                static=tuple(sorted(static.items())),
            )
        )

    def _abstract_eval(self, *avals, implementation, maps, static):
        del implementation
        mat = avals[0].manual_axis_type
        mat = mat.update(varying=frozenset().union(*map(_varying, avals)))
        shapes, sizes = _unmap([a.shape for a in avals], maps)

        def aval(shape, dtype):
            spec = PartitionSpec(*[None] * len(shape))
            return avals[0].update(
                shape=shape,
                dtype=jax.numpy.dtype(dtype),
                weak_type=False,
                sharding=avals[0].sharding.update(spec=spec),
                manual_axis_type=mat,
            )

        outs = self._out_types(*shapes, **dict(static))
        return [aval((*sizes, *shape), dtype) for shape, dtype in outs]

    def _batch(self, args, dims, *, implementation, maps, static):
        moved = [
            a if d is None else jax.numpy.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        axes = tuple(None if d is None else 0 for d in dims)
        outs = self.primitive.bind(
            *moved, implementation=implementation, maps=(*maps, axes), static=static
        )
        return outs, [0] * len(outs)

    def _choose(self, implementation, args, maps, static):
        """What a program lowered for ``cuda`` uses for these operands."""
        choice = resolve(implementation, self._implementations)
        if any(0 in a.shape for a in args):  # a kernel needs a block of work
            return "reference"
        shapes, _ = _unmap([a.shape for a in args], maps)
        reason = self._no_kernel(*shapes, **dict(static))
        if reason is None:
            return choice
        if implementation not in (None, "reference"):
            raise ValueError(
                f"implementation={implementation!r} cannot run here. {reason} Leave "
                "implementation unset."
            )
        return "reference"

    def _lowering(self, on_cuda: bool):
        def run(*args, implementation, maps, static):
            if on_cuda:
                choice = self._choose(implementation, args, maps, static)
            elif implementation in (None, "reference"):
                choice = "reference"
            else:
                raise ValueError(
                    f"implementation={implementation!r} of {self.primitive.name} runs "
                    "on NVIDIA GPUs only, and this program is lowered for another "
                    "platform: leave implementation unset."
                )
            fn = functools.partial(self._implementations[choice], **dict(static))
            for axes in maps:
                fn = jax.vmap(fn, in_axes=axes)
            return fn(*args)

        return mlir.lower_fun(run, multiple_results=True)
