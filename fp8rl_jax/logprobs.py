"""The one token-log-prob function: sampler and trainer both read the head from here.

Logits are the product of bfloat16 hidden states and the bfloat16 head with wide
accumulation, times the reciprocal of the temperature, and never rounded before the
log-sum-exp. They are computed in chunks of the vocabulary, so that [tokens, vocabulary]
never exists. Rows of the head beyond the tokenizer's vocabulary (padding) are masked.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, PyTree

from fp8rl_jax import numerics
from fp8rl_jax.implementation import PlatformFunction, one_at_a_time
from fp8rl_jax.kernels import hopper_bf16_gemm
from fp8rl_jax.kernels.hopper_bf16_gemm import STATISTICS_COLUMNS
from fp8rl_jax.numerics import by_platform, round_to, unify_varying

# Fixed: the sampling noise of a chunk is keyed by the chunk's index.
VOCAB_CHUNK = 4096

_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))

_MANTISSA = 23  # bits of a float32 below its leading one
_BIAS = 127  # of its exponent


def _reciprocal(dtype, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / x of a positive, normal float32 x below 2^126, correctly rounded to dtype.

    By integers in float32, where a GPU divides only nearly and a compiler, what it
    knows, exactly: a constant temperature and an operand would get different bits.
    """
    if dtype == jnp.float64:
        return 1.0 / x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = bits >> _MANTISSA
    with jax.enable_x64(True):
        leading = 1 << _MANTISSA
        mantissa = ((bits & (leading - 1)) | leading).astype(jnp.uint64)
        quotient = (jnp.uint64(1 << 2 * _MANTISSA + 2) // mantissa + 1) >> 1
        quotient = quotient.astype(jnp.int32).astype(jnp.float32)
    scale = (2 * _BIAS - 1 - exponent) << _MANTISSA
    return quotient * 2.0**-_MANTISSA * lax.bitcast_convert_type(scale, jnp.float32)


def chunking(num_rows: int) -> tuple[int, int]:
    """Number of chunks and rows per chunk."""
    size = min(VOCAB_CHUNK, num_rows)
    return -(-num_rows // size), size


def _bounds(
    num_rows: int, vocab_size: int, index: Int[Array, "..."]
) -> tuple[Array, Array, Array]:
    """The first row of a chunk, and its columns from and up to which rows count.

    The last chunk is moved back to end at the last row (no padded copy of the head).
    Rows that the chunk before covers do not count again.
    """
    _, size = chunking(num_rows)
    start = jnp.minimum(index * size, num_rows - size)
    return start, index * size - start, jnp.clip(vocab_size - start, 0, size)


def _chunk(head: Float[Array, "V D"], bounds: tuple[Array, Array, Array]):
    """Rows of a chunk, its first row, the rows' ids and which of them count."""
    _, size = chunking(head.shape[0])
    start, first, last = bounds
    columns = jnp.arange(size, dtype=jnp.int32)
    counts = (columns >= first) & (columns < last)
    rows = lax.dynamic_slice_in_dim(head, start, size)
    return rows, start, start + columns, counts


def _logits(dtype, hidden, rows, inverse_temperature):
    rows = round_to(rows, hidden.dtype)
    return numerics.dot(dtype, hidden, rows, _NT) * inverse_temperature[:, None]


def _tiling(size: int) -> tuple[int, int]:
    """Number of tiles of a chunk, and columns per tile: those that share statistics."""
    tile = STATISTICS_COLUMNS if size % STATISTICS_COLUMNS == 0 else size
    return size // tile, tile


def _visit_chunk(hidden, head, bounds, index, inverse_temperature):
    """Logits [B, C] of a chunk, and their statistics [2, C / tile, B].

    The maximum of a tile and the sum of exponentials relative to it; -inf and 0 where
    nothing counts. In the dtype of ``inverse_temperature``.
    """
    rows, _, _, counts = _chunk(head, tuple(bounds[index]))
    logits = _logits(inverse_temperature.dtype, hidden, rows, inverse_temperature)
    logits = jnp.where(counts[None, :], logits, -jnp.inf)
    tiles = logits.reshape(logits.shape[0], *_tiling(logits.shape[1]))
    maxima = jnp.max(tiles, -1)
    finite = jnp.where(maxima == -jnp.inf, 0.0, maxima)
    sums = jnp.sum(jnp.exp(tiles - finite[..., None]), -1)
    return logits, jnp.stack([maxima.T, sums.T])


def _visit_chunk_on_hopper(hidden, head, bounds, index, inverse_temperature):
    """The same with bits of a row that depend on that row alone."""
    _, size = chunking(head.shape[0])
    if head.dtype != hidden.dtype:
        rows = lax.dynamic_slice_in_dim(head, bounds[index, 0], size)
        head, bounds = round_to(rows, hidden.dtype), bounds.at[:, 0].set(0)
    return hopper_bf16_gemm.head_logits(
        hidden, head, bounds, index, inverse_temperature, num_columns=size
    )


def _no_kernel(hidden, head, *_):
    _, size = chunking(head[0])
    if size % STATISTICS_COLUMNS or hidden[1] % 64:
        return "The kernel of the head takes 128 rows of multiples of 64 features."
    return None


def _chunk_types(hidden, head, *_):
    _, size = chunking(head[0])
    shapes = (hidden[0], size), (2, _tiling(size)[0], hidden[0])
    return [(shape, jnp.float32) for shape in shapes]


_visit_chunk_in_float32 = PlatformFunction(
    "visit_vocabulary_chunk",
    _chunk_types,
    _visit_chunk,
    {"mosaic": one_at_a_time(_visit_chunk_on_hopper)},
    no_kernel=_no_kernel,
)


def _log_sum_exp(statistics: Float[Array, "N 2 T B"]) -> tuple[Float[Array, "B"]]:
    """Merges the statistics of all tiles of all chunks."""
    maxima, sums = statistics[:, 0], statistics[:, 1]
    maximum = jnp.max(maxima, (0, 1))
    total = jnp.sum(sums * jnp.exp(maxima - maximum[None, None]), (0, 1))
    return (maximum + jnp.log(total),)


def _log_sum_exp_on_hopper(statistics):
    # XLA adds in an order that depends on the number of rows. In float64 that moves
    # the last of 53 bits.
    with jax.enable_x64(True):
        (lse,) = _log_sum_exp(statistics.astype(jnp.float64))
        return (lse.astype(jnp.float32),)


_log_sum_exp_in_float32 = PlatformFunction(
    "log_sum_exp",
    lambda statistics: [(statistics[-1:], jnp.float32)],
    _log_sum_exp,
    {"mosaic": _log_sum_exp_on_hopper},
)


def scan_vocabulary(
    dtype: jnp.dtype,
    hidden: Float[Array, "B D"],
    head: Float[Array, "V D"],
    temperature: Float[Array, "B"],
    vocab_size: int,
    visit: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
) -> tuple[Float[Array, "B"], PyTree, PyTree]:
    """Runs over the chunks of the head; for use inside :func:`numerics.by_platform`.

    Args:
      dtype: of logits and results.
      hidden: final hidden states.
      head: output head.
      temperature: float32, positive.
      vocab_size: ids from here on do not count.
      visit: ``visit(state, index, ids, logits)`` is called with the index of a chunk,
        its ids [C] and logits [B, C], -inf where an id does not count or the chunk
        before has it too; returns the new state and what to stack.
      state: the first.

    Returns:
      The log-sum-exp of a row's logits, the last state and what was stacked.
    """
    num_chunks, size = chunking(head.shape[0])
    chunk_bounds = functools.partial(_bounds, head.shape[0], vocab_size)
    table = jnp.stack(chunk_bounds(jnp.arange(num_chunks, dtype=jnp.int32)), -1)
    inverse_temperature = _reciprocal(dtype, temperature)
    bf16_on_gpu = dtype == jnp.float32 and hidden.dtype == jnp.bfloat16
    visit_chunk = _visit_chunk_in_float32 if bf16_on_gpu else _visit_chunk
    log_sum_exp = _log_sum_exp_in_float32 if bf16_on_gpu else _log_sum_exp

    def step(carry, _):
        # Carried: a slice of an array of indices would be one more kernel.
        index, state = carry
        logits, statistics = visit_chunk(
            hidden, head, table, index, inverse_temperature
        )
        start, *_ = chunk_bounds(index)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        state, out = visit(state, index, ids, logits)
        return (index + 1, state), (statistics, out)

    carry = (jnp.int32(0), state)
    (_, state), (statistics, stacked) = lax.scan(step, carry, length=num_chunks)
    (lse,) = log_sum_exp(statistics)
    return lse, state, stacked


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _token_log_probs(hidden, head, targets, head_gradient, temperature, vocab_size):
    return _token_log_probs_fwd(
        hidden, head, targets, head_gradient, temperature, vocab_size
    )[0]


def _token_log_probs_fwd(hidden, head, targets, head_gradient, temperature, vocab_size):
    def forward(dtype, hidden, head, targets):
        def visit(target_logits, index, ids, logits):
            is_target = ids[None, :] == targets[:, None]
            found = jnp.max(jnp.where(is_target, logits, -jnp.inf), -1)
            return jnp.maximum(target_logits, found), None

        low = jnp.full_like(hidden[:, 0], -jnp.inf, dtype)
        temperatures = jnp.full(hidden.shape[:1], temperature, jnp.float32)
        lse, target_logits, _ = scan_vocabulary(
            dtype, hidden, head, temperatures, vocab_size, visit, low
        )
        return round_to(target_logits - lse, jnp.float32), round_to(lse, jnp.float32)

    log_probs, lse = by_platform(forward, hidden, head, targets)
    return log_probs, (hidden, head, targets, lse, head_gradient)


def _token_log_probs_bwd(temperature, vocab_size, residuals, cotangent):
    def backward(dtype, cotangent, hidden, head, targets, lse, head_gradient):
        num_chunks, size = chunking(head.shape[0])
        temperatures = jnp.full(hidden.shape[:1], temperature, jnp.float32)
        inverse_temperature = _reciprocal(dtype, temperatures)
        scale = (cotangent.astype(dtype) * inverse_temperature)[:, None]

        def step(carry, index):
            d_hidden, d_head = carry
            bounds = _bounds(head.shape[0], vocab_size, index)
            rows, start, ids, counts = _chunk(head, bounds)
            logits = _logits(dtype, hidden, rows, inverse_temperature)
            probs = jnp.exp(logits - lse[:, None].astype(dtype))
            is_target = (ids[None, :] == targets[:, None]).astype(dtype)
            d_logits = (is_target - probs) * scale
            d_logits = jnp.where(counts[None, :], d_logits, 0.0)
            d_logits = round_to(d_logits, hidden.dtype)
            rows = round_to(rows, hidden.dtype)
            d_rows = numerics.dot(dtype, d_logits, hidden, _TN).astype(jnp.float32)
            if head_gradient is None:
                d_rows += lax.dynamic_slice_in_dim(d_head, start, size)
                d_head = lax.dynamic_update_slice_in_dim(d_head, d_rows, start, 0)
            else:
                head_gradient[pl.ds(start, size)] += d_rows
            d_hidden = d_hidden + numerics.dot(dtype, d_logits, rows, _NN)
            return (d_hidden, d_head), None

        in_place = head_gradient is not None
        d_head = None if in_place else jnp.zeros_like(head, jnp.float32)
        carry = (jnp.zeros_like(hidden, dtype), d_head)
        indices = jnp.arange(num_chunks, dtype=jnp.int32)
        (d_hidden, d_head), _ = lax.scan(step, carry, indices)
        d_head = None if in_place else round_to(d_head, head.dtype)
        return round_to(d_hidden, hidden.dtype), d_head

    d_hidden, d_head = by_platform(backward, cotangent, *residuals)
    return d_hidden, d_head, None, None


_token_log_probs.defvjp(_token_log_probs_fwd, _token_log_probs_bwd)


def token_log_probs(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*batch"],
    *,
    temperature: float,
    vocab_size: int,
    head_gradient: jax.Ref | None = None,
) -> Float[Array, "*batch"]:
    """Log-probability of each target under softmax(head · hidden / temperature).

    Args:
      hidden: final hidden states, in the activation dtype.
      head: output head (or tied embedding), any floating dtype; rounded to the
        activation dtype.
      targets: token ids below ``vocab_size``.
      temperature: positive; the sampling temperature, rounded to float32.
      vocab_size: number of ids that may occur; further rows of the head are masked.
      head_gradient: float32 Ref like ``head``: where the backward pass adds the head's
        gradient instead of returning it.

    Returns:
      float32, differentiable in ``hidden`` and ``head``.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat, head, ids = unify_varying(flat, head, targets.reshape(-1))
    if head_gradient is not None:
        head = lax.stop_gradient(head)
    log_probs = _token_log_probs(
        flat, head, ids, head_gradient, float(temperature), vocab_size
    )
    return log_probs.reshape(targets.shape)
