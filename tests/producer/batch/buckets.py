"""A bucket of an S3 store for tests of runs over files."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lmpool.batch.folder import SUBMISSION


class TestBucket:
    """A new bucket.

    Args:
        folder: a temporary folder of the test.

    Attributes:
        url: of the bucket.
    """

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"s3://lmpool-{secrets.token_hex(6)}"
        # A new file system: earlier tests may have used another store. All calls share it, because it is slow to make.
        self._made, _ = url_to_fs(self.url, skip_instance_cache=True)
        self._made.mkdir(self.url)

    @property
    def _system(self) -> Any:
        self._made.invalidate_cache()  # Other processes may have changed the files.
        return self._made

    def put(self, name: str, data: bytes) -> str:
        """Upload a file; return its URL."""
        self._system.pipe_file(f"{self.url}/{name}", data)
        return f"{self.url}/{name}"

    def presigned(self, name: str, data: bytes) -> str:
        """Upload a file; return a presigned HTTP URL."""
        url: str = self._system.sign(self.put(name, data), expiration=3600)
        return url

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._system.rm_file(f"{self.url}/{name}")

    def content(self, folder: str) -> dict[str, bytes]:
        """All files of an output folder by their paths in it, except the notes and the arguments of `submit`."""
        system, begins = self._system, f"{self.url}/{folder}/".removeprefix("s3://")
        found = {path.removeprefix(begins): path for path in system.find(f"{self.url}/{folder}")}
        others = ("done/", SUBMISSION)
        return {name: system.cat_file(path) for name, path in found.items() if not name.startswith(others)}

    def shards(self, folder: str) -> int:
        """The number of shards with a note."""
        return len(self._system.find(f"{self.url}/{folder}/done"))
