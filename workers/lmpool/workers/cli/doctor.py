"""`lmpool doctor`: what is installed and reachable here, in one table, with what to do where something is missing."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.table import Table

from lmpool.broker.readers import read_alive, read_infos
from lmpool.broker.server import URL_VARIABLE, Server, where, without_advice
from lmpool.broker.server_checks import doubt_of, read_memory, read_version
from lmpool.cli import Terminal, say, say_json
from lmpool.embedded import physical_memory
from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.keys import Keys
from lmpool.rows.segment_memory import FOLDER_VARIABLE, segments_in
from lmpool.rows.segment_memory import folder as shared_folder
from lmpool.settings import check_name, count_cores

State = Literal["ok", "look", "wrong"]

_PATIENCE_S = 10.0
# Rows of V = 128,256 for some seconds of asking; below that most come and go unread.
_MIN_SHARED = 1 << 28
# Of the memory that is made on trial.
_TRIED_VOCABULARY, _TRIED_BYTES = 1024, 1 << 20
# What engines use of it, beside Docker's 64 MiB.
_TENSORS, _MIN_FOR_TENSORS = Path("/dev/shm"), 1 << 29
_ENGINES = ("vllm", "sglang")
_MAX_MODELS = 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pth")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]*)\])?([^;]*)(?:;.*?extra\s*==\s*['\"]([\w-]+)['\"])?")
_CLAUSE = re.compile(r"(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)")
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b,
    "<": lambda a, b: a < b, ">": lambda a, b: a > b,
}  # fmt: skip
# What people ask first which version they have of.
_TOLD = ("torch", "transformers", "tokenizers", "vllm", "sglang", "redis", "numpy")
# What only those need who work on lmpool itself.
_FOR_TESTS = ("dev", "test")
# No package index has lmpool.
_IN_CLONE = "in the clone:"


class Finding(NamedTuple):
    """What was found out about one thing.

    Attributes:
        check: what was looked at.
        state: "wrong" is what the pool or the model cannot work with; "look" what may surprise.
        found: what is there.
        advice: what to do; "" for nothing.
    """

    check: str
    state: State
    found: str
    advice: str = ""


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Folder or GGUF file of a model that is to be served.")
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server).")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Prefix of all Redis keys.")] = "lmpool",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check this machine, the server and a model's folder, and say what to do; exits 1 when something is wrong."""
    check_name("prefix", prefix)
    gpus = _gpus()
    findings = [
        *_installed(),
        *asyncio.run(_server(redis, Keys(prefix))),
        *_machine(),
        _gpu(gpus),
        *([] if model is None else _model(model, gpus)),
    ]
    is_wrong = any(finding.state == "wrong" for finding in findings)
    if as_json:
        say_json({"ok": not is_wrong, "checks": [finding._asdict() for finding in findings]})
    else:
        _show(findings)
    raise typer.Exit(int(is_wrong))


def _show(findings: list[Finding]) -> None:
    """Print a table; what is no terminal gets a line for each, for there a table would be as wide as its cells."""
    terminal = Terminal()
    if not terminal.is_terminal:
        for check, state, found, advice in findings:
            say(f"{check}: {state}: {found}{f' — {advice}' if advice else ''}")
        return
    table = Table("check", "", "found", "what to do")
    for finding in findings:
        table.add_row(finding.check, finding.state, finding.found, finding.advice)
    terminal.print(table)


def _installed() -> Iterator[Finding]:
    yield Finding("lmpool", "ok", f"{version('lmpool')}, Python {platform.python_version()}, {platform.machine()}")
    yield Finding("packages", "ok", ", ".join(f"{name} {at}" for name in _TOLD if (at := _version(name))))
    troubles = {extra: list(_troubles(extra)) for extra in ("", *_extras())}
    if lacks := troubles.pop(""):
        yield Finding("packages", "wrong", "; ".join(lacks), f"{_IN_CLONE} pip install --upgrade .")
    outdated = {extra: text for extra, lacks in troubles.items() for text in lacks if "is needed" in text}
    for extra, text in outdated.items():
        yield Finding(f"extra {extra}", "look", text, f"{_IN_CLONE} pip install --upgrade '.[{extra}]'")
    whole = [extra for extra, lacks in troubles.items() if not lacks]
    missing = [extra for extra in troubles if extra not in whole and extra not in outdated]
    yield Finding(
        "extras", "ok", f"{', '.join(whole) or 'none'}; not installed: {', '.join(missing) or 'none'}",
        f"for what you miss, {_IN_CLONE} pip install '.[EXTRA]'" if missing else "",
    )  # fmt: skip


def _requirements() -> Iterator[tuple[str, str, list[str], str]]:
    """Extra, package, its own extras, and versions."""
    for text in requires("lmpool") or ():
        if match := _REQUIREMENT.match(text):
            yield match[4] or "", match[1], [name for name in (match[2] or "").split(",") if name], match[3]


def _extras() -> list[str]:
    return sorted({extra for extra, *_ in _requirements() if extra and extra not in _FOR_TESTS})


def _troubles(extra: str) -> Iterator[str]:
    """What an extra needs and does not have."""
    for of_extra, package, inner, versions in _requirements():
        if of_extra != extra:
            continue
        if package == "lmpool":
            for name in inner:
                yield from _troubles(name)
        elif not (installed := _version(package)):
            yield f"{package} is missing"
        elif not _suits(installed, versions):
            yield f"{package} {installed} is installed, and {versions.strip()} is needed"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _suits(installed: str, versions: str) -> bool:
    numbers = _numbers(installed)
    return all(_COMPARE[how](numbers, _numbers(bound)) for how, bound in _CLAUSE.findall(versions))


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


async def _server(redis: str | None, keys: Keys) -> list[Finding]:
    source = "--redis" if redis is not None else URL_VARIABLE if os.environ.get(URL_VARIABLE) else "found by itself"
    start = f"start one with `lmpool up MODEL`, or name one: --redis URL, or {URL_VARIABLE}"
    try:
        named = f"{where(redis)} ({source})"
        server = Server(redis)
    except SettingsError as error:
        return [Finding("server", "wrong", str(error), f"mend what {source} says")]
    except LMPoolError as error:
        return [Finding("server", "wrong", without_advice(error), start)]
    client = server.client(reply_timeout_s=_PATIENCE_S)
    try:
        return await _reached(server, client, f"{server} ({source})", keys)
    except (RedisError, OSError, LMPoolError) as error:
        return [Finding("server", "wrong", f"{named}: {server.explain(error)}", f"is it there? Else {start}")]
    finally:
        await client.aclose()


async def _reached(server: Server, client: Redis, named: str, keys: Keys) -> list[Finding]:
    """What is to be said of a server that answers.

    Raises:
        RedisError, OSError, LMPoolError: it does not.
    """
    await client.ping()
    findings = [Finding("server", "ok", named)]
    product, at = await read_version(server)
    doubt = doubt_of(product, at)
    found = f"{product} {at}".strip() or "it does not tell"
    findings.append(Finding("server's version", "look" if doubt else "ok", found, doubt or ""))
    memory = await read_memory(client)
    if memory is None:
        findings.append(Finding("server's memory", "ok", "its users are not told"))
    else:
        doubt = memory.doubt()
        findings.append(Finding("server's memory", "wrong" if doubt else "ok", str(memory), doubt or ""))
    findings.append(await _served(client, keys))
    return findings


async def _served(client: Redis, keys: Keys) -> Finding:
    infos = await read_infos(client, keys)
    names = sorted(name.decode("utf-8", "replace") for name in infos)
    workers = {name: (await read_alive(client, keys.model(name))).serving for name in names[:_MAX_MODELS]}
    if not any(workers.values()):
        what = f"no live worker of {', '.join(workers)}" if workers else f"none under the prefix {keys.prefix!r}"
        return Finding("models", "look", what, "start a worker: `lmpool worker MODEL`, or `lmpool up MODEL`")
    served = (f"{name} ({count} worker{'' if count == 1 else 's'})" for name, count in workers.items())
    more = f" and {len(names) - len(workers)} more" if len(names) > len(workers) else ""
    return Finding("models", "ok", ", ".join(served) + more)


def _machine() -> Iterator[Finding]:
    free = _free_bytes()
    total = f"{_size(physical_memory())} in all, nobody tells how much is free"
    yield Finding("memory", "ok", f"{total if free is None else f'{_size(free)} free'}, {count_cores()} cores")
    yield _shared_memory()
    with suppress(OSError):
        room = shutil.disk_usage(_TENSORS).total
        engines = [name for name in _ENGINES if _version(name)]
        if engines and room < _MIN_FOR_TENSORS:
            yield Finding(
                str(_TENSORS), "look", f"{_size(room)}, where {' and '.join(engines)} may exchange tensors",
                "docker run --shm-size 1g; rows need none of it",
            )  # fmt: skip


def _shared_memory() -> Finding:
    """Whether a worker can hand out rows without the server, tried with a small one, and what it would have for it."""
    from lmpool.rows.segment import make_segment
    from lmpool.rows.segment_memory import default_size

    place = shared_folder()
    there = len(list(segments_in(place)))
    try:
        segment = make_segment("", _TRIED_VOCABULARY, _TRIED_BYTES, lambda: True)
    except OSError as error:
        found = f"{error.strerror or error}; it takes Linux 5.1 or newer, free memory, and the folder {place}"
        advice = f"rows travel through the server instead; {FOLDER_VARIABLE} names another folder"
        return Finding("shared memory", "look", found, advice)
    if segment is not None:
        segment.close()
    size = default_size()
    found = f"{_size(size)} for the next worker, an eighth of what is free; sockets in {place}, {there} of them now"
    if size < _MIN_SHARED:
        return Finding("shared memory", "look", found, "rows are soon replaced there: free memory, or say --shm-bytes")
    return Finding("shared memory", "ok", found)


def _free_bytes() -> int | None:
    """Bytes of memory that are free; None where the system does not tell."""
    from lmpool.rows.segment_memory import free_bytes

    try:
        return free_bytes()
    except OSError:
        return None


def _gpu(gpus: list[tuple[str, int, int]] | None) -> Finding:
    torch = _version("torch")
    if gpus is None:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            return Finding("GPU", "look", "there is one, and nvidia-smi does not tell of it", "look at its driver")
        return Finding("GPU", "ok", "none: models run on the CPU")
    found = "; ".join(f"{name}, {_size(free)} of {_size(total)} free" for name, total, free in gpus)
    if "+cpu" in torch:
        return Finding("GPU", "wrong", f"{found}, and torch {torch} uses none", "pip install torch, the build for CUDA")
    return Finding("GPU", "ok", found)


def _gpus() -> list[tuple[str, int, int]] | None:
    """Name, bytes and free bytes of each GPU; None where there is no driver that tells."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_PATIENCE_S, check=True).stdout
        lines = [line.rsplit(",", 2) for line in told.splitlines() if line.strip()]
        return [(name.strip(), int(total) * 2**20, int(free) * 2**20) for name, total, free in lines] or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _model(model: str, gpus: list[tuple[str, int, int]] | None) -> Iterator[Finding]:
    # Heavy, and no part of what other commands need.
    from lmpool.workers.backends.checkpoint import check_model_folder, local_path

    path = local_path("model", model)
    is_gguf = path.suffix == ".gguf" and path.is_file()
    try:
        if not is_gguf:
            check_model_folder(model)
    except SettingsError as error:
        yield Finding("model", "wrong", str(error).removeprefix("model: "), "name the folder of a model")
        return
    if not path.exists():
        cannot = os.environ.get("HF_HUB_OFFLINE") == "1"
        yield Finding(
            "model", "wrong" if cannot and model.count("/") != 1 else "look", f"{model} is no folder here",
            "it is asked of the hub" if not cannot else "HF_HUB_OFFLINE is set: only copies in its cache are used",
        )  # fmt: skip
        return
    size = path.stat().st_size if is_gguf else _weights(path)
    if not size:
        yield Finding("model", "wrong", f"{model} has no weights", "copy them there: *.safetensors")
        return
    free, what = (max(free for *_, free in gpus), "on a GPU") if gpus else (_free_bytes(), "on this machine")
    room = physical_memory() if free is None else free
    found = f"{_size(size)} of weights; {_size(room)} {'in all' if free is None else 'free'} {what}"
    if size > room:
        yield Finding(
            "model", "wrong", found, "free memory, take --dtype bfloat16, a smaller model, or another machine"
        )
    else:
        yield Finding("model", "ok", found)


def _weights(folder: Path) -> int:
    """Bytes of the weights in a folder, of the first format that it has."""
    for pattern in _WEIGHTS:
        if files := [path for path in folder.glob(pattern) if path.is_file()]:
            return sum(path.stat().st_size for path in files)
    return 0


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
