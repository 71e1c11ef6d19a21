"""Adapters: their names, and the state of the registry that has those in service and those on offer.

People name an adapter; a job names the very weights, as "name@revision". So rows of different weights never have one
digest, and what is cached for those that were replaced is never asked for again.

A server may forget changes: a replica that had not heard of them becomes the primary, or everything is lost. So the
registry has a generation, and who has seen one believes only what was made over it (`Registered.forgets`).
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self, TypeVar

from lmpool.errors import ProtocolError, SettingsError
from lmpool.protocol.job import Message, checked, unpack_flat
from lmpool.settings import shown

MAX_ADAPTERS = 64
"""Adapters that one model may have."""

GENERATION_FIELD = "@"
"""The field of the registry that has its generation; no adapter can have this name."""

MAX_ADAPTER_BYTES = 16 * 1024
"""Most bytes of an encoded adapter or offer."""

# "@" divides name and revision, "=" name and folder; control characters and lone surrogates cannot be shown or sent.
_NAME = re.compile(r"[^@,=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,100}")
_REVISION = re.compile(r"[0-9A-Za-z._-]{1,64}")
_GENERATION = re.compile(r"([0-9]{1,15})-([0-9a-f]{16})")
# Numbers of changes are milliseconds since 1970; workers that start count from 0.
_FIRST_CHANGE = 10**12
_VERSION = 1
_MAX_SOURCE = 4096


def check_adapter_name(field: str, name: object) -> str:
    """The name, if an adapter can have it.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise SettingsError(
            f"{field}: {shown(name)} must be 1 to 100 characters without @, comma, = and control characters, and "
            "without spaces at its ends"
        )
    return name


def check_source(field: str, source: object) -> str:
    """A folder or hub name, if it can be one.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(source, str) or not source.strip() or len(source.encode("utf-8", "replace")) > _MAX_SOURCE:
        raise SettingsError(f"{field}: {shown(source)} is no folder or hub name of at most {_MAX_SOURCE} bytes")
    if not source.isprintable():
        raise SettingsError(f"{field}: {shown(source)} has characters that cannot be sent or shown")
    return source


def qualify(name: str, revision: str) -> str:
    """The name of an adapter in jobs: its name and the digest of its weights."""
    return f"{name}@{revision}"


def name_of(qualified: str) -> str:
    """The name that people use."""
    return qualified.rpartition("@")[0]


def revision_of(qualified: str) -> str:
    """The digest of its weights."""
    return qualified.rpartition("@")[2]


def is_qualified(text: str) -> bool:
    """Whether a text can be the name of an adapter in jobs."""
    name, _, revision = text.rpartition("@")
    return bool(_NAME.fullmatch(name) and _REVISION.fullmatch(revision))


class Adapter(Message, frozen=True, tag=_VERSION):
    """An adapter in service.

    Attributes:
        source: folder or hub name, on the workers' machines.
        revision: digest of its weights.
    """

    source: str
    revision: str


class Offer(Message, frozen=True, tag=_VERSION):
    """An adapter that the workers are asked to load.

    Attributes:
        source: as `Adapter.source`.
        nonce: names this request.
        revision: digest of its weights, from the first worker that has loaded it; "" before.
    """

    source: str
    nonce: str
    revision: str = ""


_Registered = TypeVar("_Registered", Adapter, Offer)


class Generation(NamedTuple):
    """Names a state of the registry.

    Attributes:
        number: grows with every change: milliseconds since 1970 by the server's clock, or one more than before.
        change: 16 random hexadecimal digits: two servers may count alike.
    """

    number: int = 0
    change: str = ""

    def __str__(self) -> str:
        """As it travels; "" for that of a registry which nobody has made."""
        return f"{self.number}-{self.change}" if self.change else ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives.

        Raises:
            ProtocolError: it is something else.
        """
        if not text:
            return cls()
        match = _GENERATION.fullmatch(text)
        if not match:
            raise ProtocolError(f"{shown(text)} is no generation of a registry of adapters")
        return cls(int(match[1]), match[2])

    @property
    def is_of_a_start(self) -> bool:
        """Whether nobody has changed what workers were started with."""
        return self.number < _FIRST_CHANGE


class Registered(NamedTuple):
    """A state of the registry.

    Attributes:
        owner: fingerprint of the model that the adapters are for; "" when the server has lost them.
        adapters: those in service, by name.
        offers: those that the workers are asked to load, by name.
        generation: names this state.
        base: that of the latest state in whose place this one was put.
    """

    owner: str
    adapters: dict[str, Adapter]
    offers: dict[str, Offer]
    generation: Generation = Generation()
    base: Generation = Generation()

    @property
    def named(self) -> str:
        """Generation and base as they travel."""
        return f"{self.generation} {self.base}".strip()

    def forgets(self, seen: Registered) -> bool:
        """Whether changes may be missing here that `seen` has: it was made over an older state than that."""
        if self.owner != seen.owner:
            return not self.owner
        return self.generation != seen.generation and self.base < seen.generation


def decode_registered(values: dict[bytes, bytes | int], kind: type[_Registered]) -> dict[str, _Registered]:
    """The adapters or offers of a hash that anybody may have written to; a value that is too large is its size.

    Raises:
        ProtocolError: something in it is none.
    """
    decoded = {}
    for key, data in values.items():
        name = key.decode("utf-8", "replace")
        if isinstance(data, int):
            raise ProtocolError(f"what the server has as the adapter {shown(name)} is none: it has {data} bytes")
        if not _NAME.fullmatch(name):
            raise ProtocolError(f"the server has an adapter {shown(name)}, which is no name of one")
        fields = unpack_flat(data, MAX_ADAPTER_BYTES, "registered adapter")
        decoded[name] = checked(kind, fields, f"an adapter, which the server has as {shown(name)}")
    return decoded
