"""The lines of an input, JSONL or Parquet: where shards begin, which custom ids come twice, and what each line says."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.kinds import Ids
from lmpool.errors import BatchError

MOST_LINE_BYTES = 64 * 1024 * 1024
"""Of one line; a longer one is not read."""

_DIGEST_SIZE = 16
_READ_BYTES = 1024 * 1024
_LINES_AT_ONCE = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What msgspec says of a value of another type, and what its types are called here.
_MISMATCH = re.compile(r"Expected `(.+?)`, got `(.+?)`(?: - at `\$\.?(.*)`)?")
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a fraction",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


class Body(msgspec.Struct):
    """The request of a line of OpenAI's and vLLM's batch files."""

    prompt: str | Ids | None = None
    input: str | Ids | None = None


class Fields(msgspec.Struct):
    """What a line may say; whatever else it has is not read."""

    custom_id: str | int | None = None
    text: str | None = None
    ids: Ids | None = None
    prompt: str | Ids | None = None
    continuation: str | Ids | None = None
    body: Body | None = None


class _CustomId(msgspec.Struct):
    custom_id: str | int | None = None


class Line(NamedTuple):
    """One line: its number, from 1, and what it says, or why it cannot be read; then its custom id, if that can be."""

    number: int
    fields: Fields | None
    reason: str = ""
    custom_id: str | None = None


class Chunk(NamedTuple):
    """Lines of one shard that follow one another, and whether the shard ends with them."""

    shard: int
    lines: list[Line]
    is_last: bool


class Index(NamedTuple):
    """An input as it was found.

    Attributes:
        format: "jsonl" or "parquet".
        size: bytes.
        digest: 128-bit BLAKE2b of them, hexadecimal.
        lines: how many there are.
        is_empty: whether all of them are empty.
        starts: of each shard, where it begins: the byte of a JSONL file, the row of a Parquet file.
        duplicates: numbers of the lines whose custom id another one has had before, ascending, int64.
    """

    format: str
    size: int
    digest: str
    lines: int
    is_empty: bool
    starts: Mapping[int, int]
    duplicates: NDArray[np.int64]

    def is_duplicate(self, line: int) -> bool:
        """Whether a line's custom id has come before."""
        at = int(np.searchsorted(self.duplicates, line))
        return at < len(self.duplicates) and int(self.duplicates[at]) == line


class Source(Protocol):
    """An input that can be gone through once to find its shards, and then be read from any of them on."""

    path: Path

    def index(self, shard_lines: int) -> Index:
        """Go through all of it.

        Raises:
            BatchError: it cannot be read.
        """
        ...

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """The lines of some shards, in order.

        Raises:
            BatchError: it cannot be read, or has changed since it was indexed.
        """
        ...


class CustomIds:
    """Finds custom ids that come more than once, with 24 bytes a line: what is kept of each is its 128-bit digest."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._lines = array("q")

    def add(self, line: int, custom_id: str | int | None) -> None:
        """Note the custom id of a line, if it has one."""
        if custom_id is not None:
            name = str(custom_id).encode("utf-8", "surrogatepass")
            self._digests += hashlib.blake2b(name, digest_size=_DIGEST_SIZE).digest()
            self._lines.append(line)

    def duplicates(self) -> NDArray[np.int64]:
        """The lines whose custom id an earlier line has, ascending."""
        digests = np.frombuffer(self._digests, np.dtype([("high", "<u8"), ("low", "<u8")]))
        # Stable: of equal ones the first line comes first.
        order = np.lexsort((digests["low"], digests["high"]))
        repeated = digests[order[1:]] == digests[order[:-1]]
        return np.sort(np.frombuffer(self._lines, np.int64)[order[1:][repeated]])


class FileDigest:
    """The digest of a file, and whether it is still the file that was digested."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: tuple[int, ...] = ()

    def of(self, file: BufferedReader[FileIO]) -> str:
        """The digest of what is in an open file, which is left at its beginning."""
        self._state = _state_of(file)
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_SIZE))
        file.seek(0)
        return digest.hexdigest()

    def check(self, file: BufferedReader[FileIO]) -> None:
        """Refuse a file that is another one by now.

        Raises:
            BatchError: its size, its time or the file itself has changed.
        """
        if self._state and _state_of(file) != self._state:
            raise BatchError(
                f"{self._path} has changed while it was read: run the command again with the file as it was"
            )


def _state_of(file: BufferedReader[FileIO]) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


@contextmanager
def readable(path: Path) -> Iterator[BufferedReader[FileIO]]:
    """An input, open for reading.

    Raises:
        BatchError: it cannot be read.
    """
    try:
        with BufferedReader(path.open("rb", buffering=0), _READ_BYTES) as file:
            yield file
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror or error}") from error


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does, whatever it is called.

    Raises:
        BatchError: it cannot be read.
    """
    with readable(path) as file:
        return file.read(4) == b"PAR1"


class JsonlSource:
    """A file with a JSON object on each line; empty lines are passed over.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = FileDigest(path)

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        ids, starts, number, is_empty = CustomIds(), dict[int, int](), 0, True
        decode = msgspec.json.Decoder(_CustomId).decode
        with readable(self.path) as file:
            digest = self._digest.of(file)
            for number, (begin, line) in enumerate(_split(file), 1):
                if (number - 1) % shard_lines == 0:
                    starts[len(starts)] = begin
                is_empty = is_empty and line is not None and line.isspace()
                try:
                    ids.add(number, decode(line or b"{}").custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    pass  # Told when the line is read.
            self._digest.check(file)
            return Index("jsonl", file.tell(), digest, number, is_empty, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        decode = msgspec.json.Decoder(Fields).decode
        with readable(self.path) as file:
            for shard in sorted(shards):
                self._digest.check(file)
                file.seek(index.starts[shard])
                first = shard * shard_lines + 1
                lines = islice(_split(file), min(shard_lines, index.lines - first + 1))
                yield from chunks(shard, (_decoded(at, line, decode) for at, (_, line) in enumerate(lines, first)))


def chunks(shard: int, lines: Iterator[Line | None]) -> Iterator[Chunk]:
    """The lines of a shard, some at a time; None stands for a line that has nothing."""
    before: list[Line] | None = None
    while numbered := list(islice(lines, _LINES_AT_ONCE)):
        if before is not None:
            yield Chunk(shard, before, False)
        before = [line for line in numbered if line is not None]
    yield Chunk(shard, before or [], True)


def _split(file: BufferedReader[FileIO]) -> Iterator[tuple[int, bytes | None]]:
    """The lines from where a file stands, and where each begins; None for one that is too long."""
    at = file.tell()
    while line := file.readline(MOST_LINE_BYTES):
        begin, at = at, at + len(line)
        if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
            yield begin, line if begin else line.removeprefix(_BYTE_ORDER_MARK)
            continue
        while rest := file.readline(_READ_BYTES):
            at += len(rest)
            if rest.endswith(b"\n"):
                break
        yield begin, None


def _decoded(number: int, line: bytes | None, decode: Callable[[bytes], Fields]) -> Line | None:
    if line is None:
        return Line(number, None, f"the line has more than {MOST_LINE_BYTES >> 20} MiB")
    if line.isspace():
        return None
    try:
        return Line(number, decode(line))
    except msgspec.ValidationError as error:
        return Line(number, None, _unusable(error), _custom_id_of(line))
    except RecursionError:
        return Line(number, None, "its lists and objects are nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Line(number, None, f"no JSON: {error}")


def _custom_id_of(line: bytes) -> str | None:
    """The custom id of a line that is unusable else, if that can be read."""
    try:
        custom_id = msgspec.json.decode(line, type=_CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if custom_id is None else str(custom_id)


def converted(number: int, row: dict[str, Any]) -> Line:
    """The line that a row of a table is."""
    try:
        return Line(number, msgspec.convert(row, Fields))
    except msgspec.ValidationError as error:
        return Line(number, None, _unusable(error))


def _unusable(error: msgspec.ValidationError) -> str:
    """Which field of a line has a value of another type, of which one, and what it must be."""
    found = _MISMATCH.fullmatch(str(error))
    if found is None:
        return f"unusable: {error}"
    expected, given, field = found.groups()
    wanted = " or ".join(_TYPES.get(kind, kind) for kind in expected.split(" | ") if kind != "null")
    return f"{f'{field}:' if field else 'the line'} must be {wanted}, not {_TYPES.get(given, given)}"
