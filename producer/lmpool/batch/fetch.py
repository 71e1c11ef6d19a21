"""Inputs as plain files of this machine: what lies behind a URL is fetched, what is compressed is unpacked.

Both are done once, into a cache: a copy has a name that depends on what tells this file from any other one (its size,
its ETag or time), and is removed when nobody has used it for a week. Whoever reads goes to and fro in a plain file.
"""

from __future__ import annotations

import bz2
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
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from lmpool.embedded import secure
from lmpool.errors import BatchError, LMPoolError, ServerError, SettingsError
from lmpool.settings import shown

CACHE_VARIABLE = "LMPOOL_BATCH_CACHE"
"""Names a folder in which `lmpool-batch` is the cache; by default that is `lmpool/batch` among the user's caches."""

FILES_VARIABLE = "LMPOOL_BATCH_FILES"
"""Names the folder below which jobs may read and write files; by default that is the worker's working directory."""

_UNUSED_S = 7 * 86_400
# What is ours to remove: the names that `temporary_folder` and `_cached` give.
_STAGING = re.compile(r"staging-[a-z0-9_]{8}")
_COPY = re.compile(r"[0-9a-f]{16}-.*", re.DOTALL)
_COPIED_BYTES = 1 << 20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Schemes of URLs under which answers may be written, and inputs read."""

INPUTS = STORES | {"https"}
"""Schemes under which a job's input may be read."""

_INPUTS_OF_RUNS = INPUTS | {"http"}
_HERE = re.compile(r"(file|local)://(?=/)")
# A user and a password; and a query, which of a presigned URL lets whoever reads it in.
_SECRET = re.compile(r"://[^/@\s]*@")
_QUERY = re.compile(r"(://[^?#]*)[?#]\S*")
# What file systems of fsspec say of a file's content; times of reading are not among that.
_TELLING = {
    "etag", "mtime", "modified", "last_modified", "lastmodified", "last-modified", "updated", "created", "generation",
    "versionid", "version_id", "checksum", "md5hash", "content_md5", "content-md5", "crc32c", "sha",
}  # fmt: skip
# What a file begins with -> what can be done about it.
_REFUSED = {
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive: unpack it first",
    b"\x04\x22\x4d\x18": "is compressed by lz4: unpack it first",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"\xfe\xff": "is UTF-16: save it as UTF-8",
}


_FOLDER = "is a folder: give one file in it; each file needs a run, and an output folder, of its own"


def is_url(location: str) -> bool:
    """Whether a location is a URL, for fsspec, and no path."""
    return _URL.match(location) is not None


def absolute(location: str) -> str:
    """The URL, or the absolute path: that of a file: URL too."""
    location = _HERE.sub("", location)
    return location if is_url(location) else str(Path(location).absolute())


def named(location: str) -> str:
    """A location, or a text that names some, as messages may have it: without user, password, query and fragment."""
    return _QUERY.sub(r"\1", _SECRET.sub("://", location))


def check_url(url: str, schemes: Set[str]) -> None:
    """Refuse a URL of a kind that is not known to do no more than to read and write files.

    fsspec has some that run code: `reference://` renders templates of the file that it reads, and `::` chains them.

    Raises:
        SettingsError: with the schemes that are taken.
    """
    if "::" in url:
        raise SettingsError(f"{named(url)}: URLs with :: in them, which fsspec chains, are not read: give one URL")
    scheme = url.partition("://")[0]
    if scheme not in schemes:
        raise SettingsError(
            f"{named(url)}: {scheme}:// is no scheme that is read or written here: give a path or one of "
            f"{', '.join(sorted(schemes))}"
        )


def check_locations(root: Path, source: str, output: str) -> None:
    """Refuse an input or an output that is not for jobs: a client that may write jobs chooses both.

    Args:
        root: the folder below which files may be read and written.
        source, output: paths or URLs.

    Raises:
        SettingsError: with what is taken instead.
    """
    for location, schemes in ((absolute(source), INPUTS), (absolute(output), STORES)):
        if is_url(location):
            check_url(location, schemes)
        elif not Path(location).resolve().is_relative_to(root.resolve()):
            raise SettingsError(
                f"{location} is not below {root}, where this worker's jobs may read and write files: --files, or "
                f"{FILES_VARIABLE}, names another folder"
            )


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, for this thread, and the path there.

    Raises:
        SettingsError: the URL is of a kind that is refused (`check_url`), or fsspec, or the package that it needs for
            this kind of URL, is not installed.
    """
    check_url(url, _INPUTS_OF_RUNS)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise SettingsError(f"{named(url)}: URLs need fsspec: pip install 'lmpool[fsspec]'") from error
    key = (os.getpid(), url)
    if (known := _systems.get(key)) is None:
        try:
            system, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"{named(url)}: fsspec cannot use it: {named(str(error))}") from error
        known = system, str(path).rstrip("/")
        # Those that work in a thread of their own serve all threads; to make one takes long.
        if system.async_impl:
            _systems[key] = known
    # What it has listed before, others may have changed.
    known[0].invalidate_cache()
    return known


_systems: dict[tuple[int, str], tuple[Any, str]] = {}


@contextmanager
def explained(url: str, otherwise: str) -> Iterator[None]:
    """Make whatever a file system raises an error of ours; such errors may pass.

    Raises:
        BatchError: something came up.
    """
    try:
        yield
    except LMPoolError:
        raise
    except Exception as error:
        # Each library has exceptions of its own.
        text = " ".join(str(error).split()) or type(error).__name__
        raised = BatchError(f"{named(url)}: {named(text)}: {otherwise}")
        raised.may_pass = not isinstance(error, (FileNotFoundError, PermissionError))
        raise raised from error


def cache_folder() -> Path:
    """The folder of the cache, which is made if it is not there; nobody else may write to it.

    Raises:
        SettingsError: it cannot be made, is another user's, or is open to others and holds something already.
    """
    given = os.environ.get(CACHE_VARIABLE)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # What is named may hold other things too.
    folder = Path(given) / "lmpool-batch" if given else user / "lmpool" / "batch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What lies in an open one may be somebody else's, and be called like a copy of ours.
        secure(folder, frozenset(), CACHE_VARIABLE)
    except (OSError, ServerError) as error:
        raise SettingsError(f"the cache of inputs: {error}") from error
    return folder


def temporary_folder(owner: object) -> Path:
    """A folder in the cache, for as long as its owner lives."""
    folder = cache_folder()
    _remove_unused(folder)
    made = tempfile.mkdtemp(prefix="staging-", dir=folder)
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def plain_file(location: str) -> Path:
    """A file of this machine with what lies at a location, unpacked; the file itself where it is that.

    Raises:
        SettingsError: there is no such file, or it is of a kind that cannot be read here.
        BatchError: it cannot be fetched, read or unpacked.
    """
    if is_url(location):
        path = fetched(location)
    elif not (path := Path(location)).is_file():
        raise SettingsError(f"input: {shown(location)} {_no_file(path)}")
    try:
        with path.open("rb") as file:
            begins, status = file.read(8), os.fstat(file.fileno())
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror or error}") from error
    for magic, reason in _REFUSED.items():
        if begins.startswith(magic):
            raise SettingsError(f"input: {shown(named(location))} {reason}")
    for magic, (suffixes, unpacked) in _PACKED.items():
        if begins.startswith(magic):
            name = path.name if path.suffix not in suffixes else path.stem
            key, state = str(path.absolute()), _state_of(status)
            make = partial(_unpack, unpacked, path, state)
            return _cached(repr((key, *state)), name, make)
    return path


def _no_file(path: Path) -> str:
    """What is wrong with a path that names no regular file, and what to do."""
    if path.is_dir():
        return _FOLDER
    if path.exists():
        return "is a pipe or a device, which can be read only once: save what it has to a file"
    return "does not exist"


def fetched(url: str) -> Path:
    """A copy of the file at a URL.

    Raises:
        SettingsError: there is no such file.
        BatchError: it cannot be fetched.
    """
    with explained(url, "it cannot be fetched"):
        system, path = file_system(url)
        try:
            info = system.info(path)
        except FileNotFoundError:
            info = {}
        if info.get("type") != "file":
            is_folder = info.get("type") == "directory"
            raise SettingsError(f"input: {shown(named(url))} {_FOLDER if is_folder else 'does not exist'}")
        return fetch(system, path, url, info)


def fetch(system: Any, path: str, url: str, info: Mapping[str, Any]) -> Path:
    """A copy of a file that a file system has told of.

    Raises:
        BatchError: it has changed meanwhile.
        Exception: whatever the file system raises.
    """
    size, told = info.get("size"), identity(info)

    def copy(made: Path) -> None:
        system.get_file(path, str(made))
        system.invalidate_cache()
        if identity(system.info(path)) != told or (size is not None and made.stat().st_size != size):
            raise BatchError(f"{named(url)} has changed while it was fetched: run the command again")

    return _cached(f"{url} {told}", named(path).rsplit("/", 1)[-1], copy)


def identity(info: Mapping[str, Any]) -> str:
    """What tells a file from what it was before, by what its file system says of it."""
    telling = {name.lower(): str(value) for name, value in info.items() if name.lower() in _TELLING}
    # Where that is nothing, no process believes another one's copy.
    nonce = "" if telling else _PROCESS
    return repr((info.get("size"), sorted(telling.items()), nonce))


_PROCESS = secrets.token_hex(8)


def _cached(key: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file of the cache that a key stands for; it is made if it is not there."""
    folder = cache_folder()
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}-{name[-80:]}"
    with suppress(FileNotFoundError):
        # Record the use. Keep the time of writing: a run that reads the copy compares it (`InputFile`).
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path
    _remove_unused(folder)
    made = folder / f"{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        make(made)
        made.replace(path)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror or error}: {CACHE_VARIABLE} names another folder") from error
    finally:
        made.unlink(missing_ok=True)
    return path


def _remove_unused(folder: Path) -> None:
    """Remove what nobody has used for long, or a process that was killed has left; nothing of another name."""
    for path in folder.iterdir():
        with suppress(OSError):
            status = path.stat()
            if time.time() - max(status.st_atime, status.st_mtime) > _UNUSED_S:
                if _STAGING.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
                elif _COPY.fullmatch(path.name):
                    path.unlink()


def _zstd(path: Path) -> IO[bytes]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise SettingsError(
            f"input: {path} is compressed by zstd: pip install 'lmpool[parquet]', or unpack it"
        ) from error
    stream: IO[bytes] = pa.CompressedInputStream(str(path), "zstd")
    return stream


_PACKED: dict[bytes, tuple[tuple[str, ...], Callable[[Path], Any]]] = {
    b"\x1f\x8b": ((".gz",), gzip.GzipFile),
    b"BZh": ((".bz2",), bz2.BZ2File),
    b"\xfd7zXZ\x00": ((".xz",), lzma.LZMAFile),
    b"\x28\xb5\x2f\xfd": ((".zst", ".zstd"), _zstd),
}
"""What a compressed file begins with: the endings of its name, and what opens it."""


def _unpack(unpacked: Callable[[Path], IO[bytes]], path: Path, state: tuple[int, ...], made: Path) -> None:
    """Unpack a file.

    Args:
        unpacked: opens it.
        path: of it.
        state: as it was found.
        made: where its content goes.

    Raises:
        BatchError: it cannot be unpacked, or has changed.
    """
    with unpacked(path) as packed, made.open("wb") as file:
        while True:
            try:
                part = packed.read(_COPIED_BYTES)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise BatchError(f"{path} cannot be unpacked: {error}") from error
            if not part:
                break
            file.write(part)
    if _state_of(path.stat()) != state:
        raise BatchError(f"{path} has changed while it was unpacked: run the command again")


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino
