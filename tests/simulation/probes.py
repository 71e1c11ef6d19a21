"""Probes in the package: they report events that no result shows, such as a job that was lost and sent again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmpool.broker import scripts
from lmpool.broker.registries import VersionRegistry
from lmpool.producer.client.requests import Stage
from lmpool.producer.client.session import Session
from lmpool.producer.client.submit import Submitter
from lmpool.protocol.job import decode_ids
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.membership.partitions import PartitionMover
from lmpool.workers.membership.versions import VersionKeeper
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import JobReader
from tests.simulation.loop import PROCESS
from tests.simulation.server import SimulatedClient
from tests.simulation.workers import MAX_DELIVERIES

if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle

_MESSAGE_S = 0.5  # Seconds in which the message about a stored row must arrive.
_ANSWER_TTL_S, _ROW_TTL_S = 60.0, 3600.0  # Lifetimes of results of queries, and of rows.


def install(oracle: Oracle) -> None:
    """Install all probes in this process."""
    _count_deliveries(oracle)
    _notice_lost_jobs(oracle)
    _notice_lost_messages(oracle)
    _notice_changes(oracle)
    _notice_last_deliveries(oracle)
    _notice_drains(oracle)
    _notice_turns(oracle)
    _notice_stolen_jobs(oracle)


def _count_deliveries(oracle: Oracle) -> None:
    """Count how often workers read the job of each prompt."""
    read = JobReader._add

    def add(self: JobReader, taken: Any, entry_id: bytes, job: Any, *args: Any, **options: Any) -> Any:
        if hasattr(job, "ids"):
            ids = tuple(decode_ids(job.ids).tolist())
            oracle.deliveries[ids] += 1
            oracle.entries[self.keys.base, entry_id] += 1
            oracle.most[ids] = max(oracle.most[ids], oracle.entries[self.keys.base, entry_id])
            if not job.query and not job.overwrite:
                oracle.plain[job.fingerprint, job.adapter, ids] += 1
        return read(self, taken, entry_id, job, *args, **options)

    JobReader._add = add  # type: ignore[method-assign]


def _notice_lost_jobs(oracle: Oracle) -> None:
    """A client submits a prompt again only if the server or a client's deadline has removed its job."""
    call, queues = Submitter._call_script, dict[Any, bytes]()  # Request -> the queue to which it was submitted last.
    ends = dict[Any, float]()  # Request -> when its job expires: a caller that joins it later does not prolong its job.

    async def call_script(self: Submitter, partition: Any, requests: Sequence[Any], homes: Any, again: str) -> bytes:
        jobs = partition.keys.jobs
        sent = {request for request in requests if request.stage is Stage.WAITING}
        waiting = {request for request in sent if queues.get(request) == jobs}
        if again.startswith("1") and len(self._connections.partitions.current) == 1:
            for request in sent - waiting:
                if request in queues:
                    ids = decode_ids(request.prompt.ids).tolist()
                    oracle.violation(f"the request for {ids} was sent to {jobs!r} only after a silence")
        kept = {request for request in waiting if oracle.world.loop.time() < ends[request]}
        queues.update(dict.fromkeys(requests, jobs))
        end = max(request.until for request in requests) + 2 * oracle.world.plan.lease_s
        ends.update(dict.fromkeys(requests, end))
        outcome = await call(self, partition, requests, homes, again)
        if again.startswith("1") and oracle.is_whole and len(self._connections.partitions.current) == 1:
            for request, code in zip(requests, outcome.decode(), strict=False):
                prompt = request.prompt
                is_plain = not (request.damaged or prompt.query or prompt.adapter)
                if code == "Q" and request in kept and is_plain:
                    oracle.on_lost_job(tuple(decode_ids(prompt.ids).tolist()))
        return outcome

    Submitter._call_script = call_script  # type: ignore[method-assign]


def _notice_lost_messages(oracle: Oracle) -> None:
    """A client gets a message when a row is stored; it must not find the row only with its periodic check."""
    check = Session._recheck

    async def recheck(self: Session) -> None:
        server = oracle.world.server
        if oracle.world.plan.is_gentle and server.process.is_alive and len(self.info.partitions) == 1:
            live, now = server.live(), self.loop.time()
            for request in self._requests:
                if request.stage is Stage.WAITING and now - request.since > 2 * _MESSAGE_S and not request.damaged:
                    item = live.get(self._connections.model.rows.keys_of([request.prompt.digest])[0])
                    ttl = _ANSWER_TTL_S if request.prompt.query else _ROW_TTL_S
                    # A worker may store the row with another answer, while the job of the row still waits.
                    waiting = self._connections.partitions.current[0].keys.waiting + request.prompt.digest
                    is_old = (
                        item is not None and item.expireat is not None and item.expireat - server.now < ttl - _MESSAGE_S
                    )
                    if waiting not in live and is_old:
                        oracle.violation(f"no message about the row of {decode_ids(request.prompt.ids).tolist()}")
        await check(self)

    Session._recheck = recheck  # type: ignore[method-assign]


def _notice_changes(oracle: Oracle) -> None:
    """Note which workers change the version of their weights, or their partition."""
    change_version = VersionKeeper.change

    async def change(self: VersionKeeper, opened: Any) -> Any:
        process = PROCESS.get()
        oracle.on_change(process, self.info.version)
        try:
            return await change_version(self, opened)
        finally:
            oracle.changing.pop(process, None)

    VersionKeeper.change = change  # type: ignore[method-assign]
    move_worker = PartitionMover.move

    async def move(self: PartitionMover, number: int) -> None:
        oracle.on_move(PROCESS.get())
        earlier, worker = self._heartbeat._model, self._heartbeat.worker_id
        await move_worker(self, number)
        oracle.after_move(PROCESS.get(), earlier, worker)

    PartitionMover.move = move  # type: ignore[method-assign]


def _notice_last_deliveries(oracle: Oracle) -> None:
    """Note the jobs that are delivered for the last time."""
    call = scripts.Script.__call__

    async def script(self: scripts.Script, redis: Any, keys: Any, args: Any) -> Any:
        reply = await call(self, redis, keys, args)
        if self is scripts.CLAIM_EXPIRED:
            oracle.last.update((PROCESS.get(), entry[0]) for entry in reply[1] if entry[2] == MAX_DELIVERIES - 1)
        return reply

    scripts.Script.__call__ = script  # type: ignore[method-assign]


def _notice_drains(oracle: Oracle) -> None:
    """Note the workers that drain: they must not be listed as workers that take jobs, and get no more jobs."""
    send, close_lane = Heartbeat.send, Consumer.close_lane

    async def send_and_note(self: Heartbeat, counters: Mapping[str, Any], **options: Any) -> Any:
        beat = await send(self, counters, **options)
        is_draining = counters.get("state") == "draining"
        oracle.on_heartbeat(PROCESS.get(), self._model.capacity, self.worker_id, is_draining=is_draining)
        return beat

    async def check_and_close(self: Consumer) -> None:
        oracle.before_closing(PROCESS.get(), self._keys.lane(self._worker_id))
        await close_lane(self)
        oracle.after_closing(PROCESS.get())

    Heartbeat.send = send_and_note  # type: ignore[method-assign]
    Consumer.close_lane = check_and_close  # type: ignore[method-assign]


def _notice_turns(oracle: Oracle) -> None:
    """Note how long each worker may change its version."""
    take, renew, end = VersionRegistry.take_turn, VersionRegistry.renew_turn, VersionRegistry.end_turn

    def note(lease_ms: int, began: float) -> None:
        oracle.on_turn(PROCESS.get(), began + lease_ms / 1000)

    async def take_and_note(self: VersionRegistry, worker_id: str, slots: int, lease_ms: int) -> int | None:
        began = oracle.world.loop.time()
        if (slot := await take(self, worker_id, slots, lease_ms)) is not None:
            note(lease_ms, began)
        return slot

    async def renew_and_note(self: VersionRegistry, slot: int, worker_id: str, lease_ms: int) -> bool:
        began = oracle.world.loop.time()
        if has_turn := await renew(self, slot, worker_id, lease_ms):
            note(lease_ms, began)
        return has_turn

    async def note_and_end(self: VersionRegistry, slot: int, worker_id: str) -> None:
        oracle.on_turn(PROCESS.get(), 0.0)
        await end(self, slot, worker_id)

    VersionRegistry.take_turn = take_and_note  # type: ignore[method-assign]
    VersionRegistry.renew_turn = renew_and_note  # type: ignore[method-assign]
    VersionRegistry.end_turn = note_and_end  # type: ignore[method-assign]


def _notice_stolen_jobs(oracle: Oracle) -> None:
    """Check each theft of jobs at the moment at which the server runs it."""
    evaluate, find_work = SimulatedClient.eval, scripts.FIND_WORK.source.encode()

    def evaluate_and_check(self: SimulatedClient, script: bytes, numkeys: int, *args: bytes) -> Any:
        reply = evaluate(self, script, numkeys, *args)
        if script == find_work and reply[1]:
            oracle.on_steal(args[0], args[1])
        return reply

    SimulatedClient.eval = evaluate_and_check  # type: ignore[method-assign]
