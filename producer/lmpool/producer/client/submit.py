"""Look up cached rows; send other prompts as jobs, each with its home: the worker that computed a prefix of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from redis.exceptions import ResponseError

from lmpool.aio import delays
from lmpool.broker import scripts
from lmpool.errors import QueueFull
from lmpool.producer.client.discovery import TROUBLE, Connections
from lmpool.producer.client.partitions import Partition, Placed
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage
from lmpool.producer.metrics import Traces
from lmpool.protocol.job import Job, Prompt, pack_jobs
from lmpool.protocol.keys import GROUP
from lmpool.rows.cache import Found

_NO_ROW = np.empty(0, np.float32)
_MAX_HELD_BACK = 64  # Send requests without delay when this many requests are unsent, even while rows are arriving.
_FEW = 8  # Max requests whose submission costs about as much as looking up their rows in the cache.
# Min share of cache hits at which a lookup pays off, for more than `_FEW` requests and for at most `_FEW` requests.
_MIN_HIT_RATE_OF_MANY, _MIN_HIT_RATE_OF_FEW = 0.02, 0.5
_HIT_RATE_WINDOW = 8  # Number of batches over which the hit rate is averaged.
# Min and max seconds for which the server keeps a waiting client registered. Clients register again once per lease.
_MIN_PATIENCE_S, _MAX_PATIENCE_S = 5.0, 3600.0
# Max bytes of token ids per script call, so that a call blocks the server only for a few ms.
_MAX_IDS_BYTES = 512 * 1024
# Bytes of weights that count as a byte of token ids: a call has 4 MiB, and workers begin while the next call is sent.
_WEIGHTS_PER_ID_BYTE = 8

# Max prompts whose homes (the workers that computed the prompts) are recorded; about 100 bytes each.
_MAX_HOMES = 65_536
# Bytes of a block: 16 tokens of 4 bytes. The home of a prompt is recorded for its whole blocks too.
_BLOCK_BYTES = 16 * 4
_MAX_BLOCKS = 8  # Max block boundaries at which a prefix of a prompt is looked up.
_END_BYTES = 64 * 4  # Bytes at each end of a prompt that identify the prompt: 64 tokens.
# Bytes cut off a prompt to look up its prefixes, the most likely first: most prompts extend a prompt by one token.
_CUT_BYTES = (4, 0, 8, 12, 16)
_NO_HOME = b"", 0
_SAME_HOME = b"="  # Value for `submit.lua`: the prompt has the home and the prefix of the previous prompt.


class Homes:
    """Records the home of each prompt: the worker that computed the prompt, and may still have its keys and values.

    A prompt is identified by its length and the tokens at both ends, so two prompts may share a home by mistake. A
    wrong home can cost time but never changes a row.

    Attributes:
        has_choice: whether several workers are live. With one worker, no homes are recorded.
        workers: the workers that have computed rows for this client -> the partition of each (`Keys.model`).
    """

    def __init__(self, *, has_choice: bool = False) -> None:
        # Use OrderedDict: in a dict, each removed key in front of the first key slows down finding the first key.
        self._homes: OrderedDict[int, bytes] = OrderedDict()
        self._lengths: set[int] = set()
        # Hashes of the first blocks of prompts with homes, to recognize most prompts without a home by one lookup.
        self._heads: OrderedDict[int, None] = OrderedDict()
        self.has_choice = has_choice
        self.workers: dict[bytes, int] = {}

    def note(self, prompts: Sequence[Prompt], worker: bytes, partition: int = 0) -> None:
        """Record the worker that computed some prompts, and the partition of the queue that it serves."""
        self.workers[worker] = partition
        for prompt in prompts if self.has_choice else ():
            ids, size, adapter = prompt.ids, len(prompt.ids), prompt.adapter
            ends = {size, size // _BLOCK_BYTES * _BLOCK_BYTES} - {0}
            self._lengths |= ends
            for key in [_prefix_key(ids, end, adapter) for end in ends] + [hash(adapter)] * bool(adapter):
                self._homes[key] = worker
                self._homes.move_to_end(key)
            if size >= _BLOCK_BYTES:
                head = hash((ids[:_BLOCK_BYTES], adapter))
                self._heads[head] = None
                self._heads.move_to_end(head)
        for entries in (self._homes, self._heads):
            while len(entries) > _MAX_HOMES:
                entries.popitem(last=False)

    def find(self, prompt: Prompt) -> tuple[bytes, int]:
        """Return the worker that computed a prompt's longest recorded prefix, and the key of the prefix."""
        ids, lengths, adapter = prompt.ids, self._lengths, prompt.adapter
        size = len(ids)
        # Without a recorded prefix, prefer the worker that used the adapter last: the adapter is probably still loaded.
        no_home = (self._homes.get(hash(adapter), b""), hash(adapter)) if adapter else _NO_HOME
        if size >= _BLOCK_BYTES + _CUT_BYTES[-1] and hash((ids[:_BLOCK_BYTES], adapter)) not in self._heads:
            return no_home
        last_block = (size - _CUT_BYTES[-1] - 1) // _BLOCK_BYTES * _BLOCK_BYTES
        blocks = range(last_block, max(0, last_block - _MAX_BLOCKS * _BLOCK_BYTES), -_BLOCK_BYTES)
        for end in (*(size - cut for cut in _CUT_BYTES), *blocks):
            if end in lengths and (home := self._homes.get(key := _prefix_key(ids, end, adapter))):
                return home, key
        return no_home

    def find_partition(self, prompt: Prompt) -> tuple[int | None, int]:
        """Return the partition of a prompt's home, None without a home, and the key of the prefix."""
        home, key = self.find(prompt)
        return self.workers.get(home), key

    def arrange(self, requests: Sequence[PendingRequest]) -> tuple[Sequence[PendingRequest], list[bytes]]:
        """Return requests in the order for `submit.lua`, and the homes of their prompts; [] if no home is recorded.

        Requests with the same prefix are consecutive; all but the first of these have the home "=". If a worker has too
        many prompts, requests with one prefix move to another worker together. Frequent prefixes come first.
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
        placed = zip(requests, found, strict=True)
        arranged = sorted(placed, key=lambda pair: (pair[1][0], -families[pair[1][1]], pair[1][1]))
        pairs = pairwise([_NO_HOME, *(place for _, place in arranged)])
        homes = [_SAME_HOME if place == before and place[0] else place[0] for before, place in pairs]
        return [request for request, _ in arranged], homes

    def sample(self, most: int) -> dict[int, list[bytes]]:
        """Return up to `most` workers, drawn at random, by their partitions."""
        drawn: dict[int, list[bytes]] = defaultdict(list)
        for worker in random.sample(list(self.workers), min(len(self.workers), most)):
            drawn[self.workers[worker]].append(worker)
        return drawn

    def forget(self, workers: Collection[bytes]) -> None:
        """Discard the records of workers that have left the pool."""
        if workers:
            for worker in workers:
                self.workers.pop(worker, None)
            self._homes = OrderedDict(home for home in self._homes.items() if home[1] not in workers)


def _prefix_key(ids: bytes, end: int, adapter: str) -> int:
    if end <= _END_BYTES:
        return hash((ids[:end], adapter))
    return hash((ids[:_END_BYTES], ids[end - _END_BYTES : end], end, adapter))


class Submitter:
    """Sends and cancels the requests of one session, and fetches their rows from the pool's cache.

    Attributes:
        homes: the workers that computed earlier prompts.
        is_full: whether the queue was full at the last submission.
        is_retrying: whether a task is sending unsent and refused requests again.
    """

    def __init__(
        self, connections: Connections, requests: PendingRequests, *, waits: bool = True, traces: Traces | None = None
    ) -> None:
        self.homes = Homes()
        self.is_full = self.is_retrying = False
        self._connections = connections
        self._requests = requests
        self._waits = waits  # Whether requests wait while the queue is full.
        self._traces = traces
        self._unsent: deque[PendingRequest] = deque()
        self._is_flushing = self._is_cancelling = False
        self._cancelled: dict[bytes, int] = {}  # Digest of a cancelled prompt -> its partition.
        self._disposable: list[bytes] = []
        self._hit_rate = _MIN_HIT_RATE_OF_FEW

    def add(self, request: PendingRequest) -> None:
        """Send a new request, together with all requests of this event-loop tick."""
        self._unsent.append(request)
        if not self._is_flushing:
            self._flush_soon()

    def retry_soon(self) -> None:
        """Send the unsent and refused requests again until the server accepts them."""
        if not self.is_retrying:
            self.is_retrying = True
            self._connections.spawn(self._retry())

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            # The task runs after all callbacks that are ready now, so that all their requests are sent together.
            self._connections.spawn(self._flush())

    async def _flush(self) -> None:
        """Send unsent requests, up to the per-client limit."""
        requests = self._requests
        # Wait while callers that receive rows submit their next prompts, to send the prompts together. Also wait for
        # lookups, because a request whose row is being looked up must be sent before later requests.
        reading = requests.reading
        while "unsent" in reading or ("announced" in reading and len(self._unsent) < _MAX_HELD_BACK):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._is_flushing = False
        batch = requests.admit(self._unsent)
        requests.on_end = self._flush_soon if self._unsent else None
        if batch:
            await self._send(batch)

    async def _retry(self) -> None:
        def pending() -> list[PendingRequest]:
            return [request for request in self._requests if request.in_flight and request.stage is Stage.UNSENT]

        waits = delays()
        try:
            while before := len(pending()):
                await asyncio.sleep(next(waits))
                await self._send(pending())
                if len(pending()) < before:
                    waits = delays()  # The queue has free slots again, so retry without a long delay.
        finally:
            self.is_retrying = False

    async def _send(self, requests: Sequence[PendingRequest]) -> None:
        """Look up rows in shared memory and in the cache, and submit the requests whose rows were not found."""
        sending = Stage.SENDING
        for request in requests:
            request.stage = sending
        # Do not look up warming requests, which need no row, or private requests, which no client can have made before.
        sought = [request for request in requests if not (request.damaged or request.warm or request.is_private)]
        segments, model = self._connections.segments, self._connections.model
        if sought and segments.has_any:
            find = partial(segments.find, vocab_size=model.info.vocab_size)
            # Redis may lack rows that shared memory has, so do not end requests that need stored rows.
            readable = [request.prompt.digest for request in sought if not request.stored]
            await self._requests.resolve_by(readable, find, "unsent")
            sought = [request for request in sought if request.waiters]
        try:
            min_hit_rate = _MIN_HIT_RATE_OF_MANY if len(sought) > _FEW else _MIN_HIT_RATE_OF_FEW
            if sought and (self._hit_rate > min_hit_rate or not model.rows.is_seen):
                await self.fetch([request.prompt.digest for request in sought])
            await self.submit([request for request in requests if request.waiters])
            # Skip cancelled and refused requests, which have no origin or the origin of an earlier submission.
            origins = [request.origin for request in sought if request.origin and not request.is_refused]
            if origins:
                self._hit_rate += (origins.count("cache_hits") / len(origins) - self._hit_rate) / _HIT_RATE_WINDOW
        except TROUBLE as error:
            self._connections.note(error)
            for request in requests:
                if request.stage is sending:
                    request.stage = Stage.UNSENT
            self.retry_soon()

    async def submit(self, requests: Sequence[PendingRequest], *, again: bool = False) -> None:
        """Register this client for prompts, and queue a job for each prompt without a job.

        With `again`, the requests were submitted earlier, and `submit.lua` checks that their jobs still exist.
        """
        rows = self._connections.model.rows
        if unfit := [item.prompt.digest for item in requests if item.damaged or (item.whole and not again)]:
            # Drop damaged values, which could be read again, and references to memory that the reader cannot read.
            await rows.drop(rows.keys_of(unfit))
        # If `submit.lua` cannot read rows, check here whether the rows of warming requests are cached.
        if not rows.is_seen:
            warmed = [request.prompt.digest for request in requests if request.warm and not request.damaged]
            await self.fetch(await rows.existing(warmed), are_stored=True)
        is_single = len(self._connections.partitions.current) == 1
        placed = await self._connections.partitions.place(requests, self.homes.find_partition)
        if is_single:
            stored = await self._submit_to(placed[0], again)
        else:
            parts = (self._try_to_submit(part, again) for part in placed)
            stored = [digest for part in await asyncio.gather(*parts) for digest in part]
        if stored:
            # If `submit.lua` cannot read rows, it only knows that the rows were stored within the last 10 s.
            await self.fetch(stored, are_stored=rows.is_seen)
            if damaged := [request for request in requests if request.damaged and self._requests.is_open(request)]:
                await self.submit(damaged)
            pending = map(self._requests.get, stored)
            evicted = [request for request in pending if request is not None and not request.damaged]
            if evicted and not again:
                await self.submit(evicted, again=True)

    async def _try_to_submit(self, placed: Placed, again: bool) -> list[bytes]:
        """Submit requests to one of several partitions; if that fails, send the rest of them again soon."""
        for request in placed.requests:
            request.stage = Stage.SENDING
        try:
            return await self._submit_to(placed, again)
        except TROUBLE as error:
            self._connections.note(error)
            for request in placed.requests:
                if request.stage is Stage.SENDING:
                    request.stage = Stage.UNSENT
            self.retry_soon()
            return []

    async def _submit_to(self, placed: Placed, again: bool) -> list[bytes]:
        """Submit requests to one partition; returns the digests whose rows are in the cache."""
        partition, requests, must_check = placed
        rows, stored, is_full = self._connections.model.rows, list[bytes](), False
        self._connections.partitions.read(partition)
        for request in requests:
            request.partition = partition.number
        for portion in _portions(requests):
            waited_for = [request for request in portion if request.waiters]
            if is_full and self._waits:
                # Do not send the remaining requests now, because the full queue would refuse them.
                for request in waited_for:
                    request.stage, request.is_refused = Stage.UNSENT, True
                continue
            if weights := [request.weights for request in waited_for if request.weights is not None]:
                if refused := await rows.put_weights(weights):
                    raise self._connections.server.explain(ResponseError(next(iter(refused.values()))))
                for request in waited_for:
                    request.weights = None
                waited_for = [request for request in waited_for if request.waiters]
            if waited_for:
                stored += await self._submit_portion(partition, waited_for, again, must_check)
                is_full = self.is_full
        self._connections.trouble = None
        return stored

    async def _submit_portion(
        self, partition: Partition, requests: Sequence[PendingRequest], again: bool, must_check: bool
    ) -> list[bytes]:
        """Submit requests in one script call; returns the digests whose rows are in the cache."""
        requests, homes = self.homes.arrange(requests)
        check = f" {partition.number}" if must_check else ""
        rows = self._connections.model.rows
        outcome = await self._call_script(partition, requests, homes, f"{int(again)}{check}")
        if self._connections.model.rows is not rows:
            return []  # The model has changed during the call, and `restart` has marked the requests as unsent.
        if not outcome:  # Other clients may wait for some of the prompts in another partition.
            placed = await self._connections.partitions.meet(dict.fromkeys(requests, partition))
            parts = [await self._try_to_submit(part, again) for part in placed]
            return [digest for part in parts for digest in part]
        partition.count(outcome.count(b"Q"))
        self.is_full = b"F" in outcome
        if self.is_full and self._waits:
            self.retry_soon()
        stored, abandoned = list[bytes](), list[bytes]()
        now, waiting, pending = self._connections.loop.time(), Stage.WAITING, self._requests.get
        for request, code in zip(requests, outcome.decode("ascii", "replace"), strict=True):
            request.since, request.stage, request.is_refused = now, waiting, False
            request.overwrites += request.damaged
            if code == "Q":  # Queued.
                request.origin = "computed"
                if again and not request.damaged:
                    request.lost += 1  # The earlier job ended, and the cache lost its row.
            elif code == "J" and request.origin != "computed":  # The request joined an earlier job.
                request.origin = "joined"
            elif code == "R":  # The row is in the cache.
                request.origin = request.origin or "cache_hits"
                if pending(request.prompt.digest) is not None:
                    stored.append(request.prompt.digest)
            elif code == "F":  # The queue is full.
                request.stage, request.is_refused = Stage.UNSENT, True
                if not self._waits:
                    self._requests.resolve(request, QueueFull(self._connections.describe_full_queue()))
            is_cancelled = not request.waiters and not request.ended_early
            if is_cancelled and code in "QJ" and pending(request.prompt.digest) is None:
                abandoned.append(request.prompt.digest)
        if abandoned:
            await self._cancel(partition, abandoned)
        return stored

    async def _call_script(
        self, partition: Partition, requests: Sequence[PendingRequest], homes: Sequence[bytes], again: str
    ) -> bytes:
        """Call `submit.lua`; returns the outcome, one character (Q, J, R or F) for each request, or nothing.

        `again`: "0" or "1" as for `submit`; then a space and the partition if `submit.lua` must check the records.
        """
        connections, model = self._connections, self._connections.model
        is_unfit = True in [request.damaged or request.whole for request in requests]
        lookup = "" if is_unfit else "rows" if model.rows.is_seen else "marks"
        digests, prefix = [request.prompt.digest for request in requests], partition.keys.waiting
        keys = [partition.keys.jobs, partition.reply, *[prefix + digest for digest in digests]]
        if lookup == "rows":
            keys += model.rows.keys_of(digests)
        unpacked, direct = list[Job](), connections.direct
        for request in requests:
            ids, adapter, query = request.prompt.ids, request.prompt.adapter, request.prompt.query
            # Without a token, the worker stores the row itself in Redis, not a reference to its shared memory.
            is_missed = direct is not None and direct.is_on and direct.take_missed(request.prompt.digest)
            host = b"" if request.whole or request.lost or is_missed else model.reads
            socket = connections.datagrams.name if request.may_end_early else b""
            unpacked.append(Job(ids, adapter, model.fingerprint, request.damaged, query, host, socket))
        jobs: Sequence[bytes] = pack_jobs(unpacked)
        if self._traces is not None:
            jobs = self._traces.mark(requests, jobs)
        # The server keeps this client registered until the last deadline, and for two leases more.
        patience_s = max([request.until for request in requests]) - connections.loop.time()
        patience_s += max(2 * model.info.lease_s, _MIN_PATIENCE_S)
        patience_ms = int(1000 * min(max(patience_s, _MIN_PATIENCE_S), _MAX_PATIENCE_S))
        args: list[bytes | str | int] = [model.info.queue_limit, patience_ms, lookup, again, len(jobs), *jobs]
        is_continued = requests[0].prompt.generated > 0  # All requests of a portion are continuations, or none is.
        args += homes or [b""] * len(requests) * is_continued
        args += [request.prompt.generated for request in requests if is_continued]
        try:
            outcome = await scripts.SUBMIT.on(partition.commands.call, keys, args)
            lengths = (len(requests), 0) if len(again) > 1 else (len(requests),)
            if not isinstance(outcome, bytes) or len(outcome) not in lengths:
                raise partition.commands.distrust(outcome)
        except TROUBLE:
            connections.partitions.refuse(partition)
            raise
        return outcome

    async def fetch(self, digests: Sequence[bytes], *, are_stored: bool = False) -> None:
        """Fetch the rows that are in the cache, and resolve their requests.

        Requests that only warm the cache end if their rows `are_stored` in the cache; otherwise they stay pending.
        """
        rows, lengths, wanted = self._connections.model.rows, dict[bytes, int](), list[bytes]()
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and not request.warm:
                wanted.append(digest)
                if request.prompt.length:
                    lengths[digest] = request.prompt.length
            elif request is not None and are_stored:
                self._requests.resolve(request, _NO_ROW)
        if not wanted:
            return

        def resolve(digests: Sequence[bytes], results: Sequence[Found]) -> None:
            # Ignore the rows if the model changed during the fetch: other weights computed these rows.
            if self._connections.model.rows is rows:
                self._requests.resolve_found(digests, results)

        self._requests.counters.fetched_bytes += await rows.get_many(wanted, resolve, lengths)
        self._connections.trouble = None

    async def fetch_announced(self, requests: Sequence[PendingRequest]) -> None:
        """Fetch rows that workers announced; submits requests again whose rows are evicted or damaged."""
        # Skip requests that have ended. A newer request for the same prompt looks up its row itself.
        announced = list(filter(self._requests.is_open, requests))
        await self.fetch([request.prompt.digest for request in announced], are_stored=True)
        if lost := [request for request in announced if request.in_flight and self._requests.is_open(request)]:
            await self.submit(lost, again=True)

    def cancel(self, request: PendingRequest) -> None:
        """Withdraw a request that has no waiters."""
        self.discard([request])
        if len(self._unsent) > 2 * len(self._requests) + _FEW:
            # Remove ended requests when most of the unsent requests have ended.
            self._unsent = deque(request for request in self._unsent if request.waiters)
        if request.stage is not Stage.UNSENT:
            self._cancelled[request.prompt.digest] = request.partition or 0
            if not self._is_cancelling:
                self._is_cancelling = True
                self._connections.loop.call_soon(lambda: self._connections.spawn(self._send_cancelled()))

    async def _send_cancelled(self) -> None:
        self._is_cancelling = False
        for partition, digests in self._by_partition(self._cancelled).items():
            with self._connections.noting():  # If a command fails, this client's registrations for the prompts expire.
                for at in range(0, len(digests), scripts.MAX_AT_ONCE):
                    portion = digests[at : at + scripts.MAX_AT_ONCE]
                    # Check now: prompts of this portion may have been requested again during the earlier calls.
                    await self._cancel(partition, [digest for digest in portion if self._requests.get(digest) is None])
                    # Remove digests only after the reply: if the session ends earlier, `cancel_all` needs the digests.
                    for digest in portion:
                        self._cancelled.pop(digest, None)

    async def cancel_all(self) -> None:
        """Withdraw all requests, and remove their weights and the reply streams, because the session ends.

        If a master does not answer, the keys of this client on this master expire.
        """
        self.discard(list(self._requests))
        sent = [request for request in self._requests if request.stage is not Stage.UNSENT]
        # Cancellations use the connection of submissions, so the server receives cancellations after submissions.
        waiting = {request.prompt.digest: request.partition or 0 for request in sent} | self._cancelled
        parts = self._by_partition(waiting)

        async def leave(partition: Partition) -> None:
            await self._cancel(partition, parts.get(partition, []))
            await self._connections.redis.unlink(partition.reply)

        leaving = map(leave, self._connections.partitions.used)
        await asyncio.gather(self._drop_discarded(), *leaving, return_exceptions=True)

    def _by_partition(self, digests: Mapping[bytes, int]) -> dict[Partition, list[bytes]]:
        parts: dict[Partition, list[bytes]] = defaultdict(list)
        for digest, number in digests.items():
            parts[self._connections.partitions[number]].append(digest)
        return parts

    async def _cancel(self, partition: Partition, digests: Sequence[bytes]) -> None:
        for at in range(0, len(digests), scripts.MAX_AT_ONCE):
            portion = digests[at : at + scripts.MAX_AT_ONCE]
            keys = [partition.keys.jobs, partition.reply, *(partition.keys.waiting + digest for digest in portion)]
            await scripts.CANCEL.on(partition.commands.call, keys, [GROUP])

    def discard(self, requests: Sequence[PendingRequest]) -> None:
        """Remove the private results and the weights of requests that have ended."""
        rows, keys = self._connections.model.rows, list[bytes]()
        for request in requests:
            if request.is_private:
                keys += rows.keys_of([request.prompt.digest])
                request.is_private = False
            if request.weights_name:
                keys.append(rows.weights_prefix + request.weights_name)
                request.weights_name = b""
        if keys and not self._disposable:
            # Delete all keys that were discarded in this event-loop tick with one command.
            self._connections.loop.call_soon(lambda: self._connections.spawn(self._drop_discarded()))
        self._disposable += keys

    async def _drop_discarded(self) -> None:
        keys, self._disposable = self._disposable, []
        if keys:
            with self._connections.noting():  # If the command fails, the keys expire later.
                await self._connections.model.rows.drop(keys)


def _portions(requests: Sequence[PendingRequest]) -> Iterator[Sequence[PendingRequest]]:
    """Split requests into portions that one script call handles within a few ms; continuations have own portions."""
    continued = [request for request in requests if request.prompt.generated]
    if continued and len(continued) < len(requests):
        yield from _portions([request for request in requests if not request.prompt.generated])
        requests = continued
    begin = size = 0
    for at, request in enumerate(requests):
        more = len(request.prompt.ids)
        if request.weights is not None:
            more += request.weights.values.nbytes // _WEIGHTS_PER_ID_BYTE
        if at > begin and (size + more > _MAX_IDS_BYTES or at - begin == scripts.MAX_AT_ONCE):
            yield requests[begin:at]
            begin, size = at, 0
        size += more
    if begin < len(requests):
        yield requests[begin:]
