"""Submitting: looks up rows in the pool's cache, queues jobs for the others, and cancels jobs without waiters."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
from redis.exceptions import ResponseError

from lmpool.aio import delays
from lmpool.broker import scripts
from lmpool.errors import QueueFull
from lmpool.producer.client.connections import TROUBLE, Connections
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage, Tasks
from lmpool.producer.metrics import Traces
from lmpool.protocol.job import Job, Prompt, pack_jobs
from lmpool.protocol.keys import GROUP
from lmpool.rows.cache import Found

_SENDING = (Stage.SENDING, Stage.SENDING_AGAIN)
_SENT = (*_SENDING, Stage.WAITING)
_NO_ROW = np.empty(0, np.float32)
# Flush early when this many requests are unsent, even while rows are arriving.
_MAX_HELD_BACK = 64
# Up to this many requests, one script call costs about as much as one lookup of their rows in the cache.
_FEW = 8
# Min share of cache hits for which a lookup pays: for more than `_FEW` requests, and for fewer.
_MIN_HIT_RATE_OF_MANY, _MIN_HIT_RATE_OF_FEW = 0.02, 0.5
# Batches over which the hit rate is averaged.
_HIT_RATE_WINDOW = 8
# Min and max seconds for which the server assumes that a client waits. Clients confirm longer waits every lease.
_MIN_PATIENCE_S, _MAX_PATIENCE_S = 5.0, 3600.0
# Max bytes of weights per script call, so that workers can start on the first ones.
_MAX_WEIGHTS_BYTES = 4 * 1024 * 1024
# Max bytes of token ids per script call, which blocks the server for a few ms.
_MAX_IDS_BYTES = 512 * 1024

# Max prompts whose homes are remembered; about 100 bytes each.
_MAX_HOMES = 65_536
# Bytes of a block: 16 tokens of 4 bytes. Homes are remembered at block boundaries too.
_BLOCK_BYTES = 16 * 4
# Max blocks looked up per prompt.
_MAX_BLOCKS = 8
# Bytes at each end of a prompt that identify it: 64 tokens.
_END_BYTES = 64 * 4
# Bytes cut off a prompt to look up its prefixes, most likely first: most prompts extend another by one token.
_CUT_BYTES = (4, 0, 8, 12, 16)
_NO_HOME = b"", 0
# Tells `submit.lua` that a prompt has the same home and prefix as the prompt before it.
_SAME_HOME = b"="


class CacheClient:
    """Uses the pool's cache for the requests of one session."""

    def __init__(self, connections: Connections, requests: PendingRequests, tasks: Tasks) -> None:
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._disposable: list[bytes] = []

    async def fetch(self, digests: Sequence[bytes]) -> None:
        """Fetch the rows that are in the cache, and resolve their requests."""
        pending = map(self._requests.get, digests)
        requests = [request for request in pending if request is not None and not request.warm]
        if not requests:
            return
        rows = self._connections.model.rows

        def resolve(digests: Sequence[bytes], results: Sequence[Found]) -> None:
            # Ignore the rows of other weights if the model has changed since.
            if self._connections.model.rows is rows:
                self._requests.resolve_found(digests, results)

        wanted = [request.prompt.digest for request in requests]
        lengths = {request.prompt.digest: request.prompt.length for request in requests if request.prompt.length}
        self._requests.counters.fetched_bytes += await rows.get_many(wanted, resolve, lengths)
        self._connections.trouble = None

    async def find_here(self, requests: Sequence[PendingRequest]) -> set[PendingRequest]:
        """Resolve the requests whose rows are in shared memory; returns these requests."""
        segments, found = self._connections.segments, set[PendingRequest]()
        if segments.has_any:
            find = partial(segments.find, vocab_size=self._connections.model.info.vocab_size)
            wanted = {request.prompt.digest: request for request in requests}
            self._requests.is_looking_up = True
            try:
                async for digests in self._requests.resolve_by(list(wanted), find):
                    found.update(map(wanted.__getitem__, digests))
            finally:
                self._requests.is_looking_up = False
        return found

    async def fetch_stored(self, digests: Sequence[bytes]) -> None:
        """Fetch rows that the server has; requests that only warm the cache end at once."""
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and request.warm:
                self._requests.resolve(request, _NO_ROW)
        await self.fetch(digests)

    async def store_weights(self, requests: Sequence[PendingRequest]) -> bool:
        """Store the weights of pending trie requests; returns whether there were any."""
        weights = [request.weights for request in requests if request.weights is not None and request.waiters]
        if not weights:
            return False
        refused = await self._connections.model.rows.put_weights(weights)
        if refused:
            raise self._connections.explain(ResponseError(next(iter(refused.values()))))
        for request in requests:
            request.weights = None
        return True

    def discard(self, requests: Sequence[PendingRequest]) -> None:
        """Remove the private results and the weights of requests that have ended."""
        keys: list[bytes] = []
        for request in requests:
            if request.is_private:
                keys += self._connections.model.rows.keys_of([request.prompt.digest])
                request.is_private = False
            if request.weights_name:
                keys += self._connections.model.rows.keys_of_weights([request.weights_name])
                request.weights_name = b""
        if keys and not self._disposable:
            # One command for all keys of this event-loop tick.
            self._tasks.loop.call_soon(lambda: self._tasks.spawn(self.drop_discarded()))
        self._disposable += keys

    async def drop_discarded(self) -> None:
        """Send the removals that have been collected."""
        keys, self._disposable = self._disposable, []
        if keys:
            try:
                await self._connections.model.rows.drop(keys)
            except TROUBLE as error:
                self._connections.note(error)  # The keys expire.


class Homes:
    """Remembers the home of each prompt: the worker that computed it, and so may still have its keys and values.

    A prompt is identified by its length and by the tokens at both ends. Two prompts that agree in these share a home.
    That can cost time but never changes a row.

    Attributes:
        has_choice: whether several workers are live. Otherwise no homes are recorded.
        workers: the workers that have been seen.
    """

    def __init__(self) -> None:
        # OrderedDicts: finding the first key of a dict slows down with every key removed before it.
        self._homes: OrderedDict[int, bytes] = OrderedDict()
        self._lengths: set[int] = set()
        # Hashes of first blocks. Most prompts without a home are found out by their first block.
        self._heads: OrderedDict[int, None] = OrderedDict()
        self.has_choice = False
        self.workers: set[bytes] = set()

    def note(self, prompts: Sequence[Prompt], worker: bytes) -> None:
        """Record the worker that computed some prompts."""
        self.workers.add(worker)
        if self.has_choice:
            for prompt in prompts:
                self._note(prompt, worker)

    def _note(self, prompt: Prompt, worker: bytes) -> None:
        homes, ids = self._homes, prompt.ids
        size = len(ids)
        for end in {size, size // _BLOCK_BYTES * _BLOCK_BYTES} - {0}:
            key = _prefix_key(ids, end, prompt.adapter)
            homes[key] = worker
            homes.move_to_end(key)
            self._lengths.add(end)
        if size >= _BLOCK_BYTES:
            head = hash((ids[:_BLOCK_BYTES], prompt.adapter))
            self._heads[head] = None
            self._heads.move_to_end(head)
        if prompt.adapter:
            homes[key := hash(prompt.adapter)] = worker
            homes.move_to_end(key)
        for entries in (homes, self._heads):
            while len(entries) > _MAX_HOMES:
                entries.popitem(last=False)

    def find(self, prompt: Prompt) -> tuple[bytes, int]:
        """Return the worker that computed the longest recorded prefix of a prompt, and the key of that prefix."""
        ids, lengths, adapter = prompt.ids, self._lengths, prompt.adapter
        size = len(ids)
        # Without a known prefix, prefer the worker that used the adapter last: it probably still has it loaded.
        no_home = (self._homes.get(hash(adapter), b""), hash(adapter)) if adapter else _NO_HOME
        if size >= _BLOCK_BYTES + _CUT_BYTES[-1] and hash((ids[:_BLOCK_BYTES], adapter)) not in self._heads:
            return no_home
        last_block = (size - _CUT_BYTES[-1] - 1) // _BLOCK_BYTES * _BLOCK_BYTES
        blocks = range(last_block, max(0, last_block - _MAX_BLOCKS * _BLOCK_BYTES), -_BLOCK_BYTES)
        for end in (*(size - cut for cut in _CUT_BYTES), *blocks):
            if end in lengths and (home := self._homes.get(key := _prefix_key(ids, end, adapter))):
                return home, key
        return no_home

    def arrange(self, requests: Sequence[PendingRequest]) -> tuple[Sequence[PendingRequest], list[bytes]]:
        """Return requests in the order for `submit.lua`, and their homes; no homes if none is recorded.

        Requests with the same prefix are consecutive, and all but the first have the home "=". A worker with too many
        prompts passes them on together, so that another worker computes the prefix once. Frequent prefixes come first.
        """
        if not self._homes:
            return requests, []
        found = [self.find(request.prompt) for request in requests]
        if len(found) == 1:
            home, _ = found[0]
            return requests, [home] if home else []
        families = Counter(key for home, key in found if home)
        if not families:
            return requests, []
        pairs = zip(requests, found, strict=True)
        arranged = sorted(pairs, key=lambda pair: (pair[1][0], -families[pair[1][1]], pair[1][1]))
        homes, before = [], _NO_HOME
        for _, place in arranged:
            homes.append(_SAME_HOME if place == before and place[0] else place[0])
            before = place
        return [request for request, _ in arranged], homes

    def forget(self, workers: Collection[bytes]) -> None:
        """Remove workers that have left."""
        if workers:
            self.workers.difference_update(workers)
            self._homes = OrderedDict(home for home in self._homes.items() if home[1] not in workers)

    def clear(self) -> None:
        """Remove all homes, because the model has changed."""
        self._homes.clear()
        self._lengths.clear()
        self._heads.clear()
        self.workers.clear()


def _prefix_key(ids: bytes, end: int, adapter: str) -> int:
    if end <= _END_BYTES:
        return hash((ids[:end], adapter))
    return hash((ids[:_END_BYTES], ids[end - _END_BYTES : end], end, adapter))


class Submitter:
    """Sends and cancels the requests of one session.

    Args:
        connections: the session's connections.
        requests: the session's pending requests.
        cache: looks up their rows.
        tasks: runs background work.
        waits_when_full: whether requests wait while the queue is full; otherwise they fail.
        traces: adds the context of calls to their jobs.

    Attributes:
        homes: the workers that computed earlier prompts.
        is_full: whether the queue was full at the last submission.
        is_retrying: whether requests wait to be sent again.
    """

    def __init__(
        self,
        connections: Connections,
        requests: PendingRequests,
        cache: CacheClient,
        tasks: Tasks,
        *,
        waits_when_full: bool = True,
        traces: Traces | None = None,
    ) -> None:
        self.homes = Homes()
        self.is_full = self.is_retrying = False
        self._connections = connections
        self._requests = requests
        self._cache = cache
        self._tasks = tasks
        self._waits_when_full = waits_when_full
        self._traces = traces
        self._unsent: deque[PendingRequest] = deque()
        self._is_flushing = False
        self._cancelled: set[bytes] = set()
        self._is_cancelling = False
        self._hit_rate = _MIN_HIT_RATE_OF_FEW

    def add(self, request: PendingRequest) -> None:
        """Send a new request, together with all requests of this event-loop tick."""
        self._unsent.append(request)
        if not self._is_flushing:
            self._flush_soon()

    def cancel(self, request: PendingRequest) -> None:
        """Withdraw a request that has no waiters."""
        self._cache.discard([request])
        if len(self._unsent) > 2 * len(self._requests) + _FEW:
            # Most of the unsent requests have ended.
            self._unsent = deque(request for request in self._unsent if request.waiters)
        if request.stage in _SENT:
            self._cancelled.add(request.prompt.digest)
            if not self._is_cancelling:
                self._is_cancelling = True
                self._tasks.loop.call_soon(lambda: self._tasks.spawn(self._send_cancelled()))

    def retry_soon(self) -> None:
        """Send the unsent and refused requests again until the server accepts them."""
        if not self.is_retrying:
            self.is_retrying = True
            self._tasks.spawn(self._retry())

    async def submit(self, requests: Sequence[PendingRequest], *, again: bool = False) -> None:
        """Register this client for prompts, and queue a job for each prompt without one.

        Args:
            requests: the requests.
            again: whether they were submitted before, so that the script checks that their jobs still exist.
        """
        cache, rows = self._cache, self._connections.model.rows
        if whole := [request.prompt.digest for request in requests if request.whole and not again]:
            # The cache probably holds a reference, which is of no use.
            await rows.drop(rows.keys_of(whole))
        # Without access to rows, the script cannot check whether the row of a warming request is there.
        if not rows.is_seen:
            warmed = [request.prompt.digest for request in requests if request.warm and not request.damaged]
            await cache.fetch_stored(await rows.existing(warmed))
        stored = await self._submit_portions(requests, again)
        self._connections.trouble = None
        if stored:
            await cache.fetch_stored(stored)
            damaged = [request for request in requests if request.damaged and self._requests.is_open(request)]
            if damaged:
                await self.submit(damaged)
            pending = map(self._requests.get, stored)
            evicted = [request for request in pending if request is not None and not request.damaged]
            if evicted and not again:
                await self.submit(evicted, again=True)

    async def fetch_announced(self, digests: Sequence[bytes]) -> None:
        """Fetch rows that workers announced; submits requests again whose rows are evicted or damaged."""
        announced = [request for digest in digests if (request := self._requests.get(digest)) is not None]
        await self._cache.fetch_stored(digests)
        # A newer request for the same prompt looks up its row itself.
        lost = [request for request in announced if request.in_flight and self._requests.is_open(request)]
        if lost:
            await self.submit(lost, again=True)

    async def cancel_all(self) -> None:
        """Withdraw all requests and remove their weights, because the session ends."""
        self._cache.discard(list(self._requests))
        await self._cache.drop_discarded()
        waiting = [request.prompt.digest for request in self._requests if request.stage in _SENT]
        # The connection of submissions keeps the order: cancellations arrive after pending submissions.
        await self._cancel([*waiting, *self._cancelled])

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            # `call_soon` runs after all callbacks that are ready now, so their requests are sent together.
            self._tasks.loop.call_soon(lambda: self._tasks.spawn(self._flush()))

    async def _flush(self) -> None:
        """Send unsent requests, up to the per-client limit."""
        requests = self._requests
        # Callers that receive rows submit their next prompts, which should be sent together. Requests whose rows are
        # being looked up go before later ones.
        while requests.is_looking_up or (requests.is_resolving and len(self._unsent) < _MAX_HELD_BACK):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._is_flushing = False
        batch = requests.admit(self._unsent)
        requests.on_end = self._flush_soon if self._unsent else None
        if batch:
            await self._send(batch)

    async def _send(self, requests: Sequence[PendingRequest]) -> None:
        """Look up rows in the cache, and submit the other requests."""
        sending, again, refused = *_SENDING, Stage.REFUSED
        for request in requests:
            request.stage = again if request.stage is refused else sending
        # No lookup for warming requests, which need no row, and private ones, which no client can have made before.
        sought = [request for request in requests if not (request.damaged or request.warm or request.is_private)]
        if sought and (found := await self._cache.find_here(sought)):
            sought = [request for request in sought if request not in found]
            requests = [request for request in requests if request not in found]
        try:
            min_hit_rate = _MIN_HIT_RATE_OF_MANY if len(sought) > _FEW else _MIN_HIT_RATE_OF_FEW
            if sought and (self._hit_rate > min_hit_rate or not self._connections.model.rows.is_seen):
                await self._cache.fetch([request.prompt.digest for request in sought])
            await self.submit([request for request in requests if request.waiters])
            self._learn_hit_rate(sought)
        except TROUBLE as error:
            self._connections.note(error)
            for request in requests:
                if request.stage in _SENDING:
                    request.stage = refused if request.stage is again else Stage.UNSENT
            self.retry_soon()

    def _learn_hit_rate(self, requests: Sequence[PendingRequest]) -> None:
        # Cancelled and refused requests have no origin yet, or one from before.
        answered = (request for request in requests if request.stage is not Stage.REFUSED)
        origins = [request.origin for request in answered if request.origin is not None]
        if origins:
            self._hit_rate += (origins.count("cache_hits") / len(origins) - self._hit_rate) / _HIT_RATE_WINDOW

    async def _submit_portions(self, requests: Sequence[PendingRequest], again: bool) -> list[bytes]:
        """Submit requests in several script calls; returns the digests whose rows are in the cache."""
        stored, is_full = list[bytes](), False
        # Separate portions, because the script counts the tokens that continuations generate.
        continuations = [request for request in requests if request.prompt.generated]
        others = [request for request in requests if not request.prompt.generated] if continuations else requests
        for portion in (*_portions(others), *_portions(continuations)):
            waited_for = [request for request in portion if request.waiters]
            if is_full and self._waits_when_full:
                # The queue would refuse them now, and at every retry.
                for request in waited_for:
                    request.stage = Stage.REFUSED
            elif waited_for:
                if await self._cache.store_weights(waited_for):
                    waited_for = [request for request in waited_for if request.waiters]
                stored += await self._submit_portion(waited_for, again)
                is_full = self.is_full
        return stored

    async def _submit_portion(self, requests: Sequence[PendingRequest], again: bool) -> list[bytes]:
        """Submit requests in one script call; returns the digests whose rows are in the cache."""
        if not requests:
            return []
        is_damaged = any(request.damaged for request in requests)
        requests, homes = self.homes.arrange(requests)
        outcome = await self._call_script(requests, homes, is_damaged, again)
        self.is_full = b"F" in outcome
        if self.is_full and self._waits_when_full:
            self.retry_soon()
        stored, abandoned, lost = [], [], []
        now, waiting = self._tasks.loop.time(), Stage.WAITING
        for request, code in zip(requests, outcome.decode("ascii", "replace"), strict=True):
            digest = request.prompt.digest
            request.since, request.stage = now, waiting
            if is_damaged:
                request.overwrites += request.damaged
            if code == "Q":  # Queued.
                request.origin = "computed"
                if again and not request.damaged:  # The earlier job has ended, and its row is not there.
                    lost.append(request)
            elif code == "J" and request.origin != "computed":  # Joined a job.
                request.origin = "joined"
            elif code == "R":  # The row is in the cache.
                request.origin = request.origin or "cache_hits"
                if self._requests.get(digest) is not None:
                    stored.append(digest)
            elif code == "F":  # The queue is full.
                request.stage = Stage.REFUSED
                if not self._waits_when_full:
                    self._requests.resolve(request, QueueFull(self._connections.describe_full_queue()))
            if not request.waiters and code in "QJ" and self._requests.get(digest) is None:
                abandoned.append(digest)
        if abandoned:
            await self._cancel(abandoned)
        if lost := [request for request in lost if self._requests.is_open(request)]:
            for request in lost:
                request.lost += 1
            self._tasks.spawn(self._connections.check_memory(len(self._requests)))
        return stored

    async def _call_script(
        self, requests: Sequence[PendingRequest], homes: Sequence[bytes], is_damaged: bool, again: bool
    ) -> bytes:
        """Call `submit.lua`; returns a letter for each request."""
        connections, model = self._connections, self._connections.model
        is_unfit = is_damaged or any(request.whole for request in requests)
        lookup = "" if is_unfit else "rows" if model.rows.is_seen else "marks"
        keys, prefix = [model.keys.jobs, model.reply], model.keys.waiting
        keys += [prefix + request.prompt.digest for request in requests]
        if lookup == "rows":
            keys += model.rows.keys_of(request.prompt.digest for request in requests)
        fingerprint, host = model.fingerprint, model.host
        jobs: Sequence[bytes] = pack_jobs(
            Job(
                request.prompt.ids,
                request.prompt.adapter,
                fingerprint,
                request.damaged,
                request.prompt.query,
                # Without a host, the worker stores the row itself rather than a reference.
                b"" if request.whole or request.lost else host,
            )
            for request in requests
        )
        if self._traces is not None:
            jobs = self._traces.mark(requests, jobs)
        args: list[bytes | str | int] = [model.info.queue_limit, self._patience_ms(requests), lookup, int(again)]
        args += [len(requests), *jobs]
        generated = [request.prompt.generated for request in requests if request.prompt.generated]
        args += [*(homes or [b""] * len(requests)), *generated] if generated else homes
        outcome = await scripts.SUBMIT.on(connections.commands.call, keys, args)
        if not isinstance(outcome, bytes) or len(outcome) != len(requests):
            raise connections.commands.distrust(outcome)
        return outcome

    def _patience_ms(self, requests: Sequence[PendingRequest]) -> int:
        """Return how long the server keeps this client registered: until the last deadline, and some leases more."""
        patience_s = max([request.until for request in requests]) - self._tasks.loop.time()
        patience_s += max(2 * self._connections.model.info.lease_s, _MIN_PATIENCE_S)
        return int(1000 * min(max(patience_s, _MIN_PATIENCE_S), _MAX_PATIENCE_S))

    async def _retry(self) -> None:
        waits = delays()
        try:
            while pending := self._not_accepted():
                await asyncio.sleep(next(waits))
                await self._send(self._not_accepted())
                if len(self._not_accepted()) < len(pending):
                    waits = delays()  # The queue moves, so keep it full.
        finally:
            self.is_retrying = False

    def _not_accepted(self) -> list[PendingRequest]:
        stages = (Stage.UNSENT, Stage.REFUSED)
        return [request for request in self._requests if request.in_flight and request.stage in stages]

    async def _send_cancelled(self) -> None:
        self._is_cancelling = False
        digests = set(self._cancelled)
        try:
            await self._cancel([digest for digest in digests if self._requests.get(digest) is None])
            # Only after the reply: if the session ends before, `cancel_all` cancels them.
            self._cancelled -= digests
        except TROUBLE as error:
            self._connections.note(error)  # The registrations expire.

    async def _cancel(self, digests: Sequence[bytes]) -> None:
        model = self._connections.model
        for at in range(0, len(digests), scripts.MAX_AT_ONCE):
            portion = digests[at : at + scripts.MAX_AT_ONCE]
            keys = [model.keys.jobs, model.reply, *(model.keys.waiting + digest for digest in portion)]
            await scripts.CANCEL.on(self._connections.commands.call, keys, [GROUP])


def _portions(requests: Sequence[PendingRequest]) -> Iterator[Sequence[PendingRequest]]:
    """Split requests into portions that one script call handles within a few ms."""
    begin = weights_bytes = ids_bytes = 0
    for at, request in enumerate(requests):
        more_weights = 0 if request.weights is None else request.weights.values.nbytes
        more_ids = len(request.prompt.ids)
        is_much = weights_bytes + more_weights > _MAX_WEIGHTS_BYTES or ids_bytes + more_ids > _MAX_IDS_BYTES
        if at > begin and (is_much or at - begin == scripts.MAX_AT_ONCE):
            yield requests[begin:at]
            begin, weights_bytes, ids_bytes = at, 0, 0
        weights_bytes, ids_bytes = weights_bytes + more_weights, ids_bytes + more_ids
    if begin < len(requests):
        yield requests[begin:]
