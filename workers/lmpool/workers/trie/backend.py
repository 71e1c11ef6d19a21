"""The backend of trie workers: answers trie jobs in batches, in the backend's thread."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE, ModelCard
from lmpool.settings import check_number
from lmpool.trie.kernels import open_kernels
from lmpool.trie.kernels.cores import count_threads
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backend.contract import Backend, BackendJob, BackendStats, Finished, WithoutAdapters
from lmpool.workers.trie.compute import answer
from lmpool.workers.trie.trie_inputs import TrieInputs, inputs_of

_log = logging.getLogger("lmpool.worker")

REVISION: Final = "1"
"""Changes when the numbering of nodes or the meaning of an operation does."""


def warm_up(device: str) -> None:
    """Compile the kernels before the first job needs them.

    Raises:
        SettingsError: what the device needs is not installed or not there.
    """
    open_kernels(Trie([b"a", b"b"]), device)


@dataclass(frozen=True, slots=True)
class TrieSettings:
    """Settings of a trie worker.

    Raises:
        SettingsError: a value is malformed.
    """

    device: str = field(default="cpu", metadata={"help": 'Where it computes: "cpu", "cuda" or "cuda:N".'})
    max_batch: int = field(default=128, metadata={"help": "Jobs in one step."})

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise SettingsError(f"device: {self.device!r} is not one of cpu, cuda, cuda:N")
        check_number("max_batch", self.max_batch, least=1, most=4096)

    @property
    def served_as(self) -> str:
        """The name of all trie workers."""
        return TRIE_SERVICE

    def open(self) -> Backend:
        """Make the backend; see `TrieBackend`."""
        return TrieBackend(self)


class TrieBackend(WithoutAdapters):
    """Answers jobs that come with all that they need.

    Args:
        settings: see `TrieSettings`.

    Raises:
        SettingsError: what the device needs is not installed or not there.
    """

    def __init__(self, settings: TrieSettings) -> None:
        self._settings = settings
        self._jobs: OrderedDict[bytes, TrieInputs] = OrderedDict()
        self._stats = BackendStats()
        warm_up(settings.device)
        threads = count_threads()
        _log.info("computing on %s; CPU threads: %d", settings.device, threads, extra={"threads": threads})

    @property
    def card(self) -> ModelCard:
        """See `Backend.card`."""
        return ModelCard(
            name=TRIE_SERVICE,
            backend="trie",
            vocab_size=1,
            max_prompt_tokens=1,
            revision=REVISION,
            dtype="float32",
            note="answers trie jobs for any vocabulary",
        )

    @property
    def batch(self) -> int:
        """See `Backend.batch`."""
        return self._settings.max_batch

    @property
    def device(self) -> str:
        """See `Backend.device`."""
        return self._settings.device

    def vocabulary(self) -> Vocabulary | None:
        """See `Backend.vocabulary`."""
        return None

    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return 2 * self._settings.max_batch - len(self._jobs)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """See `Backend.submit`."""
        for job in jobs:
            self._jobs[job.digest] = inputs_of(job)

    def step(self) -> Finished:
        """See `Backend.step`."""
        batch = dict(islice(self._jobs.items(), self._settings.max_batch))
        answers, failures = answer(batch)
        for digest in batch:
            del self._jobs[digest]
        stats = self._stats
        self._stats = stats._replace(steps=stats.steps + 1, rows=stats.rows + len(batch) - len(failures))
        return Finished([], failures, answers)

    def abort(self, digests: Collection[bytes]) -> None:
        """See `Backend.abort`."""
        for digest in digests:
            self._jobs.pop(digest, None)

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._jobs.clear()
