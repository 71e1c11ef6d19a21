"""The lines of an input, JSONL or Parquet: where shards begin, which custom ids repeat, and the text of each line."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.kinds import Ids, Kind, Text
from lmpool.errors import BatchError, InvalidPrompt
from lmpool.producer.tokenizer import Tokenizer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.model_info import ModelInfo

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Bytes of one line; longer lines fail. It bounds the memory for one line."""

MAX_CHUNK_LINES = 256
"""Lines in one chunk: enough to tokenize in a thread at once."""

MAX_CHUNK_BYTES = 1024 * 1024
"""Bytes of the input in one chunk: several chunks are in memory, as Python integers of six times this size."""

_READ_BYTES = 1024 * 1024  # Bytes of one read: little memory, few system calls.
_DIGEST_BYTES = 16  # Bytes of a BLAKE2b digest.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Body(msgspec.Struct):
    """The request in a line of OpenAI's and vLLM's batch files."""

    prompt: str | Ids | None = None
    input: str | Ids | None = None


class Fields(msgspec.Struct):
    """The fields of a line that are read; others are ignored."""

    custom_id: str | int | None = None
    text: str | None = None
    ids: Ids | None = None
    prompt: str | Ids | None = None
    continuation: str | Ids | None = None
    body: Body | None = None


class _CustomId(msgspec.Struct):
    custom_id: str | int | None = None


class Failed(NamedTuple):
    """A line without a result: its number, from 1, its custom id, and the reason."""

    line: int
    custom_id: str | None
    reason: str


class Line(NamedTuple):
    """A line that was read: its number, from 1, and its fields."""

    number: int
    fields: Fields


class Chunk(NamedTuple):
    """Consecutive lines of one shard, and whether the shard ends with them."""

    shard: int
    lines: list[Line | Failed]
    is_last: bool


class Index(NamedTuple):
    """An input after one pass over it.

    Attributes:
        format: "jsonl" or "parquet".
        size: bytes.
        digest: 128-bit BLAKE2b, hexadecimal.
        lines: how many there are.
        is_empty: whether all lines are empty.
        starts: shard -> where it begins: the byte of a JSONL file, the row of a Parquet file.
        duplicates: numbers of the lines whose custom id an earlier line has, ascending, int64.
    """

    format: str
    size: int
    digest: str
    lines: int
    is_empty: bool
    starts: dict[int, int]
    duplicates: NDArray[np.int64]

    def is_duplicate(self, line: int) -> bool:
        """Whether an earlier line has the custom id of this line."""
        at = int(np.searchsorted(self.duplicates, line))
        return at < len(self.duplicates) and int(self.duplicates[at]) == line


class CustomIds:
    """Finds repeated custom ids in 24 bytes a line: it keeps the 128-bit digest and the number of each."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._lines = array("q")

    def add(self, line: int, custom_id: str | int | None) -> None:
        """Add the custom id of a line, if it has one."""
        if custom_id is not None:
            name = str(custom_id).encode("utf-8", "surrogatepass")
            self._digests += hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
            self._lines.append(line)

    def duplicates(self) -> NDArray[np.int64]:
        """The lines whose custom id an earlier line has, ascending."""
        digests = np.frombuffer(self._digests, np.dtype([("high", "<u8"), ("low", "<u8")]))
        # A stable order: of equal digests the first line comes first.
        order = np.lexsort((digests["low"], digests["high"]))
        repeated = digests[order[1:]] == digests[order[:-1]]
        return np.sort(np.frombuffer(self._lines, np.int64)[order[1:][repeated]])


class Source:
    """An input, which must not change until all of it was read. One pass over it finds the shards.

    Raises:
        BatchError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            self._state = _state_of(path.stat())
        self.size = self._state[0]

    def index(self, shard_lines: int) -> Index:
        """Read all of the input.

        Raises:
            BatchError: it cannot be read.
        """
        raise NotImplementedError

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """The lines of some shards, in order.

        Raises:
            BatchError: the input cannot be read, or changed since it was opened first.
        """
        raise NotImplementedError

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, open for reading.

        Raises:
            BatchError: it cannot be read, or has changed.
        """
        with self._explained(), self.path.open("rb", buffering=_READ_BYTES) as file:
            self.check(file)
            yield file

    def check(self, file: BinaryIO) -> None:
        """Refuse an open file that has changed: call this after every read, before the data is used.

        Raises:
            BatchError: the size, the time or the file itself is another one.
        """
        if _state_of(os.fstat(file.fileno())) != self._state:
            raise BatchError(f"{self.path} changed while it was read. Run the command again with the original file")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchError(f"{self.path} cannot be read: {error.strerror or error}") from error


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def is_parquet(path: Path) -> bool:
    """Whether a file begins like Parquet, whatever its name is.

    Raises:
        BatchError: it cannot be read.
    """
    with Source(path).opened() as file:
        return file.read(4) == b"PAR1"


class JsonlSource(Source):
    """A file with a JSON object on each line; empty lines are skipped."""

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        ids, starts, number, is_empty = CustomIds(), dict[int, int](), 0, True
        digest, decode = hashlib.blake2b(digest_size=_DIGEST_BYTES), msgspec.json.Decoder(_CustomId).decode
        with self.opened() as file:
            for number, (begin, line) in enumerate(_split(file, digest.update), 1):
                if (number - 1) % shard_lines == 0:
                    starts[len(starts)] = begin
                is_empty = is_empty and line is not None and line.isspace()
                with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # The run reports the line.
                    ids.add(number, decode(line or b"{}").custom_id)
            self.check(file)
        return Index("jsonl", self.size, digest.hexdigest(), number, is_empty, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        decode = msgspec.json.Decoder(Fields).decode
        with self.opened() as file:
            for shard in sorted(shards):
                file.seek(index.starts[shard])
                first = shard * shard_lines + 1
                lines = islice(_split(file), min(shard_lines, index.lines - first + 1))
                decoded = ((_decoded(at, line, decode), len(line or b"")) for at, (_, line) in enumerate(lines, first))
                for chunk in chunks(shard, decoded):
                    self.check(file)
                    yield chunk


def chunks(shard: int, lines: Iterator[tuple[Line | Failed | None, int]]) -> Iterator[Chunk]:
    """Group the lines of a shard.

    Args:
        shard: its number.
        lines: the lines, None for an empty line, and the bytes of each in the input.
    """
    some, count, size = list[Line | Failed](), 0, 0
    for line, line_bytes in lines:
        if count and (count == MAX_CHUNK_LINES or size + line_bytes > MAX_CHUNK_BYTES):
            yield Chunk(shard, some, False)
            some, count, size = [], 0, 0
        count += 1
        size += line_bytes
        if line is not None:
            some.append(line)
    yield Chunk(shard, some, True)


def _split(file: BinaryIO, update: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes | None]]:
    """The lines from the present position on, and where each begins; None for a line that is too long.

    `update` is called with all bytes that are read.
    """
    at = file.tell()
    while line := file.readline(MAX_LINE_BYTES):
        update(line)
        begin, at = at, at + len(line)
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield begin, line if begin else line.removeprefix(_BYTE_ORDER_MARK)
            continue
        while not line.endswith(b"\n") and (line := file.readline(_READ_BYTES)):
            update(line)
            at += len(line)
        yield begin, None


def _decoded(number: int, line: bytes | None, decode: Callable[[bytes], Fields]) -> Line | Failed | None:
    if line is None:
        return Failed(number, None, f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
    if line.isspace():
        return None
    try:
        return Line(number, decode(line))
    except msgspec.ValidationError as error:
        return Failed(number, _custom_id_of(line), f"unusable: {error}")
    except RecursionError:
        return Failed(number, None, "the lists and objects of the line are nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Failed(number, None, f"no JSON: {error}")


def _custom_id_of(line: bytes) -> str | None:
    """The custom id of a line whose other fields are unusable, if it can be read."""
    try:
        custom_id = msgspec.json.decode(line, type=_CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if custom_id is None else str(custom_id)


class Preparer:
    """Makes texts of lines. Use it in a thread: tokenizing takes time."""

    def __init__(
        self,
        kind: Kind,
        start: int,
        info: ModelInfo,
        find_tokenizer: Callable[[], Tokenizer],
        is_duplicate: Callable[[int], bool],
    ) -> None:
        self._kind = kind
        self._start = start
        self._info = info
        self._find_tokenizer = find_tokenizer
        self._is_duplicate = is_duplicate
        self._tokenizer: Tokenizer | None = None

    def prepare(self, line: Line | Failed) -> Text | Failed:
        """The text of a line, or the reason why it has none.

        Raises:
            SettingsError: the line has text, and the model's tokenizer cannot be loaded here.
        """
        if isinstance(line, Failed):
            return line
        custom_id = None if line.fields.custom_id is None else str(line.fields.custom_id)
        if self._is_duplicate(line.number):
            return Failed(line.number, custom_id, "an earlier line has its custom_id: give each line its own")
        try:
            ids, start = self._ids(line.fields)
            info = self._info
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
            if start >= len(ids):
                raise InvalidPrompt(f"start {start} is beyond the text, which has {len(ids)} tokens")
            span = self._kind.span(len(ids), start)
            if not span:
                raise InvalidPrompt("a text of 1 token has no score: a score needs a token before it")
            return Text(line.number, custom_id, ids, span)
        except InvalidPrompt as error:
            return Failed(line.number, custom_id, str(error))

    def _ids(self, fields: Fields) -> tuple[Ids, int]:
        """The token ids, and the first position for which a result is wanted."""
        body = fields.body or Body()
        given: dict[str, str | Ids | None] = {
            "text": fields.text,
            "ids": fields.ids,
            "prompt": fields.prompt,
            "body.prompt": body.prompt,
            "body.input": body.input,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            there = f"it has {' and '.join(named)}" if named else "it has none of them"
            raise InvalidPrompt(f"a line needs one of {', '.join(given)}: {there}")
        ids = self._encoded(given[named[0]])
        if fields.continuation is None:
            return ids, self._start
        if not self._kind.has_continuations or named != ["prompt"]:
            raise InvalidPrompt("continuation: only --what scores accepts it, together with a prompt")
        # The special tokens at the beginning of a text do not belong into the middle of one.
        continued = self._encoded(fields.continuation, add_special_tokens=False)
        for name, some in (("prompt", ids), ("continuation", continued)):
            if not some:
                raise InvalidPrompt(f"the {name} is empty: a score needs a token, and a token before it")
        return ids + continued, len(ids)

    def _encoded(self, text: str | Ids | None, *, add_special_tokens: bool = True) -> Ids:
        if not isinstance(text, str):
            return text or []
        if self._tokenizer is None:
            self._tokenizer = self._find_tokenizer()
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the text cannot be encoded: {error}") from error
