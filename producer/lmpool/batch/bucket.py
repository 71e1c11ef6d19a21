"""An output folder behind a URL of fsspec, such as a bucket; and the choice between it and a folder of this machine.

A store has no lock that several machines see. Shards are made in a local folder and uploaded; notes say which shards
are done, as in `lmpool.batch.folder`. Several runs of the same command may write at once: each shard keeps the file
that is complete first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmpool.batch.fetch import absolute, explained, fetch, file_system, is_url, named, temporary_folder
from lmpool.batch.folder import Folder, Manifest, Shard
from lmpool.errors import BatchRefused


class Bucket(Folder):
    """An output folder behind a URL."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        super().__init__(temporary_folder(self))
        self.location = named(self._url)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of the store, or of the local disk, as BatchError."""
        with explained(self._url, "Finished shards are kept. Run the same command again"):
            yield

    def _call(self, method: str, name: str, **options: Any) -> Any:
        """Call the file system of the URL with the path of a file; None if the file does not exist."""
        with self.explained():
            system, path = file_system(self._url)
            try:
                return getattr(system, method)(f"{path}/{name}".rstrip("/"), **options)
            except FileNotFoundError:
                return None

    def listed(self, folder: str = "") -> dict[str, int]:
        """See `Folder.listed`."""
        entries = self._call("ls", folder, detail=True) or []
        here = f"{file_system(self._url)[1]}/{folder}".strip("/")
        names = ((str(entry["name"]).strip("/"), entry) for entry in entries)
        # Some stores list the folder itself too.
        return {name.rsplit("/", 1)[-1]: int(entry["size"] or 0) for name, entry in names if name != here}

    def size(self, name: str) -> int | None:
        """See `Folder.size`."""
        info = self._call("info", name)
        return None if info is None else int(info["size"])

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`."""
        data: bytes | None = self._call("cat_file", name)
        return data

    def read_all(self, folder: str) -> Iterator[bytes]:
        """See `Folder.read_all`; all files are read concurrently."""
        if names := self.listed(folder):
            with self.explained():
                system, path = file_system(self._url)
                found = system.cat([f"{path}/{folder}/{name}" for name in names], on_error="return")
                for data in found.values():
                    if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                        raise data
                    if isinstance(data, bytes):
                        yield data

    def place(self, path: Path, name: str) -> None:
        """Upload a temporary file and remove it."""
        with self.explained():
            system, folder = file_system(self._url)
            system.put_file(str(path), f"{folder}/{name}")
            path.unlink()

    def remove(self, name: str) -> None:
        """See `Folder.remove`."""
        self._call("rm_file", name)

    def local(self, name: str) -> Path:
        """See `Folder.local`: a copy in the cache of this machine."""
        with self.explained():
            system, path = file_system(self._url)
            return fetch(system, f"{path}/{name}", f"{self._url}/{name}", system.info(f"{path}/{name}"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a folder with other files. A store has no locks, so other processes may write too."""
        self.check_content()
        yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Do nothing: a store has no locks."""
        yield

    def _remove_changed(self, manifest: Manifest) -> None:
        """Remove nothing: digests would need all bytes of all shards, so `done` compares sizes only."""

    def place_shard(self, manifest: Manifest, shard: Shard, path: Path, errors: list[bytes]) -> None:
        """Put a shard into place, unless another run replaced the manifest.

        Raises:
            BatchRefused: another run has begun here.
        """
        there = self.read_manifest()
        if there is None or there.run != manifest.run:
            raise BatchRefused(f"{self.location}: another run has begun here. Give it another folder")
        super().place_shard(manifest, shard, path, errors)


def open_folder(location: str) -> Folder:
    """The output folder at a path or a URL.

    Raises:
        SettingsError: fsspec cannot use the URL.
    """
    location = absolute(location)
    if not is_url(location):
        return Folder(Path(location))
    file_system(location)
    return Bucket(location)
