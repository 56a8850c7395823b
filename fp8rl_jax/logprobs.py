"""The one token-log-prob function: sampler and trainer both read the head from here.

Logits are the product of bfloat16 hidden states and the bfloat16 head with wide
accumulation, divided by the temperature and never rounded before the log-sum-exp. They
are computed in chunks of the vocabulary, so that [tokens, vocabulary] never exists.
Rows of the head beyond the tokenizer's vocabulary (padding) are masked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from fp8rl_jax import numerics
from fp8rl_jax.implementation import PlatformFunction, one_at_a_time
from fp8rl_jax.kernels import hopper_bf16_gemm
from fp8rl_jax.numerics import by_platform, round_to, unify_varying

# Fixed: the sampling noise of a chunk is keyed by the chunk's index.
VOCAB_CHUNK = 4096

_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


def _chunking(num_rows: int) -> tuple[int, int]:
    """Number of chunks and rows per chunk."""
    size = min(VOCAB_CHUNK, num_rows)
    return -(-num_rows // size), size


def _chunk_ids(num_rows: int, index: Int[Array, ""]) -> tuple[Array, Array]:
    """The first row of a chunk, and its rows' ids.

    The last chunk is moved back to end at the last row (no padded copy of the head).
    """
    _, size = _chunking(num_rows)
    start = jnp.minimum(index * size, num_rows - size)
    return start, start + jnp.arange(size, dtype=jnp.int32)


def _chunk(head: Float[Array, "V D"], index: Int[Array, ""], vocab_size: int):
    """Rows of a chunk, its first row, the rows' ids and which of them count.

    Rows that the chunk before covers do not count again.
    """
    _, size = _chunking(head.shape[0])
    start, ids = _chunk_ids(head.shape[0], index)
    counts = (ids >= index * size) & (ids < vocab_size)
    return lax.dynamic_slice_in_dim(head, start, size), start, ids, counts


def _logits(dtype, hidden, rows, temperature):
    rows = round_to(rows, hidden.dtype)
    return numerics.dot(dtype, hidden, rows, _NT) / temperature


def _visit_chunk(hidden, head, index, maximum, total, *, temperature, vocab_size):
    """Logits of a chunk, and the maximum and sum of exponentials with it added.

    The sum is relative to the maximum. In the dtype of ``maximum``.
    """
    dtype = maximum.dtype
    rows, _, _, counts = _chunk(head, index, vocab_size)
    logits = _logits(dtype, hidden, rows, temperature)
    logits = jnp.where(counts[None, :], logits, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(logits, -1))
    total = total * jnp.exp(maximum - new_maximum)
    total = total + jnp.sum(jnp.exp(logits - new_maximum[:, None]), -1)
    return logits, new_maximum, total


def _visit_chunk_on_hopper(
    hidden, head, index, maximum, total, *, temperature, vocab_size
):
    """The same with bits of a row that depend on that row alone."""
    _, size = _chunking(head.shape[0])
    start, _ = _chunk_ids(head.shape[0], index)
    first, last = index * size - start, jnp.minimum(vocab_size - start, size)
    if head.dtype != hidden.dtype:
        rows = lax.dynamic_slice_in_dim(head, start, size)
        head, start = round_to(rows, hidden.dtype), jnp.int32(0)
    logits, *tiles = hopper_bf16_gemm.head_logits(
        hidden, head, start, first, last, num_columns=size, temperature=temperature
    )
    # XLA sums a row in an order that depends on the number of rows. In float64 that
    # moves the last of 53 bits.
    with jax.enable_x64(True):
        tile_max, tile_total, maximum, total = (
            x.astype(jnp.float64) for x in (*tiles, maximum, total)
        )
        new_maximum = jnp.maximum(maximum, jnp.max(tile_max, -1))
        total = total * jnp.exp(maximum - new_maximum)
        total += jnp.sum(tile_total * jnp.exp(tile_max - new_maximum[:, None]), -1)
        return logits, new_maximum.astype(jnp.float32), total.astype(jnp.float32)


def _no_kernel(hidden, head, *_, temperature, vocab_size):
    _, size = _chunking(head[0])
    if size % 128 or hidden[1] % 64:
        return "The kernel of the head takes 128 rows of multiples of 64 features."
    return None


_visit_chunk_in_float32 = PlatformFunction(
    "visit_vocabulary_chunk",
    lambda hidden, head, index, *_, temperature, vocab_size: [
        ((hidden[0], _chunking(head[0])[1]), jnp.float32),
        (hidden[:1], jnp.float32),
        (hidden[:1], jnp.float32),
    ],
    _visit_chunk,
    {"mosaic": one_at_a_time(_visit_chunk_on_hopper)},
    no_kernel=_no_kernel,
)


def _scan_vocabulary(dtype, hidden, head, temperature, vocab_size, visit, state):
    """Runs over the chunks; returns the log-sum-exp and the visitor's last state."""
    num_chunks, _ = _chunking(head.shape[0])
    zero = jnp.zeros_like(hidden[:, 0], dtype)
    bf16_on_gpu = dtype == jnp.float32 and hidden.dtype == jnp.bfloat16
    visit_chunk = functools.partial(
        _visit_chunk_in_float32 if bf16_on_gpu else _visit_chunk,
        temperature=temperature,
        vocab_size=vocab_size,
    )

    def step(carry, index):
        maximum, total, state = carry
        logits, maximum, total = visit_chunk(hidden, head, index, maximum, total)
        _, ids = _chunk_ids(head.shape[0], index)
        return (maximum, total, visit(state, index, ids, logits)), None

    carry = (zero - jnp.inf, zero, state)
    indices = jnp.arange(num_chunks, dtype=jnp.int32)
    (maximum, total, state), _ = lax.scan(step, carry, indices)
    return maximum + jnp.log(total), state


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
            return jnp.maximum(target_logits, found)

        start = jnp.zeros_like(hidden[:, 0], dtype) - jnp.inf
        lse, target_logits = _scan_vocabulary(
            dtype, hidden, head, temperature, vocab_size, visit, start
        )
        return round_to(target_logits - lse, jnp.float32), round_to(lse, jnp.float32)

    log_probs, lse = by_platform(forward, hidden, head, targets)
    return log_probs, (hidden, head, targets, lse, head_gradient)


def _token_log_probs_bwd(temperature, vocab_size, residuals, cotangent):
    def backward(dtype, cotangent, hidden, head, targets, lse, head_gradient):
        num_chunks, size = _chunking(head.shape[0])
        scale = (cotangent.astype(dtype) / temperature)[:, None]

        def step(carry, index):
            d_hidden, d_head = carry
            rows, start, ids, counts = _chunk(head, index, vocab_size)
            logits = _logits(dtype, hidden, rows, temperature)
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
      temperature: positive; the sampling temperature.
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


def _gumbel(bits: UInt32[Array, "..."], dtype) -> Float[Array, "..."]:
    """Standard Gumbel noise, finite for all bits.

    The uniform variable is the centre of one of 2^23 cells of (0, 1): with more cells
    the last centre would round to 1 in float32, and its noise would be infinite.
    """
    cells = (bits >> 9).astype(jnp.float32)
    uniform = (cells.astype(dtype) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def sample_tokens(
    hidden: Float[Array, "B D"],
    head: Float[Array, "V D"],
    keys: Array,
    *,
    temperature: float,
    vocab_size: int,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws one token a row by the Gumbel-max rule, with its log-probability.

    The noise is a function of a row's key and the token id alone, so a row's token does
    not depend on its batch. Ties go to the lowest id.

    Args:
      hidden: final hidden states.
      head: output head.
      keys: one PRNG key a row.
      temperature: 0 takes the most likely token; its log-probability is then reported
        at temperature 1.
      vocab_size: ids from here on are never drawn.

    Returns:
      int32 token ids, and their float32 log-probabilities exactly as
      :func:`token_log_probs` gives them.
    """
    _, size = _chunking(head.shape[0])

    def forward(dtype, hidden, head, key_data):
        row_keys = jax.random.wrap_key_data(key_data)

        def noise(index):
            def row(key):
                return jax.random.bits(
                    jax.random.fold_in(key, index), (size,), "uint32"
                )

            return _gumbel(jax.vmap(row)(row_keys), dtype)

        def visit(best, index, ids, logits):
            best_score, best_id, best_logit = best
            scores = logits
            if temperature > 0:
                # Shifted so that noise belongs to ids, also in the moved last chunk.
                shift = index * size - ids[0]
                moved = jnp.roll(noise(index), shift, axis=-1)
                scores = logits + moved
            # The lowest id with the best score. (argmax does not lower in float64.)
            score = jnp.max(scores, -1)
            is_best = scores == score[:, None]
            last = jnp.iinfo(jnp.int32).max
            token = jnp.min(jnp.where(is_best, ids[None, :], last), -1)
            is_token = ids[None, :] == token[:, None]
            logit = jnp.max(jnp.where(is_token, logits, -jnp.inf), -1)
            better = score > best_score
            return (
                jnp.where(better, score, best_score),
                jnp.where(better, token, best_id),
                jnp.where(better, logit, best_logit),
            )

        low = jnp.zeros_like(hidden[:, 0], dtype) - jnp.inf
        start = (low, jnp.zeros_like(low, jnp.int32), low)
        lse, (_, token, logit) = _scan_vocabulary(
            dtype, hidden, head, temperature or 1.0, vocab_size, visit, start
        )
        return token, round_to(logit - lse, jnp.float32)

    return by_platform(forward, hidden, head, jax.random.key_data(keys))
