"""The adapters that a worker has loaded: loaded when a job first needs them, evicted when others need their place."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def place_of(settings: WorkerSettings, source: str, *, is_own: bool = False) -> str:
    """The folder of a source, with all links followed, or the hub name.

    A folder that does not exist is left to the backend to report. `is_own`: the source is one of the operator's own
    `--adapters`, which may always be hub names.
    """
    if is_on_hub(source):
        if not settings.adapter_hub and not is_own:
            raise SettingsError(
                f"adapters: {shown(source)} is no folder on this worker's machine, and names on a hub are not taken: "
                "name a folder, or start all workers with --adapter-hub"
            )
        return source
    try:
        folder = Path(source).expanduser().resolve()
        roots = [Path(root).resolve() for root in settings.adapter_root]
        _check_roots(folder, source, roots)  # Before the folder is read: clients must not learn which paths exist.
        for file in folder.iterdir():
            _check_roots(file.resolve(), str(file), roots)
        check_size(settings, folder, source)
    except (FileNotFoundError, NotADirectoryError):
        return str(folder)
    except (OSError, RuntimeError) as error:  # A circle of links; ~user of an unknown user.
        raise SettingsError(f"adapters: {shown(source)} cannot be read: {error}") from error
    return str(folder)


def _check_roots(place: Path, named: str, roots: Sequence[Path]) -> None:
    if roots and not any(place.is_relative_to(root) for root in roots):
        raise SettingsError(
            f"adapters: {shown(named)} lies outside of {', '.join(map(str, roots))}: put it there with all its files, "
            "or start all workers with another --adapter-root"
        )


def check_size(settings: WorkerSettings, folder: Path, source: str) -> None:
    """Raise SettingsError for an adapter whose files are too large; `source` names it in the error."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / _MB
    if size > settings.adapter_mb:
        raise SettingsError(
            f"adapters: the files in {shown(source)} have {size:.0f} MB, and {settings.adapter_mb} MB are taken: "
            "start all workers with a larger --adapter-mb if there is the memory"
        )


@dataclass(eq=False)
class AdapterCache:
    """Loads adapters into the backend for jobs that name them, and evicts those that were used the longest ago."""

    registry: AdapterRegistry
    engine_thread: EngineThread
    own: Mapping[str, str]  # Adapters that the backend has loaded at its start: "name@revision" -> source.
    max_loaded: int
    settings: WorkerSettings
    worker_id: str
    in_flight: InFlight

    def __post_init__(self) -> None:
        self._loaded = dict(self.own)  # The adapter that was used last is at the end.
        self._waiting: dict[str, list[InFlightPrompt]] = {}  # By adapter: prompts that wait until it is loaded.
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        # By adapter: why it cannot be loaded, and the event loop's time until which this is not tried again.
        self._refused: dict[str, tuple[Failure, float]] = {}
        self._slot = asyncio.Lock()  # One adapter at a time is loaded or evicted.
        self._note = b""  # The key of the note of the load that runs.

    async def register_own(self) -> None:
        """Write the adapters that the backend was started with to the registry, unless their names have entries."""
        for adapter, source in self.own.items():
            name, revision = name_of(adapter), revision_of(adapter)
            await self.registry.put(name, Adapter(source, revision), is_new=True)
            known = (await self.registry.read(name)).adapters.get(name)
            if known is not None and known.revision != revision:
                _log.warning(
                    "the adapter %r is in service with other weights (revision %s of %s): requests get those, not this "
                    "worker's (%s of %s)", name, known.revision, known.source, revision, source,
                )  # fmt: skip

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
        """The prompts that the backend can compute now; the others are submitted when their adapters are loaded."""
        ready = []
        for prompt in prompts:
            if not prompt.adapter or prompt.adapter in self._loaded:
                ready.append(prompt)
            else:
                if prompt.adapter not in self._waiting:
                    self._wanted.put_nowait(prompt.adapter)
                self._waiting.setdefault(prompt.adapter, []).append(prompt)
        for adapter in {prompt.adapter for prompt in ready if prompt.adapter}:
            self._loaded[adapter] = self._loaded.pop(adapter)
        return ready

    def failure_of(self, adapter: str) -> Failure:
        """Why a job ends whose adapter the backend does not have."""
        stale = Failure(AdapterChanged.__name__, f"the adapter {adapter!r} is not in service any more")
        return self._refused.get(adapter, (stale, 0.0))[0]

    def heartbeat_fields(self) -> dict[str, str]:
        """The loaded adapters, for the heartbeat."""
        return {"adapters": json.dumps(list(self._loaded))}

    async def leave(self) -> None:
        """Remove the note of a load that this worker does not finish."""
        if self._note:
            await self.registry.redis.delete(self._note)
            self._note = b""

    async def _serve(self, adapter: str) -> None:
        """Load an adapter, and submit the jobs that wait for it; without it, the backend returns them as stale."""
        loop, loaded = asyncio.get_running_loop(), ""
        self._refused = {name: refusal for name, refusal in self._refused.items() if refusal[1] > loop.time()}
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
                self._refused[adapter] = Failure(AdapterRefused.__name__, text), loop.time() + _REFUSED_S
            except (RedisError, OSError) as error:
                _log.warning("cannot read the registry of adapters, will try again: %s", sentence(error))
                await asyncio.sleep(_RETRY_S)
        prompts = [prompt for prompt in self._waiting.pop(adapter) if self.in_flight.get(prompt.digest) is prompt]
        for prompt in prompts:
            prompt.adapter = loaded or adapter
        if prompts:
            self.engine_thread.submit(prompts)

    async def _load(self, adapter: str) -> str:
        """Load an adapter that a job names; returns its name, with its revision where the job named a check."""
        name, revision = name_of(adapter), revision_of(adapter)
        nonce = revision.removeprefix(CHECK_PREFIX) if revision.startswith(CHECK_PREFIX) else ""
        registry = self.registry
        entry = await registry.read_check(nonce) if nonce else (await registry.read(name)).adapters.get(name)
        if entry is None or not (nonce or entry.revision == revision):
            raise AdapterChanged(f"the adapter {adapter!r} is not in service any more")
        place = await asyncio.to_thread(place_of, self.settings, entry.source)
        # Fetch names on the hub here, because the backend's thread computes rows. Backends that accept them have
        # imported the hub's package.
        if "huggingface_hub" in sys.modules and is_on_hub(entry.source):
            folder = await asyncio.to_thread(adapter_folder, entry.source)
            await asyncio.to_thread(check_size, self.settings, folder, entry.source)
            place = str(folder)
        async with self._slot:
            if adapter in self._loaded:
                return adapter
            await self._evict()
            content = adapter
            if nonce:
                try:
                    content = await asyncio.to_thread(content_digest, Path(place))
                except SettingsError:
                    content = place  # The backend says what is wrong.
            await self._write_note(content)
            try:
                found = await self._load_from(name, entry.source, place)
            except SettingsError:
                await self.leave()
                raise
            await self.leave()
            other = qualify(name, found)
            if nonce:
                # A worker has loaded the adapter: its quarantine ends.
                await registry.redis.delete(registry.keys.adapter_load(other))
                await registry.end_check(nonce, Adapter(entry.source, found))
            elif found != revision:
                del self._loaded[other]
                self.engine_thread.drop_adapter(other)
                raise SettingsError(
                    f"adapters: {shown(entry.source)} has other weights on this worker (revision {found}) than in the "
                    f"registry ({revision}): if the folder has changed, add it again with `lmpool adapters add`"
                )
        return other

    async def _write_note(self, content: str) -> None:
        """Write a note around a load, so that an adapter that kills a worker kills only one.

        `content`: see `ModelKeys.adapter_load`.
        """
        redis, key = self.registry.redis, self.registry.keys.adapter_load(content)
        loader = await redis.getrange(key, 0, 255)
        other = loader.decode("utf-8", "replace") if isinstance(loader, bytes) else str(loader)
        if other not in ("", self.worker_id) and not await redis.exists(Keys(self.settings.prefix).worker(other)):
            raise SettingsError(
                f"adapters: the worker {other} terminated while it loaded this adapter, so no worker loads it for "
                f"{_QUARANTINE_MS // 60_000} minutes: read that worker's log, mend the adapter, and add it again"
            )
        await redis.set(key, self.worker_id, px=_QUARANTINE_MS)
        self._note = key

    async def _evict(self) -> None:
        """Free a slot: evict the adapter that was used the longest ago, if possible one that no job needs now."""

        def in_use() -> set[str]:
            return {prompt.adapter for prompt in self.in_flight.values() if prompt.is_owed}

        slots = max(self.max_loaded, len(self.own))
        if not slots:
            raise SettingsError("adapters: this worker has no slot for one: start the workers with --max-adapters")
        while len(self._loaded) >= slots:
            needed = in_use()
            evicted = next((adapter for adapter in self._loaded if adapter not in needed), next(iter(self._loaded)))
            del self._loaded[evicted]  # Jobs that arrive from now on wait until it is loaded again.
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
            # The client may have this folder on its own machine. It sends the full path of a folder that it finds.
            where = f"{shown(source)} must be a folder on the worker's machine"
            if not source.startswith(("/", "~")):
                where += ": the program did not find it either, and the worker looks for it where it was started"
            raise SettingsError(f"{error}; {where}") from error
        self._loaded[qualify(name, revision)] = source
        _log.info("serving the adapter %r from %s (revision %s)", name, source, revision)
        return revision
