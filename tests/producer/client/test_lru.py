"""The producer's own cache: limited in bytes, with least-recently-used eviction."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.producer.client.requests import RowLRU
from lmpool.protocol.row import Row


def row(size: int = 4, value: float = 0.0) -> Row:
    """A row of `4 * size` bytes."""
    return np.full(size, value, np.float32)


def keys(lru: RowLRU, *digests: bytes) -> list[bytes]:
    """Return the digests whose rows are in the cache; these lookups change the order of eviction."""
    return [digest for digest in digests if lru.get(digest) is not None]


def test_get_returns_the_array_that_was_put() -> None:
    lru, kept = RowLRU(100), row()
    lru.put(b"a", kept)
    assert lru.get(b"a") is kept
    assert lru.get(b"b") is None


def test_rows_fill_the_limit_to_the_last_byte_and_not_beyond() -> None:
    lru = RowLRU(48)
    for digest in (b"a", b"b", b"c"):
        lru.put(digest, row())
    assert (len(lru), lru.size) == (3, 48)
    lru.put(b"d", row(1))
    assert (len(lru), lru.size) == (3, 36)
    assert keys(lru, b"a", b"b", b"c", b"d") == [b"b", b"c", b"d"]


def test_the_least_recently_used_row_is_evicted_first() -> None:
    lru = RowLRU(48)
    for digest in (b"a", b"b", b"c"):
        lru.put(digest, row())
    lru.get(b"a")
    lru.put(b"d", row())
    assert keys(lru, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"]


def test_putting_a_row_again_marks_it_as_used() -> None:
    lru = RowLRU(48)
    for digest in (b"a", b"b", b"c", b"a", b"d"):
        lru.put(digest, row())
    assert keys(lru, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"]


def test_a_row_of_shared_memory_is_kept_from_its_second_use_on() -> None:
    lru = RowLRU(48)
    for digest in (b"a", b"b", b"a"):
        lru.put(digest, row(), is_shared=True)
    lru.put(b"c", row())
    assert keys(lru, b"a", b"b", b"c") == [b"a", b"c"]
    lru.put(b"b", row(), is_shared=True)
    assert keys(lru, b"a", b"b", b"c") == [b"a", b"b", b"c"]


def test_first_uses_are_remembered_for_as_many_rows_as_fit() -> None:
    lru = RowLRU(48)
    for digest in (b"a", b"b", b"c", b"d", b"a", b"d"):
        lru.put(digest, row(), is_shared=True)
    assert keys(lru, b"a", b"b", b"c", b"d") == [b"d"]
    lru.clear()
    lru.put(b"c", row(), is_shared=True)
    assert keys(lru, b"c", b"d") == []


def test_a_miss_changes_nothing() -> None:
    lru = RowLRU(32)
    lru.put(b"a", row())
    lru.put(b"b", row())
    assert lru.get(b"x") is None
    lru.put(b"c", row())
    assert keys(lru, b"a", b"b", b"c") == [b"b", b"c"]


def test_replacing_a_row_counts_its_bytes_once() -> None:
    lru = RowLRU(100)
    lru.put(b"a", row(4, 1.0))
    lru.put(b"a", row(8, 2.0))
    assert (len(lru), lru.size) == (1, 32)
    cached = lru.get(b"a")
    assert cached is not None
    assert cached.tolist() == [2.0] * 8


def test_one_large_row_evicts_several_small_ones() -> None:
    lru = RowLRU(64)
    for digest in (b"a", b"b", b"c", b"d"):
        lru.put(digest, row())
    lru.put(b"e", row(12))
    assert keys(lru, b"a", b"b", b"c", b"d", b"e") == [b"d", b"e"]
    assert lru.size == 64


def test_a_row_over_the_limit_is_not_kept_and_evicts_nothing() -> None:
    lru = RowLRU(16)
    lru.put(b"a", row())
    lru.put(b"b", row(5))
    assert keys(lru, b"a", b"b") == [b"a"]


@pytest.mark.parametrize("limit", [0, 15])
def test_too_small_a_limit_keeps_nothing(limit: int) -> None:
    lru = RowLRU(limit)
    lru.put(b"a", row())
    assert (len(lru), lru.size, lru.get(b"a")) == (0, 0, None)


def test_clearing_drops_rows_and_bytes() -> None:
    lru = RowLRU(32)
    lru.put(b"a", row())
    lru.clear()
    assert (len(lru), lru.size, lru.get(b"a")) == (0, 0, None)
    lru.put(b"b", row())
    lru.put(b"c", row())
    assert len(lru) == 2


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from(["put", "get", "clear"]), st.sampled_from(b"abcdef"), st.integers(1, 8))),
)
def test_it_behaves_like_a_simple_lru_cache(limit: int, steps: list[tuple[str, int, int]]) -> None:
    lru, model = RowLRU(limit), OrderedDict[bytes, int]()
    for action, letter, size in steps:
        digest = bytes([letter])
        if action == "clear":
            lru.clear()
            model.clear()
        elif action == "get":
            cached = lru.get(digest)
            assert (None if cached is None else cached.nbytes) == model.get(digest)
            if digest in model:
                model.move_to_end(digest)
        elif 4 * size <= limit:
            lru.put(digest, row(size))
            model.pop(digest, None)
            model[digest] = 4 * size
            while sum(model.values()) > limit:
                model.popitem(last=False)
        else:
            lru.put(digest, row(size))
        assert lru.size == sum(model.values()) <= limit
        assert len(lru) == len(model)
