"""Read the content of a model's queue at one instant, and check its invariants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from lmpool.broker import scripts
from lmpool.protocol.keys import BULK_TIME, GROUP, JOB_FIELD, WAKE_FIELD
from tests.shared.broker.scripts.script_calls import JOBS, MODEL, digest
from tests.support.pool import PATIENCE

PROMPTS = range(1, 25)
WORKERS = ("w1", "w2", "w3", "w4")
RESCUER = "w5"
LATER = b"later"

_NUMBERS = {digest(number): number for number in PROMPTS}
_STREAMS = {JOBS: b"", **{MODEL.lane(worker): b" " + worker.encode() for worker in (*WORKERS, RESCUER)}}

# This script reads the queue and the clients' notifications in one call per step.
_LOOK = """
local group, prefix, streams, waiting, forever, told = ARGV[1], ARGV[2], {}, {}, {}, {}
-- What expires sooner may be gone when the next step looks.
local MIN_MS = 1000
for i, key in ipairs(KEYS) do
  local held = redis.pcall('XPENDING', key, group, '-', '+', 100000)
  streams[i] = {redis.call('XRANGE', key, '-', '+'), held.err and {} or held}
end
local base = string.sub(KEYS[1], 1, -6)
for _, key in ipairs(redis.call('KEYS', '*')) do
  local lifetime = redis.call('PTTL', key)
  if lifetime == -1 then
    forever[#forever + 1] = key
  elseif lifetime > MIN_MS and string.sub(key, 1, #prefix) == prefix then
    local type, fields = redis.call('TYPE', key).ok, nil
    if type == 'hash' then
      fields = redis.call('HGETALL', key)
    elseif type == 'string' then
      local reply, entry = string.match(redis.call('GET', key), '^(.*)\\n(.*)$')
      fields = reply and entry ~= 'done' and {'job', entry, reply, ''}
    end
    if fields then
      waiting[#waiting + 1] = {string.sub(key, #prefix + 1), fields}
    end
  end
end
for at = 3, #ARGV, 2 do
  told[#told + 1] = redis.call('XRANGE', ARGV[at], '(' .. ARGV[at + 1], '+')
end
return {
  streams, redis.call('ZRANGE', base .. ':lanes', 0, -1, 'WITHSCORES'), redis.call('HGETALL', base .. ':capacity'),
  redis.call('ZRANGE', base .. ':backlog', 0, -1, 'WITHSCORES'), redis.call('HKEYS', base .. ':backlog:jobs'),
  waiting, forever, told, redis.call('XLEN', base .. ':dead'),
}
"""


class Caller:
    """Runs scripts on a server.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.redis: redis.Redis = redis.Redis.from_url(url, protocol=2, **PATIENCE)
        self._look: Any = self.redis.register_script(_LOOK)

    def run(self, script: scripts.Script, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """Return the script's reply."""
        try:
            return self.redis.evalsha(script.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            return self.redis.eval(script.source, len(keys), *keys, *args)

    def look(self, since: Mapping[bytes, bytes]) -> State:
        """Read the queue.

        Args:
            since: reply key of a client -> id of the last message that the client has read.
        """
        args = [GROUP, MODEL.waiting, *(part for pair in since.items() for part in pair)]
        return _state(self._look(keys=list(_STREAMS), args=args), list(since))


@dataclass(frozen=True, slots=True)
class State:
    """The state of a queue at one instant.

    Attributes:
        entries: entry -> the number of its prompt.
        pending: delivered entry -> (worker that holds the entry, number of deliveries).
        lengths: worker -> number of entries in its lane.
        lanes: worker -> the registered length of its lane; "" -> the sum of these lengths.
        capacity: worker -> max prompts that the worker computes at once; "" -> the sum over all workers.
        backlog: the prompts in the backlog.
        yielding: prompts in the backlog for which only bulk clients wait.
        backlog_jobs: prompts whose jobs are stored in the backlog.
        waiting: prompt -> the fields of its waiting key.
        forever: the keys that have no expiry.
        told: reply key -> (id, content) of each new message.
        dead: the number of dead letters.
        wakes: the number of entries that only wake workers.
        places: prompt -> its jobs: entries of streams, and "later" for a job in the backlog.
    """

    entries: dict[bytes, int]
    pending: dict[bytes, tuple[str, int]]
    lengths: dict[str, int]
    lanes: dict[str, int]
    capacity: dict[str, int]
    backlog: list[int]
    yielding: set[int]
    backlog_jobs: list[int]
    waiting: dict[int, dict[bytes, bytes]]
    forever: list[bytes]
    told: dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]
    dead: int
    wakes: int = 0
    places: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry, number in self.entries.items():
            self.places.setdefault(number, []).append(entry)
        for number in self.backlog:
            self.places.setdefault(number, []).append(LATER)

    @property
    def depth(self) -> int:
        """The number of jobs in the queue."""
        return len(self.entries) + len(self.backlog)

    @property
    def uncounted(self) -> set[str]:
        """Workers that have jobs in a lane whose length is not registered."""
        return {worker for worker, length in self.lengths.items() if length and worker not in self.lanes}

    def check_alone(self, *, miscounted: set[str], is_sum_known: bool) -> None:
        """Check the invariants of any queue.

        Args:
            miscounted: workers whose lanes the server has lost after they last reported the lane's length.
            is_sum_known: whether all lengths were added up after the server lost the lane of a removed worker.
        """
        assert sorted(self.backlog) == sorted(self.backlog_jobs), "the backlog and its jobs differ"
        assert self.pending.keys() <= self.entries.keys(), "a worker holds an entry that was removed"
        counted = {worker: count for worker, count in self.lanes.items() if worker and worker not in miscounted}
        lengths = {worker: self.lengths[worker] for worker in counted}
        assert counted == lengths, f"lanes count {counted} and have {lengths}"
        if is_sum_known:
            _check_sum("lanes", self.lanes)
        _check_sum("capacities", self.capacity)
        # A lane that was lost and is created again by new jobs gets an expiry only when its worker polls.
        undying = set(self.forever) - {*MODEL.queue, *map(MODEL.lane, (*WORKERS, RESCUER))}
        assert not undying, f"keys that never expire: {undying}"


def _check_sum(of_what: str, counts: dict[str, int]) -> None:
    total = sum(count for worker, count in counts.items() if worker)
    assert counts.get("", 0) == total, f"the sum of the {of_what} {counts} is {total}"


def _pairs(flat: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _counts(flat: Sequence[bytes]) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in _pairs(flat).items()}


def _state(reply: Any, reply_keys: Sequence[bytes]) -> State:
    streams, lanes, capacity, backlog, backlog_jobs, waiting, forever, told, dead = reply
    entries, pending, lengths = {}, {}, {}
    wakes = set()
    for suffix, (listed, held) in zip(_STREAMS.values(), streams, strict=True):
        for entry_id, flat in listed:
            if flat[0] == WAKE_FIELD:
                wakes.add(entry_id + suffix)
                continue
            # Entries that other programs have added may have no job field.
            job = _pairs(flat).get(JOB_FIELD, b"")
            entries[entry_id + suffix] = int(job.removeprefix(b"job-") or 0)
        for entry_id, worker, _, deliveries in held:
            if entry_id + suffix not in wakes:
                pending[entry_id + suffix] = worker.decode(), deliveries
        if suffix:
            lengths[suffix[1:].decode()] = len(listed)
    return State(
        entries=entries,
        pending=pending,
        lengths=lengths,
        lanes=_counts(lanes),
        capacity=_counts(capacity),
        backlog=[_NUMBERS[name] for name in backlog[::2]],
        yielding={_NUMBERS[name] for name, start in _pairs(backlog).items() if float(start) >= BULK_TIME},
        backlog_jobs=[_NUMBERS[name] for name in backlog_jobs],
        waiting={_NUMBERS[name]: _pairs(flat) for name, flat in waiting},
        forever=forever,
        told={
            key: [(entry_id, _pairs(flat)) for entry_id, flat in messages]
            for key, messages in zip(reply_keys, told, strict=True)
        },
        dead=dead,
        wakes=len(wakes),
    )
