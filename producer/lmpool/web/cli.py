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
    typer.Option(envvar=TOKEN_VARIABLE, help="Secret to sign in with (default: a new one, which is printed)."),
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

    Without a token it makes one, and prints it with an address that signs in one browser, once.
    """
    try:
        from lmpool.web.app import WebSettings
        from lmpool.web.serve import serve
    except ImportError as error:
        raise SettingsError(f"web: the package {error.name} is not installed: pip install 'lmpool[web]'") from error
    settings = WebSettings(
        redis,
        key_names(prefix).prefix,
        token=token or "",
        hosts=allow_host or (),
        allow_changes=allow_changes,
    )
    serve(settings, host, port, say)
