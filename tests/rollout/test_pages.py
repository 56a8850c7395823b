"""Pages of a pool: who holds them, what they hold, and in what order they go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.rollout.pages import Match, OutOfPages, PagePool

PAGE = 4


def tokens(*values):
    return np.array(values, np.int32)


def fill(pool, sequence, shared=()):
    """Holds and indexes filled pages of ``sequence``, the first of which are shared."""
    pool.share(shared)
    own = pool.allocate(-(-len(sequence) // PAGE) - len(shared))
    pages = [*shared, *own]
    pool.index(sequence, pages)
    for page in own:
        pool.mark_filled(page)
    return pages


def test_pages_are_free_again_after_their_last_holder():
    pool = PagePool(4, PAGE)
    pages = pool.allocate(3)
    assert pages == [0, 1, 2] and pool.num_available == 1 and pool.num_held == 3
    pool.share(pages[:2])
    pool.release(pages)
    assert pool.num_available == 2
    pool.release(pages[:2])
    assert pool.num_available == 4 and pool.num_held == 0


def test_too_many_pages_take_none():
    pool = PagePool(2, PAGE)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="2 pages were asked for and 1 of 2 are avail"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_a_free_page_cannot_be_shared_or_released():
    pool = PagePool(2, PAGE)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="Page 1 is free"):
        pool.share([page, 1])
    with pytest.raises(ValueError, match="Page 1 is held 0 times, not 1"):
        pool.release([page, 1])
    with pytest.raises(ValueError, match="Page 0 is held 1 times, not 2"):
        pool.release([page, page])
    pool.release([page])
    assert pool.num_available == 2


def test_the_longest_prefix_matches():
    pool = PagePool(8, PAGE)
    pages = fill(pool, np.arange(10, dtype=np.int32))  # two pages and two tokens
    for length, full, partial in [
        (3, 0, None),
        (4, 1, None),
        (7, 1, None),
        (8, 2, None),
        (9, 2, None),
        (10, 2, (pages[2], 2)),
        (11, 2, None),
    ]:
        match = pool.match(np.arange(length))
        assert match == Match(pages[:full], partial), length
    assert pool.match(tokens(0, 1, 2, 4, 4, 5, 6, 7)) == Match([], None)
    assert pool.match(tokens()) == Match([], None)


def test_a_page_matches_below_its_own_prefix_only():
    pool = PagePool(8, PAGE)
    fill(pool, tokens(0, 1, 2, 3, 9, 9, 9, 9, 5))
    other = fill(pool, tokens(4, 5, 6, 7))
    assert pool.match(tokens(4, 5, 6, 7, 9, 9, 9, 9)) == Match(other, None)
    assert pool.match(tokens(9, 9, 9, 9)) == Match([], None)
    assert pool.match(tokens(5)) == Match([], None)


def test_the_first_page_with_a_prefix_stays_in_the_index():
    pool = PagePool(8, PAGE)
    first = fill(pool, np.arange(6))
    second = fill(pool, np.arange(6))
    assert not set(first) & set(second)
    assert pool.match(np.arange(6)) == Match(first[:1], (first[1], 2))
    longer = fill(pool, np.arange(8))
    assert pool.match(np.arange(8)) == Match([first[0], longer[1]], None)
    # Pages that the index does not know are free at once.
    pool.release(second)
    assert pool.num_reclaimable(second) == 0
    assert pool.match(np.arange(6)).pages == first[:1]


def test_a_page_that_has_filled_up_is_found_by_any_of_its_lengths():
    pool = PagePool(4, PAGE)
    pages = fill(pool, np.arange(2))
    pool.index(np.arange(3), pages)
    pool.index(np.arange(4), pages)
    pool.release(pages)
    assert pool.match(np.arange(2)) == Match([], (pages[0], 2))
    assert pool.match(np.arange(3)) == Match([], (pages[0], 3))
    assert pool.match(np.arange(4)) == Match(pages, None)
    assert len(pool.allocate(4)) == 4
    for length in (2, 3, 4):
        assert pool.match(np.arange(length)) == Match([], None)


def test_released_pages_stay_until_the_free_ones_are_gone():
    pool = PagePool(4, PAGE)
    pages = fill(pool, np.arange(8))
    pool.release(pages)
    assert pool.num_available == 4 and pool.num_reclaimable(pages) == 2
    assert not set(pool.allocate(2)) & set(pages)
    assert pool.match(np.arange(8)).pages == pages
    pool.share(pages)
    assert pool.num_available == 0 and pool.num_reclaimable(pages) == 0


def test_the_least_recently_used_page_goes_first():
    pool = PagePool(3, PAGE)
    sequences = [tokens(i, i, i, i) for i in range(3)]
    pages = [fill(pool, sequence) for sequence in sequences]
    for page in pages:
        pool.release(page)
    pool.share(pages[0])  # used again, and so the last to go
    pool.release(pages[0])
    for gone in (1, 2, 0):
        assert pool.match(sequences[gone]).pages == pages[gone]
        assert pool.allocate(1) == pages[gone]
        assert pool.match(sequences[gone]).pages == []


def test_the_end_of_a_sequence_goes_before_its_beginning():
    pool = PagePool(3, PAGE)
    pages = fill(pool, np.arange(12))
    pool.release(pages)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(np.arange(12)).pages == pages[:left]


def test_nothing_below_a_reclaimed_page_is_ever_matched():
    pool = PagePool(3, PAGE)
    root = fill(pool, np.arange(4))
    below = fill(pool, np.arange(9), shared=root)[1:]
    pool.release(root)
    pool.release(root)  # its holders have gone, those below it are held
    assert pool.allocate(1) == root
    assert pool.match(np.arange(9)) == Match([], None)
    # The same tokens again, on another page: what was below is not below it.
    pool.release(below)
    assert pool.num_reclaimable(below) == 0
    again = fill(pool, np.arange(4))
    assert pool.match(np.arange(9)) == Match(again, None)
    assert pool.num_available == 1


def test_what_is_below_a_reclaimed_page_is_free():
    pool = PagePool(4, PAGE)
    root = fill(pool, np.arange(4))
    below = fill(pool, np.arange(12), shared=root)[1:]
    pool.release(root)
    pool.release(root)
    pool.release(below)
    taken = pool.allocate(4)
    assert sorted(taken) == [0, 1, 2, 3]


def test_a_page_that_nobody_will_fill_leaves_the_index():
    pool = PagePool(4, PAGE)
    pages = pool.allocate(2)
    pool.index(np.arange(8), pages)
    pool.mark_filled(pages[0])
    assert pool.match(np.arange(8)).pages == pages
    assert [pool.is_filled(page) for page in pages] == [True, False]
    pool.share(pages)
    pool.release(pages)
    assert pool.match(np.arange(8)).pages == pages  # another may fill it
    pool.release(pages)
    assert pool.match(np.arange(8)).pages == pages[:1]
    assert pool.num_available == 4


def test_a_page_is_not_filled_when_it_is_allocated_again():
    pool = PagePool(1, PAGE)
    pages = fill(pool, np.arange(4))
    pool.release(pages)
    assert pool.is_filled(pages[0])
    assert not pool.is_filled(pool.allocate(1)[0])


def test_clear_forgets_prefixes_and_keeps_holders():
    pool = PagePool(4, PAGE)
    held, gone = fill(pool, np.arange(6)), fill(pool, np.arange(4, 8))
    pool.release(gone)
    pool.clear()
    assert pool.match(np.arange(6)) == pool.match(np.arange(4, 8)) == Match([], None)
    assert pool.num_held == 2 and pool.num_available == 2
    pool.release(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


class Reference:
    """What every page really holds, found by search instead of an index."""

    def __init__(self, num_pages):
        self.pool = PagePool(num_pages, PAGE)
        self.holds = [()] * num_pages  # all tokens up to the end of the page's
        self.held = []  # (tokens, pages) of each sequence

    def admit(self, sequence):
        match = self.pool.match(sequence)
        self._check(match, sequence)
        own = -(-len(sequence) // PAGE) - len(match.pages)
        lost = self.pool.num_reclaimable(match.pages)
        if own > self.pool.num_available - lost:
            return
        pages = fill(self.pool, sequence, match.pages)
        for i, page in enumerate(pages):
            self.holds[page] = tuple(sequence[: (i + 1) * PAGE].tolist())
        self.held.append((sequence, pages))

    def _check(self, match, sequence):
        whole = tuple(sequence.tolist())
        for i, page in enumerate(match.pages):
            assert self.holds[page] == whole[: (i + 1) * PAGE]
        if match.partial is not None:
            page, length = match.partial
            assert length == len(whole) - len(match.pages) * PAGE
            assert 0 < length < PAGE
            assert self.holds[page][: len(whole)] == whole
        # Pages of a sequence that runs are always found.
        for other, _ in self.held:
            same = np.cumprod(other[: len(whole)] == sequence[: len(other)]).sum()
            assert len(match.pages) >= same // PAGE

    def end(self, which):
        if self.held:
            _, pages = self.held.pop(which % len(self.held))
            self.pool.release(pages)


@settings(max_examples=200)
@given(
    st.integers(3, 12),
    st.lists(
        st.tuples(
            st.booleans(), st.lists(st.integers(0, 1), max_size=14), st.integers(0, 9)
        ),
        max_size=60,
    ),
)
def test_matched_pages_hold_what_was_asked_for(num_pages, steps):
    reference = Reference(num_pages)
    for admit, sequence, which in steps:
        if admit:
            # Few different pages, so that prefixes meet.
            reference.admit(np.repeat(tokens(*sequence), 3)[: 4 * num_pages])
        else:
            reference.end(which)
        held = {page for _, pages in reference.held for page in pages}
        assert reference.pool.num_held == len(held)
    while reference.held:
        reference.end(0)
    assert sorted(reference.pool.allocate(num_pages)) == list(range(num_pages))
