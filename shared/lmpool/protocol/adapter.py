"""Adapters: their names, and how the registry of a model encodes its entries.

Users name an adapter; a job names its exact weights, as "name@revision". Prompts with different weights therefore have
different digests, and no cached row can be one of weights that were replaced.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from lmpool.errors import ProtocolError, SettingsError
from lmpool.protocol.job import Message, unpack
from lmpool.settings import shown

MAX_ADAPTERS = 4096
"""Max adapters in the registry of one model; all of them are listed in one answer of at most a few megabytes."""

MAX_LOADED = 64
"""Max adapters that a worker keeps loaded, unless its settings say otherwise; an adapter takes 10 to 200 MB."""

MAX_ADAPTER_BYTES = 16 * 1024
"""Max bytes of an encoded entry of the registry: a source of 4 KiB and its digest, with room to spare."""

OWNER_FIELD = ""
"""The field of the registry that has the fingerprint of the model; no adapter can have this name."""

VERSION_FIELD = "@"
"""The field of the registry that has its version; no adapter can have this name."""

CHECK_PREFIX = "check-"
"""How the revision begins that a job names whose adapter a worker must load for the first time; a nonce follows."""

# "@" divides name and revision, "=" name and folder; control characters and lone surrogates cannot be shown or sent.
_NAME = re.compile(r"[^@,=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,100}")
_REVISION = re.compile(r"[0-9A-Za-z._-]{1,64}")
_VERSION = re.compile(rb"[0-9]{1,15}")
_FORMAT = 1  # Tag of encoded adapters.
_MAX_SOURCE = 4096  # Bytes; PATH_MAX of Linux.


def check_adapter_name(field: str, name: object) -> str:
    """Return the name, if an adapter can have it; otherwise raise `SettingsError` with the field's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise SettingsError(
            f"{field}: {shown(name)} must be 1 to 100 characters without @, comma, = and control characters, and "
            "without spaces at its ends"
        )
    return name


def check_source(field: str, source: object) -> str:
    """Return the source, if it can be a folder or a hub name; otherwise raise `SettingsError` with the field's name."""
    text = source if isinstance(source, str) else ""
    if not text.strip() or not text.isprintable() or len(text.encode()) > _MAX_SOURCE:
        raise SettingsError(f"{field}: {shown(source)} is no printable folder or hub name of up to {_MAX_SOURCE} bytes")
    return text


def qualify(name: str, revision: str) -> str:
    """The name of an adapter in jobs: its name and the digest of its weights."""
    return f"{name}@{revision}"


def name_of(qualified: str) -> str:
    """The name that users give."""
    return qualified.rpartition("@")[0]


def revision_of(qualified: str) -> str:
    """The digest of the weights."""
    return qualified.rpartition("@")[2]


def is_qualified(text: str) -> bool:
    """Whether a text can be the name of an adapter in jobs."""
    name, _, revision = text.rpartition("@")
    return bool(_NAME.fullmatch(name) and _REVISION.fullmatch(revision))


class Adapter(Message, frozen=True, tag=_FORMAT):
    """An adapter."""

    source: str  # Folder or hub name, on the workers' machines.
    revision: str = ""  # Digest of its weights; "" as long as no worker has loaded it.


_ADAPTERS = msgspec.msgpack.Decoder(Adapter)


class Registered(NamedTuple):
    """The registry of a model, or some of its entries."""

    version: int  # Grows with every change: milliseconds since 1970, or one more than before; 0 for an empty registry.
    adapters: dict[str, Adapter]  # Name -> adapter.
    versions: dict[str, int]  # Name -> the version in which the entry was written.


def unpack_adapter(data: bytes, what: str) -> Adapter:
    """Read an adapter; raises `ProtocolError` with `what` for any other bytes."""
    return unpack(_ADAPTERS, data, MAX_ADAPTER_BYTES, what)


def unpack_registered(values: dict[bytes, bytes | int], fingerprint: str) -> Registered:
    """Read the hash of a registry, which any client may have written to: field -> value, or the size of a large one.

    The registry of another model that had this model's name, but another fingerprint, counts as empty. Raises
    `ProtocolError` if something in it is no adapter.
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
