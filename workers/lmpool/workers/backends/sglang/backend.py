"""The sglang backend: prompts become requests of SGLang's scheduler, which batches them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.adapter import qualify
from lmpool.protocol.row import NewRows, VectorBlock
from lmpool.workers.backends.canary import check_canary, completed_info
from lmpool.workers.backends.checkpoint import checkpoint_revision, checkpoint_source
from lmpool.workers.backends.row_encoder import RowEncoder, log_threads
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.backends.sglang.launch import checked_adapter, launch, write_plain_adapter
from lmpool.workers.backends.tokenizer import TellsTexts
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished

if TYPE_CHECKING:
    from lmpool.workers.backends.sglang.engine import EngineBatch


class SglangBackend(TellsTexts):
    """Serves one model of SGLang; see `lmpool.workers.execution.contract.Backend`."""

    _settings: SglangSettings

    def __init__(self, settings: SglangSettings) -> None:
        self._settings = settings
        launched = launch(settings)
        self._engine, self._info, self.adapters = launched.engine, launched.info, launched.adapters
        self.device = launched.device
        log_threads(self.device)
        self.batch: int = self._engine.scheduler.max_running_requests
        self._encoder = RowEncoder(launched.dtype, lossy=settings.encoding == "f16")
        from lmpool.workers.backends.sglang.adapters import LoadedAdapters  # Imports SGLang, which is set up only now.

        self._folder, self._loaded_adapters = launched.folder, LoadedAdapters(self._engine)
        # All names have the same length, because SGLang aborts every request whose name starts with the given one.
        self._names = (f"{number:016x}" for number in count())
        self._digests: dict[str, bytes] = {}  # Request name -> digest, of the jobs in flight.
        self._held: dict[bytes, str] = {}  # Digest -> request name.
        self._stats = BackendStats()
        try:
            self._info = completed_info(self)
            check_canary(self)
        except WorkerError as error:
            self.close()
            raise SettingsError(f"model: {settings.served_as} cannot be served by sglang: {error}") from error
        except BaseException:
            self.close()
            raise
        self._stats = BackendStats()

    def capacity(self) -> int:
        """Free slots for one batch next to the running one."""
        return max(0, 2 * self.batch - len(self._held))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Submit jobs to the engine, except those in flight. The engine computes concurrently."""
        requests = {}
        for job in jobs:
            if job.digest not in self._held:
                name = self._held[job.digest] = next(self._names)
                self._digests[name] = job.digest
                requests[name] = job
        if requests:
            self._engine.submit(requests)

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs in flight."""
        names = [self._held.pop(digest) for digest in digests if digest in self._held]
        for name in names:
            del self._digests[name]
        if names:
            self._engine.drop(names)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._encoder.new_rows = new_rows

    @torch.inference_mode()
    def step(self) -> Finished:
        """Wait for a forward of the engine, and return the results since the last step.

        A forward may complete no prompt. The caller can then submit jobs that have arrived.
        """
        finished, vectors = Finished([], {}), dict[bytes, NDArray[np.float32]]()
        if self._held:
            for batch in self._engine.results():
                self._add(batch, finished, vectors)
        return finished._replace(answers=VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _add(self, batch: EngineBatch, finished: Finished, vectors: dict[bytes, NDArray[np.float32]]) -> None:
        """Add the results of a forward, except those of jobs that were aborted."""
        for name, message in batch.failures.items():
            if name in self._digests:
                finished.failures[self._release(name)] = message
        answered = [name for name in batch.positions if name in self._digests]
        vectors.update({self._release(name): batch.positions[name] for name in answered})
        rows = [row for row, name in enumerate(batch.names) if name in self._digests]
        failed = 0
        if rows and batch.logits is not None:
            batch.wait()
            logits = batch.logits if len(rows) == len(batch.names) else batch.logits[rows]
            encoded = self._encoder.encode([self._release(batch.names[row]) for row in rows], logits)
            finished.failures.update(encoded.failures)
            failed = len(encoded.failures)
            if encoded.block is not None:
                finished.blocks.append(encoded.block)
        self._stats = BackendStats(
            steps=self._stats.steps + 1,
            rows=self._stats.rows + len(rows) - failed + len(answered),
            tokens=self._stats.tokens + batch.tokens,
            reused=self._stats.reused + batch.reused,
        )

    def _release(self, name: str) -> bytes:
        """Remove a finished request; returns its digest."""
        digest = self._digests.pop(name)
        del self._held[digest]
        return digest

    def load_adapter(self, name: str, source: str) -> str:
        """Load a LoRA adapter; returns its revision.

        Raises:
            SettingsError: there is no such adapter, it does not fit, or SGLang has no slots for adapters.
        """
        folder = checked_adapter(source, self._folder)
        revision = checkpoint_revision(folder)
        adapter = qualify(name, revision)
        if adapter in self.adapters:
            return revision
        if not self._settings.max_adapters:
            raise SettingsError(
                f"adapters: this worker has no slots to load {name!r} while it serves: start it with --max-adapters"
            )
        with TemporaryDirectory(prefix="lmpool-adapters-") as copies:
            self._loaded_adapters.load(adapter, write_plain_adapter(folder, Path(copies) / "plain"))
        self.adapters[adapter] = checkpoint_source(source)
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """Unload an adapter."""
        if self.adapters.pop(adapter, None) is not None:
            self._loaded_adapters.drop(adapter)

    def stats(self) -> BackendStats:
        """Counters since the start."""
        return self._stats

    def close(self) -> None:
        """End the engine and free its memory. The backend cannot be used afterwards."""
        self._digests.clear()
        self._held.clear()
        self._engine.close()
