"""The interface of a backend, and the data that passes through it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import GenerateQuery, HeadQuery, PositionsQuery
from lmpool.protocol.row import NewRows, RowBlock, VectorBlock
from lmpool.protocol.tensors import TensorType
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.vocabulary import Vocabulary

QUERY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that fail a single query (`failure_of`) and not the worker."""

_DEVICE_ERRORS = ("CUDA error", "HIP error")
"""Texts in an exception that mean that the device is broken."""

_log = logging.getLogger("lmpool.worker")


class BackendJob(msgspec.Struct, eq=False):
    """One prompt for a backend. The worker has checked it against the model info.

    Attributes:
        digest: digest that names the prompt; unique among the jobs that the backend holds.
        ids: token ids as little-endian uint32 bytes (`lmpool.protocol.job.decode_ids` reads them).
        adapter: one of the backend's adapters ("name@revision"), or "" for none.
        payload: input of a trie job, for the trie backend; None for a prompt.
        fresh: whether to compute the row without keys and values of earlier prompts, if the backend can.
        positions: return these values of several positions in `Finished.answers`, not the row. None: return the row.
            Only backends whose info has `positions` get jobs with this field.
        generate: the client requested a continuation. Backends ignore the field and compute the row of `ids`: the
            worker draws the next token from the row, and submits the job again with the longer `ids`.
        head: the client requested a part of the model's head. The worker calls `TellsHead.head`; `submit` does not get
            the job.
        bulk: whether only bulk clients wait for the prompt, so that other prompts go first (`execution.yielding`).
            When an interactive client joins, the worker clears the field and submits the job again.
        state: any object that the backend stores here; None at the first submission.
    """

    digest: bytes
    ids: bytes
    adapter: str = ""
    payload: object | None = None
    fresh: bool = False
    positions: PositionsQuery | None = None
    generate: GenerateQuery | None = None
    head: HeadQuery | None = None
    bulk: bool = False
    state: Any = None

    @property
    def span(self) -> range:
        """The positions whose logits are requested. Position i belongs to token i, and predicts the token after it."""
        length = len(self.ids) // 4
        return range(length - 1, length) if self.positions is None else self.positions.span(length)

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with other values in some fields."""
        return msgspec.structs.replace(self, **changes)


class Finished(NamedTuple):
    """The results of one step.

    Attributes:
        blocks: the rows that are ready.
        failures: digest -> message, of the prompts that the backend cannot answer.
        answers: the vectors that are ready: values of positions, continuations, values of trie nodes.
    """

    blocks: list[RowBlock]
    failures: dict[bytes, str]
    answers: VectorBlock | None = None

    @property
    def digests(self) -> list[bytes]:
        """Digests of the prompts that have a row, a vector or a failure."""
        answered = [digest for block in self.blocks for digest in block.digests]
        return [*answered, *(self.answers.digests if self.answers else ()), *self.failures]


class BackendStats(NamedTuple):
    """Counters since the start, for the log and the heartbeat.

    Attributes:
        steps: number of forwards that were run.
        rows: number of computed rows.
        tokens: number of tokens of the prompts that were computed.
        reused: number of tokens of the computed prompts that a prefix cache already held.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    reused: int = 0


class BackendSettings(Protocol):
    """The settings of a backend. Each entry point of the group `lmpool.backends` names a class of this kind.

    The class is a dataclass. Its fields become options of `lmpool worker`; a field's metadata has the help text under
    "help". The argument MODEL of the command sets the field `model`, or `name` in a class without `model`. A class
    whose models may run in several processes also has the attribute `ranks`, the number of these processes.
    """

    @property
    def served_as(self) -> str:
        """The name under which the worker serves the model."""
        ...

    def open(self) -> Backend:
        """Make the backend; called in the backend's thread. Import heavy packages here."""
        ...


class Backend(Protocol):
    """Turns prompts into rows. One thread of the worker calls all methods; any thread reads `info` and `batch`."""

    @property
    def info(self) -> ModelInfo:
        """The model that the backend serves."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that prompts may name now: "name@revision" -> folder or hub name."""
        ...

    @property
    def batch(self) -> int:
        """Number of prompts in a full step. A worker takes at most one full step at once, unless steps are short."""
        ...

    @property
    def device(self) -> str:
        """Where the rows are computed: "cpu", or a torch device such as "cuda:0"."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The byte strings of the model's tokens; None if the model's tokenizer does not provide them."""
        ...

    def capacity(self) -> int:
        """Number of prompts that the backend accepts now, including prompts for one step ahead."""
        ...

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs. The backend holds each job until a step returns a result for it or `abort` drops it."""
        ...

    def step(self) -> Finished:
        """Run one step over the submitted jobs; called only while jobs are held.

        A prompt that cannot be answered is a failure of that prompt alone. An exception means that the backend is
        broken.
        """
        ...

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that no client waits for; ignore unknown digests."""
        ...

    def load_adapter(self, name: str, source: str) -> str:
        """Load an adapter; called between steps. Loading a loaded adapter again does nothing.

        Adapters of the same name with other weights stay loaded until they are dropped.

        Args:
            name: the name that clients use.
            source: folder or hub name.

        Returns:
            the revision, a digest of the weights that is the same on every machine.

        Raises:
            SettingsError: the adapter cannot be read or does not fit the model, or this backend cannot load adapters.
        """
        ...

    def drop_adapter(self, adapter: str) -> None:
        """Drop an adapter ("name@revision"); called between steps, when no held job names it.

        After an exception the adapter stays loaded; a device error (`is_device_error`) ends the worker.
        """
        ...

    def stats(self) -> BackendStats:
        """Counters since the start."""
        ...

    def close(self) -> None:
        """Free everything that the backend holds."""
        ...


@runtime_checkable
class WritesInPlace(Protocol):
    """An extra method of a backend that can write rows directly into shared memory."""

    def write_to(self, new_rows: NewRows) -> None:
        """Write rows into the memory that `new_rows` returns, unless it returns None; called once, between steps."""
        ...


@runtime_checkable
class MapsMemory(Protocol):
    """An extra method of a `WritesInPlace` backend whose rows may be computed in another process."""

    def map_memory(self, fd: int, memory: Any) -> None:
        """Let another process map the memory of `write_to`, if that process computes the rows; called between steps.

        Args:
            fd: the descriptor of the memory in this process; the descriptor is open during this call.
            memory: the memory, mapped in this process.
        """
        ...


@runtime_checkable
class TellsEnd(Protocol):
    """An extra method of a backend that can break while no step runs, such as one with several processes."""

    def when_broken(self, report: Callable[[BaseException], object]) -> None:
        """Call `report` with the error when the backend breaks, or at once if the backend has broken.

        `when_broken` is called once, before the first job. `report` may be called from any thread.
        """
        ...


@runtime_checkable
class TellsTokenizer(Protocol):
    """An extra method of a backend whose model has a tokenizer that clients can download."""

    def tokenizer(self) -> PackedTokenizer | None:
        """The model's tokenizer; None if clients cannot use the tokenizer. Called once, after `vocabulary`."""
        ...


@runtime_checkable
class TellsDevices(Protocol):
    """An extra attribute of a backend that can spread its model over several devices."""

    @property
    def devices(self) -> Sequence[str]:
        """The devices that hold parts of the model, such as "cuda:0" and "cuda:1"; one entry per device.

        Processes that share a device, such as the CPU, have an entry each.
        """
        ...


@runtime_checkable
class TellsHead(Protocol):
    """An extra method of a backend whose info says that it returns hidden states."""

    def head(self, query: HeadQuery, adapter: str) -> NDArray[np.float32]:
        """The requested part of the head of the model, or of an adapter, float32 of any length; called between steps.

        `adapter` is "" for a part of the model's head.

        An exception fails the query; a device error (`is_device_error`) ends the worker.
        """
        ...


@runtime_checkable
class ChangesWeights(Protocol):
    """Extra methods of a backend whose weights can be replaced while the worker runs.

    Both are called between steps, when the backend holds no job.
    """

    def tensors(self) -> Mapping[str, TensorType]:
        """Name of each tensor of the checkpoint -> its type.

        Empty if this model's weights cannot be replaced, for example because they are quantised or offloaded.
        """
        ...

    def load_weights(self, full: Path, sparse: Sequence[Path], held: int) -> None:
        """Replace the model's weights by those of `full` with the changes of the files `sparse`, oldest first.

        Afterwards no row depends on the old weights: everything that was computed from them is dropped. Loaded adapters
        stay loaded, on the new weights. `info` stays as it is.

        Args:
            full: safetensors file, or folder of such files, with all tensors.
            sparse: files with changes of the weights before them; see `lmpool.protocol.tensors`.
            held: k if the model has the weights of `full` with the first k files of `sparse`, so that only the later
                files are applied; -1 if it has other weights.

        Raises:
            SettingsError: the files do not fit the model, or have a NaN or infinite number. No weight has changed.
            Exception: any other error may leave old and new weights mixed. Then call this method with `held` -1.
        """
        ...


class WithoutAdapters:
    """Base class of a backend that cannot serve adapters."""

    adapters: Mapping[str, str] = MappingProxyType({})

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`; refuses every adapter."""
        raise SettingsError(f"adapters: {name!r} cannot be loaded: this backend serves no adapters")

    def drop_adapter(self, adapter: str) -> None:
        """See `Backend.drop_adapter`."""


def is_device_error(error: BaseException) -> bool:
    """Whether an exception means that the device is broken, so that no later call on it can work."""
    text = str(error)
    return type(error).__name__ == "AcceleratorError" or any(sign in text for sign in _DEVICE_ERRORS)


def failure_of(error: Exception) -> str:
    """Log an exception that a single query caused, and return the reason for the client.

    Raises:
        Exception: `error` itself, if the device is broken, because then the worker must end.
    """
    if is_device_error(error):
        raise error
    _log.warning("a query failed, and the worker goes on", exc_info=error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
