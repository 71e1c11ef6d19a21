"""The backend contract: one protocol for engines that batch and engines that schedule, and what passes through it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError, SettingsError, WorkerError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import GenerateQuery, HeadQuery, PositionsQuery
from lmpool.protocol.row import Encoding, NewRows, RowBlock, VectorBlock, check_row, decode_row
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.vocabulary import Vocabulary

QUERY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What code that answers a single query may raise by mistake: it fails the query (`failure_of`), not the worker."""

_DEVICE_ERRORS = ("CUDA error", "HIP error")
"""What the text of an exception has that means that the device is broken."""

_log = logging.getLogger("lmpool.worker")


class BackendJob(NamedTuple):
    """One prompt for a backend; it has been checked against the info.

    Attributes:
        digest: names the prompt; unique among the jobs that the backend holds.
        ids: the token ids as little-endian uint32 bytes (`lmpool.protocol.job.decode_ids` reads them).
        adapter: one of the backend's adapters ("name@revision"), or "" for none.
        payload: what else the job comes with, which only its maker and its backend know; None for a prompt.
        fresh: the row must be computed without keys and values of earlier prompts, where the backend can.
        positions: not the row is wanted but this of every position, in `Finished.answers`; None for the row. Only
            backends whose info says so are asked.
        generate: not the row is wanted but tokens that are drawn from it and those after it, in `Finished.answers`. The
            engine's thread asks the backend for these rows (`Continuations`); backends are not told.
        head: not the row is wanted but this of the model's head; the engine's thread asks for it (`TellsHead`).
        bulk: only bulk clients wait for it: others go first (`lmpool.workers.execution.yielding`). A job that a backend
            holds may be submitted again without it, because another client has joined.
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

    @property
    def is_for_answer(self) -> bool:
        """Whether something else than a row is wanted of the backend's thread."""
        return self.positions is not None or self.generate is not None or self.head is not None

    @property
    def span(self) -> range:
        """The positions whose logits are wanted: that of token i is i, and its logits are of what comes after it."""
        length = len(self.ids) // 4
        return range(length - 1, length) if self.positions is None else self.positions.span(length)


class Finished(NamedTuple):
    """What one step brought.

    Attributes:
        blocks: the rows that are ready.
        failures: digest -> message of the prompts that the backend cannot answer.
        answers: vectors that are ready: what is wanted of positions, continuations, and what trie workers answer.
        stale: prompts whose adapter the backend does not have; told by the backend's thread, not by backends.
        step: monotonic times when the step began and ended; told by the backend's thread where jobs are traced.
    """

    blocks: list[RowBlock]
    failures: dict[bytes, str]
    answers: VectorBlock | None = None
    stale: tuple[bytes, ...] = ()
    step: tuple[float, float] | None = None

    @property
    def digests(self) -> list[bytes]:
        """The prompts that were answered, with a row, a vector or a failure."""
        answered = [digest for block in self.blocks for digest in block.digests]
        return [*answered, *(self.answers.digests if self.answers else ()), *self.failures]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and vectors, encoded."""
        return sum(block.nbytes for block in self.blocks) + (self.answers.nbytes if self.answers else 0)

    @classmethod
    def joined(cls, steps: Sequence[Finished]) -> Finished:
        """What several steps brought, as if one had; rows and vectors are copied."""
        blocks = [block for step in steps for block in step.blocks]
        digests = [digest for block in blocks for digest in block.digests]
        is_alike = len({(block.encoding, block.numbers.shape[1]) for block in blocks}) == 1
        # A prompt may be there twice, given up and computed again meanwhile: then each block is for itself.
        if len(blocks) > 1 and is_alike and len(set(digests)) == len(digests):
            blocks = [RowBlock.joined(blocks)]
        answers = [step.answers for step in steps if step.answers is not None]
        vectors = {name: vector for some in answers for name, vector in zip(some.digests, some.vectors, strict=True)}
        failures = {digest: text for step in steps for digest, text in step.failures.items()}
        stale = tuple(digest for step in steps for digest in step.stale)
        return cls(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None, stale)


class BackendStats(NamedTuple):
    """Counters since the start, for the log and the heartbeat.

    Attributes:
        steps: forwards that were run.
        rows: rows that were computed.
        tokens: tokens that were asked for.
        reused: tokens among them that a prefix cache already held.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    reused: int = 0


class BackendSettings(Protocol):
    """What a backend is told; the entry points `lmpool.backends` name such a class for each kind of backend.

    A dataclass whose fields become options of `lmpool worker`, each described under "Attributes:" in its
    docstring. The MODEL of the command is its field `model`, or `name` where there is no such field.
    """

    @property
    def served_as(self) -> str:
        """Under which name the model is served."""
        ...

    def open(self) -> Backend:
        """Make the backend; called in the backend's thread. What is heavy is imported here."""
        ...


class Backend(Protocol):
    """Turns prompts into rows. All methods but `info` and `batch` are called in the backend's thread only."""

    @property
    def info(self) -> ModelInfo:
        """What the backend serves."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that prompts may name now: "name@revision" -> folder or hub name."""
        ...

    @property
    def batch(self) -> int:
        """Prompts that make a full step; a worker takes no more than this at once where steps are not very short."""
        ...

    @property
    def device(self) -> str:
        """Where the rows are computed: "cpu", or a torch device such as "cuda:0"."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The byte strings of the model's tokens; None where there is no tokenizer that tells them."""
        ...

    def capacity(self) -> int:
        """How many more prompts the backend has room for now, one step ahead included."""
        ...

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs. They stay the backend's until a step returns them or `abort` drops them."""
        ...

    def step(self) -> Finished:
        """Run one step over what was submitted and return what finished; called only when jobs are held.

        A prompt that cannot be answered is a failure of that prompt alone. Exceptions mean that the
        backend is broken.
        """
        ...

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that nobody waits for; unknown digests are ignored."""
        ...

    def load_adapter(self, name: str, source: str) -> str:
        """Have prompts name an adapter; called between steps.

        It is served beside others of that name with other weights, until these are dropped. Loading what is loaded
        does nothing.

        Args:
            name: what people call it.
            source: folder or hub name.

        Returns:
            its revision, a digest of its weights: the same on every machine.

        Raises:
            SettingsError: it cannot be had, does not fit the model, or this backend cannot load adapters.
        """
        ...

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter ("name@revision"); called between steps, when no job that is held names it.

        An exception means that it stays loaded; one of the device (`is_device_error`) ends the worker.
        """
        ...

    def stats(self) -> BackendStats:
        """Counters since the start."""
        ...

    def close(self) -> None:
        """Free what the backend holds."""
        ...


@runtime_checkable
class WritesInPlace(Protocol):
    """What a backend has besides that can write rows right where clients read them."""

    def write_to(self, new_rows: NewRows) -> None:
        """Take the memory of rows from there, where it has some; called once, between steps."""
        ...


@runtime_checkable
class TellsTokenizer(Protocol):
    """What a backend has besides whose model's tokenizer has a form that travels."""

    def tokenizer(self) -> PackedTokenizer | None:
        """The model's tokenizer; None where it has none, or none of that form. Called once, after `vocabulary`."""
        ...


@runtime_checkable
class TellsHead(Protocol):
    """What a backend has besides whose info says that it tells hidden states."""

    def head(self, query: HeadQuery) -> NDArray[np.float32]:
        """What a query wants of the model's head, float32 of any length; called between steps.

        An exception fails the query; one of the device (`is_device_error`) ends the worker.
        """
        ...


class WithoutAdapters:
    """What a backend inherits that cannot serve adapters."""

    adapters: Mapping[str, str] = MappingProxyType({})

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`; refuses."""
        raise SettingsError(f"adapters: {name!r} cannot be loaded: this backend serves no adapters")

    def drop_adapter(self, adapter: str) -> None:
        """See `Backend.drop_adapter`."""


def check_answers(finished: Finished, held: Collection[bytes], info: ModelInfo) -> list[bytes]:
    """Refuse what no worker may publish: a backend that answers like this would do worse next time.

    Args:
        finished: what a step brought.
        held: the digests of the prompts that the backend owes answers to.
        info: the backend's info.

    Returns:
        the digests that were answered.

    Raises:
        WorkerError: a row or failure of a prompt that was not asked for, two answers, or rows of another length.
    """
    answered = finished.digests
    who = f"the backend {info.backend!r} has answered"
    if len(set(answered)) < len(answered):
        twice = [digest for digest, count in Counter(answered).items() if count > 1]
        raise WorkerError(f"{who} {len(twice)} prompts twice in one step, such as {twice[0].hex()}")
    if strangers := [digest for digest in answered if digest not in held]:
        raise WorkerError(f"{who} {len(strangers)} prompts that it was not asked, such as {strangers[0].hex()}")
    for block in finished.blocks:
        if block.numbers.shape[1] != info.vocab_size:
            raise WorkerError(f"{who} rows of {block.numbers.shape[1]} entries; its info says V = {info.vocab_size}")
    return answered


def is_device_error(error: BaseException) -> bool:
    """Whether an exception means that the device is broken, so that no later call on it would work."""
    text = str(error)
    return type(error).__name__ == "AcceleratorError" or any(sign in text for sign in _DEVICE_ERRORS)


def failure_of(error: Exception) -> str:
    """Log an exception that a single query has caused, and return the reason why the query has no answer.

    Raises:
        Exception: the given one, if the device is broken: then the worker must end.
    """
    if is_device_error(error):
        raise error
    _log.warning("a query failed, and the worker goes on", exc_info=error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_first_rows(blocks: Iterable[RowBlock], info: ModelInfo) -> None:
    """Refuse blocks of what is no row, such as logits: clients do not look at each row in shared memory.

    Raises:
        WorkerError: the largest entry of the first row of a block is that of no log-probabilities.
    """
    for block in blocks:
        if block.digests:
            try:
                if block.encoding is Encoding.F32:
                    check_row(block.numbers[0])
                else:
                    check_row(decode_row(np.frombuffer(block.encode(0), np.uint8), info.vocab_size))
            except ProtocolError as error:
                raise WorkerError(f"the backend {info.backend!r} has answered what is no row: {error}") from error
