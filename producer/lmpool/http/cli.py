"""The command `lmpool http`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmpool.errors import SettingsError
from lmpool.producer.cli.options import Host, Port, ServerOptions, with_options

Token = Annotated[str, typer.Option(envvar="LMPOOL_HTTP_TOKEN", help="Secret that clients send (default: none).")]
IsOpen = Annotated[bool, typer.Option("--no-token", help="Let other machines send requests without a token.")]
Hosts = Annotated[list[str] | None, typer.Option("--allow-host", help="Host name for clients without a token.")]
Model = Annotated[str, typer.Option(help="Model of requests that name none (default: the only one).")]
MaxInflight = Annotated[int, typer.Option(min=1, help="Max requests in flight; more get status 429.")]
Timeout = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds of a request that states no time.")]
CacheBytes = Annotated[int, typer.Option(min=0, help="Max bytes of each model's rows in the gateway's memory.")]


def register(app: typer.Typer) -> None:
    """Add the command `lmpool http`."""
    app.command()(http)


@with_options
def http(
    at: ServerOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = "",
    no_token: IsOpen = False,
    allow_host: Hosts = None,
    model: Model = "",
    max_inflight: MaxInflight = 512,
    timeout: Timeout = 60.0,
    cache_bytes: CacheBytes = 64 * 1024 * 1024,
) -> None:
    """Serve the pool over HTTP to programs that speak OpenAI's, vLLM's, TRL's or SGLang's protocol. Ctrl-C ends it."""
    try:
        from lmpool.http.app import GatewaySettings, serve
        from lmpool.http.limits import Limits
    except ImportError as error:
        raise SettingsError(f"http: the package {error.name} is not installed: pip install 'lmpool[http]'") from error
    limits = Limits(max_inflight, timeout_s=timeout)
    settings = GatewaySettings(at.redis, at.keys.prefix, token, allow_host or (), model, limits, cache_bytes)
    serve(settings, host, port, is_open=no_token)
