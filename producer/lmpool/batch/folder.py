"""An output folder: its lock, files that are put into place whole, and the manifest that says what they are.

manifest.json        what was asked of which model and input, and the shards that are done
shard-00000.jsonl    the answers to the first lines, in order; or .parquet, .safetensors
errors.jsonl         the lines without an answer, once a run has ended
errors/00000.jsonl   those of one shard
jobs.json            what `lmpool batch submit` was given; a folder of `run` has none
lock                 flock held by the run that writes here
*.tmp                files that are written just now, each with a flock of the process that writes it, or left by one
                     that was killed
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, NamedTuple

import msgspec

from lmpool.aio import finish
from lmpool.errors import BatchError, BatchRefused

MANIFEST, ERRORS, LOCK, MANIFEST_LOCK = "manifest.json", "errors.jsonl", "lock", "lock-manifest"
SUBMISSION = "jobs.json"
"""The file that says what `lmpool batch submit` was given; a folder of `run` has none."""

VERSION = 1
"""Of the manifest and of the layout of shards."""

_TEMPORARY = ".tmp"
# Pause between two writings of a manifest by one process, as a multiple of the time that the last one took.
_PAUSES = 9
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A temporary file of ours: the file that it becomes, and a random part.
_OURS = re.compile(r"(shard-\d{5,}\.\w+|manifest\.json|errors\.jsonl|jobs\.json|\d{5,}\.jsonl)(\.[\w-]+)?\.tmp")
SHARD = re.compile(r"shard-([0-9]{5,})\.(jsonl|parquet|safetensors)")
"""The name of a shard's file: its number, its format."""


class Shard(msgspec.Struct, frozen=True):
    """A shard that is done.

    Attributes:
        number: from 0.
        texts: lines that have an answer in it.
        errors: lines that have none.
        bytes: its size.
        digest: 128-bit BLAKE2b of its bytes, hexadecimal.
    """

    number: int
    texts: int
    errors: int
    bytes: int
    digest: str


class Input(msgspec.Struct, frozen=True):
    """The input: its name, and what tells it from any other."""

    name: str
    format: str
    bytes: int
    lines: int
    digest: str


class Model(msgspec.Struct, frozen=True):
    """The model that answers; `fingerprint` says which rows it gives."""

    name: str
    fingerprint: str
    backend: str
    revision: str
    dtype: str
    encoding: str
    lossy: bool
    vocab_size: int
    source: str
    adapter: str


class Options(msgspec.Struct, frozen=True):
    """What is asked, and how the answers are laid out."""

    what: str
    start: int
    format: str
    shard_lines: int


class Manifest(msgspec.Struct):
    """What an output folder holds.

    Attributes:
        version: of this layout.
        lmpool: the release that began it.
        input, model, options: as there.
        columns: of each text's answer: name -> what it holds.
        shards: how many there are in all.
        finished: whether all of them are done.
        done: those that are.
    """

    version: int
    lmpool: str
    input: Input
    model: Model
    options: Options
    columns: dict[str, str]
    shards: int
    finished: bool = False
    done: list[Shard] = []

    @property
    def run(self) -> str:
        """What tells the run from others, in any folder."""
        told = msgspec.json.encode([self.input.digest, self.model.fingerprint, self.model.adapter, self.options])
        return hashlib.blake2b(told, digest_size=8).hexdigest()

    def encoded(self) -> bytes:
        """What stands in the file; shards that are done come in order."""
        self.done.sort(key=lambda shard: shard.number)
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def check_same(self, wanted: Manifest, folder: str) -> None:
        """Refuse to go on with something else than was begun.

        Raises:
            BatchRefused: another model, input, or options; it says which.
        """
        pairs: dict[str, tuple[object, object]] = {
            "layout": (self.version, wanted.version),
            "model (its fingerprint)": (self.model.fingerprint, wanted.model.fingerprint),
            "adapter": (self.model.adapter, wanted.model.adapter),
            "input (its digest)": (self.input.digest, wanted.input.digest),
            "format of the input": (self.input.format, wanted.input.format),
        }
        names = {"what": "--what", "start": "--start", "format": "--format", "shard_lines": "--shard-lines"}
        for name, option in names.items():
            pairs[option] = getattr(self.options, name), getattr(wanted.options, name)
        differing = [f"{name} {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]
        if differing:
            raise BatchRefused(
                f"{folder} holds answers of another run: {'; '.join(differing)}: give another folder, or the same "
                "command as before"
            )


class Submission(msgspec.Struct, frozen=True):
    """What `lmpool batch submit` was given, so that jobs which the server has lost can be queued again.

    Attributes:
        run: `Manifest.run` of the run that it is for.
        source: the absolute path or URL of the input; "" if the URL has a secret in it, which no file keeps.
        settings, pool: as `lmpool.batch.jobs.ShardJob`.
        is_cancelled: whether `lmpool batch cancel` has come since: its jobs are not missing.
    """

    run: str
    source: str
    settings: dict[str, Any]
    pool: dict[str, Any]
    is_cancelled: bool = False


class Placed(NamedTuple):
    """A shard that is in place: the name of its file, and its bytes."""

    name: str
    bytes: int


class Folder:
    """An output folder.

    Args:
        path: where it is.

    Attributes:
        location: how messages and jobs name it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which is made if it is not there, alone.

        Raises:
            BatchRefused: another run holds it, it holds something else than answers, or it is another user's.
            BatchError: it cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BatchRefused(f"{self.location} is no folder: give a new or an empty one for the answers")
        self._check_owner()
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with self.explained():
            self.path.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.path.iterdir()]
        strangers = [name for name in names if name != LOCK and not _OURS.fullmatch(name)]
        if strangers and MANIFEST not in strangers:
            raise BatchRefused(f"{self.location} holds {strangers[0]} and no {MANIFEST}: give an empty or a new folder")
        with self._lock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as lock:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            try:
                self.remove_temporary()
                yield
            finally:
                if made:
                    self._remove_unused(made)

    def _remove_unused(self, made: list[Path]) -> None:
        """Remove folders that were made for a run that was refused, if nothing but its lock has come of it."""
        with suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                for path in made:
                    path.rmdir()

    def is_begun(self) -> bool:
        """Whether some shards of a run are in place already: then nobody begins it anew, but if it ended in no answer.

        Until it has ended others may make shards of it, and have answers that do not show yet.
        """
        # The folder may not be there yet: without a manifest nothing in it is looked at.
        manifest = self.read_manifest() if self.has(MANIFEST) else None
        if manifest is None or not (shards := self.shards()):
            return False
        empty = {shard.number: shard.bytes for shard in manifest.done if not shard.texts}
        return not manifest.finished or any(empty.get(number) != placed.bytes for number, placed in shards.items())

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the folder together with others that make shards of the same run.

        Raises:
            BatchRefused: a run holds it alone, or it is another user's.
        """
        self._check_owner()
        with self._lock(LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB):
            yield

    def _check_owner(self) -> None:
        """Refuse a folder in which another user may have prepared links to files that this user is to overwrite.

        Raises:
            BatchRefused: it, the link that names it or `errors/` in it belongs to a user who is neither this one nor
                root, or `errors` is no folder.
        """
        errors = self.path / "errors"
        # The folder, a link that names it, and what is in the place of its errors.
        for path, look_up in ((self.path, Path.stat), (self.path, Path.lstat), (errors, Path.lstat)):
            with self.explained(), suppress(FileNotFoundError):
                status = look_up(path)
                if status.st_uid not in (os.geteuid(), 0):
                    raise BatchRefused(
                        f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: the owner of a "
                        "folder can have others overwrite files by links in it. Give a folder of your own"
                    )
                if path == errors and not stat.S_ISDIR(status.st_mode):
                    raise BatchRefused(f"{errors} is no folder: remove it, or give another folder for the answers")

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[int]:
        with self.explained():
            try:
                lock = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise BatchRefused(
                    f"{self.location}/{name} is a symbolic link, which no run makes: remove it, or give another folder"
                ) from None
        try:
            try:
                fcntl.flock(lock, how)
            except BlockingIOError:
                owner = os.read(lock, 32).decode("ascii", "replace") or "unknown"
                raise BatchRefused(
                    f"another run (process {owner}) writes to {self.location}: let that one end first"
                ) from None
            yield lock
        finally:
            os.close(lock)

    def record(self, shards: list[Shard], find_done: Callable[[Folder, Manifest], None]) -> None:
        """Have the manifest list shards that are in place; several may do so at once.

        Args:
            shards: what the manifest is to say of them.
            find_done: has a manifest list what is in place.

        Raises:
            BatchError: it cannot be written.
        """
        with self._lock(MANIFEST_LOCK, fcntl.LOCK_EX), self.explained():
            manifest = self.read_manifest()
            if manifest is None:
                raise BatchError(f"{self.location} has no {MANIFEST} any more: submit it again")
            manifest.done = list({shard.number: shard for shard in [*manifest.done, *shards]}.values())
            self._finish(manifest, find_done)
            self.write_manifest(manifest)

    def _finish(self, manifest: Manifest, find_done: Callable[[Folder, Manifest], None]) -> None:
        """Sum up, if all shards are in place; some of them others may have made, and were killed."""
        if len(manifest.done) != manifest.shards and len(self.shards()) == manifest.shards:
            find_done(self, manifest)
        manifest.finished = len(manifest.done) == manifest.shards
        if manifest.finished:
            self.collect_errors()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Make trouble with the disk an error that says what to do.

        Raises:
            BatchError: an OSError came up.
        """
        try:
            yield
        except OSError as error:
            raised = BatchError(
                f"{self.location}: {error.strerror or error}: what is done stays; "
                f"{'free some space' if error.errno in _FULL else 'mend that'} and run the same command again"
            )
            # The folder or a file was removed: another try reads what is there then.
            raised.may_pass = isinstance(error, FileNotFoundError)
            raise raised from error

    def create(self, name: str) -> BinaryIO:
        """Make a temporary file, which `place` gives a name to.

        No other process, and no other call in this one, has a file of the same path: the file is new and its name is
        random. It is locked as long as it is open, so `remove_temporary` leaves it.

        Args:
            name: of the file that it becomes.

        Returns:
            The file, open for writing and reading; its path is the attribute `name`.
        """
        while True:
            path = self.path / f"{name}.{secrets.token_hex(8)}{_TEMPORARY}"
            if path.parent != self.path:  # A folder of answers that was removed is not made again.
                path.parent.mkdir(exist_ok=True)
            file = path.open("x+b")
            # Between these two calls another process may take the file for one of a process that was killed.
            if _take(file.fileno()) and path.exists():
                return file
            file.close()

    def place(self, path: Path, name: str) -> None:
        """Put a temporary file that has been written and synced into place, for good."""
        path.replace(self.path / name)
        folder = os.open((self.path / name).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        """Write a file whole, or leave the one of that name as it is."""
        with self.create(name) as file:
            path = Path(file.name)
            try:
                file.writelines(parts)
                sync(file)
                self.place(path, name)
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise

    def read_manifest(self) -> Manifest | None:
        """The manifest, if there is one.

        Raises:
            BatchRefused: it is none.
        """
        try:
            data = self.read(MANIFEST)
            return None if data is None else msgspec.json.decode(data, type=Manifest)
        except OSError as error:
            raise BatchError(f"{self.location} is no folder of answers: {error.strerror or error}") from error
        except msgspec.DecodeError as error:
            raise BatchRefused(
                f"{self.location}/{MANIFEST} is no manifest of this release: {error}: give another folder"
            ) from error

    def read(self, name: str) -> bytes | None:
        """What a file holds; None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        """Put the manifest into place."""
        self.write(MANIFEST, iter([manifest.encoded()]))

    def read_submission(self, manifest: Manifest) -> Submission | None:
        """What `submit` was given for the run of a manifest; None where that is a run without jobs."""
        data = self.read(SUBMISSION)
        try:
            submission = None if data is None else msgspec.json.decode(data, type=Submission)
        except msgspec.DecodeError:
            return None
        return submission if submission is not None and submission.run == manifest.run else None

    def write_submission(self, submission: Submission) -> None:
        """Put what `submit` was given into place."""
        self.write(SUBMISSION, iter([msgspec.json.encode(submission)]))

    def begin(self, manifest: Manifest) -> None:
        """Put the manifest of a run that has nothing yet into place; what is there has no answers, and goes."""
        for placed in self.shards().values():
            self.remove(placed.name)
        for path in (self.path / "errors").glob("*"):
            path.unlink()
        self.write_manifest(manifest)

    def shards(self) -> dict[int, Placed]:
        """The shards that are in place, by number, in order."""
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if match := SHARD.fullmatch(entry.name):
                    found[int(match[1])] = Placed(entry.name, entry.stat().st_size)
        return dict(sorted(found.items()))

    def has(self, name: str) -> bool:
        """Whether a file is in place."""
        return (self.path / name).exists()

    def is_done(self, number: int, name: str) -> bool:
        """Whether a shard is in place, under its name, and whole."""
        return self.has(name)

    def noted(self, number: int, name: str) -> Shard | None:
        """What is noted of a shard that must stay as it is, with its errors; None if it must be put into place."""
        return None

    def done(self) -> dict[int, Shard]:
        """Shards that are known to be done, besides those that the manifest lists."""
        return {}

    def local(self, name: str) -> Path:
        """The file of this machine that holds what is in place under a name."""
        return self.path / name

    def digest(self, name: str) -> str:
        """The digest of a file in place, as `Shard` has it; "" where the file would have to be fetched for that."""
        return digest_of_file(self.path / name)

    def note(self, shard: Shard) -> None:
        """Note that a shard is in place, where others cannot see that it is whole."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def collect_errors(self) -> None:
        """Make `errors.jsonl` of what the shards have; none when there are no errors."""
        paths = self._errors()
        if paths:
            self.write(ERRORS, (part for path in paths for part in _parts(path)))
        else:
            self.remove(ERRORS)

    def _errors(self) -> list[Path]:
        """The files with the errors of shards, in order."""
        return sorted((self.path / "errors").glob("*.jsonl"), key=lambda path: (len(path.name), path.name))

    def remove_temporary(self) -> None:
        """Remove the temporary files of processes that were killed; those that are being written stay.

        Raises:
            BatchError: one cannot be removed.
        """
        with self.explained():
            for path in (*self.path.iterdir(), *(self.path / "errors").glob("*")):
                if _OURS.fullmatch(path.name):
                    _remove_if_left(path)


class Recorder:
    """Has the manifest of a folder list the shards that this process makes, several at once.

    To write one takes the longer the more shards it lists; so it is done for a tenth of the time at most.
    """

    def __init__(self) -> None:
        self._waiting: list[Shard] = []
        self._writing = asyncio.Lock()
        self._begun = self._done = 0
        self._pause_s = 0.0

    async def record(self, folder: Folder, shards: list[Shard], find_done: Callable[[Folder, Manifest], None]) -> None:
        """Return when the manifest lists some shards that are in place.

        Raises:
            BatchError: it cannot be written.
        """
        self._waiting += shards
        before = self._begun
        async with self._writing:
            if self._done > before:  # One that has begun since had these too.
                return
            await asyncio.sleep(self._pause_s)
            some, began = list(self._waiting), monotonic()
            self._begun += 1
            await finish(asyncio.to_thread(folder.record, some, find_done))
            self._waiting = [shard for shard in self._waiting if shard not in some]
            self._done = self._begun
            self._pause_s = _PAUSES * (monotonic() - began)


def _take(file: int) -> bool:
    """Lock an open file, or see that another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_left(path: Path) -> None:
    """Remove a temporary file that no process holds open."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # It is in place by now.
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        path.unlink()  # A link, which no process of ours makes.
        return
    try:
        if _take(file):
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def shard_name(number: int, suffix: str) -> str:
    """The name of a shard's file."""
    return f"shard-{number:05}.{suffix}"


def errors_name(number: int) -> str:
    """The name of the file with a shard's errors."""
    return f"errors/{number:05}.jsonl"


def sync(file: Any) -> None:
    """Have a file's content on the disk."""
    file.flush()
    os.fsync(file.fileno())


def digest_of_file(path: Path) -> str:
    """128-bit BLAKE2b of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            yield part
