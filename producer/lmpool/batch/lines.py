"""The lines of an input, JSONL or Parquet: where shards begin, which custom ids come twice, and what each line says."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.kinds import Ids
from lmpool.errors import BatchError

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Of one line; a longer one is not read."""

MAX_CHUNK_LINES = 256
"""Lines in one chunk."""

MAX_CHUNK_BYTES = 1024 * 1024
"""Bytes of the input in one chunk of several lines: some chunks are in memory at once, and ids take six times as much
there as in a JSONL file."""

_DIGEST_SIZE = 16
# Bytes that are read at once, and that have one digest of 16 bytes: 16 MB of digests for an input of 1 TB.
_READ_BYTES = 1024 * 1024
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


class InputFile:
    """An input, which must stay as it is from when it is opened first until all of it has been read.

    A pass over the whole file records a digest of each block, and every later read compares the block with it. So no
    line of another file is taken for one of this file, even where both have the same size and time.

    Args:
        path: of the file.

    Raises:
        BatchError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            self._state = _state_of(path.stat())
        self._blocks: list[bytes] = []

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._state[0]

    @contextmanager
    def opened(self) -> Iterator[BufferedReader[Blocks]]:
        """The file, open for reading.

        Raises:
            BatchError: it cannot be read, or has changed.
        """
        with self._explained(), BufferedReader(Blocks(self.path, self.check_block), _READ_BYTES) as file:
            self.check(file)
            yield file

    @contextmanager
    def recorded(self) -> Iterator[tuple[BufferedReader[Blocks], Callable[[], str]]]:
        """The file, open for one pass from its beginning to its end, and a function that returns its digest after that.

        Raises:
            BatchError: it cannot be read, or has changed.
        """
        self._blocks, whole = [], hashlib.blake2b(digest_size=_DIGEST_SIZE)

        def record(number: int, block: bytes) -> None:
            if block and number == len(self._blocks):
                whole.update(block)
                self._blocks.append(_digest_of(block))

        with self._explained(), BufferedReader(Blocks(self.path, record), _READ_BYTES) as file:
            yield file, whole.hexdigest
            self.check(file)

    def check(self, file: BufferedReader[Blocks]) -> None:
        """Refuse an open file that is another one by now.

        Raises:
            BatchError: its size, its time or the file itself has changed.
        """
        if _state_of(os.fstat(file.fileno())) != self._state:
            raise self._changed()

    def check_block(self, number: int, block: bytes) -> None:
        """Refuse a block that is not the one that was recorded; without a record every block is accepted.

        Raises:
            BatchError: it is another one.
        """
        recorded = self._blocks[number] if number < len(self._blocks) else _digest_of(b"")
        if self._blocks and _digest_of(block) != recorded:
            raise self._changed()

    def _changed(self) -> BatchError:
        return BatchError(f"{self.path} has changed while it was read: run the command again with the file as it was")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchError(f"{self.path} cannot be read: {error.strerror or error}") from error


class Blocks(RawIOBase):
    """A file that is read block by block, each of which is checked.

    Args:
        path: of the file.
        check: called with the number of each block that is read, from 0, and what is in it.
    """

    def __init__(self, path: Path, check: Callable[[int, bytes], None]) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._check = check
        self._at = 0
        # The block that was read last, and its number.
        self._number, self._block = -1, b""

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte; returns its number."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence)
        self._at = offset + (os.fstat(self.fileno()).st_size if begin is None else begin)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read to the end of the present block at most; returns how many bytes that are, 0 at the end of the file."""
        number, begin = divmod(self._at, _READ_BYTES)
        if number != self._number:
            block = os.pread(self.fileno(), _READ_BYTES, number * _READ_BYTES)
            self._check(number, block)
            self._number, self._block = number, block
        part = self._block[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


def _digest_of(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST_SIZE).digest()


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does, whatever it is called.

    Raises:
        BatchError: it cannot be read.
    """
    with InputFile(path).opened() as file:
        return file.read(4) == b"PAR1"


class JsonlSource:
    """A file with a JSON object on each line; empty lines are passed over.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._input = InputFile(path)

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        ids, starts, number, is_empty = CustomIds(), dict[int, int](), 0, True
        decode = msgspec.json.Decoder(_CustomId).decode
        with self._input.recorded() as (file, digest):
            for number, (begin, line) in enumerate(_split(file), 1):
                if (number - 1) % shard_lines == 0:
                    starts[len(starts)] = begin
                is_empty = is_empty and line is not None and line.isspace()
                with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # Reported with its line.
                    ids.add(number, decode(line or b"{}").custom_id)
        return Index("jsonl", self._input.size, digest(), number, is_empty, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        decode = msgspec.json.Decoder(Fields).decode
        with self._input.opened() as file:
            for shard in sorted(shards):
                file.seek(index.starts[shard])
                first = shard * shard_lines + 1
                lines = islice(_split(file), min(shard_lines, index.lines - first + 1))
                decoded = ((_decoded(at, line, decode), len(line or b"")) for at, (_, line) in enumerate(lines, first))
                for chunk in chunks(shard, decoded):
                    self._input.check(file)
                    yield chunk


def chunks(shard: int, lines: Iterator[tuple[Line | None, int]]) -> Iterator[Chunk]:
    """The lines of a shard, some at a time.

    Args:
        shard: its number.
        lines: the lines, None for one that has nothing, and the bytes of each in the input.
    """
    some, count, size = list[Line](), 0, 0
    for line, line_bytes in lines:
        if count and (count == MAX_CHUNK_LINES or size + line_bytes > MAX_CHUNK_BYTES):
            yield Chunk(shard, some, False)
            some, count, size = [], 0, 0
        count += 1
        size += line_bytes
        if line is not None:
            some.append(line)
    yield Chunk(shard, some, True)


def _split(file: BufferedReader[Blocks]) -> Iterator[tuple[int, bytes | None]]:
    """The lines from where a file stands, and where each begins; None for one that is too long."""
    at = file.tell()
    while line := file.readline(MAX_LINE_BYTES):
        begin, at = at, at + len(line)
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield begin, line if begin else line.removeprefix(_BYTE_ORDER_MARK)
            continue
        while rest := file.readline(_READ_BYTES):
            at += len(rest)
            if rest.endswith(b"\n"):
                break
        yield begin, None


def _decoded(number: int, line: bytes | None, decode: Callable[[bytes], Fields]) -> Line | None:
    if line is None:
        return Line(number, None, f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
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
