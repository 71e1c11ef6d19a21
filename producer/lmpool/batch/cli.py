"""`lmpool batch`: results for every line of a file, now or by jobs of arq; and `lmpool perplexity` of a text file."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer
from redis.exceptions import RedisError

from lmpool.aio import gather
from lmpool.batch.fetch import FILES_VARIABLE, named
from lmpool.batch.folder import ERRORS, SUBMISSION, open_folder
from lmpool.batch.kinds import KINDS_HELP
from lmpool.batch.run import BatchSettings, Pool, Progress, counted, run_batch
from lmpool.broker.server import Server
from lmpool.cli import say, say_json
from lmpool.errors import BatchError, LMPoolError, LogFormatter, SettingsError
from lmpool.producer import Producer
from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, Waits, check_served, run, when_absent
from lmpool.producer.tokenizer import find_tokenizer

T = TypeVar("T")

SOME_FAILED = 3
"""Exit code when some lines have no result. The code is 2 for errors or if no line has any, 4 for refused folders."""

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
What = Annotated[str, typer.Option(help=f"The request for every text: {KINDS_HELP}.")]
Start = Annotated[int, typer.Option(help="First position of each text; -1 is the last position, and so on.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl (default) or parquet; rows are safetensors.")]
ShardLines = Annotated[int, typer.Option(help="Lines of a shard; 0 for 1,024, or 64 for rows.")]
Adapter = Annotated[str, typer.Option(help="One of the model's adapters (see `lmpool adapters list`).")]
Concurrency = Annotated[int, typer.Option(help="Concurrent requests.")]
Patience = Annotated[float, typer.Option("--timeout", help="Seconds that a request may take before the run ends.")]


class _Client(NamedTuple):
    """The options of the commands that send requests."""

    pool: Pool
    redis: str | None
    waits: bool | None

    def run(self, work: Callable[[Producer], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with a producer, which is closed at the end; raises as `check_served`."""
        producer = self.pool.producer(self.redis, when_absent(self.waits))

        async def closing() -> T:
            try:
                await check_served(self.pool.model, self.redis, self.pool.prefix, self.waits)
                return await work(producer)
            finally:
                await producer.close()

        return run(closing())


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(batch_app)
    app.command()(perplexity)


def _run_or_submit(name: str, does: Callable[..., None], epilog: str) -> None:
    """Add a command with the options of a run."""

    def command(
        source: Source,
        output: Output,
        what: What,
        start: Start = 0,
        shard_format: Format = None,
        shard_lines: ShardLines = 0,
        adapter: Adapter = "",
        concurrency: Concurrency = 512,
        model: ModelName = None,
        redis: RedisUrl = None,
        prefix: Prefix = "lmpool",
        timeout: Patience = 3600.0,
        waits: Waits = None,
        as_json: AsJson = False,
    ) -> None:
        settings = BatchSettings(what, start, shard_format, shard_lines, adapter, concurrency)
        does(source, output, settings, _Client(Pool(model, prefix, timeout), redis, waits), as_json)

    batch_app.command(name, help=does.__doc__, epilog=epilog)(command)


def _run(source: str, output: str, settings: BatchSettings, client: _Client, as_json: bool) -> None:
    """Request a result for every line of IN, and write shards to OUT. The same command again continues the run."""
    progress = Progress()
    try:
        outcome = client.run(lambda producer: run_batch(producer, source, output, settings, progress))
    except (KeyboardInterrupt, typer.Exit):  # A signal ended the run, which has closed its producer.
        done, shards = progress.shards
        cancelled = "its queued prompts are cancelled"
        so_far = f"after {done} of {counted(shards, 'shard')}; {cancelled}" if shards else "before its first request"
        again = counted(lines, "computed line") if (lines := sum(progress.unplaced.values())) else ""
        lost = f"; {again} of unfinished shards will be computed again (fewer with a smaller --shard-lines)"
        say(f"lmpool: stopped {so_far}; run the same command to continue{lost if again else ''}", err=True)
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


def _submit(source: str, output: str, settings: BatchSettings, client: _Client, as_json: bool) -> None:
    """Queue a job for each unfinished shard, for `lmpool batch worker`. The same command again queues missing jobs."""
    jobs = _jobs()
    given = jobs.Submission(source, settings, client.pool)
    queued = client.run(
        lambda producer: _with_queue(client.redis, lambda arq: jobs.submit(producer, arq, given, output))
    )
    if as_json:
        say_json(queued)
    else:
        total = counted(queued["shards"], "shard")
        say(f"{counted(queued['jobs'], 'job')} queued, and {queued['there']} before; {queued['done']} of {total} done")


_run_or_submit("run", _run, _EXIT_CODES)
_run_or_submit("submit", _submit, "Needs the extra bulk. `lmpool batch worker` runs the jobs and needs the same files.")


@batch_app.command()
def worker(
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is queued.")] = False,
    jobs_at_once: Annotated[int, typer.Option("--jobs", min=1, help="Concurrent shards.")] = 4,
    lease_s: Annotated[float, typer.Option(min=1, help="Seconds until a killed worker's jobs are taken over.")] = 30.0,
    schedule: Annotated[Path | None, typer.Option(help="A TOML file of nightly runs; see docs/bulk.md.")] = None,
    files: Annotated[Path | None, typer.Option(help=_FILES, envvar=FILES_VARIABLE, show_envvar=False)] = None,
    redis: RedisUrl = None,
) -> None:
    """Run the jobs that `lmpool batch submit` queued, until Ctrl-C. Any number of workers may run."""
    jobs = _jobs()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger().handlers[0].setFormatter(LogFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    jobs.BatchWorker(**jobs.worker_options(redis, schedule, jobs_at_once, lease_s, files), burst=burst).run()


@batch_app.command()
def status(output: Output, redis: RedisUrl = None, as_json: AsJson = False) -> None:
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
            states, note = run(_with_queue(redis, lambda arq: _jobs().find_jobs(arq, folder, manifest, left)))
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
def cancel(output: Output, redis: RedisUrl = None) -> None:
    """Remove the queued jobs of OUT and stop its running jobs. Finished shards are kept. OUT need not exist."""
    cancelled = run(_with_queue(redis, lambda arq: _jobs().cancel(arq, output)))
    say(f"{counted(cancelled, 'job')} cancelled")


def _jobs() -> ModuleType:
    """Import the module of the jobs, which needs arq."""
    from lmpool.batch import jobs

    return jobs


async def _with_queue(redis: str | None, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine with the client of arq."""
    connect, server = _jobs().connect, Server(redis)
    arq = connect(server)
    try:
        return await work(arq)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await arq.aclose(close_connection_pool=True)


def perplexity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text in UTF-8.")],
    window: Annotated[int, typer.Option(min=0, help="Tokens of one forward at most (default: at most 2,048).")] = 0,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that are read again (default: half a window).")] = 0,
    adapter: Adapter = "",
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Patience = 3600.0,
    waits: Waits = None,
    as_json: AsJson = False,
) -> None:
    """Show the perplexity of a text file, and its bits per byte."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"file: {file} cannot be read: {reason}") from error
    client = _Client(Pool(model, prefix, timeout), redis, waits)
    found = client.run(lambda producer: _perplexity_of(producer, text, window, overlap, adapter))
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


async def _perplexity_of(producer: Producer, text: str, window: int, overlap: int, adapter: str) -> dict[str, float]:
    """Score all tokens of a text except the first, in overlapping windows; a window or overlap of 0 is the default."""
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
    pairs, progress = windows(ids, window, overlap), Progress("tokens")
    sums: list[float] = []

    async def send() -> None:
        for context, continuation in pairs:
            scores = await producer.score(context, continuation, adapter=adapter)
            sums.append(-float(scores.sum(dtype="float64")))
            progress.advance(len(scores), len(scores))

    with progress.shown(len(ids) - 1, 0):
        await gather([send() for _ in range(_CONCURRENCY)])
    nats = math.fsum(sums)
    mean, bits = nats / (len(ids) - 1), nats / math.log(2) / len(text.encode("utf-8"))
    perplexity = math.exp(mean) if mean < 700 else math.inf  # exp of more than 709 does not fit into a float.
    return {"tokens": len(ids) - 1, "nats_per_token": mean, "perplexity": perplexity, "bits_per_byte": bits}
