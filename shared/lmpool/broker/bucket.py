"""URLs of files in buckets, and copies of whole folders there, through fsspec (https://filesystem-spec.readthedocs.io)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError, first_line

STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""URL schemes of stores to which files may be written."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
# Parts of a URL that may contain secrets: user and password, and the query of a presigned URL.
_MAX_CONNECT_S, _MAX_SILENT_S = 30, 60  # Max seconds until an HTTP server accepts a connection, and between its data.
_USER, _QUERY = re.compile(r"://[^/@\s]*@"), re.compile(r"(://[^?#]*)[?#]\S*")


def is_url(location: str) -> bool:
    """Whether a location is a URL."""
    return _URL.match(location) is not None


def is_below(url: str, root: str) -> bool:
    """Whether a URL names the folder `root`, or a file or folder below it; False if `root` is no URL."""
    parts = url.split("/")
    return parts[: len(folder := root.rstrip("/").split("/"))] == folder and ".." not in parts and "." not in parts


def named(text: str) -> str:
    """Return a text for messages, without the users, passwords, queries and fragments of the URLs in the text."""
    return _QUERY.sub(r"\1", _USER.sub("://", text))


def check_url(url: str, schemes: Set[str]) -> None:
    """Refuse a chained URL, or a scheme not in `schemes`: some file systems of fsspec run code that a URL contains."""
    if "::" in url:
        raise SettingsError(f"{named(url)}: chained URLs, with :: in them, are not accepted. Give one URL")
    scheme = url.partition("://")[0]
    if scheme not in schemes:
        accepted = ", ".join(sorted(schemes))
        raise SettingsError(f"{named(url)}: the scheme {scheme}:// is not accepted. Give a path or one of {accepted}")


def file_system(url: str, schemes: Set[str] = STORES | {"http", "https"}) -> tuple[Any, str]:
    """The file system of a URL with one of `schemes`, and the URL's path in it. Directory listings are not cached."""
    check_url(url, schemes)
    try:
        from fsspec.core import url_to_fs

        options = {}
        if url.startswith("http"):
            from aiohttp import ClientTimeout  # fsspec needs aiohttp for these URLs.

            # By default, aiohttp limits a whole transfer to five minutes. Limit the silence of the server instead.
            timeout = ClientTimeout(total=None, sock_connect=_MAX_CONNECT_S, sock_read=_MAX_SILENT_S)
            options["client_kwargs"] = {"timeout": timeout}
        system, path = url_to_fs(url, **options)  # fsspec may return a file system object that it has cached.
    except (ImportError, ValueError) as error:
        reason = f"fsspec cannot use it (pip install 'lmpool[fsspec]'): {named(str(error))}"
        raise SettingsError(f"{named(url)}: {reason}") from error
    system.invalidate_cache()  # Discard cached listings: other processes may have changed the files.
    return system, str(path).rstrip("/")


def upload(files: Sequence[Path], url: str) -> None:
    """Copy files into the folder `url` of a store; raises SettingsError if the store cannot be used."""
    with _opened(url, "written") as (system, folder):
        for file in files:
            system.put_file(str(file), f"{folder}/{file.name}")


def download(url: str, target: Path) -> None:
    """Copy the files of the folder `url` of a store into a folder; raises SettingsError if the store cannot be used."""
    with _opened(url, "read") as (system, folder):
        files = system.ls(folder, detail=True)
        needed, free = sum(file["size"] or 0 for file in files), shutil.disk_usage(target).free
        if needed > free:
            raise SettingsError(f"{named(url)} has {needed} bytes, and {free} are free in {target}")
        for file in files:
            system.get_file(file["name"], str(target / str(file["name"]).rpartition("/")[2]))


@contextmanager
def _opened(url: str, done: str) -> Iterator[tuple[Any, str]]:
    try:
        yield file_system(url, STORES)
    except SettingsError:
        raise
    except Exception as error:  # Packages for stores raise exceptions of their own.
        raise SettingsError(f"{named(url)} cannot be {done}: {named(first_line(error))}") from error
