"""The commands `logprobs`, `status`, `flush`, `bench`, `adapters`, `weights`; `register` adds all client commands."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from lmpool.admin.survey import file_notices, survey
from lmpool.broker.server import Server
from lmpool.broker.server_checks import check_server
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import SettingsError
from lmpool.producer.cli import status as tables
from lmpool.producer.cli.options import TEXT, AreIds, AsJson, PoolOptions, ServerOptions, read_prompt, run, with_options
from lmpool.producer.cli.queues import dead_app, queue_app
from lmpool.producer.cli.trie_show import trie_app
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import TOKENIZERS, find_tokenizer, parse_ids, published_tokenizer
from lmpool.protocol.version import MAX_NUMBER
from lmpool.rows.cache import scan_pattern

adapters_app = typer.Typer(name="adapters", help="LoRA adapters of a model: list, add, remove.", no_args_is_help=True)
weights_app = typer.Typer(name="weights", help="Versions of a model's weights: list, publish.", no_args_is_help=True)

AdapterName = Annotated[str, typer.Argument(help="The name that requests use for the adapter.")]

_UNLINKED_PER_CALL = 500  # Max rows per UNLINK: one call for all rows would block other clients of the server.
_MAX_ALONE = 50  # Max prompts that `bench` requests one at a time.
_MAX_ALONE_S = 5.0  # Max seconds that `bench` spends on single prompts: a slow model gets fewer prompts.


def register(app: typer.Typer) -> None:
    """Add the client commands."""
    for command in (logprobs, status, tables.top, flush, bench):
        app.command()(command)
    for group in (trie_app, adapters_app, weights_app, dead_app, queue_app):
        app.add_typer(group)


@with_options
def logprobs(
    at: PoolOptions,
    prompt: Annotated[str, TEXT],
    ids: AreIds = False,
    top: Annotated[int, typer.Option(min=1, help="Number of tokens to show.")] = 10,
    adapter: Annotated[str, typer.Option(help="One of the model's adapters (see `lmpool adapters list`).")] = "",
    as_json: AsJson = False,
) -> None:
    """Show the most likely next tokens of a prompt, with their log-probabilities."""
    text = read_prompt(prompt, ids)

    async def request() -> tuple[list[int], NDArray[np.float32], Any]:
        async with at.producer() as producer:
            # A prompt of token ids needs no tokenizer, so do not import a heavy tokenizer only to print texts.
            tokenizer = await (published_tokenizer(producer) if ids else find_tokenizer(producer))
            if tokenizer is None or ids:
                tokens = parse_ids(text)
            else:
                tokens = await TOKENIZERS.encode(tokenizer, text, at.timeout)
            return tokens, await producer.logprobs(tokens, adapter=adapter), tokenizer

    tokens, row, tokenizer = run(request())
    order = np.argsort(row, kind="stable")[::-1][:top].tolist()
    table, listed = Table("id", "token", "log-probability", "probability"), []
    for token, value in zip(order, row[order].tolist(), strict=True):
        piece = None if tokenizer is None else tokenizer.decode([token])
        table.add_row(str(token), "" if piece is None else repr(piece), f"{value:.4f}", f"{math.exp(value):.2%}")
        # JSON has no infinity, so a token with probability 0 has the log-probability null.
        listed.append({"id": token, "token": piece, "logprob": value if value > -math.inf else None})
    if as_json:
        say_json({"ids": tokens, "top": listed})
    else:
        Terminal().print(table)


@with_options
async def status(
    at: ServerOptions, workers: tables.MaxWorkers = None, every: tables.AllWorkers = False, as_json: AsJson = False
) -> None:
    """Show models, workers, queue depths and rates."""
    server, most = Server(at.redis), tables.max_listed(workers, every)
    models, (memory, doubts) = await survey(server, at.keys), await check_server(server)
    for warning in (*doubts, *file_notices(models)):
        say(warning, err=True)
    if as_json:
        say_json([{**model, "server_memory": memory and memory._asdict()} for model in tables.limited(models, most)])
        return
    if models:
        Terminal().print(*tables.survey_tables(models, tables.STATUS, tables.DEFAULT_WORKERS if most is None else most))
    else:
        say(f"no model is served under the prefix {at.prefix!r} at {server}")
    if memory:
        say(f"server: {memory}")


@with_options
async def flush(
    at: ServerOptions,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model (default: all models).")] = None,
    version: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_NUMBER, help="Version of the model's weights (default: the one that clients use)."),
    ] = None,
) -> None:
    """Drop the cached rows of one model, or of all models, from Redis. Workers compute them again on request.

    Rows in a worker's shared memory stay until they are replaced or the worker ends.
    """
    dropped, batch = 0, list[bytes]()
    async with at.connected() as (redis, discovery):
        info = None if model is None and version is None else await discovery.info(model)
        if info is not None and version is not None:
            info = await discovery.info(f"{info.base}@{version}")
        pattern = scan_pattern(at.keys, info)
        async for key in redis.scan_iter(match=pattern, count=1000):
            batch.append(key)
            if len(batch) == _UNLINKED_PER_CALL:
                dropped += await redis.unlink(*batch)
                batch.clear()
        dropped += await redis.unlink(*batch) if batch else 0
    say(f"dropped {dropped} rows")


@with_options
async def bench(
    at: PoolOptions,
    prompts: Annotated[int, typer.Option(min=1, help="Number of random prompts.")] = 1000,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 256,
    seed: Annotated[int | None, typer.Option(help="Seed of the prompts (default: random).")] = None,
    is_bulk: Annotated[bool, typer.Option("--bulk", help="Low priority: interactive clients go first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Benchmark a served model: throughput and latency of new rows, of cached rows, and of single requests."""
    server = Server(at.redis)
    before = (await check_server(server))[0]
    if before and (doubt := before.doubt()):
        say(doubt, err=True)
    rates: dict[str, float] = {}
    latencies: dict[str, list[float]] = {}
    async with at.producer(cache_bytes=0, priority="bulk" if is_bulk else "interactive") as producer:
        if length > (limit := producer.model.max_prompt_tokens):
            raise SettingsError(f"length: {length} tokens; this model accepts at most {limit}")
        say(f"requesting {prompts} prompts at once, then the same from the cache, then single prompts", err=True)
        generator = np.random.default_rng(seed)
        drawn = generator.integers(0, producer.model.vocab_size, (prompts + _MAX_ALONE, length)).tolist()
        for kind in ("new", "cached"):
            started = time.perf_counter()
            latencies[kind] = await _latencies(producer, drawn[:prompts], concurrency)
            rates[f"{kind}_per_s"] = prompts / (time.perf_counter() - started)
        alone = latencies["alone"] = list[float]()
        while len(alone) < _MAX_ALONE and sum(alone) < _MAX_ALONE_S:
            alone += await _latencies(producer, [drawn[prompts + len(alone)]], 1)
    after = (await check_server(server))[0]
    # A restarted server counts evicted keys from 0 again, so the difference may be negative.
    evicted = max(0, after.evicted_keys - before.evicted_keys) if before and after else None
    if evicted:
        text = f"the server evicted {evicted} keys during the benchmark ({after}): evicted rows were computed again"
        say(f"{text}; raise maxmemory, or request fewer rows at once (--prompts, --concurrency)", err=True)
    table = Table("", "rows/s", "p50 ms", "p99 ms")
    for kind, title in (("new", "new"), ("cached", "cached"), ("alone", "one new alone")):
        p50, p99 = (np.quantile(latencies[kind], [0.5, 0.99]) * 1000).tolist()
        rates |= {f"{kind}_p50_ms": p50, f"{kind}_p99_ms": p99}
        per_s = f"{rates[f'{kind}_per_s']:.1f}" if kind != "alone" else ""
        table.add_row(title, per_s, f"{p50:.2f}", f"{p99:.2f}")
    if as_json:
        say_json({**rates, "evicted_keys": evicted})
    else:
        Terminal().print(table)


async def _latencies(producer: Producer, prompts: list[list[int]], concurrency: int) -> list[float]:
    """Request prompts; return the seconds that each prompt took."""
    limit = asyncio.Semaphore(concurrency)

    async def latency(prompt: list[int]) -> float:
        async with limit:
            started = time.perf_counter()
            await producer.logprobs(prompt)
            return time.perf_counter() - started

    return await asyncio.gather(*map(latency, prompts))


@adapters_app.command("list")
@with_options
async def list_adapters(at: PoolOptions, as_json: AsJson = False) -> None:
    """Show the adapters that requests may name."""
    async with at.producer() as producer:
        revisions = await producer.adapters()
    if as_json:
        say_json(revisions)
    elif not revisions:
        say("the model has no adapters")
    else:
        rows = [{"adapter": name, "revision": revisions[name]} for name in sorted(revisions)]
        Terminal().print(tables.FittingTable(None, (tables.Column("adapter", 0), tables.Column("revision", 0)), rows))


@adapters_app.command()
@with_options
async def add(
    at: PoolOptions,
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Its folder, or its name on the hub, on the workers' machines.")],
) -> None:
    """Put an adapter in service; it replaces an adapter of the same name."""
    async with at.producer() as producer:
        revision = await producer.add_adapter(name, source)
    say(f"{name} is in service, revision {revision}")


@adapters_app.command()
@with_options
async def remove(at: PoolOptions, name: AdapterName) -> None:
    """Take an adapter out of service."""
    async with at.producer() as producer:
        await producer.remove_adapter(name)
    say(f"{name} is not in service any more")


@weights_app.command("list")
@with_options
async def list_versions(at: PoolOptions, as_json: AsJson = False) -> None:
    """Show the published versions of the weights, and which version clients use."""
    async with at.producer() as producer:
        states, used = await producer.versions(), producer.model.version
    if as_json:
        say_json({"used": used, "versions": {str(number): state for number, state in states.items()}})
        return
    if states:
        rows = [{"version": number, "state": state or "not served yet"} for number, state in states.items()]
        Terminal().print(tables.FittingTable(None, (tables.Column("version", 0), tables.Column("state", 0)), rows))
    say(f"clients use version {used}" + ("" if states else ", and no other version was published"))


@weights_app.command()
@with_options
async def publish(
    at: PoolOptions,
    weights: Annotated[str, typer.Argument(help="Folder or file of safetensors, on the workers' machines too.")],
    version: Annotated[int | None, typer.Option(min=1, max=MAX_NUMBER, help="Number (default: the next).")] = None,
    stored: Annotated[bool, typer.Option("--stored", help="Store the file in the pool, for other machines.")] = False,
    bucket: Annotated[str, typer.Option(help="URL of a folder in a bucket, to which the files are copied.")] = "",
) -> None:
    """Publish a version of the model's weights; workers change to it one after the other."""
    async with at.producer() as producer:
        number = await producer.publish_weights(weights, version, stored=stored, bucket=bucket)
    say(f"version {number} is served")
