"""Options of the client commands, and how commands run a coroutine."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis

from lmpool.broker.scripts import read_infos
from lmpool.broker.server import Server
from lmpool.cli import say
from lmpool.errors import LMPoolError, ServerUnreachable, SettingsError, UnknownModel
from lmpool.producer.client.discovery import Discovery
from lmpool.producer.client.session import WhenAbsent
from lmpool.producer.producer import Producer
from lmpool.protocol.keys import Keys
from lmpool.protocol.version import split_name
from lmpool.settings import check_name

T = TypeVar("T")

_COMPLETION_S = 1.0  # Max seconds to complete a model name in a shell, which waits for the result.
_CHECK_S = 10.0  # Max seconds to check whether the model is served, before a command starts.
_MAX_PROMPT_BYTES = 1 << 26  # Max bytes of a prompt on standard input: 32 bytes per token of the longest prompt.


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a model name for a shell: served models that begin with `incomplete`; [] without a reply in time."""
    keys = Keys(context.params.get("prefix") or "lmpool")

    async def names() -> list[bytes]:
        server = Server(context.params.get("redis"))
        async with server.connected(reply_timeout_s=_COMPLETION_S) as redis, asyncio.timeout(_COMPLETION_S):
            return list(await read_infos(redis, keys))

    try:
        found = [name.decode("utf-8", "replace") for name in asyncio.run(names())]
    except (LMPoolError, OSError):
        return []
    found += [split_name(name)[0] for name in found]
    return sorted(name for name in set(found) if name.startswith(incomplete) and name.isprintable())


TEXT = typer.Argument(help="The prompt: text, or token ids such as 1,2,3 with --ids; - reads standard input.")
_MODEL = typer.Option("--model", help="Name of the model (default: the only one).", autocompletion=complete_model)
ModelName = Annotated[str | None, _MODEL]
RedisUrl = Annotated[str | None, typer.Option(help="Server's URL (default: LMPOOL_REDIS_URL, then your own server).")]
Prefix = Annotated[str, typer.Option(help="Prefix of all Redis keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Waits = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Wait up to --timeout seconds for a missing server or model, or fail at once. The default waits, unless "
        "no server is named and none of yours runs, or the model is missing while others are served.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
AreIds = Annotated[bool, typer.Option("--ids", help="The prompt is token ids.")]


@dataclass(frozen=True)
class ServerOptions:
    """The options of a command that reads a pool: its server and the prefix of its keys."""

    redis: RedisUrl = None
    prefix: Prefix = "lmpool"

    @property
    def keys(self) -> Keys:
        """The key names of the pool; raises `SettingsError` if the prefix is malformed."""
        check_name("prefix", self.prefix)
        return Keys(self.prefix)

    @asynccontextmanager
    async def connected(self, model: str | None = None) -> AsyncIterator[tuple[Redis, Discovery]]:
        """Check the name of a model and connect to the server; raise errors of redis-py as lmpool's errors."""
        if model is not None:
            check_name("model", model)
        async with Server(self.redis).connected() as client:
            yield client, Discovery(client, self.keys)


@dataclass(frozen=True)
class PoolOptions(ServerOptions):
    """The options of a command that sends requests to a model."""

    model: ModelName = None
    timeout: Annotated[float, typer.Option(help="Seconds until a request fails.")] = 60.0
    waits: Waits = None

    @asynccontextmanager
    async def producer(self, **options: Any) -> AsyncIterator[Producer]:
        """Open a producer for a command; `options` are other arguments of `Producer`."""
        options |= {"redis": self.redis, "prefix": self.prefix, "timeout": self.timeout}
        producer = Producer(self.model, when_absent=when_absent(self.waits), **options)
        await check_served(self.model, self.redis, self.prefix, self.waits)
        async with producer:
            yield producer


def with_options(command: Callable[..., Any]) -> Callable[..., None]:
    """Turn the fields of a command's first parameter, a `ServerOptions`, into options of the command.

    The command may be a coroutine function. A coroutine must not read standard input: Ctrl-C cannot interrupt the read.
    """
    options, *own = inspect.signature(command, eval_str=True).parameters.values()
    fields = inspect.signature(options.annotation, eval_str=True).parameters.values()

    def expanded(**given: Any) -> None:
        result = command(options.annotation(**{field.name: given.pop(field.name) for field in fields}), **given)
        if inspect.iscoroutine(result):
            run(result)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *fields)]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__name__, expanded.__doc__, expanded.__annotations__ = command.__name__, command.__doc__, {}
    return expanded


def when_absent(waits: bool | None) -> WhenAbsent:
    """Translate `--wait` to `when_absent`. Without `--wait`, `check_served` has already reported likely mistakes."""
    return "raise" if waits is False else "wait"


async def check_served(model: str | None, redis: str | None, prefix: str, waits: bool | None) -> None:
    """Raise an error for a likely mistake, unless `--wait` or `--no-wait` was given.

    Raises:
        ServerUnreachable: no server is named and no server of this user runs.
        UnknownModel: the model is not served, but other models are.
    """
    if waits is not None:
        return
    try:
        server = Server(redis)
    except ServerUnreachable as error:
        raise ServerUnreachable(f"{error}; or pass --wait to wait for one") from error
    try:
        if model is not None:
            async with server.connected(reply_timeout_s=_CHECK_S) as client, asyncio.timeout(_CHECK_S):
                await Discovery(client, Keys(prefix)).info(model)
    except UnknownModel as error:
        if error.has_others and not error.is_loading:
            raise UnknownModel(f"{error}; or pass --wait to wait for it") from error
    except LMPoolError:
        pass  # Ignore the error here: the producer's first request waits, or raises the error again.


def read_prompt(prompt: str, are_ids: bool) -> str:
    """Return the prompt argument; for "-", read standard input without its last line break.

    Print a hint if the argument is the name of a file.
    """
    if prompt != "-":
        with suppress(OSError, ValueError):  # The prompt may be too long for a file name, or contain NUL.
            if not are_ids and Path(prompt).is_file():
                advice = 'pass "$(cat FILE)" for that'
                say(f"the prompt is the text {prompt!r}, not the content of this file: {advice}", err=True)
        return prompt
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise SettingsError(f"prompt: standard input has more than {_MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"prompt: standard input is not UTF-8: {error}") from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, with uvloop if it is installed.

    SIGINT, SIGTERM and SIGHUP cancel the coroutine, which cancels its queued prompts. A second SIGINT or SIGTERM ends
    the process at once. An ignored signal stays ignored, such as SIGHUP under nohup.

    Raises:
        KeyboardInterrupt: SIGINT cancelled the coroutine.
        typer.Exit: SIGTERM or SIGHUP cancelled the coroutine; the exit code is 128 plus the signal, 143 for SIGTERM.
    """
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    # Only the main thread can handle signals. Replace only Python's default handlers.
    is_main = threading.current_thread() is threading.main_thread()
    replaced = (signal.SIG_DFL, signal.default_int_handler) if is_main else ()
    handled = [each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) in replaced]
    received: list[int] = []

    async def cancelled_by_signals() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_signal(number: int) -> None:
            # Ignore a second SIGHUP: when a terminal closes, both the shell and the kernel send SIGHUP.
            if received and number != signal.SIGHUP:
                os._exit(128 + number)
            elif not received:
                task.cancel()
            received.append(number)

        for number in handled:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await work
        finally:  # uvloop leaves its signal handlers, and the program that ran the command would then ignore Ctrl-C.
            for number in handled:
                loop.remove_signal_handler(number)

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(cancelled_by_signals())
    except asyncio.CancelledError:
        if not received:
            raise
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise typer.Exit(128 + received[0]) from None
