"""One simulation: the server, the workers and the clients of a plan, the faults, and the checks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.simulation import isolation, probes
from tests.simulation.clients import SimulatedClient, change_adapters, publish_versions
from tests.simulation.faults import FAULTS
from tests.simulation.file_run import FileRun
from tests.simulation.loop import PROCESS, Escaped, Process, SimulatedLoop, Stuck
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle
from tests.simulation.plan import Fault, Plan
from tests.simulation.server import SimulatedServer
from tests.simulation.supervision import Supervision
from tests.simulation.workers import SimulatedWorker

_CHECK_S = 1.0  # Virtual seconds between two checks.
_QUIET_LEASES = 6  # Leases without requests, after which all must be removed that is not needed.


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a simulation.

    Attributes:
        violations: what did not hold.
        digest: hash of the log.
        seconds: virtual seconds.
        outcomes: how requests ended -> number of requests.
        lines: the log.
    """

    violations: list[str]
    digest: str
    seconds: float
    outcomes: dict[str, int]
    lines: list[str]


class World:
    """See the module's docstring.

    Attributes:
        plan: the draws of the seed.
        deadly: prompts that end each worker that computes them.
        lost_keys: how often the server has lost keys.
        set_back_s: seconds by which the server's clock was set back.
        healed_at: virtual time at which the last fault was healed; None before.
        full_at: virtual time at which the server was last full.
        disturbed_at: virtual time at which a worker last computed a deadly prompt, hung or raised.
        restarting: held while the server restarts.
        all_sent: set when all clients have sent their requests, and all changes are over.
        served_at: virtual time at which a worker last began to serve while no other one served.
        streamed: number of prompts in the shared stream at this time.
        has_served: set when the first worker serves.
        adapters: number of adapters that were put in service.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(Random(f"loop {plan.seed}"))
        self.network = Network(self.loop)
        self.server = SimulatedServer(self.loop)
        self.oracle = Oracle(self)
        self.deadly = [(6, number) for number in range(plan.deadly)]
        self.lost_keys = self.adapters = self.streamed = 0
        self.set_back_s = 0.0
        self.healed_at: float | None = None
        self.full_at = self.disturbed_at = self.served_at = -math.inf
        self.lines: list[str] = []
        self.workers = [SimulatedWorker(self, number) for number in range(plan.workers)]
        self.file_run = FileRun(self)
        self.supervision = Supervision(self)
        share = -(-plan.requests // len(plan.clients))
        self.clients = [
            SimulatedClient(self, number, is_bulk=is_bulk, requests=min(share, plan.requests - share * number))
            for number, is_bulk in enumerate(plan.clients)
        ]
        self.folder = ""
        self._kept: list[Any] = []  # Tasks of processes that were killed: freeing them would run their cleanup.

    def run(self) -> Result:
        """Run the simulation; ends this process's normal life: see `isolation.begin`."""
        # Workers remove abandoned folders from the folder of temporary files: they must not see those of other pools.
        self.folder = tempfile.tempdir = tempfile.mkdtemp(prefix="lmpool-simulation-")
        os.environ["LMPOOL_SHM_DIR"] = self.folder
        logging.getLogger().handlers = [_LogHandler(self)]
        logging.getLogger().setLevel(logging.INFO)
        self.loop.set_exception_handler(self._on_error)
        probes.install(self.oracle)
        isolation.begin(self.loop, Random(f"secrets {self.plan.seed}"))
        try:
            self.loop.run_until_complete(self._main())
        except Stuck as error:
            self.oracle.violation(str(error))
        finally:
            shutil.rmtree(self.folder)
        digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()
        outcomes = dict(sorted(self.oracle.outcomes.items()))
        return Result(self.oracle.violations, digest, self.loop.time(), outcomes, self.lines)

    @property
    def used_version(self) -> int:
        """The version of the weights that new clients use."""
        models = self.server.live().get(b"lmpool:models")
        return int(models.value.get(b"model@", b"0")) if models is not None else 0

    @property
    def registered_versions(self) -> list[int]:
        """The numbers of the versions that are published, and not removed since."""
        versions = self.server.live().get(b"lmpool:{model}:versions")
        return [entry.ts for entry in versions.value._values_dict] if versions is not None else []

    def log(self, text: str) -> None:
        """Add a line to the log, without the name of the folder, which each run draws."""
        line = f"{self.loop.time():10.4f} {PROCESS.get().name}: {text}"
        self.lines.append(line.replace(self.folder, "FOLDER") if self.folder else line)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.oracle.violation(f"unhandled: {context['message']}: {type(error).__name__}: {error}")

    def spawn(self, process: Process, work: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Run the main coroutine of a process; `on_end` is called when it returns."""

        async def run() -> None:
            try:
                await work
            except (Exception, Escaped) as error:
                self.oracle.violation(f"{process.name} ended with {type(error).__name__}: {error}")
                logging.getLogger().exception("unexpected")
            on_end()

        task = self.loop.create_task(run(), context=self.loop.context_of(process))
        self._kept.append(task)

    def running_workers(self) -> list[SimulatedWorker]:
        """The workers whose process runs."""
        return [worker for worker in self.workers if worker.process.is_alive and worker.worker is not None]

    async def _main(self) -> None:
        plan, loop = self.plan, self.loop
        self.restarting, self.all_sent, self.has_served = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self.log(f"{plan}")
        await self.server.start()
        ups: Sequence[Supervision | SimulatedWorker] = [self.supervision] if plan.is_supervised else self.workers
        workers = [asyncio.create_task(worker.supervise()) for worker in ups]
        clients = [asyncio.create_task(client.supervise()) for client in self.clients]
        running = asyncio.create_task(self.file_run.supervise())
        changing = [
            asyncio.create_task(change_adapters(self, Random(f"adapters {plan.seed}"))),
            asyncio.create_task(publish_versions(self, Random(f"versions {plan.seed}"))),
        ]
        faults = [asyncio.create_task(self._inject(fault)) for fault in plan.faults]
        checking = asyncio.create_task(self._check())
        if faults:
            await asyncio.wait(faults)
        self.healed_at = loop.time()
        self.log("all faults are healed")
        await asyncio.wait([*changing, running])
        # Requests end in many places, so no event tells the end of the last one.
        while any(client.left for client in self.clients) or self.oracle.is_waiting:  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        self.all_sent.set()
        await asyncio.wait(clients)
        await asyncio.sleep((_QUIET_LEASES - 1) * plan.lease_s + 5 + self.set_back_s)
        # Workers compute the prompts of crashed workers one at a time, which can take longer than the quiet time.
        computed = -1
        while computed != (computed := self.oracle.steps.total()):  # noqa: ASYNC110
            await asyncio.sleep(max(plan.lease_s, 3 * plan.step_s[1]))
        self.oracle.check_end()
        checking.cancel()
        for supervised in ups:
            supervised.is_wanted = False
            supervised.drain()
        await asyncio.wait(workers, timeout=4 * plan.lease_s + 20)
        for worker in self.workers:
            if worker.process.is_alive:
                self.oracle.violation(f"{worker.process.name} does not end after SIGTERM")

    async def _inject(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        async with self.restarting:
            pass
        self.log(f"fault: {fault}")
        await FAULTS[fault.kind](self, Random(fault.seed))

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.oracle.check()


class _LogHandler(logging.Handler):
    """Adds the package's log to the simulation's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.log(f"{record.levelname}: {self.format(record)}")
