"""Wheels: reading single files of one, on disk or on a server, without fetching it whole."""

from __future__ import annotations

import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import requests
import urllib3
from remotezip import RangeNotSupported, RemoteZip, RemoteZipError  # type: ignore[import-untyped]

TIMEOUT = (10.0, 30.0)  # seconds to connect, and to wait for the next bytes
WHOLE_MOST = 200_000_000  # bytes that may be fetched from a server that cannot send parts
_WHOLE_TIMEOUT = 300.0
_CHUNK = 1 << 20

# What reading a zip file ends in when the server, the line or the file is at fault.
_READ_ERRORS = (
    OSError,  # requests.RequestException is one
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,  # a compression that zipfile does not know
    RemoteZipError,
    urllib3.exceptions.HTTPError,
)


class WheelUnavailable(Exception):
    """A wheel cannot be found or read; the message says why, in one line."""


class Wheel:
    """An open wheel."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._paths = frozenset(archive.namelist())

    def read(self, path: str) -> bytes | None:
        """One file of the wheel, or None where there is none of that path.

        Raises:
            WheelUnavailable: it is there and cannot be read.
        """
        if path not in self._paths:
            return None
        with explained(f"{path} cannot be read"):
            return self._archive.read(path)


@contextmanager
def open_file(path: Path) -> Iterator[Wheel]:
    """A wheel on disk.

    Raises:
        WheelUnavailable: there is none, or it is not a zip file.
    """
    with explained(f"{path} cannot be read"):
        archive = zipfile.ZipFile(path)
    with archive:
        yield Wheel(archive)


@contextmanager
def open_url(session: requests.Session, url: str) -> Iterator[Wheel]:
    """A wheel on a server: its directory is fetched now, its files when they are read.

    From a server that cannot send parts of a file it is fetched whole, to a file that is gone afterwards.

    Raises:
        WheelUnavailable: it cannot be fetched, is not a zip file, or is too large to be fetched whole.
    """
    with ExitStack() as stack:
        with explained("the wheel cannot be fetched"):
            archive = _in_parts(session, url) or zipfile.ZipFile(stack.enter_context(_whole(session, url)))
        yield Wheel(stack.enter_context(archive))


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what can go wrong with the network and with zip files into a WheelUnavailable that begins with `what`."""
    try:
        yield
    except _READ_ERRORS as error:
        raise WheelUnavailable(f"{what}: {_reason(error)}") from error


def _in_parts(session: requests.Session, url: str) -> zipfile.ZipFile | None:
    try:
        # Not the last so many bytes: the public index refuses such requests. So its length is asked for first, and
        # without `allow_redirects` that would be the length of a redirection.
        archive: zipfile.ZipFile = RemoteZip(
            url, session=session, support_suffix_range=False, timeout=TIMEOUT, allow_redirects=True
        )
    except RangeNotSupported:
        return None
    return archive


@contextmanager
def _whole(session: requests.Session, url: str) -> Iterator[IO[bytes]]:
    refusal = f"the server sends no parts of files, and whole it is over {WHOLE_MOST // 1_000_000} MB"
    give_up = time.monotonic() + _WHOLE_TIMEOUT
    with session.get(url, stream=True, timeout=TIMEOUT) as response, tempfile.TemporaryFile() as file:
        response.raise_for_status()
        if int(response.headers.get("Content-Length", 0)) > WHOLE_MOST:
            raise OSError(refusal)
        for chunk in response.iter_content(_CHUNK):
            file.write(chunk)
            if file.tell() > WHOLE_MOST:
                raise OSError(refusal)
            if time.monotonic() > give_up:
                raise OSError(f"it has taken more than {_WHOLE_TIMEOUT:.0f} s")
        yield file


def _reason(error: BaseException) -> str:
    """What lies at the bottom of an exception, in one line; requests and urllib3 wrap the same error several times."""
    while True:
        if isinstance(error, requests.HTTPError) and error.response is not None:
            return f"the server answers {error.response.status_code} {error.response.reason}"
        if isinstance(error, requests.Timeout):
            return "the server does not answer in time"
        deeper = error.__cause__ or error.__context__
        if deeper is None:
            break
        error = deeper
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0]
