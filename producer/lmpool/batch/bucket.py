"""An output folder behind a URL: a bucket, or whatever else fsspec knows; and which kind of folder a location is.

It has the files of a folder, and one more for each shard:

done/00000.json      the run, and what the manifest says of the shard

There is no lock that several machines see, and not everywhere does an upload show only when it is whole. So a shard is
made in a folder of this machine, uploaded, and then noted in `done/`: what is done is what is noted there for the run
that the manifest names, with the size that is noted. Everybody finds the same by that, and nobody overwrites what
another has noted. The manifest is written twice: as a run begins, and, with the list of all shards, when all are done.
Several runs of the same command may write here at once: of each shard the file that is noted first stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from lmpool.batch.fetch import (
    absolute,
    explained,
    fetch,
    file_system,
    identity,
    is_url,
    named,
    temporary_folder,
)
from lmpool.batch.folder import (
    ERRORS,
    LOCK,
    MANIFEST,
    SHARD,
    Folder,
    Manifest,
    Placed,
    Shard,
    errors_name,
)
from lmpool.errors import BatchError, BatchRefused

_log = logging.getLogger("lmpool.batch")

_OTHERWISE = "what is done stays; run the same command again"


class _Note(msgspec.Struct, frozen=True):
    """What `done/` has of a shard: of which run, and what the manifest is to say of it."""

    run: str
    shard: Shard


class Bucket(Folder):
    """An output folder behind a URL.

    Args:
        url: for fsspec.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        super().__init__(temporary_folder(self))
        self.location = named(self._url)
        self._run = ""
        # File in `done/`: what tells it from what it was before, and what it says.
        self._notes: dict[str, tuple[str, _Note]] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse what holds something else than answers; nobody is kept from writing there too.

        Raises:
            BatchRefused: it does.
            BatchError: it cannot be read.
        """
        strangers = [name for name in self._listed() if name not in ("", LOCK, ERRORS, "errors", "done")]
        if strangers and MANIFEST not in strangers:
            raise BatchRefused(f"{self.location} holds {strangers[0]} and no {MANIFEST}: give an empty or a new folder")
        yield

    def shared(self) -> nullcontext[None]:  # type: ignore[override]
        """Nobody holds it alone."""
        return nullcontext()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Make trouble with the store, or with the disk here, an error that says what to do.

        Raises:
            BatchError: something came up.
        """
        with explained(self._url, _OTHERWISE):
            yield

    def place(self, path: Path, name: str) -> None:
        """Upload a file that has been written; it shows when it is whole, or else is not believed."""
        self._upload(path, name)

    def _upload(self, made: Path, name: str, **options: Any) -> None:
        with self.explained():
            system, path = self._at(name)
            system.put_file(str(made), path, **options)
        made.unlink()

    def note(self, shard: Shard) -> None:
        """See `Folder.note`.

        Raises:
            BatchRefused: another run has begun here meanwhile.
        """
        manifest = self.read_manifest()
        if manifest is None or manifest.run != self._run:
            raise BatchRefused(f"{self.location}: another run has begun here meanwhile: give that one another folder")
        self.write(_note_name(shard.number), iter([msgspec.json.encode(_Note(self._run, shard))]))

    def begin(self, manifest: Manifest) -> None:
        """Put the manifest of a run that has nothing yet into place, or join a run of the same command.

        Raises:
            BatchRefused: another run has begun just now.
        """
        there, self._run = self.read_manifest(), manifest.run
        is_same = there is not None and (there.run, there.version) == (manifest.run, manifest.version)
        if there is not None and is_same and not there.finished:
            return  # Another run may be making its first shards.
        with self.explained():
            if there is not None and not is_same:
                for name in filter(SHARD.fullmatch, self._listed()):
                    self._remove(name)
            stale = [f"{folder}/{name}" for folder in ("done", "errors") for name in self._listed(folder)]
            if self._write_manifest(manifest, is_new=there is None):
                for name in stale:
                    self._remove(name)

    def write_manifest(self, manifest: Manifest) -> None:
        """Put the manifest into place, once all is done; until then what lies there says what is.

        Raises:
            BatchError: shards that this run has made are not in place any more.
        """
        if not manifest.finished:
            return
        noted, placed = self.done(), self.shards()
        if missing := manifest.shards - len(placed):
            raise BatchError(
                f"{self.location}: {missing} of {manifest.shards} shards are not as long as their notes say, or gone: "
                f"another program has written here too: {_OTHERWISE}"
            )
        manifest.done = [noted.get(shard.number, shard) for shard in manifest.done]
        self._write_manifest(manifest)

    def _write_manifest(self, manifest: Manifest, *, is_new: bool = False) -> bool:
        """Upload the manifest; returns whether it was this one, and not one that another run of the command has made.

        Raises:
            BatchRefused: there is none yet, but a run of another command has made one just now.
        """
        made = self.path / MANIFEST
        made.write_bytes(manifest.encoded())
        try:
            # Of several that begin at once a store lets one.
            self._upload(made, MANIFEST, **({"mode": "create"} if is_new else {}))
        except BatchError as error:
            if not isinstance(error.__cause__, FileExistsError) or (there := self.read_manifest()) is None:
                raise
            there.check_same(manifest, self.location)
            _log.warning(
                "another run of the same command has begun in %s just now: both do the same work, and the first file "
                "of each shard stays",
                self.location,
            )
            return False
        return True

    def read_manifest(self) -> Manifest | None:
        """See `Folder.read_manifest`."""
        manifest = super().read_manifest()
        if manifest is not None and not self._run:
            self._run = manifest.run
        return manifest

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`."""
        with self.explained():
            system, path = self._at(name)
            try:
                data: bytes = system.cat_file(path)
            except FileNotFoundError:
                return None
            return data

    def record(self, shards: list[Shard], find_done: Callable[[Folder, Manifest], None]) -> None:
        """Sum up, if all shards are noted; whoever else does that too writes the same."""
        manifest = self.read_manifest()
        if manifest is None:
            raise BatchError(f"{self.location} has no {MANIFEST} any more: submit it again")
        if len(self._listed("done")) < manifest.shards:
            return
        manifest.done = []
        self._finish(manifest, find_done)
        self.write_manifest(manifest)

    def shards(self) -> dict[int, Placed]:
        """The shards that are noted, and lie there as long as that says."""
        manifest = self.read_manifest()
        if manifest is None:
            return {}
        found = {}
        for name, entry in self._listed().items():
            if match := SHARD.fullmatch(name):
                found[int(match[1])] = Placed(name, int(entry["size"]))
        known = {shard.number: shard for shard in manifest.done}
        if any(number not in known or known[number].bytes != placed.bytes for number, placed in found.items()):
            known |= self.done()
        return {
            number: placed
            for number, placed in sorted(found.items())
            if number in known and known[number].bytes == placed.bytes
        }

    def done(self) -> dict[int, Shard]:
        """See `Folder.done`: what is noted for the run of the manifest, whoever did it."""
        manifest = self.read_manifest()
        if manifest is None:
            return {}
        listed = {name: identity(entry) for name, entry in self._listed("done").items()}
        unread = [name for name, told in listed.items() if self._notes.get(name, ("",))[0] != told]
        if unread:
            with self.explained():
                system, path = self._at("done")
                paths = {f"{path}/{name}": name for name in unread}
                for path, data in system.cat(list(paths), on_error="return").items():
                    name = paths.get(path) or path.rsplit("/", 1)[-1]
                    if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                        raise data
                    if (note := _read_note(data)) is not None:
                        self._notes[name] = listed[name], note
                    else:
                        self._notes.pop(name, None)
        notes = [note for name, (_, note) in self._notes.items() if name in listed]
        return {note.shard.number: note.shard for note in notes if note.run == manifest.run}

    def is_done(self, number: int, name: str) -> bool:
        """See `Folder.is_done`: as `shards` has it, by its note and as long as that says."""
        return self.noted(number, name) is not None

    def noted(self, number: int, name: str) -> Shard | None:
        """See `Folder.noted`: what another run of the same command has noted, if the file is as long as that says."""
        note = _read_note(self.read(_note_name(number)))
        if note is None or note.run != self._run:
            return None
        with self.explained():
            system, path = self._at(name)
            try:
                return note.shard if int(system.info(path)["size"]) == note.shard.bytes else None
            except FileNotFoundError:
                return None

    def digest(self, name: str) -> str:
        """See `Folder.digest`: uploads are compared by their sizes only."""
        return ""

    def has(self, name: str) -> bool:
        """See `Folder.has`."""
        with self.explained():
            system, path = self._at(name)
            return bool(system.exists(path))

    def local(self, name: str) -> Path:
        """A copy of a file, which stays in the cache until nobody has used it for long."""
        with self.explained():
            system, path = self._at(name)
            return fetch(system, path, f"{self._url}/{name}", system.info(path))

    def remove(self, name: str) -> None:
        """See `Folder.remove`."""
        with self.explained():
            self._remove(name)

    def _remove(self, name: str) -> None:
        system, path = self._at(name)
        if system.exists(path):
            system.rm_file(path)

    def _errors(self) -> list[Path]:
        """Copies of them; which shards have some is noted."""
        having = sorted(shard.number for shard in self.done().values() if shard.errors)
        return [self.local(errors_name(number)) for number in having]

    def _at(self, name: str) -> tuple[Any, str]:
        system, path = file_system(self._url)
        return system, f"{path}/{name}" if name else path

    def _listed(self, name: str = "") -> dict[str, dict[str, Any]]:
        """What lies there, or in a folder there, by name; nothing where there is no such folder."""
        with self.explained():
            system, path = self._at(name)
            try:
                entries = system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        names = ((str(entry["name"]).strip("/"), entry) for entry in entries)
        # Some stores have an entry for the folder itself.
        return {name.rsplit("/", 1)[-1]: entry for name, entry in names if name != path.strip("/")}


def open_folder(location: str) -> Folder:
    """The output folder at a path or a URL.

    Raises:
        SettingsError: it is a URL, and fsspec cannot use it.
    """
    location = absolute(location)
    if not is_url(location):
        return Folder(Path(location))
    file_system(location)
    return Bucket(location)


def _note_name(number: int) -> str:
    return f"done/{number:05}.json"


def _read_note(data: object) -> _Note | None:
    """A note, if that is one: it may be gone, in the midst of being written, or of somebody who was killed then."""
    try:
        return msgspec.json.decode(data, type=_Note) if isinstance(data, bytes) else None
    except msgspec.DecodeError:
        return None
