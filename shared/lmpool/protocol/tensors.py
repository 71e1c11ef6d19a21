"""Weights in safetensors files: reads and checks their tensors, and applies the changes of sparse files.

A full set of weights has the tensors of the model's checkpoint: the same names, dtypes and shapes. It is one file, or a
folder of files with an optional index. A sparse file has changed tensors only. For a changed tensor NAME it has

    NAME                  the whole tensor, or
    NAME.indices          I64 (n,): places of the changed numbers in the flat tensor, ascending and unique, and
    NAME.values           the tensor's dtype, (n,): the new numbers at these places

The files are mapped into memory. A process that truncates a mapped file ends its readers (SIGBUS), so writers must
write a new file and rename it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError, SettingsError, first_line
from lmpool.settings import shown

MAX_HEADER_BYTES = 100_000_000
"""Max bytes of the JSON header of a safetensors file; the safetensors library has the same limit."""

INDICES, VALUES = ".indices", ".values"
"""Endings of the names of a changed tensor's places and new numbers in a sparse file."""

TIED_HEAD = "lm_head.weight"
"""Name of the output head. A full set may have a tied head that the checkpoint lacks; the tensor is ignored."""

INDEX = "model.safetensors.index.json"
"""File in a folder that names the folder's files of weights."""

_MAX_DIMENSIONS = 32  # Max dimensions of a tensor, fewer than the 64 of numpy.
_SAMPLES, _SAMPLE_BYTES = 256, 4096  # Number and bytes of the samples of a file (`sample_digest`).
_CHUNK = 1 << 18  # Numbers that are checked at once, twice, so that they stay in the CPU's cache.

# Dtype in safetensors -> numpy dtype of the same size. numpy has no 8-bit floats and no bfloat16: take the bits.
_DTYPES = {
    "BOOL": "<u1", "U8": "<u1", "I8": "<i1", "F8_E4M3": "<u1", "F8_E5M2": "<u1", "U16": "<u2", "I16": "<i2",
    "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip

# Dtype -> the smallest bits of a positive number that is infinite or NaN; with the sign bit, of a negative number.
_NOT_FINITE = {
    "F8_E4M3": 0x7F, "F8_E5M2": 0x7C, "F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000,
}  # fmt: skip


class TensorType(NamedTuple):
    """Dtype, as safetensors names it ("BF16", "F32", "I64"), and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


Types: TypeAlias = Mapping[str, TensorType]
"""Name of each tensor -> its type."""

Change: TypeAlias = tuple[NDArray[np.int64] | None, NDArray[Any]]
"""Places in the flat tensor (n,) and the new numbers (n,); None and the whole tensor, in its shape."""


class MappedTensor(NamedTuple):
    """A tensor in a mapped file; numbers of a dtype that numpy does not have are unsigned integers of the same bits."""

    type: TensorType
    numbers: NDArray[Any]


_Tensors: TypeAlias = dict[str, MappedTensor]


def read_types(path: Path) -> dict[str, TensorType]:
    """The types of the tensors in a safetensors file, or in the files of a folder.

    In a folder with an index, the files are those that the index names, else `model.safetensors`, or all files
    `*.safetensors` without this file.

    Raises:
        SettingsError: a file cannot be read, is truncated or has another format, or two files have the same tensor.
    """
    return {name: tensor.type for name, tensor in map_tensors(path).items()}


def map_tensors(path: Path) -> dict[str, MappedTensor]:
    """Map the tensors of a safetensors file, or of the files of a folder, into memory; see `read_types`."""
    tensors: dict[str, MappedTensor] = {}
    for file in weight_files(path):
        try:
            with file.open("rb") as opened:
                # Map a private copy: torch warns about memory that it cannot write to.
                memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            found = _read(np.frombuffer(memory, np.uint8))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"{shown(str(file))} is no whole safetensors file: {first_line(error)}"
            raise SettingsError(f"weights: {reason}; write it again") from error
        if twice := next((name for name in found if name in tensors), None):
            raise SettingsError(f"weights: two files in {shown(str(path))} have the tensor {shown(twice)}")
        tensors |= found
    return tensors


def sample_digest(path: Path) -> bytes:
    """A digest (16 bytes) of samples of a file, or of a folder's files, which differs if files were replaced.

    Reads the sizes, the beginnings and 256 evenly spaced blocks of each file: a digest of all bytes would take longer
    than loading the weights. Raises `SettingsError` as `read_types`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, 2)
                digest.update(size.to_bytes(8, "little"))
                for place in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                    opened.seek(place)
                    digest.update(opened.read(_SAMPLE_BYTES))
        except OSError as error:
            raise SettingsError(f"weights: {shown(str(file))} cannot be read: {error}") from error
    return digest.digest()


def types_of(data: memoryview) -> dict[str, TensorType]:
    """The types of the tensors in a safetensors file with these bytes; raises `SettingsError` for other bytes."""
    try:
        return {name: tensor.type for name, tensor in _read(np.frombuffer(data, np.uint8)).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(f"weights: {len(data)} bytes are no safetensors file: {first_line(error)}") from error


def check_full(types: Types, wanted: Types) -> None:
    """Refuse tensors that are not exactly those of the model; a tied head (`TIED_HEAD`) is ignored.

    Raises:
        SettingsError: a tensor is missing, unknown, or has another dtype or shape.
    """
    if missing := next((name for name in wanted if name not in types), None):
        raise SettingsError(f"weights: the tensor {shown(missing)} is missing: publish all tensors of the model")
    for name, found in types.items():
        if name in wanted or name != TIED_HEAD:
            _check_type(name, found, wanted)


def check_sparse(types: Types, wanted: Types) -> None:
    """Refuse the tensors of a sparse file that do not change tensors of the model.

    Raises:
        SettingsError: a tensor is unknown, has another dtype or shape, or has only one of places and new numbers.
    """
    for name, found in types.items():
        if name in wanted or not name.endswith((INDICES, VALUES)):
            _check_type(name, found, wanted)
            continue
        changed = name.removesuffix(INDICES if name.endswith(INDICES) else VALUES)
        of, count = _known(changed, wanted), math.prod(found.shape)
        if changed in types:
            raise SettingsError(f"weights: {shown(changed)} is given whole and as {shown(name)}: leave out one")
        if {f"{changed}{INDICES}", f"{changed}{VALUES}"} - types.keys():
            raise SettingsError(f"weights: {shown(name)} is given alone: give {INDICES} and {VALUES} of a tensor")
        _check_type(name, found, {name: TensorType("I64" if name.endswith(INDICES) else of.dtype, (count,))})
        places, values = (types[f"{changed}{ending}"].shape for ending in (INDICES, VALUES))
        if places != values:
            text = f"{shown(changed)} is given with the shapes {places} ({INDICES}) and {values} ({VALUES})"
            raise SettingsError(f"weights: {text}: give one number for each place")


def pack_types(types: Types) -> bytes:
    """Encode types as JSON, for `unpack_types`."""
    return json.dumps({name: [found.dtype, found.shape] for name, found in types.items()}).encode()


def unpack_types(data: bytes) -> dict[str, TensorType]:
    """Decode the result of `pack_types`.

    Raises:
        ProtocolError: the data is damaged.
    """
    try:
        return {name: _decoded_type(*packed) for name, packed in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the types of the model's tensors cannot be decoded: {first_line(error)}") from error


def new_changes(full: Path, sparse: Sequence[Path], held: int, wanted: Types) -> dict[str, list[Change]]:
    """Read and check what a holder of earlier weights must write to hold the weights of a version.

    Args:
        full: folder or file with all tensors; not read if `held` is 0 or more.
        sparse: the sparse files with the later changes, oldest first.
        held: how many of `sparse` the holder's weights include already; -1 if it has other weights than `full`.
        wanted: the types of the model's tensors.

    Returns:
        Name of each tensor to change -> its changes, to be applied in this order.

    Raises:
        SettingsError: a file cannot be read or does not fit the model, or a number is NaN or infinite.
    """
    new = _sets(full if held < 0 else None, sparse[max(held, 0) :], wanted)
    _check_numbers(new, wanted)
    return {name: _changes(name, new) for name in _changed(new, wanted)}


def whole_tensors(
    full: Path, sparse: Sequence[Path], names: Iterable[str], wanted: Types
) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Tensors of a version, each as a whole: (name, dtype, numbers in the tensor's shape; see `MappedTensor`).

    The files are read, and their types checked, before this function returns; check numbers with `new_changes`.
    """
    sets = _sets(full, sparse, wanted)
    return ((name, wanted[name].dtype, _whole(name, sets)) for name in names)


def apply_change(numbers: NDArray[Any], change: Change) -> None:
    """Write a change into a contiguous tensor, in place."""
    indices, values = change
    if indices is None:
        numbers[...] = values
    else:
        numbers.reshape(-1)[indices] = values


def _check_type(name: str, found: TensorType, wanted: Types) -> None:
    expected = _known(name, wanted)
    for kind, own, of_model in zip(TensorType._fields, found, expected, strict=True):
        if own != of_model:
            raise SettingsError(f"weights: the tensor {shown(name)} has the {kind} {own}, the model's has {of_model}")


def _known(name: str, wanted: Types) -> TensorType:
    if name not in wanted:
        raise SettingsError(f"weights: the model has no tensor {shown(name)}: leave it out")
    return wanted[name]


def _decoded_type(dtype: object, shape: object) -> TensorType:
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"the dtype {shown(dtype, 60)} is none of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise ValueError(f"{shown(shape, 60)} is no shape")
    return TensorType(dtype, tuple(shape))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _sets(full: Path | None, sparse: Sequence[Path], wanted: Types) -> list[_Tensors]:
    """The tensors of a full set, unless it is None, and of sparse files; checks the types."""
    if not wanted:
        raise SettingsError("weights: the weights of this model cannot be replaced: start a worker with the new ones")
    sets = []
    for check, paths in ((check_full, [] if full is None else [full]), (check_sparse, sparse)):
        for path in paths:
            tensors = map_tensors(path)
            check({name: tensor.type for name, tensor in tensors.items()}, wanted)
            sets.append(tensors)
    return sets


def _check_numbers(sets: Sequence[_Tensors], wanted: Types) -> None:
    """Refuse numbers that are not finite, and places that do not ascend or are out of range."""
    for tensors in sets:
        for name, (found, numbers) in tensors.items():
            _check_finite(name, found, numbers)
            if name not in wanted and name.endswith(INDICES):
                size = math.prod(wanted[name.removesuffix(INDICES)].shape)
                in_range = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < size)
                if not in_range or (numbers[1:] <= numbers[:-1]).any():
                    raise SettingsError(f"weights: {shown(name)} must ascend, without repeats, from 0 to {size - 1}")


def _check_finite(name: str, found: TensorType, numbers: NDArray[Any]) -> None:
    if (limit := _NOT_FINITE.get(found.dtype)) is None:
        return
    size = numbers.itemsize
    signed, unsigned = (numbers.reshape(-1).view(f"<{kind}{size}") for kind in "iu")
    sign = 1 << (8 * size - 1)
    for start in range(0, len(signed), _CHUNK):
        part = slice(start, start + _CHUNK)
        if signed[part].max() >= limit or unsigned[part].max() >= limit | sign:
            raise SettingsError(f"weights: the tensor {shown(name)} has a number that is NaN or infinite")


def _changed(sets: Sequence[_Tensors], wanted: Types) -> list[str]:
    """The names of the model's tensors that the sets change."""
    given = {name if name in wanted else name.removesuffix(VALUES) for tensors in sets for name in tensors}
    return [name for name in wanted if name in given]


def _changes(name: str, sets: Sequence[_Tensors]) -> list[Change]:
    """The changes of a tensor by the sets, in order, beginning with the last whole tensor if there is one."""
    changes: list[Change] = []
    for tensors in reversed(sets):
        if (whole := tensors.get(name)) is not None:
            changes.append((None, whole.numbers))
            break
        if (values := tensors.get(name + VALUES)) is not None:
            changes.append((tensors[name + INDICES].numbers, values.numbers))
    return changes[::-1]


def _whole(name: str, sets: Sequence[_Tensors]) -> NDArray[Any]:
    """The numbers of a tensor after all sets, the first of which is a full one."""
    (_, numbers), *later = _changes(name, sets)
    if later:
        numbers = numbers.copy()
        for change in later:
            apply_change(numbers, change)
    return numbers


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the file itself; raises `SettingsError` as `read_types`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SettingsError(f"weights: there is no file or folder {shown(str(path))}")
    if (path / INDEX).is_file():
        try:
            names = {str(name) for name in json.loads((path / INDEX).read_bytes())["weight_map"].values()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SettingsError(f"weights: {shown(str(path / INDEX))} is no index: {first_line(error)}") from error
        if foreign := next((name for name in names if Path(name).name != name), None):
            raise SettingsError(f"weights: {shown(str(path / INDEX))} names a file elsewhere: {shown(foreign)}")
        return [path / name for name in sorted(names)]
    single = path / "model.safetensors"
    if not (files := [single] if single.is_file() else sorted(path.glob("*.safetensors"))):
        raise SettingsError(f"weights: {shown(str(path))} has no file *.safetensors: save the weights as safetensors")
    return files


def _read(data: NDArray[np.uint8]) -> _Tensors:
    """The tensors of a safetensors file with these bytes.

    Raises:
        ValueError, TypeError, ...: the file is truncated or has another format.
    """
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, and at most {MAX_HEADER_BYTES} are accepted")
    if len(data) < 8 + length:
        raise ValueError(f"its header ends at byte {8 + length}, and the file has {len(data)}")
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    body, end, tensors = data[8 + length :], 0, dict[str, MappedTensor]()
    for name, facts in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        found, (begin, stop) = _decoded_type(facts["dtype"], facts["shape"]), facts["data_offsets"]
        dtype = np.dtype(_DTYPES[found.dtype])
        # Tensors follow one another without gaps, so that no two overlap and no bytes are left over.
        if begin != end or stop != begin + math.prod(found.shape) * dtype.itemsize or stop > len(body):
            raise ValueError(f"the tensor {shown(name, 60)} has the bytes {begin} to {stop} of {len(body)}")
        # A header of any length may leave the numbers unaligned, which numpy supports and torch does not.
        tensors[name] = MappedTensor(found, np.require(body[begin:stop].view(dtype).reshape(found.shape), None, "A"))
        end = stop
    if end != len(body):
        raise ValueError(f"its tensors have {end} bytes, and it has {len(body)}")
    return tensors
