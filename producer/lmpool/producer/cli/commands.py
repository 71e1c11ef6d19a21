"""The commands `logprobs`, `status`, `flush`, `bench` and `adapters`; `register` adds all client commands."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from redis.exceptions import RedisError
from rich.table import Table

from lmpool.admin.survey import Survey, file_notices, survey
from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory, read_doubt, read_memory
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import SettingsError
from lmpool.producer.cli.options import (
    AreIds,
    AsJson,
    ModelName,
    Prefix,
    RedisUrl,
    Timeout,
    Waits,
    Yields,
    asking,
    hint_at_file,
    key_names,
    priority,
    read_prompt,
    run,
)
from lmpool.producer.cli.queues import dead_app, queue_app
from lmpool.producer.cli.status import Column, fitting, status_models, status_workers, top
from lmpool.producer.cli.trie_show import trie_app
from lmpool.producer.client.discovery import Discovery
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import TOKENIZERS, find_tokenizer, parse_ids, published_tokenizer
from lmpool.protocol.keys import Keys
from lmpool.rows.cache import scan_pattern

adapters_app = typer.Typer(
    name="adapters", help="LoRA adapters of a served model: list, add, remove.", no_args_is_help=True
)

AdapterName = Annotated[str, typer.Argument(help="What requests call the adapter.")]
FlushedModel = Annotated[str | None, typer.Option("--model", help="Name of the model (default: all models).")]

_UNLINKED_PER_CALL = 500  # Rows per UNLINK, so that other clients of the server wait little.
_MAX_ALONE = 50  # Prompts that `bench` requests one at a time.
_MAX_ALONE_S = 5.0  # Seconds that these may take in all: a slow model gets fewer.


def register(app: typer.Typer) -> None:
    """Add the client commands."""
    for command in (logprobs, status, top, flush, bench):
        app.command()(command)
    app.add_typer(trie_app)
    app.add_typer(adapters_app)
    app.add_typer(dead_app)
    app.add_typer(queue_app)


def logprobs(
    text: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="The prompt: text, or token ids such as 1,2,3 with --ids; - reads standard input."
        ),
    ],
    ids: AreIds = False,
    top: Annotated[int, typer.Option(min=1, help="Number of tokens to show.")] = 10,
    adapter: Annotated[str, typer.Option(help="One of the model's adapters (see `lmpool adapters list`).")] = "",
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
    as_json: AsJson = False,
) -> None:
    """Show the most likely next tokens of a prompt, with their log-probabilities."""
    text = read_prompt(text)
    if not ids:
        hint_at_file(text)

    async def ask() -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]], Any]:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            # A prompt of ids needs no tokenizer, so do not import a heavy one to print texts.
            tokenizer = await (published_tokenizer(producer) if ids else find_tokenizer(producer))
            if tokenizer is None or ids:
                tokens = parse_ids(text)
            else:
                tokens = await TOKENIZERS.encode(tokenizer, text, timeout)
            return tokens, await producer.logprobs(tokens, adapter=adapter), tokenizer

    tokens, row, tokenizer = run(ask())
    order = np.argsort(row, kind="stable")[::-1][:top]
    most_likely: list[dict[str, Any]] = [
        {
            "id": int(token),
            "token": None if tokenizer is None else tokenizer.decode([int(token)]),
            # JSON has no infinity: a token with probability 0 has null.
            "logprob": float(row[token]) if np.isfinite(row[token]) else None,
        }
        for token in order
    ]
    if as_json:
        say_json({"ids": tokens, "top": most_likely})
        return
    table = Table("id", "token", "log-probability", "probability")
    for item in most_likely:
        token = "" if item["token"] is None else repr(item["token"])
        logprob = row[item["id"]]
        table.add_row(str(item["id"]), token, f"{logprob:.4f}", f"{np.exp(logprob):.2%}")
    Terminal().print(table)


def status(redis: RedisUrl = None, prefix: Prefix = "lmpool", as_json: AsJson = False) -> None:
    """Show models, workers, queue depths and rates."""
    server, keys = Server(redis), key_names(prefix)

    async def work() -> tuple[Survey, str | None, ServerMemory | None]:
        return await survey(server, keys), await read_doubt(server), await _memory(server)

    models, doubt, memory = run(work())
    for warning in (doubt, memory and memory.doubt(), *file_notices(models)):
        if warning:
            say(warning, err=True)
    if as_json:
        say_json([{**model, "server_memory": memory and memory._asdict()} for model in models])
        return
    if models:
        console = Terminal()
        console.print(status_models(models, console.width))
        console.print(status_workers(models, console.width))
    else:
        say(f"no model is served under the prefix {prefix!r} at {server}")
    if memory:
        say(f"server: {memory}")


async def _memory(server: Server) -> ServerMemory | None:
    """Return the server's memory, or None if this user may not read it."""
    redis = server.client()
    try:
        return await read_memory(redis)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()


def flush(model: FlushedModel = None, redis: RedisUrl = None, prefix: Prefix = "lmpool") -> None:
    """Drop the cached rows of one model, or of all models, from Redis. Workers compute them again on request.

    Rows in a worker's shared memory stay until they are replaced or the worker ends.
    """
    say(f"dropped {run(_flush(Server(redis), key_names(prefix), model))} rows")


async def _flush(server: Server, keys: Keys, model: str | None) -> int:
    redis = server.client()
    try:
        pattern = scan_pattern(keys, None if model is None else await Discovery(redis, keys).info(model))
        dropped = 0
        batch: list[bytes] = []
        async for key in redis.scan_iter(match=pattern, count=1000):
            batch.append(key)
            if len(batch) == _UNLINKED_PER_CALL:
                dropped += await redis.unlink(*batch)
                batch.clear()
        return dropped + (await redis.unlink(*batch) if batch else 0)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()


def bench(
    prompts: Annotated[int, typer.Option(min=1, help="Number of random prompts.")] = 1000,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 256,
    seed: Annotated[int | None, typer.Option(help="Seed of the prompts (default: random).")] = None,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
    yields: Yields = False,
    as_json: AsJson = False,
) -> None:
    """Benchmark a served model: throughput and latency of new rows, of cached rows, and of single requests."""

    server = Server(redis)

    async def ask() -> tuple[Measurement, int | None]:
        before = await _memory(server)
        if before and (doubt := before.doubt()):
            say(doubt, err=True)
        options = {"timeout": timeout, "cache_bytes": 0, "priority": priority(yields)}
        async with asking(model, redis, prefix, waits, **options) as producer:
            if length > producer.model.max_prompt_tokens:
                limit = producer.model.max_prompt_tokens
                raise SettingsError(f"length: {length} tokens; this model accepts at most {limit}")
            say(f"requesting {prompts} prompts at once, then the same from the cache, then single prompts", err=True)
            measurement = await measure(producer, prompts, length, concurrency, seed)
        after = await _memory(server)
        # A restarted server counts from 0.
        evicted = max(0, after.evicted_keys - before.evicted_keys) if before and after else None
        if evicted:
            text = f"the server evicted {evicted} keys during the benchmark ({after}): evicted rows were computed again"
            say(f"{text}; raise maxmemory, or request fewer rows at once (--prompts, --concurrency)", err=True)
        return measurement, evicted

    rates, evicted = run(ask())
    if as_json:
        say_json({**rates._asdict(), "evicted_keys": evicted})
        return
    table = Table("", "rows/s", "p50 ms", "p99 ms")
    table.add_row("new", f"{rates.new_per_s:.1f}", f"{rates.new_p50_ms:.2f}", f"{rates.new_p99_ms:.2f}")
    table.add_row("cached", f"{rates.cached_per_s:.1f}", f"{rates.cached_p50_ms:.2f}", f"{rates.cached_p99_ms:.2f}")
    table.add_row("one new alone", "", f"{rates.alone_p50_ms:.2f}", f"{rates.alone_p99_ms:.2f}")
    Terminal().print(table)


class Measurement(NamedTuple):
    """Rows per second, and the median and 99th percentile of the latency in milliseconds.

    Attributes:
        new_per_s, new_p50_ms, new_p99_ms: of new prompts, all at once.
        cached_per_s, cached_p50_ms, cached_p99_ms: of the same prompts from the pool's cache.
        alone_p50_ms, alone_p99_ms: of new prompts, one at a time.
    """

    new_per_s: float
    new_p50_ms: float
    new_p99_ms: float
    cached_per_s: float
    cached_p50_ms: float
    cached_p99_ms: float
    alone_p50_ms: float
    alone_p99_ms: float


async def measure(producer: Producer, prompts: int, length: int, concurrency: int, seed: int | None) -> Measurement:
    """Request random prompts: all at once, then the same from the cache, then new ones one at a time."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, producer.model.vocab_size, (prompts + _MAX_ALONE, length)).tolist()
    at_once, alone = drawn[:prompts], drawn[prompts:]
    new = await _ask_all(producer, at_once, concurrency)
    cached = await _ask_all(producer, at_once, concurrency)
    single: list[float] = []
    while alone and sum(single) < 1000 * _MAX_ALONE_S:
        _, p50, _ = await _ask_all(producer, [alone.pop()], 1)
        single.append(p50)
    p50, p99 = np.quantile(single, [0.5, 0.99])
    return Measurement(*new, *cached, float(p50), float(p99))


async def _ask_all(producer: Producer, prompts: list[list[int]], concurrency: int) -> tuple[float, float, float]:
    """Return prompts per second, and the median and 99th percentile of the latency in milliseconds."""
    limit = asyncio.Semaphore(concurrency)
    seconds: list[float] = []

    async def ask(prompt: list[int]) -> None:
        async with limit:
            started = time.perf_counter()
            await producer.logprobs(prompt)
            seconds.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*map(ask, prompts))
    wall = time.perf_counter() - started
    p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1000
    return len(prompts) / wall, float(p50), float(p99)


@adapters_app.command("list")
def list_adapters(
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
    as_json: AsJson = False,
) -> None:
    """Show the adapters that requests may name."""

    async def ask() -> dict[str, str]:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            return await producer.adapters()

    revisions = run(ask())
    if as_json:
        say_json(revisions)
        return
    if not revisions:
        say("the model has no adapters")
        return
    console = Terminal()
    names = sorted(revisions)
    columns = [Column("adapter", names, 0), Column("revision", [revisions[name] for name in names], 0)]
    console.print(fitting(None, columns, console.width))


@adapters_app.command()
def add(
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Its folder, or its name on the hub, on the workers' machines.")],
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
) -> None:
    """Put an adapter in service, or another one instead of the adapter that has this name."""

    async def change() -> str:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            return await producer.add_adapter(name, source)

    say(f"{name} is in service, revision {run(change())}")


@adapters_app.command()
def remove(
    name: AdapterName,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
) -> None:
    """Take an adapter out of service."""

    async def change() -> None:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            await producer.remove_adapter(name)

    run(change())
    say(f"{name} is not in service any more")
