"""Times of the kernels of a call, as the GPU's own counters give them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# CUPTI, which `jax.experimental.mosaic.gpu.profiler.measure` starts and stops for
# calls that all have the same operands.
from jax._src.lib import mosaic_gpu


def device_time(
    fn: Callable[..., Any],
    operands: Sequence[tuple[Any, ...]],
    *,
    state: Any = None,
    repeats: int = 20,
) -> list[float]:
    """Seconds that the kernels of each call of ``fn`` take together.

    Neither compilation nor gaps between kernels are counted.

    Args:
      fn: a function of arrays, compiled or not.
      operands: sets of its arguments, used in turn. Sets that together exceed the L2
        cache keep it from serving one call with what another left there.
      state: if given, ``fn`` takes it first and returns its successor and a result. It
        is donated, and gone afterwards.
      repeats: calls.

    Raises:
      RuntimeError: the calls launched different numbers of kernels, or none.
    """
    if not isinstance(fn, jax.stages.Compiled):
        fn = jax.jit(fn, donate_argnums=() if state is None else 0)

    def call(args):
        nonlocal state
        if state is None:
            return fn(*args)
        state, out = fn(state, *args)
        return out

    jax.block_until_ready(([call(args) for args in operands], state))
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        results = [call(operands[i % len(operands)]) for i in range(repeats)]
        jax.block_until_ready((results, state))
    finally:
        # Pairs of a kernel's name and its milliseconds, in the order of execution.
        kernels = cupti._cupti_get_timings(False)
    count, rest = divmod(len(kernels), repeats)
    if rest or not count:
        raise RuntimeError(f"{repeats} calls launched {len(kernels)} kernels.")
    return [
        sum(milliseconds for _, milliseconds in kernels[i : i + count]) / 1e3
        for i in range(0, len(kernels), count)
    ]


def kernel_times(fn: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Launches and seconds of each kernel of ``fn()``, the longest first."""
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(fn())
    finally:
        kernels = cupti._cupti_get_timings(False)
    times: dict[str, tuple[int, float]] = {}
    for name, milliseconds in kernels:
        count, seconds = times.get(name, (0, 0.0))
        times[name] = count + 1, seconds + milliseconds / 1e3
    return dict(sorted(times.items(), key=lambda item: -item[1][1]))
