"""Loads adapters into a worker's backend when jobs first need them, and evicts the least recently used adapters."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError, ResponseError

from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.replies import NOT_NOW, code_of, sentence
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
_QUARANTINE_MS = 600_000  # Ms for which no worker retries an adapter load that killed a worker: time to read the log.
_REFUSED_S = 5.0  # Seconds until a worker tries again to load an adapter that it could not load.
_RETRY_S = 0.5  # Seconds between two tries to use a server that does not answer, or refuses for now.
_IN_USE_CHECK_S = 0.01  # Seconds between two checks whether the jobs of an adapter to be evicted have finished.


def place_of(settings: WorkerSettings, source: str, *, is_own: bool = False) -> str:
    """The place of an adapter's source: the folder, with all links followed, or the hub name.

    A folder that does not exist is accepted here: the backend reports the error. `is_own`: the source is one of the
    operator's own `--adapters`, which may be hub names.
    """
    if is_on_hub(source):
        if settings.adapter_hub or is_own:
            return source
        advice = "names on a hub are not taken: name a folder, or start all workers with --adapter-hub"
        raise SettingsError(f"adapters: {shown(source)} is no folder on this worker's machine, and {advice}")
    try:
        folder = Path(source).expanduser().resolve()
        roots = [Path(root).resolve() for root in settings.adapter_root]
        _check_roots(folder, source, roots)  # Check before the folder is read: clients must not see which paths exist.
        for file in folder.iterdir():
            _check_roots(file.resolve(), str(file), roots)
        check_size(settings, folder, source)
    except (FileNotFoundError, NotADirectoryError):
        return str(folder)
    except (OSError, RuntimeError) as error:  # The path's links form a circle, or ~user names an unknown user.
        raise SettingsError(f"adapters: {shown(source)} cannot be read: {error}") from error
    return str(folder)


def _check_roots(place: Path, named: str, roots: Sequence[Path]) -> None:
    if roots and not any(place.is_relative_to(root) for root in roots):
        advice = "put it there with all its files, or start all workers with another --adapter-root"
        raise SettingsError(f"adapters: {shown(named)} lies outside of {', '.join(map(str, roots))}: {advice}")


def check_size(settings: WorkerSettings, folder: Path, source: str) -> None:
    """Raise SettingsError for an adapter whose files are too large; `source` names it in the error."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / _MB
    if size > settings.adapter_mb:
        limit = f"{settings.adapter_mb} MB are taken: start all workers with a larger --adapter-mb"
        raise SettingsError(f"adapters: the files in {shown(source)} have {size:.0f} MB, and {limit}")


@dataclass(eq=False)
class AdapterCache:
    """Loads adapters into the backend for jobs that name them, and evicts the least recently used adapters."""

    registry: AdapterRegistry
    engine_thread: EngineThread
    own: Mapping[str, str]  # Adapters that the backend has loaded at its start: "name@revision" -> source.
    max_loaded: int
    settings: WorkerSettings
    worker_id: str
    in_flight: InFlight

    def __post_init__(self) -> None:
        self._loaded = dict(self.own)  # Least recently used first: the adapter that was used last is at the end.
        self._waiting: dict[str, list[InFlightPrompt]] = {}  # Adapter -> prompts that wait until it is loaded.
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        # Adapter -> why it cannot be loaded, and the event loop's time before which the worker does not try again.
        self._refused: dict[str, tuple[Failure, float]] = {}
        self._slot = asyncio.Lock()  # Held while an adapter is loaded or evicted: only one at a time.
        self._note = b""  # Redis key of the note (`_write_note`) of the running load; b"" without a load.

    async def register_own(self) -> None:
        """Write the adapters that the backend was started with to the registry, unless the registry has their names."""
        for adapter, source in self.own.items():
            name, revision = name_of(adapter), revision_of(adapter)
            await self.registry.put(name, Adapter(source, revision), is_new=True)
            known = (await self.registry.read(name)).adapters.get(name)
            if known is not None and known.revision != revision:
                used, ours = f"revision {known.revision} of {known.source}", f"{revision} of {source}"
                text = (
                    "the adapter %r is in service with other weights (%s): requests get those, not this worker's (%s)"
                )
                _log.warning(text, name, used, ours)

    async def renew(self) -> None:
        """Write the worker's own adapters again if the server has lost the registry."""
        if self.own and not await self.registry.version():
            await self.register_own()

    async def run(self) -> None:
        """Load the adapters that jobs need; never returns."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._serve(await self._wanted.get()))

    def loaded_among(self, prompts: Sequence[InFlightPrompt]) -> Sequence[InFlightPrompt]:
        """The prompts that the backend can compute now; other prompts are submitted when their adapter is loaded."""
        ready = []
        for prompt in prompts:
            if not prompt.adapter or prompt.adapter in self._loaded:
                ready.append(prompt)
            elif waiting := self._waiting.get(prompt.adapter):
                waiting.append(prompt)
            else:
                self._waiting[prompt.adapter] = [prompt]
                self._wanted.put_nowait(prompt.adapter)
        for adapter in {prompt.adapter for prompt in ready if prompt.adapter}:
            self._loaded[adapter] = self._loaded.pop(adapter)
        return ready

    def failure_of(self, adapter: str) -> Failure:
        """The failure of a job whose adapter the backend does not have; the next job loads an own adapter again."""
        if adapter in self.own:  # It was evicted, and a change of the weights has made a new cache since.
            self._loaded.pop(adapter, None)
        stale = Failure(AdapterChanged.__name__, f"the adapter {adapter!r} is not in service any more")
        return self._refused.get(adapter, (stale, 0.0))[0]

    def heartbeat_fields(self) -> dict[str, str]:
        """The names of the loaded adapters, as a field of the heartbeat."""
        return {"adapters": json.dumps(list(self._loaded))}

    async def leave(self) -> None:
        """Remove the note (`_write_note`) of a load that has ended, or that this worker does not finish."""
        if self._note:
            await self.registry.redis.delete(self._note)
            self._note = b""

    async def _serve(self, adapter: str) -> None:
        """Load an adapter, and submit its jobs in any case: after a failed load, the backend returns them as stale."""
        loop, loaded = asyncio.get_running_loop(), ""
        self._refused = {name: refusal for name, refusal in self._refused.items() if refusal[1] > loop.time()}
        while not loaded and adapter not in self._refused:
            try:
                loaded = await self._load(adapter)
            except AdapterChanged:
                loaded = adapter
            except WorkerError:
                return  # The backend is broken, so the worker ends and requeues its jobs.
            except (SettingsError, ProtocolError, RedisError, OSError) as error:
                is_of_server = isinstance(error, (RedisError, OSError))
                # A refusal such as READONLY passes, as after a failover; others, such as of a missing right, stay.
                if is_of_server and (not isinstance(error, ResponseError) or code_of(error) in {*NOT_NOW, "OOM"}):
                    _log.warning("the server cannot be used to load an adapter, will try again: %s", sentence(error))
                    await asyncio.sleep(_RETRY_S)
                    continue
                _log.warning("cannot load the adapter %r: %s", name_of(adapter), error)
                text = f"a worker cannot load the adapter {name_of(adapter)!r}: {error}"
                self._refused[adapter] = Failure(AdapterRefused.__name__, text), loop.time() + _REFUSED_S
        prompts = [prompt for prompt in self._waiting.pop(adapter) if self.in_flight.get(prompt.digest) is prompt]
        for prompt in prompts:
            prompt.adapter = loaded or adapter
        if prompts:
            self.engine_thread.submit(prompts)

    async def _load(self, adapter: str) -> str:
        """Load the adapter of a job; return its name@revision. A job that checks a new adapter names no revision."""
        name, revision = name_of(adapter), revision_of(adapter)
        nonce = revision.removeprefix(CHECK_PREFIX) if revision.startswith(CHECK_PREFIX) else ""
        registry = self.registry
        entry = await registry.read_check(nonce) if nonce else (await registry.read(name)).adapters.get(name)
        if entry is None or not (nonce or entry.revision == revision):
            raise AdapterChanged(f"the adapter {adapter!r} is not in service any more")
        place = await asyncio.to_thread(place_of, self.settings, entry.source)
        # Download adapters with hub names here, because the backend's thread computes rows. Backends that accept hub
        # names have imported huggingface_hub.
        if "huggingface_hub" in sys.modules and is_on_hub(entry.source):
            folder = await asyncio.to_thread(adapter_folder, entry.source)
            await asyncio.to_thread(check_size, self.settings, folder, entry.source)
            place = str(folder)
        async with self._slot:
            await self.leave()  # Remove the note of an earlier load: the server may not have received the command.
            if adapter in self._loaded:
                return adapter
            await self._evict()
            content = place if nonce else adapter
            if nonce:
                with suppress(SettingsError):  # The backend reports this error later, when it loads the adapter.
                    content = await asyncio.to_thread(content_digest, Path(place))
            await self._write_note(content)
            try:
                found = await self._load_from(name, entry.source, place)
            except SettingsError:
                await self.leave()
                raise
            await self.leave()
            other = qualify(name, found)
            if nonce:
                # End the quarantine of the adapter, because this worker has loaded it.
                await registry.redis.delete(registry.keys.adapter_load(other))
                await registry.end_check(nonce, Adapter(entry.source, found))
            elif found != revision:
                del self._loaded[other]
                self.engine_thread.drop_adapter(other)
                differ = f"has other weights on this worker (revision {found}) than in the registry ({revision})"
                advice = "if the folder has changed, add it again with `lmpool adapters add`"
                raise SettingsError(f"adapters: {shown(entry.source)} {differ}: {advice}")
        return other

    async def _write_note(self, content: str) -> None:
        """Note in Redis that this worker loads an adapter: if the load kills the worker, other workers do not load it.

        `content`: see `ModelKeys.adapter_load`.
        """
        redis, key = self.registry.redis, self.registry.keys.adapter_load(content)
        loader = await redis.getrange(key, 0, 255)
        other = loader.decode("utf-8", "replace") if isinstance(loader, bytes) else str(loader)
        if other not in ("", self.worker_id) and not await redis.exists(Keys(self.settings.prefix).worker(other)):
            why = f"the worker {other} terminated while it loaded this adapter"
            until = f"so no worker loads it for {_QUARANTINE_MS // 60_000} minutes"
            raise SettingsError(f"adapters: {why}, {until}: read that worker's log, mend the adapter, and add it again")
        await redis.set(key, self.worker_id, px=_QUARANTINE_MS)
        self._note = key

    async def _evict(self) -> None:
        """Free a slot: evict the least recently used adapter, if possible one that no job needs now."""

        def in_use() -> set[str]:
            return {prompt.adapter for prompt in self.in_flight.values() if prompt.is_owed}

        slots = max(self.max_loaded, len(self.own))
        if not slots:
            raise SettingsError("adapters: this worker has no slot for one: start the workers with --max-adapters")
        while len(self._loaded) >= slots:
            needed = in_use()
            evicted = min(self._loaded, key=needed.__contains__)
            del self._loaded[evicted]  # Jobs that arrive from now on wait until the adapter is loaded again.
            while evicted in needed:
                await asyncio.sleep(_IN_USE_CHECK_S)
                needed = in_use()
            _log.info("evicting the adapter %r", evicted)
            self.engine_thread.drop_adapter(evicted)

    async def _load_from(self, name: str, source: str, place: str) -> str:
        """Have the backend load an adapter; returns its revision."""
        try:
            revision = await self.engine_thread.load_adapter(name, place)
        except SettingsError as error:
            if is_on_hub(source) or await asyncio.to_thread(os.path.lexists, place):
                raise
            # The folder may exist on the client's machine: clients send full paths of folders that they find.
            where = f"{shown(source)} must be a folder on the worker's machine"
            if not source.startswith(("/", "~")):
                where += ": the program did not find it either, and the worker looks for it where it was started"
            raise SettingsError(f"{error}; {where}") from error
        self._loaded[qualify(name, revision)] = source
        _log.info("serving the adapter %r from %s (revision %s)", name, source, revision)
        return revision
