"""Report of a chaos run: a table of its outcome, and the limits that the outcome exceeds."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.chaos.load import ALL_KINDS, CHANGE
from tests.faults.chaos.observer import Counted
from tests.faults.chaos.settings import ChaosSettings
from tests.faults.chaos.tally import Computed, Tally, percentile


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of one chaos run.

    Attributes:
        settings: the settings of the run.
        tally: the outcomes of the requests.
        computed: number of rows and of different prompts that workers computed.
        recoveries: seconds of each recovery from a fault.
        counted: counters of the workers.
        full_lanes: number of waiting jobs in each full lane (job stream) whose worker a fault hit.
        leaked_keys: keys that are left on the server and should not exist.
        leaked_files: files that the workers left in the folders of shared memory.
        leaked_processes: processes that still run, or did not exit after SIGTERM.
        failed: processes that exited with an error, or before the run ended them.
    """

    settings: ChaosSettings
    tally: Tally
    computed: Computed
    recoveries: list[float]
    counted: Counted
    full_lanes: list[int]
    leaked_keys: list[str]
    leaked_files: list[str]
    leaked_processes: list[str]
    failed: list[str]

    @property
    def faults(self) -> list[str]:
        """The outcomes that exceed a limit of the settings."""
        settings, tally = self.settings, self.tally
        most = settings.most_leases * settings.lease_s
        counts = {
            "lost": tally.lost,
            "wrong": tally.wrong,
            "late": tally.late,
            "leaked keys": len(self.leaked_keys),
            "leaked files": len(self.leaked_files),
            "leaked processes": len(self.leaked_processes),
            "failed processes": len(self.failed),
        }
        faults = [f"{name} {number}" for name, number in counts.items() if number]
        # A run that lacks a kind of request or of job counter has not tested it, so this is a failure too.
        shown = {**{kind: tally.kinds[kind] for kind in ALL_KINDS}, **self.counted._asdict()}
        faults += [
            f"nothing {name}" if name in self.counted._fields else f"no {name}" for name in shown if not shown[name]
        ]
        if percentile(self.recoveries, 0.99) > most:
            faults.append(f"p99 recovery over {most:g} s")
        if self.computed.twice > settings.most_twice:
            faults.append(f"computed twice over {settings.most_twice:.0%}")
        return faults

    def __str__(self) -> str:
        tally, computed = self.tally, self.computed
        p99, worst = percentile(self.recoveries, 0.99), max(self.recoveries, default=0.0)
        lasted = (
            request.ended - request.began for request in tally.requests if request.ended and request.kind != CHANGE
        )
        slowest = max(lasted, default=0.0)
        kinds = ", ".join(f"{tally.kinds[kind]} {kind}" for kind in ALL_KINDS if kind != CHANGE)
        rows = [
            ("requests", f"{len(tally.requests)} ({kinds})"),
            ("adapters", f"{tally.kinds[CHANGE]} put in service, {tally.refused} refused as their worker ended"),
            ("lanes", f"{self.counted.homed} jobs taken at home, {self.counted.stolen} stolen"),
            ("shared memory", f"{self.counted.shared} rows written to it"),
            ("full lanes struck", f"{len(self.full_lanes)} ({sum(self.full_lanes)} jobs waited in them)"),
            ("lost", f"{tally.lost}"),
            ("wrong", f"{tally.wrong}"),
            ("late", f"{tally.late}"),
            ("computed twice", f"{computed.twice:.2%} ({computed.rows} rows of {computed.prompts} prompts)"),
            ("worst recovery", f"{worst:.2f} s"),
            ("p99 recovery", f"{p99:.2f} s (of {len(self.recoveries)}; a lease is {self.settings.lease_s:g} s)"),
            # A recovery counts from the end of the last of several overlapping faults; the duration of a request counts
            # from the start of the request, so it may be longer.
            ("slowest request", f"{slowest:.2f} s"),
            ("leaked keys", f"{len(self.leaked_keys)}"),
            ("leaked files", f"{len(self.leaked_files)}"),
            ("leaked processes", f"{len(self.leaked_processes)}"),
        ]
        lines = [f"{name:<17} {value}" for name, value in rows]
        lines += [f"  leaked: {text}" for text in [*self.leaked_keys, *self.leaked_files, *self.leaked_processes][:20]]
        lines += [f"  failed: {text}" for text in self.failed[:10]]
        lines += [f"  lost, {times} times: {text:.300}" for text, times in list(tally.reasons.items())[:10]]
        begin = min((request.began for request in tally.requests), default=0.0)
        lines += [
            f"  wrong: {request.kind} of client {request.client}, from {request.began - begin:.2f} s on for "
            f"{(request.ended or begin) - request.began:.2f} s: {request.outcome:.300}"
            for request in tally.wrongs[:10]
        ]
        faults = self.faults
        lines.append(f"NOT ALLOWED: {', '.join(faults)}" if faults else "all promises kept")
        return "\n".join(lines)
