"""Parquet, for which pyarrow is needed: inputs, and shards of answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.batch.kinds import Columns, Text
from lmpool.batch.lines import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_LINES,
    Chunk,
    CustomIds,
    Fields,
    Index,
    InputFile,
    Line,
    chunks,
    converted,
)
from lmpool.errors import BatchError, SettingsError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingsError("format: Parquet needs pyarrow: pip install 'lmpool[parquet]', or use JSONL") from error

# Bytes of a column that are read at once, where a row group would be read whole.
_READ_BYTES = 1 << 20
_NUMBER_BYTES = 8
_GROUP_NUMBERS = 1 << 20
_HEAD = ("line", "custom_id", "ids", "start")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Make what pyarrow raises an error of ours.

    Raises:
        BatchError: the file cannot be read, or is no Parquet file.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise BatchError(f"{path} cannot be read as Parquet: {error}") from error


class ParquetSource:
    """A Parquet file with the columns of `lmpool.batch.lines.Fields`; each row is a line.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._input = InputFile(path)

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        with self._input.recorded() as (raw, digest):
            while raw.read(_READ_BYTES):
                pass
        ids, row = CustomIds(), 0
        with self._input.opened() as raw, _explained(self.path):
            file = _opened(raw)
            if "custom_id" in file.schema_arrow.names:
                for batch in file.iter_batches(batch_size=MAX_CHUNK_LINES, columns=["custom_id"]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        ids.add(row, value)
            rows: int = file.metadata.num_rows
        starts = dict(enumerate(range(0, rows, shard_lines)))
        return Index("parquet", self._input.size, digest(), rows, not rows, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        with self._input.opened() as raw, _explained(self.path):
            pieces = _pieces(_opened(raw), shard_lines, shards)
            for shard, of_shard in groupby(pieces, key=lambda piece: piece.shard):
                for chunk in chunks(shard, (line for piece in of_shard for line in _lines_of(piece))):
                    self._input.check(raw)
                    yield chunk


def _opened(raw: Any) -> Any:
    """A Parquet file of an open one. It is not memory-mapped: when such a file is cut, SIGBUS ends the process."""
    return pq.ParquetFile(raw, buffer_size=_READ_BYTES)


class _Piece(NamedTuple):
    """Some rows of a shard, the first of which has the number `first`."""

    shard: int
    first: int
    rows: Any


def _lines_of(piece: _Piece) -> Iterator[tuple[Line, int]]:
    """The lines that the rows are, and the mean bytes of a row."""
    row_bytes = piece.rows.nbytes // piece.rows.num_rows
    for number, row in enumerate(piece.rows.to_pylist(), piece.first + 1):
        yield converted(number, row), row_bytes


def _pieces(file: Any, shard_lines: int, shards: Collection[int]) -> Iterator[_Piece]:
    """The rows of some shards, in order. A row group is gone through once, however many shards lie in it."""
    wanted, at = set(shards), 0
    columns = [name for name in file.schema_arrow.names if name in Fields.__struct_fields__]
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if wanted.isdisjoint(range(at // shard_lines, -(-(at + rows) // shard_lines))):
            at += rows
            continue
        size = _rows_at_once(file.metadata.row_group(group), set(columns))
        for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
            begin = 0
            while begin < batch.num_rows:
                shard = (at + begin) // shard_lines
                size = min(batch.num_rows - begin, (shard + 1) * shard_lines - at - begin)
                if shard in wanted:
                    yield _Piece(shard, at + begin, batch.slice(begin, size))
                begin += size
            at += batch.num_rows


def _rows_at_once(group: Any, columns: set[str]) -> int:
    """How many rows of a group are decoded together, so that long ones take no more memory than short ones."""
    read = [
        column
        for at in range(group.num_columns)
        if (column := group.column(at)).path_in_schema.split(".")[0] in columns
    ]
    size: int = sum(max(_NUMBER_BYTES * column.num_values, column.total_uncompressed_size) for column in read)
    rows: int = group.num_rows
    return max(1, min(MAX_CHUNK_LINES, MAX_CHUNK_BYTES * rows // max(1, size)))


class ParquetAnswers:
    """A row for each text: line, custom_id, ids, start, and each column as a list, or a list of lists of equal length.

    Args:
        file: a new `lmpool.batch.shards.CheckedFile`.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._parts: list[Columns] = []
        self._texts: list[Text] = []
        self._columns: list[Columns] = []
        self._numbers = 0
        self._writer: Any = None

    def add(self, text: Text, part: Columns) -> None:
        """See `AnswerFile.add`."""
        self._parts.append(part)

    def end_text(self, text: Text) -> None:
        """See `AnswerFile.end_text`."""
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        self._parts = []
        self._texts.append(text)
        self._columns.append(columns)
        self._numbers += len(text.ids) + sum(values.size for values in columns.values())
        if self._numbers >= _GROUP_NUMBERS:
            self._write_group()

    def drop_text(self) -> None:
        """See `AnswerFile.drop_text`."""
        self._parts = []

    def close(self) -> None:
        """See `AnswerFile.close`."""
        if self._texts or self._writer is None:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        texts, columns = self._texts, self._columns
        arrays: dict[str, Any] = {
            "line": pa.array([text.line for text in texts], pa.int64()),
            "custom_id": pa.array([text.custom_id for text in texts], pa.string()),
            "ids": _lists([np.array(text.ids, np.int64) for text in texts], np.int64),
            "start": pa.array([text.span.start for text in texts], pa.int64()),
        }
        for name in columns[0] if columns else ():
            arrays[name] = _lists([answer[name] for answer in columns], np.float32)
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._texts, self._columns, self._numbers = [], [], 0


def _lists(arrays: list[NDArray[Any]], empty: type[Any]) -> Any:
    """A list for each array; of an array with two axes a list of lists of equal length."""
    values = np.concatenate(arrays) if arrays else np.empty(0, empty)
    flat = pa.array(values.ravel())
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


class ParquetShard:
    """See `ParquetAnswers`; reads a row group at a time, and keeps the last one.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        with _explained(path):
            self._file = pq.ParquetFile(path, memory_map=True)
        rows = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum([0, *rows])
        self._group, self._table = -1, None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def answer(self, at: int) -> dict[str, Any]:
        """See `ShardFile.answer`."""
        group = int(np.searchsorted(self._ends, at, side="right")) - 1
        if group != self._group:
            self._group, self._table = group, self._file.read_row_group(group).combine_chunks()
        table: Any = self._table
        row = at - int(self._ends[group])
        values = {name: table.column(name).chunk(0)[row] for name in table.column_names}
        head = {"line": values["line"].as_py(), "custom_id": values["custom_id"].as_py() or ""}
        head |= {"ids": _array(values["ids"]), "start": values["start"].as_py()}
        return head | {name: _array(value) for name, value in values.items() if name not in _HEAD}

    def custom_ids(self) -> Iterator[str]:
        """See `ShardFile.custom_ids`."""
        for value in self._file.read(columns=["custom_id"]).column(0).to_pylist():
            yield value or ""


def _array(value: Any) -> NDArray[Any]:
    """What a list holds, (n,) or (n, k): a view of the table."""
    values = value.values
    if not pa.types.is_fixed_size_list(values.type):
        return np.asarray(values)
    return np.asarray(values.flatten()).reshape(-1, values.type.list_size)
