"""The check: what a backend relies on against the sources of an engine."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from tools.engine_scan.relied import Relied
from tools.engine_scan.sources import Found, Module, Sources

_FEW = 8


@dataclass(frozen=True, slots=True)
class Moved:
    """Something that is not as expected, and where: `path:line`."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one thing that is relied on: where it is now ("" if nowhere), and what moved."""

    relied: Relied
    place: str
    moved: tuple[Moved, ...]


def scan(read: Callable[[str], bytes | None], relied: Iterable[Relied]) -> list[Finding]:
    """Check an engine. Nothing of it is imported or run.

    Args:
        read: gives the bytes of a file of the wheel, or None where it has none of that path.
        relied: what must be there.
    """
    sources = Sources(read)
    return [_check(sources, one) for one in relied]


def _check(sources: Sources, relied: Relied) -> Finding:
    try:
        module = sources.module(relied.module)
        if module is None:
            return _lost(relied, relied.module.replace(".", "/"), f"expected module {relied.module}, found none")
        for name in relied.name.split(" or "):
            if found := sources.find(module, name):
                return Finding(relied, found.place, tuple(_differences(sources, relied, found)))
        return _lost(relied, *_instead_of(sources, module, relied.name))
    except SyntaxError as error:
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return _lost(relied, f"{error.filename}:{error.lineno}", f"{version} cannot parse this: {error.msg}")


def _lost(relied: Relied, place: str, text: str) -> Finding:
    return Finding(relied, "", (Moved(place, text),))


def _instead_of(sources: Sources, module: Module, name: str) -> tuple[str, str]:
    """Where a name was looked for in vain, and what is there."""
    owner, _, last = name.partition(" or ")[0].rpartition(".")
    found = sources.find(module, owner) if owner else None
    if owner and found is None:
        name, last = owner, owner
    if found is None:
        there = [node.name for node in module.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        return f"{module.path}:1", f"expected {name}, {_closest(last, there)}"
    return found.place, f"expected {name}, {_closest(last, sources.members(found))}"


def _differences(sources: Sources, relied: Relied, found: Found) -> Iterator[Moved]:
    if relied.takes is not None:
        yield from _taken(sources, relied, relied.takes.split(), found)
    if relied.receives is not None:
        yield from _received(sources, relied.receives.split(), found)
    if relied.takes is not None or relied.receives is not None:
        yield from _plain(relied, found)
    if relied.implements is not None:
        yield from _abstract(sources, relied.implements.split(), found)
    if relied.has:
        members = sources.members(found, relied.parts)
        yield from _missing(found, "attribute", relied.has.split(), members)
    if relied.calls:
        called = sources.calls(found)
        yield from _missing(found, "call of", relied.calls.split(), called)
    if isinstance(found.node, ast.ClassDef) and relied.bases:
        bases = [ast.unparse(base) for base in found.node.bases]
        yield from _missing(found, "base", relied.bases.split(), bases)
    yield from _missing(found, "decorator", relied.decorators.split(), found.decorators)


def _taken(sources: Sources, relied: Relied, takes: list[str], found: Found) -> Iterator[Moved]:
    """We call it: what we give must be taken, and nothing else may be asked for."""
    signature = sources.signature(found, relied.parts)
    kind = "field" if isinstance(found.node, ast.ClassDef) else "parameter"
    if not signature.extra:
        yield from _missing(found, kind, takes, signature.names)
    known = {*takes, *relied.may_take.split()}
    for parameter in signature.parameters:
        if parameter.required and parameter.name not in known:
            yield Moved(parameter.place, f"expected no other required {kind}, found {parameter.name!r}")
    front = [parameter.name for parameter in signature.parameters if parameter.positional][: relied.positional]
    expected = takes[: relied.positional]
    # A lost name has been told already; what is left must be in order.
    if front != expected and set(expected) <= set(signature.names):
        yield Moved(found.place, f"expected {_listed(expected)} in front, found {_listed(front)}")


def _received(sources: Sources, receives: list[str], found: Found) -> Iterator[Moved]:
    """It is called where a function of ours stands: the call must fit ours."""
    names = sources.signature(found).names
    if names != receives:
        yield Moved(found.place, f"expected parameters {_listed(receives)}, found {_listed(names)}")


def _plain(relied: Relied, found: Found) -> Iterator[Moved]:
    """A call returns at once with a result: no coroutine, no property."""
    if isinstance(found.node, ast.AsyncFunctionDef):
        yield Moved(found.place, "expected a plain function, found a coroutine")
    for kind in ("property", "cached_property", "staticmethod", "classmethod"):
        if kind in found.decorators and kind not in relied.decorators.split():
            yield Moved(found.place, f"expected a plain method, found a {kind}")


def _abstract(sources: Sources, implements: list[str], found: Found) -> Iterator[Moved]:
    for method in sources.methods(found):
        if "abstractmethod" in " ".join(method.decorators) and method.node.name not in implements:
            yield Moved(method.place, f"expected no other abstract method, found {method.node.name!r}")


def _missing(found: Found, kind: str, expected: Iterable[str], there: Collection[str]) -> Iterator[Moved]:
    for name in expected:
        if name not in there:
            yield Moved(found.place, f"expected {kind} {name!r}, {_closest(name, there)}")


def _closest(name: str, there: Collection[str]) -> str:
    if close := get_close_matches(name, there, n=2):
        return f"found {' and '.join(map(repr, close))}"
    if len(there) <= _FEW:
        return f"found {_listed(sorted(there))}"
    return f"found nothing like it among {len(there)} names"


def _listed(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"
