"""Messages of the releases before and after this one are read, and messages of other releases are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple, get_args

import msgpack
import msgspec
import pytest

from lmpool.batch.folder import Input, Manifest, Model, Options, Shard
from lmpool.batch.run import BatchSettings, Pool
from lmpool.errors import ProtocolError
from lmpool.protocol.adapter import Adapter, unpack_adapter
from lmpool.protocol.job import READABLE, WIRE_VERSION, Failure, Job, Message, TracedJob, unpack_failure, unpack_job
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import Query, TopQuery, unpack_query
from lmpool.protocol.version import Version, unpack_version
from lmpool.rows.datagram import RowsReady, unpack_datagram

INFO = ModelInfo("m", "hf", 10, 20, "r", "float32")
_INPUT = Input("in.jsonl", "jsonl", 1, 1, "d")
_MODEL = Model("m", "f", "hf", "r", "float32", "f32", False, 10, "", "")
VERSIONED = ("job", "failure", "datagram", "model info")
"""The messages that have the wire version."""


class Sent(NamedTuple):
    """A message that crosses processes: its value, its bytes, and the function with which another process reads it."""

    value: Any
    data: bytes
    read: Callable[[bytes], Any]


def of_json(value: msgspec.Struct) -> Sent:
    return Sent(value, msgspec.json.encode(value), lambda data: msgspec.json.decode(data, type=type(value)))


def packed(message: Message, read: Callable[[bytes], Any]) -> Sent:
    return Sent(message, message.pack(), read)


# Every message of a pool, and every file that a run of `lmpool batch` leaves for a later command. Heartbeats and stream
# entries are hashes whose fields readers look up by name: the mix of two releases (`tests.releases`) tests them.
MESSAGES = {
    "job": packed(TracedJob(b"\7\0\0\0", "a", "f", traceparent="00-ab"), unpack_job),
    "failure": packed(Failure("WorkerError", "no"), unpack_failure),
    "datagram": packed(RowsReady("f", b"w", {b"d": b"v"}, False), unpack_datagram),
    "adapter": packed(Adapter("folder", "revision"), lambda data: unpack_adapter(data, "it")),
    "version": packed(Version(1, "0" * 16, chunks=(bytes(16),)), lambda data: unpack_version(b"1-0", data)),
    "model info": Sent(INFO, INFO.pack(), ModelInfo.unpack),
    "manifest": of_json(Manifest(1, "0.2.0", _INPUT, _MODEL, Options("row", 0, "jsonl", 1), {}, 1)),
    "finished shard": of_json(Shard(0, 1, 0, 1, "d")),
    "settings of a batch": of_json(BatchSettings("topk:3")),
    "pool of a batch": of_json(Pool("m", "lmpool")),
}


def with_field(data: bytes) -> bytes:
    """An encoded message with one field more at its end."""
    try:
        fields = msgspec.json.decode(data)
        return msgspec.json.encode({**fields, "of a later release": [1]})
    except msgspec.DecodeError:
        fields = msgpack.unpackb(data)
    more = {**fields, "of a later release": [1]} if isinstance(fields, dict) else [*fields, "of a later release"]
    return bytes(msgpack.packb(more))


def with_version(data: bytes, version: int) -> bytes:
    """An encoded message with another wire version."""
    fields = msgpack.unpackb(data)
    if isinstance(fields, dict):
        return bytes(msgpack.packb({**fields, "wire_version": version}))
    return bytes(msgpack.packb([version, *fields[1:]]))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_field_of_a_later_release_is_ignored(name: str) -> None:
    value, data, read = MESSAGES[name]
    assert read(data) == value
    assert read(with_field(data)) == value


def test_the_table_has_every_message() -> None:
    # Queries are the exception of `test_a_query_with_an_unknown_field_is_refused`.
    kinds = {kind for kind in _subclasses(Message) if kind.__module__.startswith("lmpool.")}
    tested = {type(sent.value) for sent in MESSAGES.values()} | {Job, *get_args(Query)}
    assert {kind for kind in kinds if not _subclasses(kind)} <= tested


def _subclasses(kind: type) -> set[type]:
    direct: set[type] = set(kind.__subclasses__())
    return direct.union(*map(_subclasses, direct))


@pytest.mark.parametrize("name", VERSIONED)
@pytest.mark.parametrize("version", READABLE)
def test_messages_of_the_next_wire_version_are_read(name: str, version: int) -> None:
    value, data, read = MESSAGES[name]
    assert read(with_version(with_field(data), version)) == value


@pytest.mark.parametrize("name", VERSIONED)
@pytest.mark.parametrize("version", [READABLE[0] - 1, READABLE[-1] + 1])
def test_messages_of_other_wire_versions_are_refused_with_both_versions(name: str, version: int) -> None:
    text = rf"wire version {version}, and this release of lmpool speaks {WIRE_VERSION}: .*upgrade\.md"
    with pytest.raises(ProtocolError, match=text):
        MESSAGES[name].read(with_version(MESSAGES[name].data, version))


def test_an_untraced_job_of_a_later_release_is_read() -> None:
    # A later release adds its fields after the trace, which is "" for a client that does not trace.
    job = Job(b"\7\0\0\0", "a", "f")
    later = msgpack.packb([*msgpack.unpackb(job.pack()), "", "of a later release"])
    assert unpack_job(later) == TracedJob(b"\7\0\0\0", "a", "f")
    assert unpack_job(msgpack.packb([*msgpack.unpackb(later), *range(20)])) == TracedJob(b"\7\0\0\0", "a", "f")


def test_an_info_without_a_later_field_gets_its_default() -> None:
    fields = {name: value for name, value in asdict(INFO).items() if name not in ("partitions", "note")}
    assert ModelInfo.unpack(msgpack.packb({"wire_version": WIRE_VERSION, **fields})) == INFO


def test_a_query_with_an_unknown_field_is_refused() -> None:
    # The field could change the result, which the worker would then store under the digest of this query.
    for data in (with_field(TopQuery(1).pack()), msgpack.packb(["of a later release", 1])):
        with pytest.raises(ProtocolError, match=r"if the client has a later release, upgrade the workers first"):
            unpack_query(data)


def test_workers_serve_together_if_their_wire_versions_differ_by_at_most_one() -> None:
    assert [version for version in range(20) if INFO.is_served_by(f"{version}-{INFO.fingerprint}")] == [*READABLE]
    assert INFO.is_served_by(INFO.service_fingerprint)
    assert not INFO.is_served_by(f"{WIRE_VERSION}-{'0' * 32}")
    assert not INFO.is_served_by(INFO.fingerprint), "heartbeats of checkouts without a wire version"
