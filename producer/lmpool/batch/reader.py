"""Reads what a run has written: memory-mapped, by number, by custom id, in the order of the input."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.bucket import open_folder
from lmpool.batch.fetch import named
from lmpool.batch.folder import MANIFEST, Folder, Manifest, Shard, digest_of_file, errors_name
from lmpool.errors import BatchError
from lmpool.protocol.row import widen_bf16

Answer = dict[str, Any]
"""The answer for one text: "line" (int, from 1), "custom_id" (str, "" for none), "ids" (int64 (N,)), "start" (int), and
the columns that the manifest describes, as arrays whose first axis goes along the positions from "start" on. Where
they are logits and their logZ, there are the log-probabilities too."""

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1"}


class ShardFile(Protocol):
    """A shard, open for reading."""

    def __len__(self) -> int:
        """How many texts it has."""
        ...

    def answer(self, at: int) -> Answer:
        """The answer for one of them."""
        ...

    def custom_ids(self) -> Iterator[str]:
        """The custom ids of all of them."""
        ...


class JsonlShard:
    """See `lmpool.batch.shards.JsonlAnswers`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._data = _mapped(path)
        ends = np.flatnonzero(np.frombuffer(self._data, np.uint8) == ord("\n")) + 1
        self._bounds = np.concatenate(([0], ends))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _line(self, at: int) -> bytes:
        return bytes(self._data[self._bounds[at] : self._bounds[at + 1]])

    def answer(self, at: int) -> Answer:
        """See `ShardFile.answer`."""
        values: dict[str, Any] = msgspec.json.decode(self._line(at))
        head = {"line": values.pop("line"), "custom_id": values.pop("custom_id") or ""}
        head |= {"ids": np.array(values.pop("ids"), np.int64), "start": values.pop("start")}
        return head | {name: _array(name, listed) for name, listed in values.items()}

    def custom_ids(self) -> Iterator[str]:
        """See `ShardFile.custom_ids`."""
        decode = msgspec.json.Decoder(_Named).decode
        for at in range(len(self)):
            yield decode(self._line(at)).custom_id or ""


class _Named(msgspec.Struct):
    custom_id: str | None = None


def _array(name: str, listed: list[Any]) -> NDArray[Any]:
    if name.endswith("ids"):
        return np.array(listed, np.int64)
    values = np.array(listed, np.float32)  # None becomes NaN, which no answer has.
    values[np.isnan(values)] = -np.inf
    return values


class SafetensorsShard:
    """See the top of `lmpool.batch.shards`; arrays are views of the file, but bfloat16 and logits become float32.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        data = np.frombuffer(_mapped(path), np.uint8)
        size = int(data[:8].view("<u8")[0])
        header: dict[str, dict[str, Any]] = json.loads(bytes(data[8 : 8 + size]))
        self._tensors: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            self._tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        self._custom_ids = self._tensors.pop("custom_ids")
        self._small = {name: self._tensors.pop(name) for name in ("positions", "starts", "lines", "ids", "tokens")}

    def __len__(self) -> int:
        return len(self._small["lines"])

    @cached_property
    def _names(self) -> list[str]:
        listed: list[str | None] = json.loads(bytes(self._custom_ids))
        return [name or "" for name in listed]

    def answer(self, at: int) -> Answer:
        """See `ShardFile.answer`."""
        small = self._small
        head = {"line": int(small["lines"][at]), "custom_id": self._names[at]}
        head |= {"ids": small["ids"][slice(*small["tokens"][at : at + 2])], "start": int(small["starts"][at])}
        rows = slice(*small["positions"][at : at + 2])
        columns = {name: values[rows] for name, values in self._tensors.items()}
        columns |= {name: widen_bf16(bits) for name, bits in columns.items() if bits.dtype == np.uint16}
        if "logits" in columns:
            columns["logits"] = columns["logits"].astype(np.float32, copy=False)
            columns["logprobs"] = columns["logits"] - columns["log_z"][:, None]
        return head | columns

    def custom_ids(self) -> Iterator[str]:
        """See `ShardFile.custom_ids`."""
        return iter(self._names)


def open_shard(path: Path) -> ShardFile:
    """A shard, open for reading.

    Raises:
        SettingsError: its format needs an extra that is not installed.
    """
    if path.suffix == ".parquet":
        from lmpool.batch.parquet import ParquetShard

        return ParquetShard(path)
    return JsonlShard(path) if path.suffix == ".jsonl" else SafetensorsShard(path)


def count_lines(folder: Folder, number: int, name: str) -> Shard:
    """What a manifest says of a shard that is in place under a name."""
    path = folder.local(name)
    failed = (folder.read(errors_name(number)) or b"").count(b"\n")
    return Shard(number, len(open_shard(path)), failed, path.stat().st_size, digest_of_file(path))


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # Nothing cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of an output folder.

    Raises:
        BatchError: it is none.
    """
    manifest = folder.read_manifest()
    if manifest is None:
        raise BatchError(f"{folder.location} is no output of `lmpool batch`: it has no {MANIFEST}")
    return manifest


class Batch(Sequence[Answer]):
    """The answers in an output folder, in the order of the input; lines without one are left out.

    A folder whose run has not ended has what is done so far, as of when it was opened: see `is_finished`. It works as a
    map-style dataset of torch, and is one where torch was imported before it was opened.

    Args:
        path: the output folder, or its URL: shards are copied to a cache of this machine as they are read.

    Attributes:
        manifest: what was asked of which model and input (`lmpool.batch.folder.Manifest`).
        is_finished: whether all of the input has been answered.

    Raises:
        BatchError: it is no output folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        self._folder = folder = open_folder(self._given)
        self.manifest: Manifest = read_manifest(folder)
        placed = folder.shards()
        known = {shard.number: shard.texts for shard in self.manifest.done}
        if placed.keys() - known.keys():
            known |= {number: shard.texts for number, shard in folder.done().items()}
        self._names = [name for name, _ in placed.values()]
        counts = [
            known[number] if number in known else len(open_shard(folder.local(name)))
            for number, (name, _) in placed.items()
        ]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.is_finished = self.manifest.finished and len(placed) == self.manifest.shards
        self._open: dict[int, ShardFile] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        """The answer for a text by its number among those that have one; or several."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"{index} is out of range: there are {len(self)} answers")
        shard = int(np.searchsorted(self._ends, at, side="right"))
        return self._shard(shard).answer(at - (int(self._ends[shard - 1]) if shard else 0))

    def by_custom_id(self, custom_id: str) -> Answer:
        """The answer for the text of a custom id; the first such look reads those of all shards.

        Raises:
            KeyError: there is none.
        """
        return self[self._numbers[custom_id]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = (name for shard in range(len(self._names)) for name in self._shard(shard).custom_ids())
        return {name: number for number, name in enumerate(names) if name}

    def _shard(self, number: int) -> ShardFile:
        if number not in self._open:
            self._open[number] = open_shard(self._folder.local(self._names[number]))
        return self._open[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_batch, (self._given,)

    def __repr__(self) -> str:
        state = "" if self.is_finished else f", {len(self._names)} of {self.manifest.shards} shards"
        return f"Batch({named(self._given)!r}, {self.manifest.options.what}, {len(self)} answers{state})"


def open_batch(path: str | os.PathLike[str]) -> Batch:
    """The answers in an output folder; see `Batch`.

    Raises:
        BatchError: it is no output folder.
    """
    torch: Any = sys.modules.get("torch.utils.data")
    if torch is None:
        return Batch(path)
    kind: type[Batch] = type("Batch", (Batch, torch.Dataset), {})
    return kind(path)
