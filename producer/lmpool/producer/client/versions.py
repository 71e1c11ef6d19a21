"""Publishes versions of a model's weights (`lmpool.protocol.version`), and reads which versions there are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from lmpool import errors
from lmpool.aio import pauses
from lmpool.broker import bucket
from lmpool.broker.registries import VersionRegistry
from lmpool.broker.scripts import read_infos
from lmpool.producer.client.discovery import Connections
from lmpool.producer.client.requests import Deadline
from lmpool.protocol import tensors as files
from lmpool.protocol import version as wire
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import check_number, shown

T = TypeVar("T")

_ADVICE = "publishing weights is a right of its own: name the server as the user `weights` (docker/redis/users.acl)"
_KEPT = 64  # Versions whose entries stay in the registry, so that their cached rows can be found by their numbers.


class _Upload(NamedTuple):
    """Weights that are ready to be published."""

    source: str  # Folder or file on the workers' machines; "" if the pool stores `data`.
    data: memoryview  # The file; empty with a `source`.
    samples: tuple[bytes, ...]  # Digest of samples of the files of `source`.
    is_sparse: bool


class WeightVersions:
    """The versions of one session's model."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    @property
    def _registry(self) -> VersionRegistry:
        return VersionRegistry(self._connections.redis, self._connections.model.keys)

    async def all(self, deadline: Deadline) -> dict[int, str]:
        """Return number of each version -> "served", "refused: REASON", or "" while no worker has loaded it."""
        registered = await self._insist(self._registry.read, deadline)
        return {version.number: registered.states.get(version.number, "") for version in registered.versions}

    async def publish(self, weights: object, number: int | None, *, stored: bool, url: str, deadline: Deadline) -> int:
        """Publish a version, and wait until a worker serves it; see `Producer.publish_weights`."""
        if number is not None:
            check_number("version", number, 1, wire.MAX_NUMBER)
        # Changes are relative to the newest version at this time: another one may be published during the upload.
        registered = await self._insist(self._registry.read, deadline)
        tensors = await self._insist(self._registry.tensors, deadline)
        if not tensors:
            text = f"the workers of {self._connections.model.info.base!r} cannot change their weights"
            raise errors.SettingsError(f"weights: {text} (quantised, offloaded, or a backend without this ability)")
        upload = await asyncio.to_thread(_prepare, weights, files.unpack_types(tensors), stored)
        if url:
            upload = await asyncio.to_thread(_copied, upload, url)
        version = await self._register(upload, number, registered, deadline)
        await self._wait(version, deadline)
        return version.number

    async def _register(
        self, upload: _Upload, number: int | None, registered: wire.PublishedVersions, deadline: Deadline
    ) -> wire.Version:
        """Store the file if the pool must store it, and add the version to the registry."""
        registry, nonce = self._registry, secrets.token_hex(8)
        used = await self._insist(self._largest, deadline)
        if number is not None and number <= used:
            raise errors.SettingsError(f"version: {number} must be above {used}, which workers serve or have served")
        chunks = [upload.data[at : at + wire.CHUNK_BYTES] for at in range(0, len(upload.data), wire.CHUNK_BYTES)]
        digests = upload.samples or tuple(blake2b(chunk, digest_size=16).digest() for chunk in chunks)
        for index, chunk in enumerate(chunks):
            await self._insist(partial(registry.store, nonce, index, chunk), deadline)
        if not upload.is_sparse:
            registered = await self._insist(registry.read, deadline)
        while True:
            newest, changes = registered.newest_usable, -1
            if upload.is_sparse:
                if registered.newest < used:
                    text = f"the server has lost its memory, and no worker has registered version {used} again yet"
                    raise errors.SettingsError(f"weights: {text}: publish a full version, or the changes later")
                changes = newest.number if newest is not None else 0
                if len(registered.chain()) > wire.MAX_SPARSE:
                    text = f"{wire.MAX_SPARSE} sparse versions follow one another: publish a full version first"
                    raise errors.SettingsError(f"weights: {text}")
            # Workers may not have restored the registry yet, and they ignore a number below the one that they serve.
            version = wire.Version(number or max(registered.newest, used) + 1, nonce, changes, upload.source, digests)
            added = await self._insist(partial(registry.add, version), deadline)
            registered = await self._insist(registry.read, deadline)
            if added or version in registered.versions:  # The reply to an earlier try may have been lost.
                return version
            if number is not None:
                raise errors.SettingsError(f"version: {number} must be above {registered.newest}, which is published")
            if upload.is_sparse:
                text = f"version {registered.newest} was published meanwhile, and these changes are relative to"
                raise errors.SettingsError(f"weights: {text} version {changes}: publish the changes since then")

    async def _largest(self) -> int:
        """Return the largest version of the model's weights whose info is in the pool, so that a worker served it."""
        connections, numbers = self._connections, [0]
        for packed in (await read_infos(connections.redis, connections.keys)).values():
            with suppress(errors.ProtocolError):
                info = ModelInfo.unpack(packed if isinstance(packed, bytes) else b"")
                is_own = (info.base, info.lineage) == (connections.model.info.base, connections.model.info.lineage)
                numbers += [info.version] if is_own else []
        return max(numbers)

    async def _wait(self, version: wire.Version, deadline: Deadline) -> None:
        """Wait until a worker has served or refused a version; then remove what no worker needs any more."""
        number, registered = version.number, wire.PublishedVersions((version,), {}, version.entry, False)
        try:
            for wait in pauses():
                registered = await self._insist(self._registry.read, deadline)
                if reason := registered.reason(number):
                    await self._insist(partial(self._registry.forget, [version], keep_entries=True), deadline)
                    refused = [other for other in registered.versions if registered.reason(other.number)]
                    await self._insist(partial(self._registry.forget, refused[:-_KEPT]), deadline)
                    raise errors.WeightsRefused(f"no worker serves version {number}: {reason}")
                if any(state == wire.SERVED for other, state in registered.states.items() if other >= number):
                    break
                async with deadline.limit():
                    await asyncio.sleep(wait)
        except errors.DeadlineExceeded as error:
            text = f"no worker has served version {number} within {deadline.seconds:g} s"
            advice = "it is published: see `lmpool weights list`, or allow more time"
            if version not in registered.versions:
                advice = "the server has lost it with its memory: publish it again"
            raise errors.DeadlineExceeded(f"{text}; {advice}") from error
        needed = registered.chain(is_tried=False)
        old = [other for other in registered.versions if needed and other.number < needed[0].number]
        await self._insist(partial(self._registry.forget, old, keep_entries=True), deadline)
        await self._insist(partial(self._registry.forget, old[:-_KEPT]), deadline)

    async def _insist(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        return await self._connections.insist(attempt, deadline, _ADVICE)


def _prepare(weights: object, wanted: files.Types, stored: bool) -> _Upload:
    """Check weights against the types of the model's tensors; read or encode them if the pool stores them."""
    if isinstance(weights, Mapping):
        _check_size(sum(getattr(tensor, "nbytes", 0) for tensor in weights.values()))
        data = memoryview(_encode(weights, wanted))
        types = files.types_of(data)
        source = ""
    elif isinstance(weights, (str, Path)):
        path = Path(weights).expanduser().absolute()
        types, source, data = files.read_types(path), "" if stored else str(path), memoryview(b"")
        if stored:
            if not path.is_file():
                raise errors.SettingsError(f"weights: {shown(str(path))} is no file, and the pool stores single files")
            _check_size(path.stat().st_size)
            data = memoryview(path.read_bytes())
    else:
        raise errors.SettingsError(f"weights: {shown(weights)} is no folder, file or dict of tensors")
    is_sparse = any(name.endswith(files.INDICES) and name not in wanted for name in types)
    (files.check_sparse if is_sparse else files.check_full)(types, wanted)
    samples = (files.sample_digest(Path(source)),) if source else ()
    return _Upload(source, data, samples, is_sparse)


def _check_size(size: int) -> None:
    """Refuse weights that the pool cannot store, before they are copied."""
    if size > wire.MAX_STORED_BYTES:
        text = f"{size} bytes are over the limit of {wire.MAX_STORED_BYTES} for weights that the pool stores"
        raise errors.SettingsError(f"weights: {text}: save them in a folder that the workers can read")


def _encode(tensors: Mapping[Any, Any], wanted: files.Types) -> bytes:
    """A safetensors file with tensors of torch or numpy, without a tied head that the checkpoint lacks."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != files.TIED_HEAD or name in wanted}
    try:
        if all(type(tensor).__module__ == "numpy" for tensor in tensors.values()):
            from safetensors.numpy import save

            return save(tensors)
        from safetensors.torch import save as save_torch

        return save_torch({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    except ImportError as error:
        raise errors.SettingsError("weights: a dict of tensors needs `pip install safetensors`") from error
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        text = f"weights: these are no tensors of numpy or torch: {errors.first_line(error)}"
        raise errors.SettingsError(text) from error


def _copied(upload: _Upload, url: str) -> _Upload:
    """Copy the files of weights to a folder of their own in a bucket."""
    place = f"{url.rstrip('/')}/lmpool-{secrets.token_hex(8)}"
    if upload.source:
        bucket.upload(files.weight_files(Path(upload.source)), place)
        return upload._replace(source=place)
    with TemporaryDirectory(prefix="lmpool-weights-") as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(upload.data)
        bucket.upload([file], place)
        return upload._replace(source=place, data=memoryview(b""), samples=(files.sample_digest(file),))
