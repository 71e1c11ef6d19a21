"""Changes a worker to the versions of its model's weights that clients publish (`lmpool.protocol.version`)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np
from redis.exceptions import NoPermissionError, RedisError

from lmpool.aio import delays, end_tasks
from lmpool.broker import bucket, scripts
from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import VersionRegistry
from lmpool.broker.scripts import read_alive_in, read_pointer
from lmpool.broker.server import Server
from lmpool.errors import ModelMismatch, ProtocolError, SettingsError, WorkerError, first_line
from lmpool.protocol import version as wire
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo, partitions_in
from lmpool.protocol.row import RowBlock, check_row
from lmpool.protocol.tensors import TensorType, pack_types, sample_digest, weight_files
from lmpool.settings import shown
from lmpool.workers.execution.contract import Backend, BackendJob, ChangesWeights
from lmpool.workers.execution.engine_thread import EngineThread, Opened
from lmpool.workers.execution.folders import LockedFolder, locked_folder
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

# Share of the reply timeout for which a read blocks, so that the server replies before the timeout.
_BLOCK_SHARE = 2 / 3
_TURN_CHECK_S = 0.2  # Mean seconds between two tries to take a turn, while other workers change their versions.
_MOVED_TTL_MS = 3_600_000  # Lifetime of the entries that have clients read the model's info again.
_MAX_TRIES = 3  # Workers that may end while they load a version that no worker has served; then it is refused.
_CANARY = bytes(16)  # Digest of the prompt that is computed with new weights before any client's prompt.
_CANARY_TOKENS = 4  # Max tokens of this prompt.
_STORED_FILE = "model.safetensors"  # Name of the copy of a file that the pool stores.
_NOT_SERVED = "version %d is not served: %s"
_NOT_RESTORED = "version %d is not restored: another publisher has used the number; publish a full version"

T = TypeVar("T")


class _Unservable(SettingsError):
    """The backend holds new weights whose rows cannot be served."""


class VersionKeeper:
    """The version that one worker serves, and the change to the next one.

    Args:
        server: the pool's server.
        settings: the worker's settings.
        worker_id: the worker's id.
        engine_thread: the thread of the backend, which has loaded version 0.
        is_ending: whether the worker must end; then it does not wait for a server that cannot be used.

    Attributes:
        info: the info of the version that the backend holds.
        is_used: whether clients used this worker's version at the last check.
        next: the versions whose files make the next version, if this worker must change; else None.
    """

    def __init__(
        self,
        server: Server,
        settings: WorkerSettings,
        worker_id: str,
        engine_thread: EngineThread,
        is_ending: Callable[[], bool],
    ) -> None:
        self._server, self._settings, self._worker_id, self._engine = server, settings, worker_id, engine_thread
        self._is_ending, self._keys = is_ending, Keys(settings.prefix)
        self._lease_ms = int(settings.lease_s * 1000)
        self._redis = server.client(reply_timeout_s=reply_timeout(settings.lease_s / 2))
        # Only for reads that block. A silent connection must not hide a new version for much longer than a lease.
        self._reader = server.client(reply_timeout_s=reply_timeout(settings.lease_s))
        self._block_ms = int(1000 * reply_timeout(settings.lease_s) * _BLOCK_SHARE)
        self._chain: tuple[wire.Version, ...] = ()  # The versions whose files make the weights that the backend holds.
        self._files: dict[str, LockedFolder] = {}  # Nonce -> folder with a file from the pool.
        self._slot: int | None = None
        self._waits_until = math.inf  # Monotonic time until which workers of older versions go first.
        # A version that this worker could not load, and the monotonic time before which it does not try again.
        self._not_before: tuple[wire.Version | None, float] = None, 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self.next: tuple[wire.Version, ...] | None = None
        self.is_used = True
        self.info: ModelInfo
        self._registry: VersionRegistry
        self._tensors = b""  # Packed types of the model's tensors; b"" if the backend cannot change its weights.

    async def start(self, opened: Opened) -> Opened:
        """Load the newest version that a worker has served; returns the properties of the backend with it.

        Raises:
            ModelMismatch: live workers serve versions of another checkpoint under this name.
            ServerError: the server cannot be used.
            WorkerError: the backend broke.
        """
        self.info, self._own_adapters = opened.info, frozenset(opened.adapters)
        self._registry = VersionRegistry(self._redis, self._keys.model(opened.info.name))
        tensors = {} if opened.info.is_trie else await self._engine.run("list of tensors", _tensors_of)
        if not tensors:
            return opened
        self._tensors = pack_types(tensors)
        try:
            await self._claim_registry()
            if chain := (await self._registry.read()).chain(is_tried=False):
                await self._load(chain)
        except SettingsError as error:  # Serve version 0, and try again after a lease.
            if isinstance(error, _Unservable):
                await self._load((), anew=True)
            self._note_failure(chain[-1], str(error))
        except NoPermissionError as error:
            _log.warning("the weights cannot change: the server's user has not all rights of a worker: %s", error)
            self._tensors = b""
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        return opened._replace(info=self.info)

    def _note_failure(self, version: wire.Version, reason: str) -> None:
        self._not_before = version, time.monotonic() + self._settings.lease_s
        _log.warning(
            "this worker cannot load version %d, which was served before, and will try again: %s",
            version.number,
            reason,
        )

    async def _claim_registry(self) -> None:
        """Clear the registry if it belongs to another checkpoint, which no live worker serves."""
        base, lineage = self.info.base, self.info.lineage
        if await self._registry.claim(lineage, self._tensors):
            return
        used = await read_pointer(self._redis, self._keys, base)
        if await self._count(wire.name_of_version(base, used)):
            if not used:
                return  # No version is in use: the comparison of infos, which comes next, names the differences.
            advice = "serve this checkpoint under another --name, or stop the other workers first"
            raise ModelMismatch(f"version {used} of {base!r}, which is of another checkpoint, is served: {advice}")
        _log.warning("the published versions of %r are of another checkpoint, and are removed", base)
        await self._registry.clear()
        await self._point(base, used, 0)
        await self._registry.claim(lineage, self._tensors)

    async def watch(self, change: Callable[[], None]) -> None:
        """Wait until this worker must change its version and has its turn, then call `change`; never returns."""
        while self._tensors and self.next is None:
            registered = await self._registry.read()
            if not await self._begin_change(registered):
                await self._registry.wait(self._reader, registered.last, self._block_ms)
            elif self.next is not None:
                change()
        await asyncio.Event().wait()

    async def _begin_change(self, registered: wire.PublishedVersions) -> bool:
        """Take a turn if there is another version to serve; returns whether there is one."""
        newest = registered.newest_usable
        # A worker that must end does not take the turn: its drain may take minutes.
        if newest is None or newest.number <= self.info.version or self._is_ending():
            return False
        number = newest.number
        if registered.chain()[-1:] != (newest,):
            reason = f"it changes version {newest.changes}, which is not the version before it"
            await self._registry.decide(number, wire.REFUSED + reason)
            await asyncio.sleep(_TURN_CHECK_S)  # If it was decided before, it stays as it is.
            return True
        failed, not_before = self._not_before
        if (failed != newest or time.monotonic() >= not_before) and not await self._lets_others_go_first():
            # Only one worker tries a version that no worker has served: it decides whether the version is refused.
            slots = self._settings.max_unavailable if number in registered.states else 1
            self._slot = await self._registry.take_turn(self._worker_id, slots, self._lease_ms)
        if self._slot is None:
            await asyncio.sleep(_TURN_CHECK_S * random.uniform(0.5, 1.5))
            return True
        self._renewing = asyncio.create_task(self._keep_turn(), name="turn")
        try:
            registered = await self._registry.read()  # It may have changed before this worker's turn.
            if registered.newest_usable == newest:
                self.next = registered.chain()
        finally:
            if self.next is None:
                await self.end_turn()
        return True

    async def _lets_others_go_first(self) -> bool:
        """Whether live workers serve older versions: they change first, for a lease, because clients use them less."""
        now = time.monotonic()
        self._waits_until = min(self._waits_until, now + self._settings.lease_s)
        if now < self._waits_until:
            for name in await scripts.read_infos(self._redis, self._keys):
                base, number = wire.split_name(name.decode("utf-8", "replace"))
                is_older = base == self.info.base and (number or 0) < self.info.version
                if is_older and await self._count(wire.name_of_version(base, number or 0)):
                    return True
        self._waits_until = math.inf
        return False

    async def _keep_turn(self) -> None:
        # If the worker must end before it loads the next version, the turn expires: the drain may take minutes.
        while self.next is None or not self._is_ending():
            await asyncio.sleep(self._settings.heartbeat_s)
            with suppress(RedisError, OSError):  # The turn expires if the server cannot be used.
                await self._renew_turn()

    async def _renew_turn(self) -> bool:
        """Keep the turn for another lease; returns False if another worker has it."""
        assert self._slot is not None
        return await self._registry.renew_turn(self._slot, self._worker_id, self._lease_ms)

    async def end_turn(self) -> None:
        """Give back this worker's turn, so that the next worker can change its version."""
        if self._renewing is not None:
            await end_tasks([self._renewing])
        if self._slot is not None:
            with suppress(RedisError, OSError):  # The turn expires.
                await self._registry.end_turn(self._slot, self._worker_id)
        self._slot = self._renewing = None

    @property
    def next_name(self) -> str:
        """The name under which this worker will serve the next version."""
        return wire.name_of_version(self.info.base, self.next[-1].number) if self.next else self.info.name

    async def change(self, opened: Opened) -> Opened:
        """Load the next version, and refuse it if it cannot be served; returns the backend's properties then.

        The backend keeps its weights if another worker has got this worker's turn during the fetch of the files.
        The version counts as served before this worker registers for it, so that no client uses an undecided version.

        Raises:
            WorkerError: the earlier weights cannot be loaded again; or the backend broke.
        """
        await self._end_restoring()  # The load removes the files of the current version.
        await self._engine.run("drop of adapters", partial(_drop_adapters, self._own_adapters))
        chain, self.next = self.next or (), None
        before, number = self._chain, chain[-1].number
        reason, has_changed = "", True
        try:
            count_try = partial(self._registry.count_try, number)
            is_decided = number in (await self._insist(self._registry.read)).states
            if not is_decided and await self._insist(count_try) > _MAX_TRIES:
                raise SettingsError(f"{_MAX_TRIES} workers ended while they loaded it")
            _log.info("changing from version %d to version %d", self.info.version, number)
            for version in chain:
                await self._path(version)
            # The fetch may have taken longer than the turn lasts without a renewal, as while the server was silent.
            if not await self._insist(self._renew_turn):
                _log.warning("another worker has the turn to change now: version %d is served on", self.info.version)
                return opened
            await self._load(chain)
        except SettingsError as error:
            reason, has_changed = first_line(error), isinstance(error, _Unservable)
        is_served = await self._decide(chain[-1], reason)
        for version in chain[:-1] if is_served else ():  # Workers that start load the served versions of a chain only.
            await self._insist(partial(self._registry.decide, version.number, wire.SERVED))
        if not is_served and has_changed:
            try:
                await self._load(before, anew=True)
            except SettingsError as error:
                text = f"version {before[-1].number if before else 0} of {self.info.base!r} cannot be loaded again"
                raise WorkerError(f"{text}: {error}") from error
        return opened._replace(info=self.info)

    async def _decide(self, version: wire.Version, reason: str) -> bool:
        """Say that a version is served, or refused for a reason; returns whether this worker serves the version.

        The first decision counts. If others serve the version, and this worker cannot, it tries again after a lease.
        """
        # If a later version was published, or this one refused, its files may have been removed.
        if reason and (registered := await self._insist(self._registry.read)).newest_usable != version:
            _log.warning(_NOT_SERVED, version.number, registered.reason(version.number) or reason)
            return False
        state = f"{wire.REFUSED}{reason}" if reason else wire.SERVED
        decided = await self._insist(partial(self._registry.decide, version.number, state))
        if decided != wire.SERVED:
            _log.warning(_NOT_SERVED, version.number, decided.removeprefix(wire.REFUSED))
        elif reason:
            self._note_failure(version, reason)
        return decided == wire.SERVED and not reason

    async def confirm(self) -> None:
        """Tell all that this worker has registered for its version."""
        await self.keep()
        await self.end_turn()

    async def keep(self) -> None:
        """Point clients to this worker's version when they must use it, and restore a lost registry."""
        if not self._tensors:
            return
        registered, mine, lost = await self._registry.read(), self.info.version, list[wire.Version]()
        if registered.has_owner:
            needed = registered.chain(is_tried=False)
            lost = [version for version in await self._registry.renew(self._chain) if version in needed]
        else:
            await self._registry.claim(self.info.lineage, self._tensors)
        # A worker that restored the registry may have lost the server between the entry of a version and its state.
        are_undecided = any(
            version in registered.versions and version.number not in registered.states for version in self._chain
        )
        # Only the workers have the versions after a loss of the server's memory, and files that the server has evicted.
        must_restore = lost or are_undecided or registered.newest < mine
        if must_restore and (self._restoring is None or self._restoring.done()):
            # Heartbeats must go on while large files are stored.
            self._restoring = asyncio.create_task(self._restore(lost), name="restore")
        base = self.info.base
        used = await read_pointer(self._redis, self._keys, base)
        self.is_used = used == mine
        if self.is_used:
            return
        others = await self._count(wire.name_of_version(base, used))
        is_last = mine < used and not others and registered.newest <= mine
        if is_last or (mine > used and await self._count(self.info.name) >= others):
            await self._point(base, used, mine)

    async def _restore(self, lost: Collection[wire.Version]) -> None:
        """Add the versions of this worker's weights to the registry again, each after its file; store `lost` files."""
        with suppress(RedisError, OSError):  # The next call of `keep` tries again.
            for version in self._chain:
                registered = await self._registry.read()
                is_missing = version not in registered.versions
                if is_missing and version.number <= registered.newest:
                    _log.warning(_NOT_RESTORED, version.number)
                    return
                for index in range(version.parts if is_missing or version in lost else 0):
                    part = await asyncio.to_thread(_read_part, Path(self._files[version.nonce].name), index)
                    await self._registry.store(version.nonce, index, memoryview(part))
                if is_missing and not await self._registry.add(version):
                    return  # Another publisher or worker was faster.
                await self._registry.decide(version.number, wire.SERVED)

    async def _end_restoring(self) -> None:
        if self._restoring is not None:
            await end_tasks([self._restoring])

    async def _point(self, base: str, used: int, number: int) -> None:
        """Have clients use a version, if they still use the version `used`."""
        values = [str(version).encode() if version else b"" for version in (used, number)]
        if not await scripts.SWAP(self._redis, [self._keys.models()], [wire.pointer_of(base), *values]):
            return
        for keys in await self._partitions_of(wire.name_of_version(base, used)):
            await self._redis.xadd(keys.moved, {"to": number}, maxlen=1)
            await self._redis.pexpire(keys.moved, _MOVED_TTL_MS)

    async def _count(self, name: str) -> int:
        """Number of live workers that serve a model or a version."""
        return (await read_alive_in(self._redis, await self._partitions_of(name))).serving

    async def _partitions_of(self, name: str) -> list[ModelKeys]:
        """The keys of each partition of the queue of a model or a version."""
        packed = (await scripts.read_infos(self._redis, self._keys, name)).get(name.encode(), b"")
        return [self._keys.model(name, number) for number in partitions_in(packed)]

    async def _load(self, chain: tuple[wire.Version, ...], *, anew: bool = False) -> None:
        """Load the weights that the files of `chain` make; with `anew`, after a load that failed half-way.

        Raises:
            SettingsError: the weights cannot be loaded, or their rows are no rows.
        """
        (full, sparse), (known_full, known) = _parts(chain), _parts(self._chain)
        is_next = not anew and full == known_full and sparse[: len(known)] == known
        paths = {version: await self._path(version) for version in chain}
        files = paths[full] if full is not None else None, [paths[version] for version in sparse]
        change = partial(_change_weights, *files, len(known) if is_next else -1)
        await self._engine.run(f"load of version {chain[-1].number if chain else 0}", change)
        try:
            for version in chain:  # A file may have been replaced while it was read.
                await self._path(version)
        except SettingsError as error:
            raise _Unservable(str(error)) from error
        self._chain = chain
        self.info = self.info.of_version(chain[-1] if chain else None)
        nonces = {version.nonce for version in chain}
        for nonce in [nonce for nonce in self._files if nonce not in nonces]:
            self._files.pop(nonce).cleanup()

    async def _path(self, version: wire.Version) -> Path:
        """The files of a version on this machine, which are fetched from the pool if it stores them.

        Raises:
            SettingsError: the files do not exist, lie outside of the allowed folders, or are damaged.
        """
        roots = self._settings.weights_root
        if version.source and not bucket.is_url(version.source):
            path = await asyncio.to_thread(_local_path, version.source, roots)
        else:
            if version.source and roots and not any(bucket.is_below(version.source, root) for root in roots):
                raise _outside(version.source, roots)
            if version.nonce not in self._files:
                self._files[version.nonce] = await self._fetch(version)
            path = Path(self._files[version.nonce].name)
        if version.source and (await asyncio.to_thread(sample_digest, path),) != version.chunks:
            reason = f"{shown(version.source)} has changed since version {version.number} was published"
            raise SettingsError(f"weights: {reason}: write each version to a place of its own")
        return path

    async def _fetch(self, version: wire.Version) -> LockedFolder:
        """Copy the files of a version to a new folder, which the next worker removes if this one is killed."""
        try:
            folder = await asyncio.to_thread(locked_folder, "lmpool-weights-", Path(tempfile.gettempdir()))
        except OSError as error:
            raise _not_stored(error) from error
        try:
            if version.source:
                await asyncio.to_thread(bucket.download, version.source, Path(folder.name))
                return folder
            with (Path(folder.name) / _STORED_FILE).open("wb") as out:
                for index, digest in enumerate(version.chunks):
                    data = await self._insist(partial(self._registry.load, version, index))
                    if blake2b(data, digest_size=16).digest() != digest:
                        text = f"weights: part {index} of version {version.number} is missing or damaged"
                        raise SettingsError(f"{text} in the pool ({len(data)} bytes): publish it again")
                    await asyncio.to_thread(out.write, data)
        except BaseException as error:
            folder.cleanup()
            if isinstance(error, OSError):
                raise _not_stored(error) from error
            raise
        return folder

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` until the server replies; raises `ServerError` if the worker must end first."""
        for wait in delays(self._settings.heartbeat_s):
            try:
                return await attempt()
            except (RedisError, OSError) as error:
                if self._is_ending():
                    raise self._server.explain(error) from error
                _log.warning("will try again: %s", self._server.explain(error))
                await asyncio.sleep(wait)
        raise AssertionError("the delays never end")

    async def close(self) -> None:
        """Close the connections, and remove files from the pool."""
        await self.end_turn()
        await self._end_restoring()
        for folder in self._files.values():
            folder.cleanup()
        await self._redis.aclose()
        await self._reader.aclose()


def _parts(chain: tuple[wire.Version, ...]) -> tuple[wire.Version | None, tuple[wire.Version, ...]]:
    """The full version of a chain, or None for version 0, and the sparse versions."""
    return (chain[0], chain[1:]) if chain and not chain[0].is_sparse else (None, chain)


def _local_path(source: str, roots: Sequence[str]) -> Path:
    """The folder or file of a version on this machine, with all links followed, if it lies in one of `roots`."""
    try:
        path = Path(source).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(f"weights: {shown(source)} cannot be read: {error}") from error
    allowed = [Path(root).resolve() for root in roots if not bucket.is_url(root)]
    if roots and not any(map(path.is_relative_to, allowed)):
        raise _outside(source, roots)
    if not path.exists():
        raise SettingsError(f"weights: {shown(source)} does not exist on the worker's machine")
    for file in weight_files(path) if roots else ():  # A file in the folder may be a link.
        if not any(map(file.resolve().is_relative_to, allowed)):
            raise _outside(str(file), roots)
    return path


def _not_stored(error: OSError) -> SettingsError:
    return SettingsError(f"weights: this worker cannot store the files: {error}")


def _outside(source: str, roots: Sequence[str]) -> SettingsError:
    advice = "put it there, or start all workers with another --weights-root"
    return SettingsError(
        f"weights: {shown(bucket.named(source))} lies outside of {', '.join(map(bucket.named, roots))}: {advice}"
    )


def _read_part(folder: Path, index: int) -> bytes:
    with (folder / _STORED_FILE).open("rb") as file:
        file.seek(index * wire.CHUNK_BYTES)
        return file.read(wire.CHUNK_BYTES)


# The functions below run in the backend's thread.


def _tensors_of(backend: Backend) -> Mapping[str, TensorType]:
    return backend.tensors() if isinstance(backend, ChangesWeights) else {}


def _drop_adapters(kept: Collection[str], backend: Backend) -> None:
    for adapter in set(backend.adapters) - set(kept):
        backend.drop_adapter(adapter)


def _change_weights(full: Path | None, sparse: Sequence[Path], held: int, backend: Backend) -> None:
    """Have the backend load weights, and check the row of one prompt.

    Raises:
        SettingsError: the weights cannot be loaded, and the backend has its earlier ones.
        _Unservable: the backend has loaded the weights, and their row is no row.
    """
    assert isinstance(backend, ChangesWeights)
    backend.load_weights(full, sparse, held)
    ids = np.arange(min(_CANARY_TOKENS, backend.info.vocab_size), dtype="<u4").tobytes()
    backend.submit([BackendJob(_CANARY, ids, fresh=True)])
    blocks: list[RowBlock] = []
    while not blocks:
        finished = backend.step()
        blocks = [block for block in finished.blocks if _CANARY in block.digests]
        if finished.failures:
            raise _Unservable(f"weights: a prompt fails with them: {finished.failures[_CANARY]}")
    try:
        check_row(blocks[0].row(list(blocks[0].digests).index(_CANARY)))
    except ProtocolError as error:
        raise _Unservable(f"weights: the row of a prompt is no row with them: {error}") from error
