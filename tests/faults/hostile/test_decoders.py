"""Decoders read valid bytes, and refuse all other bytes with little memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from functools import partial

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import ProtocolError
from lmpool.protocol.job import Failure, Job, unpack_failure, unpack_job
from lmpool.protocol.model_info import MAX_INFO_BYTES, ModelInfo
from lmpool.protocol.picks import top
from lmpool.protocol.query import pack_token, pack_top, unpack_query, unpack_token, unpack_top
from lmpool.protocol.row import HEADER_SIZE, Encoding, check_row, decode_alike, decode_entries, decode_row
from lmpool.synthetic import synthetic_row
from lmpool.vocabulary import Vocabulary
from tests.faults.hostile import strategies as hostile
from tests.faults.hostile.cases import cases

V = 64
ROW = hostile.encoded_row([1, 2], V)
MIB = 2**20


@cases(250)
@given(hostile.jobs("f"))
def test_decoded_bytes_are_a_valid_job_or_refused(data: bytes) -> None:
    try:
        job = unpack_job(data)
    except ProtocolError:
        return
    assert unpack_job(job.pack()) == job
    assert list(map(type, msgspec.structs.astuple(job))) == [bytes, str, str, bool, bytes, bytes, bytes]


@cases(250)
@given(hostile.asks | hostile.odd_bytes)
def test_decoded_bytes_are_a_valid_query_or_refused(data: bytes) -> None:
    try:
        query = unpack_query(data)
    except ProtocolError:
        return
    assert unpack_query(query.pack()) == query


@cases(200)
@given(hostile.failures | hostile.mutated(hostile.failures) | hostile.odd_bytes)
def test_decoded_bytes_are_a_valid_failure_or_refused(data: bytes) -> None:
    try:
        failure = unpack_failure(data)
    except ProtocolError:
        return
    assert unpack_failure(failure.pack()) == Failure(failure.kind, failure.text[:4096])


@cases(200)
@given(hostile.infos)
def test_decoded_bytes_are_a_possible_info_or_refused(data: bytes) -> None:
    try:
        info = ModelInfo.unpack(data)
    except ProtocolError:
        return
    assert ModelInfo.unpack(info.pack()) == info
    assert 1 <= info.vocab_size < 2**32
    assert math.isfinite(info.lease_s)
    assert info.row_encoding in Encoding
    assert len(info.fingerprint) == 32


@cases(100)
@given(hostile.vocabularies | hostile.mutated(hostile.vocabularies) | hostile.noise)
def test_decoded_bytes_are_a_valid_vocabulary_or_refused(data: bytes) -> None:
    try:
        vocabulary = Vocabulary.unpack(data)
    except ProtocolError:
        return
    assert vocabulary.pack() == data
    assert Vocabulary(vocabulary.tokens) == vocabulary


def read(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return check_row(decode_row(np.frombuffer(bytearray(data), np.uint8), V))


def test_a_valid_row_is_read() -> None:
    assert np.array_equal(read(ROW), synthetic_row([1, 2], vocab_size=V))


@cases(250)
@given(hostile.spoilt_rows(ROW))
def test_bytes_that_are_no_row_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data)


@cases(150)
@given(hostile.mutated(st.sampled_from([ROW, hostile.encoded_row([3], V, dtype=Encoding.F16)])))
def test_a_row_that_passes_the_checks_has_log_probabilities_of_that_length(data: bytes) -> None:
    try:
        row = read(data)
    except ProtocolError:
        return
    assert row.shape == (V,)
    assert not np.isnan(row).any()
    assert -math.log(V) - 1 <= row.max() <= 1


@cases(150)
@given(
    st.lists(hostile.mutated(st.just(ROW[: HEADER_SIZE + 8])) | st.just(ROW[: HEADER_SIZE + 8]), min_size=1, max_size=3)
)
def test_entries_read_together_equal_entries_read_one_by_one(entries: list[bytes]) -> None:
    together = decode_alike(entries, V, 2)
    apart = []
    for data in entries:
        try:
            apart.append(decode_entries(data, V, 2))
        except ProtocolError:
            assert together is None
    if together is not None:
        assert np.array_equal(together, apart)


TOP = pack_top(top(synthetic_row([1], vocab_size=V), 4))


@cases(150)
@given(hostile.mutated(st.just(TOP.tobytes())) | st.binary(min_size=32, max_size=32))
def test_decoded_top_k_tokens_are_possible_for_a_row(data: bytes) -> None:
    if len(data) != TOP.nbytes:  # The caller of `unpack_top` checks the length.
        return
    try:
        likeliest = unpack_top(np.frombuffer(data, np.float32), V)
    except ProtocolError:
        return
    assert len(set(likeliest.ids.tolist())) == 4
    assert 0 <= likeliest.ids.min() <= likeliest.ids.max() < V
    assert (np.diff(likeliest.values) <= 0).all()
    assert -math.log(V) - 1 <= likeliest.values[0] <= 1


def test_top_k_tokens_that_repeat_or_are_out_of_order_are_refused() -> None:
    values, ids = TOP[:4], TOP[4:]
    for wrong in ((values[::-1], ids), (values, ids[[0, 0, 1, 2]]), (values - 20, ids), (values + 20, ids)):
        with pytest.raises(ProtocolError):
            unpack_top(np.concatenate(wrong), V)
    with pytest.raises(ProtocolError):
        unpack_token(pack_token(V), V)


# Memory


def peak(work: Callable[[], object]) -> int:
    """Call a function that refuses a value; return the peak of allocated bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LIMITS: dict[Callable[[bytes], object], int] = {
    unpack_job: 16 * MIB,
    unpack_query: 8 * MIB,
    unpack_failure: 8 * 4096,
    ModelInfo.unpack: MAX_INFO_BYTES,
}
BOMBS = {
    "empty texts in arrays": b"\x98" + (b"\xdd" + (2**21).to_bytes(4, "big") + b"\xa0" * 2**21) * 8,
    "small arrays in arrays": b"\x98" * 2**20 + b"\x90" * 7 * 2**20,
    "a tree of arrays": b"\x98" + (b"\x98" + b"\x98\xa0\xa0\xa0\xa0\xa0\xa0\xa0\xa0" * 8) * 2**15,
    "maps": b"\x98" + (b"\xdf\x00\x10\x00\x00" + b"\xa1a\xc0" * 2**20) * 5,
    "one array of many nothings": b"\xdd\x00\xff\xff\xff" + b"\xc0" * (16 * MIB - 6),
    "a text": b"\xdb\x00\xff\xff\xfa" + b"\x00" * (16 * MIB - 6),
    "bytes that print four times as long": msgpack.packb([2, b"\x00" * (15 * MIB), "", "", "no", b""]),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("reader", LIMITS)
def test_a_decompression_bomb_takes_at_most_a_few_times_the_limit(
    reader: Callable[[bytes], object], bomb: bytes
) -> None:
    limit = LIMITS[reader]
    assert peak(lambda: reader(bomb)) <= 3 * limit
    if len(bomb) > limit:
        # The reader refuses a large message by its size, without decoding a byte.
        assert peak(lambda: reader(bomb)) <= 64 * 1024


@pytest.mark.parametrize("reader", LIMITS)
def test_a_decompression_bomb_of_the_allowed_size_takes_little_memory(reader: Callable[[bytes], object]) -> None:
    size = LIMITS[reader]
    for head in (b"\x98" * 600, b"\xdd\x00\x01\x00\x00", b"\xdf\x00\x01\x00\x00"):
        for filling in (b"\xa0", b"\x90", b"\xc0", b"\xa1a"):
            bomb = (head + filling * size)[:size]
            assert peak(partial(reader, bomb)) <= 3 * size + 256 * 1024


def test_a_vocabulary_that_claims_to_be_large_takes_no_memory() -> None:
    header = Vocabulary([b"a"]).pack()[:8]
    claim = header + (4_000_000).to_bytes(4, "little") + (32 * MIB).to_bytes(4, "little")
    assert peak(lambda: Vocabulary.unpack(claim + bytes(100))) <= 64 * 1024


def test_the_largest_job_is_read_with_little_more_memory_than_its_size() -> None:
    data = Job(bytes(8 * MIB), "", "f", query=bytes(7 * MIB)).pack()
    tracemalloc.start()
    job = unpack_job(data)
    assert tracemalloc.get_traced_memory()[1] <= 2 * len(data)
    tracemalloc.stop()
    assert len(job.ids) == 8 * MIB
