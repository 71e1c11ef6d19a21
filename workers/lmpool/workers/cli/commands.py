"""The serving side of the command line: `lmpool up`, `worker` and `trie-worker`, options made of settings classes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lmpool.broker.server import URL_VARIABLE, Server
from lmpool.cli import say
from lmpool.errors import SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE
from lmpool.settings import check_choice
from lmpool.workers.backends.checkpoint import check_model_path
from lmpool.workers.backends.settings import ModelSettings
from lmpool.workers.cli.detached import READY_VARIABLE, down
from lmpool.workers.cli.detached import start as start_detached
from lmpool.workers.cli.doctor import doctor
from lmpool.workers.cli.options import ALIASES, SHORT, HelpAll, is_size, parse_size
from lmpool.workers.cli.processes import WorkerProcesses, as_arguments, plan_workers
from lmpool.workers.cli.shared_server import SharedServer
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.backend import TrieSettings

T = TypeVar("T")

_log = logging.getLogger("lmpool.worker")

_BUILT_IN = ("hf", "vllm", "sglang", "synthetic")
_COMMON = ("backend", "redis", "memory_mb", "workers", "detach", "help_all")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hub name or folder of the model, for hf also a GGUF file; for synthetic just a name."
    ),
]
BackendName = Annotated[
    str, typer.Option(help=f"What computes the rows: {', '.join(_BUILT_IN)}, or one of a package of yours.")
]
RedisUrl = Annotated[
    str | None, typer.Option(help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server).")
]
MemoryMb = Annotated[
    int | None,
    typer.Option(help="Megabytes that the server may hold (default: a quarter of the machine's).", hidden=True),
]
Workers = Annotated[
    str, typer.Option(metavar="N", help="How many worker processes, or all: one for each GPU, or one on the CPU.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return when it serves, and go on in the background until `lmpool down`.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this side."""
    app.command("worker")(_with_settings(worker, {"every worker": WorkerSettings, **_backends()}))
    app.command("up")(_with_settings(up, {"every worker": WorkerSettings, **_backends()}))
    app.command()(doctor)
    app.command()(down)
    tries = {"every worker": WorkerSettings, "tries": TrieSettings}
    app.command("trie-worker")(
        _with_settings(
            trie_worker, tries, leave_out={"with_trie", "row_ttl_s", "adapter_root", "adapter_hub", "adapter_mb"}
        )
    )


def worker(
    model: Model, backend: BackendName = "hf", redis: RedisUrl = None, help_all: HelpAll = False, **given: Any
) -> None:
    """Serve MODEL from this process, until Ctrl-C, SIGTERM or SIGHUP."""
    from lmpool.workers.cli.serve import serve  # Heavy, and no part of what other commands need.

    settings, chosen = _configure(model, backend, given)
    serve(Server(redis), chosen, settings)


def trie_worker(redis: RedisUrl = None, help_all: HelpAll = False, **given: Any) -> None:
    """Answer trie jobs, for any vocabulary, from this process, until Ctrl-C, SIGTERM or SIGHUP."""
    from lmpool.workers.cli.serve import serve

    settings, given = _split(given)
    serve(Server(redis), build(TrieSettings, given, "trie workers"), settings)


def up(
    model: Model,
    backend: BackendName = "hf",
    memory_mb: MemoryMb = None,
    workers: Workers = "1",
    detach: Detach = False,
    help_all: HelpAll = False,
    **given: Any,
) -> None:
    """Start a private server of yours and workers that serve MODEL, until Ctrl-C.

    Clients of yours on this machine find it by themselves. When your server runs already, this adds
    workers to it; the server stays until the last of them has ended.
    """
    if os.environ.get(URL_VARIABLE):
        raise SettingsError(
            f"{URL_VARIABLE}: it is set, so your programs in this shell would not find the private server that "
            "`lmpool up` starts; unset it, or join the server that it names with `lmpool worker`"
        )
    settings, chosen = _configure(model, backend, given)
    environments = plan_workers(workers, backend, given.get("device"))
    if detach:
        start_detached([word for word in sys.argv[1:] if word != "--detach"], chosen.served_as)
        return
    from lmpool.workers.cli.serve import exit_without_server, serve, start_log

    shared = SharedServer(None if memory_mb is None else memory_mb * 2**20)
    if shared.join():
        _tell(settings, f"your server runs at {shared.url}")
    else:
        _tell(settings, f"your server runs already at {shared.url}: adding a worker to it")
        if memory_mb is not None:
            _tell(settings, "--memory-mb has no effect on a server that runs already")
    try:
        shared.watch(exit_without_server)
        # In the background a single worker has a parent too, which starts it again when it is killed.
        if len(environments) == 1 and READY_VARIABLE not in os.environ:
            serve(Server(shared.url), chosen, settings, before_exit=shared.leave)
        else:
            start_log(settings.log_format, chosen.served_as)
            options = {"backend": backend, "redis": shared.url, **_given(given)}
            _run_workers(["worker", model], options, environments, settings)
    except BaseException:
        shared.leave()  # Without a word: what went wrong is to be the last one.
        raise
    if shared.leave():
        _log.info("your server goes on for the other `lmpool up` that use it")


def _run_workers(
    command: list[str], options: dict[str, Any], environments: list[dict[str, str]], settings: WorkerSettings
) -> None:
    """Run a process for each worker until they have ended."""

    def arguments(at: int) -> list[str]:
        # Each worker of a machine needs a port of its own.
        port = {"metrics_port": settings.metrics_port + at} if settings.metrics_port else {}
        return [*command, *as_arguments(options | port)]

    async def run() -> int:
        return await WorkerProcesses(arguments, environments, is_text=settings.log_format == "text").run()

    if code := asyncio.run(run()):
        raise typer.Exit(code)


def _tell(settings: WorkerSettings, text: str) -> None:
    """Tell people. Whoever has JSON logged reads the log alone, which has the server's address too."""
    if settings.log_format == "text":
        say(text, err=True)


def _configure(model: str, backend: str, given: dict[str, Any]) -> tuple[WorkerSettings, BackendSettings]:
    """Settings of the worker and of its backend, from the options that were given."""
    check_choice("backend", backend, tuple(_backends()))
    settings, given = _split(given)
    kind = _backends()[backend]
    names = {field.name for field in fields(kind)}
    given = {"model": model, **given} if "model" in names else {"name": model, **given}
    chosen: BackendSettings = build(kind, given, f"the {backend} backend")
    if chosen.served_as == TRIE_SERVICE:
        raise SettingsError(f"name: trie workers serve as {TRIE_SERVICE!r}: give the model another --name")
    if isinstance(chosen, ModelSettings):
        check_model_path(chosen.model, has_gguf=getattr(chosen, "gguf_file", None) is not None)
    return settings, chosen


def _split(options: dict[str, Any]) -> tuple[WorkerSettings, dict[str, Any]]:
    """The settings that every worker has, and the other options that were given."""
    given = _given(options)
    common = {name: given.pop(name) for name in WorkerSettings.__slots__ if name in given}
    return build(WorkerSettings, common, "workers"), given


def _given(options: dict[str, Any]) -> dict[str, Any]:
    # By identity: a zero is a value.
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


@cache
def _backends() -> dict[str, type]:
    """The backends that are installed: name -> settings class (`BackendSettings`); ours come first."""
    kinds = {}
    for point in entry_points(group="lmpool.backends"):
        try:
            kind = point.load()
            if point.name not in _BUILT_IN:
                check_options(point.name, kind, _COMMON)
        except Exception as error:  # noqa: BLE001  others' packages may raise anything; they break their own backend
            package = f" ({point.dist.name})" if point.dist is not None else ""
            text = f"the backend {point.name!r} of {point.value}{package} is left out: {type(error).__name__}: {error}"
            say(" ".join(text.split()), err=True)
        else:
            kinds[point.name] = kind
    order = {name: number for number, name in enumerate(_BUILT_IN)}
    return {name: kinds[name] for name in sorted(kinds, key=lambda name: (order.get(name, len(order)), name))}


def _with_settings(
    command: Callable[..., None], classes: dict[str, type], leave_out: Collection[str] = ()
) -> Callable[..., None]:
    """Replace a command's `**given` by the options of settings classes."""
    signature = inspect.signature(command, eval_str=True)
    declared = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*declared, *option_parameters(classes, leave_out={"model", *leave_out})]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option_parameters(classes: dict[str, type], leave_out: set[str]) -> list[inspect.Parameter]:
    """Parameters of a typer command for the fields of settings classes.

    Args:
        classes: label shown in the help -> settings class. A field that several have becomes one option, which
            the first of them describes that has a description.
        leave_out: fields that are no options.

    Returns:
        keyword-only parameters whose default None means "not given".
    """
    owners: dict[str, list[str]] = {}
    for label, kind in classes.items():
        for field in fields(kind):
            if field.name not in leave_out:
                owners.setdefault(field.name, []).append(label)
    return [_parameter(name, {label: classes[label] for label in labels}) for name, labels in owners.items()]


def _parameter(name: str, owners: dict[str, type]) -> inspect.Parameter:
    """The option for one field of the classes that have it."""
    hint = _hints(next(iter(owners.values())))[name]
    described = (_field(kind, name).metadata.get("help", "") for kind in owners.values())
    aliases = (f"--{name.replace('_', '-')}", *ALIASES[name]) if name in ALIASES else ()
    sizes: dict[str, Any] = {"parser": parse_size, "metavar": "<size>"} if is_size(name, hint) else {}
    option = typer.Option(
        *aliases,
        help=f"{next(filter(None, described), '')}{_defaults_text(name, owners)}".strip(),
        show_default=False,
        rich_help_panel=f"Options: {', '.join(owners)}",
        hidden=name not in SHORT,
        **sizes,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint if hint is bool else hint | None, option],
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    # All hints of a class are evaluated together, and it has dozens of fields.
    return get_type_hints(kind)


def _field(kind: type, name: str) -> Field[Any]:
    return next(field for field in fields(kind) if field.name == name)


def _defaults_text(name: str, owners: dict[str, type]) -> str:
    """The defaults that are worth showing, with their owners where these differ."""
    labels_of: dict[Any, list[str]] = {}
    for label, kind in owners.items():
        default = _field(kind, name).default
        # Not `in (None, "", False)`: 0 equals False, and a zero is worth showing.
        if default is not False and default not in (None, "", MISSING):
            labels_of.setdefault(default, []).append(label)
    if not labels_of:
        return ""
    if len(labels_of) == 1 and len(next(iter(labels_of.values()))) == len(owners):
        return f" (default: {next(iter(labels_of))})"
    texts = [f"{value} for {', '.join(labels)}" for value, labels in labels_of.items()]
    return f" (default: {'; '.join(texts)})"


def check_options(label: str, kind: type, taken: Collection[str]) -> None:
    """See that a settings class can be options of a command.

    Args:
        label: shown in the help.
        kind: the class.
        taken: options that the command has already.

    Raises:
        SettingsError: a field has the name of one of these.
        TypeError, NameError, RuntimeError: it is no dataclass, or a field's type cannot be read or is no type of an
            option.
    """
    options = option_parameters({label: kind}, set())
    for option in options:
        if option.name in taken:
            raise SettingsError(f"{option.name}: the command has an option of this name; call the field otherwise")

    def command(**given: Any) -> None: ...

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app)


def build(kind: type[T], given: dict[str, Any], where: str) -> T:
    """Make settings from the options that were given.

    Raises:
        SettingsError: an option is not a setting of this class, or its value is malformed.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise SettingsError(f"{name}: not a setting of {where}")
    return kind(**given)
