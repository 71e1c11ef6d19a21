"""A bucket of a local S3 store, for tests of batch runs whose inputs and outputs have URLs."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lmpool.batch.folder import SUBMISSION


class TestBucket:
    """A new bucket of the S3 store.

    Args:
        folder: temporary folder of the test.

    Attributes:
        url: URL of the bucket.
    """

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"s3://lmpool-{secrets.token_hex(6)}"
        # Do not use fsspec's cached file system: it may belong to the store of an earlier test.
        self._made, _ = url_to_fs(self.url, skip_instance_cache=True)
        self._made.mkdir(self.url)

    @property
    def _system(self) -> Any:
        self._made.invalidate_cache()  # Drop cached lists: other processes may have changed files.
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
        """Paths in an output folder -> contents, without the notes of finished shards and `submit`'s arguments."""
        system, begins = self._system, f"{self.url}/{folder}/".removeprefix("s3://")
        found = {path.removeprefix(begins): path for path in system.find(f"{self.url}/{folder}")}
        others = ("done/", SUBMISSION)
        return {name: system.cat_file(path) for name, path in found.items() if not name.startswith(others)}

    def shards(self, folder: str) -> int:
        """The number of shards with a note, a file that marks a finished shard."""
        return len(self._system.find(f"{self.url}/{folder}/done"))
