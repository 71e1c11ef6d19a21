"""Dispatch: what becomes of the prompts that a worker holds: supplied, computed, published, and let go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from lmpool.errors import WorkerError
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import TrieQuery
from lmpool.protocol.row import RowBlock
from lmpool.workers.backend.contract import BackendJob, Finished
from lmpool.workers.backend.engine_thread import EngineThread
from lmpool.workers.membership.adapters import AdapterKeeper
from lmpool.workers.metrics.counters import SENT_AGAIN
from lmpool.workers.queries import QueryAnswerer
from lmpool.workers.queue.consumer import STALE_S, Held, Holdings, Taken
from lmpool.workers.queue.publisher import Ending, Publisher
from lmpool.workers.trie.inputs import TrieInputs

_log = logging.getLogger("lmpool.worker")

_SELDOM_S = 30.0


class Dispatcher:
    """Takes jobs from the queue to the backend, and what comes of them to the clients.

    Args:
        held: what the worker holds.
        engine_thread: the backend.
        publisher: stores rows and ends jobs.
        trie_inputs: brings what trie jobs need.
        asked: answers what is asked of rows.
        info: what the worker serves.
        adapters: which adapters it has.

    Attributes:
        failures: jobs that ended without a row or an answer, not counting those that clients send again.
    """

    def __init__(
        self,
        held: Holdings,
        engine_thread: EngineThread,
        publisher: Publisher,
        trie_inputs: TrieInputs,
        asked: QueryAnswerer,
        info: ModelInfo,
        adapters: AdapterKeeper,
    ) -> None:
        self._held = held
        self._engine_thread = engine_thread
        self._publisher = publisher
        self._trie_inputs = trie_inputs
        self._asked = asked
        self._info = info
        self._adapters = adapters
        self._to_supply: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.failures = 0

    async def accept(self, taken: list[Taken]) -> None:
        """Hold jobs and hand them on; end those that cannot be served. A prompt is computed once at a time."""
        fresh, endings = [], []
        for one in taken:
            if one.job is None:
                endings.append(Ending(one.entry, one.digest, one.failure, one.is_dead))
            elif self._held.add(one, one.job):
                fresh.append(one.job.digest)
        later = set()
        if self._info.is_trie:
            later.update(fresh)
        elif any(one.query is not None for one in taken):
            later.update(digest for digest in fresh if self._held[digest].is_only_asked)
        self._submit([digest for digest in fresh if digest not in later])
        if later:
            # Not here: what they need may have to be fetched, and the next jobs are not to wait for that.
            self._to_supply.put_nowait(list(later))
        if endings:
            await self._end(endings)

    async def supply(self, on_change: Callable[[], None]) -> None:
        """Fetch what jobs need before the backend can have them, or answer them without it; never returns.

        Args:
            on_change: called when there is room again.
        """
        while True:
            digests = await self._to_supply.get()
            if self._info.is_trie:
                digests = await self._fill(digests)
            else:
                # Who wants the row itself may have joined since: then it is computed, and all are served from it.
                asked = [one for one in digests if one in self._held and self._held[one].is_only_asked]
                answered = await self._asked.answer_cached(self._held.entries(asked), self._held)
                self.release(answered)
                digests = [digest for digest in digests if digest not in answered]
            self._submit(digests)
            on_change()

    async def _fill(self, digests: list[bytes]) -> list[bytes]:
        """Fetch what trie jobs need; returns those that have it. The others end, and begin anew if asked for again."""
        wants = [(digest, wanted) for digest, ours in self._held.entries(digests).items() for wanted in ours.values()]
        asks = {digest: wanted.query for digest, wanted in wants if isinstance(wanted.query, TrieQuery)}
        inputs, failures = await self._publisher.insist(lambda: self._trie_inputs.fill(asks))
        for digest, found in inputs.items():
            if digest in self._held:  # The backend may have broken meanwhile.
                job = self._held[digest].job
                self._held[digest].job = BackendJob(digest, job.ids, job.adapter, payload=found)
        await self._fail(failures)
        return list(inputs)

    def _submit(self, digests: Iterable[bytes]) -> None:
        """Hand jobs to the backend, those that are still held."""
        jobs = [self._held[digest].job for digest in digests if digest in self._held]
        if served := self._adapters.served_among(jobs):
            self._engine_thread.submit(served)

    async def publish(self, finished: Finished, worker_id: str) -> None:
        """Publish what a step brought."""
        stale = [digest for digest in finished.stale if digest in self._held]
        for block in finished.blocks:
            await self._publish_rows(block)
        if finished.answers is not None:
            entries = self._held.entries(finished.answers.digests)
            overwrite = {name for name, wants in entries.items() if any(one.overwrite for one in wants.values())}
            await self._publisher.publish(finished.answers, entries, overwrite)
            self.release(entries)
        failures = {digest: self._adapters.failure_of(self._held[digest].job.adapter) for digest in stale}
        for digest, text in finished.failures.items():
            failures[digest] = Failure(WorkerError.__name__, f"{text} (worker {worker_id})")
        if failures:
            await self._fail(failures)

    async def _publish_rows(self, block: RowBlock) -> None:
        """Store rows; answer from them what is asked of them."""
        entries = self._held.entries(block.digests)
        plain: dict[bytes, dict[bytes, Taken]] = {}
        asked: dict[bytes, dict[bytes, Taken]] = {}
        overwrite = {digest for digest in entries if self._held[digest].is_damaged}
        for digest, wants in entries.items():
            for entry, wanted in wants.items():
                if wanted.query is not None:
                    asked.setdefault(digest, {})[entry] = wanted
                elif wanted.overwrite:
                    overwrite.add(digest)
            ours = asked.get(digest)
            plain[digest] = wants if ours is None else {entry: wants[entry] for entry in wants.keys() - ours.keys()}
        await self._publisher.publish(block, plain, overwrite)
        if asked:
            await self._asked.answer(asked, block)
        self.release(entries)

    async def _fail(self, failures: Mapping[bytes, Failure]) -> None:
        if failures:
            entries = self._held.entries(failures)
            wants = [(digest, entry, wanted) for digest, ours in entries.items() for entry, wanted in ours.items()]
            await self._end([Ending(entry, wanted.digest, failures[digest]) for digest, entry, wanted in wants])
            self.release(entries)

    async def _end(self, endings: list[Ending]) -> None:
        # What a client sends again at once is no failure.
        self.failures += sum(one.failure is not None and one.failure.kind not in SENT_AGAIN for one in endings)
        await self._publisher.end(endings)

    async def let_go(self) -> int:
        """Let go of prompts that nobody waits for any more, so that the backend does not begin them.

        Those that have just come are not looked at, so a worker whose prompts are answered soon looks at none; others
        ever more rarely, for backends do not tell what they have begun, and in long steps the looks would add up.

        Returns:
            how many prompts that were.
        """
        now = time.monotonic()
        due = [
            digest for digest in self._engine_thread.owed if digest in self._held and _is_due(self._held[digest], now)
        ]
        if not due:
            return 0
        for digest in due:
            self._held[digest].looked_at = now
        asks = self._held.entries(due)
        wanted = await self._publisher.wanted(asks)
        gone = []
        for digest, ours in asks.items():
            removed = ours.keys() - wanted.get(digest, {}).keys()
            # One that has been answered meanwhile is about to be published, as it is.
            if removed and digest in self._engine_thread.owed and self._held.forget(digest, removed):
                gone.append(digest)
        if gone:
            self._engine_thread.abort(gone)
            _log.info("%d prompts that nobody waits for any more are not computed", len(gone))
        return len(gone)

    def release(self, ended: Mapping[bytes, Iterable[bytes]]) -> None:
        """Let go of the entries that were ended; a prompt that was asked for again meanwhile is computed again."""
        again = self._held.release(ended)
        if again and self._info.is_trie:
            # What they need may never have been fetched: their first try may have ended for that very reason.
            self._to_supply.put_nowait([job.digest for job in again])
        elif again:
            self._engine_thread.submit(again)


def _is_due(held: Held, now: float) -> bool:
    """Whether it is time for a look: a prompt is looked at when its age has doubled since the last one."""
    last = held.looked_at or held.since
    return now - last >= min(max(last - held.since, STALE_S), _SELDOM_S)
