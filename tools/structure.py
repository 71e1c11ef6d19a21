"""Measure how the package is built: its folders, its imports, and what one prompt goes through.

    python -m tools.structure [--files] [--hf FOLDER]

Imports are read from the syntax trees. What a prompt goes through is seen by a profile hook in all threads, while a
real client and a real worker run in one event loop of this process, with the synthetic backend or, for `--hf`, with
a model of transformers; the server is that of `lmpool.testing`, whose files are not counted. After some requests
that warm up, each of several prompts is watched from the call of `Producer.logprobs` to its return:

- A *file that a request enters* is one of which a function or coroutine runs meanwhile, be it only resumed, in every
  one of these requests. What a periodic task enters by chance during one of them is thereby left out.
- *Calls* are the frames of these files that run; one that is resumed several times is one. Told are those of
  the request with the fewest, for whatever runs in the background adds to them.
- A *type of a prompt* is a class of the package of which an instance turns up among the locals of these frames, or in
  an attribute of what does, and has in an attribute of its own the ids of this prompt, its digest, or an object that
  has one of these. The digest is what lies beside the ids as 16 bytes or more and is no other prompt's. Objects that
  are met during two prompts serve many and are left out, as is what holds prompts in a list or dict.

Floors and circles count imports inside functions too. Those under `if TYPE_CHECKING:` cost nothing when the package is
loaded, so circles are told without them and with them, and floors without. A circle is one floor.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import numpy as np

PARTS = ("shared", "producer", "workers", "testing")
PRODUCER = "lmpool.producer"
WORKER = "lmpool.workers.worker"
_MODEL = "structure"
_WARM_UPS = 5
_REQUESTS = 20
_PROMPT_TOKENS = 12
_MIN_DIGEST_BYTES = 16

Graph = dict[str, set[str]]
"""Module -> the modules of the package that it imports."""


# What lies where


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package by their full names; a package stands for its `__init__.py`."""
    paths = {}
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            name = ".".join(path.relative_to(root / part).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


def flat_lists(root: Path) -> dict[str, list[str]]:
    """The names in each folder of the package: Python and Lua modules, and folders that have some.

    `__init__.py` and `__main__.py` are no names.
    """
    names: dict[str, set[str]] = {}
    files = [path for part in PARTS for kind in ("py", "lua") for path in (root / part).rglob(f"*.{kind}")]
    for path in files:
        parts = path.relative_to(root).parts
        for depth in range(2, len(parts)):
            if parts[depth] not in ("__init__.py", "__main__.py"):
                names.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    return {folder: sorted(listed) for folder, listed in sorted(names.items())}


def longest_list(root: Path) -> tuple[str, list[str]]:
    """The folder of the package with the most names, and these; see `flat_lists`."""
    return max(flat_lists(root).items(), key=lambda listed: len(listed[1]), default=("", []))


# Who imports whom


def import_graph(root: Path, *, in_functions: bool = True, for_types: bool = True) -> Graph:
    """The modules of the package, and which of them each imports.

    `from lmpool.a import b` imports lmpool.a.b where that is a module, else lmpool.a.

    Args:
        root: the folder that the parts of the package lie in.
        in_functions: count imports inside functions.
        for_types: count imports under `if TYPE_CHECKING:`.
    """
    known = modules(root)
    graph: Graph = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text("utf-8"), str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        nodes = _import_nodes(tree.body, in_functions, for_types)
        imported = {module for node in nodes for module in _named(node, package, known)}
        graph[name] = imported & known.keys() - {name}
    return graph


def _import_nodes(
    nodes: Iterable[ast.AST], in_functions: bool, for_types: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
                inner = node.orelse
            yield from _import_nodes(inner, in_functions, for_types)


def _named(node: ast.Import | ast.ImportFrom, package: str, known: Iterable[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = package.rsplit(".", node.level - 1)[:1] if node.level else []
    module = ".".join([*above, *([node.module] if node.module else [])])
    return [full if (full := f"{module}.{alias.name}") in known else module for alias in node.names]


def circles(graph: Graph) -> list[list[str]]:
    """The sets of modules that all import each other, directly or not; the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    sets = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return sorted(map(sorted, sets), key=lambda circle: (-len(circle), circle))


def _reached(graph: Graph, name: str) -> set[str]:
    reached: set[str] = set()
    left = [name]
    while left:
        new = graph[left.pop()] - reached
        reached |= new
        left += new
    return reached


def longest_chain(graph: Graph, prefix: str, start: str | None = None) -> list[str]:
    """The longest chain of modules below `prefix` of which each imports the next; a circle is one link, by one name.

    It begins with `start`, or with any module where that is None.
    """
    inside = {name for name in graph if f"{name}.".startswith(f"{prefix}.")}
    part = {name: graph[name] & inside for name in inside}
    circle_of = {name: circle for circle in circles(part) for name in circle}

    @cache
    def chain(name: str) -> list[str]:
        circle = circle_of.get(name, [name])
        below = {imported for module in circle for imported in part[module]}.difference(circle)
        return [name, *max(map(chain, below), key=lambda names: (len(names), names), default=[])]

    starts = inside if start is None else inside & {start}
    return max(map(chain, starts), key=lambda names: (len(names), names), default=[])


# What a prompt goes through


class Recording:
    """What runs of the package in `root` while `is_on`; `hook` is set as the profile hook of all threads.

    Attributes:
        frames: those that ran, in the order in which they were entered, with their files.
        objects: those of the package that were met, by their `id`: they stay alive, so it remains theirs.
    """

    def __init__(self, root: Path) -> None:
        paths = [path.relative_to(root) for path in modules(root).values()]
        self._names = {str(root / path): str(path) for path in paths if path.parts[0] != "testing"}
        self.is_on = False
        self.clear()

    def clear(self) -> None:
        """Forget what has run."""
        self.frames: dict[FrameType, str] = {}
        self.objects: dict[int, object] = {}

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        """Note a frame that begins, goes on, pauses or ends, and the objects of the package among its locals."""
        if self.is_on and event in ("call", "return") and frame.f_code.co_filename in self._names:
            self.frames.setdefault(frame, self._names[frame.f_code.co_filename])
            for value in [*frame.f_locals.values()]:
                if self._note(value):
                    for attribute in attributes(value):
                        self._note(attribute)

    def _note(self, value: object) -> bool:
        is_of_the_package = (
            type(value).__module__.startswith("lmpool.") and "lmpool.testing" not in type(value).__module__
        )
        if is_of_the_package:
            self.objects[id(value)] = value
        return is_of_the_package


def attributes(value: object) -> list[object]:
    """What an object has in its `__dict__`, its slots and, being a tuple, its fields."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return [*values, *(value if isinstance(value, tuple) else ())]


def prompt_types(objects: Iterable[object], ids: list[int], foreign: set[bytes]) -> tuple[set[type], set[bytes]]:
    """The classes of those objects that carry one prompt, and the bytes that lie beside its ids.

    Those in `foreign` lie beside the ids of other prompts, so that they name none.
    """
    encoded = np.asarray(ids, "<u4").tobytes()

    def is_ids(value: object) -> bool:
        value = value.tolist() if isinstance(value, np.ndarray) and value.size == len(ids) else value
        if isinstance(value, bytes):
            return value == encoded
        return isinstance(value, (list, tuple)) and all(type(number) is int for number in value) and [*value] == ids

    having = [(holder, attributes(holder)) for holder in objects]
    beside = {v for _, values in having if any(map(is_ids, values)) for v in values if isinstance(v, bytes)}
    names = {value for value in beside - foreign if len(value) >= _MIN_DIGEST_BYTES}
    first = [
        holder for holder, values in having if any(is_ids(v) or (isinstance(v, bytes) and v in names) for v in values)
    ]
    numbers = {id(holder) for holder in first}
    second = [holder for holder, values in having if any(id(value) in numbers for value in values)]
    return {type(holder) for holder in [*first, *second]}, beside


class Journey:
    """What several requests of one kind had in common; each is the files of its frames, in the order of entering.

    Attributes:
        files: what every one entered, in the order of the last one.
        calls: frames of these files, in the request that has the fewest.
    """

    def __init__(self, requests: list[list[str]]) -> None:
        common = set.intersection(*map(set, requests))
        self.files = [name for name in dict.fromkeys(requests[-1]) if name in common]
        self.calls = min(sum(name in common for name in files) for files in requests)


async def follow(root: Path, hf: str | None) -> tuple[Journey, Journey, list[str]]:
    """Ask one worker for prompts: cold requests, hits in the producer's memory, and the types of a prompt."""
    recording = Recording(root)
    # Before any thread begins: the backend's has the hook only then.
    threading.setprofile(recording.hook)
    sys.setprofile(recording.hook)
    worker_class = import_module(WORKER).Worker
    server_class = get_type_hints(worker_class.__init__)["server"]
    points = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["lmpool.backends"]
    place, name = points["hf" if hf else "synthetic"].split(":")
    backend = getattr(import_module(place), name)(name=_MODEL, **({"model": hf} if hf else {}))
    prompts = np.random.default_rng(0).integers(0, 500, (_WARM_UPS + _REQUESTS, _PROMPT_TOKENS)).tolist()
    async with import_module("lmpool.testing").pool() as pool:
        worker = worker_class(server_class(pool.url), backend)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        serving: asyncio.Future[Any] = asyncio.create_task(worker.run(ready.set_result))
        await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # It could not begin: this raises why.
        async with import_module(PRODUCER).Producer(_MODEL, redis=pool.url) as producer:

            async def watch(ids: list[int]) -> list[str]:
                recording.clear()
                recording.is_on = True
                await producer.logprobs(ids)
                recording.is_on = False
                return [*recording.frames.values()]

            colds = [await watch(ids) for ids in prompts[:-1]]
            others = recording.objects
            colds.append(await watch(prompts[-1]))
            last_only = [met for number, met in recording.objects.items() if number not in others]
            hits = [await watch(prompts[-1]) for _ in range(_REQUESTS)]
        worker.stop()
        await serving
    _, foreign = prompt_types(others.values(), prompts[-2], set())
    types, _ = prompt_types(last_only, prompts[-1], foreign)
    return Journey(colds[_WARM_UPS:]), Journey(hits), sorted(kind.__name__ for kind in types)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files that a prompt enters, in order")
    parser.add_argument("--hf", metavar="FOLDER", help="serve a model of transformers instead of the synthetic one")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    files = modules(root).values()
    folder, names = longest_list(root)
    loads, graph = import_graph(root, for_types=False), import_graph(root)
    floors = longest_chain(loads, PRODUCER, PRODUCER)
    cold, hit, types = asyncio.run(follow(root, given.hf))
    if not cold.files:
        raise SystemExit(f"the package that is imported is not the one of {root}: put its parts on PYTHONPATH")
    for title, number in {
        "Python files of the package": len(files),
        "lines in them": sum(path.read_bytes().count(b"\n") for path in files),
        f"longest list of names in a folder ({folder})": len(names),
        "files that a cold request enters": len(cold.files),
        "calls in these": cold.calls,
        "files that a hit in the producer's memory enters": len(hit.files),
        "calls in these, for the hit": hit.calls,
        "types of a prompt on its way": len(types),
        f"modules that {WORKER} imports at its top": len(import_graph(root, in_functions=False)[WORKER]),
        f"floors of imports below {PRODUCER}": len(floors),
        f"floors of all modules in {PRODUCER}": len(longest_chain(loads, PRODUCER)),
        "circles of files": len(circles(loads)),
        "circles of files, with imports for types": len(circles(graph)),
    }.items():
        print(f"{title:60}{number:7,}")
    print("\nTypes of a prompt:", *types)
    print("Floors:", *floors)
    for circle in circles(graph):
        print("Circle:" if circle in circles(loads) else "Circle with imports for types:", *circle)
    if given.files:
        for title, journey in (("a cold request", cold), ("a hit in the producer's memory", hit)):
            print(f"\nFiles that {title} enters, in order:", *journey.files, sep="\n  ")


if __name__ == "__main__":
    main()
