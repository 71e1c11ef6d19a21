"""Read the lines of an input, JSONL or Parquet; find where shards begin and which custom ids repeat."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.fetch import NOT_READABLE, absolute, explained, plain_file, pyarrow, state_of
from lmpool.batch.folder import digest_of_file
from lmpool.batch.shards import Failed, HasCustomId
from lmpool.errors import BatchError

MAX_LINE_BYTES = 64 * 1024 * 1024  # Max bytes of one line, to limit memory. A longer line fails.
MAX_CHUNK_LINES = 256  # Max lines in a chunk: one call in a thread tokenizes a chunk.
# Max bytes of input in a chunk. Memory holds several chunks, whose token ids need six times as many bytes.
MAX_CHUNK_BYTES = 1024 * 1024
# Bytes per read, which limits memory and system calls. Without this limit, pyarrow would read a whole row group.
_READ_BYTES = 1024 * 1024
_DIGEST_BYTES = 16  # Bytes of a BLAKE2b digest.
_NUMBER_BYTES = 8  # Max bytes of a decoded number: in a Parquet file a number may take fewer bytes.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Body(msgspec.Struct):
    """The request in a line of OpenAI's and vLLM's batch files."""

    prompt: str | list[int] | None = None
    input: str | list[int] | None = None


class Fields(HasCustomId):
    """The fields of a line that are read; other fields are ignored."""

    text: str | None = None
    ids: list[int] | None = None
    prompt: str | list[int] | None = None
    continuation: str | list[int] | None = None
    body: Body | None = None


class Line(NamedTuple):
    """A line that was read: the line's number, from 1, and its fields."""

    number: int
    fields: Fields


class Chunk(NamedTuple):
    """Consecutive lines of one shard, and whether the shard ends with them."""

    shard: int
    lines: list[Line | Failed]
    is_last: bool


class Index(NamedTuple):
    """The format, size, digest and shards of an input, found by reading the whole input once."""

    format: str  # Format of the input, "jsonl" or "parquet".
    size: int  # Bytes of the input.
    digest: str  # 128-bit BLAKE2b of the input, hexadecimal.
    lines: int
    is_empty: bool  # Whether all lines are empty.
    starts: dict[int, int]  # Number of a shard -> its first byte in a JSONL file, or its first row in a Parquet file.
    duplicates: NDArray[np.int64]  # Numbers of the lines whose custom id an earlier line has, ascending.


class CustomIds:
    """Finds repeated custom ids with 24 bytes per line: the 128-bit digest of the custom id and the line's number."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._lines = array("q")

    def add(self, line: int, custom_id: str | int | None) -> None:
        """Add the custom id of a line, if it has one."""
        if custom_id is not None:
            name = str(custom_id).encode("utf-8", "surrogatepass")
            self._digests += hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
            self._lines.append(line)

    def duplicates(self) -> NDArray[np.int64]:
        """The lines whose custom id an earlier line has, ascending."""
        digests = np.frombuffer(self._digests, np.dtype([("high", "<u8"), ("low", "<u8")]))
        # `lexsort` is stable: of lines with equal digests, the first line is first.
        order = np.lexsort((digests["low"], digests["high"]))
        repeated = digests[order[1:]] == digests[order[:-1]]
        return np.sort(np.frombuffer(self._lines, np.int64)[order[1:][repeated]])


class Source:
    """An input of a run, with a JSON object on each line; subclasses read other formats. Empty lines are skipped.

    The input must not change: the methods raise BatchError if the file cannot be read, or has changed since the
    `Source` was made. `location` is the user's path or URL; `path` is a local file with the data.
    """

    def __init__(self, path: Path, location: str = "") -> None:
        self.path, self.location = path, location or str(path)
        with explained(str(path), NOT_READABLE, OSError):
            self.state = state_of(path.stat())

    def index(self, shard_lines: int) -> Index:
        """Read the whole input, and return its index."""
        ids, starts, number, is_empty = CustomIds(), dict[int, int](), 0, True
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        with self._opened() as file:
            for number, (begin, line) in enumerate(_split(file, digest.update), 1):
                if (number - 1) % shard_lines == 0:
                    starts[len(starts)] = begin
                is_empty = is_empty and line is not None and line.isspace()
                ids.add(number, _custom_id(line or b"{}"))
            self._check(file)
        return Index("jsonl", self.state[0], digest.hexdigest(), number, is_empty, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """The lines of some shards, in order."""
        with self._opened() as file:
            for shard in sorted(shards):
                file.seek(index.starts[shard])
                first = shard * shard_lines + 1
                lines = islice(_split(file), min(shard_lines, index.lines - first + 1))
                decoded = ((_read_json(at, line), len(line or b"")) for at, (_, line) in enumerate(lines, first))
                yield from self._chunks(file, shard, decoded)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with explained(self.location, NOT_READABLE, OSError), self.path.open("rb", buffering=_READ_BYTES) as file:
            self._check(file)
            yield file

    def _check(self, file: BinaryIO) -> None:
        """Refuse an open file that has changed: call this after every read, before the data is used."""
        if state_of(os.fstat(file.fileno())) != self.state:
            raise BatchError(f"{self.path} changed while it was read. Run the command again with the original file")

    def _chunks(self, file: BinaryIO, shard: int, lines: Iterator[tuple[Line | Failed | None, int]]) -> Iterator[Chunk]:
        """Group lines of a shard into chunks. `lines` are (line, bytes in the input); an empty line is None."""
        some, size = list[Line | Failed](), 0
        for line, line_bytes in lines:
            if some and (len(some) == MAX_CHUNK_LINES or size + line_bytes > MAX_CHUNK_BYTES):
                self._check(file)
                yield Chunk(shard, some, False)
                some, size = [], 0
            size += line_bytes
            if line is not None:
                some.append(line)
        self._check(file)
        yield Chunk(shard, some, True)


def open_source(location: str) -> Source:
    """The input at a path or a URL: Parquet if it begins with "PAR1" or has the suffix ".parquet", else JSONL."""
    location = absolute(location)
    path = plain_file(location)
    with explained(str(path), NOT_READABLE, OSError), path.open("rb") as file:
        is_parquet = path.suffix == ".parquet" or file.read(4) == b"PAR1"
    return (ParquetSource if is_parquet else Source)(path, location)


def _split(file: BinaryIO, update: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes | None]]:
    """Iterate over (first byte, line) from the file's position on; the line is None if it is too long.

    `update` is called with the bytes of each read.
    """
    at = file.tell()
    while line := file.readline(MAX_LINE_BYTES):
        update(line)
        begin, at = at, at + len(line)
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield begin, line if begin else line.removeprefix(_BYTE_ORDER_MARK)
            continue
        while not line.endswith(b"\n") and (line := file.readline(_READ_BYTES)):
            update(line)
            at += len(line)
        yield begin, None


# The functions that decode all fields of a line, and only its custom id: a line of JSON, or a row of Parquet.
_JSON = msgspec.json.Decoder(Fields).decode, msgspec.json.Decoder(HasCustomId).decode
_ROW = partial(msgspec.convert, type=Fields), partial(msgspec.convert, type=HasCustomId)


def _read_json(number: int, line: bytes | None) -> Line | Failed | None:
    if line is None:
        return Failed(number, None, f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
    return None if line.isspace() else _decoded(number, line, *_JSON)


def _decoded(
    number: int, line: Any, decode: Callable[[Any], Fields], decode_id: Callable[[Any], HasCustomId]
) -> Line | Failed:
    try:
        return Line(number, decode(line))
    except msgspec.ValidationError as error:
        reason = f"unusable: {error}"
    except RecursionError:
        reason = "the lists and objects of the line are nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"no JSON: {error}"
    return Failed(number, _custom_id(line, decode_id), reason)


def _custom_id(line: Any, decode: Callable[[Any], HasCustomId] = _JSON[1]) -> str | None:
    """The custom id of a line, even if other fields are malformed; None if the custom id cannot be read."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode(line).name
    return None


class ParquetSource(Source):
    """A Parquet file with the columns of `Fields`; each row is a line."""

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        ids, row = CustomIds(), 0
        with self._parquet() as (raw, file):
            digest = digest_of_file(self.path)
            if "custom_id" in file.schema_arrow.names:
                for batch in file.iter_batches(columns=["custom_id"]):
                    for row, value in enumerate(batch.column(0).to_pylist(), row + 1):  # noqa: B020 `row` counts on.
                        ids.add(row, value)
            rows: int = file.metadata.num_rows
            self._check(raw)
        starts = dict(enumerate(range(0, rows, shard_lines)))
        return Index("parquet", self.state[0], digest, rows, not rows, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        with self._parquet() as (raw, file):
            for shard, lines in groupby(_rows(file, shard_lines, set(shards)), key=lambda row: row[0]):
                yield from self._chunks(raw, shard, (row[1:] for row in lines))

    @contextmanager
    def _parquet(self) -> Iterator[tuple[BinaryIO, Any]]:
        """Open the file as Parquet. The file is not memory-mapped: if it were cut, SIGBUS would end the process."""
        arrow = pyarrow("format: Parquet")
        with self._opened() as raw:
            try:
                yield raw, arrow.parquet.ParquetFile(raw, buffer_size=_READ_BYTES)
            except (arrow.ArrowException, OSError) as error:
                self._check(raw)
                raise BatchError(f"{self.path} cannot be read as Parquet: {error}") from error


def _rows(file: Any, shard_lines: int, shards: set[int]) -> Iterator[tuple[int, Line | Failed, int]]:
    """Iterate over (shard, line, bytes) of some shards, in order; `bytes` is the mean size of several rows."""
    columns = [name for name in file.schema_arrow.names if name in Fields.__struct_fields__]
    at = 0

    def is_wanted(rows: int) -> bool:
        return not shards.isdisjoint(range(at // shard_lines, -(-(at + rows) // shard_lines)))

    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if not is_wanted(group.num_rows):
            at += group.num_rows
            continue
        # Decode at most `MAX_CHUNK_LINES` rows at once, with at most `MAX_CHUNK_BYTES` if all rows have the same size.
        parts = map(group.column, range(group.num_columns))
        read = (part for part in parts if part.path_in_schema.partition(".")[0] in columns)
        size = sum(max(_NUMBER_BYTES * part.num_values, part.total_uncompressed_size) for part in read)
        rows = max(1, min(MAX_CHUNK_LINES, MAX_CHUNK_BYTES * group.num_rows // max(1, size)))
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=columns):
            if is_wanted(batch.num_rows):
                row_bytes = batch.nbytes // batch.num_rows
                for row, values in enumerate(batch.to_pylist(), at):
                    if (shard := row // shard_lines) in shards:
                        yield shard, _decoded(row + 1, values, *_ROW), row_bytes
            at += batch.num_rows
