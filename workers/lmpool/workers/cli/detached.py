"""What `lmpool up --detach` leaves behind, and `lmpool down`, which ends it.

The folder `detached` in this user's runtime folder has two files for each: a record, in JSON, and a log. The process
itself writes its record, under another name until it is whole, and holds it locked from then until its end, by a POSIX
lock, which no fork inherits. So a record that is locked names the process that holds it, and any other is stale: the
number in it may be another's by now.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import typer

from lmpool.cli import say
from lmpool.embedded import DETACHED, clear, ending, explained, is_owned, runtime_dir, secure
from lmpool.errors import ServerError, SettingsError
from lmpool.settings import shown

if sys.platform != "win32":
    import fcntl

READY_VARIABLE = "LMPOOL_READY_DESCRIPTOR"
"""Names a descriptor that a byte is written to when the worker serves, for what starts workers."""

# Becomes `lmpool` by exec, which keeps the lock and the process id.
_LAUNCH = """
import fcntl, json, os, sys
new, record, text = sys.argv[1:4]
try:
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
    os.write(lock, json.dumps({"pid": os.getpid(), **json.loads(text)}).encode())
    os.rename(new, record)
except OSError as error:
    sys.exit(f"lmpool: {record}: {error.strerror}")
os.set_inheritable(lock, True)
os.execv(sys.argv[4], sys.argv[4:])
"""

# The bytes of a record that are locked: by the process that it is about, and by whoever tells that one to end.
_RUNNING, _TELLING = 0, 1
_RECORD, _NEW, _LOG = ".json", ".new", ".log"
_POLL_S = 0.05
# After which a record that is neither whole nor locked will not be any more.
_OLD_S = 60.0
# Between the two signals of `--now`, which would be one if the first had not arrived; and until it is killed.
_APART_S, _PATIENCE_S = 0.25, 5.0
_MAX_LOGS = 10
_MAX_RECORD = 4096
_MAX_READ = _MAX_LINE = 1 << 16


class Lines:
    """Cuts what a process prints into lines, as soon as they are whole; a carriage return ends one too.

    What is no UTF-8 is replaced, and a line of more than 65,536 characters is several.
    """

    def __init__(self) -> None:
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._rest = ""

    def add(self, printed: bytes, *, is_last: bool = False) -> list[str]:
        """The lines that end in what was printed next; with `is_last` also what has no end."""
        *lines, rest = (self._rest + self._decoder.decode(printed, final=is_last)).split("\n")
        if is_last or len(rest) > _MAX_LINE:
            lines, rest = [*lines, *([rest] if rest else [])], ""
        self._rest = rest
        return [line[at : at + _MAX_LINE] for line in lines for at in range(0, max(1, len(line)), _MAX_LINE)]


def tell_ready() -> None:
    """Tell whoever has started this process that it serves, once; see `READY_VARIABLE`."""
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ.pop(READY_VARIABLE))
        os.write(descriptor, b"1")
        os.close(descriptor)


def kill(pid: int) -> None:
    """End a process and, if it leads its group, what it has started there, at once."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


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
    new, record, log = (folder / f"{name}{suffix}" for suffix in (_NEW, _RECORD, _LOG))
    heard, told = os.pipe()
    with ExitStack() as opened:
        opened.callback(os.close, heard)
        try:
            with log.open("xb") as output:
                process = subprocess.Popen(
                    [*launch(new, record, {"model": model, "log": str(log)}), "-P", "-m", "lmpool", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(told,),
                    env={**os.environ, READY_VARIABLE: str(told)},
                )
        finally:
            os.close(told)
        try:
            code = _await_serving(process, heard, opened.enter_context(log.open("rb")))
        finally:
            if process.poll() is not None:
                clear(folder, new.name, record.name)
    if code is not None:
        say(f"lmpool: it {ending(code)} before it served; its log: {log}", err=True)
        raise typer.Exit(code if 0 < code < 256 else 1)
    say(f"{model} is served by process {process.pid}; its log: {log}", err=True)
    say("end it with: lmpool down", err=True)


def launch(new: Path, record: Path, what: dict[str, Any]) -> list[str]:
    """The command that becomes this Python, whose arguments follow, once the record is whole and locked."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(new), str(record), json.dumps(what), sys.executable]


def _await_serving(process: subprocess.Popen[bytes], heard: int, said: BinaryIO) -> int | None:
    """Pass its log on until it serves; returns its exit code when it has ended before that."""
    lines = Lines()
    try:
        # Not until the pipe ends: what the process has started may hold it open.
        while process.poll() is None and not select.select([heard], [], [], _POLL_S)[0]:
            _pass_on(said, lines)
        serves = select.select([heard], [], [], 0)[0] and os.read(heard, 1)
        return None if serves else process.wait()
    except KeyboardInterrupt:
        say("ending it; Ctrl-C once more ends it at once", err=True)
        try:
            process.terminate()
            process.wait()
        except KeyboardInterrupt:
            kill(process.pid)
            process.wait()
        raise
    finally:
        _pass_on(said, lines)
        for line in lines.add(b"", is_last=True):
            say(line, err=True)


def _pass_on(said: BinaryIO, lines: Lines) -> None:
    while printed := said.read(_MAX_READ):
        for line in lines.add(printed):
            say(line, err=True)


class _Pool(NamedTuple):
    """What runs: its record, the descriptor of that, its process, and what people know it by."""

    record: Path
    lock: int
    pid: int
    model: str


def down(
    model: Annotated[str | None, typer.Argument(help="Name of the model to end (default: all of them).")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the prompts that are being computed.")] = False,
) -> None:
    """End what you have started by `lmpool up --detach` on this machine, when it has finished what it computes."""
    pools: list[_Pool] = []
    nameless: list[Path] = []
    others: set[str] = set()
    with ExitStack() as opened:
        for record, lock in _records(_folder(), _RECORD):
            opened.callback(os.close, lock)
            if not _is_held(lock):
                record.unlink(missing_ok=True)
                continue
            what = _read(lock)
            pid = what.get("pid")
            if model is not None and what.get("model") != model:
                others.add(str(what.get("model")))
            elif type(pid) is int and pid > 1:
                pools.append(_Pool(record, lock, pid, str(what.get("model"))))
            else:
                nameless.append(record)
        _end(pools, now=now)
    if nameless:
        names = ", ".join(map(str, nameless))
        raise ServerError(f"{names} does not say which process holds it: end that, and remove this file")
    if not pools and others:
        running = ", ".join(sorted(map(repr, others)))
        raise SettingsError(f"model: no `lmpool up --detach` here serves {shown(model)}; running: {running}")
    if not pools:
        say(f"nothing runs here that `lmpool up --detach` has started{_others()}")


def _others() -> str:
    """What to do about an `lmpool up` that a terminal waits for, as the end of a sentence; "" where there is none."""
    with explained(folder := runtime_dir()):
        if is_owned(folder):
            return "; your server runs: an `lmpool up` of another terminal is ended there, by Ctrl-C"
    return ""


def _end(pools: list[_Pool], *, now: bool) -> None:
    """Tell all of them to end, then wait until they have."""
    left, began, is_told_again = pools, time.monotonic(), False
    try:
        for pool in pools:
            is_new = _tell(pool, now=now)
            say(f"ending {pool.model}, process {pool.pid}{'' if is_new else ', which was told so before'}")
        while left := [pool for pool in left if _is_held(pool.lock)]:
            waited = time.monotonic() - began
            if now and waited > _PATIENCE_S:
                for pool in left:
                    kill(pool.pid)
            elif now and waited > _APART_S and not is_told_again:
                # The second signal ends it and its workers at once, also those that hear of nothing any more.
                is_told_again = True
                for pool in left:
                    _terminate(pool)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        for pool in left:
            say(f"{pool.model}, process {pool.pid}, still runs: it finishes what it computes", err=True)
        say("to wait for that: lmpool down; to end it at once: lmpool down --now", err=True)
        raise
    for pool in pools:
        pool.record.unlink(missing_ok=True)
    if pools:
        say("ended")


def _tell(pool: _Pool, *, now: bool) -> bool:
    """Tell it to end; False when it has been told before, for a second signal would have it drop what it computes."""
    fcntl.lockf(pool.lock, fcntl.LOCK_EX, 1, _TELLING)
    try:
        what = _read(pool.lock)
        is_new = not what.get("is_ending")
        if is_new or now:
            _terminate(pool)
            os.pwrite(pool.lock, json.dumps({**what, "is_ending": True}).encode(), 0)
    finally:
        fcntl.lockf(pool.lock, fcntl.LOCK_UN, 1, _TELLING)
    return is_new


def _terminate(pool: _Pool) -> None:
    # Its lock is held, so the number is that process's and not that of one that has got it since.
    if _is_held(pool.lock):
        with suppress(ProcessLookupError):
            os.kill(pool.pid, signal.SIGTERM)


def _folder() -> Path:
    folder = runtime_dir()
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secure(folder)
        (folder / DETACHED).mkdir(mode=0o700, exist_ok=True)
        secure(folder / DETACHED)
    return folder / DETACHED


def _records(folder: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """The files of this kind, each with a descriptor that the caller closes."""
    for record in sorted(folder.glob(f"*{suffix}")):
        with suppress(OSError):  # Another has removed it, or it is something else.
            yield record, os.open(record, os.O_RDWR | os.O_NOFOLLOW)


def _prune(folder: Path) -> None:
    """Remove what is stale, and all but the last logs of what has ended."""
    for suffix, least_age in ((_RECORD, 0.0), (_NEW, _OLD_S)):
        for record, lock in _records(folder, suffix):
            # The age first: to look at the lock of one that is just being made would hold its maker up.
            if (not least_age or time.time() - _changed_at(record) > least_age) and not _is_held(lock):
                record.unlink(missing_ok=True)
            os.close(lock)
    logs = [log for log in folder.glob(f"*{_LOG}") if not log.with_suffix(_RECORD).exists()]
    for log in sorted(logs, key=_changed_at)[:-_MAX_LOGS]:
        log.unlink(missing_ok=True)


def _changed_at(path: Path) -> float:
    """When a file was written to, 0 for one that is gone: others prune too."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_held(lock: int) -> bool:
    """Whether the process that a record is about has not ended.

    Looks share the lock: alone, one would be taken for that process by another.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _RUNNING)
    except (BlockingIOError, PermissionError):
        return True
    fcntl.lockf(lock, fcntl.LOCK_UN, 1, _RUNNING)
    return False


def _read(lock: int) -> dict[str, Any]:
    try:
        what = json.loads(os.pread(lock, _MAX_RECORD, 0))
    except ValueError:
        return {}
    return what if isinstance(what, dict) else {}
