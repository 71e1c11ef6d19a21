"""The commands `lmpool batch`, which computes results for every line of a file, and `lmpool perplexity`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lmpool.aio import gather
from lmpool.batch.fetch import FILES_VARIABLE
from lmpool.batch.folder import ERRORS, SUBMISSION, open_folder
from lmpool.batch.kinds import KINDS_HELP
from lmpool.batch.run import BatchSettings, Outcome, Pool, Progress, counted, run_batch
from lmpool.broker.bucket import named
from lmpool.cli import say, say_json
from lmpool.errors import BatchError, LMPoolError, LogFormatter, SettingsError
from lmpool.producer import Producer
from lmpool.producer.cli import options
from lmpool.producer.tokenizer import find_tokenizer

SOME_FAILED = 3
"""Exit code when some lines have no result; it is 2 after an error or without any result, 4 for a refused folder."""

_EXIT_CODES = (
    "Exit codes: 0 when every line has a result; 3 when some have none (OUT/errors.jsonl says why); 4 when OUT belongs "
    "to another model, input or options, or another run writes there; 2 on any other error, or when no line has a "
    "result; 130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP. After all but 0, 3 and 4 the same command continues the run."
)
_CONCURRENCY = 64  # Concurrent requests of `perplexity`: enough to fill a worker's batch, because windows take long.
_WINDOW = 2048  # Default tokens of a window: the context length at which models are usually compared.

batch_app = typer.Typer(name="batch", help="Whole files: a result for every line, in a folder.", no_args_is_help=True)

_IN = "JSONL (text or ids, and custom_id) or Parquet, may be compressed; a path or a URL."
_OUT = "Folder for the results, or its URL. An unfinished run is continued."
_FILES = "Jobs read and write files below this folder only (default: LMPOOL_BATCH_FILES, then the working directory)."

Source = Annotated[str, typer.Argument(metavar="IN", help=_IN)]
Output = Annotated[str, typer.Argument(metavar="OUT", help=_OUT)]


@dataclass(frozen=True, kw_only=True)
class _RequestOptions:
    """The options of the commands that send requests."""

    adapter: Annotated[str, typer.Option(help="One of the model's adapters (see `lmpool adapters list`).")] = ""
    model: options.ModelName = None
    redis: options.RedisUrl = None
    prefix: options.Prefix = "lmpool"
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take before the run ends.")] = 3600.0
    waits: options.Waits = None

    @property
    def pool(self) -> Pool:
        return Pool(self.model, self.prefix, self.timeout)

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Yield a producer that is not open yet; raises the errors of `check_served`."""
        producer = self.pool.producer(self.redis, options.when_absent(self.waits))
        try:
            await options.check_served(self.model, self.redis, self.prefix, self.waits)
            yield producer
        finally:
            await producer.close()


@dataclass(frozen=True, kw_only=True)
class _RunOptions(_RequestOptions):
    """The options of a command that runs a batch or submits jobs."""

    what: Annotated[str, typer.Option(help=f"The request for every text: {KINDS_HELP}.")]
    start: Annotated[int, typer.Option(help="First position of each text; -1 is the last position, and so on.")] = 0
    format: Annotated[str | None, typer.Option(help="jsonl (default) or parquet; rows are safetensors.")] = None
    shard_lines: Annotated[int, typer.Option(help="Lines of a shard; 0 for 1,024, or 64 for rows.")] = 0
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.")] = 512

    @property
    def settings(self) -> BatchSettings:
        return BatchSettings(**{name: getattr(self, name) for name in BatchSettings.__struct_fields__})


def register(app: typer.Typer) -> None:
    """Add the commands of `lmpool batch` and the command `lmpool perplexity`."""
    app.add_typer(batch_app)
    app.command()(perplexity)


@batch_app.command("run", epilog=_EXIT_CODES)
@options.with_options
def run(at: _RunOptions, source: Source, output: Output, as_json: options.AsJson = False) -> None:
    """Request a result for every line of IN, and write shards to OUT. The same command again continues the run."""
    settings, progress = at.settings, Progress()

    async def compute() -> Outcome:
        async with at.producer() as producer:
            return await run_batch(producer, source, output, settings, progress)

    try:
        outcome = options.run(compute())
    except (KeyboardInterrupt, typer.Exit):  # A signal ended the run, which has closed its producer.
        done, shards = progress.shards
        cancelled = "its queued prompts are cancelled"
        so_far = f"after {done} of {counted(shards, 'shard')}; {cancelled}" if shards else "before its first request"
        lost = ""
        if lines := sum(progress.unplaced.values()):
            again = "of unfinished shards will be computed again (fewer with a smaller --shard-lines)"
            lost = f"; {counted(lines, 'computed line')} {again}"
        say(f"lmpool: stopped {so_far}; run the same command to continue{lost}", err=True)
        raise
    where = f"{named(output).rstrip('/')}/{ERRORS}"
    if as_json:
        say_json(outcome._asdict())
    elif outcome.texts:
        failed = f"; {counted(outcome.errors, 'line')} without one: see {where}" if outcome.errors else ""
        say(f"{counted(outcome.texts, 'result')} in {counted(outcome.shards, 'shard')} in {named(output)}{failed}")
    if outcome.errors:
        line = msgspec.json.decode((open_folder(output).read(ERRORS) or b"").partition(b"\n")[0])
        first = f"line {line['line']}: {line['error']}"
        if not outcome.texts:
            raise BatchError(f"no line of {named(source)} has a result; {first}; see {where}")
        say(f"the first of them: {first}", err=True)
        raise typer.Exit(SOME_FAILED)


@batch_app.command(epilog="Needs the extra bulk. `lmpool batch worker` runs the jobs and needs the same files.")
@options.with_options
async def submit(at: _RunOptions, source: Source, output: Output, as_json: options.AsJson = False) -> None:
    """Queue a job for each unfinished shard, for `lmpool batch worker`. The same command again queues missing jobs."""
    from lmpool.batch import jobs

    submission = jobs.Submission(source, at.settings, at.pool)
    async with at.producer() as producer, jobs.connected(at.redis) as arq:
        queued = await jobs.submit(producer, arq, submission, output)
    if as_json:
        say_json(queued)
    else:
        total = counted(queued["shards"], "shard")
        say(f"{counted(queued['jobs'], 'job')} queued, and {queued['there']} before; {queued['done']} of {total} done")


@batch_app.command()
def worker(
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is queued.")] = False,
    jobs_at_once: Annotated[int, typer.Option("--jobs", min=1, help="Concurrent shards.")] = 4,
    lease_s: Annotated[float, typer.Option(min=1, help="Seconds until a killed worker's jobs are taken over.")] = 30.0,
    schedule: Annotated[Path | None, typer.Option(help="A TOML file of nightly runs; see docs/bulk.md.")] = None,
    files: Annotated[Path | None, typer.Option(help=_FILES, envvar=FILES_VARIABLE, show_envvar=False)] = None,
    redis: options.RedisUrl = None,
) -> None:
    """Run the jobs that `lmpool batch submit` queued, until Ctrl-C. Any number of workers may run."""
    from lmpool.batch import jobs

    logging.basicConfig(level=logging.INFO)
    logging.getLogger().handlers[0].setFormatter(LogFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    jobs.BatchWorker(**jobs.worker_options(redis, schedule, jobs_at_once, lease_s, files), burst=burst).run()


@batch_app.command()
def status(output: Output, redis: options.RedisUrl = None, as_json: options.AsJson = False) -> None:
    """Show how many shards of OUT are done and, for jobs, how many are queued, in progress and failed.

    Jobs that the server lost are queued again.
    """
    folder = open_folder(output)
    manifest = folder.manifest()
    left = sorted(set(range(manifest.shards)) - set(folder.done(manifest)))
    states: dict[str, Any] = {"queued": 0, "under_way": 0, "failed": {}}
    text = f"{manifest.shards - len(left)} of {counted(manifest.shards, 'shard')} done"
    # A folder of `batch run` has no jobs, so its status needs neither a server nor arq.
    if left and SUBMISSION in folder.listed():
        try:
            from lmpool.batch import jobs

            states, note = options.run(jobs.find_jobs(redis, folder, manifest, left))
            if note:
                say(f"lmpool: {note}", err=True)
            text += f", {states['under_way']} in progress, {states['queued']} queued"
        except LMPoolError as error:
            if redis is not None and not isinstance(error, SettingsError):
                raise
            states = dict.fromkeys(states)
            text += f" (jobs are not shown: {error})"
    if as_json:
        say_json({"shards": manifest.shards, "done": manifest.shards - len(left), **states})
        return
    say(text)
    for shard, reason in (states["failed"] or {}).items():
        say(f"shard {shard} failed: {reason}")


@batch_app.command()
def cancel(output: Output, redis: options.RedisUrl = None) -> None:
    """Remove the queued jobs of OUT and stop its running jobs. Finished shards are kept. OUT need not exist."""
    from lmpool.batch import jobs

    say(f"{counted(options.run(jobs.cancel(redis, output)), 'job')} cancelled")


@options.with_options
async def perplexity(
    at: _RequestOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text in UTF-8.")],
    window: Annotated[int, typer.Option(min=0, help="Tokens of one forward at most (default: at most 2,048).")] = 0,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that are read again (default: half a window).")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Show the perplexity of a text file, and its bits per byte."""
    try:
        text = await asyncio.to_thread(file.read_text, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"file: {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    async with at.producer() as producer:
        await producer.open()
        most = producer.model.max_prompt_tokens
        window = window or min(_WINDOW, most)
        overlap = overlap or max(1, window // 2)
        if not 1 <= overlap < window <= most:
            raise SettingsError(f"window: {window} must be more than the overlap, {overlap}, and at most {most}")
        tokenizer = await find_tokenizer(producer, "file", "a text cannot be scored without it")
        ids = await asyncio.to_thread(tokenizer.encode, text)
        if len(ids) < 2:
            raise SettingsError("file: it has less than two tokens; a score needs a token before it")
        pairs, progress, sums = windows(ids, window, overlap), Progress("tokens"), list[float]()

        async def send() -> None:
            for context, continuation in pairs:
                scores = await producer.score(context, continuation, adapter=at.adapter)
                sums.append(-float(scores.sum(dtype="float64")))
                progress.advance(len(scores), len(scores))

        with progress.shown(len(ids) - 1, 0):
            await gather([send() for _ in range(_CONCURRENCY)])
    nats = math.fsum(sums)
    mean, bits = nats / (len(ids) - 1), nats / math.log(2) / len(text.encode("utf-8"))
    perplexity = math.exp(mean) if mean < 700 else math.inf  # exp of more than 709 does not fit into a float.
    found = {"tokens": len(ids) - 1, "nats_per_token": mean, "perplexity": perplexity, "bits_per_byte": bits}
    if as_json:
        say_json(found)
        return
    for name, digits in (("tokens", 0), ("nats_per_token", 4), ("perplexity", 3), ("bits_per_byte", 4)):
        say(f"{name.replace('_', ' '):14} {found[name]:.{digits}f}")


def windows(ids: list[int], window: int, overlap: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a text into pairs (context, continuation) of at most `window` tokens; the first context is one token."""
    start = 1
    while start < len(ids):
        first = max(0, start - overlap)
        end = min(len(ids), first + window)
        yield ids[first:start], ids[start:end]
        start = end
