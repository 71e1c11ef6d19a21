"""Write and read shards: files of results as JSONL, Parquet or safetensors (`lmpool.batch.open` reads them).

A safetensors shard of n texts with N positions in all:

    <columns>    (N, …)    the results, text after text
    custom_ids   U8        custom ids of the texts: a JSON list, padded with spaces
    positions    I64 (n+1) text i has the results [positions[i], positions[i + 1])
    starts       I64 (n)   first position of each text
    lines        I64 (n)   line of each text in the input
    ids          I64       token ids of all texts
    tokens       I64 (n+1) text i has the ids [tokens[i], tokens[i + 1])

The library safetensors writes a whole file from memory. This module keeps only the results of a few texts in memory.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.fetch import pyarrow
from lmpool.batch.folder import Folder, Manifest, Shard, open_folder, sync
from lmpool.broker.bucket import named
from lmpool.errors import BatchError, SettingsError
from lmpool.protocol.row import widen_bf16

_HEADER_BYTES = 4096  # Bytes reserved for a safetensors header, before the columns are known: headers have about 1 KiB.
_READ_BYTES = 1 << 20  # Bytes per read when a shard is read back, which limits memory and system calls.
_GROUP_NUMBERS = 1 << 20  # Max numbers in a Parquet row group, 4 to 8 MB: a reader decodes a whole group for one text.
# Types of safetensors -> types of numpy; a bfloat16 number is kept as its 16 bits.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "uint16", "I64": "int64", "U8": "uint8"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

Columns = dict[str, NDArray[Any]]
"""The result for some positions of a text: column -> array whose first axis is the positions."""

Answer = dict[str, Any]
"""The result of one text: "line" (int, from 1), "custom_id" (str, "" for none), "ids" (int64 (N,)), "start" (int), and
the columns of the manifest, as arrays whose first axis is the positions from "start" on. A result with "logits" and
"log_z" also has "logprobs", computed from both."""


class Text(NamedTuple):
    """One text of the input: its line, from 1, its custom id, its token ids, and the positions that are wanted."""

    line: int
    custom_id: str | None
    ids: list[int]
    span: range


class HasCustomId(msgspec.Struct):
    """A line whose custom id alone is decoded."""

    custom_id: str | int | None = None

    @property
    def name(self) -> str | None:
        """The custom id as text; None for none."""
        return None if self.custom_id is None else str(self.custom_id)


class Failed(NamedTuple):
    """A line without a result: its number, from 1, its custom id, and the reason."""

    line: int
    custom_id: str | None
    error: str


class CheckedFile(io.BufferedRandom):
    """A new file that keeps a digest of all written bytes, to compare it with the digest of the bytes on the disk.

    Attributes:
        digest: digest of the bytes after the header. The header is written last; `read_back` compares its bytes.
    """

    def __init__(self, file: io.BufferedRandom) -> None:
        super().__init__(file.detach())
        self.digest = hashlib.blake2b(digest_size=16)
        self._header = b""

    def write(self, data: Any, /) -> int:
        """Write at the end of the file."""
        self.digest.update(data)
        return super().write(data)

    def write_header(self, header: bytes) -> None:
        """Write the header into the first bytes of the file, which the writer skipped with `seek`."""
        self._header = header
        self.seek(0)
        super().write(header)

    def read_back(self) -> tuple[str, int]:
        """The digest of the file on the disk, as `digest_of_file` returns it, and the number of its lines."""
        self.seek(0)
        header = self.read(len(self._header))
        whole, written, lines = hashlib.blake2b(header, digest_size=16), hashlib.blake2b(digest_size=16), 0
        while data := self.read(_READ_BYTES):
            whole.update(data)
            written.update(data)
            lines += data.count(b"\n")
        if header != self._header or written.digest() != self.digest.digest():
            raise self.damaged("its digest is not the digest of the bytes that were written")
        return whole.hexdigest(), lines

    def damaged(self, reason: str) -> BatchError:
        """The error for a file whose bytes are not the written bytes."""
        error = BatchError(f"{self.name} was damaged: {reason}. Its shard is not kept. Run the same command again")
        error.may_pass = True
        return error


class ShardWriter:
    """Writes one shard and the errors of its lines. The parts of a text are kept until the text ends.

    This class writes one JSON object per line: line, custom_id, ids, start, and the columns; null stands for minus
    infinity. Subclasses write other formats: see `open_writer`.
    """

    def __init__(self, folder: Folder, manifest: Manifest, number: int) -> None:
        self._folder, self._manifest, self._number = folder, manifest, number
        self._file = CheckedFile(folder.create(manifest.shard_name(number)))
        self._parts: list[Columns] = []
        self._errors: list[bytes] = []
        self._failed_line = self._texts = 0

    def add(self, text: Text, part: Columns, is_last: bool) -> None:
        """Add the result for the next positions of a text. Parts after a failed part are dropped."""
        if text.line != self._failed_line:
            self._parts.append(self._streamed(part))
            if is_last:
                self._end_text(text)
                self._parts = []
                self._texts += 1

    def fail(self, failed: Failed) -> None:
        """Add a line without a result."""
        if failed.line != self._failed_line:
            self._drop_text()
            self._parts = []
            self._failed_line = failed.line
            self._errors.append(msgspec.json.encode(failed._asdict()) + b"\n")

    def place(self) -> Shard:
        """Move the shard into the folder, unless another run of the same command has already written this shard."""
        path = Path(self._file.name)
        self._write_rest()
        sync(self._file)
        digest, lines = self._file.read_back()
        if self._manifest.options.format == "jsonl" and lines != self._texts:
            raise self._file.damaged(f"it has {lines} lines, and {self._texts} texts have a result")
        self._file.close()
        if there := self._folder.done(self._manifest, self._number):
            self.discard()
            return there[self._number]
        shard = Shard(self._number, self._texts, len(self._errors), path.stat().st_size, digest)
        self._folder.place_shard(self._manifest, shard, path, self._errors)
        return shard

    def discard(self) -> None:
        """Remove the unfinished file."""
        with suppress(OSError):
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()

    def _streamed(self, part: Columns) -> Columns:
        """Write the columns of a part that can be written now; return the columns to keep until the text ends."""
        return part

    def _end_text(self, text: Text) -> None:
        """Write a text after all its parts were added."""
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        self._write(text, columns)

    def _write(self, text: Text, columns: Columns) -> None:
        head = {"line": text.line, "custom_id": text.custom_id, "ids": text.ids, "start": text.span.start}
        lists = {name: values.tolist() for name, values in columns.items()}
        self._file.write(msgspec.json.encode(head | lists) + b"\n")

    def _drop_text(self) -> None:
        """Remove the bytes from the file that `_streamed` wrote for a text that has not ended."""

    def _write_rest(self) -> None:
        """Write the rest of the file."""


class ParquetWriter(ShardWriter):
    """Writes a row for each text: line, custom_id, ids, start, and each column as a list, or as a list of lists."""

    def __init__(self, *given: Any) -> None:
        self._arrow = pyarrow("format: Parquet")
        super().__init__(*given)
        self._results: list[tuple[Text, Columns]] = []
        self._numbers = 0
        self._writer: Any = None

    def _write(self, text: Text, columns: Columns) -> None:
        self._results.append((text, columns))
        self._numbers += len(text.ids) + sum(values.size for values in columns.values())
        if self._numbers >= _GROUP_NUMBERS:
            self._write_group()

    def _write_rest(self) -> None:
        if self._results or self._writer is None:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        pa, texts = self._arrow, [text for text, _ in self._results]
        arrays: dict[str, Any] = {
            "line": pa.array([text.line for text in texts], pa.int64()),
            "custom_id": pa.array([text.custom_id for text in texts], pa.string()),
            "ids": self._lists([np.array(text.ids, np.int64) for text in texts]),
            "start": pa.array([text.span.start for text in texts], pa.int64()),
        }
        for name in self._results[0][1] if texts else ():
            arrays[name] = self._lists([columns[name] for _, columns in self._results])
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pa.parquet.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._results, self._numbers = [], 0

    def _lists(self, arrays: list[NDArray[Any]]) -> Any:
        """A list for each array; for arrays with two axes, lists of lists of equal length."""
        pa = self._arrow
        values: NDArray[Any] = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        flat = pa.array(values.ravel())
        if values.ndim == 2:
            flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), flat)


class SafetensorsWriter(ShardWriter):
    """Writes a safetensors file: the first column part by part, the other columns at the end, from memory."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._file.seek(_HEADER_BYTES)
        self._ended: list[Text] = []
        self._others: list[Columns] = []
        self._column, self._shape, self._code = "", tuple[int, ...](), "F32"
        self._end, self._digest = _HEADER_BYTES, self._file.digest.copy()

    def _streamed(self, part: Columns) -> Columns:
        (self._column, values), *others = part.items()
        self._shape, self._code = values.shape[1:], _CODES[values.dtype.name]
        self._file.write(np.ascontiguousarray(values).data.cast("B"))
        return dict(others)

    def _end_text(self, text: Text) -> None:
        self._ended.append(text)
        self._others += self._parts
        self._end, self._digest = self._file.tell(), self._file.digest.copy()

    def _drop_text(self) -> None:
        self._file.seek(self._end)
        self._file.truncate()
        self._file.digest = self._digest.copy()

    def _write_rest(self) -> None:
        texts, end, header = self._ended, self._end - _HEADER_BYTES, dict[str, Any]()
        custom_ids = msgspec.json.encode([text.custom_id for text in texts])
        custom_ids += b" " * (-(end + len(custom_ids)) % 8)  # The next tensor begins at a multiple of 8 bytes.
        arrays: dict[str, NDArray[Any]] = {
            "custom_ids": np.frombuffer(custom_ids, np.uint8),
            "positions": np.cumsum([0, *(len(text.span) for text in texts)], dtype=np.int64),
            "starts": np.array([text.span.start for text in texts], np.int64),
            "lines": np.array([text.line for text in texts], np.int64),
            "ids": np.array([token for text in texts for token in text.ids], np.int64),
            "tokens": np.cumsum([0, *(len(text.ids) for text in texts)], dtype=np.int64),
        }
        if self._column:
            shape = [int(arrays["positions"][-1]), *self._shape]
            header[self._column] = {"dtype": self._code, "shape": shape, "data_offsets": [0, end]}
        for name in self._others[0] if self._others else ():
            arrays[name] = np.concatenate([part[name] for part in self._others])
        for name, values in arrays.items():
            begin, end = end, end + values.nbytes
            code = _CODES[values.dtype.name]
            header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [begin, end]}
            self._file.write(values.tobytes())
        text = msgspec.json.encode(header)
        assert len(text) <= _HEADER_BYTES - 8
        self._file.write_header((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))


_WRITERS: dict[str, type[ShardWriter]] = {"parquet": ParquetWriter, "safetensors": SafetensorsWriter}


def choose_format(is_wide: bool, wanted: str | None) -> str:
    """The format of shards: the wanted format, or the default."""
    possible = ("safetensors",) if is_wide else ("jsonl", "parquet")
    if wanted not in (None, *possible):
        raise SettingsError(f"format: {wanted!r}: these results are written as {' or '.join(possible)}")
    if wanted == "parquet":
        pyarrow("format: Parquet")
    return wanted or possible[0]


def open_writer(folder: Folder, manifest: Manifest, number: int) -> ShardWriter:
    """The writer of a shard, in the format of the run."""
    return _WRITERS.get(manifest.options.format, ShardWriter)(folder, manifest, number)


class JsonlReader:
    """Reads a shard of JSONL."""

    def __init__(self, path: Path) -> None:
        self._data = _mapped(path)
        self._bounds = np.append(0, np.flatnonzero(np.frombuffer(self._data, np.uint8) == ord("\n")) + 1)

    def answer(self, at: int) -> Answer:
        """The result of one text."""
        values: Answer = msgspec.json.decode(self._data[slice(*self._bounds[at : at + 2])])
        for name, listed in values.items():
            if isinstance(listed, list):
                values[name] = np.array(listed, np.int64 if name.endswith("ids") else np.float32)
                if not name.endswith("ids"):
                    # In JSON, null stands for -inf; numpy made it NaN. No token follows the last position of a text.
                    is_absent = np.isnan(values[name])
                    is_absent[-1:] &= name != "next_token"
                    values[name][is_absent] = -np.inf
        return values

    def custom_ids(self) -> Iterator[str | None]:
        """The custom ids of all texts; None for none."""
        decode = msgspec.json.Decoder(HasCustomId).decode
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            yield decode(self._data[begin:end]).name


class ParquetReader:
    """Reads a shard that `ParquetWriter` wrote, one row group at a time; the last group stays in memory."""

    def __init__(self, path: Path) -> None:
        self._arrow = pyarrow("format: Parquet")
        self._file = self._arrow.parquet.ParquetFile(path, memory_map=True)
        rows = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum([0, *rows])
        self._group, self._table = -1, None

    def answer(self, at: int) -> Answer:
        """The result of one text."""
        group = int(np.searchsorted(self._ends, at, side="right")) - 1
        if group != self._group:
            self._group, self._table = group, self._file.read_row_group(group).combine_chunks()
        table: Any = self._table
        row = at - int(self._ends[group])
        return {name: self._value(table.column(name).chunk(0)[row]) for name in table.column_names}

    def _value(self, scalar: Any) -> Any:
        """The value of a cell: a number, a text, or an array (n,) or (n, k) that is a view of the table."""
        if not isinstance(scalar, self._arrow.ListScalar):
            return scalar.as_py()
        values = scalar.values
        if not self._arrow.types.is_fixed_size_list(values.type):
            return np.asarray(values)
        return np.asarray(values.flatten()).reshape(-1, values.type.list_size)

    def custom_ids(self) -> Iterator[str | None]:
        """The custom ids of all texts; None for none."""
        return iter(self._file.read(columns=["custom_id"]).column(0).to_pylist())


class SafetensorsReader:
    """Reads a shard that `SafetensorsWriter` wrote: arrays are views; bfloat16 and logits become float32."""

    def __init__(self, path: Path) -> None:
        data = np.frombuffer(_mapped(path), np.uint8)
        size = int(data[:8].view("<u8")[0])
        header: dict[str, dict[str, Any]] = msgspec.json.decode(data[8 : 8 + size].tobytes())
        self._tensors: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            self._tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        self._names = msgspec.json.decode(self._tensors.pop("custom_ids").tobytes())
        self._small = {name: self._tensors.pop(name) for name in ("positions", "starts", "lines", "ids", "tokens")}

    def answer(self, at: int) -> Answer:
        """The result of one text."""
        small = self._small
        rows, tokens = slice(*small["positions"][at : at + 2]), slice(*small["tokens"][at : at + 2])
        columns = {name: values[rows] for name, values in self._tensors.items()}
        columns |= {name: widen_bf16(bits) for name, bits in columns.items() if bits.dtype == np.uint16}
        if "logits" in columns:
            columns["logits"] = columns["logits"].astype(np.float32, copy=False)
            columns["logprobs"] = columns["logits"] - columns["log_z"][:, None]
        line, start = int(small["lines"][at]), int(small["starts"][at])
        return {"line": line, "custom_id": self._names[at], "ids": small["ids"][tokens], "start": start, **columns}

    def custom_ids(self) -> Iterator[str | None]:
        """The custom ids of all texts; None for none."""
        return iter(self._names)


Reader = JsonlReader | ParquetReader | SafetensorsReader
READERS: dict[str, type[Reader]] = {"jsonl": JsonlReader, "parquet": ParquetReader, "safetensors": SafetensorsReader}
"""Format of a shard -> its reader."""


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


class Batch(Sequence[Answer]):
    """The results in an output folder, in the order of the input. Lines without a result are left out.

    A batch of an unfinished run has the shards that were done when the batch was opened: see `is_finished`. A batch is
    a map-style dataset of torch, and an instance of `torch.utils.data.Dataset` if torch was imported earlier.

    Args:
        path: the output folder, or its URL. Shards behind a URL are copied to a local cache when they are read.

    Attributes:
        manifest: the model, input and options of the run (`lmpool.batch.folder.Manifest`).
        is_finished: whether all lines of the input have a result or an error.

    Raises:
        BatchError: the folder is not an output folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        self._folder = open_folder(self._given)
        self.manifest: Manifest = self._folder.manifest()
        self.manifest.done = done = list(self._folder.done(self.manifest).values())
        self._begins = np.cumsum([0, *(shard.texts for shard in done)])  # Where each shard's texts begin and end.
        self.is_finished = self.manifest.finished and len(done) == self.manifest.shards
        self._open: dict[int, Reader] = {}

    def __len__(self) -> int:
        return int(self._begins[-1])

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        """The result of a text by its index among the texts that have a result; a list of results for a slice."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"{index} is out of range: there are {len(self)} results")
        shard = int(np.searchsorted(self._begins, at, side="right")) - 1
        answer = self._shard(shard).answer(at - int(self._begins[shard]))
        return {**answer, "custom_id": answer["custom_id"] or ""}

    def by_custom_id(self, custom_id: str) -> Answer:
        """The result of the text with a custom id. The first call reads the custom ids of all shards.

        Raises:
            KeyError: no text has this custom id.
        """
        return self[self._numbers[custom_id]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = (name for shard in range(len(self.manifest.done)) for name in self._shard(shard).custom_ids())
        return {name: number for number, name in enumerate(names) if name}

    def _shard(self, at: int) -> Reader:
        if at not in self._open:
            # Each open shard needs a file descriptor: use half of the process's limit, which is negative for no limit.
            if len(self._open) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 > 0:
                del self._open[next(iter(self._open))]
            name = self.manifest.shard_name(self.manifest.done[at].number)
            self._open[at] = READERS[self.manifest.options.format](self._folder.local(name))
        return self._open[at]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_batch, (self._given,)

    def __repr__(self) -> str:
        state = "" if self.is_finished else f", {len(self.manifest.done)} of {self.manifest.shards} shards"
        return f"Batch({named(self._given)!r}, {self.manifest.options.what}, {len(self)} results{state})"


def open_batch(path: str | os.PathLike[str]) -> Batch:
    """The results in an output folder; see `Batch` for the argument and the errors."""
    torch: Any = sys.modules.get("torch.utils.data")
    kind: type[Batch] = type("Batch", (Batch, torch.Dataset), {}) if torch else Batch
    return kind(path)
