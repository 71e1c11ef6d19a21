"""Arrays as bytes: .npy, safetensors and Arrow, which programs in any language read without a parser of JSON."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.lib.format
from msgspec.json import encode
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.web.guard import Refused

Format = Literal["npy", "safetensors", "arrow"]
Arrays = Mapping[str, NDArray[Any]]

_npy: Any = numpy.lib.format  # numpy has no types for the functions of this module.
NPY: bytes = _npy.MAGIC_PREFIX
"""The first bytes of a .npy file."""

TYPES: dict[Format, str] = {
    "npy": "application/x-npy",
    "safetensors": "application/vnd.safetensors",
    "arrow": "application/vnd.apache.arrow.stream",
}
"""Format -> type of the content in HTTP headers."""

_CODES = {"float32": "F32", "int64": "I64"}  # Types of numpy -> types of safetensors.
_READERS = {(1, 0): _npy.read_array_header_1_0, (2, 0): _npy.read_array_header_2_0}


def read_npy(data: bytes) -> NDArray[Any]:
    """Read an array of integers from a .npy file; raises `Refused` for other files."""
    file = io.BytesIO(data)
    try:
        shape, is_fortran, dtype = _READERS[_npy.read_magic(file)](file)
    except Exception as error:  # numpy parses the header with `ast.literal_eval`, which fails in many ways.
        raise Refused(400, f"the body is no .npy file: {error}") from error
    if dtype.kind not in "iu":
        raise Refused(400, f"the body has numbers of type {dtype}, not integers")
    try:
        numbers = np.frombuffer(data, dtype, offset=file.tell())
        return numbers.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as error:
        raise Refused(400, f"the body is no .npy file of integers: {error}") from error


def npy(array: NDArray[Any]) -> list[Any]:
    """The parts of a .npy file."""
    head = io.BytesIO()
    _npy.write_array_header_1_0(head, _npy.header_data_from_array_1_0(array))
    return [head.getvalue(), array.reshape(-1)]


def pack(arrays: Arrays, form: Format) -> list[Any]:
    """The parts of a file with named arrays; raises `SettingsError` if the format cannot hold these arrays."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if form == "safetensors":
        return _safetensors(arrays)
    if form == "arrow":
        return [_arrow(arrays)]
    if len(arrays) > 1:
        raise SettingsError(f"format: a .npy file has one array, not {', '.join(arrays)}: ask for safetensors")
    return npy(next(iter(arrays.values())))


def _safetensors(arrays: Arrays) -> list[Any]:
    """The parts of a safetensors file (https://huggingface.co/docs/safetensors): header, then the arrays."""
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[str(array.dtype)], "shape": array.shape, "data_offsets": [begin, end]}
    text = encode(header)
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *(array.reshape(-1) for array in arrays.values())]


def _arrow(arrays: Arrays) -> bytes:
    """An Arrow stream with one column per array; an array (n, m) is a column of lists of m numbers.

    `lengths` has another number of entries than the columns, so it is in the metadata of the schema.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise SettingsError("format: arrow needs pyarrow: pip install 'lmpool[parquet]' for the gateway") from error
    lengths = {"lengths": encode(arrays["lengths"].tolist())} if "lengths" in arrays else {}
    columns = {}
    for name, array in arrays.items():
        if name not in lengths:
            flat = pyarrow.array(array.reshape(-1))
            columns[name] = flat if array.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
    table = pyarrow.table(columns).replace_schema_metadata(lengths)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
