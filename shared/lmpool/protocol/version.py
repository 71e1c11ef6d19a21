"""Versions of a model's weights: names such as "syn@12", and the entries of a model's registry (a Redis stream).

Version 12 of the model "syn" is served as a model of its own, named "syn@12", so its queue and its cached rows belong
to this version alone. Version 0 is the checkpoint that the workers were started with; its name is "syn".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from lmpool.errors import ProtocolError, SettingsError
from lmpool.protocol.job import Message, unpack
from lmpool.settings import shown

MAX_NUMBER = 10**9
"""Max number of a version."""

MAX_SPARSE = 64
"""Max sparse versions after a full one, because a new worker applies them all."""

MAX_ENTRIES = 256
"""Max entries of a registry that are read; publishers keep fewer."""

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes of one part of a file that the pool stores, so that no command of the server takes long."""

MAX_STORED_BYTES = 1024**3
"""Max bytes of a file that the pool stores. Larger weights are read from a folder."""

SERVED, REFUSED = "served", "refused: "
"""States of a version: a worker has served it, or a worker has refused it for the reason that follows."""

_NAMED = re.compile(r"(.*)@(0|[1-9][0-9]{0,9})", re.DOTALL)
_MAX_VERSION_BYTES = 16 * 1024  # Max bytes of an encoded entry.
_DIGEST_BYTES = 16  # Bytes of the BLAKE2b digest of a stored part.
_FORMAT = 1  # MessagePack tag of an encoded entry.


def name_of_version(base: str, number: int) -> str:
    """The name under which a version of the model `base` is served."""
    return f"{base}@{number}" if number else base


def split_name(name: str) -> tuple[str, int | None]:
    """The model and the version that a name such as "syn@12" names; the version is None if the name has none."""
    found = _NAMED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


def pointer_of(base: str) -> str:
    """The field of the hash `Keys.models` that holds the number of the version that clients of a model use."""
    return f"{base}@"


def check_base(field: str, name: str) -> None:
    """Refuse a model's name that looks like the name of a version; `field` names the setting in the error."""
    if name.endswith("@") or split_name(name)[1] is not None:
        text = f"{field}: {shown(name)} must not end with @ or with @ and a number"
        raise SettingsError(f"{text}: versions have such names")


class Version(Message, frozen=True, tag=_FORMAT):
    """An entry of the registry: where the files of a version are."""

    number: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    nonce: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]  # Drawn by the publisher: numbers may come again.
    changes: Annotated[int, msgspec.Meta(ge=-1, le=MAX_NUMBER)] = -1  # Version that a sparse one changes; -1: full.
    source: Annotated[str, msgspec.Meta(max_length=4096)] = ""  # Folder, file or URL for workers; "": stored in chunks.
    # Digests of the stored parts; with a `source`, one digest of samples of its files (`tensors.sample_digest`).
    chunks: tuple[Annotated[bytes, msgspec.Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)], ...] = ()

    @property
    def entry(self) -> str:
        """The id of the version's stream entry: the server refuses an id that is not larger than all earlier ones."""
        return f"{self.number}-0"

    @property
    def parts(self) -> int:
        """Number of parts that the pool stores."""
        return 0 if self.source else len(self.chunks)

    @property
    def is_sparse(self) -> bool:
        """Whether the version has only the numbers that differ from the version `changes`."""
        return self.changes >= 0


_VERSIONS = msgspec.msgpack.Decoder(Version)


class PublishedVersions(NamedTuple):
    """A registry as it was read."""

    versions: tuple[Version, ...]  # Oldest first.
    states: Mapping[int, str]  # Number -> SERVED, or REFUSED and a reason; undecided versions have no state.
    last: str  # Id of the last entry, which may be unreadable; "0-0" for none.
    has_owner: bool  # Whether a worker has claimed the registry for its model.

    @property
    def newest(self) -> int:
        """The largest number so far, refused versions and unreadable entries included; 0 for none."""
        return int(self.last.partition("-")[0])

    @property
    def newest_usable(self) -> Version | None:
        """The newest version that was not refused."""
        return next((version for version in reversed(self.versions) if not self.reason(version.number)), None)

    def reason(self, number: int) -> str:
        """Why a version was refused; "" if it was not."""
        state = self.states.get(number, "")
        return state.removeprefix(REFUSED) if state.startswith(REFUSED) else ""

    def chain(self, *, is_tried: bool = True) -> tuple[Version, ...]:
        """The versions whose files make the newest usable version: the last full one, and the sparse ones after it.

        Version 0 is () and the base of sparse versions without a full one. Refused versions are left out, and so are
        sparse versions that change a refused one; without `is_tried`, also versions that no worker has served yet.
        """
        chain: tuple[Version, ...] = ()
        for version in self.versions:
            if self.reason(version.number) or not (is_tried or version.number in self.states):
                continue
            if not version.is_sparse:
                chain = (version,)
            elif version.changes == (chain[-1].number if chain else 0):
                chain = (*chain, version)
        return chain


def unpack_version(entry: bytes, data: bytes) -> Version:
    """Decode an entry of a registry; raises `ProtocolError` for bytes that are no such entry."""
    version = unpack(_VERSIONS, data, _MAX_VERSION_BYTES, "a version")
    if version.entry.encode() != entry:
        raise ProtocolError(f"the entry {shown(entry)} of the registry holds version {version.number}")
    return version
