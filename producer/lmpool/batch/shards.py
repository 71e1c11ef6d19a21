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

import hashlib
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.folder import Folder, Manifest, Shard, sync
from lmpool.batch.kinds import Columns, ResultWriter, Text
from lmpool.batch.lines import Failed
from lmpool.errors import BatchError, SettingsError

_HEADER_BYTES = 4096  # Size of a safetensors header, reserved before the columns are known; theirs have about 1 KiB.
_READ_BYTES = 1 << 20  # Bytes of a shard that are read back at once: little memory, few system calls.
_CODES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


class CheckedFile(io.BufferedRandom):
    """A new file that keeps a digest of the bytes that are written to it, to compare them with the bytes on the disk.

    Attributes:
        digest: of the bytes after the header, which is written last and compared itself.
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
        """Write the first bytes, which were skipped by `seek`."""
        self._header = header
        self.seek(0)
        super().write(header)

    def read_back(self) -> tuple[str, int]:
        """Read the file from the disk.

        Returns:
            Its digest, as `digest_of_file` returns it, and the number of its lines.

        Raises:
            BatchError: it does not contain the bytes that were written.
        """
        self.seek(0)
        header = self.read(len(self._header))
        whole = hashlib.blake2b(header, digest_size=16)
        written = hashlib.blake2b(digest_size=16) if header else whole
        lines = 0
        while data := self.read(_READ_BYTES):
            for digest in {whole, written}:
                digest.update(data)
            lines += data.count(b"\n")
        if header != self._header or written.digest() != self.digest.digest():
            raise _damaged(self.name, "its digest is not the digest of the bytes that were written")
        return whole.hexdigest(), lines


def _damaged(path: str, reason: str) -> BatchError:
    error = BatchError(
        f"{path} was damaged: {reason}. Another process writes to it, or the disk fails. Its shard is not put into "
        "place. Run the same command again"
    )
    error.may_pass = True
    return error


class JsonlWriter(ResultWriter):
    """Writes a JSON object a line: line, custom_id, ids, start, and the columns; null stands for minus infinity."""

    def write(self, text: Text, columns: Columns) -> None:
        """See `ResultWriter.write`."""
        head = {"line": text.line, "custom_id": text.custom_id, "ids": text.ids, "start": text.span.start}
        columns_as_lists = {name: values.tolist() for name, values in columns.items()}
        self._file.write(msgspec.json.encode({**head, **columns_as_lists}) + b"\n")


class SafetensorsWriter(ResultWriter):
    """Writes a safetensors file. The first column goes to the file part by part; the others are kept until the end."""

    _file: CheckedFile

    def __init__(self, file: CheckedFile) -> None:
        super().__init__(file)
        file.seek(_HEADER_BYTES)
        self._column, self._shape, self._code = "", tuple[int, ...](), "F32"
        self._others: dict[str, list[NDArray[Any]]] = {}
        self._custom_ids: list[str | None] = []
        self._small: dict[str, list[int]] = {"positions": [0], "starts": [], "lines": [], "ids": [], "tokens": [0]}
        self._positions, self._end, self._digest = 0, _HEADER_BYTES, file.digest.copy()

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
        self._end, self._digest = self._file.tell(), self._file.digest.copy()

    def drop_text(self) -> None:
        """See `ResultWriter.drop_text`."""
        self._positions = self._small["positions"][-1]
        for name, parts in self._others.items():
            self._others[name] = [np.concatenate(parts)[: self._positions]]
        self._file.seek(self._end)
        self._file.truncate()
        self._file.digest = self._digest.copy()

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
        self._file.write_header((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))


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
        self._file = CheckedFile(folder.create(manifest.shard_name(number)))
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

        Raises:
            BatchError: the file does not contain the results that were added.
        """
        path = Path(self._file.name)
        self._results.close()
        sync(self._file)
        digest, lines = self._file.read_back()
        if self._manifest.options.format == "jsonl" and lines != self._texts:
            raise _damaged(str(path), f"it has {lines} lines, and {self._texts} texts have a result")
        self._file.close()
        if (there := self._folder.find_done(self._manifest, self._number)) is not None:
            self.discard()
            return there
        shard = Shard(self._number, self._texts, len(self._errors), path.stat().st_size, digest)
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
