"""The adapters that a worker serves: where they may come from, how they are tried, keeping to what is registered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from lmpool.broker import scripts
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.replies import sentence
from lmpool.errors import AdapterChanged, LMPoolError, ModelMismatch, ProtocolError, SettingsError, WorkerError
from lmpool.protocol.adapter import MAX_ADAPTERS, Adapter, Offer, Registered, name_of, qualify, revision_of
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.settings import shown
from lmpool.workers.backends.checkpoint import is_on_hub
from lmpool.workers.backends.lora import adapter_folder
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

_MB = 1_000_000
_MIN_MEMORY_S = 600.0
_MAX_WORKERS = 4096
# One may have been ended by something else just then.
_ENOUGH = 2
_CHECK_S = 0.5
_START_CHECK_S = 0.1
_AGAIN_S = 5.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """Tells which folders and hub names are taken.

    Attributes:
        roots: folders in which adapters must lie, with all links followed; none for all that can be read.
        takes_hub: whether names on a hub are taken from others than whoever starts the worker.
        most_bytes: what the files of one adapter may take together.
    """

    roots: tuple[Path, ...]
    takes_hub: bool
    most_bytes: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> AdapterSources:
        """Those that a worker's settings allow."""
        roots = tuple(Path(root).resolve() for root in settings.adapter_root)
        return cls(roots, settings.adapter_hub, settings.adapter_mb * _MB)

    def place(self, source: str, *, is_own: bool = False) -> str:
        """What the backend is to load: a folder with all links followed, or the name on the hub.

        A folder that is not there is left to the backend to report.

        Args:
            source: folder or hub name.
            is_own: whoever starts the worker has named it.

        Raises:
            SettingsError: adapters from there are not taken.
        """
        if is_on_hub(source):
            if not self.takes_hub and not is_own:
                raise SettingsError(
                    f"adapters: {shown(source)} is no folder on this worker's machine, and names on a hub are not "
                    "taken: name a folder, or start all workers with --adapter-hub"
                )
            return source
        try:
            folder = Path(source).expanduser().resolve()
            self._check_root(folder, source)
            for file in folder.iterdir():
                self._check_root(file.resolve(), str(file))
            self.check_size(folder, source)
        except (FileNotFoundError, NotADirectoryError):
            return str(folder)
        except (OSError, RuntimeError) as error:  # Links in a circle; ~somebody who is not known here.
            raise SettingsError(f"adapters: {shown(source)} cannot be read: {error}") from error
        return str(folder)

    def check_size(self, folder: Path, source: str) -> None:
        """Refuse an adapter whose files are too large.

        Args:
            folder: where the adapter lies.
            source: what it was called.

        Raises:
            SettingsError: they take more than `most_bytes`.
        """
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if size > self.most_bytes:
            raise SettingsError(
                f"adapters: the files in {shown(source)} have {size / _MB:.0f} MB, and {self.most_bytes / _MB:.0f} MB "
                "are taken: start all workers with a larger --adapter-mb if there is the memory"
            )

    def _check_root(self, place: Path, named: str) -> None:
        """Refuse a file or folder outside of `roots`; `named` is what it was called."""
        if self.roots and not any(place.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots))
            raise SettingsError(
                f"adapters: {shown(named)} lies outside of {roots}: put it there with all its files, or start all "
                "workers with another --adapter-root"
            )


class AdapterTrials:
    """Tells the other workers which adapter this one is loading, so that a deadly one does not end them all.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        model: what the worker serves.
        worker_id: the worker's name.
        settings: of the worker.
    """

    def __init__(self, redis: Redis, keys: Keys, model: str, worker_id: str, settings: WorkerSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._model = keys.model(model)
        self._worker_id = worker_id
        self._lease_ms = int(settings.lease_s * 1000)
        # Longer than some loads that hang take until their workers end.
        self._memory_ms = int(1000 * max(_MIN_MEMORY_S, 4 * settings.step_timeout_s))
        self._noted_key = b""

    @asynccontextmanager
    async def offered(self, nonce: str, *, is_first: bool) -> AsyncIterator[bool]:
        """Around the load of an adapter that is offered; False when another worker tries it first: then it must wait.

        Args:
            nonce: names the offer.
            is_first: no worker has loaded it yet: then one tries it before the others do.

        Raises:
            SettingsError: a worker has not survived it.
        """
        key = self._model.adapter_trials(nonce)
        if (old := await self._begin(key, "alone" if is_first else "any")) is not None:
            if gone := await self._gone(old):
                raise SettingsError(
                    f"adapters: the worker {gone[0]} ended or fell silent while it loaded it, so no other does: look "
                    "at that worker's log, mend the adapter, and add it again"
                )
            if is_first:
                yield False
                return
            await self._begin(key, "anyway")
        async with self._noted_until_told():
            yield True

    @asynccontextmanager
    async def in_service(self, qualified: str) -> AsyncIterator[None]:
        """Around the load of an adapter that is in service ("name@revision").

        What other hosts have seen does not count: they may lack what this one has.

        Raises:
            SettingsError: two workers of this host have not survived it lately.
        """
        key, gone = self._model.adapter_trials(qualified), list[str]()
        if (old := await self._begin(key, "any")) is not None:
            gone = [worker for worker in await self._gone(old) if _host(worker) == _host(self._worker_id)]
            if len(gone) >= _ENOUGH:
                raise SettingsError(
                    f"adapters: {qualified!r} is in service, and the workers {', '.join(gone)} of this host ended or "
                    f"fell silent while they loaded it: look at their logs, then mend or remove it; it is tried again "
                    f"{self._memory_ms // 60_000} minutes after the last try"
                )
            await self._begin(key, "anyway")
        async with self._noted_until_told(*gone):
            yield

    async def leave(self, *, is_broken: bool) -> None:
        """The worker ends: over what it loads at present, if its backend is broken."""
        if not self._noted_key:
            return
        if is_broken:
            await self._redis.hset(self._noted_key, self._worker_id, 0)
        else:
            await self._redis.hdel(self._noted_key, self._worker_id)

    async def _begin(self, key: bytes, how: Literal["alone", "any", "anyway"]) -> list[str] | None:
        """Note a load; when that is refused, the workers that should have ended theirs by now."""
        args = [self._worker_id, how, self._lease_ms, self._memory_ms, _MAX_WORKERS]
        is_noted, *old = await scripts.TRIAL(self._redis, [key], args)
        if is_noted:
            self._noted_key = key
            return None
        return [worker.decode("utf-8", "replace") for worker in old]

    @asynccontextmanager
    async def _noted_until_told(self, *others: str) -> AsyncIterator[None]:
        """Take the note back when the load has ended, not when the worker has; after a success others' notes too."""
        key = self._noted_key
        try:
            yield
        except SettingsError:
            await self._redis.hdel(key, self._worker_id)
            self._noted_key = b""
            raise
        await self._redis.hdel(key, self._worker_id, *others)
        self._noted_key = b""

    async def _gone(self, workers: list[str]) -> list[str]:
        """Those workers that have no heartbeat any more."""
        return [worker for worker in workers if not await self._redis.exists(self._keys.worker(worker))]


class _Refusal(NamedTuple):
    """An adapter that is in service and cannot be loaded.

    Attributes:
        why: the reason.
        pause: seconds from the last try to the next.
        again: the event loop's time of the next.
    """

    why: str
    pause: float
    again: float


class AdapterKeeper:
    """Has the backend serve the adapters that the registry names, no others.

    Args:
        registry: the model's adapters, in Redis.
        engine_thread: the backend.
        loaded: what the backend has loaded by itself: "name@revision" -> source.
        sources: where others may come from.
        trials: tells other workers what is being loaded.
        on_change: called when `heartbeat_fields` has changed.
        others: reads a field of the other live workers' heartbeats: worker id -> value, "" where there is none.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        engine_thread: EngineThread,
        loaded: Mapping[str, str],
        sources: AdapterSources,
        trials: AdapterTrials,
        on_change: Callable[[], Awaitable[object]],
        others: Callable[[str], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._registry = registry
        self._engine_thread = engine_thread
        self._sources = sources
        self._trials = trials
        self._on_change = on_change
        self._others = others
        self._loaded = dict(loaded)
        self._seen = Registered("", {}, {})
        self._in_service: dict[str, Adapter] = {}
        self._offered: dict[str, tuple[str, str, str]] = {}  # Name -> nonce, revision, why it cannot be loaded.
        self._refused: dict[str, _Refusal] = {}  # Of those in service.
        self._waiting: list[InFlightPrompt] = []  # For the next check of the registry.
        self._wake = asyncio.Event()

    async def start(self) -> None:
        """Register what the backend was started with, and load what else is in service.

        Raises:
            ModelMismatch: an adapter of that name with other weights is in service.
            SettingsError: an adapter that is in service cannot be loaded, or other workers serve the model without one
                that the backend was started with.
        """
        own = {name_of(adapter): Adapter(source, revision_of(adapter)) for adapter, source in self._loaded.items()}
        registry = self._registry
        known = await registry.read()
        await self._check_others(own.keys() - (known.adapters if known.owner == registry.fingerprint else {}))
        while own.keys() - (known := await self._registry_with(own)).adapters.keys():
            if len(known.adapters.keys() | own.keys()) > MAX_ADAPTERS:
                raise SettingsError(
                    f"adapters: the model has {len(known.adapters)} already, and may have {MAX_ADAPTERS}: start with "
                    "less, or remove some first"
                )
            name = min(own.keys() - known.adapters.keys())
            generations = (await self._others("adapters_seen")).values()
            # A worker that has seen another state is about to write that down, or to follow; "" has just started too.
            if any(seen not in ("", str(known.generation)) for seen in generations):
                await asyncio.sleep(_START_CHECK_S)
            else:
                await registry.register(name, own[name], known)
        for name, adapter in own.items():
            served = known.adapters.get(name)
            if served is not None and served.revision != adapter.revision:
                raise ModelMismatch(
                    f"adapters: {name!r} is in service with other weights (revision {served.revision} of "
                    f"{served.source}, not {adapter.revision}): replace it with `lmpool adapters add` first, or give "
                    "yours another name"
                )
        for name, adapter in known.adapters.items():
            if qualify(name, adapter.revision) not in self._loaded:
                async with self._trials.in_service(qualify(name, adapter.revision)):
                    await self._load(name, adapter.source, adapter.revision)
                await self._on_change()
        self._seen, self._in_service = known, known.adapters
        await self._on_change()

    async def _registry_with(self, own: Mapping[str, Adapter]) -> Registered:
        """The model's registry; one with its own adapters is made where there is none."""
        registry = self._registry
        while (known := await registry.read()).owner != registry.fingerprint:
            # The info is ours by now, so what is there are the adapters of other weights.
            await registry.create(own, known)
        return known

    async def _check_others(self, names: Set[str]) -> None:
        """Refuse to put adapters in service that not every worker has: jobs that name them go to all.

        What the others have loaded decides, for of workers that start together none may have registered anything yet.
        """
        if not names:
            return
        wanted = [adapter for adapter in self._loaded if name_of(adapter) in names]
        for worker, loaded in (await self._others("adapters_loaded")).items():
            for adapter in wanted:
                if adapter not in _listed(loaded):
                    name, source = name_of(adapter), self._loaded[adapter]
                    raise SettingsError(
                        f"adapters: {name!r} is not in service, and the worker {worker} serves the model without it: "
                        f"start without it and have all workers load it (`lmpool adapters add {name} {source}`), or "
                        "stop the others first and start them with it too"
                    )

    async def leave(self, *, is_broken: bool) -> None:
        """The worker ends: over what it loads at present, if its backend is broken."""
        await self._trials.leave(is_broken=is_broken)

    async def run(self) -> None:
        """Follow the registry; never returns."""
        while True:
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                waiting = len(self._waiting)
                await self._follow()
            except (RedisError, OSError, LMPoolError) as error:
                why = error if isinstance(error, LMPoolError) else sentence(error)
                _log.warning("cannot look for adapters, will try again: %s", why)
                await asyncio.sleep(_CHECK_S)
                if not isinstance(error, (ProtocolError, ResponseError)):
                    continue
                # The server has answered, but with no registry: jobs must not wait, and take up capacity, until
                # somebody mends it.
            # Jobs that came since had better wait for the next check.
            jobs, self._waiting = self._waiting[:waiting], self._waiting[waiting:]
            if jobs:
                self._engine_thread.submit(jobs)

    def served_among(self, jobs: Sequence[InFlightPrompt]) -> Sequence[InFlightPrompt]:
        """The jobs that the backend can have now; the others get to it after the next check of the registry."""
        if missing := [job for job in jobs if job.adapter and job.adapter not in self._loaded]:
            self._waiting += missing
            self._wake.set()
            return [job for job in jobs if job not in missing]
        return jobs

    def failure_of(self, adapter: str) -> Failure:
        """Why a job that names an adapter which the backend does not have ends."""
        if adapter in self._refused:
            text = f"a worker that serves the model cannot load the adapter {name_of(adapter)!r}"
            return Failure(WorkerError.__name__, f"{text}: {self._refused[adapter].why}")
        return Failure(AdapterChanged.__name__, f"the adapter {adapter!r} is not in service any more")

    def heartbeat_fields(self) -> dict[str, str]:
        """What clients that load and remove adapters must know, for the heartbeat."""
        served = [qualify(name, adapter.revision) for name, adapter in self._in_service.items()]
        return {
            "adapters": json.dumps([adapter for adapter in served if adapter in self._loaded]),
            "adapters_seen": str(self._seen.generation),
            "adapters_loaded": json.dumps(list(self._loaded)),
            "adapter_offers": json.dumps(self._offered),
        }

    async def _follow(self) -> None:
        """Read the registry, load what is new and drop what is gone."""
        registry, before = self._registry, self.heartbeat_fields()
        while (known := await registry.read()).owner != registry.fingerprint or known.forgets(self._seen):
            await self._write_back(known)
        self._seen = known
        for name, adapter in known.adapters.items():
            await self._serve(name, adapter)
        for name, offer in known.offers.items():
            await self._try(name, offer)
        self._in_service = known.adapters
        self._offered = {name: self._offered[name] for name in known.offers if name in self._offered}
        self._drop_others(known)
        if self.heartbeat_fields() != before:
            await self._on_change()

    async def _write_back(self, known: Registered) -> None:
        """Write down what this worker has seen, for the server has forgotten it."""
        if known.owner not in ("", self._registry.fingerprint):
            # Others may serve the model's name by now: a heartbeat finds out, and raises then.
            await self._on_change()
        has_any = bool(self._seen.adapters or known.adapters)
        if await self._registry.write_back(self._seen, known) and has_any:
            _log.warning("the server had forgotten changes of the adapters: they are written down again")

    async def _serve(self, name: str, adapter: Adapter) -> None:
        """Load an adapter that is in service, unless it is loaded or has just been refused."""
        qualified, loop = qualify(name, adapter.revision), asyncio.get_running_loop()
        refused = self._refused.get(qualified)
        if qualified in self._loaded or (refused is not None and loop.time() < refused.again):
            return
        try:
            async with self._trials.in_service(qualified):
                await self._load(name, adapter.source, adapter.revision)
        except SettingsError as error:
            _log.warning("the adapter %r is in service and cannot be loaded: %s", name, error)
            # From now on: loading may take longer than the pause, and prompts are computed in between only.
            pause = min(_LONGEST_PAUSE_S, 2 * refused.pause) if refused else _AGAIN_S
            self._refused[qualified] = _Refusal(str(error), pause, loop.time() + pause)
        else:
            self._refused.pop(qualified, None)

    async def _try(self, name: str, offer: Offer) -> None:
        """Load an adapter that is offered, and note the outcome."""
        if (outcome := self._offered.get(name)) is not None and outcome[0] == offer.nonce:
            return
        try:
            async with self._trials.offered(offer.nonce, is_first=not offer.revision) as is_our_turn:
                if not is_our_turn:
                    return
                revision = await self._load(name, offer.source, offer.revision)
        except SettingsError as error:
            _log.warning("cannot load the adapter %r: %s", name, error)
            self._offered[name] = (offer.nonce, "", str(error))
            return
        self._offered[name] = (offer.nonce, revision, "")
        if not offer.revision:
            await self._registry.fill(name, offer, revision)

    async def _load(self, name: str, source: str, expected: str) -> str:
        """Load an adapter; returns its revision.

        Raises:
            SettingsError: it cannot be loaded, or has another revision than on the other workers.
        """
        place = await asyncio.to_thread(self._sources.place, source)
        # In the backend's thread a download would keep prompts waiting. Backends that take names on the hub have
        # imported its package.
        if "huggingface_hub" in sys.modules and is_on_hub(source):
            folder = await asyncio.to_thread(adapter_folder, source)
            await asyncio.to_thread(self._sources.check_size, folder, source)
            place = str(folder)
        try:
            revision = await self._engine_thread.load_adapter(name, place)
        except SettingsError as error:
            if is_on_hub(source) or await asyncio.to_thread(os.path.lexists, place):
                raise
            # Whoever reads it may be in another folder, or on another machine, and have that folder there. A program
            # sends the full path of a folder that it finds.
            where = f"{shown(source)} must be a folder on the worker's machine"
            if not source.startswith(("/", "~")):
                where += ": the program did not find it either, and the worker looks for it where it was started"
            raise SettingsError(f"{error}; {where}") from error
        self._loaded[qualify(name, revision)] = source
        if expected and revision != expected:
            raise SettingsError(
                f"adapters: {source} has other weights on this worker (revision {revision}) than on others "
                f"({expected}): has it changed? `lmpool adapters add` loads it anew"
            )
        _log.info("serving the adapter %r from %s (revision %s)", name, source, revision)
        return revision

    def _drop_others(self, known: Registered) -> None:
        """Drop adapters that are neither in service nor offered."""
        wanted = {qualify(name, adapter.revision) for name, adapter in known.adapters.items()}
        wanted |= {qualify(name, revision) for name, (_, revision, _) in self._offered.items()}
        for adapter in [adapter for adapter in self._loaded if adapter not in wanted]:
            _log.info("dropping the adapter %r", adapter)
            del self._loaded[adapter]
            self._engine_thread.drop_adapter(adapter)
        self._refused = {adapter: why for adapter, why in self._refused.items() if adapter in wanted}


def _listed(field: str) -> list[object]:
    """The adapters that a field of a heartbeat lists; none where it is no such list."""
    try:
        listed = json.loads(field or "[]")
    except (ValueError, RecursionError):
        return []
    return listed if isinstance(listed, list) else []


def _host(worker_id: str) -> str:
    """The host of a worker; ids end with the process and random characters."""
    return worker_id.rsplit("-", 2)[0]
