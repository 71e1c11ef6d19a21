"""Options of the client commands, and how commands run a coroutine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from lmpool.broker.scripts import read_infos
from lmpool.broker.server import Server
from lmpool.cli import say
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerUnreachable, SettingsError, UnknownModel
from lmpool.producer.client.discovery import Discovery
from lmpool.producer.client.session import Priority, WhenAbsent
from lmpool.producer.producer import Producer
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name

T = TypeVar("T")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command."""
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that a command may replace: those that Python sets."""
_COMPLETION_S = 1.0  # Seconds for completing a name in a shell: longer would block the prompt.
_CHECK_S = 10.0  # Seconds for checking whether the model is served, before a command starts.
_MAX_PROMPT_BYTES = (
    1 << 26
)  # Max bytes of a prompt on standard input: 32 per token for the longest prompt of any model.


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the served models that match, for shell completion; none if the server does not reply at once."""
    prefix = context.params.get("prefix") or "lmpool"

    async def names() -> list[bytes]:
        client = Server(context.params.get("redis")).client(reply_timeout_s=_COMPLETION_S)
        try:
            async with asyncio.timeout(_COMPLETION_S):
                return list(await read_infos(client, Keys(prefix)))
        finally:
            await client.aclose()

    try:
        found = [name.decode("utf-8", "replace") for name in asyncio.run(names())]
    except (LMPoolError, RedisError, OSError):
        return []
    return sorted(name for name in found if name.startswith(incomplete) and name.isprintable())


ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Name of the model (default: the only one served).", autocompletion=complete_model),
]
RedisUrl = Annotated[
    str | None, typer.Option(help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server).")
]
Prefix = Annotated[str, typer.Option(help="Prefix of all Redis keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Timeout = Annotated[float, typer.Option(help="Seconds until a request fails.")]
Waits = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Wait up to --timeout seconds for a missing server or model, or fail at once. The default waits for a "
        "named server, for the first model, and for a model that is loading. It fails if no server is named and "
        "none of yours runs, or if the model is missing while others are served.",
        show_default=False,
    ),
]
Yields = Annotated[bool, typer.Option("--bulk", help="Low priority: prompts of interactive clients go first.")]
AreIds = Annotated[bool, typer.Option("--ids", help="The prompt is token ids.")]


def key_names(prefix: str) -> Keys:
    """Return the key names of a deployment.

    Raises:
        SettingsError: the prefix is malformed.
    """
    check_name("prefix", prefix)
    return Keys(prefix)


def when_absent(waits: bool | None) -> WhenAbsent:
    """Translate `--wait` for a producer; without the option, `check_served` has raised the immediate errors."""
    return "raise" if waits is False else "wait"


@asynccontextmanager
async def asking(
    model: str | None, redis: str | None, prefix: str, waits: bool | None, **options: Any
) -> AsyncIterator[Producer]:
    """Open a producer for a command.

    Args:
        model, redis, prefix: see `Producer`.
        waits: the option `--wait`; None if it was not given.
        options: other arguments of `Producer`.

    Raises:
        LMPoolError: see `check_served` and `Producer.open`.
    """
    producer = Producer(model, redis=redis, prefix=prefix, when_absent=when_absent(waits), **options)
    await check_served(model, redis, prefix, waits)
    async with producer:
        yield producer


async def check_served(model: str | None, redis: str | None, prefix: str, waits: bool | None) -> None:
    """Raise an error for a likely mistake, unless `--wait` or `--no-wait` was given.

    Raises:
        ServerUnreachable: no server is named and no server of this user runs.
        UnknownModel: the model is not served while others are.
        SettingsError: the server's address is malformed.
    """
    if waits is not None:
        return
    try:
        client = Server(redis).client(reply_timeout_s=_CHECK_S)
    except ServerUnreachable as error:
        raise ServerUnreachable(f"{error}; or pass --wait to wait for one") from error
    try:
        if model is not None:
            async with asyncio.timeout(_CHECK_S):
                await Discovery(client, Keys(prefix)).info(model)
    except UnknownModel as error:
        if error.has_others and not error.is_loading:
            raise UnknownModel(f"{error}; or pass --wait to wait for it") from error
    except (LMPoolError, RedisError, OSError):
        pass  # The first request waits for these, or reports them.
    finally:
        await client.aclose()


async def with_server(
    redis: str | None, prefix: str, work: Callable[[Redis, Discovery, Keys], Awaitable[T]], right: str = ""
) -> T:
    """Run `work` with a connection to the server.

    Args:
        redis, prefix: see `Producer`.
        work: called with the connection, the discovery and the key names.
        right: text for the error of a user without the right to do this.

    Raises:
        SettingsError: the prefix is malformed.
        ServerError: the server cannot be used.
    """
    names = key_names(prefix)
    server = Server(redis)
    client = server.client()
    try:
        return await work(client, Discovery(client, names), names)
    except (RedisError, OSError) as error:
        explained = server.explain(error)
        if right and isinstance(error, NoPermissionError):
            raise AuthenticationFailed(f"{explained}: {right}") from error
        raise explained from error
    finally:
        await client.aclose()


def priority(yields: bool) -> Priority:
    """Translate `--bulk` for a producer."""
    return "bulk" if yields else "interactive"


def read_prompt(prompt: str) -> str:
    """Return the prompt argument; for "-", read standard input without its last line break.

    Raises:
        SettingsError: standard input is not UTF-8, or too long.
    """
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise SettingsError(f"prompt: standard input has more than {_MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"prompt: standard input is not UTF-8: {error}") from error


def hint_at_file(prompt: str) -> None:
    """Print a hint if the prompt is the name of a file: it is taken as text."""
    with suppress(OSError, ValueError):  # The text may be too long for a file name, or contain NUL.
        if Path(prompt).is_file():
            say(
                f'the prompt is the text {prompt!r}, not the content of this file: pass "$(cat FILE)" for that',
                err=True,
            )


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, with uvloop if it is installed.

    SIGINT, SIGTERM and SIGHUP cancel it, so that it cancels its prompts in the queue. A second SIGINT or SIGTERM ends
    the process at once. An ignored signal stays ignored, such as SIGHUP under nohup.

    Raises:
        KeyboardInterrupt: SIGINT cancelled it.
        typer.Exit: SIGTERM or SIGHUP cancelled it; the exit code is 128 plus the signal, 143 for SIGTERM.
    """
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    # Only the main thread can handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _ENDING if is_main}
    received: list[int] = []
    handled = [number for number, handler in before.items() if handler in _DEFAULT]
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_cancelled_by(handled, received, work) if handled else work)
    except asyncio.CancelledError:
        if not received:
            raise
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise typer.Exit(128 + received[0]) from None
    finally:
        for number in handled:
            signal.signal(number, before[number])


async def _cancelled_by(numbers: Iterable[int], received: list[int], work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and cancel it at the first of these signals; `received` collects the signals."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def on_signal(number: int, frame: FrameType | None) -> None:
        # When a terminal closes, both the shell and the kernel send SIGHUP.
        if received and number != signal.SIGHUP:
            os._exit(128 + number)
        elif not received:
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # Wake the loop from its wait for sockets.
        received.append(number)

    for number in numbers:
        signal.signal(number, on_signal)
    return await work
