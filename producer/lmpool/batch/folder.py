"""An output folder, on this machine or behind a URL: shards of results, notes of finished shards, and the manifest.

manifest.json        the run: model, input, options, columns; and all shards, once they are done
shard-00000.jsonl    the results of the first lines, in the order of the input; or .parquet, .safetensors
done/00000.json      the note of that shard: its run, size and digest
errors/00000.jsonl   the lines of that shard that have no result
errors.jsonl         all lines without a result, written when a run ends
jobs.json            the arguments of `lmpool batch submit`, empty after `cancel`; a folder of `run` has none
lock                 flock: exclusive for a run, shared for workers of jobs; none behind a URL
*.tmp                files that a process writes, or that a killed process left

A shard is done if its note names the run of the manifest and the size of the shard's file. A shard's errors and note
are written before the shard is renamed or uploaded. So a process can be killed at any time: a shard without a note, or
with another size than its note says, is computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

import msgspec

from lmpool.batch.fetch import absolute, explained, fetch, temporary_folder
from lmpool.broker.bucket import file_system, is_url, named
from lmpool.errors import BatchError, BatchRefused

_log = logging.getLogger("lmpool.batch")

MANIFEST, ERRORS, SUBMISSION = "manifest.json", "errors.jsonl", "jobs.json"
_LOCK, _ERRORS_OF_SHARDS, _NOTES = "lock", "errors", "done"

VERSION = 1  # Version of the manifest and of the layout of shards.
TRY_AGAIN = "Finished shards are kept. Run the same command again"  # Advice at the end of an error about a run.
_MAX_WRITING_S = 86_400  # Seconds after which no live worker writes to a temporary file: a day, as long as any job.
# Temporary files of lmpool: the final name, a random part, and ".tmp".
_TEMPORARY = re.compile(r"(shard-\d{5,}\.\w+|(manifest|jobs)\.json|errors\.jsonl|\d{5,}\.jsonl?)(\.[\w-]+)?\.tmp")
_SHARD = re.compile(r"shard-([0-9]{5,})\.(jsonl|parquet|safetensors)")


class Shard(msgspec.Struct, frozen=True):
    """A finished shard: its number from 0, its lines with and without a result, bytes, and 128-bit BLAKE2b in hex."""

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
    """The options of a run that decide the bytes of the output."""

    what: str
    start: int
    format: str
    shard_lines: int


class Manifest(msgspec.Struct):
    """The content of manifest.json, which describes the run of an output folder."""

    version: int  # Version of the manifest and shards.
    lmpool: str  # The release of lmpool that began the run.
    input: Input
    model: Model
    options: Options
    columns: dict[str, str]  # Columns of each result: name -> type, shape and meaning.
    shards: int  # Number of shards of the run.
    finished: bool = False  # Whether all shards are done.
    done: list[Shard] = []  # The shards that are done; in manifest.json, all shards of a finished run or none.

    @property
    def run(self) -> str:
        """A digest of the input, the model and the options."""
        parts = msgspec.json.encode([self.input.digest, self.model.fingerprint, self.model.adapter, self.options])
        return hashlib.blake2b(parts, digest_size=8).hexdigest()

    def shard_name(self, number: int) -> str:
        """The name of a shard's file."""
        return f"shard-{number:05}.{self.options.format}"

    def encoded(self) -> bytes:
        """The content of manifest.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def differences(self, wanted: Manifest) -> str:
        """The differences because of which the wanted run cannot continue this run; "" for none."""
        pairs = ((field, attrgetter(field)(self), attrgetter(field)(wanted)) for field in _DECISIVE)
        return "; ".join(f"{field} {was!r}, now {now!r}" for field, was, now in pairs if was != now)


# The fields of a manifest that are equal for all commands of one run.
_DECISIVE = ["version", "model.fingerprint", "model.adapter", "input.digest", "input.format"]
_DECISIVE += [f"options.{name}" for name in Options.__struct_fields__]


class Folder:
    """An output folder of this machine.

    Attributes:
        path: path of the folder; for a `Bucket`, path of a temporary folder for files before their upload.
        url: path or URL of the folder.
        location: the path or URL without secrets, for messages.
    """

    _errors: type[Exception] = OSError  # The errors that `explained` expects.

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = self.url = str(path)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of the disk or the store as BatchError."""
        with explained(self.url, TRY_AGAIN, self._errors):
            yield

    def listed(self, folder: str = "") -> dict[str, int]:
        """The files in this folder, or in one of its subfolders: name -> size in bytes."""
        sizes = dict[str, int]()
        with self.explained(), suppress(FileNotFoundError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # A temporary file disappears when another process renames it.
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """The contents of the named files, without files that do not exist."""
        for name in names:
            with suppress(FileNotFoundError):
                yield (self.path / name).read_bytes()

    def place(self, path: Path, name: str) -> None:
        """Rename or upload a temporary file that was written and synced; it replaces an older file of that name."""
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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this run. Create a missing folder, and remove it again if nothing was written to it."""
        if self.path.exists() and not self.path.is_dir():
            raise BatchRefused(f"{self.location} is not a folder. Give a new or an empty folder for the results")
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with self.explained():
            self.path.mkdir(parents=True, exist_ok=True)
        own = {_LOCK, ERRORS, SUBMISSION, _ERRORS_OF_SHARDS, _NOTES}
        others = [name for name in self.listed() if name not in own and not _TEMPORARY.fullmatch(name)]
        if others and MANIFEST not in others:
            raise BatchRefused(f"{self.location} holds {others[0]} and no {MANIFEST}. Give an empty or a new folder")
        with self._lock(fcntl.LOCK_EX) as lock:
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            try:
                self._remove_temporary(0)  # This run holds the only lock, so no process writes these files.
                yield
            finally:
                if made and list(self.listed()) == [_LOCK]:
                    with suppress(OSError):
                        self.remove(_LOCK)
                        for path in made:
                            path.rmdir()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock of the folder with other workers of the same run."""
        with self._lock(fcntl.LOCK_SH):
            self._remove_temporary(_MAX_WRITING_S)
            yield

    @contextmanager
    def _lock(self, how: int) -> Iterator[TextIO]:
        with self.explained():
            # Refuse links and folders of other users: a link could make this run overwrite any file of this user.
            for path in (self.path, *(self.path / name for name in (_ERRORS_OF_SHARDS, _NOTES, _LOCK))):
                if path != self.path and path.is_symlink():
                    raise BatchRefused(f"{path} is a symbolic link that no run makes. Remove it, or use another folder")
                with suppress(FileNotFoundError):
                    if others := {path.lstat().st_uid, path.stat().st_uid} - {os.geteuid(), 0}:
                        users = f"user {others.pop()}, and this is user {os.geteuid()}"
                        raise BatchRefused(f"{path} belongs to {users}. Give a folder of your own")
            lock = os.fdopen(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
        with lock:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = lock.read(32) or "unknown"
                raise BatchRefused(f"another run (process {owner}) writes to {self.location}. Wait for it") from None
            yield lock

    def _remove_temporary(self, min_age_s: float) -> None:
        """Remove temporary files of killed processes: files that no process has written for `min_age_s` seconds."""
        with self.explained():
            for folder in ("", f"{_ERRORS_OF_SHARDS}/", f"{_NOTES}/"):
                for name in filter(_TEMPORARY.fullmatch, self.listed(folder)):
                    with suppress(FileNotFoundError):
                        if time.time() - (self.path / folder / name).lstat().st_mtime >= min_age_s:
                            self.remove(folder + name)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        return next(iter(self.read_all([name])), None)

    def create(self, name: str) -> BufferedRandom:
        """Open a new temporary file for `place`, with a random name that no other process or call uses."""
        path = self.path / f"{name}.{secrets.token_hex(8)}.tmp"
        if path.parent != self.path:  # Create only subfolders, so that a removed output folder stays removed.
            path.parent.mkdir(exist_ok=True)
        return path.open("x+b")

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a whole file, or leave the older file of that name unchanged."""
        with self.create(name) as file:
            try:
                file.writelines(parts)
                sync(file)
                self.place(Path(file.name), name)
            finally:
                Path(file.name).unlink(missing_ok=True)

    def begin(self, wanted: Manifest) -> Manifest:
        """Begin the wanted run, or continue the run of the folder's manifest if both are the same."""
        there = self.read_manifest()
        if there is not None and not (differing := there.differences(wanted)):
            # Remove changed shards, to compute them again. Of a bucket's shards, compare only sizes: fetch no file.
            placed = {} if isinstance(self, Bucket) else self.placed(there)
            done = self.done(there)  # Read notes after files: a shard's note is written before its file.
            for number in placed:
                name = there.shard_name(number)
                if number not in done or digest_of_file(self.path / name) != done[number].digest:
                    _log.warning("%s/%s changed since it was written: computing its lines again", self.location, name)
                    self.remove(name)
            there.done = list(self.done(there).values())
            return there
        if there is not None:
            # Workers may be computing an unfinished run. A finished run without any result may be replaced.
            done = self.done(there)
            if done and (not there.finished or any(shard.texts for shard in done.values())):
                raise BatchRefused(f"{self.location} holds the results of another run: {differing}. Use another folder")
            others = [f"{folder}/{name}" for folder in (_NOTES, _ERRORS_OF_SHARDS) for name in self.listed(folder)]
            for name in (*filter(_SHARD.fullmatch, self.listed()), *others):
                self.remove(name)
        self.remove(SUBMISSION)  # Remove the job arguments of an earlier run.
        self.write(MANIFEST, [wanted.encoded()])
        return wanted

    def read_manifest(self) -> Manifest | None:
        """The manifest; None if the folder has none."""
        try:
            data = self.read(MANIFEST)
            return None if data is None else msgspec.json.decode(data, type=Manifest)
        except OSError as error:
            raise BatchError(f"{self.location} is not an output folder: {error.strerror or error}") from error
        except msgspec.DecodeError as error:
            raise BatchRefused(f"{self.location}/{MANIFEST} is not a manifest of this release: {error}") from error

    def manifest(self) -> Manifest:
        """The manifest of the folder; raises BatchError if the folder has no manifest."""
        if (manifest := self.read_manifest()) is None:
            raise BatchError(f"{self.location} is not an output folder of `lmpool batch`: it has no {MANIFEST}")
        return manifest

    def check_run(self, manifest: Manifest) -> None:
        """Raise BatchRefused if another run has replaced the manifest."""
        if (there := self.read_manifest()) is None or there.run != manifest.run:
            raise BatchRefused(f"{self.location}: another run has begun here. Give it another folder")

    def placed(self, manifest: Manifest) -> dict[int, int]:
        """The size in bytes of each shard's file, by the shard's number; also of shards that are not done."""
        found = ((_SHARD.fullmatch(name), size) for name, size in self.listed().items())
        return {int(match[1]): size for match, size in found if match and match[2] == manifest.options.format}

    def done(self, manifest: Manifest, only: int | None = None) -> dict[int, Shard]:
        """The shards that are done, by number, in order; with `only`, at most the shard of this number."""
        placed = {number: size for number, size in sorted(self.placed(manifest).items()) if only in (None, number)}
        known = {shard.number: shard for shard in manifest.done}

        def is_done(number: int) -> bool:
            return number in known and known[number].bytes == placed[number]

        if not all(map(is_done, placed)):  # Read notes only if the manifest lacks a shard.
            # Read notes after listing files: a shard's note is written before its file.
            names = self.listed(_NOTES) if only is None else [f"{only:05}.json"]
            for data in self.read_all(f"{_NOTES}/{name}" for name in names):
                with suppress(msgspec.DecodeError):  # A killed process left an incomplete note.
                    note = msgspec.json.decode(data, type=_Note)
                    if note.run == manifest.run:
                        known[note.shard.number] = note.shard
        return {number: known[number] for number in placed if is_done(number)}

    def place_shard(self, manifest: Manifest, shard: Shard, path: Path, errors: list[bytes]) -> None:
        """Write a shard's errors and its note, then move its file into the folder, unless another run has begun."""
        self.check_run(manifest)
        name = f"{_ERRORS_OF_SHARDS}/{shard.number:05}.jsonl"
        if errors:
            self.write(name, errors)
        else:  # Remove the errors that an earlier run may have written for this shard.
            self.remove(name)
        self.write(f"{_NOTES}/{shard.number:05}.json", [msgspec.json.encode(_Note(manifest.run, shard))])
        self.place(path, manifest.shard_name(shard.number))

    def sum_up(self, manifest: Manifest, *, is_over: bool = False) -> None:
        """Write errors.jsonl if the run is over or all shards are done; write the final manifest if all are done."""
        if not is_over and len(self.placed(manifest)) < manifest.shards:
            return
        manifest.done = list(self.done(manifest).values())
        manifest.finished = len(manifest.done) == manifest.shards
        if failed := [f"{_ERRORS_OF_SHARDS}/{shard.number:05}.jsonl" for shard in manifest.done if shard.errors]:
            self.write(ERRORS, (self.read(name) or b"" for name in failed))
        else:
            self.remove(ERRORS)
        if manifest.finished:
            self.write(MANIFEST, [manifest.encoded()])


class Bucket(Folder):
    """An output folder behind a URL of fsspec. Shards are written in a temporary folder and uploaded.

    A store has no lock that several machines see. Several runs of the same command may write concurrently; the folder
    keeps the first complete file of each shard.
    """

    _errors = Exception  # Each store's package raises exceptions of its own types.

    def __init__(self, url: str) -> None:
        super().__init__(temporary_folder(self))
        self.url = url.rstrip("/")
        self.location = named(self.url)

    @contextmanager
    def _files(self) -> Iterator[tuple[Any, str]]:
        """The file system of the URL, and the folder's path in it; errors become BatchError."""
        with self.explained():
            yield file_system(self.url)

    def listed(self, folder: str = "") -> dict[str, int]:
        """See `Folder.listed`."""
        with self._files() as (system, path), suppress(FileNotFoundError):
            here = f"{path}/{folder}".rstrip("/")
            sizes = {str(entry["name"]).strip("/"): int(entry["size"] or 0) for entry in system.ls(here, detail=True)}
            sizes.pop(here.strip("/"), None)  # Some stores list the folder itself too.
            return {name.rsplit("/", 1)[-1]: size for name, size in sizes.items()}
        return {}

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """See `Folder.read_all`; all files are read concurrently, and returned in any order."""
        if wanted := list(names):
            with self._files() as (system, path):
                for data in system.cat([f"{path}/{name}" for name in wanted], on_error="return").values():
                    if isinstance(data, bytes):
                        yield data
                    elif not isinstance(data, FileNotFoundError):
                        raise data

    def place(self, path: Path, name: str) -> None:
        """See `Folder.place`."""
        with self._files() as (system, folder):
            system.put_file(str(path), f"{folder}/{name}")
            path.unlink()

    def remove(self, name: str) -> None:
        """See `Folder.remove`."""
        with self._files() as (system, path), suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")

    def local(self, name: str) -> Path:
        """See `Folder.local`; the file is a copy in the cache of this machine."""
        with self._files() as (system, path):
            return fetch(system, f"{path}/{name}", f"{self.url}/{name}", system.info(f"{path}/{name}"))

    def _remove_temporary(self, min_age_s: float) -> None:
        """Do nothing: a bucket's temporary files are in a temporary folder of this machine, not in the store."""


def open_folder(location: str) -> Folder:
    """The output folder at a path or a URL."""
    location = absolute(location)
    if not is_url(location):
        return Folder(Path(location))
    file_system(location)
    return Bucket(location)


def sync(file: Any) -> None:
    """Write the content of a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def digest_of_file(path: Path) -> str:
    """128-bit BLAKE2b of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
