"""Paths and URLs of inputs and results: check them, name them in messages, and make local copies of their data.

Data behind a URL is fetched, and compressed files are unpacked, into a cache. A copy has a name that depends on the
size and the ETag or time of its source, so a changed source gets a new copy. Copies that no process has used for a week
are removed.

`filecache` of fsspec is not used: it notices no change behind https, writes a file under its final name while other
processes may read it, and stores URLs with their passwords.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmpool.broker.bucket import STORES, check_url, file_system, is_url, named
from lmpool.embedded import secure
from lmpool.errors import BatchError, LMPoolError, ServerError, SettingsError
from lmpool.settings import shown

# Environment variable: a folder whose subfolder `lmpool-batch` is the cache (default: `lmpool/batch` in ~/.cache).
CACHE_VARIABLE = "LMPOOL_BATCH_CACHE"
# Environment variable: the folder below which jobs may use files (default: the worker's working directory).
FILES_VARIABLE = "LMPOOL_BATCH_FILES"
INPUTS = STORES | {"https"}  # URL schemes from which a job may read its input. `lmpool batch run` also reads http.

_UNUSED_S = 7 * 86_400  # Seconds without use after which a copy is removed: a week, longer than most runs.
# Names that `temporary_folder` and `_cached` choose. The cache removes only files and folders with these names.
_STAGING, _COPY = re.compile(r"staging-[a-z0-9_]{8}"), re.compile(r"[0-9a-f]{16}-.*", re.DOTALL)
_FILE_URL = re.compile(r"(file|local)://(?=/)")
# Fields by which a store identifies a version of a file.
_VERSION_FIELDS = {"etag", "lastmodified", "last_modified", "last-modified", "content-md5", "generation", "updated"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # A full disk, a full quota, a file that is too large.
# Part of a copy's cache key if its source has no version fields, so that only this process uses the copy.
_PROCESS = secrets.token_hex(8)
NOT_READABLE = "The input cannot be read"  # Advice at the end of an error about an input.
_NOT_FETCHED = "The file cannot be fetched"  # Advice at the end of an error of a store.
_IS_FOLDER = "is a folder: give one file in it; each file needs its own run and output folder"


def absolute(location: str) -> str:
    """Return a URL unchanged, a path as an absolute path, and a file: URL as its path."""
    location = _FILE_URL.sub("", location)
    return location if is_url(location) else str(Path(location).absolute())


def check_locations(root: Path, source: str, output: str) -> None:
    """Refuse an input or output that a job may not use: any client that may write jobs chooses both."""
    for location, schemes in ((absolute(source), INPUTS), (absolute(output), STORES)):
        if is_url(location):
            check_url(location, schemes)
        elif not Path(location).resolve().is_relative_to(root.resolve()):
            advice = f"Start the worker with another --files or {FILES_VARIABLE}"
            raise SettingsError(f"{location} is not below {root}, the folder of this worker's jobs. {advice}")


@contextmanager
def explained(
    location: str, advice: str, kind: type[Exception] = Exception, except_errnos: Collection[int] = ()
) -> Iterator[None]:
    """Convert exceptions of a `kind`, OSError for local files, to BatchError, except those with some errno values."""
    try:
        yield
    except LMPoolError:
        raise
    except kind as error:
        if getattr(error, "errno", None) in except_errnos:
            raise
        # For a local file, the short text of the OSError is enough; only the full text of a store's error has details.
        reason = getattr(error, "strerror", None) if kind is OSError else None
        text = reason or " ".join(str(error).split()) or type(error).__name__
        remedy = "Free some space. " if getattr(error, "errno", None) in _FULL else ""
        raised = BatchError(f"{named(location)}: {named(text)}. {remedy}{advice}")
        # Retry after a missing local file, because the retry lists the files again; retry other errors of a store.
        is_missing = isinstance(error, FileNotFoundError)
        raised.may_pass = is_missing if kind is OSError else not (is_missing or isinstance(error, PermissionError))
        raise raised from error


def cache_folder() -> Path:
    """Return the folder of the cache, and create a missing folder. No other user may write to the folder."""
    given = os.environ.get(CACHE_VARIABLE)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Use a subfolder, because the user's folder may contain other files.
    folder = Path(given) / "lmpool-batch" if given else user / "lmpool" / "batch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Refuse a folder that other users may write to: another user could store false data under a copy's name.
        secure(folder, frozenset(), CACHE_VARIABLE)
    except (OSError, ServerError) as error:
        raise SettingsError(f"the cache of inputs: {error}") from error
    return folder


def temporary_folder(owner: object) -> Path:
    """A folder in the cache that is removed when the object `owner` is garbage-collected."""
    folder = cache_folder()
    _remove_unused(folder)
    made = tempfile.mkdtemp(prefix="staging-", dir=folder)
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def pyarrow(use: str) -> Any:
    """Import pyarrow with its module `parquet`. The SettingsError for a missing pyarrow begins with the text `use`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SettingsError(f"{use} needs pyarrow: pip install 'lmpool[parquet]'") from error
    return pyarrow


# First bytes of a compressed file -> the function that opens it.
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda path: pyarrow(f"input: {path}: zstd").CompressedInputStream(str(path), "zstd"),
}


# First bytes of files that cannot be read: zip, 7z, lz4 and UTF-16 (in either byte order).
_UNREADABLE = (b"PK\x03\x04", b"7z\xbc\xaf", b"\x04\x22M\x18", b"\xff\xfe", b"\xfe\xff")


def plain_file(location: str) -> Path:
    """A local, uncompressed copy of the file at a location; the file itself if it is local and not compressed."""
    if is_url(location):
        with explained(location, _NOT_FETCHED):
            system, at = file_system(location)
            info: Mapping[str, Any] = {}
            with suppress(FileNotFoundError):
                info = _info(system, at)
            if info.get("type") != "file":
                reason = _IS_FOLDER if info.get("type") == "directory" else "does not exist"
                raise SettingsError(f"input: {shown(named(location))} {reason}")
            path = fetch(system, at, location, info)
    elif not (path := Path(location)).is_file():
        pipe = "is a pipe or a device, which can be read only once: save its data to a file"
        reason = _IS_FOLDER if path.is_dir() else pipe if path.exists() else "does not exist"
        raise SettingsError(f"input: {shown(location)} {reason}")
    with explained(str(path), NOT_READABLE, OSError), path.open("rb") as file:
        begins, state = file.read(8), state_of(os.fstat(file.fileno()))
    if begins.startswith(_UNREADABLE):
        raise SettingsError(f"input: {shown(named(location))} is zip, 7z, lz4 or UTF-16. Give UTF-8, plain or as gzip")
    opened = next((opened for magic, opened in _COMPRESSED.items() if begins.startswith(magic)), None)
    if opened is None:
        return path

    def unpack(made: Path) -> None:
        try:
            with opened(path) as packed, made.open("wb") as file:
                shutil.copyfileobj(packed, file)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # The disk failed, so the packed data may be valid.
            raise BatchError(f"{path} cannot be unpacked: {error}") from error
        if state_of(path.stat()) != state:
            raise BatchError(f"{path} changed while it was unpacked. Run the command again")

    return _cached(repr((str(path.absolute()), *state)), path.name, unpack)


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """Numbers that change when another file replaces a file, or when a program writes to the file."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def fetch(system: Any, path: str, url: str, info: Mapping[str, Any]) -> Path:
    """Return the path of a local copy of a file of a store."""
    size, version = info.get("size"), identity(info)

    def copy(made: Path) -> None:
        with explained(url, _NOT_FETCHED, except_errnos=_FULL):  # A full disk of the cache is explained by `_cached`.
            system.get_file(path, str(made))
            system.invalidate_cache()
            now = _info(system, path)
        if identity(now) != version or (size is not None and made.stat().st_size != size):
            raise BatchError(f"{named(url)} changed while it was fetched. Run the command again")

    return _cached(f"{url} {version}", named(path).rsplit("/", 1)[-1], copy)


def _info(system: Any, path: str) -> Mapping[str, Any]:
    """The fields of a file of a store; raises FileNotFoundError only if the file does not exist."""
    try:
        return dict(system.info(path))
    except FileNotFoundError as error:
        # For HTTP, fsspec raises this exception after any error, such as 503, and the path is the URL.
        cause = error.__cause__
        if cause is not None and is_url(path) and getattr(cause, "status", None) not in (404, 410):
            raise cause from None
        raise


def identity(info: Mapping[str, Any]) -> str:
    """The version of a file in a store: its size and the fields that identify its content."""
    fields = {name.lower(): str(value) for name, value in info.items() if name.lower() in _VERSION_FIELDS}
    return repr((info.get("size"), sorted(fields.items()), "" if fields else _PROCESS))


def _cached(key: str, name: str, make: Callable[[Path], None]) -> Path:
    """The path of the copy with a key. If the cache has no such copy, `make` makes it."""
    folder = cache_folder()
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}-{name[-80:]}"
    with suppress(FileNotFoundError):
        # Set the copy's time of use, but keep its time of writing: runs that read the copy compare the latter.
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path
    _remove_unused(folder)
    advice = f"Choose another folder with {CACHE_VARIABLE}"
    with explained(str(path), advice, OSError), tempfile.TemporaryDirectory(prefix="staging-", dir=folder) as staging:
        make(made := Path(staging) / path.name)
        with suppress(OSError):  # Keep the copy of another process, which may be reading it.
            os.link(made, path)
        if not path.exists():  # Without hard links, two processes may still replace each other's copy.
            made.replace(path)
    return path


def _remove_unused(folder: Path) -> None:
    """Remove copies that no process used for a week, and folders that killed processes left."""
    for path in folder.iterdir():
        with suppress(OSError):
            status = path.stat()
            if time.time() - max(status.st_atime, status.st_mtime) > _UNUSED_S:
                if _STAGING.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
                elif _COPY.fullmatch(path.name):
                    path.unlink()
