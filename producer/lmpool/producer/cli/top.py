"""`lmpool top`: a pool as it works, looked at again and again."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from redis.exceptions import RedisError
from rich.console import Group
from rich.live import Live
from rich.text import Text

from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError
from lmpool.printable import printable
from lmpool.producer.cli.options import AsJson, Prefix, RedisUrl, key_names, run
from lmpool.producer.cli.survey import Survey, look, survey
from lmpool.producer.cli.tables import top_models, top_workers
from lmpool.protocol.keys import Keys
from lmpool.terminal import Terminal, say_json

_PATIENCE_S = 5.0

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")]
Once = Annotated[bool, typer.Option("--once", help="Look once and end.")]


def top(
    interval: Interval = 1.0,
    once: Once = False,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Watch models and workers: queues, rates, and seconds from queueing to the row (p50, p99). Ctrl-C ends it.

    Rates and times are those of the interval between the workers' last two heartbeats.
    """
    if as_json and not once:
        raise SettingsError("json: a live view is for people; print one look as JSON with --once --json")
    server, keys = Server(redis), key_names(prefix)
    if not once:
        run(_watch(server, keys, interval))
        return
    found = run(survey(server, keys))
    if as_json:
        say_json(found)
        return
    console = Terminal()
    console.print(_view(found, console.width, ""))


async def _watch(server: Server, keys: Keys, interval: float) -> None:
    """Look until cancelled. A server that is away is waited for, and said to be."""
    console, found, seen_at = Terminal(), None, time.monotonic()
    # A server that hangs must not leave an old view standing for long.
    redis = server.client(reply_timeout_s=max(_PATIENCE_S, interval))
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                trouble = ""
                try:
                    found, seen_at = await look(redis, keys), time.monotonic()
                except (RedisError, OSError, LMPoolError) as error:
                    trouble = str(server.explain(error))
                    if found is not None:
                        trouble += f" (below: {time.monotonic() - seen_at:.0f} s ago)"
                view = _view(found or [], console.width, trouble)
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                await asyncio.sleep(interval)
    finally:
        await redis.aclose()


def _view(found: Survey, width: int, trouble: str) -> Group:
    head = [Text(printable(trouble), style="bold red")] if trouble else []
    if not found:
        return Group(*head) if trouble else Group(Text("no model is served"))
    return Group(*head, top_models(found, width), top_workers(found, width))
