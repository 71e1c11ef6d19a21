"""The Python sources of a wheel: finding classes and functions in their syntax trees, and what they take and have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed file. `package` is what its relative imports start from."""

    path: str
    package: str
    body: tuple[ast.stmt, ...]

    def at(self, node: ast.AST) -> str:
        """Where a node stands: `path:line`."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True, slots=True)
class Found:
    """A class or function, and the file that it stands in. `method`: it stands in a class."""

    module: Module
    node: Definition
    method: bool = False

    @property
    def place(self) -> str:
        return self.module.at(self.node)

    @property
    def decorators(self) -> list[str]:
        return [ast.unparse(node) for node in self.node.decorator_list]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function, or a field of a class that takes its fields."""

    name: str
    place: str
    required: bool
    positional: bool = True


@dataclass(frozen=True, slots=True)
class Signature:
    """What a call may and must give. `extra`: it takes further keywords, unnamed."""

    parameters: tuple[Parameter, ...]
    extra: bool = False

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]


class Sources:
    """The modules of a wheel, read and parsed when they are asked for.

    Args:
        read: gives the bytes of a file of the wheel, or None where it has none of that path.
    """

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module or package by its dotted name.

        Raises:
            SyntaxError: it is not Python as this interpreter knows it.
        """
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def find(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """A class, function or method by its dotted name, wherever the module has it from."""
        first, _, rest = name.partition(".")
        found = self._defined(module, first) or self._borrowed(module, first, seen)
        if not rest or found is None:
            return found
        for owner in self.lineage(found):
            if method := _last_definition(_flat(owner.node.body), rest):
                return Found(owner.module, method, method=True)
        return None

    def lineage(self, found: Found, parts: str = "") -> Iterator[Found]:
        """A class, its base classes as far as they are in the wheel, and those that the variable `parts` lists."""
        if not isinstance(found.node, ast.ClassDef):
            return
        yield found
        listed = _elements(found.module, parts) if parts else []
        for base in (*found.node.bases, *listed):
            name = base.id if isinstance(base, ast.Name) else found.node.name
            if name != found.node.name and (other := self.find(found.module, name)):
                yield from self.lineage(other)

    def signature(self, found: Found, parts: str = "") -> Signature:
        """What a function takes, or what a class takes when it is called."""
        if isinstance(found.node, Function):
            return _of_function(found)
        fields: dict[str, Parameter] = {}
        for owner in self.lineage(found, parts):
            if own := _last_definition(_flat(owner.node.body), "__init__"):
                return _of_function(Found(owner.module, own, method=True))
            inherited, fields = fields, {field.name: field for field in _fields(owner)}
            fields |= inherited  # A subclass's own field hides that of its base.
        return Signature(tuple(fields.values()))

    def members(self, found: Found, parts: str = "") -> set[str]:
        """Names of a class's fields, constants, methods, and of what methods set on `self`."""
        return {name for owner in self.lineage(found, parts) for name in _members(owner.node)}

    def methods(self, found: Found) -> list[Found]:
        """Own and inherited methods of a class, the nearest of each name."""
        nearest: dict[str, Found] = {}
        for owner in self.lineage(found):
            for node in _flat(owner.node.body):
                if isinstance(node, Function):
                    nearest.setdefault(node.name, Found(owner.module, node, method=True))
        return list(nearest.values())

    def calls(self, found: Found) -> set[str]:
        """What is called anywhere in a class, as written there, base classes included."""
        nodes = (node for owner in self.lineage(found) for node in ast.walk(owner.node))
        return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}

    def _load(self, name: str) -> Module | None:
        stem = name.replace(".", "/")
        for path, package in ((f"{stem}/__init__.py", name), (f"{stem}.py", name.rpartition(".")[0])):
            if (source := self._read(path)) is not None:
                return Module(path, package, tuple(_flat(ast.parse(source, path).body)))
        return None

    def _defined(self, module: Module, name: str) -> Found | None:
        node = _last_definition(module.body, name)
        return None if node is None else Found(module, node)

    def _borrowed(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        """What a module imports, or gives a second name."""
        key = (module.path, name)
        if key in seen:
            return None
        for node in module.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and (other := self.module(_absolute(module, node))):
                        return self.find(other, alias.name, seen | {key})
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and _targets(node) == [name]:
                return self.find(module, node.value.id, seen | {key})
        return None


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under `if`, `try` and `with` included: which branch runs cannot be known here."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            yield from _flat(getattr(node, block, ()))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _flat(handler.body)


def _last_definition(body: Iterable[ast.stmt], name: str) -> Definition | None:
    # The last: overloads stand before what they describe.
    found = [node for node in body if isinstance(node, ast.ClassDef | Function) and node.name == name]
    return found[-1] if found else None


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _elements(module: Module, variable: str) -> list[ast.expr]:
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and _targets(node) == [variable]
            and isinstance(node.value, ast.List | ast.Tuple)
        ):
            return node.value.elts
    return []


def _of_function(found: Found) -> Signature:
    assert isinstance(found.node, Function)
    given = found.node.args
    front = [*given.posonlyargs, *given.args]
    defaults = len(front) - len(given.defaults)
    rows = [(node, index < defaults, True) for index, node in enumerate(front)]
    if found.method and "staticmethod" not in found.decorators:
        rows = rows[1:]
    rows += [(node, default is None, False) for node, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    parameters = (Parameter(node.arg, found.module.at(node), required, front) for node, required, front in rows)
    return Signature(tuple(parameters), extra=given.kwarg is not None)


def _fields(owner: Found) -> Iterator[Parameter]:
    for node in _flat(owner.node.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        options = _field_options(node.value)
        if "ClassVar" in ast.unparse(node.annotation) or options.get("init") == "False":
            continue
        required = node.value is None or (bool(options) and not {"default", "default_factory"} & options.keys())
        yield Parameter(node.target.id, owner.module.at(node), required)


def _field_options(value: ast.expr | None) -> dict[str, str]:
    """The keywords of `field(…)`, `dataclasses.field(…)` or `msgspec.field(…)`; empty for any other value."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        return {"field": "", **{keyword.arg or "": ast.unparse(keyword.value) for keyword in value.keywords}}
    return {}


def _members(owner: Definition) -> Iterator[str]:
    for node in _flat(owner.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from _targets(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, Function):
            yield node.name
            yield from (target.attr for target in ast.walk(node) if _is_set_on_self(target))


def _is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"
