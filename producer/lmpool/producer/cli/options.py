"""What the commands of the client side have in common: options, and running a coroutine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.exceptions import RedisError

from lmpool.broker.readers import read_hashes
from lmpool.broker.server import Server
from lmpool.cli import say
from lmpool.errors import LMPoolError, SettingsError
from lmpool.producer.client.session import Priority, WhenAbsent
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import MAX_INFO_BYTES
from lmpool.settings import check_name

T = TypeVar("T")

_COMPLETION_S = 1.0


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """The models that a server has, for a shell; nothing where it does not answer at once."""
    prefix = context.params.get("prefix") or "lmpool"

    async def names() -> list[bytes]:
        client = Server(context.params.get("redis")).client(reply_timeout_s=_COMPLETION_S)
        try:
            async with asyncio.timeout(_COMPLETION_S):
                (infos,) = await read_hashes(client, [Keys(prefix).models()], most_bytes=MAX_INFO_BYTES)
                return list(infos)
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
    bool,
    typer.Option(
        "--wait/--no-wait",
        help="Wait for a server and a worker that are not there yet, for --timeout seconds, or fail at once.",
    ),
]
Yields = Annotated[
    bool, typer.Option("--bulk", help="Have all this yield to what others ask for: they go first where prompts wait.")
]
AreIds = Annotated[bool, typer.Option("--ids", help="The prompt is token ids.")]

# Of 32 bytes for each token, more than the longest prompt of any model.
_MOST_PROMPT_BYTES = 1 << 26


def key_names(prefix: str) -> Keys:
    """The key names of a deployment.

    Raises:
        SettingsError: the prefix is malformed.
    """
    check_name("prefix", prefix)
    return Keys(prefix)


def when_absent(waits: bool) -> WhenAbsent:
    """What the option `--wait` means to a producer."""
    return "wait" if waits else "raise"


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
    data = sys.stdin.buffer.read(_MOST_PROMPT_BYTES + 1)
    if len(data) > _MOST_PROMPT_BYTES:
        raise SettingsError(f"prompt: standard input has more than {_MOST_PROMPT_BYTES} bytes")
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
    """Run a coroutine to its end, by uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
