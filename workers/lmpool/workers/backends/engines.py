"""Base class of the hf, vllm and sglang backends: loads adapters, and checks the first rows (the canary).

The canary is a set of rows that a backend must compute correctly before its worker joins the pool.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError, SettingsError, WorkerError
from lmpool.protocol.adapter import qualify
from lmpool.protocol.job import digest_of
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import HeadQuery, PositionsQuery
from lmpool.protocol.row import Encoding, NewRows, Row, decode_row
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import checkpoint_revision, checkpoint_source
from lmpool.workers.backends.lora import check_adapter, head_factors, reading
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import EngineSettings, ModelSettings
from lmpool.workers.backends.tokenizer import TellsTexts
from lmpool.workers.execution.contract import Backend, BackendJob, BackendStats, Finished
from lmpool.workers.execution.engine_thread import check_answers

MAX_CHECKED_ADAPTERS = 3
"""Max adapters whose rows are checked before a worker joins the pool."""

_log = logging.getLogger(__name__)

_MAX_STEPS = 1000  # Max steps that an engine may take for a handful of prompts; a slower engine is broken.
_SUM_TOLERANCE = 1e-2  # Largest accepted |log of the sum of a row's probabilities|.
# Dtype -> largest accepted RMS difference of two rows of one prompt, divided by the row's standard deviation.
_ROW_TOLERANCE = {"float32": 2e-2, "bfloat16": 0.25, "float16": 0.1}
_OTHER_TOLERANCE = 0.25  # Tolerance for dtypes that are not in `_ROW_TOLERANCE`.
_MIN_VOCAB_SIZE = 64  # Min vocabulary size to check that two prompts' rows differ; smaller rows may be equal by chance.


class EngineBackend(TellsTexts, ABC):
    """Base class of the hf, vllm and sglang backends.

    Attributes:
        adapters: the loaded adapters: "name@revision" -> folder or hub name.
    """

    batch: int
    _folder: Path  # The model's folder, or its hub name if `_weights` is set.
    _weights: Mapping[str, Sequence[Any]] | None = None  # The model's weights; see `check_adapter`.
    _encoder: RowEncoder
    _head: OutputHead | None = None  # None if clients cannot compute the logits from hidden states.
    _head_name = "lm_head"  # The last part of the name of the head's module.

    def __init__(self, settings: ModelSettings) -> None:
        torch_device.settle()
        self._settings = settings
        self._held: dict[bytes, Any] = {}  # Digest of each job that the backend holds -> job, or name of its request.
        self.reset_stats()
        self.adapters: dict[str, str] = {}
        # "name@revision" -> result of `head_factors`, read when the adapter was loaded: its files may change later.
        self._head_factors: dict[str, tuple[Any, Any] | str | None] = {}

    @abstractmethod
    def _load(self, adapter: str, folder: Path) -> None:
        """Have the engine load an adapter ("name@revision")."""

    def _read_factors(self, adapter: str, folder: Path) -> tuple[Any, Any] | str | None:
        """See `head_factors`; called after `_load`."""
        return head_factors(folder, self._head_name)

    @abstractmethod
    def _unload(self, adapter: str) -> None:
        """Have the engine drop an adapter that no request names any more."""

    def _set_info(self, dtype: object, encoding: Encoding = Encoding.F32, **facts: Any) -> None:
        name, settings = str(dtype).removeprefix("torch."), self._settings
        facts["hidden"] = 0 if self._head is None else self._head.size
        facts |= {"dtype": name, "encoding": encoding.name.lower(), "source": checkpoint_source(settings.model)}
        lossy = encoding is Encoding.F16 and name != "float16"
        self._info = ModelInfo(settings.served_as, settings.kind, lossy=lossy, **facts)

    def _prepare(self, dtype: object, **facts: Any) -> None:
        """Set the info, load the adapters of the settings, and check the first rows. Close the backend on an error."""
        backend = cast(Backend, self)
        try:
            self._set_info(dtype, **facts)
            for name, source in self._settings.adapter_folders.items():
                self.load_adapter(name, source)
            _log.info("weights are loaded: checking the first rows")
            first = [block for done in _steps(backend, [BackendJob(bytes(16), bytes(4))]) for block in done.blocks]
            if not first:
                raise WorkerError("it has answered a prompt without a row")
            self._set_info(dtype, first[0].encoding, **facts)
            check_canary(backend)
        except BaseException as error:
            backend.close()
            if isinstance(error, WorkerError):
                raise unservable(backend, str(error)) from error
            raise
        self.reset_stats()

    def capacity(self) -> int:
        """Number of jobs to accept: the backend holds at most one batch next to the running batch."""
        return max(0, 2 * self.batch - len(self._held))

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`."""
        with reading(source):
            folder = check_adapter(source, self._folder, self._weights)
            revision = checkpoint_revision(folder)
            adapter, settings = qualify(name, revision), self._settings
            if adapter not in self.adapters:
                if isinstance(settings, EngineSettings) and len(self.adapters) >= (slots := settings.adapter_slots):
                    text = f"adapters: this worker has {slots} slots, and none is free for {name!r}"
                    raise SettingsError(f"{text}: start it with more (--max-adapters)")
                self._load(adapter, folder)
                self.adapters[adapter] = checkpoint_source(source)
                try:
                    self._head_factors[adapter] = self._read_factors(adapter, folder)
                    if checkpoint_revision(folder) != revision:
                        raise SettingsError(f"adapters: {folder} was changed while it was loaded")
                except Exception:
                    self.drop_adapter(adapter)
                    raise
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """See `Backend.drop_adapter`."""
        if self.adapters.pop(adapter, None) is not None:
            self._head_factors.pop(adapter, None)
            self._unload(adapter)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._encoder.new_rows = new_rows

    def head(self, query: HeadQuery, adapter: str) -> NDArray[np.float32]:
        """See `TellsHead.head`."""
        if query.is_of_adapter:
            return _part_of_adapter(query, self._head_factors[adapter])
        assert self._head is not None  # Without a head, `info.hidden` is 0, and the worker refuses the query.
        return self._head.answer(query, self._info.vocab_size)

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def reset_stats(self) -> None:
        """Set the counters to zero: no client has requested the rows of the checks at the start."""
        self._stats = BackendStats()


def row_deciding(given: Mapping[str, Any], harmless: Collection[str]) -> dict[str, Any]:
    """Engine options, without those that change rows only by rounding; the model's fingerprint includes the result."""
    return {name: value for name, value in given.items() if name not in harmless}


def _part_of_adapter(query: HeadQuery, factors: tuple[Any, Any] | str | None) -> NDArray[np.float32]:
    """The part of an adapter's factors of the head (`head_factors`) that a query requests."""
    if isinstance(factors, str):
        raise WorkerError(factors)
    if query.part == "rank":
        return np.array([0 if factors is None else len(factors[0])], np.float32)
    if factors is None:
        raise WorkerError("the adapter has no factors for the head")
    numbers = factors[query.part == "up"].contiguous().numpy().ravel()
    if query.first + query.count > len(numbers):
        raise WorkerError(f"{query.count} numbers from {query.first} on: the factor has {len(numbers)}")
    return np.asarray(numbers[query.first : query.first + query.count], np.float32)


def check_canary(backend: Backend) -> None:
    """Have a backend compute rows with known properties. Call it in the backend's thread before the backend serves.

    Several prompts run together, with adapters and without, and then each alone. Each row must be a distribution over V
    tokens, must be equal in both runs except for rounding, and must change with the last token. One prompt then grows
    token by token. These checks find engines whose rows are captured at the wrong place, assigned to the wrong prompt,
    or computed from the wrong keys and values.

    Raises:
        SettingsError: a row is wrong or missing.
    """
    info = backend.info
    length = min(5, info.max_prompt_tokens)
    # Avoid the lowest ids: they are special tokens, and prompts of special tokens often have equal rows.
    long = [(info.vocab_size // 3 + 7 * i) % info.vocab_size for i in range(length)]
    other = [(token + 1) % info.vocab_size for token in long]
    prompts = [(ids, "") for ids in (long, long[:-1] + other[-1:], other, long[: (length + 1) // 2])]
    prompts += [(long, adapter) for adapter in list(backend.adapters)[:MAX_CHECKED_ADAPTERS]]
    batched = compute_rows(backend, prompts, "together")
    for index, prompt in enumerate(prompts):
        (alone,) = compute_rows(backend, [prompt], f"alone-{index}")
        for row in (batched[index], alone):
            with np.errstate(invalid="ignore"):  # Ignore NaN here: a row with NaN fails the check below.
                total = float(np.logaddexp.reduce(row.astype(np.float64)))
            if not abs(total) < _SUM_TOLERANCE:
                raise unservable(backend, f"the probabilities of a row sum to exp({total:g}), not to 1")
        _check_agree(backend, batched[index], alone, "when others run beside it")
    for end in range(max(1, length - 2), length + 1):
        (grown,) = compute_rows(backend, [(long[:end], "")], f"grown-{end}")
    _check_agree(backend, grown, batched[0], "when it grows token by token")
    if info.positions and length > 1:
        _check_entry(backend, long, PositionsQuery.scores_from(length - 1))
        _check_entry(backend, long, PositionsQuery(length - 2, targets=np.array(long[-1:], "<u4").tobytes()))
    if info.vocab_size >= _MIN_VOCAB_SIZE and np.array_equal(batched[0], batched[1]):
        raise unservable(backend, "two prompts whose last tokens differ have the same row")


def _steps(backend: Backend, jobs: Sequence[BackendJob]) -> Iterator[Finished]:
    """Submit jobs, and yield the results of steps until each job has a result."""
    backend.submit(jobs)
    answered = 0
    for _ in range(_MAX_STEPS):
        finished = backend.step()
        if finished.failures:
            raise unservable(backend, f"it fails on a plain prompt: {next(iter(finished.failures.values()))}")
        yield finished
        answered += len(finished.digests)
        if answered >= len(jobs):
            return
    raise unservable(backend, f"it has answered {answered} of {len(jobs)} prompts after {_MAX_STEPS} steps")


def compute_rows(backend: Backend, prompts: Sequence[tuple[list[int], str]], run: str) -> list[Row]:
    """The rows of prompts (ids, adapter) that run together. `run` makes the digests differ from other runs."""
    jobs = []
    for index, (ids, adapter) in enumerate(prompts):
        encoded = np.asarray(ids, "<u4").tobytes()
        jobs.append(BackendJob(digest_of(encoded, f"canary {run} {index}"), encoded, adapter))
    rows: dict[bytes, Row] = {}
    for finished in _steps(backend, jobs):
        try:
            check_answers(finished, {job.digest for job in jobs} - rows.keys(), backend.info)
            for block in finished.blocks:
                for index, digest in enumerate(block.digests):
                    data = np.frombuffer(block.encode(index), np.uint8)
                    rows[digest] = decode_row(data, backend.info.vocab_size)
        except (WorkerError, ProtocolError) as error:
            raise unservable(backend, str(error)) from error
    if len(rows) < len(jobs):
        raise unservable(backend, f"it has answered {len(jobs) - len(rows)} prompts without a row")
    return [rows[job.digest] for job in jobs]


def _check_entry(backend: Backend, ids: list[int], query: PositionsQuery) -> None:
    """The first value of a query must be the last token's entry in the row of the tokens before this token."""
    (row,) = compute_rows(backend, [(ids[:-1], "")], f"scored-{query.values}")
    encoded = np.asarray(ids, "<u4").tobytes()
    job = BackendJob(digest_of(encoded, f"canary score {query.values}"), encoded, positions=query)
    entry, tolerance = row[ids[-1]], _tolerance(backend, float(row[np.isfinite(row)].std()))
    found = [vector for done in _steps(backend, [job]) if done.answers for vector in done.answers.vectors]
    if [vector.shape for vector in found] != [(len(job.span),)] or not abs(found[0][0] - entry) <= tolerance:
        raise unservable(backend, f"a token scores {found}, and its entry in the row is {entry}")


def _check_agree(backend: Backend, row: Row, other: Row, when: str) -> None:
    seen = np.isfinite(row) & np.isfinite(other)
    error = float(np.sqrt(np.mean(np.square(row[seen] - other[seen]))))
    spread = float(other[seen].std())
    if not error <= _tolerance(backend, spread):
        raise unservable(backend, f"a prompt's row differs by {error:.3g} {when} (its entries spread by {spread:.3g})")


def _tolerance(backend: Backend, spread: float) -> float:
    """The largest difference of two rows that rounding explains, in proportion to the spread of a row's entries."""
    return _ROW_TOLERANCE.get(backend.info.dtype, _OTHER_TOLERANCE) * spread + 1e-6


def unservable(backend: Backend, reason: str) -> SettingsError:
    """The error for a backend whose rows are wrong."""
    return SettingsError(f"model: {backend.info.name} cannot be served by {backend.info.backend}: {reason}")
