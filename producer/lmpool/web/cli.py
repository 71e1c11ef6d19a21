"""The command `lmpool web`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmpool.errors import SettingsError
from lmpool.producer.cli.options import Host, Port, ServerOptions, with_options

Changes = Annotated[bool, typer.Option("--allow-changes", help="Let pages retry and drop dead letters.")]
Hosts = Annotated[list[str] | None, typer.Option("--allow-host", help="Host name of this service, as behind a proxy.")]
Token = Annotated[str | None, typer.Option(envvar="LMPOOL_WEB_TOKEN", help="Secret to sign in (default: generated).")]


def register(app: typer.Typer) -> None:
    """Add the command `lmpool web`."""
    app.command()(web)


@with_options
def web(
    at: ServerOptions,
    host: Host = "127.0.0.1",
    port: Port = 8642,
    allow_changes: Changes = False,
    allow_host: Hosts = None,
    token: Token = None,
) -> None:
    """Serve a live page of the pool and an explorer of its models. Ctrl-C ends it.

    Without --token, the command generates and prints a token, and an address that signs in one browser, once.
    """
    try:
        from lmpool.web.app import WebSettings, serve
    except ImportError as error:
        raise SettingsError(f"web: the package {error.name} is not installed: pip install 'lmpool[web]'") from error
    serve(WebSettings(at.redis, at.keys.prefix, token or "", allow_host or (), allow_changes), host, port)
