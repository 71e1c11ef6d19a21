"""`tools.structure`, which measures the size and structure of a package, is correct for a tiny package."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
from tools.request_path import WORKER, RequestPath, prompt_types
from tools.structure import (
    PARTS,
    PRODUCER,
    Size,
    bare_constants,
    code_lines,
    folder_entries,
    import_cycles,
    import_graph,
    layout,
    longest_chain,
    lua_lines,
    modules,
    sizes,
)

FILES = {
    "shared/lmpool/__init__.py": "",
    "shared/lmpool/__main__.py": "from lmpool import keys",
    "shared/lmpool/keys.py": "import os",
    "shared/lmpool/lua/one.lua": "return 1",
    "shared/lmpool/lua/two.lua": "return 2",
    "shared/lmpool/rows/__init__.py": "from lmpool.rows.cache import Cache",
    "shared/lmpool/rows/cache.py": "from lmpool.keys import Keys\nfrom lmpool import rows",
    "shared/lmpool/py.typed": "",
    "shared/lmpool/old/__pycache__/gone.pyc": "",
    "producer/lmpool/producer/__init__.py": "from lmpool.producer.top import ask",
    "producer/lmpool/producer/top.py": "from . import middle\nfrom .low import number",
    "producer/lmpool/producer/middle.py": "def later():\n    import lmpool.producer.low\n",
    "producer/lmpool/producer/low.py": (
        "from typing import TYPE_CHECKING\nfrom lmpool.rows import Cache\nif TYPE_CHECKING:\n"
        "    from lmpool.producer import top\n"
    ),
    "workers/lmpool/workers/worker.py": "from lmpool import keys, nothing\nfrom lmpool.producer import ask",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path


def test_the_package_is_found_in_all_of_its_parts(root: Path) -> None:
    paths = modules(root)
    assert paths["lmpool.rows"] == root / "shared/lmpool/rows/__init__.py"
    assert set(paths) >= {"lmpool", "lmpool.__main__", "lmpool.producer.low", "lmpool.workers.worker"}
    assert len(paths) == sum(name.endswith(".py") for name in FILES)


def test_folder_entries_are_modules_scripts_and_folders_without_init_files(root: Path) -> None:
    assert folder_entries(root) == {
        "shared/lmpool": ["keys.py", "lua", "rows"],
        "shared/lmpool/lua": ["one.lua", "two.lua"],
        "shared/lmpool/rows": ["cache.py"],
        "producer/lmpool": ["producer"],
        "producer/lmpool/producer": ["low.py", "middle.py", "top.py"],
        "workers/lmpool": ["workers"],
        "workers/lmpool/workers": ["worker.py"],
    }


def test_importing_a_name_counts_as_importing_its_module(root: Path) -> None:
    graph = import_graph(root)
    assert graph["lmpool.workers.worker"] == {"lmpool.keys", "lmpool", "lmpool.producer"}
    assert graph["lmpool.__main__"] == {"lmpool.keys"}
    assert graph["lmpool.rows"] == {"lmpool.rows.cache"}
    assert graph["lmpool.keys"] == set()


def test_relative_imports_are_imports(root: Path) -> None:
    assert import_graph(root)["lmpool.producer.top"] == {"lmpool.producer.middle", "lmpool.producer.low"}


def test_imports_in_functions_and_for_types_count_only_when_requested(root: Path) -> None:
    low, middle = "lmpool.producer.low", "lmpool.producer.middle"
    assert import_graph(root)[middle] == {low}
    assert import_graph(root, in_functions=False)[middle] == set()
    assert import_graph(root)[low] == {"lmpool.rows", "lmpool.producer.top"}
    assert import_graph(root, for_types=False)[low] == {"lmpool.rows"}


def test_import_cycles_of_any_length_are_found(root: Path) -> None:
    three = ["lmpool.producer.low", "lmpool.producer.middle", "lmpool.producer.top"]
    two = ["lmpool.rows", "lmpool.rows.cache"]
    assert import_cycles(import_graph(root)) == [three, two]
    assert import_cycles(import_graph(root, for_types=False)) == [two]


def test_a_module_that_imports_a_cycle_is_not_part_of_it() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert import_cycles(graph) == [["b", "c"]]
    assert longest_chain(graph, "lmpool") == []


def test_a_chain_stays_in_its_package_and_a_cycle_is_one_link(root: Path) -> None:
    loads = import_graph(root, for_types=False)
    names = ["lmpool.producer", "lmpool.producer.top", "lmpool.producer.middle", "lmpool.producer.low"]
    assert longest_chain(loads, "lmpool.producer") == names
    assert longest_chain(loads, "lmpool.producer", "lmpool.producer.middle") == names[2:]
    assert len(longest_chain(import_graph(root), "lmpool.producer")) == 2
    assert longest_chain(loads, "lmpool.prod") == []


def test_a_request_path_has_the_files_common_to_all_requests() -> None:
    path = RequestPath([["beat", "a", "b", "b"], ["b", "a"], ["b", "b", "a"]])
    assert path.files == ["b", "a"]
    assert path.calls == 2


def test_types_that_carry_a_prompt_hold_its_ids_its_digest_or_such_an_object() -> None:
    prompt = namedtuple("prompt", "ids digest model")
    job = namedtuple("job", "digest entry")
    request, queue, other = (type(name, (), {}) for name in ("Request", "Queue", "Other"))
    model, digest, encoded = b"m" * 32, b"d" * 16, bytes([7, 0, 0, 0, 1, 1, 0, 0])
    asked, held, stranger, waiting = prompt(encoded, digest, model), request(), other(), queue()
    held.prompt, stranger.model, waiting.all = asked, model, [asked]
    objects = [asked, held, stranger, waiting, job(digest, b"1-0"), prompt([7], b"e" * 16, model)]
    types, next_to = prompt_types(objects, [7, 257], foreign={model})
    assert types == {prompt, job, request}
    assert next_to == {encoded, digest, model}


def test_code_lines_exclude_blank_lines_comments_and_docstrings() -> None:
    head = '"""Title.\n\nMore.\n"""\n\n# Why.\n'
    body = 'A = 1  # Unit.\nB = """x\ny"""\n\n\ndef f() -> None:\n    """Doc."""\n    g(\n        1,\n    )\n'
    text = head + body
    assert code_lines(text) == 1 + 2 + 1 + 3


def test_sizes_are_per_folder(root: Path) -> None:
    assert sizes(root)["shared/lmpool/rows"] == Size(files=2, code=3, lines=1)
    assert "shared/lmpool/lua" not in sizes(root)
    (root / "shared/lmpool/lua/two.lua").write_text("return 2\n-- End.\n")
    assert lua_lines(root) == 2


def test_a_numeric_constant_needs_a_comment(root: Path) -> None:
    text = (
        '# Max rows.\nA = 1\nB = 2.5  # Seconds.\nC = 1 << 20\n"""Max bytes."""\n_D = -1\n'
        'E = "text"\nF = A + 1\nlower = 3\n\n\nclass G:\n    H, I = 1, 2\n'
    )
    (root / "shared/lmpool/keys.py").write_text(text)
    assert bare_constants(root) == ["shared/lmpool/keys.py:6: _D = -1", "shared/lmpool/keys.py:13: H, I = 1, 2"]


def test_the_layout_lists_files_with_the_first_sentence_of_their_docstring(root: Path) -> None:
    (root / "shared/lmpool/rows/__init__.py").write_text('"""Where rows\nare stored. More."""\n')
    (root / "shared/lmpool/rows/cache.py").write_text('"""The cache on the server: it is shared.\n\nMore.\n"""\n')
    (root / "shared/lmpool/lua/one.lua").write_text("-- Submit jobs. Then\n-- notify.\n--\n-- KEYS\nreturn 1\n")
    page = layout(root)
    assert "## shared/lmpool/rows/\n\nWhere rows are stored.\n\n| file | content |" in page
    assert "| `cache.py` | The cache on the server: it is shared. |" in page
    assert "| `one.lua` | Submit jobs. |" in page
    assert "__init__.py" not in page


def test_the_parts_are_those_of_the_package() -> None:
    root = Path(__file__).resolve().parents[2]
    assert all((root / part / "lmpool").is_dir() for part in PARTS)
    assert WORKER in modules(root)
    assert PRODUCER in modules(root)
