"""Redis servers whose clock a test sets, so that keys expire without a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from lmpool.embedded import EmbeddedServer
from tests.support.pool import Pool, until

SetClock = Callable[[str], None]


@pytest.fixture
def clock(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """A function that shifts the wall clock of the servers that the test starts, such as "+1d" or "-5s"."""
    library, offset = files("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1", short_dir / "clock"
    offset.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")

    def set_clock(by: str) -> None:
        written = short_dir / "written"
        written.write_text(by)
        written.rename(offset)

    return set_clock


@pytest.fixture
def clocked(
    clock: SetClock, short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pool, SetClock]]:
    """A pool on a server with a settable clock."""
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s") as server:
        monkeypatch.delenv("LD_PRELOAD")  # Do not shift the clocks of processes started later.
        pool = Pool(server.url, "clock", tmp_path)

        def set_and_seen(by: str) -> None:
            before = ahead(pool)
            clock(by)
            until(lambda: abs(ahead(pool) - before) > 1, "the server sees its new clock")

        yield pool, set_and_seen
        pool.end()


def ahead(pool: Pool) -> float:
    """Server clock minus local clock, in seconds."""
    seconds, micros = pool.redis.time()
    return float(seconds + micros / 1e6 - time.time())
