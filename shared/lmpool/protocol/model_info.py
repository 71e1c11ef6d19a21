"""The info that workers publish about a model: its limits, its abilities, and everything that decides its rows."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import msgspec

from lmpool.errors import ProtocolError
from lmpool.protocol.job import READABLE, WIRE_VERSION, other_version
from lmpool.protocol.row import ROW_VERSION, Encoding
from lmpool.protocol.version import Version, name_of_version, split_name
from lmpool.settings import CONTROLS, shown

LIMITS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**32 - 1),
    "max_prompt_tokens": (1, 2**32 - 1),
    "queue_limit": (1, 10**10),
    "lease_s": (0.1, 3600),
    "row_ttl_s": (1, 10**9),
}
"""Min and max of each number in an info, so that the wire (uint32) and Redis (int64 ms) can carry the number."""

TRIE_SERVICE = "trie"
"""The model name of the trie workers; no other model can have this name."""

MAX_INFO_BYTES = 64 * 1024
"""Max bytes of an encoded info."""

MAX_PARTITIONS = 64
"""Max partitions of a model's queue: clients read the load of each partition every second, or every 5 s if calm."""

_VERSION_FIELD = "wire_version"  # Key in an encoded info: the wire version of the release that wrote the info.
# Annotations with the bounds of each number; the bounds refuse NaN too.
_LIMITED = {name: msgspec.Meta(ge=least, le=most) for name, (least, most) in LIMITS.items()}
_Name = Annotated[str, msgspec.Meta(pattern=rf"^[^{CONTROLS}]*\Z")]
"""A name without control characters, for programs and people. Other texts of an info may be paths and sentences."""
_Partition = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Partitions = Annotated[tuple[_Partition, ...], msgspec.Meta(min_length=1, max_length=MAX_PARTITIONS)]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model.

    Attributes:
        name: the name under which the model is served.
        backend: the backend that computes the rows: "hf", "synthetic", ...
        vocab_size: V, the length of every row (of the model, not of the tokenizer).
        max_prompt_tokens: max tokens of a prompt.
        revision: identifies the weights exactly; for a version, "REVISION OF VERSION 0@NUMBER.NONCE".
        dtype: the dtype of the computation, such as "float32".
        encoding: the encoding of rows: "f32", "bf16" or "f16".
        lossy: whether the encoding loses bits that the backend computed.
        source: hub name or folder of the model, for its tokenizer; or "".
        gguf_file: the GGUF file in `source` that holds the tokenizer, or "".
        vocabulary: digest of the model's vocabulary (`lmpool.vocabulary`), which the pool stores; or "".
        tokenizer: digest of the model's tokenizer (`lmpool.protocol.tokenizer`), which the pool stores; or "".
        answers_tries: whether the model's workers also answer trie jobs, in the step that computes the row.
        positions: whether the workers predict every position of a text, and score a continuation, in one forward pass.
        hidden: d, the size of a hidden state, if the workers send hidden states and the model's head; else 0.
        note: a sentence for people, such as that rows are synthetic.
        queue_limit: max prompts that wait at once; the pool refuses more prompts.
        lease_s: seconds after which another worker takes over the jobs of a silent worker.
        row_ttl_s: seconds that a row stays in the cache.
        partitions: the numbers of the partitions of the model's queue (`Keys.model`); the first is 0.
    """

    name: _Name
    backend: _Name
    vocab_size: Annotated[int, _LIMITED["vocab_size"]]
    max_prompt_tokens: Annotated[int, _LIMITED["max_prompt_tokens"]]
    revision: _Name
    dtype: _Name
    encoding: Annotated[str, msgspec.Meta(pattern=r"^(f32|bf16|f16)\Z")] = "f32"
    lossy: bool = False
    source: str = ""
    gguf_file: str = ""
    vocabulary: str = ""
    tokenizer: str = ""
    answers_tries: bool = False
    positions: bool = False
    hidden: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    note: str = ""
    queue_limit: Annotated[int, _LIMITED["queue_limit"]] = 100_000
    lease_s: Annotated[float, _LIMITED["lease_s"]] = 15.0
    row_ttl_s: Annotated[float, _LIMITED["row_ttl_s"]] = 3600.0
    partitions: _Partitions = (0,)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide a row's value. All workers of a model must have the same values."""
        return {
            "backend": self.backend,
            "vocab_size": self.vocab_size,
            "revision": self.revision,
            "dtype": self.dtype,
            "lossy": self.encoding if self.lossy else "",
            # Always "": the digest of a prompt contains its adapter. This field stays, and the next field keeps its
            # name, so that cached rows keep their fingerprint.
            "adapter": "",
            "wire_version": ROW_VERSION,
        }

    @property
    def fingerprint(self) -> str:
        """Hash of `identity` (32 hexadecimal digits): the namespace of the model's rows in the cache."""
        return hashlib.blake2b(msgspec.msgpack.encode(sorted(self.identity.items())), digest_size=16).hexdigest()

    @property
    def service_fingerprint(self) -> str:
        """The wire version and the fingerprint; heartbeats carry this text as "fingerprint" (see `is_served_by`)."""
        return f"{WIRE_VERSION}-{self.fingerprint}"

    def is_served_by(self, service_fingerprint: str) -> bool:
        """Whether the worker with this `service_fingerprint` serves the same weights with a wire version in `READABLE`.

        All live workers of a model must do so.
        """
        return service_fingerprint in {f"{version}-{self.fingerprint}" for version in READABLE}

    @property
    def base(self) -> str:
        """The name of the model, without the version of its weights (`lmpool.protocol.version`)."""
        return split_name(self.name)[0]

    @property
    def version(self) -> int:
        """The version of the model's weights; 0 for the checkpoint that the workers were started with."""
        return split_name(self.name)[1] or 0

    def of_version(self, version: Version | None) -> ModelInfo:
        """The info of another version of this model; of version 0 for None."""
        revision = self.revision.rpartition("@")[0] if self.version else self.revision
        if version is None:
            return replace(self, name=self.base, revision=revision)
        name = name_of_version(self.base, version.number)
        return replace(self, name=name, revision=f"{revision}@{version.number}.{version.nonce}", partitions=(0,))

    @property
    def lineage(self) -> str:
        """The fingerprint of version 0, which all versions of a model share."""
        return self.of_version(None).fingerprint

    @property
    def is_trie(self) -> bool:
        """Whether this is the info of the trie workers, whose results have any length."""
        return self.name == TRIE_SERVICE

    @property
    def start_command(self) -> str:
        """The command that starts a worker of this model."""
        return "lmpool trie-worker" if self.is_trie else "lmpool worker"

    @property
    def row_encoding(self) -> Encoding:
        """The encoding of rows as a member of `Encoding`, whose numbers the encoded rows contain."""
        return Encoding[self.encoding.upper()]

    def differences(self, other: ModelInfo) -> list[str]:
        """The identity fields in which two infos differ, as "FIELD is VALUE there and VALUE here"."""
        mine, theirs = self.identity, other.identity
        changed = [name for name in mine if mine[name] != theirs[name]]
        return [f"{name} is {theirs[name]!r} there and {mine[name]!r} here" for name in changed]

    def pack(self) -> bytes:
        """The info as MessagePack."""
        return msgspec.msgpack.encode({_VERSION_FIELD: WIRE_VERSION, **asdict(self)})

    @classmethod
    def unpack(cls, data: bytes) -> ModelInfo:
        """Read an info, and ignore fields that this release does not know.

        Raises `ProtocolError` for other bytes, missing fields, impossible values or a version that is not readable.
        """
        if len(data) > MAX_INFO_BYTES:
            raise ProtocolError(f"a model info of {len(data)} bytes is over the limit of {MAX_INFO_BYTES}")
        try:
            values = _ENCODED.decode(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a model info with fields that do not decode: {error!s:.100}") from error
        version = values.pop(_VERSION_FIELD, None)
        if type(version) is int and version not in READABLE:
            raise ProtocolError(other_version(f"the model {shown(values.get('name'))} is served with", version))
        values = {name: value for name, value in values.items() if name in _TYPES}
        if type(version) is not int or not values.keys() >= _REQUIRED:
            raise ProtocolError("a model info lacks fields that this release needs: do all sides run the same one?")
        for name, value in values.items():
            try:  # Check the fields one by one, so that the error names the field and the value.
                values[name] = msgspec.convert(value, _TYPES[name])
            except msgspec.ValidationError as error:
                reason = "there must be no control characters" if _TYPES[name] == _Name else error
                raise ProtocolError(f"a model info has {name} = {shown(value)}: {reason}") from error
        return cls(**values)


def partitions_in(packed: bytes | int) -> tuple[int, ...]:
    """The partitions that an encoded info names; partition 0 alone if it does not decode, or if it is only a size."""
    try:
        return ModelInfo.unpack(packed).partitions if isinstance(packed, bytes) else (0,)
    except ProtocolError:
        return (0,)


_TYPES = get_type_hints(ModelInfo, include_extras=True)
_REQUIRED = {field.name for field in fields(ModelInfo) if field.default is MISSING}
_ENCODED = msgspec.msgpack.Decoder(dict[str, Any])
