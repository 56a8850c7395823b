"""Drawing tokens: the Gumbel-max rule, and truncation without a sort.

A truncated row keeps the ids whose logit is at least its threshold. Thresholds are
found bit by bit, from counts and sums of integers alone, which no order of summation,
batch or padding can change.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from fp8rl_jax.logprobs import chunking, scan_vocabulary
from fp8rl_jax.numerics import by_platform, round_to

_Candidate = tuple[Array, Array, Array]  # score, id, logit


def _gumbel(bits: UInt32[Array, "..."], dtype) -> Float[Array, "..."]:
    """Standard Gumbel noise, finite for all bits.

    The uniform variable is the centre of one of 2^23 cells of (0, 1): with more cells
    the last centre would round to 1 in float32, and its noise would be infinite.
    """
    cells = (bits >> 9).astype(jnp.float32)
    uniform = (cells.astype(dtype) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _random_bits(
    keys: UInt32[Array, "B 2"], counts: UInt32[Array, "C"]
) -> UInt32[Array, "B C"]:
    """Those that `jax.random.bits` has at these places, of as many as one likes."""

    def row(key):
        high, low = threefry2x32_p.bind(*key, jnp.zeros_like(counts), counts)
        return high ^ low

    return jax.vmap(row)(keys)


def _better(a: _Candidate, b: _Candidate) -> _Candidate:
    """Of two candidates the one with the higher score; of equals, with the lower id."""
    (a_score, a_id, _), (b_score, b_id, _) = a, b
    is_a = (a_score > b_score) | ((a_score == b_score) & (a_id < b_id))
    return tuple(jnp.where(is_a, x, y) for x, y in zip(a, b, strict=True))


def _from_image(image: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The float32 at a place in the order of all: -NaN, -inf, ..., inf, NaN."""
    negative = image >> 31 == 0
    bits = jnp.where(negative, ~image, image ^ jnp.uint32(1 << 31))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _last_threshold(
    holds: Callable[[Float[Array, "B"]], Bool[Array, "B"]], like: Float[Array, "B"]
) -> Float[Array, "B"]:
    """The largest float32 that ``holds``, as must every smaller finite one."""

    def step(i, image):
        candidate = image | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(_from_image(candidate)), candidate, image)

    image = lax.fori_loop(0, 32, step, jnp.zeros_like(like, jnp.uint32))
    return _from_image(image)


def _thresholds(
    dtype: jnp.dtype,
    logits: Float[Array, "N B C"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
    vocab_size: int,
) -> Float[Array, "B"]:
    """The float32 that a row's logits, rounded to float32, must reach to be drawn.

    Args:
      dtype: of the exponentials, before they are rounded to float32.
      logits: float32, in chunks, with -inf where an id does not count.
      top_k: see :func:`sample_tokens`, as for the next two.
      top_p: applied to what ``top_k`` leaves.
      min_p: applied last.
      vocab_size: number of logits of a row that are finite.
    """
    axes = (0, 2)

    def reach(threshold):
        return logits >= threshold[None, :, None]

    def k_reach(threshold):
        return jnp.sum(reach(threshold), axes, dtype=jnp.int32) >= top_k

    maximum = jnp.max(logits, axes)
    everything = jnp.full_like(maximum, -jnp.inf)
    top_k = jnp.minimum(top_k, vocab_size)
    by_count = jnp.where(top_k > 0, _last_threshold(k_reach, maximum), everything)

    # Probabilities relative to the largest, in fixed point: their sum fits in 63 bits.
    fraction_bits = 63 - vocab_size.bit_length()

    with jax.enable_x64(True):

        def mass(threshold):
            differences = logits.astype(dtype) - maximum.astype(dtype)[None, :, None]
            probs = round_to(jnp.exp(differences), jnp.float32)
            masses = (probs * 2.0**fraction_bits).astype(jnp.uint64)
            return jnp.sum(jnp.where(reach(threshold), masses, 0), axes)

        # The product of the mass and top_p, in 32 bits behind the point, rounded up.
        low_bits = jnp.uint64(2**32 - 1)
        total, factor = mass(by_count), (top_p * 2.0**32).astype(jnp.uint64)
        needed = (total >> 32) * factor
        needed += ((total & low_bits) * factor + low_bits) >> 32
        needed = jnp.maximum(needed, 1)

        def p_reach(threshold):
            return mass(jnp.maximum(threshold, by_count)) >= needed

        by_mass = _last_threshold(p_reach, maximum)

    by_mass = jnp.where(top_p < 1, by_mass, everything)
    by_ratio = maximum + round_to(jnp.log(min_p.astype(dtype)), jnp.float32)
    return jnp.maximum(jnp.maximum(by_count, by_mass), by_ratio)


def sample_tokens(
    hidden: Float[Array, "B D"],
    head: Float[Array, "V D"],
    keys: Array,
    *,
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"] | None = None,
    top_p: Float[Array, "B"] | None = None,
    min_p: Float[Array, "B"] | None = None,
    vocab_size: int,
    truncated: bool = False,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws one token a row by the Gumbel-max rule, with its log-probability.

    The noise is a function of a row's key and the token id alone, so a row's token does
    not depend on its batch. Ties go to the lowest id.

    Truncation keeps the ``top_k`` most likely ids; of these, the fewest that have
    ``top_p`` of their probability; of these, those at least ``min_p`` times as likely
    as the most likely one. Ids as likely as one that is kept are kept.

    Args:
      hidden: final hidden states.
      head: output head.
      keys: one threefry key a row.
      temperature: float32; 0 takes the most likely token, whose log-probability is then
        reported at temperature 1.
      top_k: int32; 0 for no such limit.
      top_p: float32; 1 for no such limit.
      min_p: float32; 0 for no such limit.
      vocab_size: ids from here on are never drawn.
      truncated: whether any row has a limit. [B, V] logits are then held in memory; the
        three arrays above are ignored otherwise.

    Returns:
      int32 token ids, and their float32 log-probabilities in the full distribution,
      exactly as :func:`fp8rl_jax.logprobs.token_log_probs` gives them.
    """
    num_chunks, size = chunking(head.shape[0])

    def forward(dtype, hidden, head, key_data, temperature, limits):
        row_keys = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        indices = jnp.arange(num_chunks, dtype=jnp.int32)
        fold_rows = jax.vmap(jax.random.fold_in, (0, None))
        chunk_keys = jax.vmap(fold_rows, (None, 0))(row_keys, indices)
        chunk_keys = jax.random.key_data(chunk_keys)
        greedy = temperature == 0

        def draw(best, index, ids, logits):
            # Counted from where the chunk is due: noise belongs to ids.
            counts = (ids - index * size).astype(jnp.uint32)
            noise = _gumbel(_random_bits(chunk_keys[index], counts), dtype)
            scores = logits + jnp.where(greedy[:, None], 0.0, noise)
            candidates = scores, jnp.broadcast_to(ids[None], logits.shape), logits
            # One reduction of all three, so that scores need not be kept.
            nothing = (
                jnp.array(-jnp.inf, dtype),
                jnp.int32(0),
                jnp.array(-jnp.inf, dtype),
            )
            return _better(best, lax.reduce(candidates, nothing, _better, (1,))), None

        def keep(state, index, ids, logits):
            return state, (index, ids, logits)

        low = jnp.full_like(hidden[:, 0], -jnp.inf, dtype)
        best = (low, jnp.zeros_like(low, jnp.int32), low)
        lse, best, chunks = scan_vocabulary(
            dtype,
            hidden,
            head,
            jnp.where(greedy, 1.0, temperature),
            vocab_size,
            keep if truncated else draw,
            best,
        )
        if truncated:
            rounded = round_to(chunks[2], jnp.float32)
            threshold = _thresholds(dtype, rounded, *limits, vocab_size)

            def draw_kept(best, chunk):
                index, ids, logits = chunk
                kept = round_to(logits, jnp.float32) >= threshold[:, None]
                return draw(best, index, ids, jnp.where(kept, logits, -jnp.inf))

            best, _ = lax.scan(draw_kept, best, chunks)
        _, token, logit = best
        return token, round_to(logit - lse, jnp.float32)

    limits = (top_k, top_p, min_p) if truncated else None
    return by_platform(
        forward, hidden, head, jax.random.key_data(keys), temperature, limits
    )
