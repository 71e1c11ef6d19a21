"""`lmpool.batch.open`: the results in an output folder, by number, by custom id, in the order of the input."""

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
from lmpool.batch.folder import MANIFEST, Folder, Manifest
from lmpool.errors import BatchError
from lmpool.protocol.row import widen_bf16

Answer = dict[str, Any]
"""The result of one text: "line" (int, from 1), "custom_id" (str, "" for none), "ids" (int64 (N,)), "start" (int), and
the columns of the manifest, as arrays whose first axis is the positions from "start" on. With "logits" and "log_z" it
also has "logprobs", computed from them."""


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1"}


class ShardReader(Protocol):
    """A shard, open for reading."""

    def __len__(self) -> int:
        """How many texts it has."""
        ...

    def answer(self, at: int) -> Answer:
        """The result of one text."""
        ...

    def custom_ids(self) -> Iterator[str]:
        """The custom ids of all texts, "" for none."""
        ...


class _Named(msgspec.Struct):
    custom_id: str | None = None


class JsonlReader:
    """Reads a shard that `JsonlWriter` wrote."""

    def __init__(self, path: Path) -> None:
        self._data = _mapped(path)
        ends = np.flatnonzero(np.frombuffer(self._data, np.uint8) == ord("\n")) + 1
        self._bounds = np.concatenate(([0], ends))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _line(self, at: int) -> bytes:
        return bytes(self._data[self._bounds[at] : self._bounds[at + 1]])

    def answer(self, at: int) -> Answer:
        """See `ShardReader.answer`."""
        values: dict[str, Any] = msgspec.json.decode(self._line(at))
        head = {"line": values.pop("line"), "custom_id": values.pop("custom_id") or ""}
        head |= {"ids": np.array(values.pop("ids"), np.int64), "start": values.pop("start")}
        return head | {name: _array(name, listed) for name, listed in values.items()}

    def custom_ids(self) -> Iterator[str]:
        """See `ShardReader.custom_ids`."""
        decode = msgspec.json.Decoder(_Named).decode
        for at in range(len(self)):
            yield decode(self._line(at)).custom_id or ""


def _array(name: str, listed: list[Any]) -> NDArray[Any]:
    if name.endswith("ids"):
        return np.array(listed, np.int64)
    values = np.array(listed, np.float32)  # null becomes NaN, which no result contains.
    values[np.isnan(values)] = -np.inf
    return values


class SafetensorsReader:
    """Reads a shard that `SafetensorsWriter` wrote: arrays are views; bfloat16 and logits become float32."""

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
        return [name or "" for name in json.loads(bytes(self._custom_ids))]

    def answer(self, at: int) -> Answer:
        """See `ShardReader.answer`."""
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
        """See `ShardReader.custom_ids`."""
        return iter(self._names)


def open_shard(path: Path) -> ShardReader:
    """A shard, open for reading.

    Raises:
        SettingsError: its format needs an extra that is not installed.
    """
    if path.suffix == ".parquet":
        from lmpool.batch.parquet import ParquetReader

        return ParquetReader(path)
    return JsonlReader(path) if path.suffix == ".jsonl" else SafetensorsReader(path)


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of an output folder.

    Raises:
        BatchError: it has none.
    """
    manifest = folder.read_manifest()
    if manifest is None:
        raise BatchError(f"{folder.location} is not an output folder of `lmpool batch`: it has no {MANIFEST}")
    return manifest


class Batch(Sequence[Answer]):
    """The results in an output folder, in the order of the input. Lines without a result are left out.

    Of an unfinished run it has the shards that were done when it was opened: see `is_finished`. It works as a map-style
    dataset of torch, and is an instance of `torch.utils.data.Dataset` if torch was imported before.

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
        self._folder = folder = open_folder(self._given)
        self.manifest: Manifest = read_manifest(folder)
        self.manifest.done = done = list(folder.done(self.manifest).values())
        self._ends = np.cumsum([shard.texts for shard in done], dtype=np.int64)
        self.is_finished = self.manifest.finished and len(done) == self.manifest.shards
        self._open: dict[int, ShardReader] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        """The result of a text by its number among the texts with a result; or several."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"{index} is out of range: there are {len(self)} results")
        shard = int(np.searchsorted(self._ends, at, side="right"))
        return self._shard(shard).answer(at - (int(self._ends[shard - 1]) if shard else 0))

    def by_custom_id(self, custom_id: str) -> Answer:
        """The result of the text with a custom id. The first call reads the custom ids of all shards.

        Raises:
            KeyError: no text has this custom id.
        """
        return self[self._numbers[custom_id]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = (name for shard in range(len(self._ends)) for name in self._shard(shard).custom_ids())
        return {name: number for number, name in enumerate(names) if name}

    def _shard(self, at: int) -> ShardReader:
        if at not in self._open:
            name = self.manifest.shard_name(self.manifest.done[at].number)
            self._open[at] = open_shard(self._folder.local(name))
        return self._open[at]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_batch, (self._given,)

    def __repr__(self) -> str:
        state = "" if self.is_finished else f", {len(self._ends)} of {self.manifest.shards} shards"
        return f"Batch({named(self._given)!r}, {self.manifest.options.what}, {len(self)} results{state})"


def open_batch(path: str | os.PathLike[str]) -> Batch:
    """The results in an output folder; see `Batch`.

    Args:
        path: the output folder, or its URL.

    Raises:
        BatchError: the folder is not an output folder.
    """
    torch: Any = sys.modules.get("torch.utils.data")
    if torch is None:
        return Batch(path)
    kind: type[Batch] = type("Batch", (Batch, torch.Dataset), {})
    return kind(path)
