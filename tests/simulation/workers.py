"""The simulated workers: the package's `Worker` with a synthetic backend whose steps take drawn time, hang or raise."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from lmpool.broker.server import Server
from lmpool.errors import LMPoolError
from lmpool.protocol.job import decode_ids
from lmpool.protocol.keys import ModelKeys
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, Finished
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.simulation import threads
from tests.simulation.loop import Process
from tests.simulation.plan import BROKEN_WEIGHTS, FATAL_WEIGHTS
from tests.simulation.server import PATH

if TYPE_CHECKING:
    from tests.simulation.world import World

MODEL = "model"
"""Name of the model."""
MAX_DELIVERIES = WorkerSettings().max_deliveries
"""Deliveries after which a job is given up."""
STEP_TIMEOUT_LEASES = 4.0
"""Leases after which a worker gives up a step that does not end."""
URL = f"unix://{PATH}"
"""URL of the server."""

_MAX_RESTART_S = 2.0  # Max seconds until a worker that has ended starts again.
_MAX_LOAD_S = 1.0  # Max seconds of the load of a model, of an adapter or of weights.
_FOREVER_S = 1e6  # Seconds of a step that hangs: longer than any simulation.


class SimulatedWorker:
    """A worker that is started again when it ends.

    Attributes:
        process: its present process.
        name: its id in the pool, once it serves; "" before.
        code: exit code of its last process; None while it runs, and after SIGKILL.
        ready: what it serves, once it takes jobs (`serving`); None before, and while it changes its version.
        next_step: "hang", "raise" or "fail" (its prompts have no results): what its next step does.
        next_step_s: seconds of its next step; 0 to draw them.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.draw = world, number, Random(f"worker {world.plan.seed} {number}")
        self.process = Process("")
        self.worker: Worker | None = None
        self.name = ""
        self.code: int | None = None
        self.next_step, self.next_step_s, self.starts = "", 0.0, 0
        self.is_wanted = True
        self.ready: object = None

    def begin(self) -> asyncio.Event:
        """Start a process of the worker; returns an event for its end."""
        self.starts += 1
        self.process = process = Process(f"worker {self.number}.{self.starts}")
        self.next_step, self.next_step_s, self.name, self.code, self.worker = "", 0.0, "", None, None
        self.ready = None
        ended = asyncio.Event()
        process.on_kill.append(ended.set)
        self.world.spawn(process, self._run(process), on_end=partial(self.world.loop.kill, process))
        return ended

    async def supervise(self) -> None:
        """Run the worker until it is not wanted any more."""
        while self.is_wanted:
            await self.begin().wait()
            self.world.log(f"{self.process.name} has ended")
            await asyncio.sleep(self.draw.random() * _MAX_RESTART_S)

    async def _run(self, process: Process) -> None:
        plan = self.world.plan
        settings = WorkerSettings(
            lease_s=plan.lease_s,
            step_timeout_s=STEP_TIMEOUT_LEASES * plan.lease_s,
            queue_limit=plan.queue_limit,
            partitions=plan.partitions,
            shm_bytes=0,
            no_direct=True,
        )
        backend = SimulatedBackend(self)
        self.worker = Worker(Server(URL), backend, settings)
        try:
            await self.worker.run(self._on_ready)
            self.code = 0
        except LMPoolError as error:
            self.code = 1
            self.world.log(f"{process.name} ends: {type(error).__name__}: {error}")

    def _on_ready(self, _: ModelInfo) -> None:
        assert self.worker is not None
        self.name, self.ready = self.worker.worker_id, self.serving
        draining = self.world.oracle.draining
        if not any(other.info for other in self.world.workers if other is not self and other.process not in draining):
            self.world.served_at = self.world.loop.time()
            jobs = self.world.server.live().get(b"lmpool:{model}:jobs")
            self.world.streamed = len(jobs.value) if jobs is not None else 0
        self.world.has_served.set()

    @property
    def info(self) -> ModelInfo | None:
        """The info of the version that it serves."""
        return self.serving.info if self.serving is not None else None

    @property
    def keys(self) -> ModelKeys | None:
        """The keys of the partition that it serves."""
        return self.serving.heartbeat._model if self.serving is not None else None

    @property
    def serving(self) -> Any:
        """The package's `Serving` of this worker; None while the worker serves nothing."""
        return self.worker._serving if self.worker is not None and self.process.is_alive else None

    def drain(self) -> None:
        """SIGTERM. Before the worker exists, the signal ends the process."""
        if self.worker is None:
            self.world.loop.kill(self.process)
        else:
            self.world.loop.call_soon(self.worker.stop, context=self.world.loop.context_of(self.process))


class SimulatedBackend(SyntheticBackend):
    """See the module's docstring. It is also its settings object, because `open` needs the simulated worker."""

    kind = "synthetic"

    def __init__(self, worker: SimulatedWorker) -> None:
        plan = worker.world.plan
        self._worker, self.served_as, self.max_adapters = worker, MODEL, 2
        self.adapter_folders: dict[str, str] = {}
        super().__init__(
            SyntheticSettings(
                name=MODEL, vocab_size=plan.vocab_size, max_batch=plan.batch, max_adapters=2, encoding=plan.encoding
            )
        )

    def open(self) -> Backend:
        """See `BackendSettings.open`."""
        self._wait(_MAX_LOAD_S)
        return self

    def _wait(self, max_s: float) -> None:
        threads.sleep(self._worker.draw.random() * max_s)

    def step(self) -> Finished:
        """See `Backend.step`."""
        worker, plan = self._worker, self._worker.world.plan
        seconds = worker.next_step_s or worker.draw.uniform(*plan.step_s)
        how, worker.next_step, worker.next_step_s = worker.next_step, "", 0.0
        if how == "hang" and not worker.name:  # Nothing distinguishes a first load that hangs from a long one.
            how = ""
        jobs: list[Any] = list(self._jobs.values())[: self.batch]
        ids = [tuple(decode_ids(job.ids).tolist()) for job in jobs]
        worker.world.oracle.on_step(ids)
        held = [job.entries if isinstance(job, InFlightPrompt) else () for job in jobs]
        worker.world.oracle.on_last_deliveries(worker.process, held)
        pause_s = worker.draw.uniform(0, 3 * plan.lease_s) if how == "fail" else 0.0
        if how or seconds > plan.lease_s / 2:
            worker.world.disturbed_at = worker.world.loop.time() + seconds + pause_s
        if how == "raise":
            raise RuntimeError("the device is broken")
        if how == "fail":  # Other workers may take over the prompts before they fail.
            worker.world.loop.pause(worker.process, pause_s)
        threads.sleep(_FOREVER_S if how == "hang" else seconds)
        if any(prompt in worker.world.deadly for prompt in ids):
            self._end("computes a deadly prompt")
        finished = super().step()
        if how == "fail":
            worker.world.oracle.on_failed_step(worker, [job for job in jobs if isinstance(job, InFlightPrompt)])
        if reason := "the step has failed" if how else "the weights are broken" if self._seed == BROKEN_WEIGHTS else "":
            return Finished([], {job.digest: reason for job in jobs}, None)
        return finished

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`."""
        self._wait(_MAX_LOAD_S)
        return super().load_adapter(name, source)

    def load_weights(self, full: Path | None, sparse: Any, held: int) -> None:
        """See `ChangesWeights.load_weights`."""
        self._wait(_MAX_LOAD_S)
        super().load_weights(full, sparse, held)
        if self._seed == FATAL_WEIGHTS:
            self._worker.world.oracle.on_fatal_load()
            self._end("loads fatal weights")

    def _end(self, why: str) -> None:
        """End the process, as a crash does."""
        worker = self._worker
        worker.world.log(f"{worker.process.name} {why}")
        worker.world.disturbed_at = worker.world.loop.time()
        worker.world.loop.kill(worker.process)
        threads.sleep(_FOREVER_S)
