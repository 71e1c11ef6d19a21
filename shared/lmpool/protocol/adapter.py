"""LoRA adapters: their names, and the encoding of their entries in a model's registry (a Redis hash).

Users name an adapter; a job names the adapter's exact weights, as "name@revision". Prompts for different weights have
different digests, so the cache never returns a row that was computed with replaced weights.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from lmpool.errors import ProtocolError, SettingsError
from lmpool.protocol.job import Message, unpack
from lmpool.settings import shown

MAX_ADAPTERS = 4096
"""Max adapters in the registry of one model, so that one reply of a few megabytes can list all adapters."""

MAX_LOADED = 64
"""Default limit of the adapters that a worker keeps loaded; an adapter takes 10 to 200 MB of memory."""

MAX_ADAPTER_BYTES = 16 * 1024
"""Max bytes of an encoded registry entry: enough for a source of 4 KiB and the digest of the weights."""

OWNER_FIELD = ""
"""Hash field of the registry that holds the model's fingerprint; no adapter can have this name."""

VERSION_FIELD = "@"
"""Hash field of the registry that holds the registry's version; no adapter can have this name."""

CHECK_PREFIX = "check-"
"""Prefix of the revision in a job whose adapter a worker must load for the first time; a nonce follows the prefix."""

# An adapter name has no separators ("@" before a revision, "=" before a folder) and no unprintable characters.
_NAME = re.compile(r"[^@,=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,100}")
_REVISION = re.compile(r"[0-9A-Za-z._-]{1,64}")
_VERSION = re.compile(rb"[0-9]{1,15}")
_FORMAT = 1  # MessagePack tag of an encoded adapter.
_MAX_SOURCE = 4096  # Max bytes of an adapter's source: PATH_MAX of Linux.


def check_adapter_name(field: str, name: object) -> str:
    """Return the name if an adapter can have it; otherwise raise `SettingsError` with the setting's name `field`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        rule = "1 to 100 characters without @, comma, = and control characters, and without spaces at its ends"
        raise SettingsError(f"{field}: {shown(name)} must be {rule}")
    return name


def check_source(field: str, source: object) -> str:
    """Return the source if it can be a folder or hub name; otherwise raise `SettingsError` with the name `field`."""
    text = source if isinstance(source, str) else ""
    if not text.strip() or not text.isprintable() or len(text.encode()) > _MAX_SOURCE:
        raise SettingsError(f"{field}: {shown(source)} is no printable folder or hub name of up to {_MAX_SOURCE} bytes")
    return text


def qualify(name: str, revision: str) -> str:
    """The name of an adapter in jobs: the adapter's name and the digest of its weights."""
    return f"{name}@{revision}"


def name_of(qualified: str) -> str:
    """The name that users give an adapter, from its name in jobs."""
    return qualified.rpartition("@")[0]


def revision_of(qualified: str) -> str:
    """The digest of an adapter's weights, from its name in jobs."""
    return qualified.rpartition("@")[2]


def is_qualified(text: str) -> bool:
    """Whether a text can be the name of an adapter in jobs."""
    name, _, revision = text.rpartition("@")
    return bool(_NAME.fullmatch(name) and _REVISION.fullmatch(revision))


class Adapter(Message, frozen=True, tag=_FORMAT):
    """An entry of the registry: where an adapter's files are, and the digest of its weights."""

    source: str  # Folder on the workers' machines, or hub name.
    revision: str = ""  # Digest of the adapter's weights; "" until a worker has loaded the adapter.


_ADAPTERS = msgspec.msgpack.Decoder(Adapter)


class Registered(NamedTuple):
    """The registry of a model, or some of its entries."""

    version: int  # Grows with every change: ms since 1970, or the last version plus 1; 0 for an empty registry.
    adapters: dict[str, Adapter]  # Name -> adapter.
    versions: dict[str, int]  # Name -> version of the registry in which the entry was written.


def unpack_adapter(data: bytes, what: str) -> Adapter:
    """Decode an adapter; raises `ProtocolError`, with `what` in its text, for bytes that are no adapter."""
    return unpack(_ADAPTERS, data, MAX_ADAPTER_BYTES, what)


def unpack_registered(values: dict[bytes, bytes | int], fingerprint: str) -> Registered:
    """Decode the hash of a registry, to which any client may write: field -> value, or the size of a large value.

    A registry with another fingerprint belongs to an earlier model of this name, and counts as empty. Raises
    `ProtocolError` if an entry is no adapter.
    """
    owner, version = values.pop(OWNER_FIELD.encode(), b""), values.pop(VERSION_FIELD.encode(), b"0")
    if owner != fingerprint.encode():
        return Registered(0, {}, {})
    adapters, versions = {}, {}
    for key, value in sorted(values.items()):
        name = key.decode("utf-8", "replace")
        label = f"the adapter {shown(name)} in the registry"
        if isinstance(value, int) or not _NAME.fullmatch(name):
            has = f"{value} bytes, over the limit of {MAX_ADAPTER_BYTES}" if isinstance(value, int) else "no valid name"
            raise ProtocolError(f"{label} has {has}")
        number, _, data = value.partition(b" ")
        versions[name] = _read_version(number)
        adapters[name] = unpack_adapter(data, label)
    return Registered(_read_version(version), adapters, versions)


def _read_version(value: bytes | int) -> int:
    if isinstance(value, int) or not _VERSION.fullmatch(value):
        raise ProtocolError(f"{shown(value)} is no version of a registry of adapters")
    return int(value)
