import numpy as np
import pytest

from fp8rl_jax.data.batching import token_rows
from fp8rl_jax.data.layout import lay_out_rows, pack


def random_rows(count, seed, longest=700):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 99, rng.integers(1, 200)).tolist() for _ in range(count)]
    completions = [
        rng.integers(1, 99, rng.integers(1, longest - 200)).tolist()
        for _ in range(count)
    ]
    return token_rows(prompts, completions)


def lengths_of(mask):
    return mask.shape[1] - np.argmax(mask[:, ::-1], 1)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(("count", "seed"), [(1, 0), (7, 1), (40, 2)])
def test_packed_rows_hold_every_sequence_once(count, seed, num_rows):
    batch, mask = random_rows(count, seed)
    layout = pack(batch, mask, 1024, num_rows)
    packed, lengths = layout.batch, lengths_of(mask)
    assert packed.tokens.shape[1:] == (num_rows, 1024)
    assert sorted(layout.places[layout.places >= 0]) == list(range(count))
    places = layout.places.reshape(packed.index.shape[:3])
    covered = np.zeros(packed.tokens.shape, bool)
    for a, b, s in np.argwhere(places >= 0):
        row = places[a, b, s]
        index = packed.index[a, b, s, : lengths[row]]
        assert index[0] % 128 == 0 and (np.diff(index) == 1).all()
        assert not covered[a, b, index].any()
        covered[a, b, index] = True
        assert len(set(packed.segments[a, b, index])) == 1
        for name in ("tokens", "targets", "positions"):
            values = getattr(packed, name)[a, b, index]
            np.testing.assert_array_equal(
                values, getattr(batch, name)[row, : lengths[row]]
            )
    np.testing.assert_array_equal(packed.segments != 0, covered)
    # Segments of a row differ, and only the first micro-batches hold anything.
    assert not covered[layout.num_micro_batches :].any()
    assert covered[: layout.num_micro_batches].any((1, 2)).all()
    held = covered[: layout.num_micro_batches]
    assert layout.token_share == pytest.approx(held.mean())


def test_packing_is_tight():
    batch, mask = random_rows(200, 3)
    layout = pack(batch, mask, 2048, 1)
    blocks = -(-lengths_of(mask) // 128)
    fewest = -(-blocks.sum() // 16)
    assert layout.num_micro_batches <= fewest * 11 / 9 + 1
    # Micro-batches come in few numbers: each is a program.
    assert len(layout.batch.tokens) in (24, 32, 48)


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_taken_can_be_restored(packed):
    batch, mask = random_rows(12, 4)
    layout = pack(batch, mask, 1024, 2) if packed else lay_out_rows(batch, mask, 4)
    values = np.random.default_rng(0).normal(size=mask.shape).astype(np.float32)
    taken = layout.take({"values": values, "mask": mask})
    assert taken["values"].shape == (*layout.places.shape, mask.shape[1])
    np.testing.assert_array_equal(layout.restore(taken["values"]), values)
    assert taken["mask"].sum() == mask.sum()
    assert not taken["mask"][layout.places < 0].any()


def test_rows_of_their_own():
    batch, mask = random_rows(6, 5)
    layout = lay_out_rows(batch, mask, 2)
    assert layout.num_micro_batches == 3
    np.testing.assert_array_equal(layout.batch.tokens, batch.tokens.reshape(3, 2, -1))
    assert layout.batch.index is None
    assert layout.token_share == pytest.approx(lengths_of(mask).sum() / mask.size)
    with pytest.raises(ValueError, match=r"6 rows does not divide into .* of 4"):
        lay_out_rows(batch, mask, 4)


def test_a_sequence_that_does_not_fit_is_an_error():
    batch, mask = random_rows(3, 6)
    longest = lengths_of(mask).max()
    with pytest.raises(ValueError, match=f"{longest} tokens does not fit .* of 128"):
        pack(batch, mask, 128, 1)
