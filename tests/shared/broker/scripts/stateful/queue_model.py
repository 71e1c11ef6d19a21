"""A model of a queue that predicts the results which clients and workers may expect after their actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.shared.broker.scripts.stateful.queue_state import State
from tests.shared.broker.scripts.stateful.queue_steps import BULK_CLIENTS

MAX_DELIVERIES = 3


@dataclass(slots=True)
class Delivery:
    """An entry that was delivered to a worker.

    Attributes:
        worker: name of the worker that holds the entry.
        count: number of deliveries of the entry.
        is_silent: whether the lease of the entry has ended.
    """

    worker: str
    count: int = 1
    is_silent: bool = False


class QueueModel:
    """Applies the same actions as the server, and checks the server's queue against the expected results.

    Attributes:
        waits: (client's reply key, prompt) -> whether a result is certain; after the server has lost a key of the
            prompt, the client must submit the prompt again.
        pending: entry that was delivered to a worker -> its delivery.
        loose: prompts that may have several jobs, or a job without a client, because a key was lost or has expired, or
            a worker that counted as dead has published the row.
        dangling: prompts whose waiting keys may name a job that the server has lost.
        miscounted: names of workers, as the argument of `State.check_alone`.
        is_sum_known: whether the sum of lengths is right, as the argument of `State.check_alone`.
        has_lost_lanes: whether the server has lost the lengths of all lanes, and some are not restored yet.
        limit: max jobs of the queue; 0 (no limit) after the server has lost the lengths of lanes.
        last: the state of the queue after the previous step.
    """

    def __init__(self, limit: int) -> None:
        self.waits: dict[tuple[bytes, int], bool] = {}
        self.pending: dict[bytes, Delivery] = {}
        self.loose: set[int] = set()
        self.dangling: set[int] = set()
        self.miscounted: set[str] = set()
        self.is_sum_known = True
        self.has_lost_lanes = False
        self.limit = limit
        self.last: State | None = None
        # Prompts that may end in the current step, and entries that this step must remove.
        self._ending: set[int] = set()
        self._ended: set[bytes] = set()
        self._dead = 0

    def waits_of(self, client: bytes) -> list[int]:
        """The prompts that a client waits for."""
        return sorted(number for reply, number in self.waits if reply == client)

    def held(self, worker: str) -> list[bytes]:
        """The entries that a worker holds, as the server reported after the last step."""
        return sorted(entry for entry, delivery in self.pending.items() if delivery.worker == worker)

    def places(self, number: int) -> list[bytes]:
        """The jobs of a prompt after the last step: entries of streams, and "later" for the backlog."""
        return self.last.places.get(number, []) if self.last else []

    def submitted(self, client: bytes, numbers: Iterable[int], outcome: str, *, again: bool) -> None:
        """Record that a client has submitted prompts."""
        for number, code in zip(numbers, outcome, strict=True):
            was_certain = self.waits.get((client, number), False)
            if code == "R":
                self.waits.pop((client, number), None)
            elif code == "F":
                assert not was_certain, f"{number} is waited for, and its job was refused"
            elif code == "J":
                if again:
                    self.dangling.discard(number)
                self.waits[client, number] = number not in self.dangling
            else:
                assert code == "Q", f"the outcome of {number} is {code!r}"
                assert not (again and was_certain), f"{number} was queued twice"
                self.waits[client, number] = True
                self.dangling.discard(number)

    def taken(self, worker: str, entries: Iterable[bytes]) -> None:
        """Record that a worker has read new entries."""
        for entry in entries:
            assert entry not in self.pending, f"{entry!r} was delivered as new twice"
            self.pending[entry] = Delivery(worker)

    def claimed(self, worker: str, claims: list[tuple[bytes, int]], *, was_idle: bool, own: list[bytes]) -> None:
        """Record that a worker has claimed entries; `claims` has each entry with its number of deliveries."""
        for entry, count in claims:
            before = self.pending[entry]
            assert before.is_silent, f"{entry!r} was taken from {before.worker}, whose lease has not passed"
            assert before.count == count, f"{entry!r} was delivered {before.count} times, and the claim says {count}"
            assert not (before.worker == worker and entry in own), f"{entry!r} was taken from the worker itself"
            if count == MAX_DELIVERIES - 1:
                assert (was_idle, len(claims)) == (True, 1), f"{entry!r} is suspect, and was not taken alone"
            self.pending[entry] = Delivery(worker, count + 1)

    def finished(self, entry: bytes, number: int) -> None:
        """Record that a job has ended, also if another worker held the job."""
        self.ends(number, {entry})
        self.remove([entry])

    def ends(self, number: int, entries: set[bytes]) -> None:
        """Record that clients of a prompt may be notified now; other jobs of the prompt may lose their clients."""
        self._ending.add(number)
        if set(self.places(number)) - entries - self._ended:
            self.loose.add(number)

    def buried(self) -> None:
        """Record that a job has become a dead letter."""
        self._dead += 1

    def dug_out(self) -> None:
        """Record that a dead letter was removed."""
        self._dead -= 1

    def remove(self, entries: Iterable[bytes]) -> None:
        """Record that the current step must remove these entries."""
        for entry in entries:
            self.pending.pop(entry, None)
            self._ended.add(entry)

    def silence(self, worker: str) -> dict[bytes, int]:
        """Let the leases of a worker's jobs end; return these entries and their deliveries."""
        entries = {}
        for entry in self.held(worker):
            self.pending[entry].is_silent = True
            entries[entry] = self.pending[entry].count
        return entries

    def lose_waiting(self, number: int) -> None:
        """Record that the server has lost the waiting key of a prompt."""
        for client, waited_for in self.waits:
            if waited_for == number:
                self.waits[client, number] = False
        self.loose.add(number)

    def lose_stream(self, worker: str) -> None:
        """Record that the server has lost the lane of a worker, or the shared stream if the name is ""."""
        assert self.last is not None
        for entry, number in self.last.entries.items():
            if entry.partition(b" ")[2] == worker.encode():
                self.remove([entry])
                self.lose_waiting(number)
                self.dangling.add(number)
        if worker:
            self.miscounted.add(worker)

    def check(self, state: State) -> None:
        """Check that the queue has changed as the recorded actions of the current step require."""
        self._note_told(state)
        self._check_waits(state)
        self._check_places(state)
        delivered = {entry: (delivery.worker, delivery.count) for entry, delivery in self.pending.items()}
        assert state.pending == delivered, _difference(state.pending, delivered)
        assert not (gone := self._ended & state.entries.keys()), f"jobs that have ended are left: {gone}"
        assert state.dead == self._dead, f"{state.dead} dead letters, and {self._dead} jobs were given up"
        if self.last is not None and self.limit and state.depth > self.last.depth:
            assert state.depth <= self.limit, f"{state.depth} jobs, and the limit is {self.limit}"
        self.miscounted &= state.lanes.keys()
        state.check_alone(miscounted=self.miscounted, is_sum_known=self.is_sum_known)
        if not self.has_lost_lanes:
            assert not state.uncounted, f"jobs in lanes that are not counted: {state.uncounted}"
        else:
            self.has_lost_lanes = bool(state.uncounted) or not state.capacity.keys() <= state.lanes.keys()
        self._ending, self._ended, self.last = set(), set(), state

    def _note_told(self, state: State) -> None:
        for client, messages in state.told.items():
            for _, fields in messages:
                digests = fields[b"d"]
                for at in range(0, len(digests), 16):
                    number = digests[at]
                    assert number in self._ending, f"{client!r} was told of {number}, which has not ended"
                    self.waits.pop((client, number), None)

    def _check_waits(self, state: State) -> None:
        for (client, number), is_certain in self.waits.items():
            if not is_certain:
                continue
            waiting, places = state.waiting.get(number), state.places.get(number, [])
            assert waiting is not None, f"{client!r} waits for {number}, and is forgotten: its jobs are {places}"
            assert client in waiting, f"{client!r} waits for {number}, and only {waiting} is known"
            is_behind = number in state.yielding and number not in self.loose
            assert client in BULK_CLIENTS or not is_behind, f"{client!r} waits for {number} behind what yields to it"
            job = waiting.get(b"job")
            assert job in places, f"{client!r} waits for {number}, whose job is {job!r}, and there is {places}"

    def _check_places(self, state: State) -> None:
        for number in self.dangling - state.waiting.keys():
            self.dangling.discard(number)
        for number, places in state.places.items():
            waiting = state.waiting.get(number, {})
            is_known = places == [waiting.get(b"job")]
            is_wanted = len(waiting) > 1 or places[0] in state.pending
            if number in self.loose:
                if is_known and is_wanted:
                    self.loose.discard(number)
                continue
            assert len(places) == 1, f"{number} is in the queue twice: {places}"
            assert is_known, f"the job of {number} is {places[0]!r}, and its waiting key says {waiting}"
            assert is_wanted, f"{number} is queued as {places[0]!r}, and nobody waits for it"
        self.loose &= state.places.keys()


def _difference(there: dict[bytes, tuple[str, int]], expected: dict[bytes, tuple[str, int]]) -> str:
    more, less = there.items() - expected.items(), expected.items() - there.items()
    return f"workers hold {more or 'nothing'} besides what they were given, and lack {less or 'nothing'}"
