"""Segments of shared memory: their size, the processes that may map them, and removal after a worker's end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmpool.rows import segment as segment_file
from lmpool.rows import shared_memory
from lmpool.rows.segment import Segment, SegmentListener, default_size, make_segment, remove_abandoned
from lmpool.rows.shared_memory import SEALS, Reference, SegmentReader, host_token, receive_segment, segments_in
from tests.shared.rows.segments import (  # noqa: F401
    SLOT,
    V,
    make,
    place_fixture,
    prompt,
    put,
    reader_fixture,
    refresh,
    segment_fixture,
)
from tests.support.pool import DEADLINE_S


def test_readers_release_a_segment_without_socket_and_its_worker_creates_the_socket_again(
    segment: Segment, reader: SegmentReader, place: Path
) -> None:
    put(segment, 1)
    assert segment.keep_name()
    (path,) = place.iterdir()
    path.unlink()
    assert reader.find(prompt(1), V) is not None  # The reader still has the segment mapped.
    refresh(reader)
    assert reader.find(prompt(1), V) is None
    assert not segment.keep_name()
    refresh(reader)
    assert reader.find(prompt(1), V) is not None
    assert list(place.iterdir()) == [path]


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_SHRINK, SEALS & ~0x10])
def test_unsealed_memory_is_not_mapped(place: Path, seals: int) -> None:
    fd = os.memfd_create("lmpool-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100_000)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    listener = SegmentListener(fd, place / "lmpool-x")
    with pytest.raises(OSError, match="not sealed"):
        receive_segment(place / "lmpool-x", DEADLINE_S)
    listener.close()
    os.close(fd)


@pytest.mark.parametrize(("mode", "owner"), [(0o702, 0), (0o720, 0), (0o700, 1)])
def test_a_folder_that_other_users_can_write_to_is_not_used(
    segment: Segment, reader: SegmentReader, place: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int
) -> None:
    (path,) = place.iterdir()
    memory = receive_segment(path, DEADLINE_S)
    assert len(memory) == segment.size
    user, others = os.geteuid(), place.parent / f"lmpool-{os.geteuid() + owner}"
    place.rename(others)
    others.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: user + owner)
    text = f"user {user} owns the folder, and its mode is {mode:o}; user {user + owner} must own it, mode 700"
    with pytest.raises(PermissionError, match=text):
        receive_segment(others / path.name, DEADLINE_S)
    with pytest.raises(PermissionError, match=f"{others}: .*LMPOOL_SHM_DIR"):
        make_segment("fp", V, 64 * SLOT, lambda: True)
    refresh(reader)
    assert not reader.has_any
    assert [*others.iterdir()] == [others / path.name]
    others.rename(place)


def test_only_the_folder_of_this_user_is_scanned(
    segment: Segment, reader: SegmentReader, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(segment, 1)
    scanned: list[str] = []
    scandir = os.scandir

    def scan(path: str) -> Iterator[os.DirEntry[str]]:
        scanned.append(os.path.realpath(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        refresh(reader)
        make().close()
    assert reader.find(prompt(1), V) is not None
    assert set(scanned) == {str(place)}


async def test_a_scan_does_not_block_the_event_loop(
    segment: Segment, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def scan(place: Path) -> Iterator[Path]:
        threads.append(threading.get_ident())
        return segments_in(place)

    monkeypatch.setattr(shared_memory, "segments_in", scan)
    reader = SegmentReader()
    await reader.refresh("fp")
    assert reader.has_any
    assert threads
    assert threading.get_ident() not in threads
    reader.close()


def test_a_worker_creates_the_folder_again_after_its_removal(place: Path) -> None:
    place.rmdir()
    segment = make()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    shutil.rmtree(place)
    assert not segment.keep_name()
    assert len(list(place.iterdir())) == 1
    segment.close()


def test_a_segment_whose_socket_another_worker_removes_before_it_listens_is_found(
    reader: SegmentReader, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder = shared_memory.own_folder

    @contextmanager
    def swept(path: Path, **options: bool) -> Iterator[str]:
        with own_folder(path, **options) as opened:
            yield opened
        for file in path.iterdir():
            file.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "own_folder", swept)
        segment = make()
    put(segment, 1)
    segment.keep_name()
    refresh(reader)
    assert reader.find(prompt(1), V) is not None
    segment.close()


@pytest.mark.parametrize("size", [0, 40, 5000])
def test_memory_that_is_no_segment_is_refused(place: Path, size: int) -> None:
    fd = os.memfd_create("lmpool-test", os.MFD_ALLOW_SEALING)
    os.write(fd, (b"LMPSHM\x01\x00" + bytes(size))[:size])
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    listener = SegmentListener(fd, place / f"lmpool-{bytes(8).hex()}")
    reader = SegmentReader()
    refresh(reader)
    assert not reader.has_any
    assert reader.read(Reference(host_token(), bytes(8), 1), prompt(1), V) is None
    listener.close()
    os.close(fd)


def test_the_folder_may_have_a_long_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of segments work in a folder with a long name, although a socket's path has at most 107 bytes."""
    folder = place / ("x" * 200)
    folder.mkdir()
    monkeypatch.setenv("LMPOOL_SHM_DIR", str(folder))
    segment, reader = make(), SegmentReader()
    put(segment, 1)
    refresh(reader)
    assert reader.find(prompt(1), V) is not None
    segment.close()
    assert list(shared_memory.folder().iterdir()) == []
    assert shared_memory.folder().parent == folder


def test_files_that_are_no_segments_are_ignored(place: Path) -> None:
    (place / "lmpool-nothex").write_bytes(b"x")
    (place / f"lmpool-{'00' * 8}").write_bytes(b"LMPSHM" + bytes(5000))
    (place / f"lmpool-{'11' * 8}").symlink_to("/etc/passwd")
    (place / "somebody").write_bytes(b"x")
    reader = SegmentReader()
    refresh(reader)
    assert not reader.has_any
    assert reader.read(Reference(host_token(), bytes(8), 1), prompt(1), V) is None


def test_memory_that_another_process_shrinks_before_it_is_sealed_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def allocate_and_shrink(fd: int, at: int, size: int) -> None:
        allocate(fd, at, size)
        os.ftruncate(fd, SLOT)

    monkeypatch.setattr(os, "posix_fallocate", allocate_and_shrink)
    with pytest.raises(OSError, match="another process has shrunk the memory"):
        make_segment("fp", V, 64 * SLOT, lambda: True)
    assert list(place.iterdir()) == []


def test_a_segment_that_is_too_small_or_too_large_is_not_created(place: Path) -> None:
    assert make_segment("fp", V, 63 * SLOT, lambda: True) is None
    assert make_segment("fp", V, 64 * SLOT, lambda: False) is None
    assert list(place.iterdir()) == []
    with pytest.raises(OSError, match="bytes more are needed, and") as raised:
        make_segment("fp", 2**28, 2**45, lambda: True)
    assert raised.value.errno == errno.ENOSPC
    assert list(place.iterdir()) == []
    assert 0 < default_size() <= 4 * 2**30


WITHOUT_SEALS = """
import errno, fcntl, os
names = ("F_SEAL", "F_ADD_SEALS", "F_GET_SEALS", "MFD", "memfd")
for module in (fcntl, os):
    for name in [name for name in vars(module) if name.startswith(names)]:
        delattr(module, name)
from lmpool.producer import Producer
from lmpool.rows.segment import make_segment
try:
    make_segment("fp", 1500, 2**20, lambda: True)
except OSError as error:
    assert error.errno == errno.ENOSYS, error
    print(error)
"""


def test_python_without_sealed_memory_raises_an_os_error(place: Path) -> None:
    """A segment cannot be made where Python lacks memfd_create, as on macOS, or the names of seals."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_SEALS], capture_output=True, text=True, check=True)
    assert "memfd_create" in done.stdout


def test_a_socket_that_does_not_listen_yet_is_not_removed(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as new:
        new.bind(str(place / f"lmpool-{'00' * 8}"))
        remove_abandoned(place)
        (path,) = place.iterdir()
        os.utime(path, (0, 0))
        remove_abandoned(place)
        assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("used", "reclaimable", "free"), [(7 * 2**30, 0, 2**30), (7 * 2**30, 2**30, 2 * 2**30), (9 * 2**30, 0, 0)]
)
def test_memory_that_a_container_uses_is_not_free(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, reclaimable: int, free: int
) -> None:
    usage, details = tmp_path / "memory.current", tmp_path / "memory.stat"
    usage.write_text(f"{used}\n")
    details.write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 9\n")
    monkeypatch.setattr(segment_file, "_CONTAINER_MEMORY", ((str(usage), str(details), "inactive_file "),))
    monkeypatch.setattr(segment_file, "physical_memory", lambda: 8 * 2**30)
    assert default_size() == free // 8
    if not free:
        with pytest.raises(OSError, match="bytes more are needed"):
            make_segment("fp", V, 64 * SLOT, lambda: True)


def test_a_missing_folder_raises_an_os_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMPOOL_SHM_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(OSError):  # noqa: PT011
        make_segment("fp", V, 64 * SLOT, lambda: True)
    assert host_token() == b""
    reader = SegmentReader()
    refresh(reader)
    assert not reader.has_any


def test_only_this_user_can_use_the_socket(segment: Segment, place: Path) -> None:
    (path,) = place.iterdir()
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name == f"lmpool-{segment.nonce.hex()}"


def test_the_socket_of_a_killed_worker_is_removed_by_the_next(place: Path) -> None:
    code = (
        "import time\nfrom lmpool.rows.segment import make_segment\n"
        f"segment = make_segment('fp', {V}, {64 * SLOT}, lambda: True)\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (path,) = place.iterdir()
        remove_abandoned(place)
        assert path.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while path.exists() and time.monotonic() < deadline:
        make().close()
    assert not path.exists()
    assert list(place.iterdir()) == []


def test_a_row_can_be_found_only_after_the_whole_row_was_written(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(segment, 1)
    seen: list[int | None] = []
    write = Segment._write

    def look_up_and_write(self: Segment, digest: bytes, *arguments: Any, **options: Any) -> None:
        seen.append(self.find(digest))
        write(self, digest, *arguments, **options)
        seen.append(self.find(digest))

    monkeypatch.setattr(Segment, "_write", look_up_and_write)
    number = put(segment, 2).number
    assert seen == [None, None]
    assert segment.find(prompt(2)) == number
