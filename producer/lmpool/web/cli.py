"""`lmpool web`: the service as a command."""

from __future__ import annotations

from typing import Annotated

import typer

from lmpool.cli import say
from lmpool.errors import SettingsError
from lmpool.producer.cli.options import Prefix, RedisUrl, key_names

TOKEN_VARIABLE = "LMPOOL_WEB_TOKEN"

Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any that is free.")]
Changes = Annotated[
    bool, typer.Option("--allow-changes", help="Let pages queue dead letters again and drop them (default: only show).")
]
Hosts = Annotated[
    list[str] | None, typer.Option("--allow-host", help="Name by which browsers call this service, as behind a proxy.")
]
Token = Annotated[
    str | None,
    typer.Option(envvar=TOKEN_VARIABLE, help="What one must know to look (default: a new one each time)."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(web)


def web(
    host: Host = "127.0.0.1",
    port: Port = 8642,
    allow_changes: Changes = False,
    allow_host: Hosts = None,
    token: Token = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
) -> None:
    """Show the pool in a browser, live, and explore what its models expect. Ctrl-C ends it.

    Prints a URL with a token, which whoever has it may look with.
    """
    try:
        from lmpool.web.app import WebSettings, new_token
        from lmpool.web.serve import serve
    except ImportError as error:
        raise SettingsError(f"web: the package {error.name} is not installed: pip install 'lmpool[web]'") from error
    settings = WebSettings(
        redis,
        key_names(prefix).prefix,
        token=token or new_token(),
        hosts=allow_host or (),
        allow_changes=allow_changes,
    )
    serve(settings, host, port, lambda url: say(f"the pool is shown at {url}"))
