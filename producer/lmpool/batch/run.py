"""Run a batch: request a result for every line of an input, and write the results to shards in the order of lines.

One task reads and tokenizes lines ahead, in a thread. Many tasks send requests, each for a part of one text. Requests
for the next shard begin before the last results of a shard arrive. One task takes the results in the order of the lines
and writes them, in a thread. The number and the bytes of items between reading and writing are limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from rich import progress as bars

from lmpool import errors
from lmpool.aio import await_beside, finish
from lmpool.batch.folder import TRY_AGAIN, VERSION, Folder, Input, Manifest, Model, Options, open_folder
from lmpool.batch.kinds import parse_kind
from lmpool.batch.lines import Body, Fields, Index, Line, Source, open_source
from lmpool.batch.shards import Columns, Failed, ShardWriter, Text, choose_format, open_writer
from lmpool.broker.bucket import named
from lmpool.cli import Terminal, say
from lmpool.producer import Producer
from lmpool.producer.tokenizer import Tokenizer, find_tokenizer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.version import split_name
from lmpool.settings import check_number, shown

# Max items between reading and writing, per concurrent request: two keep all requests busy while a result is late.
_ITEMS_PER_REQUEST = 2
_MAX_BYTES = 48 * 1024 * 1024  # Max bytes of items between reading and writing; the last item may add 16 MiB.
# Max results, and max bytes of results, that one call in a thread writes: each call costs 0.1 ms, each result memory.
_MAX_WRITTEN_ITEMS, _MAX_WRITTEN_BYTES = 64, 1024 * 1024
# Estimated bytes in memory of a text, of a token id (a Python integer in a list), and of a number of a result.
_TEXT_BYTES, _ID_BYTES, _NUMBER_BYTES = 1024, 40, 8
_CHECK_INTERVAL_S = 1.0  # Seconds between checks of the adapter; a change that is undone sooner can stay unnoticed.
_NARROW_LINES, _WIDE_LINES = 1024, 64  # Default lines per shard: for small results, and for rows of hundreds of KiB.
_REPORT_INTERVAL_S = 10.0  # Seconds between lines of progress if no terminal shows a bar.


class Pool(msgspec.Struct, frozen=True):
    """The pool that computes a run. A job always uses the server that stores the jobs, and may name no other server."""

    model: str | None = None
    prefix: str = "lmpool"
    timeout: float = 3600.0  # Max seconds of each request of the run.

    def producer(self, redis: str | None, when_absent: Literal["raise", "wait"]) -> Producer:
        """A producer that caches no results, in this process or the pool, and yields to prompts of other clients."""
        own = msgspec.structs.asdict(self)
        return Producer(**own, redis=redis, when_absent=when_absent, priority="bulk", cache_bytes=0, keep_answers=False)


class BatchSettings(msgspec.Struct, frozen=True):
    """The settings of a run."""

    what: str  # Kind of request, such as "topk:32" (`lmpool.batch.kinds`).
    start: int = 0  # First position of each text that gets a result; a negative start counts from the end.
    format: str | None = None  # Format of the shards; None for the default of the kind.
    shard_lines: int = 0  # Lines of the input in each shard; 0 for 1,024, or 64 if results are whole rows.
    adapter: str = ""  # Name of the model's adapter; "" for none.
    concurrency: int = 512  # Number of concurrent requests.

    def __post_init__(self) -> None:
        check_number("start", self.start, least=-(2**31), most=2**31)
        check_number("shard_lines", self.shard_lines, least=0, most=10**7)
        check_number("concurrency", self.concurrency, least=1, most=100_000)
        _ = self.options  # Raise now if the kind or the format is malformed.

    @property
    def options(self) -> Options:
        """The options that decide the output, in addition to the input and the model."""
        kind = parse_kind(self.what)
        lines = self.shard_lines or (_WIDE_LINES if kind.is_wide else _NARROW_LINES)
        return Options(kind.what, self.start, choose_format(kind.is_wide, self.format), lines)


class Progress:
    """Shows the progress of a run on standard error: a bar on a terminal, else a line from time to time.

    Attributes:
        shards: number of shards that are done, and number of all shards; (0, 0) before the first request.
        unplaced: number of an unfinished shard -> number of its lines that have a result.
    """

    def __init__(self, label: str = "lines") -> None:
        self._label = label
        counts = bars.TextColumn(label), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TaskProgressColumn()
        times = bars.TextColumn("{task.fields[rates]}"), bars.TimeRemainingColumn()
        console = Terminal(err=True)
        self._bar = bars.Progress(*counts, *times, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None, rates="")
        self._done_before = self._positions = 0
        self._reported = monotonic()
        self.shards = (0, 0)
        self.unplaced = Counter[int]()

    @contextmanager
    def shown(self, total: int, done: int) -> Iterator[None]:
        """Show the progress of `total` lines or tokens, of which earlier runs computed `done`."""
        self._bar.reset(self._task, total=total, completed=done, rates="")
        self._done_before, self._reported = done, monotonic()
        if self._bar.disable and done:
            say(f"{done} of {total} {self._label} are done already", err=True)
        with nullcontext() if self._bar.disable else self._bar:
            yield

    def advance(self, lines: int, positions: int) -> None:
        """Add computed lines and positions to the progress."""
        self._bar.update(self._task, advance=lines)
        self._positions += positions
        now, task = monotonic(), self._bar.tasks[0]
        seconds, computed = max(task.elapsed or 0, 1e-3), task.completed - self._done_before
        rates = f"{computed / seconds:.1f} {self._label}/s"
        if self._positions != computed:
            rates += f", {self._positions / seconds:.0f} positions/s"
        self._bar.update(self._task, rates=rates)
        if self._bar.disable and task.total and now - self._reported >= _REPORT_INTERVAL_S:
            self._reported = now
            # Estimate the time left from the mean rate of the run: rich's own estimate needs two results within 30 s.
            left = timedelta(seconds=round((task.remaining or 0) * seconds / max(computed, 1)))
            say(f"{task.completed:.0f} of {task.total:.0f} {self._label}, {rates}, {left} left", err=True)


def counted(number: int, thing: str) -> str:
    """A number of things, such as "1 shard" or "2 shards"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


class Outcome(NamedTuple):
    """The outcome of a run."""

    texts: int  # Lines that have a result.
    errors: int  # Lines that have no result; `errors.jsonl` lists these lines.
    shards: int
    resumed: int  # Shards that earlier runs computed.


async def run_batch(
    producer: Producer, source: str | Path, output: str | Path, settings: BatchSettings, progress: Progress
) -> Outcome:
    """Request a result for every line of an input, or continue an earlier run."""
    opened, folder = await asyncio.to_thread(lambda: (open_source(str(source)), open_folder(str(output))))
    with folder.locked():
        index, manifest = await begin(producer, folder, opened, settings)
        return await Run(producer, folder, manifest, opened, index, settings, progress).run()


async def begin(producer: Producer, folder: Folder, source: Source, settings: BatchSettings) -> tuple[Index, Manifest]:
    """Index an input, and begin or continue its run in a folder. The manifest lists the shards that are done."""
    options = settings.options
    index = await asyncio.to_thread(source.index, options.shard_lines)
    if index.is_empty:
        raise errors.SettingsError(f"input: {shown(named(source.location))} is empty")
    await producer.open()
    info, kind = producer.model, parse_kind(settings.what)
    kind.width(info)  # Refuse a kind that does not fit the model before the folder is written.
    fields = {name: getattr(info, name) for name in Model.__struct_fields__ if name != "adapter"}
    model = Model(**fields, adapter=await _qualified(producer, settings.adapter))
    given = Input(named(source.location).rsplit("/", 1)[-1], index.format, index.size, index.lines, index.digest)
    wanted = Manifest(VERSION, version("lmpool"), given, model, options, kind.columns(info), len(index.starts))
    with folder.explained():
        return index, await asyncio.to_thread(folder.begin, wanted)


async def _qualified(producer: Producer, adapter: str) -> str:
    """The name of an adapter with the digest of its weights, NAME@DIGEST; "" for no adapter."""
    if not adapter:
        return ""
    revisions = await producer.adapters()
    if adapter not in revisions:
        name, served = producer.model.name, ", ".join(revisions) or "none"
        raise errors.UnknownAdapter(f"the model {name!r} has no adapter {shown(adapter)}; it has: {served}")
    return f"{adapter}@{revisions[adapter]}"


@dataclass(slots=True)
class _Item:
    """A part of a text, a line without a result, or the end of a shard; items are written in order."""

    shard: int
    entry: Text | Failed | None  # The text or the failed line; None for the end of the shard.
    result: asyncio.Future[Columns | Failed | None]
    part: range = range(0)  # The positions of the text that this part requests.
    is_last: bool = False  # Whether this part is the last part of its line.
    size: int = 0  # Estimated bytes of the item in memory.


@dataclass(eq=False)
class Run:
    """Computes a run, or some shards of a run."""

    producer: Producer
    folder: Folder
    manifest: Manifest
    source: Source
    index: Index
    settings: BatchSettings
    progress: Progress

    def __post_init__(self) -> None:
        self._kind = parse_kind(self.settings.what)
        self._items: asyncio.Queue[_Item] = asyncio.Queue()  # Items whose results must be written, in order.
        self._unsent: asyncio.Queue[tuple[Text, _Item]] = asyncio.Queue()  # Items whose results must be requested.
        self._pending_items = self._pending_bytes = 0
        self._has_room = asyncio.Event()
        self._checked: object = None
        self._writer: ShardWriter | None = None
        self._info, self._loop = self.producer.model, asyncio.get_running_loop()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        # This property is read in a thread, but the producer must run in the event loop.
        found = find_tokenizer(self.producer, "input", 'give token ids: {"ids": [1, 2, 3]}')
        return asyncio.run_coroutine_threadsafe(found, self._loop).result()

    async def run(self) -> Outcome:
        """Compute all shards that are not done."""
        manifest, size = self.manifest, self.manifest.options.shard_lines
        resumed = {shard.number for shard in manifest.done}
        lines_done = sum(min(size, self.index.lines - number * size) for number in resumed)
        self.progress.shards = len(resumed), manifest.shards
        with self.progress.shown(self.index.lines, lines_done):
            try:
                await self.run_shards([number for number in range(manifest.shards) if number not in resumed])
            except BaseException:
                with suppress(errors.BatchError):  # A full disk may have ended the run.
                    await self._sum_up()
                raise
            await self._sum_up()
        if left := manifest.shards - len(manifest.done):
            gone = f"another program removed or replaced {left} of {manifest.shards} shards"
            raise errors.BatchError(f"{self.folder.location}: {gone}. {TRY_AGAIN}")
        texts, failed = (sum(getattr(shard, name) for shard in manifest.done) for name in ("texts", "errors"))
        return Outcome(texts, failed, manifest.shards, len(resumed))

    async def _sum_up(self) -> None:
        with self.folder.explained():
            await finish(asyncio.to_thread(self.folder.sum_up, self.manifest, is_over=True))

    async def run_shards(self, shards: Sequence[int]) -> None:
        """Compute some shards."""
        if not shards:
            return
        await self._check_adapter()
        senders = (self._send() for _ in range(self.settings.concurrency))
        # Reading waits for the tokenizer, whose loading needs the threads of the event loop. So read in another thread.
        reader = ThreadPoolExecutor(1, "lmpool-batch-input")
        try:
            await await_beside(self._drain(len(shards)), [self._feed(shards, reader), *senders, self._watch_adapter()])
        finally:
            reader.shutdown(wait=False)
            if self._writer is not None:
                self._writer.discard()

    def _prepare(self, line: Line | Failed) -> Text | Failed:
        """The text of a line, or why the line has no text. Called in a thread, because tokenizing takes time."""
        if isinstance(line, Failed):
            return line
        (number, fields), info = line, self._info
        custom_id, at = fields.name, np.searchsorted(self.index.duplicates, number)
        if number in self.index.duplicates[at : at + 1]:
            return Failed(number, custom_id, "an earlier line has its custom_id: give each line its own")
        try:
            ids, start = self._ids(fields)
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
            if start >= len(ids):
                raise errors.InvalidPrompt(f"start {start} is beyond the text, which has {len(ids)} tokens")
            if not (span := self._kind.span(len(ids), start)):
                raise errors.InvalidPrompt("a text of 1 token has no score: a score needs a token before it")
            return Text(number, custom_id, ids, span)
        except errors.InvalidPrompt as error:
            return Failed(number, custom_id, str(error))

    def _ids(self, fields: Fields) -> tuple[list[int], int]:
        """The token ids of a line, and the first position for which a result is wanted."""
        body = fields.body or Body()
        given = {name: getattr(fields, name) for name in ("text", "ids", "prompt")}
        given |= {"body.prompt": body.prompt, "body.input": body.input}
        used = [name for name, value in given.items() if value is not None]
        if len(used) != 1:
            there = f"it has {' and '.join(used)}" if used else "it has none of them"
            raise errors.InvalidPrompt(f"a line needs one of {', '.join(given)}: {there}")
        ids = self._encoded(given[used[0]])
        if fields.continuation is None:
            return ids, self.settings.start
        if not self._kind.has_continuations or used != ["prompt"]:
            raise errors.InvalidPrompt("continuation: only --what scores accepts it, together with a prompt")
        # A continuation gets no special tokens: they belong at the beginning of a text.
        continued = self._encoded(fields.continuation, add_special_tokens=False)
        for name, some in (("prompt", ids), ("continuation", continued)):
            if not some:
                raise errors.InvalidPrompt(f"the {name} is empty: a score needs a token, and a token before it")
        return ids + continued, len(ids)

    def _encoded(self, text: str | list[int], **options: Any) -> list[int]:
        return self._tokenizer.encode(text, **options) if isinstance(text, str) else text

    async def _feed(self, shards: Sequence[int], reader: ThreadPoolExecutor) -> None:
        """Read and tokenize lines in the thread of `reader`, and queue items as earlier items are written."""
        chunks = self.source.read(self.index, self.manifest.options.shard_lines, shards)
        ahead = ((chunk, list(map(self._prepare, chunk.lines))) for chunk in chunks)
        loop, limit = self._loop, _ITEMS_PER_REQUEST * self.settings.concurrency
        number_bytes = _NUMBER_BYTES * self._kind.width(self._info)
        while prepared := await loop.run_in_executor(reader, next, ahead, None):
            chunk, entries = prepared
            for entry in entries:
                parts, size = [range(0)], _TEXT_BYTES
                if isinstance(entry, Text):
                    parts, size = self._kind.parts(entry.span, self._info), _TEXT_BYTES + _ID_BYTES * len(entry.ids)
                for part in parts:
                    part_bytes = size + number_bytes * len(part)
                    while self._pending_items >= limit or self._pending_bytes > _MAX_BYTES:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self._pending_items += 1
                    self._pending_bytes += part_bytes
                    item = _Item(chunk.shard, entry, loop.create_future(), part, part is parts[-1], part_bytes)
                    self._items.put_nowait(item)
                    if isinstance(entry, Text):
                        self._unsent.put_nowait((entry, item))
                    else:
                        item.result.set_result(entry)
            if chunk.is_last:
                self._items.put_nowait(end := _Item(chunk.shard, None, loop.create_future()))
                end.result.set_result(None)

    async def _send(self) -> None:
        """Request the results of items, one item after the other; many tasks run this method."""
        while True:
            text, item = await self._unsent.get()
            result: Columns | Failed
            self._check_model()
            try:
                result = await self._kind.request(self.producer, text, item.part, self.settings.adapter)
            except (errors.InvalidPrompt, errors.WorkerError) as error:
                result = Failed(text.line, text.custom_id, str(error))
            except errors.RequestFailed as error:  # Name the line in the error that ends the run.
                error.args = (f"line {text.line}: {error}",)
                raise
            self._check_model()
            item.result.set_result(result)
            self.progress.unplaced[item.shard] += item.is_last

    def _check_model(self) -> None:
        """Raise ModelMismatch if the pool now serves another model than the manifest's."""
        began, now = self.manifest.model, self.producer.model
        if now is self._checked:  # The fingerprint is a digest, which would be computed twice per request.
            return
        if now.fingerprint != began.fingerprint:
            changed = f"the model {now.name!r} has changed (fingerprint {began.fingerprint}, now {now.fingerprint})"
            base, version = split_name(began.name)
            advice = f"{TRY_AGAIN} when the first model is served again"
            if base == now.base and (version or 0) != now.version:
                advice = f"{TRY_AGAIN} with --model {base}@{version or 0}, while workers serve this version"
            raise errors.ModelMismatch(f"{changed}. {advice}")
        self._checked = now

    async def _check_adapter(self) -> None:
        """Raise ModelMismatch if the pool now has another model or adapter than the manifest's."""
        self._check_model()
        adapter = self.settings.adapter
        began, now = self.manifest.model.adapter, await _qualified(self.producer, adapter)
        if now != began:
            changed = f"the adapter {adapter!r} has changed ({began}, now {now})"
            raise errors.ModelMismatch(f"{changed}. {TRY_AGAIN} when the first adapter is in service again")

    async def _watch_adapter(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            await self._check_adapter()

    async def _drain(self, shards: int) -> None:
        """Write results in the order of the lines, until the given number of shards is done."""
        ready, size = list[_Item](), 0
        while shards:
            ready.append(item := await self._items.get())
            await item.result
            size += item.size
            if is_end := item.entry is None:
                await self._check_adapter()
                shards -= 1
            # Unwritten items limit how many items may be queued, so write all items when the queue is empty.
            is_enough = len(ready) >= _MAX_WRITTEN_ITEMS or size >= _MAX_WRITTEN_BYTES
            if is_end or is_enough or self._items.empty():
                await finish(asyncio.to_thread(self._write, ready))
                self._pending_items -= len(ready) - is_end
                self._pending_bytes -= size
                self._has_room.set()
                self.progress.advance(sum(item.is_last for item in ready), sum(len(item.part) for item in ready))
                ready, size = [], 0

    def _write(self, ready: Sequence[_Item]) -> None:
        """Write items of one shard, in a thread. The item that ends the shard moves the shard into the folder."""
        with self.folder.explained():
            for item in ready:
                writer = self._writer = self._writer or open_writer(self.folder, self.manifest, item.shard)
                result = item.result.result()
                if isinstance(result, Failed):
                    writer.fail(result)
                elif isinstance(item.entry, Text) and result is not None:
                    writer.add(item.entry, result, item.is_last)
                else:
                    self.manifest.done.append(writer.place())
                    self._writer = None
                    self.progress.unplaced.pop(item.shard, None)
                    self.progress.shards = len(self.manifest.done), self.manifest.shards
