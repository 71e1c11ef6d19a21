"""Watches a soak run: judges the irregular requests in the clients' reports, and measures memory and descriptors."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from tests.faults.chaos.plan import Kind
from tests.faults.chaos.settings import ChaosSettings
from tests.soak.strikes import KEPT, ClientKind, SoakFleet, Window
from tests.soak.traffic import ADAPTED, HURRIED

MAX_PRINTED = 500
"""Max violations that are printed."""
MAX_BYTES = 512 << 20
"""Max resident memory of any process; the server's memory limit is half of it."""
MAX_DESCRIPTORS = 250
"""Max open descriptors of any process."""
MAX_SEGMENTS = 40
"""Max files in the folders of shared memory: sockets of live processes, and of killed ones until they are replaced."""
MAX_PERSISTENT = 200
"""Max keys without a lifetime during a run: registries, streams of jobs, and the backlog."""
# The next limits are for a process that lives for the whole run, from the second third of the run to its end.
GROWTH = 0.10
"""Max growth of the resident memory as a share, if this is more than `GROWTH_BYTES`."""
GROWTH_BYTES = 16 << 20
"""Max growth of the resident memory in bytes: an allocator keeps freed pages."""
SERVER_GROWTH_BYTES = 96 << 20
"""The same for the server, whose memory depends on the rate of requests and on the time since its last restart."""
GROWTH_DESCRIPTORS = 10
"""Max growth of the number of descriptors: connections are opened and closed."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_JUDGED_AFTER_S = 20.0  # No fault lasts longer.
_RECENT_S = 30.0  # Seconds before a violation whose faults are printed.
_EMPTYING = {ClientKind.FLUSH, ClientKind.RESTART_EMPTY, ClientKind.SHORT_OF_MEMORY}
_CUTS = {
    *(Kind.KILL_CONNECTIONS, Kind.RESTART, Kind.CRASH, Kind.CUT, Kind.REFUSE, Kind.SWALLOW, Kind.DROP, Kind.TRUNCATE),
    *(Kind.DELAY, ClientKind.RESTART_EMPTY),
}
_WORKER_ENDS = {Kind.KILL, Kind.KILL_FULL, Kind.FREEZE, Kind.FREEZE_FULL, Kind.STALL}


class Permitted(NamedTuple):
    """When a request may end with an exception.

    Attributes:
        kind: kind of the request.
        text: part of the exception's text.
        after: kinds of faults that allow the exception.
        within_s: seconds after the end of the fault in which the request may begin.
    """

    kind: str
    text: str
    after: set[Any]
    within_s: float


PERMITTED: Mapping[str, list[Permitted]] = {
    # A server that has lost its data has lost the adapter too; the first client puts it in service again.
    "UnknownAdapter": [Permitted(ADAPTED, "", _EMPTYING, 15.0)],
    "ServerError": [Permitted(ADAPTED, "has lost a change of the adapter", _EMPTYING, 15.0)],
    # An adapter is refused for ten minutes if a worker ended while it loaded the adapter.
    "AdapterRefused": [Permitted(ADAPTED, "terminated while it loaded this adapter", _WORKER_ENDS, 600.0)],
    # The deadline of a request ends the client's attempts to connect again.
    "ServerUnreachable": [Permitted(HURRIED, "no row within", _CUTS, 10.0)],
    # A reply that lost bytes closes the connection, and the deadline ends the attempts to connect again.
    "ProtocolError": [Permitted(HURRIED, "no row within", {Kind.DROP, Kind.TRUNCATE}, 10.0)],
}
"""Exception -> the situations in which a request may end with it. `Client` counts the expired hurried requests."""


class Sample(NamedTuple):
    """Resident bytes and open descriptors of a process at one time (monotonic clock)."""

    at: float
    resident: int
    descriptors: int


@dataclass
class Judge:
    """Reads the reports of all clients.

    Attributes:
        settings: settings of the run.
        windows: the faults so far, which the striker extends.
        violations: what went wrong, with all data of the request.
        permitted: exception -> number of requests that a fault allowed to end with it.
    """

    settings: ChaosSettings
    windows: list[Window]
    violations: list[dict[str, Any]] = field(default_factory=list)
    permitted: Counter[str] = field(default_factory=Counter)
    _irregular: deque[dict[str, Any]] = field(default_factory=deque)
    _offsets: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _status: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, reports: Mapping[str, Path], *, is_end: bool = False) -> None:
        """Read the new lines of the reports, and judge the lines that are old enough, or all lines at the end."""
        for name, path in reports.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                for line in file:
                    if not line.endswith(b"\n"):  # A killed client may have written half of its last line.
                        break
                    self._offsets[name] += len(line)
                    self._take({"client": name, **json.loads(line)})
        # Faults are noted when they end, so wait until all faults that may explain a line have ended.
        until = math.inf if is_end else time.monotonic() - _JUDGED_AFTER_S
        while self._irregular and self._irregular[0]["at"] < until:
            self._judge(self._irregular.popleft())

    @property
    def ended(self) -> Counter[str]:
        """Kind of request -> number of requests that have ended."""
        return sum((Counter(status["ended"]) for status in self._status.values()), Counter())

    @property
    def expired(self) -> int:
        """Number of hurried requests that ended with their deadline."""
        return sum(sum(status["expired"].values()) for status in self._status.values())

    def pending_of(self, name: str) -> int:
        """Number of calls of a client that had not ended at its last status."""
        return int(self._status.get(name, {"pending": 0})["pending"])

    def _take(self, line: dict[str, Any]) -> None:
        if line["event"] == "status":
            self._status[line["client"]] = line
        else:
            self._irregular.append(line)

    def _judge(self, line: dict[str, Any]) -> None:
        if line["event"] == "late" and not self._is_late(line):
            self.permitted["late because its client was frozen"] += line["size"]
        elif line["event"] == "error" and self._may_fail(line):
            self.permitted[line["error"]] += line["size"]
        else:
            self.violate(line)

    def violate(self, what: dict[str, Any]) -> None:
        """Record a violation; print the first ones, with the faults of the last half minute."""
        at = what.setdefault("at", time.monotonic())
        near = [w for w in self.windows if w.over > at - _RECENT_S and w.hit <= at]
        faults = [(window.kind.value, round(window.hit, 2), round(window.over, 2)) for window in near]
        self.violations.append(what)
        if len(self.violations) <= MAX_PRINTED:
            print("VIOLATION", json.dumps({**what, "seed": self.settings.seed, "faults": faults}), flush=True)

    def _is_late(self, line: dict[str, Any]) -> bool:
        """Whether a request ended late, without the time in which its client was frozen."""
        frozen = [w for w in self.windows if w.kind is ClientKind.FREEZE_CLIENT and w.process == line["client"]]
        lost_s = sum(max(0.0, min(w.over, line["at"]) - max(w.hit, line["began"])) for w in frozen)
        return bool(line["at"] - line["began"] - lost_s > line["timeout_s"] + self.settings.grace_s)

    def _may_fail(self, line: dict[str, Any]) -> bool:
        return any(
            line["kind"] == allowed.kind
            and allowed.text in line["text"]
            and any(
                window.kind in allowed.after
                and line["began"] - allowed.within_s < window.over
                and window.hit < line["at"]
                for window in self.windows
            )
            for allowed in PERMITTED.get(line["error"], ())
        )


class Ceilings:
    """Measures the processes and the keys of a run, and compares them with their ceilings.

    Args:
        judge: takes the violations.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._zombies: set[int] = set()
        self._violated: set[str] = set()
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.keys: list[tuple[int, int]] = []

    def measure(self, fleet: SoakFleet, server_pid: int, server: redis.Redis) -> None:
        """Take a sample of each living process, and of the number of keys if the server answers."""
        running = {name: process.pid for name, process in fleet.names.items() if process.code is None}
        for name, pid in {"server": server_pid, **running}.items():
            if (sample := measure_process(pid)) is not None:
                self.samples[name].append(sample)
                self._limit(f"resident memory of {name}", sample.resident, MAX_BYTES)
                self._limit(f"descriptors of {name}", sample.descriptors, MAX_DESCRIPTORS)
        self._limit("files of shared memory", len(fleet.segments), MAX_SEGMENTS)
        zombies = _zombies_of({os.getpid(), *running.values()})
        # A process is a zombie for a moment until its parent has read its exit code.
        self._limit("zombie processes", len(zombies & self._zombies), 0)
        self._zombies = zombies
        try:
            space: Any = server.info("keyspace")
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
            return  # A fault: the server is down or loading.
        counts = space.get("db0", {"keys": 0, "expires": 0})
        self.keys.append((counts["keys"], counts["keys"] - counts["expires"]))
        self._limit("keys without a lifetime", self.keys[-1][1], MAX_PERSISTENT)

    def compare(self, began: float, ended: float) -> list[tuple[str, Sample, Sample]]:
        """Compare the long-lived processes' medians of the second third of the run and of its last tenth."""
        third, last, rows = (ended - began) / 3, ended - (ended - began) / 10, []
        kept = ("server", f"client {KEPT}.", f"worker {KEPT}.")
        for name, samples in self.samples.items():
            early = [sample for sample in samples if began + third <= sample.at < began + 2 * third]
            late = [sample for sample in samples if last <= sample.at <= ended]
            if not (name.startswith(kept) and early and late):
                continue
            first, final = _median(early), _median(late)
            grown = max(GROWTH * first.resident, SERVER_GROWTH_BYTES if name == "server" else GROWTH_BYTES)
            self._limit(f"growth of the memory of {name}", final.resident - first.resident, int(grown))
            self._limit(
                f"growth of the descriptors of {name}", final.descriptors - first.descriptors, GROWTH_DESCRIPTORS
            )
            rows.append((name, first, final))
        for start in kept:
            if not any(name.startswith(start) for name, _, _ in rows):
                self._judge.violate({"event": "failed", "what": f"{start} has too few samples to compare its memory"})
        return rows

    def _limit(self, what: str, value: int, limit: int) -> None:
        if value > limit and what not in self._violated:
            self._violated.add(what)  # Report each ceiling once.
            self._judge.violate({"event": "leaked", "what": what, "value": value, "limit": limit})


def measure_process(pid: int) -> Sample | None:
    """Measure a process; None if it has just ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        return Sample(time.monotonic(), resident, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    except (OSError, IndexError):
        return None


def _median(samples: list[Sample]) -> Sample:
    return Sample(
        samples[-1].at,
        int(statistics.median(sample.resident for sample in samples)),
        int(statistics.median(sample.descriptors for sample in samples)),
    )


def _zombies_of(parents: set[int]) -> set[int]:
    """Ids of the zombie processes among the children of some processes."""
    zombies = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # The process has just ended.
            continue
        if state == "Z" and int(parent) in parents:
            zombies.add(int(place.name))
    return zombies
