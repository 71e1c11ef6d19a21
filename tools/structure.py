"""Measure the structure of the package: sizes, folders, imports, and the files that one request enters.

    python -m tools.structure [--files] [--hf FOLDER]    all measures
    python -m tools.structure --sizes                    lines of code per folder
    python -m tools.structure --layout                   the list of files, as docs/reference/files.md shows it
    python -m tools.structure --constants                numeric constants without a comment

`tests/project/limits.toml` limits these measures. Imports are read from the syntax trees, imports inside functions
included. `tools/request_path.py` explains how the files of a request are found.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tools import request_path

PARTS = ("shared", "producer", "workers", "testing")
PRODUCER = "lmpool.producer"

Graph = dict[str, set[str]]
"""Module -> the modules of the package that it imports."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


# Files and folders


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of the package by their full names; an `__init__.py` has the name of its folder."""
    paths = {}
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            name = ".".join(path.relative_to(root / part).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


def scripts(root: Path) -> list[Path]:
    """Return the Lua files of the package."""
    return sorted(path for part in PARTS for path in (root / part).rglob("*.lua"))


def folder_entries(root: Path) -> dict[str, list[str]]:
    """Return the names in each folder of the package: Python files, Lua files, and folders that contain either.

    `__init__.py` and `__main__.py` are not counted.
    """
    names: dict[str, set[str]] = {}
    for path in [*modules(root).values(), *scripts(root)]:
        parts = path.relative_to(root).parts
        for depth in range(2, len(parts)):
            if parts[depth] not in ("__init__.py", "__main__.py"):
                names.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    return {folder: sorted(entries) for folder, entries in sorted(names.items())}


def layout(root: Path) -> str:
    """Return the list of files in Markdown: each folder and each file with the first sentence of its docstring."""
    lines: list[str] = []
    for folder in folder_entries(root):
        entries = sorted(path for path in (root / folder).iterdir() if path.suffix in (".py", ".lua"))
        described = [(path, _summary(path)) for path in entries if path.name != "__init__.py"]
        if not described:
            continue
        package = root / folder / "__init__.py"
        lines += [f"## {folder}/", ""]
        if package.exists() and (text := _summary(package)):
            lines += [text, ""]
        lines += ["| file | content |", "|---|---|"]
        lines += [f"| `{path.name}` | {text.replace('|', '/')} |" for path, text in described]
        lines.append("")
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """Return the first sentence of a Python file's docstring, or of the comment at the beginning of a Lua file."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        head = re.match(r"(?:--.*\n)*", text)
        paragraph = re.sub(r"^-- ?", "", head[0] if head else "", flags=re.MULTILINE).partition("\n\n")[0]
    return re.split(r"(?<=[.]) ", " ".join(paragraph.split()))[0]


# Sizes


class Size(NamedTuple):
    """The size of some files."""

    files: int
    code: int
    """Lines with code: no blank lines, comments and docstrings."""
    lines: int


def sizes(root: Path) -> dict[str, Size]:
    """Return the size of the Python files of each folder, subfolders excluded."""
    found: dict[str, Size] = {}
    for path in modules(root).values():
        folder = str(path.parent.relative_to(root))
        text = path.read_text("utf-8")
        own = (1, code_lines(text), text.count("\n"))
        found[folder] = Size(*map(sum, zip(found.get(folder, (0, 0, 0)), own, strict=True)))
    return dict(sorted(found.items()))


def lua_lines(root: Path) -> int:
    """Count all lines of the Lua files."""
    return sum(path.read_text("utf-8").count("\n") for path in scripts(root))


def code_lines(text: str) -> int:
    """Count the lines of a Python file that are not blank, comments or docstrings."""
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - strings)


def bare_constants(root: Path) -> list[str]:
    """Return the numeric constants that no comment explains, as "file:line: statement".

    A comment at the end of the line, a comment in the line above, or a string below explains a constant.
    """
    found = []
    for path in modules(root).values():
        text = path.read_text("utf-8")
        lines, tree = text.split("\n"), ast.parse(text)
        scopes: list[ast.Module | ast.ClassDef] = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
        for scope in scopes:
            for node, following in zip_longest(scope.body, scope.body[1:]):
                if _is_numeric_constant(node) and not _is_explained(node, following, lines):
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    return found


def shared_class_names(root: Path) -> list[str]:
    """Return the names that several classes of the package have, and that would confuse a reader."""
    trees = [ast.parse(path.read_text("utf-8")) for path in modules(root).values()]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [name for name, count in Counter(names).items() if count > 1]


def _is_numeric_constant(node: ast.stmt) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    values = [type(leaf.value) for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)]
    return (
        bool(names)
        and all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) for name in names)
        and bool(values)
        and set(values) <= {int, float}
        and not any(isinstance(leaf, (ast.Call, ast.Name, ast.Attribute)) for leaf in ast.walk(node.value))
    )


def _is_explained(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> bool:
    last = node.end_lineno or node.lineno
    return (
        "#" in lines[last - 1]
        or lines[node.lineno - 2].strip().startswith("#")
        or (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
    )


# Imports


def import_graph(root: Path, *, in_functions: bool = True, for_types: bool = True) -> Graph:
    """Return for each module of the package the modules that it imports.

    `from lmpool.a import b` imports lmpool.a.b if that is a module, else lmpool.a.

    Args:
        root: the folder that contains the parts of the package.
        in_functions: count imports inside functions.
        for_types: count imports under `if TYPE_CHECKING:`.
    """
    known = modules(root)
    graph: Graph = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text("utf-8"), str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        nodes = _import_nodes(tree.body, in_functions, for_types)
        imported = {module for node in nodes for module in _imported(node, package, known)}
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


def _imported(node: ast.Import | ast.ImportFrom, package: str, known: Iterable[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = package.rsplit(".", node.level - 1)[:1] if node.level else []
    module = ".".join([*above, *([node.module] if node.module else [])])
    return [full if (full := f"{module}.{alias.name}") in known else module for alias in node.names]


def import_cycles(graph: Graph) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others; the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    sets = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return sorted(map(sorted, sets), key=lambda cycle: (-len(cycle), cycle))


def _reached(graph: Graph, name: str) -> set[str]:
    reached: set[str] = set()
    left = [name]
    while left:
        new = graph[left.pop()] - reached
        reached |= new
        left += new
    return reached


def longest_chain(graph: Graph, prefix: str, start: str | None = None) -> list[str]:
    """Return the longest chain of modules below `prefix` in which each module imports the next.

    Modules in a cycle count as one link. The chain begins with `start`, or with any module if `start` is None.
    """
    inside = {name for name in graph if f"{name}.".startswith(f"{prefix}.")}
    part = {name: graph[name] & inside for name in inside}
    cycle_of = {name: cycle for cycle in import_cycles(part) for name in cycle}

    @cache
    def chain(name: str) -> list[str]:
        cycle = cycle_of.get(name, [name])
        below = {imported for module in cycle for imported in part[module]}.difference(cycle)
        return [name, *max(map(chain, below), key=lambda names: (len(names), names), default=[])]

    starts = inside if start is None else inside & {start}
    return max(map(chain, starts), key=lambda names: (len(names), names), default=[])


# Command line


def _print_sizes(root: Path) -> None:
    measured = sizes(root)
    print(f"{'code':>7}{'lines':>8}{'files':>7}")
    for folder, size in [*measured.items(), ("all", Size(*map(sum, zip(*measured.values(), strict=True))))]:
        print(f"{size.code:7,}{size.lines:8,}{size.files:7}  {folder}")
    print(f"{lua_lines(root):15,}{len(scripts(root)):7}  Lua")


def _print_structure(root: Path, hf: str | None, list_files: bool) -> None:
    loads, graph = import_graph(root, for_types=False), import_graph(root)
    folder, names = max(folder_entries(root).items(), key=lambda entry: len(entry[1]))
    cold, hit, types = asyncio.run(request_path.follow(root, modules(root).values(), hf))
    if not cold.files:
        raise SystemExit(f"the imported package is not the one in {root}: put its parts on PYTHONPATH")
    for title, number in {
        f"most names in a folder ({folder})": len(names),
        "files that a cold request enters": len(cold.files),
        "calls in these files": cold.calls,
        "files that a hit in the producer's memory enters": len(hit.files),
        "calls in these files, for the hit": hit.calls,
        "types that carry a prompt": len(types),
        f"modules that {request_path.WORKER} imports": len(import_graph(root, in_functions=False)[request_path.WORKER]),
        f"longest import chain in {PRODUCER}": len(longest_chain(loads, PRODUCER)),
        "import cycles": len(import_cycles(graph)),
        "numeric constants without a comment": len(bare_constants(root)),
    }.items():
        print(f"{title:60}{number:7,}")
    print("\nTypes that carry a prompt:", *types)
    for cycle in import_cycles(graph):
        print("Import cycle:", *cycle)
    if list_files:
        for title, path in (("a cold request", cold), ("a hit in the producer's memory", hit)):
            print(f"\nFiles that {title} enters, in order:", *path.files, sep="\n  ")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files that a prompt enters, in order")
    parser.add_argument("--hf", metavar="FOLDER", help="serve a transformers model instead of the synthetic backend")
    parser.add_argument("--sizes", action="store_true", help="print the lines of code per folder and stop")
    parser.add_argument("--layout", action="store_true", help="print the list of files in Markdown and stop")
    parser.add_argument("--constants", action="store_true", help="list numeric constants without a comment and stop")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    if given.layout:
        print(layout(root))
    elif given.constants:
        print(*bare_constants(root), sep="\n")
    else:
        _print_sizes(root)
        if not given.sizes:
            _print_structure(root, given.hf, given.files)


if __name__ == "__main__":
    main()
