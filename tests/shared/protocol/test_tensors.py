"""Weights in safetensors files: damaged and unfitting files are refused, and changes are applied in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmpool.errors import ProtocolError, SettingsError
from lmpool.protocol.tensors import (
    INDEX,
    MAX_HEADER_BYTES,
    TIED_HEAD,
    TensorType,
    apply_change,
    check_full,
    check_sparse,
    map_tensors,
    new_changes,
    pack_types,
    read_types,
    unpack_types,
    whole_tensors,
)

WANTED = {"a": TensorType("F32", (3, 4)), "b": TensorType("F16", (5,)), "n": TensorType("I64", ())}
"""The types of the tests' model."""

_A, _B, _N = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(5, np.float16), np.array(7)


def save(path: Path, **tensors: Any) -> Path:
    """Write a safetensors file with numpy arrays; "__" in a name stands for "."."""
    save_file({name.replace("__", "."): np.asarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def write(path: Path, header: Any, body: bytes = b"") -> Path:
    """Write a file with a header of any content."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def facts(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    """The entry of a tensor in a header."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A full set of the tests' model, in one file."""
    return save(tmp_path / "full.safetensors", a=_A, b=_B, n=_N)


def refused(text: str, read: Callable[[], object]) -> None:
    """Check that a file is refused with this text."""
    with pytest.raises(SettingsError, match="^weights: ") as caught:
        read()
    assert text in str(caught.value)


def test_types_are_read_from_a_file_a_folder_and_an_index(tmp_path: Path, full: Path) -> None:
    assert read_types(full) == WANTED
    (folder := tmp_path / "folder").mkdir()
    save(folder / "one.safetensors", a=_A)
    save(folder / "two.safetensors", b=_B, n=_N)
    assert read_types(folder) == WANTED
    save(folder / "other.safetensors", a=_A)
    refused("two files in", lambda: read_types(folder))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert read_types(folder) == WANTED
    (folder / INDEX).unlink()
    save(folder / "model.safetensors", a=_A)
    assert read_types(folder) == {"a": WANTED["a"]}


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../full.safetensors"}}', '{"weight_map": [1]}'])
def test_a_bad_index_is_refused(tmp_path: Path, full: Path, index: str) -> None:
    (folder := tmp_path / "folder").mkdir()
    save(folder / "one.safetensors", a=_A)
    (folder / INDEX).write_text(index)
    refused(INDEX, lambda: read_types(folder))


def test_a_place_without_weights_is_refused(tmp_path: Path) -> None:
    refused("there is no file or folder", lambda: read_types(tmp_path / "none"))
    refused("has no file *.safetensors", lambda: read_types(tmp_path))


def test_a_truncated_file_is_refused_at_any_length(tmp_path: Path, full: Path) -> None:
    data, cut = full.read_bytes(), tmp_path / "cut.safetensors"
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        refused("is no whole safetensors file", lambda: read_types(cut))
    cut.write_bytes(data + b"\0")
    refused("and it has", lambda: read_types(cut))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"PK\3\4 a pickle", 0),
        (b"[" * 100_000, 0),
        ([], 0),
        ({"a": 1}, 0),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1),
        ({"a": facts(0, 4) | {"data_offsets": [0]}}, 4),
        ({"a": facts(0, 4, "F32", [2])}, 4),
        ({"a": facts(0, 4, "Q4", [8])}, 4),
        ({"a": facts(0, 4, "U8", [True, 4])}, 4),
        ({"a": facts(0, 4, "U8", [-1, -4])}, 4),
        ({"a": facts(0, 4, "U8", [2.0, 2])}, 4),
        ({"a": facts(0, 4, "U8", "4")}, 4),
        ({"a": facts(0, 1, "U8", [1] * 100)}, 1),
        ({"a": facts(0, 0, "U8", [2**62, 2**62, 0])}, 1),
        ({"a": facts(0, 4), "b": facts(2, 6)}, 6),
        ({"a": facts(0, 4), "b": facts(5, 6)}, 6),
        ({"a": facts(-4, 0)}, 4),
        ({"a": facts(0, 8)}, 4),
    ],
)
def test_a_foreign_header_is_refused(tmp_path: Path, header: Any, size: int) -> None:
    path = write(tmp_path / "foreign.safetensors", header, bytes(size))
    refused("is no whole safetensors file", lambda: read_types(path))


def test_a_header_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)
    refused(f"at most {MAX_HEADER_BYTES}", lambda: read_types(path))


def test_numbers_are_aligned_after_a_header_of_any_length(tmp_path: Path) -> None:
    for spaces in range(8):
        header = json.dumps({"a": facts(0, 8, "F32", [2])}).encode() + b" " * spaces
        path = write(tmp_path / f"{spaces}.safetensors", header, np.array([1, 2], "<f4").tobytes())
        numbers = map_tensors(path)["a"].numbers
        assert numbers.flags.aligned
        assert numbers.tolist() == [1, 2]


def test_a_full_set_must_have_the_tensors_of_the_model() -> None:
    check_full(WANTED, WANTED)
    check_full(WANTED | {TIED_HEAD: TensorType("F32", (1,))}, WANTED)
    for types, text in (
        ({"a": WANTED["a"]}, "the tensor 'b' is missing"),
        (WANTED | {"c": WANTED["a"]}, "the model has no tensor 'c'"),
        (WANTED | {"a": TensorType("F32", (4, 3))}, "'a' has the shape (4, 3), the model's has (3, 4)"),
        (WANTED | {"a": TensorType("BF16", (3, 4))}, "'a' has the dtype BF16, the model's has F32"),
    ):
        refused(text, lambda types=types: check_full(types, WANTED))  # type: ignore[misc]


def test_a_sparse_file_must_change_tensors_of_the_model() -> None:
    indices, values = TensorType("I64", (2,)), TensorType("F32", (2,))
    check_sparse({}, WANTED)
    check_sparse({"a.indices": indices, "a.values": values, "b": WANTED["b"]}, WANTED)
    for types, text in (
        ({"c": values}, "the model has no tensor 'c'"),
        ({"c.indices": indices, "c.values": values}, "the model has no tensor 'c'"),
        ({TIED_HEAD: values}, "the model has no tensor 'lm_head.weight'"),
        ({"b": values}, "'b' has the dtype F32, the model's has F16"),
        ({"a.indices": indices}, "'a.indices' is given alone"),
        ({"a.values": values}, "'a.values' is given alone"),
        ({"a.indices": values, "a.values": values}, "'a.indices' has the dtype F32, the model's has I64"),
        ({"a.indices": indices, "a.values": indices}, "'a.values' has the dtype I64, the model's has F32"),
        ({"a.indices": TensorType("I64", (2, 1)), "a.values": values}, "'a.indices' has the shape (2, 1)"),
        ({"a.indices": TensorType("I64", (3,)), "a.values": values}, "'a' is given with the shapes (3,)"),
        ({"a": WANTED["a"], "a.indices": indices, "a.values": values}, "'a' is given whole and as 'a.indices'"),
    ):
        refused(text, lambda types=types: check_sparse(types, WANTED))  # type: ignore[misc]


def test_packed_types_are_unpacked_and_damage_is_refused() -> None:
    assert unpack_types(pack_types(WANTED)) == WANTED
    for damaged in (b"", b"[]", b"{", b'{"a": 1}', b'{"a": ["F32", [-1]]}', b'{"a": ["F3", [1]]}', b"[" * 100_000,
                    b'{"a": ["F32", [1], 2]}', b"\xff", b'{"a": [["F32"], [1]]}'):  # fmt: skip
        with pytest.raises(ProtocolError, match=r"types of the model's tensors"):
            unpack_types(damaged)


def test_changes_begin_with_the_last_whole_tensor_and_later_ones_win(tmp_path: Path, full: Path) -> None:
    sparse = [
        save(tmp_path / "1", a__indices=[0, 5], a__values=np.array([50, 55], np.float32)),
        save(tmp_path / "2", b=2 * _B, n__indices=[0], n__values=[9]),
        save(tmp_path / "3", a__indices=[5], a__values=np.array([77], np.float32), b__indices=[4],
             b__values=np.array([3], np.float16)),
    ]  # fmt: skip
    last_a = _A.copy()
    last_a.reshape(-1)[[0, 5]] = 50, 77
    expected: dict[str, Any] = {"a": last_a, "b": np.array([2, 2, 2, 2, 3], np.float16), "n": np.array(9)}
    for held in range(-1, 4):
        tensors: dict[str, Any] = {"a": np.zeros_like(_A), "b": np.zeros_like(_B), "n": np.array(0)}
        steps = [(sparse[:held], -1), (sparse, held)] if held >= 0 else [(sparse, -1)]
        for files, already in steps:
            for name, changes in new_changes(full, files, already, WANTED).items():
                for change in changes:
                    apply_change(tensors[name], change)
        whole = {name: numbers for name, _, numbers in whole_tensors(full, sparse, WANTED, WANTED)}
        for name, numbers in expected.items():
            assert np.array_equal(tensors[name], numbers)
            assert np.array_equal(whole[name], numbers)
    assert len(new_changes(full, sparse, -1, WANTED)["b"]) == 2
    assert [*new_changes(full, sparse, 2, WANTED)] == ["a", "b"]
    assert new_changes(tmp_path / "deleted", sparse, 3, WANTED) == {}
    assert map_tensors(full)["a"].numbers.tolist() == _A.tolist(), "a mapped file was changed"


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [-1, 0], [11, 12], [12, 13]])
def test_places_that_do_not_ascend_or_are_out_of_range_are_refused(
    tmp_path: Path, full: Path, indices: list[int]
) -> None:
    path = save(tmp_path / "sparse", a__indices=indices, a__values=np.array([1, 2], np.float32))
    refused("'a.indices' must ascend, without repeats, from 0 to 11", lambda: new_changes(full, [path], 0, WANTED))
    save(path, a__indices=[0, 11], a__values=np.array([1, 2], np.float32))
    assert [*new_changes(full, [path], 0, WANTED)] == ["a"]


@pytest.mark.parametrize(("dtype", "bits"), [
    ("F16", "<u2"), ("BF16", "<u2"), ("F32", "<u4"), ("F64", "<u8"), ("F8_E5M2", "<u1"), ("F8_E4M3", "<u1"),
])  # fmt: skip
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(tmp_path: Path, dtype: str, bits: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
             "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip
    kind, count = kinds[dtype], (1 << 19) + 3
    largest = torch.finfo(kind).max
    bad = [math.nan] if dtype == "F8_E4M3" else [math.nan, math.inf, -math.inf]
    for number, is_bad in [(largest, False), (-largest, False), *((number, True) for number in bad)]:
        numbers = np.zeros(count, bits)
        numbers[-1] = torch.tensor([number], dtype=torch.float64).to(kind).view(torch.uint8).numpy().view(bits)[0]
        header = {"a": facts(0, numbers.nbytes, dtype, [count])}
        path, wanted = write(tmp_path / "bad", header, numbers.tobytes()), {"a": TensorType(dtype, (count,))}
        if is_bad:
            refused("'a' has a number that is NaN or infinite", lambda p=path, w=wanted: new_changes(p, [], -1, w))  # type: ignore[misc]
        else:
            assert len(new_changes(path, [], -1, wanted)["a"]) == 1


def test_a_model_without_replaceable_weights_takes_none(full: Path) -> None:
    refused("cannot be replaced", lambda: new_changes(full, [], -1, {}))
