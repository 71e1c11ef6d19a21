"""Fixtures with segments of shared memory and their readers, and rows to write to segments."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmpool.protocol.job import digest_of
from lmpool.protocol.row import Encoding, Row, RowBlock
from lmpool.rows import shared_memory
from lmpool.rows.segment import Segment, make_segment
from lmpool.rows.shared_memory import Reference, SegmentReader, folder, host_token
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S

V = 1500
SLOT = 8192
"""Bytes of a slot for rows of V entries, rounded up to whole pages."""


@pytest.fixture(name="place", autouse=True)
def place_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, in a memory file system, of the segments of the current user."""
    with tempfile.TemporaryDirectory(dir=os.environ["LMPOOL_SHM_DIR"]) as machine:
        monkeypatch.setenv("LMPOOL_SHM_DIR", machine)
        # A reader skips a segment whose thread does not answer within 0.1 s. On a busy machine, it may answer later.
        monkeypatch.setattr(shared_memory, "_ANSWER_S", DEADLINE_S)
        monkeypatch.setattr(shared_memory, "_ALL_ANSWER_S", DEADLINE_S)
        folder().mkdir(mode=0o700)
        yield folder()


def make(slots: int = 64) -> Segment:
    segment = make_segment("fp", V, slots * SLOT, lambda: True)
    assert segment is not None
    assert segment.slots == slots
    return segment


@pytest.fixture(name="segment")
def segment_fixture() -> Iterator[Segment]:
    """A segment of shared memory with 64 slots."""
    segment = make()
    yield segment
    segment.close()


@pytest.fixture(name="reader")
def reader_fixture(segment: Segment) -> Iterator[SegmentReader]:
    """A reader that has mapped the fixture `segment`."""
    reader = SegmentReader()
    refresh(reader)
    yield reader
    reader.close()


def refresh(reader: SegmentReader, fingerprint: str = "fp") -> None:
    asyncio.run(reader.refresh(fingerprint))


def prompt(number: int) -> bytes:
    return digest_of(number.to_bytes(4, "little"))


def row_of(number: int) -> Row:
    return synthetic_row([number], vocab_size=V)


def put(segment: Segment, number: int) -> Reference:
    written = write_row(segment, number, row_of(number))
    assert written is not None
    return Reference(host_token(), segment.nonce, written)


def write_row(segment: Segment, name: int, row: Row) -> int | None:
    """Write one row; return the row's number in the segment, or None if it was not written."""
    block = RowBlock([prompt(name)], row[None], None, Encoding.F32)
    (number,) = segment.write(block.digests, block.encoded())
    return number
