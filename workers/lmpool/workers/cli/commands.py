"""The serving side of the command line: `lmpool up`, `worker` and `trie-worker`, with options made from settings."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lmpool.broker.server import URL_VARIABLE, Server
from lmpool.cli import say
from lmpool.errors import SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE
from lmpool.settings import check_choice, check_known, check_number, shown
from lmpool.workers.backends.checkpoint import check_model_path
from lmpool.workers.backends.settings import ModelSettings
from lmpool.workers.cli.doctor import RedisUrl, doctor
from lmpool.workers.cli.supervisor import as_arguments, down, plan_workers, start_detached, supervise
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie import TrieSettings

T = TypeVar("T")

# Name of a setting -> vLLM's name of the same option; lmpool accepts both names.
ALIASES = {
    "name": ("--served-model-name",),
    "max_prompt_tokens": ("--max-model-len",),
    "max_batch": ("--max-num-seqs",),
    "max_batch_tokens": ("--max-num-batched-tokens",),
}
# The settings that `--help` shows; `--help-all` shows all settings.
SHORT = {
    "name", "dtype", "device", "max_prompt_tokens", "max_batch", "kv_cache_bytes", "adapters", "metrics_port",
    "trie_mb",
}  # fmt: skip

_SIZED = ("_bytes", "_tokens", "_size")
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB]|i)?")
_BUILT_IN = ("hf", "vllm", "sglang", "synthetic")
_COMMON = ("backend", "redis", "memory_mb", "workers", "detach", "help_all")


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        if text := context.get_help():  # If rich is installed, typer has printed the help already.
            say(text)
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", help="Show all options.", callback=_show_all, is_eager=True)]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub name or folder of the model; hf: or a GGUF file.")]
BackendName = Annotated[str, typer.Option(help=f"What computes rows: {', '.join(_BUILT_IN)}, or an installed one.")]
MemoryMb = Annotated[int | None, typer.Option(help="Max MiB of the server (default: a quarter of all).", hidden=True)]
Workers = Annotated[str, typer.Option(metavar="N", help="Number of workers, or all: on all GPUs, or one on the CPU.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return when it serves; stop it by `lmpool down`.")]


def register(app: typer.Typer) -> None:
    """Add the commands of the serving side."""
    every: dict[str, type] = {"every worker": WorkerSettings}
    app.command("worker")(_with_settings(worker, every | _backends(), {"model"}))
    app.command("up")(_with_settings(up, every | _backends(), {"model"}))
    app.command("verify")(_with_settings(verify, _backends(), {"model", "verify"}))
    app.command()(doctor)
    app.command()(down)
    not_for_tries = {"with_trie", "row_ttl_s", "adapter_root", "adapter_hub", "adapter_mb"}
    app.command("trie-worker")(_with_settings(trie_worker, every | {"tries": TrieSettings}, not_for_tries))


def worker(
    model: Model, backend: BackendName = "hf", redis: RedisUrl = None, help_all: HelpAll = False, **given: Any
) -> None:
    """Serve MODEL from this process, until Ctrl-C, SIGTERM or SIGHUP."""
    from lmpool.workers.cli.serve import serve  # Import here, because other commands do not need the worker's code.

    settings, chosen = _configure(model, backend, given)
    serve(Server(redis), chosen, settings)


def verify(
    model: Model,
    backend: BackendName = "hf",
    write: Annotated[bool, typer.Option("--write", help="Store the reference next to the checkpoint.")] = False,
    to: Annotated[str | None, typer.Option(metavar="FILE", help="With --write: the file to write instead.")] = None,
    help_all: HelpAll = False,
    **given: Any,
) -> None:
    """Compare the rows of a backend with transformers in float32 on the CPU; exits 1 when they differ too much.

    With --write, store the reference for workers that run with --verify: next to the checkpoint, as
    lmpool_reference.npz.
    """
    from lmpool.workers.cli.verify import print_differences, write_reference

    chosen = _configure(model, backend, given)[1]
    if write:
        write_reference(chosen, to)
    elif not print_differences(chosen):
        raise typer.Exit(1)


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

    Your programs on this machine find the server. If the server runs already, the workers use it; the server stays
    until the last `lmpool up` has ended.
    """
    if os.environ.get(URL_VARIABLE):
        reason = "your programs in this shell would not find the private server that `lmpool up` starts"
        advice = "unset it, or join the server that it names with `lmpool worker`"
        raise SettingsError(f"{URL_VARIABLE}: it is set, so {reason}; {advice}")
    settings, chosen = _configure(model, backend, given)
    ranks: int = getattr(chosen, "ranks", 1)
    local_ranks: int = getattr(chosen, "local_ranks", ranks)
    plan = plan_workers(workers, backend, given.get("device"), local_ranks)
    if len(plan) > 1 and local_ranks < ranks:
        reason = f"{len(plan)} workers with the same nnodes would use the same master_port"
        raise SettingsError(f"workers: {reason}: take --workers 1, or start each with `lmpool worker` and its own port")
    if len(plan) > 1 and given.get("device_map"):
        reason = "it spreads one worker over all devices of the machine"
        raise SettingsError(f"device_map: {reason}, so {len(plan)} workers have none left: leave out --workers")
    ports = f", because {len(plan)} workers take consecutive ports"
    check_number("metrics_port", settings.metrics_port, 0, 65_536 - len(plan), note=ports)
    if detach:
        start_detached([word for word in sys.argv[1:] if word != "--detach"], chosen.served_as)
        return
    arguments = ["worker", model, *as_arguments({"backend": backend, **_given(given)})]
    raise typer.Exit(supervise(arguments, plan, settings, chosen.served_as, memory_mb))


def _configure(model: str, backend: str, given: dict[str, Any]) -> tuple[WorkerSettings, BackendSettings]:
    """Settings of the worker and of its backend, from the given options."""
    kind = _backends()[check_choice("backend", backend, _backends())]
    settings, given = _split(given)
    named = "model" if any(field.name == "model" for field in fields(kind)) else "name"
    chosen: BackendSettings = build(kind, {named: model, **given}, f"the {backend} backend")
    if chosen.served_as == TRIE_SERVICE:
        raise SettingsError(f"name: trie workers serve as {TRIE_SERVICE!r}: give the model another --name")
    if isinstance(chosen, ModelSettings):
        check_model_path(chosen.model, has_gguf=getattr(chosen, "gguf_file", None) is not None)
    return settings, chosen


def _split(options: dict[str, Any]) -> tuple[WorkerSettings, dict[str, Any]]:
    """Split options into the settings that every worker has, and the other given options."""
    given = _given(options)
    common = {name: given.pop(name) for name in WorkerSettings.__slots__ if name in given}
    return WorkerSettings(**common), given


def _given(options: dict[str, Any]) -> dict[str, Any]:
    # Compare with `is`: 0 is a given value, but equals False.
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


@cache
def _backends() -> dict[str, type]:
    """The installed backends: name -> settings class (`BackendSettings`); built-in backends first."""
    kinds = {}
    for point in entry_points(group="lmpool.backends"):
        try:
            kind = point.load()
            if point.name not in _BUILT_IN:
                for field in fields(kind):
                    if field.name in _COMMON:
                        raise SettingsError(f"{field.name}: the command has an option of this name; rename the field")
                app = typer.Typer()
                app.command()(_with_settings(lambda **given: None, {point.name: kind}))
                typer.main.get_command(app)  # This raises an error if typer cannot use the type of a field.
        except Exception as error:  # noqa: BLE001  Any error of another package disables only the package's backend.
            package = f" ({point.dist.name})" if point.dist is not None else ""
            text = f"the backend {point.name!r} of {point.value}{package} is left out: {type(error).__name__}: {error}"
            say(" ".join(text.split()), err=True)
        else:
            kinds[point.name] = kind
    return {name: kinds[name] for name in sorted(kinds, key=lambda name: ((*_BUILT_IN, name).index(name), name))}


def _with_settings(
    command: Callable[..., None], classes: Mapping[str, type], leave_out: Collection[str] = ()
) -> Callable[..., None]:
    """Replace a command's parameter `**given` by one option for each field of settings classes."""
    declared = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in declared if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += option_parameters(classes, leave_out)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option_parameters(classes: Mapping[str, type], leave_out: Collection[str] = ()) -> list[inspect.Parameter]:
    """Make typer parameters for the fields of settings classes; `classes`: label of the class in the help -> class.

    A field that several classes have becomes one option, with the help text of the first class. The parameters are
    keyword-only; their default None means "not given".
    """
    owners: dict[str, dict[str, Field[Any]]] = defaultdict(dict)
    hints: dict[str, Any] = {}
    for label, kind in classes.items():
        hints = get_type_hints(kind) | hints
        for field in fields(kind):
            if field.name not in leave_out:
                owners[field.name][label] = field
    parameters = []
    for name, labelled in owners.items():
        hint, labels_of = hints[name], defaultdict[Any, list[str]](list)
        for label, field in labelled.items():
            # Compare False with `is`: 0 equals False, but the help must show a default of 0.
            if field.default is not False and field.default not in (None, "", MISSING):
                labels_of[field.default].append(label)
        if list(labels_of.values()) == [list(labelled)]:  # All classes have the same default.
            defaults = [str(value) for value in labels_of]
        else:
            defaults = [f"{value} for {', '.join(labels)}" for value, labels in labels_of.items()]
        described = next(filter(None, (field.metadata.get("help") for field in labelled.values())), "")
        is_size = name.endswith(_SIZED) and hint in (int, int | None)
        sizes: dict[str, Any] = {"parser": parse_size, "metavar": "<size>"} if is_size else {}
        option = typer.Option(
            *((f"--{name.replace('_', '-')}", *ALIASES[name]) if name in ALIASES else ()),
            help=f"{described} (default: {'; '.join(defaults)})".strip() if defaults else described,
            show_default=False,
            rich_help_panel=f"Options: {', '.join(labelled)}",
            hidden=name not in SHORT,
            **sizes,
        )
        annotation: Any = Annotated[hint if hint is bool else hint | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return parameters


def build(kind: type[T], given: dict[str, Any], where: str) -> T:
    """Make settings from the given options; refuse an option that is not a setting of this class."""
    check_known(given, [field.name for field in fields(kind)], f"a setting of {where}")  # type: ignore[arg-type]
    return kind(**given)


def parse_size(text: str | int) -> int:
    """A number of bytes or tokens: 4096, 128k, 8g; 8K, 8Ki and 8KiB have units of 1,024."""
    text = str(text).strip()
    # Accept negative numbers here: the class of the settings refuses them.
    if (match := _SIZE.fullmatch(text)) is None:
        raise typer.BadParameter(f"{shown(text)} is no size: write 4096, 128k, 8g, or 8GiB")
    number, unit, suffix = match[1], match[2], match[3] or ""
    base = 1024 if suffix[:1] == "i" or (unit.isupper() and not suffix) else 1000
    value = float(number) * base ** (1 + "kmgt".index(unit.lower()) if unit else 0)
    if value != int(value):
        raise typer.BadParameter(f"{shown(text)} is no whole number")
    return int(value)
