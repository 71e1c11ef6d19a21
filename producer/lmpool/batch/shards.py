"""Files of results, JSONL and safetensors: written text by text, and put into place when complete.

A safetensors shard of n texts with N positions in all:

    <columns>    (N, …)    the results, text after text
    custom_ids   U8        custom ids of the texts: a JSON list, padded with spaces
    positions    I64 (n+1) text i has the results [positions[i], positions[i + 1])
    starts       I64 (n)   first position of each text
    lines        I64 (n)   line of each text in the input
    ids          I64       token ids of all texts
    tokens       I64 (n+1) text i has the ids [tokens[i], tokens[i + 1])

The library safetensors writes a file at once, from memory. Here only the results of a few texts are in memory.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.folder import Folder, Manifest, Shard, digest_of_file, sync
from lmpool.batch.kinds import Columns, ResultWriter, Text
from lmpool.batch.lines import Failed
from lmpool.errors import SettingsError

_HEADER_BYTES = 4096  # Size of a safetensors header, reserved before the columns are known; theirs have about 1 KiB.
_CODES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


class JsonlWriter(ResultWriter):
    """Writes a JSON object a line: line, custom_id, ids, start, and the columns; null stands for minus infinity."""

    def write(self, text: Text, columns: Columns) -> None:
        """See `ResultWriter.write`."""
        head = {"line": text.line, "custom_id": text.custom_id, "ids": text.ids, "start": text.span.start}
        columns_as_lists = {name: values.tolist() for name, values in columns.items()}
        self._file.write(msgspec.json.encode({**head, **columns_as_lists}) + b"\n")


class SafetensorsWriter(ResultWriter):
    """Writes a safetensors file. The first column goes to the file part by part; the others are kept until the end."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        file.write(bytes(_HEADER_BYTES))
        self._column, self._shape, self._code = "", tuple[int, ...](), "F32"
        self._others: dict[str, list[NDArray[Any]]] = {}
        self._custom_ids: list[str | None] = []
        self._small: dict[str, list[int]] = {"positions": [0], "starts": [], "lines": [], "ids": [], "tokens": [0]}
        self._positions, self._end = 0, _HEADER_BYTES

    def add(self, part: Columns) -> None:
        """See `ResultWriter.add`."""
        (self._column, values), *others = part.items()
        self._shape, self._code = values.shape[1:], _CODES[values.dtype.name]
        for name, few in others:
            self._others.setdefault(name, []).append(few)
        self._file.write(np.ascontiguousarray(values).data.cast("B"))
        self._positions += len(values)

    def end_text(self, text: Text) -> None:
        """See `ResultWriter.end_text`."""
        small = self._small
        self._custom_ids.append(text.custom_id)
        small["positions"].append(self._positions)
        small["starts"].append(text.span.start)
        small["lines"].append(text.line)
        small["ids"] += text.ids
        small["tokens"].append(len(small["ids"]))
        self._end = self._file.tell()

    def drop_text(self) -> None:
        """See `ResultWriter.drop_text`."""
        self._positions = self._small["positions"][-1]
        for name, parts in self._others.items():
            self._others[name] = [np.concatenate(parts)[: self._positions]]
        self._file.seek(self._end)
        self._file.truncate()

    def close(self) -> None:
        """See `ResultWriter.close`."""
        end = self._end - _HEADER_BYTES
        custom_ids = msgspec.json.encode(self._custom_ids)
        custom_ids += b" " * (-(end + len(custom_ids)) % 8)  # The next tensor begins at a multiple of 8 bytes.
        header: dict[str, dict[str, Any]] = {}
        if self._column:
            shape = [self._positions, *self._shape]
            header[self._column] = {"dtype": self._code, "shape": shape, "data_offsets": [0, end]}
        arrays: dict[str, NDArray[Any]] = {"custom_ids": np.frombuffer(custom_ids, np.uint8)}
        arrays |= {name: np.array(values, np.int64) for name, values in self._small.items()}
        arrays |= {name: np.concatenate(parts) for name, parts in self._others.items()}
        for name, values in arrays.items():
            begin, end = end, end + values.nbytes
            code = _CODES[values.dtype.name]
            header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [begin, end]}
            self._file.write(values.tobytes())
        text = json.dumps(header).encode()
        assert len(text) <= _HEADER_BYTES - 8
        self._file.seek(0)
        self._file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))


def _writer_of(suffix: str) -> type[ResultWriter]:
    if suffix == "parquet":
        from lmpool.batch.parquet import ParquetWriter

        return ParquetWriter
    return JsonlWriter if suffix == "jsonl" else SafetensorsWriter


class ShardWriter:
    """Writes one shard and the errors of its lines.

    Raises:
        SettingsError: the format needs an extra that is not installed.
    """

    def __init__(self, folder: Folder, manifest: Manifest, number: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._number = number
        self._file = folder.create(manifest.shard_name(number))
        self._results = _writer_of(manifest.options.format)(self._file)
        self._errors: list[bytes] = []
        self._failed_line = 0
        self._texts = 0

    def add(self, text: Text, part: Columns, is_last: bool) -> None:
        """Add the result for the next positions of a text. Parts after a failed part are dropped."""
        if text.line == self._failed_line:
            return
        self._results.add(part)
        if is_last:
            self._results.end_text(text)
            self._texts += 1

    def fail(self, failed: Failed) -> None:
        """Add a line without a result."""
        if failed.line == self._failed_line:
            return
        self._results.drop_text()
        self._failed_line = failed.line
        fields = {"line": failed.line, "custom_id": failed.custom_id, "error": failed.reason}
        self._errors.append(msgspec.json.encode(fields) + b"\n")

    def place(self) -> Shard:
        """Put the shard into place, unless another run of the same command was first.

        Returns:
            The shard that is in place.
        """
        path = Path(self._file.name)
        self._results.close()
        sync(self._file)
        self._file.close()
        if (there := self._folder.find_done(self._manifest, self._number)) is not None:
            self.discard()
            return there
        size = path.stat().st_size
        shard = Shard(self._number, self._texts, len(self._errors), size, digest_of_file(path))
        self._folder.place_shard(self._manifest, shard, path, self._errors)
        return shard

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            Path(self._file.name).unlink()
        with suppress(OSError):
            self._file.close()


def choose_format(is_wide: bool, wanted: str | None) -> str:
    """The format of shards: the wanted one, or the default.

    Raises:
        SettingsError: these results have no such format, or its extra is not installed.
    """
    possible = ("safetensors",) if is_wide else ("jsonl", "parquet")
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise SettingsError(f"format: {wanted!r}: these results are written as {' or '.join(possible)}")
    _writer_of(wanted)
    return wanted
