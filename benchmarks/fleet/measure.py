"""Measures one fleet: starts its processes, and reads the server's counters without requests and with requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from benchmarks.fleet.counters import ServerCounters, Usage
from benchmarks.harness.processes import Child, processor_seconds
from benchmarks.harness.testbed import Testbed

MODEL = "fleet"
_START_S = 600.0  # Max seconds until all workers or clients of a process are ready.
_WARM_S = 2.0  # Seconds of requests before the clock starts: scripts are loaded, and prompts get homes.
_SETTLE_S = 1.0  # Seconds from the last request to the start of a period without requests.
_DRAIN_S = 90.0  # Max seconds until a process has the results of its last requests, after the period.


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the program that apply to all fleets.

    Attributes:
        rate: requests per second of all clients together.
        seconds: length of each period.
        vocab_size: V.
        step_ms: simulated time of a worker's step.
        prompts: "fresh", "growing" or "mixed".
        in_flight: with a number, all clients together keep this many requests in flight, and `rate` does not apply.
        per_process: max workers or clients in one process.
        check_every: check the row of every n-th request.
        encoding: "f32" or "bf16", the encoding of rows.
        settings: settings of the workers (`WorkerSettings`) that differ from the defaults.
    """

    rate: float
    seconds: float
    vocab_size: int
    step_ms: float
    prompts: str
    in_flight: int
    per_process: int
    check_every: int
    encoding: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The result for one fleet.

    Attributes:
        plan: the options.
        workers: number of workers.
        clients: number of clients.
        workers_ready_s: seconds until all workers were ready.
        clients_ready_s: seconds until all clients were connected.
        idle_workers: the server's usage after the clients had closed their connections.
        idle: the server's usage while the clients were connected and sent no request.
        loaded: the server's usage during the requests.
        sent: number of requests.
        wrong: number of rows with a wrong value.
        failed: error -> number of requests.
        latencies_s: seconds from the time at which a request was due until its row was returned.
        late_s: seconds by which requests were sent late.
        workers_s: processor seconds of the processes with workers, during the requests.
        clients_s: processor seconds of the processes with clients, during the requests.
        connections: connections of the workers, and of the clients, to the server.
    """

    plan: Plan
    workers: int
    clients: int
    workers_ready_s: float
    clients_ready_s: float
    idle_workers: Usage
    idle: Usage
    loaded: Usage
    sent: int
    wrong: int
    failed: Counter[str]
    latencies_s: list[float]
    late_s: list[float]
    workers_s: float
    clients_s: float
    connections: tuple[int, int]

    @property
    def lost(self) -> int:
        """Number of requests that returned no row."""
        return self.sent - len(self.latencies_s)

    @property
    def rate(self) -> float:
        """Rows per second."""
        return len(self.latencies_s) / self.loaded.seconds

    def processor_us(self, *, net: bool) -> float:
        """Microseconds of the busiest master per request; `net`: without those that the idle fleet costs."""
        busiest, idle = self.loaded.busiest, self.idle.processor_s
        idle_s = idle[busiest] / self.idle.seconds * self.loaded.seconds if net else 0.0
        return 1e6 * (self.loaded.busiest_s - idle_s) / self.sent

    def commands(self, *, net: bool) -> dict[str, float]:
        """Name -> calls per request; `net`: without the calls of the idle fleet."""
        idle = per_second(self.idle) if net else {}
        names = self.loaded.calls.keys() | idle.keys()
        seconds = self.loaded.seconds
        return {name: (self.loaded.calls[name] - idle.get(name, 0.0) * seconds) / self.sent for name in names}

    @property
    def idle_worker(self) -> dict[str, float]:
        """Name -> calls per second of one idle worker."""
        return {name: calls / self.workers for name, calls in per_second(self.idle_workers).items()}

    @property
    def idle_client(self) -> dict[str, float]:
        """Name -> calls per second of one idle client."""
        workers, both = per_second(self.idle_workers), per_second(self.idle)
        return {name: (both.get(name, 0.0) - workers.get(name, 0.0)) / self.clients for name in both | workers}

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latencies."""
        return 1000 * float(np.percentile(self.latencies_s, percent)) if self.latencies_s else float("nan")

    @property
    def late_ms(self) -> float:
        """The 99th percentile of the times by which requests were sent late."""
        return 1000 * float(np.percentile(self.late_s, 99))

    @property
    def connections_per_worker(self) -> float:
        """Connections of a worker to all masters."""
        return self.connections[0] / self.workers

    @property
    def connections_per_client(self) -> float:
        """Connections of a client to all masters."""
        return self.connections[1] / self.clients

    @property
    def idle_worker_us(self) -> float:
        """Microseconds of the busiest master per second and idle worker."""
        return 1e6 * self.idle_workers.busiest_s / self.idle_workers.seconds / self.workers

    @property
    def idle_client_us(self) -> float:
        """Microseconds of the busiest master per second and idle client."""
        both_us = 1e6 * self.idle.busiest_s / self.idle.seconds
        return (both_us - self.workers * self.idle_worker_us) / self.clients


def per_second(usage: Usage) -> dict[str, float]:
    """Name -> calls per second of all workers and clients."""
    return {name: calls / usage.seconds for name, calls in usage.calls.items()}


def measure(testbed: Testbed, plan: Plan, workers: int, clients: int) -> Fleet:
    """Start a fleet, measure it without requests, with requests and without clients, and stop it.

    Raises:
        BenchmarkError: a process ended or did not respond.
    """
    counters = ServerCounters(testbed.url)
    with ExitStack() as stack:
        stack.callback(counters.close)
        backend = {"name": MODEL, "vocab_size": plan.vocab_size, "step_ms": plan.step_ms, "encoding": plan.encoding}
        hosts = _start(stack, testbed, "workers", _shares(workers, plan.per_process))
        workers_ready_s = _each(hosts, "start", {"redis": testbed.url, "backend": backend, "settings": plan.settings})
        programs = _start(stack, testbed, "clients", _shares(clients, plan.per_process))
        clients_ready_s = _each(programs, "start", {"redis": testbed.url, "model": MODEL, "prefix": "lmpool"})
        _load(programs, clients, plan, _WARM_S)
        idle = _idle(counters, plan.seconds)
        before, workers_before, clients_before = counters.read(), _processor_s(hosts), _processor_s(programs)
        results = _load(programs, clients, plan, plan.seconds)
        loaded = counters.read().since(before)
        workers_s, clients_s = _processor_s(hosts) - workers_before, _processor_s(programs) - clients_before
        of_both = counters.connections()
        for program, _ in programs:
            program.request("close", within=_START_S)
        idle_workers = _idle(counters, plan.seconds)
        of_workers = counters.connections() - len(counters.masters)
        connections = of_workers, of_both - len(counters.masters) - of_workers
        for host, _ in hosts:
            host.send("stop")
        for host, _ in hosts:
            host.receive(_START_S)
    return Fleet(
        plan,
        workers,
        clients,
        max(workers_ready_s),
        max(clients_ready_s),
        idle_workers,
        idle,
        loaded,
        sum(result["sent"] for result in results),
        sum(result["wrong"] for result in results),
        sum((Counter(result["failed"]) for result in results), Counter[str]()),
        [seconds for result in results for seconds in result["latencies_s"]],
        [seconds for result in results for seconds in result["late_s"]],
        workers_s,
        clients_s,
        connections,
    )


def _shares(number: int, per_process: int) -> list[int]:
    """Spread workers or clients evenly over as few processes as possible."""
    processes = ceil(number / per_process)
    return [len(range(at, number, processes)) for at in range(processes)]


def _start(stack: ExitStack, testbed: Testbed, module: str, shares: Sequence[int]) -> list[tuple[Child, int]]:
    return [(stack.enter_context(testbed.child(f"fleet.{module}")), share) for share in shares]


def _each(children: Sequence[tuple[Child, int]], do: str, arguments: dict[str, Any]) -> list[float]:
    for child, number in children:
        child.send(do, number=number, **arguments)
    return [child.receive(_START_S) for child, _ in children]


def _processor_s(children: Sequence[tuple[Child, int]]) -> float:
    return sum(processor_seconds(child.pid) for child, _ in children)


def _load(programs: Sequence[tuple[Child, int]], clients: int, plan: Plan, seconds: float) -> list[dict[str, Any]]:
    """Send requests from all client processes, each with its share of the rate."""
    for program, number in programs:
        arguments = {"seconds": seconds, "prompts": plan.prompts, "check_every": plan.check_every}
        if plan.in_flight:
            program.send("saturate", in_flight=max(number, plan.in_flight * number // clients), **arguments)
        else:
            program.send("load", rate=plan.rate * number / clients, **arguments)
    return [program.receive(seconds + _DRAIN_S) for program, _ in programs]


def _idle(counters: ServerCounters, seconds: float) -> Usage:
    """The server's usage while nothing is requested."""
    time.sleep(_SETTLE_S)
    before = counters.read()
    time.sleep(seconds)
    return counters.read().since(before)
