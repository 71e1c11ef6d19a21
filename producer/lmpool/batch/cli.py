"""`lmpool batch`: a file in, a folder of answers out, now or by jobs of arq; and `lmpool perplexity` of a text file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from redis.exceptions import RedisError

from lmpool.batch.kinds import KINDS_HELP
from lmpool.batch.perplexity import perplexity_of
from lmpool.batch.progress import Progress, counted
from lmpool.batch.reader import read_manifest
from lmpool.batch.run import BatchSettings, run_batch
from lmpool.batch.bucket import open_folder
from lmpool.batch.fetch import named
from lmpool.batch.folder import ERRORS, Folder
from lmpool.broker.server import Server
from lmpool.cli import say, say_json
from lmpool.errors import BatchError, LMPoolError, LogFormatter, SettingsError
from lmpool.producer import Producer
from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, Waits, check_served, run, when_absent

T = TypeVar("T")

SOME_FAILED = 3
"""What the command exits with when lines have no answer; errors, and files of which no line has one,
have 2, or 4 when the output folder is refused."""

_EXIT_CODES = (
    "Exits with 0 when every line has an answer, 3 when some have none (OUT/errors.jsonl says why), 4 when OUT belongs "
    "to another model, input or options or another run writes there, 2 on any other error or when no line has one, and "
    "130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP. After all but 0, 3 and 4 the same command goes on where it stopped."
)

batch_app = typer.Typer(
    name="batch", help="Whole files: every line is asked, answers go to a folder.", no_args_is_help=True
)

Source = Annotated[
    str,
    typer.Argument(metavar="IN", help="JSONL (text or ids, and custom_id) or Parquet, packed or not; a path or a URL."),
]
Output = Annotated[
    str, typer.Argument(metavar="OUT", help="Folder for the answers, or its URL; one that was begun goes on.")
]
What = Annotated[str, typer.Option(help=f"What is asked of every text: {KINDS_HELP}.")]
Start = Annotated[int, typer.Option(help="First position of each text; -1 for the last one, and so on.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl (default) or parquet; rows are safetensors.")]
ShardLines = Annotated[int, typer.Option(help="Lines of a shard; 0 for 1,024, of rows 64.")]
Adapter = Annotated[str, typer.Option(help="One of the model's adapters (see `lmpool adapters list`).")]
Concurrency = Annotated[int, typer.Option(help="Requests under way at once.")]
Patience = Annotated[float, typer.Option("--timeout", help="Seconds that a request may take before the run ends.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(batch_app)
    app.command()(perplexity)


@batch_app.callback()
def _batch() -> None:
    """Whole files: every line is asked, answers go to a folder."""


@batch_app.command("run", epilog=_EXIT_CODES)
def run_command(
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
    """Ask about every line of IN, and write the answers to shards in OUT. The same command again goes on."""
    settings = BatchSettings(what, start, shard_format, shard_lines, adapter, concurrency)

    producer = _producer(model, redis, prefix, timeout, waits)
    progress = Progress()
    running = run_batch(producer, source, output, settings, progress)
    try:
        outcome = run(_closing(producer, running, waits, (model, redis, prefix)))
    except (KeyboardInterrupt, typer.Exit):  # A signal has ended it, and it has closed its producer.
        done, shards = progress.shards
        cancelled = "; the prompts that it had queued are cancelled"
        so_far = f"after {done} of {counted(shards, 'shard')}{cancelled}" if shards else "before anything was asked"
        say(f"lmpool: stopped {so_far}; run the same command to go on{_lost(progress)}", err=True)
        raise
    where = f"{named(output).rstrip('/')}/{ERRORS}"
    if as_json:
        say_json(outcome._asdict())
    elif outcome.texts:
        has = "has" if outcome.errors == 1 else "have"
        failed = f"; {counted(outcome.errors, 'line')} {has} none: see {where}" if outcome.errors else ""
        say(f"{counted(outcome.texts, 'answer')} in {counted(outcome.shards, 'shard')} in {named(output)}{failed}")
    if outcome.errors:
        first = _first_error(open_folder(output))
        if not outcome.texts:
            raise BatchError(f"no line of {named(source)} has an answer; {first}; see {where}")
        say(f"the first of them: {first}", err=True)
        raise typer.Exit(SOME_FAILED)


def _lost(progress: Progress) -> str:
    """What a run that was stopped will do again: a shard is in place whole or not at all."""
    lines = sum(progress.unplaced.values())
    if not lines:
        return ""
    lost = f"{counted(lines, 'answered line')} of unfinished shards will be asked again"
    return f"; {lost} (fewer in a run with a smaller --shard-lines)"


def _first_error(folder: Folder) -> str:
    """The first line without an answer, and why it has none."""
    if not folder.has(ERRORS):
        return f"{ERRORS} is gone"  # With what it is made of, which somebody has removed.
    with folder.explained(), folder.local(ERRORS).open("rb") as file:
        first = msgspec.json.decode(file.readline())
    return f"line {first['line']}: {first['error']}"


@batch_app.command(epilog="Needs the extra bulk. `lmpool batch worker` does the jobs, where the same files are seen.")
def submit(
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
    """Queue a job for each shard that is not done, for `lmpool batch worker`. The same again queues what is left."""
    jobs = _jobs()
    settings = BatchSettings(what, start, shard_format, shard_lines, adapter, concurrency)
    pool = {"model": model, "prefix": prefix, "timeout": timeout}
    producer = _producer(model, redis, prefix, timeout, waits)
    sending = _with_queue(redis, lambda arq: jobs.submit(producer, arq, source, output, settings, pool))
    queued = run(_closing(producer, sending, waits, (model, redis, prefix)))
    if as_json:
        say_json(queued._asdict())
    else:
        total = counted(queued.shards, "shard")
        say(f"{counted(queued.jobs, 'job')} queued, and {queued.there} before; {queued.done} of {total} done")


@batch_app.command()
def worker(
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is queued.")] = False,
    jobs_at_once: Annotated[int, typer.Option("--jobs", min=1, help="Shards at once.")] = 4,
    lease_s: Annotated[float, typer.Option(min=1, help="Seconds until others do what a killed worker held.")] = 30.0,
    schedule: Annotated[Path | None, typer.Option(help="A TOML file of nightly runs; see docs/bulk.md.")] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            help="Jobs read and write files below this folder only (default: LMPOOL_BATCH_FILES, then the working "
            "directory).",
            envvar="LMPOOL_BATCH_FILES",
            show_envvar=False,
        ),
    ] = None,
    redis: RedisUrl = None,
) -> None:
    """Do the jobs that `lmpool batch submit` has queued, until Ctrl-C. Any number of these may run."""
    from lmpool.batch.jobs import work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger().handlers[0].setFormatter(LogFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    work(redis, schedule, jobs_at_once, lease_s, files, burst=burst)


@batch_app.command()
def status(output: Output, redis: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show how many shards of OUT are done, and, if they are jobs, queued, under way, and why some have failed."""
    folder = open_folder(output)
    manifest = read_manifest(folder)
    left = sorted(set(range(manifest.shards)) - set(folder.shards()))
    counts: dict[str, Any] = {"shards": manifest.shards, "done": manifest.shards - len(left)}
    jobs_of: dict[str, Any] = {"queued": 0, "under_way": 0, "failed": {}}
    unknown, lost, why = "", 0, ""
    # A folder of `batch run` has no jobs: neither a server nor arq is needed.
    submission = folder.read_submission(manifest) if left else None
    if submission is not None:
        given = submission
        try:
            jobs_of = run(_with_queue(redis, lambda arq: _jobs().find_jobs(arq, folder, manifest, given, output, left)))
            lost, why = jobs_of.pop("lost"), jobs_of.pop("why")
        except LMPoolError as error:
            if redis is not None and not isinstance(error, SettingsError):
                raise
            unknown, jobs_of = str(error), dict.fromkeys(jobs_of)
    if lost:
        say(f"lmpool: the server had lost {counted(lost, 'job')}: {_outcome_of_lost(why)}", err=True)
    if as_json:
        say_json({**counts, **jobs_of})
        return
    under_way = ""
    if submission is not None:
        under_way = f", {jobs_of['under_way']} under way, {jobs_of['queued']} queued"
    if unknown:
        under_way = "; its jobs cannot be seen"
    say(f"{counts['done']} of {counted(manifest.shards, 'shard')} done{under_way}")
    if unknown:
        say(f"lmpool: {unknown}", err=True)
    for shard, reason in (jobs_of["failed"] or {}).items():
        say(f"shard {shard} has failed: {reason}")


def _outcome_of_lost(why: str) -> str:
    """What has become of jobs that a server has lost."""
    return f"not queued again, for {why}: submit the input again" if why else "queued again"


@batch_app.command()
def cancel(output: Output, redis: RedisUrl = None) -> None:
    """Take the jobs of OUT, which may be gone, out of the queue, and stop those under way. What is done stays."""
    cancelled = run(_with_queue(redis, lambda arq: _jobs().cancel(arq, output)))
    say(f"{counted(cancelled, 'job')} cancelled")


def _jobs() -> ModuleType:
    """The jobs of arq.

    Raises:
        SettingsError: it is not installed.
    """
    from lmpool.batch import jobs

    return jobs


async def _with_queue(redis: str | None, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Do something with arq's client of a server."""
    arq = _jobs().connect(redis)
    try:
        return await work(arq)
    except (RedisError, OSError) as error:
        raise Server(redis).explain(error) from error
    finally:
        await arq.aclose(close_connection_pool=True)


def perplexity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text in UTF-8.")],
    window: Annotated[int, typer.Option(min=0, help="Most tokens of one forward (default: 2,048 at most).")] = 0,
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
    except OSError as error:
        raise SettingsError(f"file: {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"file: {file} cannot be read: {error}") from error
    producer = _producer(model, redis, prefix, timeout, waits)
    asking = perplexity_of(producer, text, window, overlap, adapter, Progress("tokens"))
    found = run(_closing(producer, asking, waits, (model, redis, prefix)))
    if as_json:
        say_json(found._asdict())
        return
    say(f"tokens         {found.tokens}")
    say(f"nats per token {found.nats_per_token:.4f}")
    say(f"perplexity     {found.perplexity:.3f}")
    say(f"bits per byte  {found.bits_per_byte:.4f}")


def _producer(model: str | None, redis: str | None, prefix: str, timeout: float, waits: bool | None) -> Producer:
    """A producer for what is asked once: it keeps nothing, here or in the pool, and goes behind all others."""
    return Producer(
        model,
        redis=redis,
        prefix=prefix,
        timeout=timeout,
        cache_bytes=0,
        when_absent=when_absent(waits),
        priority="bulk",
        keep_answers=False,
    )


async def _closing(
    producer: Producer, work: Coroutine[Any, Any, T], waits: bool | None, pool: tuple[str | None, str | None, str]
) -> T:
    """Await something that asks, and close the producer however that ends.

    Raises:
        ServerUnreachable, UnknownModel: as `check_served`.
    """
    try:
        await check_served(*pool, waits)
        return await work
    finally:
        work.close()
        await producer.close()
