"""The serving side of the command line: `lmpool up` and `lmpool worker`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lmpool.checks import check_choice
from lmpool.embedded import EmbeddedServer
from lmpool.errors import SettingsError
from lmpool.runtime_folder import AlreadyRunning
from lmpool.server import URL_VARIABLE, Server
from lmpool.workers.backend import Backend
from lmpool.workers.backends.hf.settings import HfSettings
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.options import build, option_parameters
from lmpool.workers.serving import serve
from lmpool.workers.settings import WorkerSettings

_BACKENDS: dict[str, type] = {"hf": HfSettings, "synthetic": SyntheticSettings}

Model = Annotated[str, typer.Argument(help="Hub name or folder of the model; for synthetic just a name.")]
BackendName = Annotated[str, typer.Option(help=f"What computes the rows: {', '.join(_BACKENDS)}.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server).")
]
MemoryMb = Annotated[
    int | None, typer.Option(help="Megabytes that the server may hold (default: a quarter of the machine's).")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this side."""
    app.command("worker")(_with_settings(worker))
    app.command("up")(_with_settings(up))


def worker(model: Model, backend: BackendName = "hf", redis: RedisUrl = None, **given: Any) -> None:
    """Serve MODEL from this process, until Ctrl-C or SIGTERM."""
    settings, make_backend = _configure(model, backend, given)
    serve(Server(redis), make_backend, settings)


def up(model: Model, backend: BackendName = "hf", memory_mb: MemoryMb = None, **given: Any) -> None:
    """Start a private server of yours and one worker that serves MODEL, until Ctrl-C.

    Clients of yours on this machine find it by themselves. When your server runs already, this adds a
    worker to it.
    """
    if os.environ.get(URL_VARIABLE):
        raise SettingsError(
            f"{URL_VARIABLE}: it is set, so your programs in this shell would not find the private server that "
            "`lmpool up` starts; unset it, or join the server that it names with `lmpool worker`"
        )
    settings, make_backend = _configure(model, backend, given)
    embedded = EmbeddedServer(None if memory_mb is None else memory_mb * 2**20)
    try:
        embedded.start()
    except AlreadyRunning as running:
        typer.echo(f"your server is running already (process {running.pid}): adding a worker to it", err=True)
        if memory_mb is not None:
            typer.echo("--memory-mb has no effect on a server that runs already", err=True)
        serve(Server(running.url), make_backend, settings)
        return
    try:
        typer.echo(f"your server runs at {embedded.url}", err=True)
        serve(Server(embedded.url), make_backend, settings, before_exit=embedded.stop)
    finally:
        embedded.stop()


def _configure(model: str, backend: str, given: dict[str, Any]) -> tuple[WorkerSettings, Callable[[], Backend]]:
    """Settings of the worker and a maker of its backend, from the options that were given."""
    check_choice("backend", backend, tuple(_BACKENDS))
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    common = {field for field in WorkerSettings.__slots__ if field in given}
    settings = build(WorkerSettings, {name: given.pop(name) for name in common}, "workers")
    if backend == "synthetic":
        given.setdefault("name", model)
        chosen = build(SyntheticSettings, given, "the synthetic backend")
        return settings, lambda: SyntheticBackend(chosen)
    hf_settings = build(HfSettings, {"model": model, **given}, f"the {backend} backend")
    return settings, lambda: _make_hf(hf_settings)


def _make_hf(settings: HfSettings) -> Backend:
    from lmpool.workers.backends.hf.backend import HfBackend  # imports torch and transformers

    return HfBackend(settings)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `**given` by the options of all settings classes."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    classes = {"every worker": WorkerSettings, **{f"{name} backend": kind for name, kind in _BACKENDS.items()}}
    options = option_parameters(classes, leave_out={"model"})
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
    return command
