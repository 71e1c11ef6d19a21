"""What `lmpool up --detach` leaves behind, and `lmpool down`, which ends it.

The folder `detached` in this user's runtime folder has two files for each: what it is, in JSON, which it holds locked
(flock) as long as it lives, and its log. The lock tells a process from a stale file, whose number another may have.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from lmpool.cli import say
from lmpool.embedded import DETACHED, ending, explained, runtime_dir, secure
from lmpool.errors import ServerError

if sys.platform != "win32":
    import fcntl

READY_VARIABLE = "LMPOOL_READY_DESCRIPTOR"
"""Names a descriptor that a byte is written to when the worker serves, for what starts workers."""

_POLL_S = 0.05
_MOST_LOGS = 10
_MOST_RECORD = 4096
_STOPPED_NOW = 130


def tell_ready() -> None:
    """Tell whoever has started this process that it serves, once; see `READY_VARIABLE`."""
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ.pop(READY_VARIABLE))
        os.write(descriptor, b"1")
        os.close(descriptor)


def start(arguments: list[str], model: str) -> None:
    """Start `lmpool` with these arguments, in a session of its own, and return when it serves.

    Args:
        arguments: such as ["up", "MODEL"].
        model: what people know it by.

    Raises:
        Exit: it has ended before that, with its exit code; what it has said was passed on.
        ServerError: the runtime folder cannot be used.
    """
    folder = _folder()
    _prune(folder)
    name = secrets.token_hex(4)
    record, log = folder / f"{name}.json", folder / f"{name}.log"
    heard, told = os.pipe()
    lock = os.open(record, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lmpool", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock, told),
                env={**os.environ, READY_VARIABLE: str(told)},
            )
        os.close(told)
        os.pwrite(lock, json.dumps({"pid": process.pid, "model": model, "log": str(log)}).encode(), 0)
    finally:
        os.close(lock)
    with log.open("rb") as said:
        _await_serving(process, heard, said, record)
    say(f"{model} is served by process {process.pid}; its log: {log}", err=True)
    say("end it with: lmpool down", err=True)


def _await_serving(process: subprocess.Popen[bytes], heard: int, said: BinaryIO, record: Path) -> None:
    """Pass its log on until it serves."""
    try:
        while not select.select([heard], [], [], _POLL_S)[0]:
            _pass_on(said)
        serves = bool(os.read(heard, 1))
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        record.unlink(missing_ok=True)
        raise
    finally:
        os.close(heard)
        _pass_on(said)
    if not serves:
        code = process.wait()
        _pass_on(said)
        record.unlink(missing_ok=True)
        say(f"lmpool: it {ending(code)} before it served", err=True)
        raise typer.Exit(code if 0 < code < 256 else 1)


def _pass_on(said: BinaryIO) -> None:
    for line in said.read().decode("utf-8", "replace").splitlines():
        say(line, err=True)


def down(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the prompts that are being computed.")] = False,
) -> None:
    """End what you have started by `lmpool up --detach` on this machine, when it has finished what it computes."""
    ended = 0
    for record, lock in _records(_folder()):
        try:
            ended += _end(record, lock, now=now)
        finally:
            os.close(lock)
    if not ended:
        say("nothing runs here that `lmpool up --detach` has started")


def _end(record: Path, lock: int, *, now: bool) -> bool:
    """End one; False when nothing is left of it but its file, which is removed."""
    what = _read(lock)
    if is_running := not _is_free(lock):
        pid = what.get("pid")
        if type(pid) is not int or pid <= 1:
            raise ServerError(f"{record} does not say which process holds it: end that, and remove this file")
        # The lock is held, so this is that process and none that has got its number since.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if now else signal.SIGTERM)
        say(f"ending {what.get('model')}, process {pid}")
        while not _is_free(lock) and Path(f"/proc/{pid}").exists():
            time.sleep(_POLL_S)
    record.unlink(missing_ok=True)
    return is_running


def _folder() -> Path:
    folder = runtime_dir()
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secure(folder)
        (folder / DETACHED).mkdir(mode=0o700, exist_ok=True)
        secure(folder / DETACHED)
    return folder / DETACHED


def _records(folder: Path) -> Iterator[tuple[Path, int]]:
    """What each is kept in, with a descriptor that the caller closes."""
    for record in sorted(folder.glob("*.json")):
        with suppress(OSError):  # Another has removed it, or it is something else.
            yield record, os.open(record, os.O_RDWR | os.O_NOFOLLOW)


def _prune(folder: Path) -> None:
    """Remove what is stale, and all but the last logs of what has ended."""
    for record, lock in _records(folder):
        if _is_free(lock):
            record.unlink(missing_ok=True)
        os.close(lock)
    logs = [log for log in folder.glob("*.log") if not log.with_suffix(".json").exists()]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime)[:-_MOST_LOGS]:
        log.unlink(missing_ok=True)


def _is_free(lock: int) -> bool:
    """Whether nobody holds it; then this descriptor does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(lock: int) -> dict[str, Any]:
    try:
        what = json.loads(os.pread(lock, _MOST_RECORD, 0))
    except ValueError:
        return {}
    return what if isinstance(what, dict) else {}
