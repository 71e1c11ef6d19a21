"""Stored tries: exact round trips, the layout to the byte, memory maps, and every kind of damage refused."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.trie import Trie
from lmpool.trie_arrays import derive_arrays
from lmpool.trie_file import encode_trie
from lmpool.vocab import Vocabulary
from tests.tries import ARRAYS, EXAMPLE, arrays_of, assert_same, sums, tekken, vocabularies

HEADER = struct.Struct("<4sIIIIIQ16s16s")


def sealed(data: bytes | bytearray) -> bytes:
    """The bytes with a checksum that is right for them."""
    return bytes(data[:48]) + hashlib.blake2b(data[:48] + data[64:], digest_size=16).digest() + bytes(data[64:])


def offset_of(trie: Trie, name: str) -> int:
    """Where an array begins, by the documented layout."""
    before = ARRAYS[: ARRAYS.index(name)]
    sizes = [arrays_of(trie)[other].nbytes for other in before]
    return 64 + sum((size + 7) // 8 * 8 for size in sizes)


def assert_sound(trie: Trie) -> None:
    """Nothing in the trie leads out of its arrays, and its parts belong together."""
    nodes = np.arange(trie.n_nodes)
    assert trie.parent[0] == -1
    assert (trie.parent[1:] < nodes[1:]).all()
    assert (trie.parent[1:] >= 0).all()
    assert [trie.node(trie.prefix(node)) for node in nodes] == nodes.tolist()
    assert [len(trie.prefix(leaf)) for leaf in trie.leaf.tolist()] == trie.vocabulary.lengths.tolist()
    right = Trie([trie.prefix(leaf) for leaf in trie.leaf.tolist()])
    for name, array in arrays_of(trie).items():
        assert np.array_equal(getattr(right, name), array), name


@given(vocabularies)
def test_a_trie_comes_back_from_its_bytes(tokens: list[bytes]) -> None:
    trie = Trie(tokens)
    assert_same(Trie.from_bytes(trie.to_bytes()), trie)


def test_the_layout_is_pinned() -> None:
    trie = Trie(EXAMPLE)
    data = trie.to_bytes()
    packed = trie.vocabulary.pack()
    digest = bytes.fromhex(trie.digest)
    assert HEADER.unpack_from(data) == (b"LMPT", 1, 7, 8, 3, 0, len(packed), digest, sealed(data)[48:64])
    for name, array in arrays_of(trie).items():
        assert data[offset_of(trie, name) :][: array.nbytes] == array.tobytes()
    assert data[-len(packed) :] == packed


def test_bytes_are_used_in_place() -> None:
    data = Trie(EXAMPLE).to_bytes()
    trie = Trie.from_bytes(data)
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(array, whole) for array in arrays_of(trie).values())


@pytest.mark.parametrize("shift", range(1, 8))
def test_bytes_at_an_odd_place_are_copied(shift: int) -> None:
    trie = Trie(EXAMPLE)
    moved = Trie.from_bytes(memoryview(bytes(shift) + trie.to_bytes())[shift:])
    assert_same(moved, trie)
    assert all(array.flags.aligned for array in arrays_of(moved).values())


def test_bytes_that_change_later_do_not_change_the_trie() -> None:
    trie = Trie(EXAMPLE)
    data = bytearray(trie.to_bytes())
    read = Trie.from_bytes(data)
    data[:] = bytes(len(data))
    assert_same(read, trie)


def test_a_saved_trie_is_mapped_into_memory(tmp_path: Path) -> None:
    trie = Trie(tekken())
    trie.save(tmp_path / "tekken.trie")
    loaded = Trie.load(tmp_path / "tekken.trie")
    assert_same(loaded, trie)
    assert not any(array.flags.owndata for array in arrays_of(loaded).values())
    ws = np.random.default_rng(0).random(trie.n_tokens, np.float32)
    inner = sums(trie, ws)
    assert np.array_equal(loaded.expand(inner, ws), trie.expand(inner, ws))


def test_saving_again_leaves_mapped_tries_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "some.trie"
    Trie(EXAMPLE).save(path)
    first = Trie.load(path)
    Trie([b"other"]).save(str(path))
    assert_same(first, Trie(EXAMPLE))
    assert_same(Trie.load(str(path)), Trie([b"other"]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_trie_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        Trie(EXAMPLE).save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 200])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.trie"
    path.write_bytes(Trie(EXAMPLE).to_bytes()[:size])
    with pytest.raises(ProtocolError):
        Trie.load(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trie.load(tmp_path / "none.trie")


@given(vocabularies, st.data())
def test_damage_is_found(tokens: list[bytes], data: st.DataObject) -> None:
    stored = bytearray(Trie(tokens).to_bytes())
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    for damaged in (stored, stored[:at], stored + b"\0"):
        with pytest.raises(ProtocolError):
            Trie.from_bytes(damaged)


@settings(max_examples=400)
@given(vocabularies, st.data())
def test_damage_under_a_right_checksum_is_refused_or_harmless(tokens: list[bytes], data: st.DataObject) -> None:
    stored = bytearray(Trie(tokens).to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    try:
        trie = Trie.from_bytes(sealed(stored))
    except ProtocolError:
        return
    assert_sound(trie)


@given(st.binary(max_size=300), st.tuples(*[st.integers(0, 2**32 - 1)] * 3), st.integers(0, 2**64 - 1))
def test_noise_is_refused(noise: bytes, sizes: tuple[int, int, int], packed: int) -> None:
    header = HEADER.pack(b"LMPT", 1, *sizes, 0, packed, bytes(16), bytes(16))
    for data in (noise, sealed(header + noise)):
        with pytest.raises(ProtocolError):
            Trie.from_bytes(data)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("value", [-(2**31), -2, -1, 0, 1, 7, 8, 10, 255, 2**31 - 1])
@pytest.mark.parametrize("at", [0, -1])
def test_no_wrong_index_gets_past_the_loading(name: str, at: int, value: int) -> None:
    trie = Trie(EXAMPLE)
    data = bytearray(trie.to_bytes())
    array: NDArray[Any] = getattr(trie, name)
    place = offset_of(trie, name) + at % array.size * array.itemsize
    data[place : place + array.itemsize] = struct.pack("<q", value)[: array.itemsize]
    if data == trie.to_bytes() or (name == "label" and at == -1 and value % 256 > ord("a")):
        assert_sound(Trie.from_bytes(sealed(data)))
    else:
        with pytest.raises(ProtocolError, match="trie"):
            Trie.from_bytes(sealed(data))


def test_a_trie_with_another_vocabulary_inside_is_refused() -> None:
    trie, other = Trie(EXAMPLE), Vocabulary([token.upper() for token in EXAMPLE])
    size = len(other.pack())
    data = trie.to_bytes()[:-size] + other.pack()
    with pytest.raises(ProtocolError, match=f"vocabulary {trie.digest}, but carries the 7 of {other.digest}"):
        Trie.from_bytes(sealed(data))


@pytest.mark.parametrize(
    ("tokens", "depth", "label", "leaf", "problem"),
    [
        ([b"ab"], [0, 2], b"\0b", [1], "depths"),
        ([b"a"], [1, 1], b"\0a", [1], "depths"),
        ([b""], [0, 0], b"\0a", [1], "depths"),
        ([b"ab"], [0, 1], b"\0a", [1], "as deep as the tokens"),
        ([b"a", b"a"], [0, 1, 1], b"\0aa", [1, 2], "by byte value"),
        ([b"b", b"a"], [0, 1, 1], b"\0ba", [1, 2], "by byte value"),
        ([b"a"], [0, 1, 1], b"\0ab", [1], "without a token"),
        ([b"a"], [0, 1], b"aa", [1], "a root with a label"),
    ],
)
def test_arrays_that_agree_with_each_other_but_are_no_trie_are_refused(
    tokens: list[bytes], depth: list[int], label: bytes, leaf: list[int], problem: str
) -> None:
    arrays = derive_arrays(np.array(depth, np.int32), np.frombuffer(label, np.uint8), np.array(leaf, np.int32))
    with pytest.raises(ProtocolError, match=problem):
        Trie.from_bytes(encode_trie(Vocabulary(tokens), arrays))


def test_sizes_that_only_padding_makes_possible_are_refused() -> None:
    data = bytearray(Trie(EXAMPLE).to_bytes())
    data[8] = 8
    with pytest.raises(ProtocolError, match="of the 8 tokens of vocabulary .* but carries the 7"):
        Trie.from_bytes(sealed(data))


def test_a_trie_without_nodes_is_refused() -> None:
    packed = Vocabulary([b""]).pack()
    header = HEADER.pack(b"LMPT", 1, 1, 0, 0, 0, len(packed), bytes(16), bytes(16))
    with pytest.raises(ProtocolError, match="0 nodes"):
        Trie.from_bytes(sealed(header + bytes(24) + packed))


def test_the_header_has_no_room_for_more() -> None:
    data = bytearray(Trie(EXAMPLE).to_bytes())
    data[20] = 1
    with pytest.raises(ProtocolError):
        Trie.from_bytes(sealed(data))


@pytest.mark.parametrize(("at", "found"), [(0, "MMPT"), (4, "version 0")])
def test_another_format_is_named(at: int, found: str) -> None:
    data = bytearray(Trie(EXAMPLE).to_bytes())
    data[at] ^= 1
    with pytest.raises(ProtocolError, match=f"format version 1.*{found}"):
        Trie.from_bytes(sealed(data))
