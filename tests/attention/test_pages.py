"""Reference counts of pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_jax.attention import OutOfPages, PagePool


def test_pages_are_free_again_after_their_last_holder():
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert pages == [0, 1, 2] and pool.num_free == 1
    pool.share(pages[:2])
    pool.release(pages)
    assert pool.num_free == 2
    pool.release(pages[:2])
    assert pool.num_free == 4


def test_too_many_pages_take_none():
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="2 pages were asked for and 1 of 2 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_free_page_cannot_be_shared_or_released():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    for act in (pool.share, pool.release):
        with pytest.raises(ValueError, match="Page 1 is held 0 times"):
            act([1])
    with pytest.raises(ValueError, match="Page 0 is held 1 times, not 2"):
        pool.release([page, page])
    assert pool.num_free == 1


@pytest.mark.parametrize(
    ("length", "shared", "copied"), [(256, 2, 0), (257, 2, 1), (128, 1, 0), (5, 0, 1)]
)
def test_fork_shares_full_pages_and_copies_a_partial_one(length, shared, copied):
    pool = PagePool(8)
    pages = pool.allocate(-(-length // 128))
    other, copies = pool.fork(pages, length, 128)
    assert other[:shared] == pages[:shared]
    assert len(other) == len(pages)
    assert copies == [(pages[-1], other[-1])] * copied
    pool.release(pages)
    assert pool.num_free == 8 - len(other)
    pool.release(other)
    assert pool.num_free == 8


def test_a_fork_without_room_shares_nothing():
    pool = PagePool(2)
    pages = pool.allocate(2)
    with pytest.raises(OutOfPages):
        pool.fork(pages, 129, 128)
    pool.release(pages)
    assert pool.num_free == 2


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 4))
def test_every_page_comes_back(lengths, samples):
    pool = PagePool(200)
    held = []
    for length in lengths:
        pages = pool.allocate(-(-length // 128))
        held.append(pages)
        for _ in range(samples):
            other, _ = pool.fork(pages, length, 128)
            full = length // 128
            assert other[:full] == pages[:full]
            assert not set(other[full:]) & set(pages)
            held.append(other)
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 200
