"""Checks everything that must hold during a simulation, and at its end."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import _MAX_DELAY_S
from lmpool.broker.connection import reply_timeout
from lmpool.errors import (
    AdapterChanged,
    AdapterRefused,
    DeadlineExceeded,
    LMPoolError,
    ProducerClosed,
    ServerError,
    ServerUnreachable,
    UnknownAdapter,
    WorkerError,
)
from lmpool.protocol.job import decode_ids
from lmpool.protocol.keys import ModelKeys
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.lora import content_digest
from lmpool.workers.execution.in_flight import InFlightPrompt
from tests.simulation.clients import SHARED_FIRST, Check, Request, SimulatedClient, seed_of
from tests.simulation.jobs import has_unread_jobs, is_held, waiting_in, wrong_counters, wrong_jobs
from tests.simulation.loop import Process
from tests.simulation.plan import FATAL_WEIGHTS, WORK_S
from tests.simulation.workers import MAX_DELIVERIES, STEP_TIMEOUT_LEASES, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

_LATE_S = 2.0  # Seconds by which a request may end after its deadline.
_RECOVERY_S = 20.0  # Seconds in which a pool recovers after the last fault, besides its leases and its work.
_GENERATED_FIRST = 4  # First token of prompts that are continued: their steps have no deliveries of their own.
_OF_WORKERS = 0  # First token of prompts that workers compute to test their weights.
_STREAM_BATCHES = 5  # Batches of each worker that are in the streams or in its backend, ahead of the backlog.
_GENERATED = 4  # Steps of a continuation.
_LONG_LEASE_S = 4.0  # Min lease in which a worker drains, loads a version and joins the pool.
_RENEWAL_LEASES = 5  # Leases within which another worker renews the keys of a worker that was killed.
_LIMITED_LATER = (b"}:versions", b"}:versions:state", b"}:moved")  # Keys whose lifetime a second command sets.
_NOTICED_S = 6.0  # Seconds in which clients notice the workers of a partition, and older jobs end.
_TRAVEL_S = 0.005  # Seconds in which a request reaches the queue while workers compute other prompts.
# Factor for several workers: while one computes its lane, others may compute more than their mean number of prompts.
_LAG = 1.3
_BULK = 20  # Prompts of bulk clients that a worker may take before the request's prompts.
_MAX_TRIES = 3  # Workers that a version may end before it is refused.
_MAX_VIOLATIONS = 20  # Violations that a result lists; the log has all.
_WIRE = Path(__file__).resolve().parents[2] / "docs/design/wire.md"


def _endless() -> re.Pattern[bytes]:
    """The keys that may have no lifetime: those without a star in the list of the page."""
    listed = re.findall(r"^  (lmpool:.*?)  ", _WIRE.read_text("utf-8"), re.MULTILINE)
    patterns = [re.sub("<[^>]*>", ".*", re.escape(name.replace("{<model>}", "MODEL"))) for name in listed]
    return re.compile("|".join(patterns).replace("MODEL", r"\{[^}]*\}").encode(), re.DOTALL)


_ENDLESS = _endless()


@dataclass
class AdapterChange:
    """A change of the adapter in service.

    Attributes:
        revision: of the new adapter.
        ended: virtual time at which its call returned; None before.
    """

    revision: str
    ended: float | None = None


class Oracle:
    """See the module's docstring.

    Attributes:
        violations: what did not hold.
        newest: the newest version of the weights whose publication has begun.
        served: the newest version whose publication has returned.
        deliveries: token ids of a prompt -> how often workers have read its jobs.
        entries: queue and entry of a job -> how often workers have read this job.
        most: token ids of a prompt -> how often workers have read one of its jobs, at most.
        steps: token ids of a prompt -> in how many steps it was.
        plain: fingerprint, adapter and token ids of jobs for rows -> how often a worker has read such a job.
        last: process of a worker and entry of a job that the worker got for the last delivery.
        changing: processes of workers that change the version of their weights.
        draining: process of a worker that drains -> key of the list of workers that take jobs, and the worker's id.
        closed: processes of such workers that have closed their lanes.
    """

    def __init__(self, world: World) -> None:
        self.world, self.violations = world, list[str]()
        self.newest = self.served = 0
        self.deliveries: Counter[tuple[int, ...]] = Counter()
        self.entries: Counter[tuple[bytes, bytes]] = Counter()
        self.most: Counter[tuple[int, ...]] = Counter()
        self.steps: Counter[tuple[int, ...]] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.plain: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._senders: dict[tuple[int, ...], SimulatedClient] = {}  # The first client that sent each prompt.
        self._steps_of: Counter[SimulatedClient | None] = Counter()
        self.last = set[tuple[Process, bytes]]()
        self.changing: dict[Process, None] = {}
        self.draining: dict[Process, tuple[bytes, bytes]] = {}
        self.closed = set[Process]()
        self._joined = math.inf  # When the last worker began to serve.
        self._endless: dict[bytes, float] = {}  # Keys without a lifetime, and when a check saw them first.
        self._loose = set[tuple[int, ...]]()  # Prompts of requests that ended without a result.
        self._pending: dict[Request, None] = {}
        self._changes: list[AdapterChange] = []
        self._failed = set[tuple[int, ...]]()  # Prompts of failed steps.
        self._fatal_loads = 0
        is_silent = any(fault.kind == "half open" for fault in world.plan.faults)
        self._repeats_s = _MAX_DELAY_S + is_silent * reply_timeout(world.plan.lease_s)
        self._used = 0, math.inf  # The version that clients use, and since when workers serve it.
        self._turns: dict[Process, float] = {}  # Process of a worker -> time until which it has the turn to change.

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits."""
        return bool(self._pending)

    @property
    def is_whole(self) -> bool:
        """Whether the server has kept all keys and its clock, and was never full."""
        world = self.world
        return not world.lost_keys and world.full_at == -math.inf and world.server.process.clock_s == 0

    def violation(self, text: str) -> None:
        """Report something that must not happen."""
        self.world.log(f"VIOLATION: {text}")
        if len(self.violations) < _MAX_VIOLATIONS:
            self.violations.append(f"{self.world.loop.time():.3f} s: {text}")

    # Requests

    def begin(self, request: Request) -> None:
        """A client sends a request."""
        for prompt in request.prompts:
            self._senders.setdefault(prompt, request.client)
        request.began, request.steps = self.world.loop.time(), self._steps_of_others(request.client)
        own = [other for other in self._pending if other.client is request.client]
        request.ahead = sum(len(other.prompts) for other in own) + len(request.prompts)
        request.oldest, request.had_model = max(request.oldest, request.client.version), request.client.has_model
        self._pending[request] = None

    def end(self, request: Request, checks: Sequence[Check]) -> None:
        """A request has got a result."""
        self._finish(request, "result")
        self._check_fairness(request)
        revisions = self._revisions(request) if "adapter" in request.options else [""]
        versions = range(request.oldest, self.newest + 1)
        rows = [partial(self._row, version, revision) for version in versions for revision in revisions]
        for at, check in enumerate(checks):
            if not any(map(check, rows)):
                self.violation(f"part {at} of the result is wrong: {request}, versions {versions}")

    def _check_fairness(self, request: Request) -> None:
        """In a calm pool a client's prompt waits for as many prompts of each other client as the client itself has."""
        plan = self.world.plan
        # Prompts that a bulk client sent first are computed later, if a worker held them when other clients joined.
        senders = [request.client, *(self._senders[prompt] for prompt in request.prompts)]
        yields = request.kind == "generate" or any(sender.is_bulk for sender in senders)
        if yields or not plan.is_even or plan.partitions > 1:  # Each partition has its own shares.
            return
        # Prompts that wait for the first worker, or until their client has found the model, are sent together later.
        # Prompts that a full queue refused are sent again in any order.
        if not request.had_model or request.began < self.world.served_at or plan.queue_limit < plan.requests:
            return
        share = len(plan.clients) * request.ahead * (_GENERATED if "generate" in plan.weights else 1)
        slots = plan.workers * plan.batch
        bound = share + _STREAM_BATCHES * slots + _BULK + slots * _TRAVEL_S / mean(plan.step_s)
        # Up to 128 prompts get into the streams while no worker serves. They are computed first.
        bound += self.world.streamed
        # Other workers may first compute later prompts, of this client and of others.
        bound *= _LAG if plan.workers > 1 else 1
        if (count := self._steps_of_others(request.client) - request.steps) > bound:
            self.violation(f"{request} waited for {count} prompts, more than {bound:.0f}")

    def _steps_of_others(self, client: SimulatedClient) -> int:
        """Number of prompts in all steps so far that another client has sent first."""
        return self._steps_of.total() - self._steps_of[client]

    def _row(self, version: int, revision: str, ids: Sequence[int]) -> NDArray[np.float32]:
        size = self.world.plan.vocab_size
        return synthetic_row(ids, vocab_size=size, seed=seed_of(version), adapter_revision=revision)

    def end_failed(self, request: Request, error: LMPoolError) -> None:
        """A request has ended with an exception."""
        self._finish(request, type(error).__name__)
        if not self._is_expected(request, error):
            self.violation(f"{request} ended with {type(error).__name__}: {error}")

    def end_cancelled(self, request: Request) -> None:
        """The caller of a request was cancelled."""
        self._finish(request, "cancelled")

    def _finish(self, request: Request, how: str) -> None:
        self.outcomes[how] += 1
        if how != "result":
            self._loose.update(request.prompts)
        self._pending.pop(request, None)
        self.world.log(f"{how} of {request}")

    def drop(self, client: SimulatedClient) -> None:
        """A client was killed."""
        for request in [request for request in self._pending if request.client is client]:
            self._loose.update(request.prompts)
            del self._pending[request]

    def after_end(self, client: SimulatedClient, waits: Mapping[bytes, bytes]) -> None:
        """A client waits no more for some prompts; see `SimulatedClient._waits` for the keys."""
        plan, live = self.world.plan, self.world.server.live()
        for key, reply in waits.items() if plan.is_gentle else ():
            if key in live and reply in waiting_in(live[key].value):
                self.violation(f"{client.process.name} does not want {key!r}, and is registered there")

    def _must_end(self, request: Request) -> bool:
        """Whether a request must get a result: it waits if the server has lost the version that its client uses."""
        world = self.world
        if not (world.lost_keys and self.newest and request.is_long):
            return request.is_long
        used, since = self._used
        needed = max(request.oldest, request.client.version)
        return world.used_version == used >= needed and world.loop.time() > since + self._bound_s

    @property
    def _bound_s(self) -> float:
        """Seconds in which a pool recovers and ends all requests that may end."""
        leases = STEP_TIMEOUT_LEASES + 3
        return leases * self.world.plan.lease_s + _RECOVERY_S + WORK_S + self.world.set_back_s

    def _check_used(self) -> None:
        """Note since when workers have served the version that clients use."""
        used, world = self.world.used_version, self.world
        is_served = any(worker.info is not None and worker.info.version == used for worker in world.workers)
        if not is_served or not world.server.process.is_alive:
            self._used = used, math.inf
        elif self._used[0] != used or self._used[1] == math.inf:
            self._used = used, world.loop.time()

    def _is_expected(self, request: Request, error: LMPoolError) -> bool:
        now, world, plan = self.world.loop.time(), self.world, self.world.plan
        match error:
            case DeadlineExceeded() | ServerUnreachable():
                is_due = now >= request.began + request.timeout - 0.02
                return is_due and not self._must_end(request)
            case WorkerError():
                given_up = plan.can_end_steps and any(self.most[ids] >= MAX_DELIVERIES for ids in request.prompts)
                is_deadly = any(prompt in world.deadly for prompt in request.prompts)
                return given_up or is_deadly or self._has_failed(request)
            case ServerError():
                # The last error of the server is the reason until the client has tried again, or noticed the silence.
                full_at = now if world.server.process.resume_at > now and world.full_at > -math.inf else world.full_at
                is_full = "memory" in str(error) and full_at >= min(request.began, now - self._repeats_s)
                return is_full or (self._may_lose_adapters and "has lost a change of the adapter" in str(error))
            case ProducerClosed():
                return request.client.is_closing
            case AdapterRefused():  # No worker loads it again for ten minutes.
                return bool(plan.can_end_steps or world.deadly) and "terminated while it loaded" in str(error)
            case UnknownAdapter():
                return self._may_lose_adapters
            case AdapterChanged():
                changed = (change.ended is None or change.ended >= request.began for change in self._changes)
                return self._may_lose_adapters or any(changed)
        return False

    @property
    def _may_lose_adapters(self) -> bool:
        """Whether the server may have lost the adapters: they also end with the last worker that drains."""
        return bool(self.world.lost_keys) or any(fault.kind == "drain worker" for fault in self.world.plan.faults)

    def check_failed_text(self, text: list[int], error: str, began: float) -> None:
        """A text of a run over a file has no result; the last process of the run began at `began`."""
        is_full = self.world.full_at >= began and "memory" in error
        if self.most[tuple(text)] < MAX_DELIVERIES and not is_full and tuple(text) not in self._failed:
            self.violation(f"the text {text} has the error {error!r}")

    # Adapters and versions

    def adapter_begins(self, source: Path) -> AdapterChange:
        """An adapter is about to be put in service."""
        change = AdapterChange(content_digest(source))
        self._changes.append(change)
        return change

    def _revisions(self, request: Request) -> list[str]:
        """The adapters whose rows a request may get."""
        changes, world = self._changes, self.world
        if world.lost_keys:
            return [change.revision for change in changes]
        replaced = [
            at for at, change in enumerate(changes) if change.ended is not None and change.ended < request.began
        ]
        return [change.revision for change in changes[max(replaced, default=0) :]]

    def end_of_change(self, error: LMPoolError) -> None:
        """An adapter or version could not be put in service."""
        if self.world.plan.is_gentle and not self.world.deadly:
            self.violation(f"a change ended with {type(error).__name__}: {error}")

    # Steps

    def on_step(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """A worker begins a step."""
        self.steps.update(prompts)
        self._steps_of.update(self._senders.get(prompt) for prompt in prompts)
        # A shared prompt is rarely queued for a second, so the check once per second would miss most duplicate jobs.
        is_shared = any(prompt[0] == SHARED_FIRST for prompt in prompts)
        if self.world.plan.partitions > 1 and is_shared and self.world.loop.time() > self._agreed_at():
            self._check_jobs()

    def _check_steps(self) -> None:
        """No prompt was computed more often than its job was delivered."""
        for prompt, count in self.steps.items():
            if count > self.deliveries[prompt] and prompt[0] not in (_GENERATED_FIRST, _OF_WORKERS):
                self.violation(f"{list(prompt)} was in {count} steps after {self.deliveries[prompt]} deliveries")

    def on_last_deliveries(self, process: Process, entries: Sequence[Collection[bytes]]) -> None:
        """A worker begins a step; `entries` are those of each prompt. A job on its last delivery must be alone."""
        if len(entries) > 1 and any((process, entry) in self.last for of_prompt in entries for entry in of_prompt):
            self.violation("a prompt that may have ended two workers is computed together with others")

    def on_failed_step(self, worker: SimulatedWorker, prompts: Sequence[InFlightPrompt]) -> None:
        """The prompts of a step fail; those that other workers have taken over since must not end."""
        server, keys = self.world.server, worker.keys
        live = server.live() if server.process.is_alive else None
        for prompt in prompts:
            # A server that is restarted with old keys may say again that the worker holds the job.
            if (
                live is None
                or keys is None
                or self.world.lost_keys
                or any(is_held(live, keys, job, worker.name) for job in prompt.entries)
            ):
                ids = decode_ids(prompt.ids).tolist()
                self._failed.add(tuple(ids[: len(ids) - len(prompt.drawn.tokens)] if prompt.drawn is not None else ids))

    def _has_failed(self, request: Request) -> bool:
        """Whether the step of a prompt of a request has failed: a score needs the prompt with further tokens."""
        failed = self._failed
        if request.kind == "score":
            failed = {ids[: len(prompt)] for ids in failed for prompt in request.prompts}
        return any(prompt in failed for prompt in request.prompts)

    def on_lost_job(self, prompt: tuple[int, ...]) -> None:
        """The job of a prompt has disappeared although a client waits for it."""
        if self.most[prompt] < MAX_DELIVERIES and prompt not in self.world.deadly and prompt not in self._failed:
            self.violation(f"the job of {list(prompt)} was lost")

    def on_steal(self, jobs: bytes, worker: bytes) -> None:
        """A worker has taken jobs from the lane of another one: only workers that take new jobs may do so."""
        capacities = self.world.server.live().get(jobs.removesuffix(b"jobs") + b"capacity")
        if capacities is None or worker not in capacities.value:
            self.violation(f"{worker!r} steals jobs, and is not listed as a worker that takes jobs")

    def on_fatal_load(self) -> None:
        """A version ends a worker that loads it; after some tries the version is refused."""
        self._fatal_loads += 1
        bad = list(self.world.plan.bad_versions.values())
        if self.is_whole and self._fatal_loads > _MAX_TRIES * bad.count(FATAL_WEIGHTS):
            self.violation(f"workers have loaded fatal weights {self._fatal_loads} times")

    def on_turn(self, process: Process, until: float) -> None:
        """A worker has the only turn to change its version until some time; 0.0: it releases the turn."""
        now = self.world.loop.time()
        others = [other.name for other, end in self._turns.items() if other is not process and end > now]
        # A stopped process may read the reply only after its turn has expired.
        if until > now and others and self.is_whole:
            self.violation(f"{process.name} and {others} have the turn to change their versions")
        self._turns[process] = until

    def on_change(self, process: Process, version: int) -> None:
        """A worker begins to change the version of its weights."""
        self._check_order(process, version)
        others = [other.name for other in self.changing if other.is_alive]
        if others and self.world.plan.is_gentle and not self.world.deadly:
            self.violation(f"{process.name} and {others} change their versions at once")
        self.changing[process] = None
        for worker in self.world.workers:
            worker.ready = None if worker.process is process else worker.ready
        self.draining.pop(process, None)  # It has drained, and may take jobs again.
        self.closed.discard(process)

    def _check_order(self, process: Process, version: int) -> None:
        """The only worker of the version that clients use changes after the workers of older versions.

        It waits for them for one lease, which is short in some pools.
        """
        world = self.world
        others = [worker.info.version for worker in world.workers if worker.info and worker.process is not process]
        is_short = world.plan.lease_s < _LONG_LEASE_S
        if is_short or not world.plan.is_silent or world.deadly or version != world.used_version or not others:
            return
        if max(others) < version:
            self.violation(f"{process.name} leaves version {version}, which clients use, and others serve {others}")

    def on_heartbeat(self, process: Process, capacities: bytes, worker: str, *, is_draining: bool) -> None:
        """A worker has sent a heartbeat."""
        if is_draining:
            self.draining[process] = capacities, worker.encode()
            self._check_draining()

    def before_closing(self, process: Process, lane: bytes) -> None:
        """A worker closes its lane: first when it begins to drain, and again at its end."""
        found = self.world.server.live().get(lane)
        if process in self.closed and self.is_whole and found is not None and has_unread_jobs(found.value):
            self.violation(f"{process.name} drains, and got new jobs")

    def after_closing(self, process: Process) -> None:
        """A worker has closed its lane."""
        if process in self.draining:
            self.closed.add(process)

    def _check_draining(self) -> None:
        """Workers that drain are not listed as workers that take jobs."""
        if self.is_whole and self.world.server.process.is_alive:
            live = self.world.server.live()
            for process, (capacities, worker) in self.draining.items():
                if capacities in live and worker in live[capacities].value:
                    self.violation(f"{process.name} drains, and is listed as a worker that takes jobs")

    def after_move(self, process: Process, earlier: ModelKeys, worker: str) -> None:
        """A worker has moved to another partition; `earlier` are the keys of its earlier one."""
        if self.is_whole and self.world.plan.is_connected and (lists := self._lists_with(earlier, worker)):
            self.violation(f"{process.name} has moved, and is still in {lists}")

    def _lists_with(self, keys: ModelKeys, worker: str) -> list[bytes]:
        """The lists of workers of a partition that contain a worker."""
        live = self.world.server.live()
        return [key for key in (keys.workers, keys.capacity) if key in live and worker.encode() in live[key].value]

    def on_move(self, process: Process) -> None:
        """A worker begins to move to another partition."""
        for worker in self.world.workers:
            if worker.process is process and worker.worker is not None and worker.worker._in_flight:
                self.violation(f"{process.name} moves to another partition while it holds prompts")

    # Each second

    def check(self) -> None:
        """Check what must hold at any time."""
        self._check_used()
        self._check_requests()
        self._check_steps()
        if self.world.server.process.is_alive:
            self._check_keys()
            for text in wrong_counters(self.world.server.live(), has_lost_keys=bool(self.world.lost_keys)):
                self.violation(text)
            self._check_draining()
            self._check_served()
            self._check_jobs()

    def _check_jobs(self) -> None:
        """Each prompt has one job."""
        server = self.world.server
        if self.is_whole and server.process.is_alive:
            agreed_s = self.world.loop.time() - self._agreed_at()
            for text in wrong_jobs(server.live(), server.now * 1000, (server.now - agreed_s) * 1000):
                self.violation(text)

    def _agreed_at(self) -> float:
        """When clients could use all partitions: none is full, and they have noticed that each one has workers."""
        plan, now = self.world.plan, self.world.loop.time()
        if self._joined == math.inf and all(worker.name for worker in self.world.workers):
            self._joined = now
        is_usable = plan.is_silent and plan.is_even and plan.queue_limit > 3 * plan.requests
        return self._joined + _NOTICED_S if is_usable else math.inf

    def _check_requests(self) -> None:
        now = self.world.loop.time()
        healed = None if self.world.healed_at is None else max(self.world.healed_at, self.world.disturbed_at)
        for request in list(self._pending):
            stopped = max(0.0, request.client.process.resume_at)
            if now > max(request.began + request.timeout, stopped) + _LATE_S:
                self.violation(
                    f"{request} has not ended {now - request.began - request.timeout:.1f} s after its deadline"
                )
                del self._pending[request]
            elif healed is not None and now > max(healed, request.began) + self._bound_s and self._must_end(request):
                self.violation(f"{request} still waits {now - healed:.1f} s after the last fault")
                del self._pending[request]

    def _check_keys(self) -> None:
        """Every key without a lifetime is on the list of `docs/design/wire.md`."""
        live = self.world.server.live()
        endless = {key for key, item in live.items() if item.expireat is None and not _ENDLESS.fullmatch(key)}
        # Some keys get their lifetime with a second command. If a fault prevents this command, other workers send one.
        now, plan = self.world.loop.time(), self.world.plan
        renewal_s = 0 if plan.is_gentle else _RENEWAL_LEASES * plan.lease_s
        self._endless = {key: self._endless.get(key, now) for key in endless}
        for key, since in self._endless.items():
            if since < now - (renewal_s if key.endswith(_LIMITED_LATER) else 0):
                self.violation(f"{key!r} has no lifetime")

    def _check_served(self) -> None:
        """No worker serves bad weights, and the infos of all live workers are on the server."""
        world = self.world
        models = world.server.live().get(b"lmpool:models")
        for worker in world.workers:
            if worker.info is None or worker.ready is not worker.serving or worker.process in self.draining:
                continue
            if worker.info.version in world.plan.bad_versions:
                self.violation(f"{worker.process.name} serves the bad version {worker.info.version}")
            is_calm = self.is_whole and world.plan.is_gentle and not world.deadly
            if is_calm and (models is None or worker.info.name.encode() not in models.value):
                self.violation(f"{worker.process.name} serves {worker.info.name!r}, which has no info")

    # The end

    def check_end(self) -> None:
        """After a quiet time nothing waits, and only keys are left that may stay."""
        self._check_steps()
        self._check_deliveries()
        self._check_versions()
        self._check_members()
        for key, item in self.world.server.live().items():
            is_served, size = self._is_served(key), _queued(key, item.value)
            # If the server has lost the job of a client that has ended, the keys of the prompt stay until they expire.
            is_lost = bool(self.world.lost_keys) and item.expireat is not None
            if is_served and (size or b":partition:" in key or (b":waiting:" in key and not is_lost)):
                self.violation(f"{key!r} is left, with {size} entries")
            elif size and item.expireat is None and not self.world.lost_keys:
                self.violation(f"{key!r} of a version that no worker serves has no lifetime")
        for worker in self.world.workers:
            if worker.info is not None and worker.worker is not None:
                engine = worker.serving.engine_thread if worker.serving is not None else None
                held = len(worker.worker._in_flight), len(worker.worker.counters.queued_ms), engine and engine.owed
                if any(held):
                    self.violation(f"{worker.process.name} holds {held} prompts, queueing times and rows at the end")

    def _check_members(self) -> None:
        """No worker is listed that has ended, and no connection of a client that has ended is open."""
        names = {worker.name.encode() for worker in self.world.workers if worker.process.is_alive}
        # The members of a partition that no worker serves stay until the key expires.
        served = {keys.base for worker in self.world.workers if (keys := worker.keys) is not None}
        for key, item in self.world.server.live().items():
            base, _, name = key.rpartition(b":")
            is_list = base in served and name in (b"workers", b"lanes", b"capacity")
            if is_list and (ended := set(item.value) - names - {b""}):
                self.violation(f"{key!r} lists {ended}, although they have ended")
        for worker in self.world.workers:
            lists = self._lists_with(worker.keys, worker.name) if worker.keys is not None and worker.name else None
            if lists is not None and len(lists) < 2:
                self.violation(f"{worker.process.name} serves, and is only in the lists {lists}")
        for pipe in self.world.network.pipes:
            if pipe.process in {client.process for client in self.world.clients}:
                self.violation(f"a connection of {pipe.process.name} is still open")

    def _is_served(self, key: bytes) -> bool:
        """Whether a live worker serves the version of the model that a key belongs to."""
        names = [worker.info.name.encode() for worker in self.world.workers if worker.info is not None]
        return any(b"{%b}" % name in key or b"{%b{" % name in key for name in names)

    def _check_deliveries(self) -> None:
        """A job is delivered again only after a fault, so no prompt is computed twice without need."""
        plan = self.world.plan
        most = 1 + plan.can_end_steps + MAX_DELIVERIES * plan.deadly
        for (_, _, prompt), count in self.plain.items() if self.is_whole and plan.partitions == 1 else ():
            if count > most and prompt not in self._loose and prompt not in self.world.deadly:
                self.violation(f"{list(prompt)} was delivered {count} times")

    def _check_versions(self) -> None:
        """All workers serve the version that clients use, which is the newest that a worker has served."""
        world = self.world
        if not self.newest:
            return
        served = {worker.process.name: worker.info.version for worker in world.workers if worker.info is not None}
        used = world.used_version
        # If the server has lost the file of the version while no worker ran, clients wait until it is published again.
        has_lost_file = bool(world.lost_keys) and any("missing or damaged in the pool" in line for line in world.lines)
        # A version that the server has lost cannot be restored once a later one is published: numbers only grow.
        registered = world.registered_versions
        is_lost = world.lost_keys and used not in registered and any(version > used for version in registered)
        if any(version != used for version in served.values()) and not has_lost_file and not is_lost:
            self.violation(f"clients use version {used}, and workers serve {served}")
        elif not world.lost_keys and used < self.served:
            self.violation(f"clients use version {used}, although version {self.served} was served")


def _queued(key: bytes, value: object) -> int:
    if key.endswith(b"}:jobs") or b"}:lane:" in key:  # Lanes also have entries that only wake their worker.
        return sum(b"m" in fields for fields in value._values_dict.values())  # type: ignore[attr-defined]
    if key.endswith((b"}:backlog", b"}:backlog:jobs")):
        return len(value)  # type: ignore[arg-type]
    return 0
