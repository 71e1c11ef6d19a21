"""Jobs and failures as messages: round trips, exact bytes, and ProtocolError for all malformed input."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.errors import ProtocolError
from lmpool.protocol.job import (
    WIRE_VERSION,
    Failure,
    Job,
    TracedJob,
    pack_jobs,
    unpack_failure,
    unpack_job,
    with_traceparent,
)

LIMIT = 16 * 1024 * 1024
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
readers = pytest.mark.parametrize("read", [unpack_job, unpack_failure])


def job(version: object = WIRE_VERSION, ids: object = b"\x01\0\0\0", adapter: object = "", fingerprint: object = "f",
        overwrite: object = False, query: object = b"", host: object = b"") -> bytes:  # fmt: skip
    """A job as MessagePack, with some fields replaced."""
    packed: bytes = msgpack.packb([version, ids, adapter, fingerprint, overwrite, query, host])
    return packed


def failure(version: object = WIRE_VERSION, kind: object = "WorkerError", text: object = "no") -> bytes:
    """A failure as MessagePack, with some fields replaced."""
    packed: bytes = msgpack.packb([version, kind, text])
    return packed


@given(st.binary(max_size=64), texts, texts, st.booleans(), st.binary(max_size=64), st.binary(max_size=64))
def test_jobs_survive_the_wire(
    ids: bytes, adapter: str, fingerprint: str, overwrite: bool, query: bytes, host: bytes
) -> None:
    sent = Job(ids, adapter, fingerprint, overwrite, query, host)
    assert unpack_job(sent.pack()) == sent


@given(texts, texts)
def test_failures_survive_the_wire(kind: str, text: str) -> None:
    assert unpack_failure(Failure(kind, text).pack()) == Failure(kind, text)


def test_the_wire_is_pinned_to_the_byte() -> None:
    # MessagePack encodes all token ids as one `bin` (byte c4), however many they are.
    assert Job(b"\x07\0\0\0", "a", "fp", True, b"\x09").pack().hex() == "9808c40407000000a161a26670c3c40109c400c400"
    assert Job(b"\x07\0\0\0", "a", "fp").pack()[-7:].hex() == "c2c400c400c400"
    assert Job(b"", "", "", host=b"here", socket=b"s").pack()[-9:].hex() == "c40468657265c40173"
    jobs = [Job(b"\x07\0\0\0", "a", "fp", True, b"\x09"), Job(b"", "", "")]
    assert pack_jobs(jobs) == [job.pack() for job in jobs]
    assert Failure("E", "no").pack().hex() == "9308a145a26e6f"


def test_a_job_of_a_client_that_traces_has_one_field_more() -> None:
    sent = Job(b"\x07\0\0\0", "a", "fp", True, b"\x09", b"here", b"socket")
    (packed,) = pack_jobs([sent])
    traced = with_traceparent(packed, "00-ab")
    assert traced.hex() == "99" + packed.hex()[2:] + b"\xa500-ab".hex()
    read = unpack_job(traced)
    assert read == TracedJob(b"\x07\0\0\0", "a", "fp", True, b"\x09", b"here", b"socket", "00-ab")
    assert read.pack() == traced
    for wrong in (b"\xc4\x0200", b"\xc0", b"\x07", b"\xa500-ab\xa0"):
        with pytest.raises(ProtocolError, match="not a job"):
            unpack_job(b"\x99" + packed[1:] + wrong)


def test_a_long_prompt_travels() -> None:
    ids = b"\x01\0\0\0" * 1_000_000
    assert unpack_job(Job(ids, "", "f").pack()).ids == ids


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 100_000, "\U0001f600" * 100_000])
def test_a_long_error_text_is_cut_and_still_reads_back(text: str) -> None:
    assert unpack_failure(Failure("WorkerError", text).pack()) == Failure("WorkerError", text[:4096])


WRONG_JOBS: dict[str, bytes] = {
    "empty": b"",
    "version 0": job(version=0),
    "version 1": job(version=1),
    "version 2": job(version=2),
    "version 3": job(version=3),
    "version 4": job(version=4),
    "version 6": job(version=6),
    "version 7": job(version=7),
    "version as text": job(version="5"),
    "version as a float": job(version=5.0),
    "version as a bool": job(version=True),
    "ids as text": job(ids="\x01"),
    "ids as a list": job(ids=[1, 2]),
    "ids as a number": job(ids=1),
    "no ids": job(ids=None),
    "adapter as bytes": job(adapter=b""),
    "adapter as None": job(adapter=None),
    "fingerprint as bytes": job(fingerprint=b"f"),
    "fingerprint as a number": job(fingerprint=1),
    "overwrite as a number": job(overwrite=1),
    "overwrite as None": job(overwrite=None),
    "ask as text": job(query="a"),
    "ask as None": job(query=None),
    "host as text": job(host="here"),
    "host as None": job(host=None),
    "ids as base64": job(ids="AQAAAA=="),
    "ask as base64": job(query="AQAAAA=="),
    "a field too few": msgpack.packb([5, b"\x01\0\0\0", "", "f", False, b""]),
    "two fields too few": msgpack.packb([5, b"\x01\0\0\0", "", "f", False]),
    "a field too many": msgpack.packb([5, b"\x01\0\0\0", "", "f", False, b"", b"", 0]),
    "a map": msgpack.packb({"ids": b""}),
    "an empty map": msgpack.packb({}),
    "a number": msgpack.packb(1),
    "bytes": msgpack.packb(b"\x01\0\0\0"),
    "a failure": failure(),
    "cut": job()[:-1],
    "followed by a byte": job() + b"\0",
    "twice": job() * 2,
    "text that is not UTF-8": job(adapter="zz").replace(b"zz", b"\xff\xfe"),
    "an extension type": msgpack.packb([5, msgpack.ExtType(5, b"abc"), "", "f", False, b"", b""]),
    "an empty extension type": b"\xc7\x00\x05",
    "a timestamp": msgpack.packb([msgpack.Timestamp(1, 2)]),
    "a byte that MessagePack never uses": b"\xc1",
}
WRONG_FAILURES: dict[str, bytes] = {
    "empty": b"",
    "version 1": failure(version=1),
    "version 2": failure(version=2),
    "version as a float": failure(version=5.0),
    "version as a bool": failure(version=True),
    "kind as bytes": failure(kind=b"WorkerError"),
    "text as bytes": failure(text=b"no"),
    "text as None": failure(text=None),
    "a field too few": msgpack.packb([5, "WorkerError"]),
    "a field too many": msgpack.packb([5, "WorkerError", "no", "more"]),
    "a job": job(),
    "cut": failure()[:-1],
    "followed by a byte": failure() + b"\0",
}


@pytest.mark.parametrize("data", WRONG_JOBS.values(), ids=WRONG_JOBS)
def test_other_bytes_than_a_job_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="job"):
        unpack_job(data)


@pytest.mark.parametrize("data", WRONG_FAILURES.values(), ids=WRONG_FAILURES)
def test_other_bytes_than_a_failure_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="failure"):
        unpack_failure(data)


def test_messages_of_another_release_are_refused_with_both_versions() -> None:
    older_job, older_failure = bytes.fromhex("9602c40407000000a161a26670c3c40109"), bytes.fromhex("9302a145a26e6f")
    hint = "wire version 2, and this release of lmpool speaks 8: run releases whose versions differ by at most 1"
    with pytest.raises(ProtocolError, match=f"a job of {hint}"):
        unpack_job(older_job)
    with pytest.raises(ProtocolError, match=f"a failure of {hint}"):
        unpack_failure(older_failure)
    with pytest.raises(ProtocolError, match="a job of wire version 10, and this release of lmpool speaks 8"):
        unpack_job(job(version=10))


@readers
@given(data=st.binary(max_size=80))
def test_random_bytes_are_refused(read: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data)


@given(st.data())
def test_a_changed_message_is_refused_or_is_another_well_typed_message(data: st.DataObject) -> None:
    for good, read in ((bytearray(job()), unpack_job), (bytearray(failure()), unpack_failure)):
        for _ in range(data.draw(st.integers(1, 3))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
        try:
            message: Any = read(bytes(good))
        except ProtocolError:
            continue
        if isinstance(message, Job):
            assert [type(field) for field in msgspec.structs.astuple(message)] == [
                bytes, str, str, bool, bytes, bytes, bytes,
            ]  # fmt: skip
        else:
            assert [type(field) for field in msgspec.structs.astuple(message)] == [str, str]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=5) | texts,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    )
)
def test_any_other_messagepack_is_refused(value: Any) -> None:
    data = msgpack.packb(value)
    for read in (unpack_job, unpack_failure):
        with pytest.raises(ProtocolError):
            read(data)


# Bombs: small messages that would become large objects if they were decoded


def peak_bytes(read: Callable[[bytes], object], data: bytes) -> int:
    """Peak of allocated bytes while a reader refuses a message."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tree_of_lists(depth: int) -> bytes:
    """Nested lists of eight lists each, `depth` levels deep; each list is encoded as one byte."""
    return b"\x90" if depth == 0 else b"\x98" + tree_of_lists(depth - 1) * 8


BOMBS: dict[str, bytes] = {
    "a million empty strings": b"\xdd" + (10**6).to_bytes(4, "big") + b"\xa0" * 10**6,
    "a list that claims four thousand million": b"\xdd\xff\xff\xff\xff",
    "a map that claims four thousand million": b"\xdf\xff\xff\xff\xff",
    "a list of a million empty lists": b"\xdd" + (10**6).to_bytes(4, "big") + b"\x90" * 10**6,
    "a map of many keys": b"\xdf" + (50_000).to_bytes(4, "big") + b"".join(b"\xa5%05d\xc0" % i for i in range(50_000)),
    "an extension that claims four gigabytes": b"\xc9\xff\xff\xff\xff\x05",
    "a bin that claims four gigabytes": b"\xc6\xff\xff\xff\xff",
    "a string that claims four gigabytes": b"\xdb\xff\xff\xff\xff",
    "lists within lists": b"\x91" * 100_000 + b"\x90",
    "a list of lists for every field": b"\x97" + (b"\xdd" + (10**5).to_bytes(4, "big") + b"\xa0" * 10**5) * 7,
}


@readers
@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_without_decoding_it(read: Callable[[bytes], object], data: bytes) -> None:
    assert peak_bytes(read, data) < 200_000


@pytest.mark.parametrize("depth", [5, 6], ids=["37 KB", "300 KB"])
def test_a_tree_of_lists_is_refused_without_decoding_it(depth: int) -> None:
    # If this message were decoded, each of its bytes would become a list of about 70 bytes.
    data = tree_of_lists(depth)
    assert peak_bytes(unpack_job, data) < 200_000 + 4 * len(data)


@settings(max_examples=3)
@given(st.binary(min_size=1, max_size=4))
def test_a_message_over_the_limit_is_refused_with_size_and_limit(end: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{LIMIT + len(end)} bytes .* {LIMIT}"):
        unpack_job(b"\x95" + bytes(LIMIT - 1) + end)
    with pytest.raises(ProtocolError, match="limit of 32768"):
        unpack_failure(bytes(32_768) + end)


def test_the_text_of_a_refusal_is_short() -> None:
    for value in (["x" * 100_000], [b"x" * 100_000, 1], "x" * 100_000):
        with pytest.raises(ProtocolError) as caught:
            unpack_job(msgpack.packb(value))
        assert len(str(caught.value)) < 200
