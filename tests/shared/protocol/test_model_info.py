"""Model infos, the descriptions of served models: round trips, fingerprints, and refusal of malformed infos."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, fields, replace
from typing import Any, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import ProtocolError
from lmpool.protocol import model_info as info_module
from lmpool.protocol.job import WIRE_VERSION
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding

INFO = ModelInfo(name="m", backend="synthetic", vocab_size=64, max_prompt_tokens=32, revision="seed-0", dtype="float32")
OTHER: dict[str, Any] = {
    "name": "n",
    "backend": "hf",
    "vocab_size": 65,
    "max_prompt_tokens": 33,
    "revision": "seed-1",
    "dtype": "bfloat16",
    "encoding": "bf16",
    "lossy": True,
    "source": "somewhere",
    "gguf_file": "a.gguf",
    "vocabulary": "2b" * 16,
    "tokenizer": "3c" * 16,
    "answers_tries": True,
    "positions": True,
    "hidden": 64,
    "note": "a note",
    "queue_limit": 5,
    "lease_s": 2.5,
    "row_ttl_s": 60.0,
    "partitions": (0, 3),
}
IDENTITY = {"backend", "vocab_size", "revision", "dtype", "lossy"}


def test_the_examples_cover_every_field() -> None:
    assert set(OTHER) == {field.name for field in fields(ModelInfo)}
    assert all(getattr(INFO, name) != value for name, value in OTHER.items())


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=30)


@given(
    st.builds(
        ModelInfo,
        name=NAMES,
        backend=st.sampled_from(["hf", "synthetic"]),
        vocab_size=st.integers(1, 2**31),
        max_prompt_tokens=st.integers(1, 2**31),
        revision=NAMES,
        dtype=st.sampled_from(["float32", "bfloat16"]),
        encoding=st.sampled_from(["f32", "bf16", "f16"]),
        lossy=st.booleans(),
        note=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        queue_limit=st.integers(1, 2**31),
        lease_s=st.floats(0.1, 3600),
        row_ttl_s=st.floats(1, 1e6) | st.integers(1, 10**6),
    )
)
def test_infos_survive_the_wire(info: ModelInfo) -> None:
    read = ModelInfo.unpack(info.pack())
    assert read == info
    assert read.fingerprint == info.fingerprint


@pytest.mark.parametrize("field", ["name", "backend", "revision", "dtype"])
@pytest.mark.parametrize("control", ["\x00", "\x1b", "\n", "\x7f", "\x9b", "\u2028", "\u2029"])
def test_a_name_with_control_characters_is_refused(field: str, control: str) -> None:
    bad: dict[str, Any] = {field: f"a{control}b"}
    with pytest.raises(ProtocolError, match=f"has {field} = .*: there must be no control characters"):
        ModelInfo.unpack(replace(INFO, **bad).pack())


@pytest.mark.parametrize("name", OTHER)
def test_the_fingerprint_changes_exactly_with_the_fields_that_decide_a_row(name: str) -> None:
    changed = replace(INFO, **{name: OTHER[name]})
    assert (changed.fingerprint != INFO.fingerprint) == (name in IDENTITY)


def test_the_encoding_is_part_of_the_fingerprint_only_when_it_loses_bits() -> None:
    exact = {replace(INFO, encoding=name).fingerprint for name in ("f32", "bf16", "f16")}
    lossy = {replace(INFO, encoding=name, lossy=True).fingerprint for name in ("f32", "bf16", "f16")}
    assert len(exact) == 1
    assert len(lossy) == 3
    assert not exact & lossy


def test_the_version_of_rows_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = INFO.fingerprint
    monkeypatch.setattr(info_module, "ROW_VERSION", 2)
    assert INFO.fingerprint != before


def test_the_fingerprint_is_pinned() -> None:
    # The fingerprint names rows in a cache that outlives releases, so it must not change for the same weights.
    assert INFO.fingerprint == "c892dd89ed9a74b5f26911a5cc3324d3"


def test_values_do_not_run_into_each_other_in_the_fingerprint() -> None:
    assert replace(INFO, revision="ab", dtype="c").fingerprint != replace(INFO, revision="a", dtype="bc").fingerprint


@pytest.mark.parametrize("name", OTHER)
def test_differences_name_the_identity_field_and_both_values(name: str) -> None:
    differences = INFO.differences(replace(INFO, **{name: OTHER[name]}))
    if name == "lossy":
        assert differences == ["lossy is 'f32' there and '' here"]
    elif name in IDENTITY:
        assert differences == [f"{name} is {OTHER[name]!r} there and {getattr(INFO, name)!r} here"]
    else:
        assert differences == []


def test_differences_name_every_field_that_differs() -> None:
    differences = INFO.differences(ModelInfo(**OTHER))
    assert {line.partition(" ")[0] for line in differences} == IDENTITY


def test_infos_without_differences_have_one_fingerprint_and_the_other_way_round() -> None:
    for name, value in OTHER.items():
        other = replace(INFO, **{name: value})
        assert (INFO.differences(other) == []) == (INFO.fingerprint == other.fingerprint)


def test_encodings_are_identified_by_their_codes() -> None:
    encodings = {name: replace(INFO, encoding=name).row_encoding for name in ("f32", "bf16", "f16")}
    assert encodings == {"f32": Encoding.F32, "bf16": Encoding.BF16, "f16": Encoding.F16}


# Malformed model infos


def packed(**changed: Any) -> bytes:
    """A model info as MessagePack, with some fields replaced."""
    data: bytes = msgpack.packb({**encoded(INFO), **changed})
    return data


def encoded(info: ModelInfo) -> dict[Any, Any]:
    """The decoded MessagePack fields of a model info."""
    return {"wire_version": WIRE_VERSION, **asdict(info)}


WRONG_TYPES: list[tuple[str, Any]] = [
    *((name, value) for name in ("name", "revision", "encoding", "note") for value in (None, 1, b"f32", ["f32"], True)),
    *((name, value) for name in ("vocab_size", "queue_limit") for value in (None, "64", 64.0, True, [64], b"64")),
    *((name, value) for name in ("lease_s", "row_ttl_s") for value in (None, "1", True, [1.0], {"s": 1})),
    *(("lossy", value) for value in (None, 0, 1, "", "f32")),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_field_of_the_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=name):
        ModelInfo.unpack(packed(**{name: value}))


def test_seconds_may_be_a_whole_number() -> None:
    assert ModelInfo.unpack(packed(lease_s=3)).lease_s == 3


@pytest.mark.parametrize("name", sorted(info_module._REQUIRED))
def test_a_missing_field_without_a_default_is_refused(name: str) -> None:
    values = encoded(INFO)
    del values[name]
    with pytest.raises(ProtocolError, match="fields"):
        ModelInfo.unpack(msgpack.packb(values))


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ProtocolError, match="fields"):
        ModelInfo.unpack(msgpack.packb({**encoded(INFO), b"name": "m"}))


IMPOSSIBLE: list[tuple[str, Any]] = [
    *(("vocab_size", value) for value in (0, -1, 2**32, 2**63)),
    *(("max_prompt_tokens", value) for value in (0, -1)),
    *(("encoding", value) for value in ("", "f64", "F 32", "int8")),
    *(("queue_limit", value) for value in (0, -1)),
    *((name, value) for name in ("lease_s", "row_ttl_s") for value in (float("nan"), float("inf"), 0.0, -1.0)),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_a_value_that_no_model_has_is_refused(name: str, value: object) -> None:
    # If such a value were accepted, its first use, as int(nan * 1000), would raise an error that is no LMPoolError.
    with pytest.raises(ProtocolError, match=f"has {name} = {value!r}: [Ee]xpected "):
        ModelInfo.unpack(packed(**{name: value}))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", packed()[:-1], packed() + b"\0", msgpack.packb([]), msgpack.packb(list(encoded(INFO).values())),
     msgpack.packb("info"), msgpack.packb(None), msgpack.packb({1: 2}), b"\x81\x90\x01", b"\x91" * 5000],
)  # fmt: skip
def test_other_bytes_than_an_info_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="model info"):
        ModelInfo.unpack(data)


def test_a_info_over_the_limit_is_refused_with_size_and_limit() -> None:
    data = packed(note="x" * 65_536)
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes .* 65536"):
        ModelInfo.unpack(data)


@pytest.mark.parametrize(
    "bomb",
    [b"\xdd" + (60_000).to_bytes(4, "big") + b"\xa0" * 60_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
     b"\xdf" + (30_000).to_bytes(4, "big") + b"\xa0\xa0" * 30_000, b"\xc6\xff\xff\xff\xff"],
)  # fmt: skip
def test_a_bomb_is_refused_without_decoding_it(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            ModelInfo.unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_random_bytes_are_no_info(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ModelInfo.unpack(data)


@given(st.data())
def test_a_changed_info_is_refused_or_is_another_well_typed_info(data: st.DataObject) -> None:
    bad = bytearray(INFO.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    try:
        info = ModelInfo.unpack(bytes(bad))
    except ProtocolError:
        return
    for name, declared in get_type_hints(ModelInfo).items():
        kind = get_origin(declared) or declared
        assert type(getattr(info, name)) in {kind, int if kind is float else kind}


# Model infos of other releases


@pytest.mark.parametrize("more", [{}, {"colour": 1}])
def test_the_info_of_a_much_later_release_is_refused_by_its_version(more: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the model 'm' is served with wire version 10, and this .* speaks 8"):
        ModelInfo.unpack(packed(wire_version=10, **more))


def test_heartbeats_have_the_wire_version_and_the_fingerprint() -> None:
    # Checkouts before release 0.2.0 compare this text with their own.
    assert INFO.service_fingerprint == f"8-{INFO.fingerprint}"


@pytest.mark.parametrize("version", [None, "3", 3.0, True, [3]])
def test_a_malformed_wire_version_is_refused(version: object) -> None:
    with pytest.raises(ProtocolError, match="fields"):
        ModelInfo.unpack(packed(wire_version=version))
