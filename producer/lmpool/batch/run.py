"""A run: the lines of an input are asked about, so many at once, and the answers go to shards in the input's order.

One task reads and tokenizes lines ahead, in a thread. Many ask, each about a part of one text at a time, whatever shard
it belongs to, so that no shard waits for the last answers of another. One takes the answers in the order of the lines,
and writes them in a thread. What has been begun and is not written yet is bounded, in number and in bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from lmpool.aio import await_beside, finish
from lmpool.batch.kinds import Columns, Kind, Text, parse_kind
from lmpool.batch.lines import Chunk, Index, JsonlSource, Source, is_parquet
from lmpool.batch.progress import Progress
from lmpool.batch.reader import count_lines
from lmpool.batch.shards import ShardWriter, suffix_of
from lmpool.batch.bucket import open_folder
from lmpool.batch.fetch import absolute, named, plain_file
from lmpool.batch.folder import VERSION, Folder, Input, Manifest, Model, Options, Placed, Shard
from lmpool.batch.texts import Failed, Preparer
from lmpool.errors import (
    BatchRefused,
    InvalidPrompt,
    ModelMismatch,
    RequestFailed,
    SettingsError,
    UnknownAdapter,
    WorkerError,
)
from lmpool.producer import Producer
from lmpool.producer.tokenizer import Tokenizer, find_tokenizer
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import check_number, shown

_log = logging.getLogger("lmpool.batch")

_MAX_BYTES = 64 * 1024 * 1024
_WRITTEN_AT_ONCE, _WRITTEN_BYTES = 64, 1024 * 1024
_TEXT_BYTES, _ID_BYTES, _NUMBER_BYTES = 1024, 40, 8
_WATCH_S = 1.0
_MANIFEST_EVERY_S = 1.0
_NARROW_LINES, _WIDE_LINES = 1024, 64
_UNWRITTEN = 2


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What is asked of an input.

    Attributes:
        what: kind of answer, such as "topk:32" (`lmpool.batch.kinds`).
        start: first position of each text; a negative one counts from its end.
        format: of the shards; None for the first that the kind has.
        shard_lines: lines of the input for each shard; 0 for 1,024, or 64 where answers are whole rows.
        adapter: of the model; "" for none.
        concurrency: requests under way at once.

    Raises:
        SettingsError: a value is malformed.
    """

    what: str
    start: int = 0
    format: str | None = None
    shard_lines: int = 0
    adapter: str = ""
    concurrency: int = 512

    def __post_init__(self) -> None:
        check_number("start", self.start, least=-(2**31), most=2**31)
        check_number("shard_lines", self.shard_lines, least=0, most=10**7)
        check_number("concurrency", self.concurrency, least=1, most=100_000)
        _ = self.options  # Malformed kinds and formats are refused now.

    @property
    def kind(self) -> Kind:
        """What is asked of each text."""
        return parse_kind(self.what)

    @property
    def options(self) -> Options:
        """What decides the output, besides input and model."""
        kind = self.kind
        lines = self.shard_lines or (_WIDE_LINES if kind.is_wide else _NARROW_LINES)
        return Options(kind.what, self.start, suffix_of(kind.is_wide, self.format), lines)


class Outcome(NamedTuple):
    """What has become of a run.

    Attributes:
        texts: lines that have an answer.
        errors: lines that have none; `errors.jsonl` says why.
        shards: files of answers.
        resumed: how many of them an earlier run had made.
    """

    texts: int
    errors: int
    shards: int
    resumed: int


async def run_batch(
    producer: Producer, source: str | Path, output: str | Path, settings: BatchSettings, progress: Progress
) -> Outcome:
    """Ask about every line of an input, or go on with that.

    Args:
        producer: to ask with; best with `cache_bytes=0` and `keep_answers=False`.
        source: a JSONL or Parquet file, or the URL of one; it may be compressed.
        output: the folder for the answers, or its URL; made if it is not there.
        settings: what is asked.
        progress: shows how far it is.

    Raises:
        SettingsError: the input is empty or of an unknown format, or the settings do not fit the model.
        BatchRefused: the folder holds answers of another model, input or options, or another run writes there.
        BatchError: a file cannot be read or written, or the input has changed meanwhile.
        ModelMismatch: the model or the adapter has changed meanwhile.
        LMPoolError: whatever else a request may end in, but for what concerns one line alone.
    """
    opened, folder = await asyncio.to_thread(lambda: (open_source(str(source)), open_folder(str(output))))
    with folder.locked():
        index = await asyncio.to_thread(opened.index, settings.options.shard_lines)
        if index.is_empty:
            raise SettingsError(f"input: {shown(named(str(source)))} is empty: there is nothing to ask")
        await producer.open()
        manifest = await begin(producer, folder, str(source), index, settings)
        return await _Run(producer, folder, manifest, opened, index, settings, progress).run()


def open_source(location: str) -> Source:
    """The input at a path or a URL: Parquet if it begins as such a file or is called ".parquet", else JSONL.

    Raises:
        SettingsError: there is no such file, or its format needs an extra that is not installed.
        BatchError: it cannot be fetched or unpacked.
    """
    path = plain_file(absolute(location))
    if path.suffix == ".parquet" or is_parquet(path):
        from lmpool.batch.parquet import ParquetSource

        return ParquetSource(path)
    return JsonlSource(path)


async def answer_shard(
    producer: Producer,
    folder: Folder,
    manifest: Manifest,
    source: Source,
    index: Index,
    settings: BatchSettings,
    shard: int,
) -> Shard:
    """Ask about the lines of one shard, and put that into place.

    Args:
        producer: open.
        folder: which no run holds alone.
        manifest: of the folder.
        source: the input.
        index: of the input, at least where this shard begins.
        settings: what is asked.
        shard: its number.

    Raises:
        As `run_batch`.
    """
    return await _Run(producer, folder, manifest, source, index, settings, Progress(is_silent=True)).run_one(shard)


async def begin(producer: Producer, folder: Folder, source: str, index: Index, settings: BatchSettings) -> Manifest:
    """The manifest of a folder that goes on, or of one that begins, which is then put into place.

    Raises:
        BatchRefused: it was begun for something else, and may have answers.
    """
    info, options, kind = producer.model, settings.options, settings.kind
    kind.width(info)  # What does not fit the model is refused now.
    model = Model(
        info.name,
        info.fingerprint,
        info.backend,
        info.revision,
        info.dtype,
        info.encoding,
        info.lossy,
        info.vocab_size,
        info.source,
        await _qualified(producer, settings.adapter),
    )
    name = named(absolute(source)).rsplit("/", 1)[-1]
    given = Input(name, index.format, index.size, index.lines, index.digest)
    wanted = Manifest(VERSION, version("lmpool"), given, model, options, kind.columns(info), len(index.starts))
    there = await asyncio.to_thread(folder.read_manifest)
    placed = await asyncio.to_thread(folder.shards) if there is not None else {}
    if there is not None and placed:
        try:
            there.check_same(wanted, folder.location)
        except BatchRefused:
            if await asyncio.to_thread(folder.is_begun):
                raise
        else:
            listed = list(there.done)
            with folder.explained():
                await asyncio.to_thread(find_done, folder, there)
                await _remove_changed(folder, there, listed, placed)
            return there
    with folder.explained():
        await asyncio.to_thread(folder.begin, wanted)
    return wanted


def find_done(folder: Folder, manifest: Manifest) -> None:
    """Have the manifest list what is in place: a run that was killed may have done more, and files may be gone."""
    placed = folder.shards()
    known = {shard.number: shard for shard in manifest.done}
    if any(number not in known or known[number].bytes != shard.bytes for number, shard in placed.items()):
        known |= folder.done()
    done = []
    for number, (name, size) in placed.items():
        shard = known[number] if number in known else count_lines(folder, number, name)
        if shard.bytes == size:  # Else somebody has changed it.
            done.append(shard)
    manifest.done = [shard for shard in done if shard.number < manifest.shards]
    manifest.finished = manifest.finished and len(manifest.done) == manifest.shards


async def _remove_changed(
    folder: Folder, manifest: Manifest, listed: Sequence[Shard], placed: Mapping[int, Placed]
) -> None:
    """Remove shards that are not what the manifest says of them: their lines are asked again.

    Args:
        folder: of the shards.
        manifest: lists what is in place; the shards that are removed are taken out of it.
        listed: the shards that it listed before it was compared with the folder, whose digests are compared now.
        placed: the shards that were in place before that. Workers may have made others since.
    """
    digests, done = {shard.number: shard.digest for shard in listed}, {shard.number for shard in manifest.done}
    for number, (name, _) in placed.items():
        is_whole = number in done
        if not is_whole or number in digests:
            digest = await asyncio.to_thread(folder.digest, name)
            is_whole = not digest or (is_whole and digest == digests[number])
        if not is_whole and number < manifest.shards:
            _log.warning("%s/%s has changed since it was written: its lines are asked again", folder.location, name)
            manifest.done = [shard for shard in manifest.done if shard.number != number]
            manifest.finished = False
            await asyncio.to_thread(folder.remove, name)


async def _qualified(producer: Producer, adapter: str) -> str:
    """An adapter with the digest of its weights; "" for none.

    Raises:
        UnknownAdapter: the model has no adapter of that name.
    """
    if not adapter:
        return ""
    revisions = await producer.adapters()
    if adapter not in revisions:
        served = ", ".join(revisions) or "none"
        raise UnknownAdapter(f"the model {producer.model.name!r} has no adapter {shown(adapter)}; it has: {served}")
    return f"{adapter}@{revisions[adapter]}"


class _Prepared(NamedTuple):
    """As `Chunk`, of texts and of lines that are none."""

    shard: int
    entries: list[Text | Failed]
    is_last: bool


@dataclass(slots=True)
class _Item:
    """What is written in its turn: the answer to a part of a text, a line without one, or the end of a shard.

    Attributes:
        shard: where it goes.
        entry: the text or line; None for the end of the shard.
        part: the positions.
        is_last: the text's last part.
        size: bytes that it stands for in memory.
        answer: has the answer to a text, or why there is none.
    """

    shard: int
    entry: Text | Failed | None = None
    part: range = range(0)
    is_last: bool = True
    size: int = 0
    answer: asyncio.Future[Columns | Failed] | None = None


class _Window:
    """Bounds what has been asked and is not written.

    Args:
        most: items.
        most_bytes: that they stand for; one item alone may have more.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._items = self._bytes = 0
        self._has_left = asyncio.Event()

    def has_room(self, size: int) -> bool:
        """Whether there is room for one more."""
        return not self._items or (self._items < self._most and self._bytes + size <= self._most_bytes)

    async def until_room(self, size: int) -> None:
        """Wait until there is."""
        while not self.has_room(size):
            self._has_left.clear()
            await self._has_left.wait()

    def enter(self, size: int) -> None:
        """Take the room of one."""
        self._items += 1
        self._bytes += size

    def leave(self, items: Sequence[_Item]) -> None:
        """Make room again."""
        self._items -= sum(item.entry is not None for item in items)
        self._bytes -= sum(item.size for item in items)
        self._has_left.set()


class _Run:
    """One run, from where the last one of this folder has stopped.

    Args:
        producer: to ask with.
        folder: which this run has locked.
        manifest: says what is done.
        source: the input.
        index: of the input.
        settings: what is asked.
        progress: shows how far it is.
    """

    def __init__(
        self,
        producer: Producer,
        folder: Folder,
        manifest: Manifest,
        source: Source,
        index: Index,
        settings: BatchSettings,
        progress: Progress,
    ) -> None:
        self._producer = producer
        self._folder = folder
        self._manifest = manifest
        self._source = source
        self._index = index
        self._kind = settings.kind
        self._adapter = settings.adapter
        self._progress = progress
        self._concurrency = settings.concurrency
        self._window = _Window(_UNWRITTEN * settings.concurrency, _MAX_BYTES)
        self._prepared: asyncio.Queue[_Prepared | None] = asyncio.Queue(1)
        # All that is to be written, in order, and of that what is to be asked.
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._unasked: asyncio.Queue[_Item] = asyncio.Queue()
        self._info = producer.model
        self._checked: ModelInfo | None = None
        self._writes_manifest = True
        self._writer: ShardWriter | None = None
        self._manifest_at = monotonic()
        loop = asyncio.get_running_loop()

        def tokenizer() -> Tokenizer:
            # The preparer runs in a thread, and the pool is asked in the event loop.
            found = find_tokenizer(producer, "input", 'give token ids: {"ids": [1, 2, 3]}')
            return asyncio.run_coroutine_threadsafe(found, loop).result()

        self._preparer = Preparer(self._kind, settings.start, producer.model, tokenizer, index.is_duplicate)

    async def run_one(self, shard: int) -> Shard:
        """Do one shard, and leave the manifest to whoever wants that.

        Raises:
            ModelMismatch: the model is another one than that of the manifest.
        """
        self._writes_manifest = False
        await self._check_adapter()
        await self._answer(self._source.read(self._index, self._manifest.options.shard_lines, [shard]), 1)
        return self._manifest.done[-1]

    async def run(self) -> Outcome:
        """Do what is left."""
        manifest = self._manifest
        resumed = {shard.number for shard in manifest.done}
        left = [number for number in range(manifest.shards) if number not in resumed]
        lines = manifest.options.shard_lines
        with self._progress:
            self._progress.shards = len(resumed), manifest.shards
            self._progress.begin(self._index.lines, sum(self._lines_of(number) for number in resumed))
            try:
                if left:
                    await self._answer(self._source.read(self._index, lines, left), len(left))
                manifest.finished = True
            finally:
                # Of a run that has failed too, perhaps for want of room on the disk.
                with suppress(OSError) if not manifest.finished else self._folder.explained():
                    await finish(asyncio.to_thread(self._sum_up))
        texts, errors = (sum(getattr(shard, name) for shard in manifest.done) for name in ("texts", "errors"))
        return Outcome(texts, errors, manifest.shards, len(resumed))

    def _lines_of(self, shard: int) -> int:
        size = self._manifest.options.shard_lines
        return min(size, self._index.lines - shard * size)

    def _sum_up(self) -> None:
        self._folder.collect_errors()
        self._folder.write_manifest(self._manifest)

    async def _answer(self, chunks: Iterator[Chunk], shards: int) -> None:
        """Ask about all lines, and write all answers."""
        beside = [self._read(chunks), self._feed(), *(self._ask_on() for _ in range(self._concurrency)), self._watch()]
        try:
            await await_beside(self._drain(shards), beside)
        finally:
            if self._writer is not None:
                self._writer.discard()

    # Asking

    async def _read(self, chunks: Iterator[Chunk]) -> None:
        """Read the next lines while those before are asked about."""

        def prepare() -> _Prepared | None:
            chunk = next(chunks, None)
            if chunk is None:
                return None
            return _Prepared(chunk.shard, [self._preparer.prepare(line) for line in chunk.lines], chunk.is_last)

        while (prepared := await asyncio.to_thread(prepare)) is not None:
            await self._prepared.put(prepared)
        await self._prepared.put(None)

    async def _feed(self) -> None:
        """Begin to ask about lines as there is room."""
        while (prepared := await self._prepared.get()) is not None:
            await self._take(prepared)

    async def _take(self, prepared: _Prepared) -> None:
        for entry in prepared.entries:
            for item in self._items_of(prepared.shard, entry):
                if not self._window.has_room(item.size):
                    await self._window.until_room(item.size)
                self._window.enter(item.size)
                self._items.put_nowait(item)
                if item.answer is not None:
                    self._unasked.put_nowait(item)
        if prepared.is_last:
            self._items.put_nowait(_Item(prepared.shard))

    def _items_of(self, shard: int, entry: Text | Failed) -> list[_Item]:
        if isinstance(entry, Failed):
            return [_Item(shard, entry, size=_TEXT_BYTES)]
        parts, width = self._kind.parts(entry.span, self._info), self._kind.width(self._info)
        head, last, loop = _TEXT_BYTES + _ID_BYTES * len(entry.ids), parts[-1], asyncio.get_running_loop()
        return [
            _Item(shard, entry, part, part is last, head + _NUMBER_BYTES * width * len(part), loop.create_future())
            for part in parts
        ]

    async def _ask_on(self) -> None:
        """Ask about one part of a text after another."""
        while True:
            item = await self._unasked.get()
            if isinstance(item.entry, Text) and item.answer is not None:
                item.answer.set_result(await self._ask(item.entry, item.part))
                self._progress.unplaced[item.shard] += item.is_last

    async def _ask(self, text: Text, part: range) -> Columns | Failed:
        """The answer for some positions of a text, or why this text has none."""
        self._check_model()
        try:
            answer = await self._kind.ask(self._producer, text, part, self._adapter)
        except (InvalidPrompt, WorkerError) as error:
            self._check_model()
            return Failed(text.line, text.custom_id, str(error))
        except RequestFailed as error:  # It ends the run.
            error.args = (f"line {text.line}: {error}",)
            raise
        self._check_model()
        return answer

    def _check_model(self) -> None:
        """Refuse answers of another model than those before.

        Raises:
            ModelMismatch: it has changed.
        """
        began, now = self._manifest.model, self._producer.model
        if now is self._checked:  # Most often; it is read anew every second.
            return
        if now.fingerprint != began.fingerprint:
            raise ModelMismatch(
                f"the model {now.name!r} has changed (fingerprint {began.fingerprint}, now {now.fingerprint}): what is "
                "done stays; run the same command again when the first one is served again"
            )
        self._checked = now

    async def _check_adapter(self) -> None:
        """The same of the adapter, by what the server tells now."""
        self._check_model()
        began, now = self._manifest.model.adapter, await _qualified(self._producer, self._adapter)
        if now != began:
            raise ModelMismatch(
                f"the adapter {self._adapter!r} has changed ({began}, now {now}): what is done stays; run the same "
                "command again when the first one is in service again"
            )

    async def _watch(self) -> None:
        """See changes too that come and go between two shards."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._check_adapter()

    # Writing

    async def _drain(self, shards: int) -> None:
        """Take answers in the order of the lines, and write them some at a time."""
        ready: list[_Item] = []
        size = 0
        while shards:
            item = await self._items.get()
            if item.answer is not None:
                await item.answer
            ready.append(item)
            size += item.size
            if item.entry is None:
                await self._check_adapter()
                shards -= 1
            # What is held back takes room in the window, so never while nothing more is asked.
            is_enough = len(ready) >= _WRITTEN_AT_ONCE or size >= _WRITTEN_BYTES
            if item.entry is None or is_enough or self._items.empty():
                await finish(asyncio.to_thread(self._write, ready))
                self._window.leave(ready)
                lines = sum(done.entry is not None and done.is_last for done in ready)
                self._progress.advance(lines, sum(len(done.part) for done in ready))
                ready, size = [], 0

    def _write(self, ready: Sequence[_Item]) -> None:
        """Write answers, all of one shard, and put that into place when it ends; in a thread."""
        with self._folder.explained():
            for item in ready:
                if self._writer is None:
                    self._writer = ShardWriter(self._folder, item.shard, self._manifest.options.format)
                if item.entry is None:
                    self._manifest.done.append(self._writer.place())
                    self._writer = None
                    self._progress.unplaced.pop(item.shard, None)
                    self._progress.shards = len(self._manifest.done), self._manifest.shards
                elif isinstance(item.entry, Failed):
                    self._writer.fail(item.entry)
                elif item.answer is not None:
                    answer = item.answer.result()
                    if isinstance(answer, Failed):
                        self._writer.fail(answer)
                    else:
                        self._writer.add(item.entry, answer, item.is_last)
            is_due = self._writes_manifest and monotonic() - self._manifest_at > _MANIFEST_EVERY_S
            if self._writer is None and is_due:
                self._folder.write_manifest(self._manifest)
                self._manifest_at = monotonic()
