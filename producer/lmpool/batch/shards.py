"""Files of answers: JSONL and safetensors, written text after text, and put into place when all of them are there.

A safetensors shard of n texts with N positions in all:

    <columns>    (N, …)    the answers, text after text
    custom_ids   U8        the texts' custom ids: a JSON list, with spaces behind it
    positions    I64 (n+1) text i has the answers [positions[i], positions[i + 1])
    starts       I64 (n)   the first position of each text
    lines        I64 (n)   its line in the input
    ids          I64       the token ids of all texts
    tokens       I64 (n+1) text i has the ids [tokens[i], tokens[i + 1])

The library of that name writes a file at once, from memory; here only some texts' answers are in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.kinds import Columns, Text
from lmpool.batch.folder import Folder, Shard, errors_name, shard_name, sync
from lmpool.batch.texts import Failed
from lmpool.errors import BatchError, SettingsError

FORMATS = ("jsonl", "parquet")
"""Formats of answers that are not wide."""

WIDE_FORMAT = "safetensors"

_HEADER_BYTES = 4096
_READ_BYTES = 1 << 20
"""How much of a shard is read back at a time, in bytes: little memory, and few calls."""

_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


class CheckedFile:
    """A new file that digests what is written to it, so that `read_back` sees whether the disk has the same bytes.

    Args:
        file: empty, open for writing and reading.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._head = b""
        self._digest = _new_digest()
        self._kept = 0, self._digest.copy()

    def write(self, data: Any) -> int:
        """Write a buffer at the end."""
        self._digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        """How many bytes have been written."""
        return self._file.tell()

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    @property
    def closed(self) -> bool:
        """Whether it is closed; pyarrow asks."""
        return self._file.closed

    def keep(self) -> None:
        """Make this the place to which `take_back` goes back."""
        self._kept = self._file.tell(), self._digest.copy()

    def take_back(self) -> None:
        """Remove what has been written since `keep`."""
        end, digest = self._kept
        self._file.seek(end)
        self._file.truncate()
        self._digest = digest.copy()

    def reserve_head(self, size: int) -> None:
        """Leave room for a head, before anything is written; it is no part of what `write` digests."""
        self._head = bytes(size)
        self._file.write(self._head)

    def write_head(self, head: bytes) -> None:
        """Write the head, of the size that was reserved, after everything else."""
        self._head = head
        self._file.seek(0)
        self._file.write(head)

    def read_back(self) -> tuple[str, int]:
        """The digest of the file as `digest_of_file` has it, and how many newlines it has.

        Raises:
            BatchError: the file does not hold what was written to it.
        """
        self._file.seek(0)
        head = self._file.read(len(self._head))
        whole, written, lines = _new_digest(head), _new_digest(), 0
        while part := self._file.read(_READ_BYTES):
            written.update(part)
            if head:
                whole.update(part)
            lines += part.count(b"\n")
        if head != self._head or written.digest() != self._digest.digest():
            raise _damaged(self._file.name, "its digest is another one than that of the bytes that were written")
        return (whole if head else written).hexdigest(), lines


def _new_digest(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def _damaged(path: str, why: str) -> BatchError:
    """The error for a temporary file that is not put into place."""
    error = BatchError(
        f"{path} has been damaged: {why}. Another process writes to it, or its disk fails. Its shard is not put into "
        "place: run the same command again"
    )
    error.may_pass = True
    return error


class AnswerFile(Protocol):
    """Writes answers to a file: of each text its parts in order, and then that it ends."""

    def add(self, text: Text, part: Columns) -> None:
        """Add the answer for the next positions of a text."""
        ...

    def end_text(self, text: Text) -> None:
        """All of a text's answer has been added."""
        ...

    def drop_text(self) -> None:
        """Take back what has been added of a text that has not ended."""
        ...

    def close(self) -> None:
        """Write what is missing; the file is whole then."""
        ...


def answer_file(file: CheckedFile, suffix: str) -> AnswerFile:
    """What writes answers to a new file.

    Raises:
        SettingsError: its format needs an extra that is not installed.
    """
    made: Callable[[CheckedFile], AnswerFile] = JsonlAnswers if suffix == "jsonl" else SafetensorsAnswers
    if suffix == "parquet":
        from lmpool.batch.parquet import ParquetAnswers

        made = ParquetAnswers
    return made(file)


class JsonlAnswers:
    """A JSON object on each line: line, custom_id, ids, start, and the columns; null stands for minus infinity.

    Args:
        file: new, open for writing.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._parts: list[Columns] = []

    def add(self, text: Text, part: Columns) -> None:
        """See `AnswerFile.add`."""
        self._parts.append(part)

    def end_text(self, text: Text) -> None:
        """See `AnswerFile.end_text`."""
        columns = {name: values.tolist() for name, values in joined(self._parts).items()}
        self._parts = []
        head = {"line": text.line, "custom_id": text.custom_id, "ids": text.ids, "start": text.span.start}
        self._file.write(msgspec.json.encode({**head, **columns}) + b"\n")

    def drop_text(self) -> None:
        """See `AnswerFile.drop_text`."""
        self._parts = []

    def close(self) -> None:
        """See `AnswerFile.close`."""


class SafetensorsAnswers:
    """A safetensors file; see the top of this file.

    Args:
        file: new, open for writing.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        file.reserve_head(_HEADER_BYTES)
        file.keep()
        self._column, self._shape, self._dtype = "", tuple[int, ...](), "float32"
        self._more: dict[str, list[NDArray[Any]]] = {}
        self._custom_ids: list[str | None] = []
        self._small: dict[str, list[int]] = {"positions": [0], "starts": [], "lines": [], "ids": [], "tokens": [0]}
        self._positions = 0

    def add(self, text: Text, part: Columns) -> None:
        """See `AnswerFile.add`."""
        (self._column, values), *more = part.items()
        self._shape, self._dtype = values.shape[1:], values.dtype.name
        for name, few in more:
            self._more.setdefault(name, []).append(few)
        self._file.write(np.ascontiguousarray(values).data.cast("B"))
        self._positions += len(values)

    def end_text(self, text: Text) -> None:
        """See `AnswerFile.end_text`."""
        small = self._small
        self._custom_ids.append(text.custom_id)
        small["positions"].append(self._positions)
        small["starts"].append(text.span.start)
        small["lines"].append(text.line)
        small["ids"] += text.ids
        small["tokens"].append(len(small["ids"]))
        self._file.keep()

    def drop_text(self) -> None:
        """See `AnswerFile.drop_text`."""
        self._positions = self._small["positions"][-1]
        for name, parts in self._more.items():
            self._more[name] = [np.concatenate(parts)[: self._positions]]
        self._file.take_back()

    def close(self) -> None:
        """See `AnswerFile.close`."""
        end = self._file.tell() - _HEADER_BYTES
        custom_ids = msgspec.json.encode(self._custom_ids)
        custom_ids += b" " * (-(end + len(custom_ids)) % 8)  # What follows begins at a multiple of 8 bytes.
        header: dict[str, dict[str, Any]] = {}
        if self._column:
            shape = [self._positions, *self._shape]
            header[self._column] = {"dtype": _DTYPES[self._dtype], "shape": shape, "data_offsets": [0, end]}
        arrays: dict[str, NDArray[Any]] = {"custom_ids": np.frombuffer(custom_ids, np.uint8)}
        arrays |= {name: np.array(values, np.int64) for name, values in self._small.items()}
        arrays |= {name: np.concatenate(parts) for name, parts in self._more.items()}
        for name, values in arrays.items():
            begin, end = end, end + values.nbytes
            dtype = _DTYPES[values.dtype.name]
            header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, end]}
            self._file.write(values.tobytes())
        text = json.dumps(header).encode()
        assert len(text) <= _HEADER_BYTES - 8
        self._file.write_head((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))


def joined(parts: list[Columns]) -> Columns:
    """The answer that parts make up."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class ShardWriter:
    """Writes one shard and the errors of its lines.

    Args:
        folder: where to.
        number: of the shard.
        suffix: its format.
    """

    def __init__(self, folder: Folder, number: int, suffix: str) -> None:
        self._folder = folder
        self._number = number
        self._name = shard_name(number, suffix)
        self._suffix = suffix
        self._file = folder.create(self._name)
        self._checked = CheckedFile(self._file)
        self._answers = answer_file(self._checked, suffix)
        self._errors: list[bytes] = []
        self._failed_line = 0
        self._texts = 0

    def add(self, text: Text, part: Columns, is_last: bool) -> None:
        """Add the answer for the next positions of a text; what follows a part that failed is dropped."""
        if text.line == self._failed_line:
            return
        self._answers.add(text, part)
        if is_last:
            self._answers.end_text(text)
            self._texts += 1

    def fail(self, failed: Failed) -> None:
        """Note that a line has no answer."""
        if failed.line == self._failed_line:
            return
        self._answers.drop_text()
        self._failed_line = failed.line
        named = {"line": failed.line, "custom_id": failed.custom_id, "error": failed.reason}
        self._errors.append(msgspec.json.encode(named) + b"\n")

    def place(self) -> Shard:
        """Put the errors and then the shard into place, unless another run has noted this shard.

        Returns:
            The shard that is in place.

        Raises:
            BatchError: the file does not hold the answers that were added.
        """
        path = Path(self._file.name)
        self._answers.close()
        sync(self._file)
        digest, lines = self._checked.read_back()
        if self._suffix == "jsonl" and lines != self._texts:
            raise _damaged(str(path), f"it has {lines} lines, and {self._texts} texts have an answer")
        shard = Shard(self._number, self._texts, len(self._errors), self._file.tell(), digest)
        if (noted := self._folder.noted(self._number, self._name)) is not None:
            self.discard()
            return noted
        errors = errors_name(self._number)
        if self._errors:
            self._folder.write(errors, iter(self._errors))
        else:  # Of a run before, whose shard has been removed.
            self._folder.remove(errors)
        self._folder.place(path, self._name)
        self._file.close()  # Only now: as long as it is open no other process takes it for a file of a killed one.
        self._folder.note(shard)
        return shard

    def discard(self) -> None:
        """Leave nothing of it."""
        with suppress(OSError):
            Path(self._file.name).unlink()
        with suppress(OSError):
            self._file.close()


def suffix_of(is_wide: bool, wanted: str | None) -> str:
    """The format of shards: what is wanted, if answers can be written so.

    Raises:
        SettingsError: they cannot, or not here: an extra is missing.
    """
    possible = (WIDE_FORMAT,) if is_wide else FORMATS
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise SettingsError(f"format: {wanted!r}: these answers are written as {' or '.join(possible)}")
    if wanted == "parquet":
        import lmpool.batch.parquet  # noqa: F401 Before a folder is begun that nobody here could write.
    return wanted
