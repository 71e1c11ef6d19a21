"""A state machine for Hypothesis: producers, workers and operators act on a queue, and the server loses keys.

Tests do not wait for leases: they set deadlines into the past, and XCLAIM sets how long an entry has been idle.
"""

from __future__ import annotations

import collections
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.protocol.keys import GROUP, HOME_FIELD, JOB_FIELD, LIFETIME_FIELD, SINCE_FIELD, WAKE_FIELD
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    FAILURE,
    JOBS,
    MODEL,
    ROWS,
    digest,
    finish_args,
    waiting,
)
from tests.shared.broker.scripts.stateful.queue_model import MAX_DELIVERIES, QueueModel
from tests.shared.broker.scripts.stateful.queue_state import LATER, PROMPTS, RESCUER, WORKERS, Caller, State
from tests.shared.broker.scripts.stateful.queue_steps import CLIENTS, SIZES, STEPS, TROUBLE

LEASE_MS = 3_600_000
LIFETIME_MS = 7_200_000
GUEST = MODEL.reply("guest")
MAX_AGES = 60
NEVER_MS = 10**9


@dataclass(slots=True)
class Worker:
    """The state of a worker.

    Attributes:
        has_joined: whether the worker has created its consumer and sends heartbeats.
        held: the entries that the worker computes: entry -> (prompt, time in ms until which a client waits).
    """

    has_joined: bool = False
    held: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class QueueMachine(RuleBasedStateMachine):
    """A queue with four clients, two of them bulk clients, and four workers that join and leave.

    Args:
        caller: object that runs scripts on a server that no other test uses.
        seen: counts the events of each kind, so that a test can check that all kinds have occurred.
    """

    def __init__(self, caller: Caller, seen: collections.Counter[str]) -> None:
        super().__init__()
        self.caller, self.redis, self.seen = caller, caller.redis, seen
        self.redis.flushall()
        self.redis.xgroup_create(JOBS, GROUP, id="0", mkstream=True)
        self.has_trouble = False
        self.workers = {name: Worker() for name in (*WORKERS, RESCUER)}
        self.since = dict.fromkeys(CLIENTS, b"0-0")
        self.model, self.is_sound, self.has_marks, self.is_replaced = QueueModel(0), True, False, False

    @initialize(
        limit=st.sampled_from([14, 40, 1000]),
        has_marks=st.booleans(),
        has_trouble=st.booleans(),
        sizes=SIZES,
    )
    def begin(self, limit: int, has_marks: bool, has_trouble: bool, sizes: list[int]) -> None:
        """Draw the queue's limit, whether scripts see rows, whether the server loses keys, and the first workers."""
        self.has_trouble = has_trouble
        self.limit, self.model, self.has_marks = limit, QueueModel(limit), has_marks
        for name, size in zip(WORKERS, sizes, strict=False):
            self._join(name, size)

    def run(self, script: scripts.Script, keys: list[bytes], *args: Any) -> Any:
        self.is_sound = False
        return self.caller.run(script, keys, args)

    @rule(step=STEPS)
    def act(self, step: tuple[str, tuple[Any, ...]]) -> None:
        """Run the method that the step names."""
        name, values = step
        if self.has_trouble or name not in TROUBLE:
            getattr(self, name)(*values)

    @invariant()
    def check(self) -> None:
        """Check the invariants after every step."""
        self.is_sound = False
        state = self.caller.look(self.since)
        depth, _, dead, _ = self.run(scripts.SURVEY, [JOBS, DEAD])
        for client, messages in state.told.items():
            self.since[client] = messages[-1][0] if messages else self.since[client]
        self.model.check(state)
        if not state.uncounted:
            jobs = state.depth + state.wakes
            assert (depth, dead) == (jobs, state.dead), f"a survey sees {depth} jobs of {jobs}"
        self.seen["steps"] += 1
        self.seen["steps with a backlog"] += bool(state.backlog)
        self.seen["steps with a backlog of bulk clients"] += bool(state.yielding)
        self.seen["steps with lanes"] += any(state.lengths.values())
        self.is_sound = True

    @property
    def state(self) -> State:
        """The queue after the previous step."""
        assert self.model.last is not None
        return self.model.last

    # Steps of clients

    def submit(self, client: bytes, prompts: list[tuple[int, str]], check_rows: bool, is_retried: bool) -> None:
        """Submit prompts that the client does not wait for yet; submit them twice if the reply is lost."""
        prompts = [(number, home) for number, home in prompts if (client, number) not in self.model.waits]
        numbers, homes = [number for number, _ in prompts], [home for _, home in prompts]
        if prompts:
            for _ in range(1 + is_retried):
                self._submit(client, numbers, homes, check_rows=check_rows)

    def ask_again(self, client: bytes, picks: int) -> None:
        """Check that the jobs of a client that has waited for long still exist."""
        if numbers := _picked(self.model.waits_of(client), picks):
            self._submit(client, numbers, [], again=True)

    def _submit(
        self,
        client: bytes,
        numbers: list[int],
        homes: list[str],
        *,
        again: bool = False,
        check_rows: bool = True,
        lifetime_ms: int = LIFETIME_MS,
    ) -> None:
        keys, row_check = [JOBS, client, *map(waiting, numbers)], ""
        if self.has_marks:
            row_check = "marks" if check_rows else ""
        elif check_rows:
            keys, row_check = keys + [ROWS + digest(number) for number in numbers], "rows"
        jobs = [b"job-%d" % number for number in numbers]
        head = [self.limit, lifetime_ms, row_check, int(again), len(numbers)]
        outcome = self.run(scripts.SUBMIT, keys, *head, *jobs, *(homes if any(homes) else ())).decode()
        for code in outcome:
            self.seen[f"submit {code}{' again' * again}"] += 1
        if client == GUEST:
            for number, code in zip(numbers, outcome, strict=True):
                if code == "Q":
                    self.model.loose.add(number)
                    self.model.dangling.discard(number)
        else:
            self.model.submitted(client, numbers, outcome, again=again)

    def expire(self, prompts: list[tuple[int, str]]) -> None:
        """Let a client submit prompts with a short deadline and disconnect."""
        numbers = [number for number, _ in prompts]
        self._submit(GUEST, numbers, [home for _, home in prompts], lifetime_ms=1)
        end = time.monotonic() + 0.003
        while time.monotonic() < end:
            self.redis.exists(*map(waiting, numbers))

    def cancel(self, client: bytes, picks: int) -> None:
        """Cancel some of the client's prompts."""
        if numbers := _picked(self.model.waits_of(client), picks):
            self.run(scripts.CANCEL, [JOBS, client, *map(waiting, numbers)], GROUP)
            for number in numbers:
                del self.model.waits[client, number]

    # Steps of workers

    def _busy(self, pick: int) -> str:
        """The name of a worker that holds jobs, or "" if no worker does."""
        busy = [name for name in WORKERS if self.workers[name].held]
        return busy[pick % len(busy)] if busy else ""

    def _join(self, name: str, size: int) -> None:
        """Create missing streams, and send a heartbeat of the worker."""
        for stream in (JOBS, MODEL.lane(name)):
            self._make(stream)
        self._keep(name)
        self.workers[name].has_joined = True
        self._register(name, size)

    def _make(self, stream: bytes) -> None:
        self.is_sound = False
        with suppress(ResponseError):  # The group exists already.
            self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)

    def _keep(self, name: str) -> None:
        for keys, lifetime in ((list(MODEL.queue), ()), ([MODEL.lane(name)], (LIFETIME_MS,))):
            assert self.run(scripts.KEEP_QUEUE, keys, GROUP, LEASE_MS, *lifetime) == -1

    def _register(self, name: str, size: int) -> None:
        keys = [MODEL.workers, JOBS, MODEL.capacity, MODEL.lanes, MODEL.lane(name)]
        self.run(scripts.REGISTER, keys, name, LEASE_MS, LIFETIME_MS, GROUP, size)
        self.model.miscounted.discard(name)

    def heartbeat(self, name: str, size: int, keeps: bool) -> None:
        """Send a heartbeat of a worker, which joins the worker if it has not joined yet."""
        if not self.workers[name].has_joined:
            self._join(name, size)
        elif keeps:
            self._keep(name)
        self._register(name, size)

    def take(self, name: str, count: int, is_lost: bool) -> None:
        """Take new jobs; if no new job exists, refill the streams and steal jobs. The reply may be lost."""
        if not self.workers[name].has_joined:
            self._join(name, count)
        if not self._take(name, count, is_lost=is_lost):
            self.move_up()
            if not self.workers[name].held:
                self._steal(name, count, NEVER_MS)

    def _take(self, name: str, count: int, *, is_lost: bool = False) -> int:
        lane = MODEL.lane(name)
        self.is_sound = False
        try:
            reply: Any = self.redis.xreadgroup(GROUP, name, {lane: ">", JOBS: ">"}, count=count)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._join(name, count)
            return 0
        taken = 0
        for stream, entries in reply:
            suffix = b" " + name.encode() if stream == lane else b""
            wakes = [entry_id for entry_id, fields in entries if WAKE_FIELD in fields]
            if wakes:
                self.run(scripts.WAKE, [JOBS], name, *wakes)
                entries = [entry for entry in entries if entry[0] not in wakes]
            self.model.taken(name, [entry_id + suffix for entry_id, _ in entries])
            for entry_id, fields in entries:
                self.seen["taken at home"] += fields.get(HOME_FIELD) == name.encode() and bool(suffix)
                if not is_lost:
                    since = fields.get(SINCE_FIELD, b"")
                    self._hold(name, entry_id + suffix, fields[JOB_FIELD], fields.get(LIFETIME_FIELD, b""), since)
            taken += len(entries)
        return taken

    def _hold(self, name: str, entry: bytes, job: bytes, lifetime: bytes, since: bytes) -> None:
        until = int(since or entry.partition(b"-")[0]) + int(lifetime.partition(b" ")[0] or NEVER_MS)
        self.workers[name].held[entry] = int(job.removeprefix(b"job-")), until

    def move_up(self) -> None:
        """Move prompts from the backlog to the streams, as an idle worker does."""
        while self.run(scripts.FIND_WORK, [JOBS], "", 0, 0)[0]:
            pass

    def steal(self, name: str, count: int, is_patient: bool) -> None:
        """Let an idle worker steal jobs from the lane of another worker."""
        if self.workers[name].has_joined and not self.workers[name].held:
            self._steal(name, count, NEVER_MS if is_patient else 0)

    def _steal(self, name: str, count: int, patience_ms: int) -> int:
        _, stolen, check_again_ms = self.run(scripts.FIND_WORK, [JOBS], name, count, patience_ms)
        assert 0 <= stolen <= count
        assert check_again_ms == 0 or not stolen
        self.seen["stolen"] += stolen
        self.seen["watched"] += check_again_ms > 0
        return int(stolen)

    def finish(self, pick: int, picks: int, endings: list[str]) -> None:
        """End jobs with several outcomes, also jobs that another worker has claimed since."""
        if not (name := self._busy(pick)):
            return
        if entries := _picked(sorted(self.workers[name].held), picks):
            self._finish(name, [(entry, endings[at % len(endings)]) for at, entry in enumerate(entries)])

    def _finish(self, name: str, endings: list[tuple[bytes, str]]) -> None:
        held = self.workers[name].held
        numbers = [held[entry][0] for entry, _ in endings]
        stored = {number for number, (_, how) in zip(numbers, endings, strict=True) if how == "row"}
        for number, (_, how) in zip(numbers, endings, strict=True):
            if number in stored:
                self.redis.set(ROWS + digest(number), b"row", nx=True, px=LIFETIME_MS)
            elif how == "missing":
                self.redis.delete(ROWS + digest(number))
        told = [(entry, FAILURE if how in ("failed", "dead") else b"", how == "dead") for entry, how in endings]
        keys = [JOBS, DEAD, *map(waiting, numbers)]
        if not self.has_marks:
            keys += [ROWS + digest(number) for number in numbers]
        args = finish_args(*told, consumer=name, mark_ms=LIFETIME_MS if self.has_marks else 0)
        _, *left = self.run(scripts.FINISH, keys, *args).partition(b" =")[0].split()
        missing = {at for at, (_, how) in enumerate(endings, 1) if how == "missing" and numbers[at - 1] not in stored}
        assert set(map(int, left)) == (set() if self.has_marks else missing)
        for at, (entry, how) in enumerate(endings, 1):
            if b"%d" % at in left:
                continue
            number, _ = held.pop(entry)
            delivery = self.model.pending.get(entry)
            is_held = delivery is not None and delivery.worker == name
            if is_held or how not in ("failed", "dead"):
                self.model.finished(entry, number)
                self.seen[f"finished: {how}"] += 1
                self.seen["finished late"] += not is_held
                if is_held and how == "dead":
                    self.model.buried()

    def renew(self, pick: int) -> None:
        """Renew the leases of a worker's jobs."""
        if not (name := self._busy(pick)):
            return
        entries = sorted(self.workers[name].held)
        mine = {entry for entry in entries if entry in self.model.pending and self.model.pending[entry].worker == name}
        lost = self.run(scripts.RENEW, [JOBS], GROUP, name, *entries)
        assert set(lost) == set(entries) - mine
        for entry in mine:
            self.model.pending[entry].is_silent = False

    def drop_unwanted(self, pick: int) -> None:
        """Remove held jobs for which no client waits."""
        if not (name := self._busy(pick)):
            return
        held = self.workers[name].held
        entries = sorted(held)
        args = [value for entry in entries for value in (entry, held[entry][1])]
        numbers = self.run(scripts.DROP_UNWANTED, [JOBS, *(waiting(held[entry][0]) for entry in entries)], *args)
        for at in numbers:
            number, _ = held.pop(entries[at - 1])
            assert not any(self.model.waits.get((client, number)) for client in CLIENTS), f"{number} is waited for"
            self.model.finished(entries[at - 1], number)
            self.seen["dropped"] += 1

    def claim(self, name: str, count: int) -> None:
        """Claim jobs of silent workers; give up jobs with too many deliveries."""
        if self.workers[name].has_joined:
            self._claim(name, count)

    def overtake(self, name: str, pick: int, count: int, is_late: bool) -> None:
        """A worker renews no lease in time; another worker claims its jobs, but the first one continues to compute."""
        others = [other for other in WORKERS if other != name and self.model.held(other)]
        if others and self.workers[name].has_joined:
            self._fall_silent(others[pick % len(others)], is_late=is_late, forgets=False)
            self._claim(name, count)

    def _claim(self, name: str, count: int) -> tuple[bool, int]:
        """Return whether the worker must run the claimed jobs alone, and their number."""
        held = self.workers[name].held
        own, was_idle = sorted(held), not held
        args = [GROUP, name, LEASE_MS, MAX_DELIVERIES, count, int(was_idle), 2**24, 2**19, LIFETIME_MS, *own]
        alone, taken, _ = self.run(scripts.CLAIM_EXPIRED, [JOBS, MODEL.claim_cursor], *args)
        assert len(taken) <= count
        claims = [(entry, deliveries) for entry, _, deliveries, *_ in taken]
        self.model.claimed(name, claims, was_idle=was_idle, own=own)
        spent = []
        for entry, job, deliveries, lifetime, since, _ in taken:
            self._hold(name, entry, job, lifetime, since)
            if deliveries >= MAX_DELIVERIES:
                spent.append((entry, "dead"))
        self.seen["claimed"] += len(claims)
        self.seen["alone"] += alone
        self.seen["given up"] += len(spent)
        if spent:
            self._finish(name, spent)
        return bool(alone), len(taken)

    def sweep(self, name: str, checks: bool) -> None:
        """Remove dead workers from the queue."""
        if self.workers[name].has_joined:
            self._remove_gone(checks)

    def _remove_gone(self, checks: bool, *gone: str) -> None:
        keys = [JOBS, MODEL.workers, MODEL.capacity, MODEL.virtual_time]
        _, has_unknown, _ = self.run(scripts.REMOVE_GONE, keys, GROUP, 100, LIFETIME_MS, int(checks), *gone)
        if has_unknown:
            consumers: Any = self.redis.xinfo_consumers(JOBS, GROUP)
            lanes: Any = self.redis.zrange(MODEL.lanes, 0, -1)
            names = {consumer["name"] for consumer in consumers} | {name for name in lanes if name}
            self.run(scripts.ADD_DEADLINES, [MODEL.workers], LEASE_MS, LIFETIME_MS, *sorted(names))
            self.seen["deadlines added"] += 1
        if checks:
            self.model.is_sum_known = True
        elif self.model.miscounted:
            self.model.is_sum_known = False

    def fall_silent(self, name: str, how: str) -> None:
        """Let a worker miss renewals, freeze, crash, stop, stop because of a failure, or prepare to stop."""
        if self.workers[name].has_joined:
            self.seen[f"fell silent: {how}"] += 1
            if how in ("ended", "failed", "closing"):
                # A failed worker sends a heartbeat before it closes its lane.
                self._close(name, heartbeat=how == "failed")
            if how in ("ended", "failed"):
                self._leave(name, "no memory" if how == "failed" else "")
            elif how != "closing":
                self._fall_silent(name, is_late=how != "slow", forgets=how == "killed")

    def _fall_silent(self, name: str, *, is_late: bool, forgets: bool) -> None:
        self.is_sound = False
        for entry, count in self.model.silence(name).items():
            entry_id, _, lane = entry.partition(b" ")
            stream = MODEL.lane(lane) if lane else JOBS
            self.redis.xclaim(stream, GROUP, name, 0, [entry_id], idle=2 * LEASE_MS, retrycount=count, justid=True)
        if is_late:
            self.redis.zadd(MODEL.workers, {name: 1}, xx=True)
        if forgets:
            self.workers[name] = Worker()

    def _close(self, name: str, *, heartbeat: bool) -> None:
        if heartbeat:
            self._register(name, 0)
        while self.run(scripts.CLOSE_LANE, [JOBS], name):
            pass

    def _leave(self, name: str, reason: str) -> None:
        """Release the jobs of a worker that stops, and remove the worker."""
        lanes = {b"", b" " + name.encode(), *(b"".join(entry.partition(b" ")[1:]) for entry in self.model.held(name))}
        for suffix in sorted(lanes):
            keys, begin = [MODEL.lane(suffix[1:]) if suffix else JOBS, MODEL.reasons], b"-"
            while begin:
                args = [2 * LEASE_MS, 2, begin, MAX_DELIVERIES, reason, LEASE_MS, 10, suffix]
                _, begin = self.run(scripts.RELEASE, keys, GROUP, name, *args)
        self.model.silence(name)
        self.workers[name] = Worker()
        self._remove_gone(False, name)

    # Steps of operators, and of a server that is short of memory

    def retry(self, pick: int) -> None:
        """Queue the job of a dead letter again."""
        letters: Any = self.redis.xrange(DEAD)
        if letters:
            entry, fields = letters[pick % len(letters)]
            number = int(fields[JOB_FIELD].removeprefix(b"job-"))
            args = [entry, fields[JOB_FIELD], self.limit, LIFETIME_MS]
            outcome = self.run(scripts.RETRY, [JOBS, DEAD, waiting(number)], *args)
            assert outcome in (b"Q", b"J", b"F")
            self.seen[f"retried {outcome.decode()}"] += 1
            if outcome != b"F":
                self.model.dug_out()
                self.model.dangling.discard(number)

    def clear(self) -> None:
        """Clear the queue, except jobs that workers hold."""
        state, model = self.state, self.model
        jobs = [(LATER, number) for number in state.backlog] + list(state.entries.items())
        stays = [entry for entry, _ in jobs if entry in model.pending and not model.pending[entry].is_silent]
        names = [JOBS, MODEL.waiting, *(waiting(number) for _, number in jobs)]
        args = [GROUP, FAILURE, 1000, LIFETIME_MS, LEASE_MS, *(entry for entry, _ in jobs)]
        removed, held, unfinished = self.run(scripts.CLEAR, names, *args)
        assert (removed, held, unfinished) == (len(jobs) - len(stays), len(stays), [])
        for entry, number in jobs:
            if entry not in stays:
                model.finished(entry, number)
        self.seen["cleared"] += removed

    def lose(self, what: str, pick: int) -> None:
        """Let the server lose a key that may expire."""
        number, name = PROMPTS[pick % len(PROMPTS)], WORKERS[pick % len(WORKERS)]
        rest = [MODEL.claim_cursor, MODEL.sole_client, MODEL.reasons, *CLIENTS]
        keys = {
            "waiting": waiting(number),
            "row": ROWS + digest(number),
            "lanes": MODEL.lanes,
            "capacity": MODEL.capacity,
            "workers": MODEL.workers,
            "lane": MODEL.lane(name),
            "rest": rest[pick % len(rest)],
        }
        self.is_sound = False
        if (what == "lanes" and self.is_replaced) or not self.redis.delete(keys[what]):
            return
        self.seen[f"lost {what}"] += 1
        if what == "waiting":
            self.model.lose_waiting(number)
        elif what == "lane":
            self.model.lose_stream(name)
        elif what == "lanes":
            self.model.has_lost_lanes, self.model.limit = True, 0

    def spoil_waiting(self, number: int, job: bytes | None, reply: bytes) -> None:
        """Write a value that no script writes into the waiting key of a prompt."""
        self.is_sound = False
        if job is None:
            text = reply + b"\ndone" if reply else b"text"
            self.redis.set(waiting(number), text, px=LIFETIME_MS)
        else:
            self.redis.delete(waiting(number))
            self.redis.hset(waiting(number), mapping={b"job": job, **({reply: b""} if reply else {})})
            self.redis.pexpire(waiting(number), LIFETIME_MS)
        self.model.lose_waiting(number)
        self.model.dangling.add(number)

    def run_ahead(self, name: str) -> None:
        """Add an entry whose id is ahead of the clock to a stream, let a worker read it, and replace the stream."""
        stream, consumer = MODEL.lane(name) if name else JOBS, name or WORKERS[0]
        # The new stream does not list removed workers, so this step is skipped if the server has lost their lanes.
        if not self.workers[consumer].has_joined or (not name and self.model.has_lost_lanes):
            return
        self.is_replaced = self.is_replaced or not name
        self._make(stream)
        self.redis.xadd(stream, {JOB_FIELD: b"job-0"}, id="9999999999999-1")
        self.redis.xreadgroup(GROUP, consumer, {stream: ">"})
        dropped = self.redis.xlen(stream)
        keys, lifetime = ([stream], (LIFETIME_MS,)) if name else (list(MODEL.queue), ())
        assert self.run(scripts.KEEP_QUEUE, keys, GROUP, LEASE_MS, *lifetime) == dropped
        self.seen["replaced"] += 1
        self.model.lose_stream(name)

    # The end of a run

    def teardown(self) -> None:
        """Let all workers crash and a new worker join, and check that every waiting client gets a result."""
        if not self.is_sound:
            return
        for name in WORKERS:
            self._fall_silent(name, is_late=True, forgets=True)
        self._join(RESCUER, 4)
        self._drain()
        forgotten = [wait for wait, is_certain in self.model.waits.items() if is_certain]
        assert not forgotten, f"not answered: {forgotten}"
        for _ in range(MAX_AGES):
            if not self.model.waits:
                break
            for client in CLIENTS:
                if numbers := self.model.waits_of(client):
                    self._submit(client, numbers, [], again=True)
            self._drain()
        assert not self.model.waits, f"asked for again, and not answered: {self.model.waits}"
        self.seen["examples"] += 1

    def _drain(self) -> None:
        """Let the only live worker run all its periodic tasks until the queue is empty."""
        for _ in range(MAX_AGES):
            self._age()
            self._register(RESCUER, 4)
            self._remove_gone(True)
            self._claim_all()
            while self._take(RESCUER, 4):
                self._finish_all()
            self.move_up()
            self.check()
            if not self.state.depth:
                return
        raise AssertionError(f"the queue does not drain: {self.state}")

    def _age(self) -> None:
        """Let the leases of all workers except the new one end."""
        for name in WORKERS:
            self._fall_silent(name, is_late=True, forgets=True)

    def _claim_all(self) -> None:
        for _ in range(MAX_AGES):
            alone, count = self._claim(RESCUER, 4)
            self._finish_all()
            if not alone and not count:
                return
        raise AssertionError("there is more and more to take over")

    def _finish_all(self) -> None:
        if held := self.workers[RESCUER].held:
            self._finish(RESCUER, [(entry, "row") for entry in sorted(held)])


def _picked(choices: list[Any], picks: int) -> list[Any]:
    """The choices whose bits are set in `picks`, or the first choice if no bit is set."""
    return [choice for at, choice in enumerate(choices) if picks >> at % 12 & 1] or choices[:1]
