"""docs/migrating-from-genlm.md lists every public name of genlm-backend, and all names on the page exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmpool.producer import PooledTrie, Producer, SyncProducer
from lmpool.producer.genlm import PooledLM
from lmpool.producer.genlm.connection import POOL_OPTIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs/migrating-from-genlm.md").read_text("utf-8")
OURS = {kind.__name__: kind for kind in (PooledLM, PooledTrie, Producer, SyncProducer)}
CODE = re.compile(r"`([^`\n]+)`")
CONSTRUCTORS = ("__init__", "__new__", "from_name", "from_vocab")
IMPLIED = ("self", "cls")


def modules() -> dict[str, ast.Module]:
    """Syntax trees of genlm-backend's modules: importing some of the modules would need an engine."""
    spec = find_spec("genlm.backend")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    trees = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).with_suffix("").parts
        name = ".".join(["genlm.backend", *(part for part in inside if part != "__init__")])
        trees[name] = ast.parse(path.read_text("utf-8"))
    return trees


def is_public(name: str) -> bool:
    return not name.startswith("_") and name not in IMPLIED


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """The public names of a module: constants, functions, classes and their public members."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):  # genlm-backend defines some classes only if an engine is installed.
            yield from names_of([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef) and is_public(node.name):
            yield node.name
            yield from names_in_class(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and is_public(node.name):
            yield node.name
            if node.name == "load_model_by_name":
                yield from arguments_of(node)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name) and is_public(target.id))
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
                yield from ast.literal_eval(node.value)


def names_in_class(kind: ast.ClassDef) -> Iterator[str]:
    """The public methods and attributes of a class, and the arguments of its constructors."""
    for method in kind.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if is_public(method.name):
                yield method.name
            if method.name in CONSTRUCTORS:
                yield from arguments_of(method)
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_public(node.attr):
                    yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The names of a function's arguments."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return (argument.arg for argument in every if is_public(argument.arg))


def all_arguments(module: ast.Module) -> set[str]:
    """The names of the arguments of all functions and methods."""
    functions = [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {name for function in functions for name in arguments_of(function)}


def tables() -> dict[str, list[tuple[str, str]]]:
    """The rows of the page's tables: name of a genlm-backend module -> rows of its table."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for section in PAGE.split("\n### ")[1:]:
        name, _, text = section.partition("\n")
        lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        assert all(len(line) == 2 for line in lines), name
        by_module[name] = [(there.strip(), here.strip()) for there, here in lines[2:]]
    return by_module


MODULES = modules()
TABLES = tables()


def test_every_module_has_a_table() -> None:
    assert set(TABLES) == {name for name, module in MODULES.items() if any(names_of(module.body))}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_table_of_its_module(module: str) -> None:
    named = {name for there, _ in TABLES[module] for name in CODE.findall(there)}
    names = set(names_of(MODULES[module].body))
    assert not names - named
    assert not named - names - all_arguments(MODULES[module])


def test_every_name_has_a_counterpart() -> None:
    assert all(here for rows in TABLES.values() for _, here in rows)


def resolved(dotted: str) -> Any:
    """Return the object that a dotted name names in lmpool."""
    first, *rest = dotted.split(".")
    if first in OURS:
        value: Any = OURS[first]
    else:
        module = next(
            ".".join(dotted.split(".")[:end]) for end in range(dotted.count(".") + 1, 0, -1) if exists(dotted, end)
        )
        value, rest = importlib.import_module(module), dotted.removeprefix(module).strip(".").split(".")
    for name in filter(None, rest):
        value = getattr(value, name)
    return value


def exists(dotted: str, end: int) -> bool:
    """Whether the first `end` parts of a dotted name are the name of a module."""
    try:
        return find_spec(".".join(dotted.split(".")[:end])) is not None
    except ModuleNotFoundError:
        return False


def test_every_name_of_this_package_exists() -> None:
    prefixes = ("lmpool.", *(f"{name}." for name in OURS))
    mentioned = {name.split("(")[0] for name in CODE.findall(PAGE) if name.startswith(prefixes)}
    assert len(mentioned) > 20
    for name in mentioned:
        resolved(name)


def test_every_import_of_the_examples_works() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    imports = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(block, feature_version=(3, 11)))
        if isinstance(node, ast.ImportFrom)
    ]
    assert imports
    for node in imports:
        for alias in node.names:
            assert getattr(importlib.import_module(str(node.module)), alias.name)


def test_statements_about_options_are_true() -> None:
    options = {name.rstrip("=") for name in re.findall(r"`(\w+=?)` of `PooledLM.from_name`", PAGE)}
    assert options == {"timeout", "cache_bytes", "tokenizer"}
    assert options <= set(POOL_OPTIONS)
