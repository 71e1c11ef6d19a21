"""An example backend in 40 lines (without the imports), whose rows make the tokens of the prompt likely."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from lmpool.protocol.job import decode_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished, WithoutAdapters


@dataclass(frozen=True)
class UnigramSettings:
    """The fields become options of `lmpool worker`; the field `name` (or `model`) becomes its argument MODEL."""

    name: str
    vocab_size: int = field(default=50_000, metadata={"help": "V."})

    @property
    def served_as(self) -> str:
        return self.name

    def open(self) -> "UnigramBackend":  # Load the model and import heavy packages here.
        return UnigramBackend(self)


class UnigramBackend(WithoutAdapters):  # To serve adapters, see `Backend.load_adapter`.
    batch = 32
    device = "cpu"

    def __init__(self, settings: UnigramSettings) -> None:
        self._waiting: dict[bytes, bytes] = {}
        self._stats = BackendStats()
        # All workers of one model must have the same backend, V, revision and dtype: these four identify cached rows.
        self.info = ModelInfo(
            settings.name, "unigram", settings.vocab_size, max_prompt_tokens=4096, revision="1", dtype="float32"
        )

    def vocabulary(self) -> Vocabulary | None:  # The bytes of each token; None if unknown.
        return None

    def capacity(self) -> int:  # Free slots: the backend holds up to two batches.
        return 2 * self.batch - len(self._waiting)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        self._waiting.update((job.digest, job.ids) for job in jobs)

    def step(self) -> Finished:
        batch = dict(islice(self._waiting.items(), self.batch))
        counts = [np.bincount(decode_ids(ids), minlength=self.info.vocab_size) + 1.0 for ids in batch.values()]
        rows = np.log([row / row.sum() for row in counts]).astype(np.float32)
        self.abort(batch)
        steps, done, tokens, _ = self._stats
        tokens += sum(len(ids) // 4 for ids in batch.values())
        self._stats = BackendStats(steps + 1, done + len(batch), tokens)
        return Finished([RowBlock(list(batch), rows, None, Encoding.F32)], failures={})

    def abort(self, digests: Collection[bytes]) -> None:
        for digest in digests:
            self._waiting.pop(digest, None)

    def stats(self) -> BackendStats:
        return self._stats

    def close(self) -> None:
        self._waiting.clear()
