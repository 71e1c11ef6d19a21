"""What the commands of the client side have in common: options, and running a coroutine."""

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

# Signals that end a command, and what handles them before a program has chosen something else.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)

_COMPLETION_S = 1.0
_LOOK_S = 10.0


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """The models that a server has, for a shell; nothing where it does not answer at once."""
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
Timeout = Annotated[float, typer.Option(help="Seconds that a request may take.")]
Waits = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Wait for a server and a model that are not there yet, for --timeout seconds, or fail at once. By default "
        "a server that was named, a first model and one that is being loaded are waited for; no server at all, and a "
        "model that is missing beside others, are errors.",
        show_default=False,
    ),
]
Yields = Annotated[
    bool, typer.Option("--bulk", help="Have all this yield to what others ask for: they go first where prompts wait.")
]
AreIds = Annotated[bool, typer.Option("--ids", help="The prompt is token ids.")]

# Of 32 bytes for each token, more than the longest prompt of any model.
_MAX_PROMPT_BYTES = 1 << 26


def key_names(prefix: str) -> Keys:
    """The key names of a deployment.

    Raises:
        SettingsError: the prefix is malformed.
    """
    check_name("prefix", prefix)
    return Keys(prefix)


def when_absent(waits: bool | None) -> WhenAbsent:
    """What the option `--wait` means to a producer; without it `check_served` has refused what is not waited for."""
    return "raise" if waits is False else "wait"


@asynccontextmanager
async def asking(
    model: str | None, redis: str | None, prefix: str, waits: bool | None, **options: Any
) -> AsyncIterator[Producer]:
    """An open producer for a command that asks.

    Args:
        model, redis, prefix: as `Producer`.
        waits: the option `--wait`; None where it was not given.
        options: further ones of `Producer`.

    Raises:
        LMPoolError: as `check_served` and `Producer.open`.
    """
    producer = Producer(model, redis=redis, prefix=prefix, when_absent=when_absent(waits), **options)
    await check_served(model, redis, prefix, waits)
    async with producer:
        yield producer


async def check_served(model: str | None, redis: str | None, prefix: str, waits: bool | None) -> None:
    """Refuse what is most likely a mistake, unless it is to be waited for; whoever asks later waits for all else.

    Raises:
        ServerUnreachable: no server was named, and none of this user's runs.
        UnknownModel: the model is missing, while others are served.
        SettingsError: the server's address is malformed.
    """
    if waits is not None:  # The producer does what was said.
        return
    try:
        client = Server(redis).client(reply_timeout_s=_LOOK_S)
    except ServerUnreachable as error:
        raise ServerUnreachable(f"{error}; or pass --wait to wait for one") from error
    try:
        if model is not None:
            async with asyncio.timeout(_LOOK_S):
                await Discovery(client, Keys(prefix)).info(model)
    except UnknownModel as error:
        if error.has_others and not error.is_loading:
            raise UnknownModel(f"{error}; or pass --wait to wait for it") from error
    except (LMPoolError, RedisError, OSError):
        pass  # Waited for, or told, when something is asked.
    finally:
        await client.aclose()


async def with_server(
    redis: str | None, prefix: str, work: Callable[[Redis, Discovery, Keys], Awaitable[T]], right: str = ""
) -> T:
    """Run `work` with a connection to the server.

    Args:
        redis, prefix: as `Producer`.
        work: gets the connection, and the discovery and key names of the deployment.
        right: added to the error of a user who may not do this.

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
    """What the option `--bulk` means to a producer."""
    return "bulk" if yields else "interactive"


def read_prompt(prompt: str) -> str:
    """A prompt as it was given; for "-" what is on standard input, without its last line break.

    Raises:
        SettingsError: that is no UTF-8, or more than a prompt can be.
    """
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise SettingsError(f"prompt: standard input has more than {_MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"prompt: standard input is no text in UTF-8: {error}") from error


def hint_at_file(prompt: str) -> None:
    """Say that a prompt is taken as text, where it is the name of a file."""
    with suppress(OSError, ValueError):  # A text may be too long for a name, or have characters that none has.
        if Path(prompt).is_file():
            say(f'the prompt is the text {prompt!r}, not what is in this file: pass "$(cat FILE)" for that', err=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, by uvloop where that is installed.

    SIGINT, SIGTERM and SIGHUP cancel it, so that it takes its prompts off the queue; a second SIGINT or SIGTERM ends
    the process at once. A signal that is ignored stays ignored, as SIGHUP is under nohup.

    Raises:
        KeyboardInterrupt: SIGINT has cancelled it.
        typer.Exit: SIGTERM or SIGHUP has; the exit code is 128 and the number of the signal, 143 for SIGTERM.
    """
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    # Python lets the main thread alone handle signals.
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
    """Await something that the first of some signals cancels; `received` has the signals."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def on_signal(number: int, frame: FrameType | None) -> None:
        # A terminal that closes has both the shell and the kernel send SIGHUP.
        if received and number != signal.SIGHUP:
            os._exit(128 + number)
        elif not received:
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # Wake the loop, which may be waiting for its connections.
        received.append(number)

    for number in numbers:
        signal.signal(number, on_signal)
    return await work
