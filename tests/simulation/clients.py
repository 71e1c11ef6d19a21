"""The simulated clients: producers of the package that send requests of every kind and check each result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError, WeightsRefused
from lmpool.producer import Producer
from lmpool.protocol.picks import Sampling, sample, top
from tests.simulation.loop import Process
from tests.simulation.workers import MODEL, URL

if TYPE_CHECKING:
    from tests.simulation.world import World

LONG_S = 200.0
"""Deadline of requests that must get a result."""
ADAPTER = "poet"
"""Name of the adapter that is replaced."""

SHARED_FIRST = 1
"""First token of prompts that several clients request."""

_WITHDRAWN_S = 1.0  # Seconds in which the cancellation of a request reaches the server.
_PUBLISH_S = 60.0  # Deadline of a publication: if the server loses the version, the publication ends only then.
_SHARED = 30  # Prompts that all clients request in the same seconds.
_EPOCH_S = 2.0  # Seconds after which they request others, which no cache has.
_BATCH = 6  # Prompts of a batch, at most one less.
_GENERATED = 4  # Max tokens of a continuation.
_MAX_PENDING = 40  # Requests of a client that wait at once.
_MAX_RESTART_S = 1.0  # Max seconds until a client that has ended starts again.
_HANG_UPS = 0.2  # Part of the clients that close their producer while requests wait, and start again.

Row = NDArray[np.float32]
Check = Callable[[Callable[[Sequence[int]], Row]], bool]


@dataclass(eq=False)
class Request:
    """One request.

    Attributes:
        client: the client that sent it.
        kind: one of `KINDS`.
        prompts: the prompts whose rows it needs.
        timeout: seconds of its deadline.
        ask: sends it, and returns for each part of the result a function that compares it with the rows of a version.
        cancel_s: seconds after which the caller is cancelled; 0 for never.
        began: virtual time at which it was sent.
        oldest: the oldest version of the weights that it may see.
        steps: number of prompts of other clients in all steps before it.
        ahead: number of prompts that its client waits for, with its own.
        had_model: whether its client had found the model.
    """

    client: SimulatedClient
    kind: str
    prompts: list[tuple[int, ...]]
    timeout: float
    ask: Callable[[dict[str, Any]], Awaitable[list[Check]]]
    cancel_s: float = 0.0
    began: float = 0.0
    oldest: int = 0
    steps: int = 0
    ahead: int = 0
    had_model: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_long(self) -> bool:
        """Whether it must get a result."""
        return self.timeout == LONG_S

    def __str__(self) -> str:
        return f"{self.kind} of {[list(prompt) for prompt in self.prompts[:2]]} by {self.client.process.name}"


class SimulatedClient:
    """A client that is started again when it is killed.

    Attributes:
        process: its present process.
        left: number of requests that it has not begun.
        is_closing: whether it closes its producer while requests wait.
    """

    def __init__(self, world: World, number: int, *, is_bulk: bool, requests: int) -> None:
        self.world, self.number, self.is_bulk, self.left = world, number, is_bulk, requests
        self.draw = Random(f"client {world.plan.seed} {number}")
        self.process = Process("")
        self.producer: Producer | None = None
        self.is_closing = self._has_burst = False
        self.starts, self._count = 0, 0
        # Each deadly prompt is sent once, because it ends up to three workers.
        self._deadly = world.deadly[number :: len(world.plan.clients)]
        self._contexts: list[list[int]] = []
        self._is_over = False

    async def supervise(self) -> None:
        """Run the client until it has sent all its requests and is closed."""
        while not self._is_over:
            self.starts += 1
            self.process = process = Process(f"client {self.number}.{self.starts}")
            ended = asyncio.Event()
            process.on_kill.append(ended.set)
            self.is_closing = False
            self.world.spawn(process, self._run(), on_end=ended.set)
            await ended.wait()
            self.world.loop.kill(process)
            self.world.oracle.drop(self)
            await asyncio.sleep(self.draw.random() * _MAX_RESTART_S)

    async def _run(self) -> None:
        draw, plan = self.draw, self.world.plan
        cache = draw.choice((0, 2_000, 1_000_000))
        priority: Any = "bulk" if self.is_bulk else "interactive"
        # A client that fails at once if no worker serves must not take a pool with one dead worker for such a pool.
        drains = sum(fault.kind == "drain worker" for fault in plan.faults)
        is_patient = not plan.is_gentle or bool(plan.deadly) or drains >= plan.workers or draw.random() < 0.5
        if not is_patient:
            await self.world.has_served.wait()
        # Clients that keep no answers do not agree with other clients on the partition of a query.
        keeps = draw.random() < 0.7 or (plan.is_even and plan.partitions > 1)
        self.producer = producer = Producer(
            MODEL, redis=URL, cache_bytes=cache, priority=priority, timeout=LONG_S, keep_answers=keeps,
            when_absent="wait" if is_patient else "raise",
        )  # fmt: skip
        hangs_up_at = draw.randrange(self.left) if self.left and draw.random() < _HANG_UPS else -1
        tasks = set[asyncio.Task[None]]()
        while self.left > 0:
            self.left -= 1
            if self.left == hangs_up_at:  # The program ends while it waits for results.
                self.is_closing = True
                waits = self._waits()
                await producer.close()
                self.world.oracle.after_end(self, waits)
                await asyncio.wait(tasks or [asyncio.create_task(asyncio.sleep(0))])
                return
            kind = draw.choices(list(plan.weights), list(plan.weights.values()))[0]
            if self.number == 0 and plan.bursts and not self._has_burst:
                kind, self._has_burst = "burst", True
            tasks.add(asyncio.create_task(self._send(self._draw_request(kind))))
            await asyncio.sleep(draw.expovariate(1 / plan.pause_s))
            while len(tasks) >= _MAX_PENDING:
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks:
            await asyncio.wait(tasks)
        await self.world.all_sent.wait()
        if self._session is not None and (kept := len(self._session._requests)):
            self.world.oracle.violation(f"{self.process.name} keeps {kept} requests that have ended")
        await producer.close()
        self._is_over = True

    def _waits(self) -> dict[bytes, bytes]:
        """Waiting key of each pending request -> this client's reply key in the request's partition."""
        if (session := self._session) is None:
            return {}
        requests = [request for request in session._requests if request.partition is not None]
        parts = [session._connections.partitions[request.partition] for request in requests]
        return {
            part.keys.waiting + request.prompt.digest: part.reply for part, request in zip(parts, requests, strict=True)
        }

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a caller; soon after, the server must not know of the prompts for which only this caller waits."""
        before, version = self._waits(), self.version

        def check(_: object) -> None:
            after = self._waits()
            ended = {key: reply for key, reply in before.items() if key not in after} if task.cancelled() else {}
            task.get_loop().call_later(_WITHDRAWN_S, self._check_withdrawn, ended, version)

        task.add_done_callback(check)
        task.cancel()

    def _check_withdrawn(self, ended: dict[bytes, bytes], version: int, *, is_last: bool = False) -> None:
        if self.version != version:  # Clients withdraw nothing from the queue of a version that they leave.
            return
        again = self._waits()
        left = {key: reply for key, reply in ended.items() if key not in again}
        if is_last:
            self.world.oracle.after_end(self, left)
        elif left:  # Another request for the prompt may have ended just now: check once more.
            check = partial(self._check_withdrawn, left, version, is_last=True)
            asyncio.get_running_loop().call_later(_WITHDRAWN_S, check)

    async def _send(self, request: Request) -> None:
        oracle = self.world.oracle
        if self.world.adapters and request.kind == "adapter":
            request.options["adapter"] = ADAPTER
        oracle.begin(request)
        task = asyncio.ensure_future(request.ask({"timeout": request.timeout, **request.options}))
        if request.cancel_s:
            asyncio.get_running_loop().call_later(request.cancel_s, self._cancel, task)
        try:
            checks = await task
        except LMPoolError as error:
            oracle.end_failed(request, error)
        except asyncio.CancelledError:
            if not request.cancel_s or self.world.loop.time() < request.began + request.cancel_s:
                raise
            oracle.end_cancelled(request)
        else:
            oracle.end(request, checks)

    @property
    def _session(self) -> Any:
        return self.producer._sessions.session if self.producer is not None else None

    @property
    def version(self) -> int:
        """The version of the weights that it uses; 0 before it has found the model."""
        return self._session.info.version if self._session is not None else 0

    @property
    def has_model(self) -> bool:
        """Whether it has found the model."""
        return self._session is not None

    # Requests

    def _draw_request(self, kind: str) -> Request:
        draw, plan, producer = self.draw, self.world.plan, self.producer
        assert producer is not None
        timeout = draw.uniform(0.02, 1.0) if draw.random() < plan.short else LONG_S
        cancel_s = draw.uniform(0.0, 1.0) if draw.random() < plan.cancelled else 0.0
        prompts, ask, *oldest = getattr(self, f"_{kind}")(producer)
        return Request(self, kind, [tuple(prompt) for prompt in prompts], timeout, ask, cancel_s, oldest=sum(oldest))

    def _prompt(self) -> list[int]:
        """A prompt: often one that other clients request too, sometimes one that ends workers."""
        draw = self.draw
        if self._deadly and draw.random() < 0.05:
            return list(self._deadly.pop())
        if draw.random() < 0.4:
            size = self.world.plan.vocab_size
            return [SHARED_FIRST, draw.randrange(_SHARED) % size, int(self.world.loop.time() / _EPOCH_S) % size]
        return self._new()

    def _new(self, first: int = 2) -> list[int]:
        size = self.world.plan.vocab_size
        self._count += 1
        return [first, self.number, self._count // size % size, self._count % size]

    def _row(self, producer: Producer) -> Any:
        return self._row_of(producer, self._prompt())

    def _fresh(self, producer: Producer) -> Any:
        return self._row_of(producer, self._new(), fresh=True)

    def _row_of(self, producer: Producer, prompt: list[int], **more: Any) -> Any:
        async def ask(options: dict[str, Any]) -> list[Check]:
            row = await producer.logprobs(prompt, **options, **more)
            return [lambda row_of: _same(row, row_of(prompt))]

        return [prompt], ask

    def _batch(self, producer: Producer, prompts: list[list[int]] | None = None) -> Any:
        wanted = prompts or [self._prompt() for _ in range(self.draw.randrange(1, _BATCH))]

        async def ask(options: dict[str, Any]) -> list[Check]:
            rows = await producer.batch_logprobs(wanted, **options)
            return [partial(_is_row, row, ids) for row, ids in zip(rows, wanted, strict=True)]

        return wanted, ask

    def _burst(self, producer: Producer) -> Any:
        return self._batch(producer, [self._new() for _ in range(self.world.plan.bursts)])

    def _context(self, producer: Producer) -> Any:
        """One row for each of some contexts that grow by a token each time, as in a particle filter."""
        if not self._contexts or len(self._contexts[0]) > 30:
            self._contexts = [self._new(3) for _ in range(3)]
        asked = [list(context) for context in self._contexts]
        for context in self._contexts:
            context.append(self.draw.randrange(self.world.plan.vocab_size))
        return self._batch(producer, asked)

    def _entries(self, producer: Producer) -> Any:
        prompt, targets = self._prompt(), [self.draw.randrange(self.world.plan.vocab_size) for _ in range(3)]

        async def ask(options: dict[str, Any]) -> list[Check]:
            entries = await producer.logprobs(prompt, targets=targets, **options)
            return [lambda row_of: _same(entries, row_of(prompt)[targets])]

        return [prompt], ask

    def _topk(self, producer: Producer) -> Any:
        prompt, k = self._prompt(), self.draw.randrange(1, 5)

        async def ask(options: dict[str, Any]) -> list[Check]:
            got = await producer.topk(prompt, k, **options)
            return [lambda row_of: _same(got.values, top(row_of(prompt), k).values)]

        return [prompt], ask

    def _sample(self, producer: Producer) -> Any:
        prompt, how = self._prompt(), Sampling(self.draw.choice((0.0, 0.7, 1.0)), 1.0, self.draw.getrandbits(32))

        async def ask(options: dict[str, Any]) -> list[Check]:
            token = await producer.sample(prompt, **how._asdict(), **options)
            return [lambda row_of: token == sample(row_of(prompt), how)]

        return [prompt], ask

    def _score(self, producer: Producer) -> Any:
        prompt = self._new()
        added = [self.draw.randrange(self.world.plan.vocab_size) for _ in range(self.draw.randrange(1, 4))]

        async def ask(options: dict[str, Any]) -> list[Check]:
            got = await producer.score(prompt, added, **options)

            def is_right(row_of: Callable[[Sequence[int]], Row]) -> bool:
                wanted = [row_of([*prompt, *added[:at]])[token] for at, token in enumerate(added)]
                return _same(got, np.array(wanted, np.float32))

            return [is_right]

        return [prompt], ask

    def _generate(self, producer: Producer) -> Any:
        prompt, seed = self._new(4), self.draw.getrandbits(32)

        async def ask(options: dict[str, Any]) -> list[Check]:
            got = await producer.generate(prompt, _GENERATED, seed=seed, **options)

            def is_right(row_of: Callable[[Sequence[int]], Row]) -> bool:
                ids = list(prompt)
                for at in range(_GENERATED):
                    ids.append(sample(row_of(ids), Sampling(1.0, 1.0, seed + at)))
                return [int(token) for token in got[0].ids] == ids[len(prompt) :]

            return [is_right]

        return [prompt], ask

    def _adapter(self, producer: Producer) -> Any:
        return self._row_of(producer, self._prompt())

    def _version(self, producer: Producer) -> Any:
        """A row of at least the version that was published last."""
        prompt, version = self._prompt(), self.world.oracle.served

        async def ask(options: dict[str, Any]) -> list[Check]:
            row = await producer.logprobs(prompt, min_version=version, **options)
            return [lambda row_of: _same(row, row_of(prompt))]

        return [prompt], ask, version


async def change_adapters(world: World, draw: Random) -> None:
    """Put adapters in service, one after the other, under one name."""
    for number in range(world.plan.changes[0]):
        await asyncio.sleep(draw.uniform(0, 10))
        source = Path(world.folder, f"adapter-{number}")
        source.mkdir()
        (source / "weights").write_text(f"adapter {number}")
        producer = Producer(MODEL, redis=URL, when_absent="wait", timeout=LONG_S)
        change = world.oracle.adapter_begins(source)
        try:
            change.revision = await producer.add_adapter(ADAPTER, source)
            change.ended = world.loop.time()
            world.adapters += 1
        except LMPoolError as error:
            world.oracle.end_of_change(error)
        await producer.close()


async def publish_versions(world: World, draw: Random) -> None:
    """Publish versions; the next publication may begin `Plan.overlap_s` after the previous one began."""
    publishing = list[asyncio.Task[None]]()
    await world.has_served.wait()
    for number in range(1, 1 + world.plan.changes[1]):
        await asyncio.sleep(draw.uniform(0, world.plan.gap_s))
        task = asyncio.create_task(_publish(world, number))
        publishing.append(task)
        await asyncio.wait([task], timeout=world.plan.overlap_s)
    await asyncio.gather(*publishing)


async def _publish(world: World, number: int) -> None:
    producer = Producer(MODEL, redis=URL, when_absent="wait", timeout=_PUBLISH_S)
    is_bad = number in world.plan.bad_versions
    world.oracle.newest = world.oracle.newest if is_bad else number
    try:
        weights = world.plan.bad_versions.get(number, seed_of(number))
        await producer.publish_weights({"seed": np.array(weights)}, number)
        # The publication also returns when a worker serves a later version.
        if is_bad and world.oracle.newest < number:
            world.oracle.violation(f"version {number} is served, although its weights are not those of a model")
        world.oracle.served = max(world.oracle.served, 0 if is_bad else number)
    except WeightsRefused as error:
        if not is_bad:
            world.oracle.end_of_change(error)
    except LMPoolError as error:
        world.oracle.end_of_change(error)
    await producer.close()


def seed_of(version: int) -> int:
    """The weights of a version: the seed of its rows."""
    return 1000 + version if version else 0


def _is_row(row: Row, ids: Sequence[int], row_of: Callable[[Sequence[int]], Row]) -> bool:
    return _same(row, row_of(ids))


def _same(got: Any, expected: Row) -> bool:
    return bool(got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes())
