"""An output folder: shards of results, notes of the shards that are done, and the manifest of the run.

manifest.json        the run: model, input, options, columns; and all shards, once they are done
shard-00000.jsonl    the results of the first lines, in the order of the input; or .parquet, .safetensors
done/00000.json      the note of that shard: its run, size and digest
errors/00000.jsonl   the lines of that shard that have no result
errors.jsonl         all lines without a result, written when a run ends
jobs.json            the arguments of `lmpool batch submit`, empty after `cancel`; a folder of `run` has none
lock                 flock: exclusive for a run, shared for workers of jobs
*.tmp                files that a process writes, or that a killed process left

A shard is done if its note names the run of the manifest and the size of its file. Its errors and its note are written
before the shard is renamed into place. So a process can be killed at any time: a shard without its note, or another
size than its note says, is computed again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any

import msgspec

from lmpool.errors import BatchError, BatchRefused

_log = logging.getLogger("lmpool.batch")

MANIFEST, ERRORS, SUBMISSION = "manifest.json", "errors.jsonl", "jobs.json"
_LOCK, _ERRORS_OF_SHARDS, _NOTES = "lock", "errors", "done"

VERSION = 1
"""Version of the manifest and of the layout of shards."""

# errno values for which the remedy is free space.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Seconds after which no live worker writes to a temporary file: a day, the longest time of a job.
_MAX_WRITING_S = 86_400
# Temporary files of lmpool: the final name, a random part, and ".tmp".
_TEMPORARY = re.compile(r"(shard-\d{5,}\.\w+|(manifest|jobs)\.json|errors\.jsonl|\d{5,}\.jsonl?)(\.[\w-]+)?\.tmp")
_SHARD = re.compile(r"shard-([0-9]{5,})\.(jsonl|parquet|safetensors)")


class Shard(msgspec.Struct, frozen=True):
    """A shard that is done.

    Attributes:
        number: from 0.
        texts: lines with a result.
        errors: lines without one.
        bytes: size of the file.
        digest: 128-bit BLAKE2b of the file, hexadecimal.
    """

    number: int
    texts: int
    errors: int
    bytes: int
    digest: str


class _Note(msgspec.Struct, frozen=True):
    run: str
    shard: Shard


class Input(msgspec.Struct, frozen=True):
    """The input of a run."""

    name: str
    format: str
    bytes: int
    lines: int
    digest: str


class Model(msgspec.Struct, frozen=True):
    """The model of a run; models with equal fingerprints give equal rows."""

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
    """The options that decide the bytes of the output."""

    what: str
    start: int
    format: str
    shard_lines: int


class Manifest(msgspec.Struct):
    """The run of an output folder.

    Attributes:
        version: of the layout.
        lmpool: the release that began the run.
        input, model, options: as there.
        columns: columns of each result: name -> type, shape and meaning.
        shards: how many the run has.
        finished: whether all are done.
        done: the shards that are done; in the file this list is complete or empty.
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
        """A digest of the input, the model and the options."""
        parts = msgspec.json.encode([self.input.digest, self.model.fingerprint, self.model.adapter, self.options])
        return hashlib.blake2b(parts, digest_size=8).hexdigest()

    def shard_name(self, number: int) -> str:
        """The name of a shard's file."""
        return f"shard-{number:05}.{self.options.format}"

    def encoded(self) -> bytes:
        """The content of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def check_same(self, wanted: Manifest, folder: str) -> None:
        """Refuse to continue this run with another model, input or other options.

        Raises:
            BatchRefused: with the differences.
        """
        pairs: dict[str, tuple[object, object]] = {
            "layout": (self.version, wanted.version),
            "model (its fingerprint)": (self.model.fingerprint, wanted.model.fingerprint),
            "adapter": (self.model.adapter, wanted.model.adapter),
            "input (its digest)": (self.input.digest, wanted.input.digest),
            "format of the input": (self.input.format, wanted.input.format),
        }
        for name in Options.__struct_fields__:
            pairs[f"--{name.replace('_', '-')}"] = getattr(self.options, name), getattr(wanted.options, name)
        differing = [f"{name} {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]
        if differing:
            raise BatchRefused(
                f"{folder} holds the results of another run: {'; '.join(differing)}. Give another folder, or the same "
                "command as before"
            )


class Folder:
    """An output folder on this machine. `Bucket` does the same behind a URL.

    Attributes:
        path: where temporary files are written.
        location: how messages and jobs name the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)

    # Files. The methods of this part are the ones that differ between a folder and a bucket.

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of the disk as BatchError."""
        try:
            yield
        except OSError as error:
            remedy = "Free some space" if error.errno in _FULL else "Fix this"
            raised = BatchError(
                f"{self.location}: {error.strerror or error}. Finished shards are kept. {remedy} and run the same "
                "command again"
            )
            # The folder or a file was removed: another try reads the files that are there then.
            raised.may_pass = isinstance(error, FileNotFoundError)
            raise raised from error

    def listed(self, folder: str = "") -> dict[str, int]:
        """The names in this folder, or in a folder in it, and their sizes in bytes."""
        sizes = dict[str, int]()
        with self.explained(), suppress(FileNotFoundError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # Another process has just renamed a temporary file.
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it does not exist."""
        path = self.path / name
        return path.stat().st_size if path.exists() else None

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_all(self, folder: str) -> Iterator[bytes]:
        """The contents of all files in a folder in this folder."""
        for name in self.listed(folder):
            if data := self.read(f"{folder}/{name}"):
                yield data

    def place(self, path: Path, name: str) -> None:
        """Rename a temporary file that was written and synced; it replaces an older file of that name."""
        path.replace(self.path / name)
        folder = os.open((self.path / name).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        """A file on this machine with the content of a file of the folder."""
        return self.path / name

    # Writing

    def create(self, name: str) -> BufferedRandom:
        """Open a new temporary file for `place`: its random name belongs to no other process or call."""
        path = self.path / f"{name}.{secrets.token_hex(8)}.tmp"
        if path.parent != self.path:  # A removed output folder is not made again.
            path.parent.mkdir(exist_ok=True)
        return path.open("x+b")

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a whole file, or leave the older file of that name unchanged."""
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

    # Locks

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder alone. Make it if it does not exist; remove it again if nothing was written.

        Raises:
            BatchRefused: another process holds it, it contains other files, or it belongs to another user.
            BatchError: it cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BatchRefused(f"{self.location} is not a folder. Give a new or an empty folder for the results")
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with self.explained():
            self.path.mkdir(parents=True, exist_ok=True)
        self.check_content()
        with self._lock(fcntl.LOCK_EX) as lock:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            try:
                self._remove_temporary(0)  # No other process writes now.
                yield
            finally:
                if made and list(self.listed()) == [_LOCK]:
                    with suppress(OSError):
                        self.remove(_LOCK)
                        for path in made:
                            path.rmdir()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the folder together with other workers of the same run.

        Raises:
            BatchRefused: a run holds it alone, or it belongs to another user.
        """
        with self._lock(fcntl.LOCK_SH):
            self._remove_temporary(_MAX_WRITING_S)
            yield

    @contextmanager
    def _lock(self, how: int) -> Iterator[int]:
        self._check_owner()
        with self.explained():
            try:
                lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise BatchRefused(
                    f"{self.location}/{_LOCK} is a symbolic link, which no run makes. Remove it, or give another folder"
                ) from None
        try:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(lock, 32).decode("ascii", "replace") or "unknown"
                raise BatchRefused(
                    f"another run (process {owner}) writes to {self.location}. Wait until it ends"
                ) from None
            yield lock
        finally:
            os.close(lock)

    def _check_owner(self) -> None:
        """Refuse a folder of another user, who could make this user overwrite other files through links in it."""
        subfolders = [self.path / name for name in (_ERRORS_OF_SHARDS, _NOTES)]
        places = [(self.path, Path.stat), (self.path, Path.lstat), *((path, Path.lstat) for path in subfolders)]
        for path, status_of in places:
            with self.explained(), suppress(FileNotFoundError):
                status = status_of(path)
                if status.st_uid not in (os.geteuid(), 0):
                    raise BatchRefused(
                        f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: the owner could "
                        "make you overwrite your files through links in it. Give a folder of your own"
                    )
                if path in subfolders and not stat.S_ISDIR(status.st_mode):
                    raise BatchRefused(f"{path} is not a folder. Remove it, or give another folder for the results")

    def check_content(self) -> None:
        """Refuse a folder that contains files and no manifest.

        Raises:
            BatchRefused: with the name of a file.
        """
        own = {_LOCK, ERRORS, SUBMISSION, _ERRORS_OF_SHARDS, _NOTES}
        others = [name for name in self.listed() if name not in own and not _TEMPORARY.fullmatch(name)]
        if others and MANIFEST not in others:
            raise BatchRefused(f"{self.location} holds {others[0]} and no {MANIFEST}. Give an empty or a new folder")

    def _remove_temporary(self, min_age_s: float) -> None:
        """Remove temporary files of killed processes: files that no process has written for some seconds."""
        with self.explained():
            for folder in ("", f"{_ERRORS_OF_SHARDS}/", f"{_NOTES}/"):
                for name in filter(_TEMPORARY.fullmatch, self.listed(folder)):
                    with suppress(FileNotFoundError):
                        if time.time() - (self.path / folder / name).lstat().st_mtime >= min_age_s:
                            self.remove(folder + name)

    # Runs

    def begin(self, wanted: Manifest) -> Manifest:
        """Begin a run, or continue the run of the manifest if it is the same.

        Returns:
            The manifest of the folder, with the shards that are done.

        Raises:
            BatchRefused: the folder holds results of another run.
        """
        there = self.read_manifest()
        if there is not None:
            try:
                there.check_same(wanted, self.location)
            except BatchRefused:
                # Workers may be making results of an unfinished run. A finished run without any result gives way.
                done = self.done(there).values()
                if done and (not there.finished or any(shard.texts for shard in done)):
                    raise
                self._clear()
            else:
                self._remove_changed(there)
                there.done = list(self.done(there).values())
                return there
        self.remove(SUBMISSION)  # Of an earlier run.
        self.write(MANIFEST, [wanted.encoded()])
        return wanted

    def _clear(self) -> None:
        """Remove the shards of a run, their notes and their errors."""
        for name in filter(_SHARD.fullmatch, self.listed()):
            self.remove(name)
        for folder in (_NOTES, _ERRORS_OF_SHARDS):
            for name in self.listed(folder):
                self.remove(f"{folder}/{name}")

    def read_manifest(self) -> Manifest | None:
        """The manifest; None if there is none.

        Raises:
            BatchError: it cannot be read.
            BatchRefused: the file is not a manifest of this release.
        """
        try:
            data = self.read(MANIFEST)
            return None if data is None else msgspec.json.decode(data, type=Manifest)
        except OSError as error:
            raise BatchError(f"{self.location} is not an output folder: {error.strerror or error}") from error
        except msgspec.DecodeError as error:
            raise BatchRefused(
                f"{self.location}/{MANIFEST} is not a manifest of this release: {error}. Give another folder"
            ) from error

    def placed(self, manifest: Manifest) -> dict[int, int]:
        """The files of shards, whether they are done or not: number -> bytes."""
        found = ((_SHARD.fullmatch(name), size) for name, size in self.listed().items())
        shards = {int(match[1]): (match[0], size) for match, size in found if match}
        return {number: size for number, (name, size) in shards.items() if name == manifest.shard_name(number)}

    def done(self, manifest: Manifest) -> dict[int, Shard]:
        """The shards that are done, by number, in order."""
        placed = self.placed(manifest)
        known = self._known(manifest, placed)
        return {number: known[number] for number in sorted(placed) if _bytes_of(known, number) == placed[number]}

    def _known(self, manifest: Manifest, placed: dict[int, int]) -> dict[int, Shard]:
        """The shards that the manifest lists or that have a note. Notes are read only if the manifest lacks a shard."""
        known = {shard.number: shard for shard in manifest.done}
        if any(_bytes_of(known, number) != size for number, size in placed.items()):
            notes = (_decode_note(data, manifest) for data in self.read_all(_NOTES))
            known |= {shard.number: shard for shard in notes if shard is not None}
        return known

    def find_done(self, manifest: Manifest, number: int) -> Shard | None:
        """One shard, if it is done."""
        listed = next((shard for shard in manifest.done if shard.number == number), None)
        noted = _decode_note(self.read(_note_name(number)), manifest)
        size = self.size(manifest.shard_name(number))
        return next((shard for shard in (listed, noted) if shard is not None and shard.bytes == size), None)

    def _remove_changed(self, manifest: Manifest) -> None:
        """Remove shards that changed since they were written: their lines are computed again."""
        placed = self.placed(manifest)
        known = self._known(manifest, placed)  # Read after the list of files: a shard has its note before its file.
        for number, size in placed.items():
            name = manifest.shard_name(number)
            if _bytes_of(known, number) != size or digest_of_file(self.path / name) != known[number].digest:
                _log.warning("%s/%s changed since it was written: computing its lines again", self.location, name)
                self.remove(name)

    def place_shard(self, manifest: Manifest, shard: Shard, path: Path, errors: list[bytes]) -> None:
        """Put a shard, its errors and its note into place."""
        name = errors_name(shard.number)
        if errors:
            self.write(name, errors)
        else:  # An earlier run may have written errors of this shard.
            self.remove(name)
        self.write(_note_name(shard.number), [msgspec.json.encode(_Note(manifest.run, shard))])
        self.place(path, manifest.shard_name(shard.number))

    def sum_up(self, manifest: Manifest, *, is_over: bool = False) -> None:
        """Write `errors.jsonl`, and the final manifest if all shards are done.

        Args:
            manifest: of the folder; afterwards it lists the shards that are done.
            is_over: whether the run ends now. If not, unfinished runs are left alone.
        """
        if not is_over and len(self.placed(manifest)) < manifest.shards:
            return
        manifest.done = list(self.done(manifest).values())
        manifest.finished = len(manifest.done) == manifest.shards
        if any(shard.errors for shard in manifest.done):
            failed = (errors_name(shard.number) for shard in manifest.done if shard.errors)
            self.write(ERRORS, (self.read(name) or b"" for name in failed))
        else:
            self.remove(ERRORS)
        if manifest.finished:
            self.write(MANIFEST, [manifest.encoded()])


def _bytes_of(known: dict[int, Shard], number: int) -> int | None:
    return known[number].bytes if number in known else None


def _decode_note(data: bytes | None, manifest: Manifest) -> Shard | None:
    """A note of the manifest's run; None for others, and if a process was killed while it wrote the note."""
    try:
        note = msgspec.json.decode(data or b"", type=_Note)
    except msgspec.DecodeError:
        return None
    return note.shard if note.run == manifest.run else None


def errors_name(number: int) -> str:
    """The name of the file with a shard's errors."""
    return f"{_ERRORS_OF_SHARDS}/{number:05}.jsonl"


def _note_name(number: int) -> str:
    return f"{_NOTES}/{number:05}.json"


def sync(file: Any) -> None:
    """Write the content of a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def digest_of_file(path: Path) -> str:
    """128-bit BLAKE2b of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
