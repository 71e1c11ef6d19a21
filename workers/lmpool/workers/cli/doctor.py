"""`lmpool doctor`: checks what is installed and reachable, and prints one table with advice."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from packaging.requirements import Requirement
from redis.exceptions import RedisError
from rich.table import Table

from lmpool.broker.scripts import read_alive_in, read_infos
from lmpool.broker.server import URL_VARIABLE, Server, where, without_advice
from lmpool.broker.server_checks import doubt_of, read_memory, read_version
from lmpool.cli import Terminal, say, say_json
from lmpool.embedded import physical_memory
from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import partitions_in
from lmpool.rows import segment, shared_memory
from lmpool.settings import check_name, count_cores
from lmpool.workers.cli.supervisor import named_gpus, query_gpus

_TIMEOUT_S = 10.0  # Max seconds for a reply of the server, which may be slow when it is first used.
_MIN_SHARED_BYTES = 1 << 28  # Min bytes of shared memory: with less, most rows are replaced before clients read them.
_TRIED_VOCABULARY, _TRIED_BYTES = 1024, 1 << 20  # Vocabulary size and bytes of a shared-memory segment made as a test.
_TENSORS, _MIN_TENSOR_BYTES = Path("/dev/shm"), 1 << 30  # Two ranks of vLLM use 664 MiB; Docker gives only 64 MiB.
_ENGINES = ("vllm", "sglang")
_MAX_MODELS = 20  # Max models in the list, about one line of a terminal.
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth")
_HEADROOM = 1.2  # Min memory of GPUs, as a multiple of a model's weights: the rest is for keys, values and activations.
_TOO_LARGE = "free memory, take --dtype bfloat16, a smaller model, or another machine"
_LISTED = ("torch", "transformers", "tokenizers", "vllm", "sglang", "redis", "numpy")  # Packages listed with version.
_FOR_DEVELOPERS = ("dev", "test")  # Extras that only developers of lmpool need.
_IN_CLONE = "in the clone:"  # Beginning of advice to install lmpool, which no package index has.

RedisUrl = Annotated[
    str | None, typer.Option(help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server).")
]


class Finding(NamedTuple):
    """The result of one check."""

    check: str  # Name of the check.
    state: Literal["ok", "look", "wrong"]  # "wrong": pool or model cannot work; "look": the user should check.
    found: str
    advice: str = ""  # What the user should do.


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model's folder, GGUF file or name on the hub.")
    ] = None,
    redis: RedisUrl = None,
    prefix: Annotated[str, typer.Option(help="Prefix of all Redis keys.")] = "lmpool",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check this machine, the server and a model, and print advice; exits 1 when something is wrong."""
    check_name("prefix", prefix)
    gpus = list(_visible_gpus())
    findings = [*_installed(), *asyncio.run(_server(redis, Keys(prefix))), *_machine(), _gpu(gpus)]
    if model is not None:
        findings.append(_model(model, gpus))
    is_wrong = any(finding.state == "wrong" for finding in findings)
    terminal = Terminal()
    if as_json:
        say_json({"ok": not is_wrong, "checks": [finding._asdict() for finding in findings]})
    elif terminal.is_terminal:
        table = Table("check", "", "found", "what to do")
        for finding in findings:
            table.add_row(*finding)
        terminal.print(table)
    else:  # Print no table: in a file, a table would be as wide as its longest cell.
        for check, state, found, advice in findings:
            say(f"{check}: {state}: {found}{f' — {advice}' if advice else ''}")
    raise typer.Exit(int(is_wrong))


def _installed() -> Iterator[Finding]:
    yield Finding("lmpool", "ok", f"{version('lmpool')}, Python {platform.python_version()}, {platform.machine()}")
    yield Finding("packages", "ok", ", ".join(f"{name} {at}" for name in _LISTED if (at := _version(name))))
    if lacks := list(_troubles("")):
        yield Finding("packages", "wrong", "; ".join(lacks), f"{_IN_CLONE} pip install --upgrade .")
    whole, missing = list[str](), list[str]()
    for extra in sorted(set(metadata("lmpool").get_all("Provides-Extra") or ()) - set(_FOR_DEVELOPERS)):
        lacks = list(_troubles(extra))
        if outdated := [text for text in lacks if "is needed" in text]:
            yield Finding(f"extra {extra}", "look", outdated[0], f"{_IN_CLONE} pip install --upgrade '.[{extra}]'")
        else:
            (missing if lacks else whole).append(extra)
    advice = f"for a missing one, {_IN_CLONE} pip install '.[EXTRA]'" if missing else ""
    found = f"{', '.join(whole) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield Finding("extras", "ok", found, advice)


def _troubles(extra: str) -> Iterator[str]:
    """The packages of an extra that are missing or of a wrong version; "" stands for lmpool without extras."""
    for requirement in map(Requirement, requires("lmpool") or ()):
        marker = requirement.marker
        needed_by_all = marker is None or marker.evaluate({"extra": ""})
        if needed_by_all != (not extra) or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        if requirement.name == "lmpool":
            for name in requirement.extras:
                yield from _troubles(name)
        elif not (installed := _version(requirement.name)):
            yield f"{requirement.name} is missing"
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} {installed} is installed, and {requirement.specifier} is needed"


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


async def _server(redis: str | None, keys: Keys) -> list[Finding]:
    source = "--redis" if redis is not None else URL_VARIABLE if os.environ.get(URL_VARIABLE) else "found by default"
    start = f"start one with `lmpool up MODEL`, or name one: --redis URL, or {URL_VARIABLE}"
    try:
        named = f"{where(redis)} ({source})"
        server = Server(redis)
    except SettingsError as error:
        return [Finding("server", "wrong", str(error), f"correct {source}")]
    except LMPoolError as error:
        return [Finding("server", "wrong", without_advice(error), start)]
    try:
        async with server.client(reply_timeout_s=_TIMEOUT_S) as client:
            await client.ping()
            product, at = await read_version(server)
            doubt, memory = doubt_of(product, at) or "", await read_memory(client)
            infos = {name.decode("utf-8", "replace"): info for name, info in (await read_infos(client, keys)).items()}
            names, workers = sorted(infos), dict[str, int]()
            for name in names[:_MAX_MODELS]:
                partitions = [keys.model(name, number) for number in partitions_in(infos[name])]
                workers[name] = (await read_alive_in(client, partitions)).serving
    except (RedisError, OSError, LMPoolError) as error:
        return [Finding("server", "wrong", f"{named}: {server.explain(error)}", f"does it run? Otherwise {start}")]
    full = (memory.doubt() if memory else None) or ""
    if any(workers.values()):
        served = ", ".join(f"{name} ({count} worker{'s' * (count != 1)})" for name, count in workers.items())
        advice, served = "", served + (f" and {more} more" if (more := len(names) - len(workers)) else "")
    else:
        served = f"no live worker of {', '.join(workers)}" if workers else f"none under the prefix {keys.prefix!r}"
        advice = "start a worker: `lmpool worker MODEL`, or `lmpool up MODEL`"
    return [
        Finding("server", "ok", f"{server} ({source})"),
        Finding("server's version", "look" if doubt else "ok", f"{product} {at}".strip() or "hidden", doubt),
        Finding("server's memory", "wrong" if full else "ok", str(memory or "hidden from its users"), full),
        Finding("models", "look" if advice else "ok", served, advice),
    ]


def _machine() -> Iterator[Finding]:
    free, total = _free_bytes(), _size(physical_memory())
    memory = f"{total} in all, free memory unknown" if free is None else f"{_size(free)} free"
    yield Finding("memory", "ok", f"{memory}, {count_cores()} cores")
    yield _shared_memory()
    with suppress(OSError):
        size, engines = shutil.disk_usage(_TENSORS).total, [name for name in _ENGINES if _version(name)]
        if engines and size < _MIN_TENSOR_BYTES:
            found = f"{_size(size)}, where {' and '.join(engines)} may exchange tensors"
            yield Finding(str(_TENSORS), "look", found, "docker run --shm-size 2g; rows need none of it")


def _shared_memory() -> Finding:
    """Whether a worker can share rows with programs on this machine; a small segment is made as a test."""
    place = shared_memory.folder()
    try:
        if made := segment.make_segment("", _TRIED_VOCABULARY, _TRIED_BYTES, lambda: True):
            made.close()
    except OSError as error:
        found = f"{error.strerror or error}; it takes Linux 5.1 or newer, free memory, and the folder {place}"
        advice = f"rows travel through the server instead; {shared_memory.FOLDER_VARIABLE} names another folder"
        return Finding("shared memory", "look", found, advice)
    size, count = segment.default_size(), len(list(shared_memory.segments_in(place)))
    found = f"{_size(size)} for the next worker, an eighth of the free memory; sockets in {place}, now {count}"
    advice = "rows are soon replaced there: free memory, or set --shm-bytes" if size < _MIN_SHARED_BYTES else ""
    return Finding("shared memory", "look" if advice else "ok", found, advice)


def _free_bytes() -> int | None:
    """Bytes of free memory; None if the system does not report it."""
    with suppress(OSError):
        return segment.free_bytes()
    return None


def _visible_gpus() -> Iterator[tuple[str, int, int]]:
    """Name, bytes of memory and free bytes of each GPU that a worker would use."""
    named = named_gpus()
    for name, index, uuid, total, free in query_gpus("name", "index", "uuid", "memory.total", "memory.free"):
        # nvidia-smi does not report which GPU a MIG instance is a part of.
        is_visible = named is None or any(gpu == index or uuid.startswith(gpu) or gpu[:3] == "MIG" for gpu in named)
        if is_visible and (total + free).isdecimal():
            yield name, int(total) << 20, int(free) << 20  # nvidia-smi reports MiB.


def _gpu(gpus: list[tuple[str, int, int]]) -> Finding:
    if not gpus and named_gpus() is None and any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "look", "nvidia-smi does not list the GPU of this machine", "check its driver")
    listed = (f"{name}, {_size(free)} of {_size(total)} free" for name, total, free in gpus)
    found = "; ".join(listed) or "none: models run on the CPU"
    if gpus and "+cpu" in (torch := _version("torch")):
        return Finding("GPU", "wrong", f"{found}, and torch {torch} uses none", "pip install torch, the build for CUDA")
    return Finding("GPU", "ok", found)


def _model(model: str, gpus: list[tuple[str, int, int]]) -> Finding:
    from lmpool.workers.backends.checkpoint import MODEL_CONFIGS, checkpoint_folder, hub_sizes, local_path

    path = local_path("model", model)
    is_gguf = path.suffix == ".gguf" and path.is_file()
    try:
        folder = path if is_gguf else checkpoint_folder("model", model, only=MODEL_CONFIGS)
    except SettingsError as error:
        return Finding("model", "wrong", error.problem, "name the folder of a model")
    except ModuleNotFoundError as error:
        found = f"{model} is no folder here, and only {error.name} can read its size on the hub"
        return Finding("model", "look", found, f"pip install {error.name}")
    sizes = {} if path.exists() else hub_sizes(model)
    files = [path] if is_gguf else folder.iterdir()
    sizes = sizes or {file.name: file.stat().st_size for file in files if file.is_file()}
    # Count the weights in the first format that the model has.
    formats = (sum(size for name, size in sizes.items() if name.endswith(end)) for end in _WEIGHTS)
    size = next(filter(None, formats), 0)
    if not size and not path.exists():
        found = f"neither the hub nor its cache provides weights of {model}"
        return Finding("model", "wrong", found, f"run `hf download {model}` where the hub can be reached")
    if not size:
        return Finding("model", "wrong", f"{model} has no weights", "copy them there: *.safetensors")
    return _gpus_for(folder, size, gpus) if gpus else _memory_for(size)


def _memory_for(size: int) -> Finding:
    """Whether a model with `size` bytes of weights fits the memory of this machine."""
    free = _free_bytes()
    capacity = physical_memory() if free is None else free
    found = f"{_size(size)} of weights; {_size(capacity)} {'in all' if free is None else 'free'} on this machine"
    return Finding("model", "wrong", found, _TOO_LARGE) if size > capacity else Finding("model", "ok", found)


def _gpus_for(folder: Path, size: int, gpus: list[tuple[str, int, int]]) -> Finding:
    """Whether a model with `size` bytes of weights fits one GPU, and otherwise the numbers of GPUs that it fits."""
    frees, needed = sorted((free for *_, free in gpus), reverse=True), size * _HEADROOM
    found = f"{_size(size)} of weights; {_size(frees[0])} free on a GPU"
    if needed <= frees[0]:
        return Finding("model", "ok", f"{found}: it fits one GPU")
    found += f", and a worker needs {_size(needed)}"
    state: Literal["look", "wrong"] = "wrong" if size > frees[0] else "look"  # "look": the weights alone fit.
    if not (fitting := [count for count in _parallel_sizes(folder) if needed <= count * frees[0]]):
        return Finding("model", state, found, _TOO_LARGE)
    # Each of the GPUs must have the memory for an equal part of the model.
    here = [count for count in fitting if count <= len(frees) and needed <= count * frees[count - 1]]
    *others, last = map(str, here or fitting[:1])
    found += f": it fits {', '.join(others)}{' or ' * bool(others)}{last} GPUs like this one"
    if here:
        return Finding("model", "look", found, f"--backend vllm or sglang, with --tensor-parallel-size {here[0]}")
    return Finding("model", state, found, f"--tensor-parallel-size {last} on such a machine; or {_TOO_LARGE}")


def _parallel_sizes(folder: Path) -> list[int]:
    """The numbers of GPUs, at least 2, among which engines can divide the attention heads of a model."""
    from lmpool.workers.backends.checkpoint import read_config
    from lmpool.workers.backends.settings import MAX_RANKS

    try:
        config = read_config(folder / "config.json")
    except SettingsError:  # For example, the folder has Mistral's own format, or MODEL is a GGUF file.
        return []
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]

    def first(*names: str) -> int:
        numbers = (part.get(name) for name in names for part in parts)
        return next((number for number in numbers if isinstance(number, int) and number > 0), 0)

    heads = first("num_attention_heads", "n_head", "n_heads")
    shared = first("num_key_value_heads", "num_kv_heads") or heads  # Engines divide these heads, or copy each of them.
    return [n for n in range(2, min(heads, MAX_RANKS) + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
