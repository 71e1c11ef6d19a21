"""The adapters that a worker has loaded: loaded when a job first needs them, evicted when others need their place."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.replies import sentence
from lmpool.errors import AdapterChanged, AdapterRefused, ProtocolError, SettingsError, WorkerError
from lmpool.protocol.adapter import CHECK_PREFIX, Adapter, name_of, qualify, revision_of
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.settings import shown
from lmpool.workers.backends.checkpoint import is_on_hub
from lmpool.workers.backends.lora import adapter_folder, content_digest
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.execution.in_flight import InFlight, InFlightPrompt
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

_MB = 1_000_000  # Bytes of a megabyte, the unit of --adapter-mb.
_QUARANTINE_MS = 600_000  # How long the note of a load stays; long enough for an operator to read the worker's log.
_REFUSED_S = 5.0  # Seconds before an adapter that could not be loaded is tried again.
_RETRY_S = 0.5  # Seconds between two tries to read the registry from a server that does not answer.
_IN_USE_CHECK_S = 0.01  # Seconds between two checks whether the jobs of an adapter to be evicted have finished.


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """The places that a worker loads adapters from.

    Attributes:
        roots: adapters must lie in one of these folders, after all links are followed; empty allows every folder.
        takes_hub: accept hub names from clients; the operator's own `--adapters` may always be hub names.
        max_bytes: max size of the files of one adapter together.
    """

    roots: tuple[Path, ...]
    takes_hub: bool
    max_bytes: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> AdapterSources:
        """The places that a worker's settings allow."""
        roots = tuple(Path(root).resolve() for root in settings.adapter_root)
        return cls(roots, settings.adapter_hub, settings.adapter_mb * _MB)

    def place(self, source: str, *, is_own: bool = False) -> str:
        """The folder of a source, with all links followed, or the hub name.

        A folder that does not exist is left to the backend to report.

        Args:
            source: folder or hub name.
            is_own: the source is one of the operator's own `--adapters`.

        Raises:
            SettingsError: this worker loads no adapters from there.
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
        except (OSError, RuntimeError) as error:  # A circle of links; ~user of an unknown user.
            raise SettingsError(f"adapters: {shown(source)} cannot be read: {error}") from error
        return str(folder)

    def check_size(self, folder: Path, source: str) -> None:
        """Refuse an adapter whose files have more than `max_bytes`; `source` names it in the error.

        Raises:
            SettingsError: they have.
        """
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if size > self.max_bytes:
            raise SettingsError(
                f"adapters: the files in {shown(source)} have {size / _MB:.0f} MB, and {self.max_bytes / _MB:.0f} MB "
                "are taken: start all workers with a larger --adapter-mb if there is the memory"
            )

    def _check_root(self, place: Path, named: str) -> None:
        """Refuse a file or folder outside of `roots`; `named` names it in the error."""
        if self.roots and not any(place.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots))
            raise SettingsError(
                f"adapters: {shown(named)} lies outside of {roots}: put it there with all its files, or start all "
                "workers with another --adapter-root"
            )


class LoadNotes:
    """Notes in Redis of the adapters that workers load, so that an adapter that kills a worker kills only one.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        model: name of the model.
        worker_id: id of this worker.
    """

    def __init__(self, redis: Redis, keys: Keys, model: str, worker_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._model = keys.model(model)
        self._worker_id = worker_id
        self._key = b""

    @asynccontextmanager
    async def noted(self, content: str) -> AsyncIterator[None]:
        """Keep a note around a load.

        Args:
            content: see `ModelKeys.adapter_load`.

        Raises:
            SettingsError: the note of another worker exists, which is no longer alive.
        """
        key = self._model.adapter_load(content)
        loader = await self._redis.getrange(key, 0, 255)
        other = loader.decode("utf-8", "replace") if isinstance(loader, bytes) else str(loader)
        if other not in ("", self._worker_id) and not await self._redis.exists(self._keys.worker(other)):
            raise SettingsError(
                f"adapters: the worker {other} terminated while it loaded this adapter, so for "
                f"{_QUARANTINE_MS // 60_000} minutes no worker loads it: read that worker's log, mend the adapter, and "
                "add it again"
            )
        await self._redis.set(key, self._worker_id, px=_QUARANTINE_MS)
        self._key = key
        try:
            yield
        except SettingsError:
            await self.remove()
            raise
        await self.remove()

    async def lift(self, content: str) -> None:
        """End the quarantine of an adapter, because a worker has loaded it."""
        await self._redis.delete(self._model.adapter_load(content))

    async def remove(self) -> None:
        """Remove the note: the load has ended, or this worker ends in good order."""
        if self._key:
            await self._redis.delete(self._key)
            self._key = b""


class _Refusal(NamedTuple):
    """Why an adapter cannot be loaded, and the event loop's time until which this is not tried again."""

    failure: Failure
    until: float


class AdapterCache:
    """Loads adapters into the backend for jobs that name them, and evicts those that were used the longest ago.

    Args:
        registry: the model's adapters, in Redis.
        engine_thread: the backend.
        loaded: adapters that the backend has loaded at its start: "name@revision" -> source.
        max_loaded: max adapters that are loaded at once.
        sources: where adapters may come from.
        notes: of loads.
        in_flight: the prompts that the worker holds.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        engine_thread: EngineThread,
        loaded: Mapping[str, str],
        max_loaded: int,
        sources: AdapterSources,
        notes: LoadNotes,
        in_flight: InFlight,
    ) -> None:
        self._registry = registry
        self._engine_thread = engine_thread
        self._own = dict(loaded)
        self._loaded = dict(loaded)  # The adapter that was used last is at the end.
        self._max_loaded = max(max_loaded, len(loaded))
        self._sources = sources
        self._notes = notes
        self._in_flight = in_flight
        self._waiting: dict[str, list[InFlightPrompt]] = {}  # By adapter: prompts that wait until it is loaded.
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._refused: dict[str, _Refusal] = {}
        self._slot = asyncio.Lock()  # One adapter at a time is loaded or evicted.

    async def register_own(self) -> None:
        """Write the adapters that the backend was started with to the registry, unless their names have entries."""
        for adapter, source in self._own.items():
            name, revision = name_of(adapter), revision_of(adapter)
            await self._registry.put(name, Adapter(source, revision), is_new=True)
            known = (await self._registry.read(name)).adapters.get(name)
            if known is not None and known.revision != revision:
                _log.warning(
                    "the adapter %r is in service with other weights (revision %s of %s): requests get those, not this "
                    "worker's (%s of %s)", name, known.revision, known.source, revision, source,
                )  # fmt: skip

    async def renew(self) -> None:
        """Write the worker's own adapters again if the server has lost the registry."""
        if self._own and not await self._registry.version():
            await self.register_own()

    async def run(self) -> None:
        """Load the adapters that jobs need; never returns."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._serve(await self._wanted.get()))

    def loaded_among(self, prompts: Sequence[InFlightPrompt]) -> Sequence[InFlightPrompt]:
        """The prompts that the backend can compute now; the others are submitted when their adapters are loaded."""
        ready = []
        for prompt in prompts:
            if not prompt.adapter or prompt.adapter in self._loaded:
                ready.append(prompt)
            elif prompt.adapter in self._waiting:
                self._waiting[prompt.adapter].append(prompt)
            else:
                self._waiting[prompt.adapter] = [prompt]
                self._wanted.put_nowait(prompt.adapter)
        for adapter in {prompt.adapter for prompt in ready if prompt.adapter}:
            self._loaded[adapter] = self._loaded.pop(adapter)
        return ready

    def _in_use(self) -> Set[str]:
        """The adapters that prompts in the backend name."""
        return {prompt.adapter for prompt in self._in_flight.values() if prompt.is_owed}

    def failure_of(self, adapter: str) -> Failure:
        """Why a job ends whose adapter the backend does not have."""
        if (refusal := self._refused.get(adapter)) is not None:
            return refusal.failure
        return Failure(AdapterChanged.__name__, f"the adapter {adapter!r} is not in service any more")

    def heartbeat_fields(self) -> dict[str, str]:
        """The loaded adapters, for the heartbeat."""
        return {"adapters": json.dumps(list(self._loaded))}

    async def leave(self, *, is_broken: bool) -> None:
        """The worker ends; the note of a load that broke the backend stays."""
        if not is_broken:
            await self._notes.remove()

    async def _serve(self, adapter: str) -> None:
        """Load an adapter, and submit the jobs that wait for it; without it, the backend returns them as stale."""
        loop, loaded = asyncio.get_running_loop(), ""
        self._refused = {name: refusal for name, refusal in self._refused.items() if refusal.until > loop.time()}
        while not loaded and adapter not in self._refused:
            try:
                loaded = await self._load(adapter)
            except AdapterChanged:
                loaded = adapter
            except WorkerError:
                return  # The backend is broken: the worker ends, and requeues its jobs.
            except (SettingsError, ProtocolError, ResponseError) as error:
                _log.warning("cannot load the adapter %r: %s", name_of(adapter), error)
                text = f"a worker cannot load the adapter {name_of(adapter)!r}: {error}"
                self._refused[adapter] = _Refusal(Failure(AdapterRefused.__name__, text), loop.time() + _REFUSED_S)
            except (RedisError, OSError) as error:
                _log.warning("cannot read the registry of adapters, will try again: %s", sentence(error))
                await asyncio.sleep(_RETRY_S)
        prompts = [prompt for prompt in self._waiting.pop(adapter) if self._in_flight.get(prompt.digest) is prompt]
        for prompt in prompts:
            prompt.adapter = loaded or adapter
        if prompts:
            self._engine_thread.submit(prompts)

    async def _load(self, adapter: str) -> str:
        """Load an adapter that a job names; returns its name, with its revision where the job named a check.

        Raises:
            AdapterChanged: the registry has no entry for it, or one with other weights.
            SettingsError: it cannot be loaded.
        """
        name, revision = name_of(adapter), revision_of(adapter)
        nonce = revision.removeprefix(CHECK_PREFIX) if revision.startswith(CHECK_PREFIX) else ""
        registry = self._registry
        entry = await registry.read_check(nonce) if nonce else (await registry.read(name)).adapters.get(name)
        if entry is None or not (nonce or entry.revision == revision):
            raise AdapterChanged(f"the adapter {adapter!r} is not in service any more")
        place = await self._fetch(entry.source)
        async with self._slot:
            if adapter in self._loaded:
                return adapter
            await self._evict()
            content = await _content(place) if nonce else adapter
            async with self._notes.noted(content):
                found = await self._load_from(name, entry.source, place)
            if nonce:
                await self._notes.lift(qualify(name, found))
                await registry.end_check(nonce, Adapter(entry.source, found))
            elif found != revision:
                other = qualify(name, found)
                del self._loaded[other]
                self._engine_thread.drop_adapter(other)
                raise SettingsError(
                    f"adapters: {shown(entry.source)} has other weights on this worker (revision {found}) than in the "
                    f"registry ({revision}): has the folder changed? `lmpool adapters add` puts the new weights in "
                    "service"
                )
        return qualify(name, found)

    async def _fetch(self, source: str) -> str:
        """The folder of a source; names on the hub are fetched here, because the backend's thread computes rows."""
        place = await asyncio.to_thread(self._sources.place, source)
        # Backends that accept hub names have imported the hub's package.
        if "huggingface_hub" in sys.modules and is_on_hub(source):
            folder = await asyncio.to_thread(adapter_folder, source)
            await asyncio.to_thread(self._sources.check_size, folder, source)
            return str(folder)
        return place

    async def _evict(self) -> None:
        """Free a slot: evict the adapter that was used the longest ago, if possible one that no job needs now."""
        if not self._max_loaded:
            raise SettingsError("adapters: this worker has no slot for one: start the workers with --max-adapters")
        while len(self._loaded) >= self._max_loaded:
            in_use = self._in_use()
            evicted = next((adapter for adapter in self._loaded if adapter not in in_use), next(iter(self._loaded)))
            del self._loaded[evicted]  # Jobs that arrive from now on wait until it is loaded again.
            while evicted in in_use:
                await asyncio.sleep(_IN_USE_CHECK_S)
                in_use = self._in_use()
            _log.info("evicting the adapter %r", evicted)
            self._engine_thread.drop_adapter(evicted)

    async def _load_from(self, name: str, source: str, place: str) -> str:
        """Have the backend load an adapter; returns its revision."""
        try:
            revision = await self._engine_thread.load_adapter(name, place)
        except SettingsError as error:
            if is_on_hub(source) or await asyncio.to_thread(os.path.lexists, place):
                raise
            # The client may have this folder on its own machine. It sends the full path of a folder that it finds.
            where = f"{shown(source)} must be a folder on the worker's machine"
            if not source.startswith(("/", "~")):
                where += ": the program did not find it either, and the worker looks for it where it was started"
            raise SettingsError(f"{error}; {where}") from error
        self._loaded[qualify(name, revision)] = source
        _log.info("serving the adapter %r from %s (revision %s)", name, source, revision)
        return revision


async def _content(place: str) -> str:
    """The digest of the files of an adapter to check; of a folder that cannot be read its path."""
    try:
        return await asyncio.to_thread(content_digest, Path(place))
    except SettingsError:
        return place  # The backend says what is wrong.
