"""What `tools.structure` counts, on a tiny package of the test's own."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
from tools.structure import (
    PARTS,
    PRODUCER,
    WORKER,
    Journey,
    circles,
    flat_lists,
    import_graph,
    longest_chain,
    longest_list,
    modules,
    prompt_types,
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


def test_a_list_has_modules_scripts_and_folders_and_no_entry_files(root: Path) -> None:
    assert flat_lists(root) == {
        "shared/lmpool": ["keys.py", "lua", "rows"],
        "shared/lmpool/lua": ["one.lua", "two.lua"],
        "shared/lmpool/rows": ["cache.py"],
        "producer/lmpool": ["producer"],
        "producer/lmpool/producer": ["low.py", "middle.py", "top.py"],
        "workers/lmpool": ["workers"],
        "workers/lmpool/workers": ["worker.py"],
    }
    (root / "shared/lmpool/errors.py").touch()
    assert longest_list(root) == ("shared/lmpool", ["errors.py", "keys.py", "lua", "rows"])


def test_a_name_that_is_no_module_is_an_import_of_the_package(root: Path) -> None:
    graph = import_graph(root)
    assert graph["lmpool.workers.worker"] == {"lmpool.keys", "lmpool", "lmpool.producer"}
    assert graph["lmpool.__main__"] == {"lmpool.keys"}
    assert graph["lmpool.rows"] == {"lmpool.rows.cache"}
    assert graph["lmpool.keys"] == set()


def test_relative_imports_are_imports(root: Path) -> None:
    assert import_graph(root)["lmpool.producer.top"] == {"lmpool.producer.middle", "lmpool.producer.low"}


def test_imports_in_functions_and_for_types_count_where_they_are_to(root: Path) -> None:
    low, middle = "lmpool.producer.low", "lmpool.producer.middle"
    assert import_graph(root)[middle] == {low}
    assert import_graph(root, in_functions=False)[middle] == set()
    assert import_graph(root)[low] == {"lmpool.rows", "lmpool.producer.top"}
    assert import_graph(root, for_types=False)[low] == {"lmpool.rows"}


def test_circles_are_found_however_long(root: Path) -> None:
    three = ["lmpool.producer.low", "lmpool.producer.middle", "lmpool.producer.top"]
    two = ["lmpool.rows", "lmpool.rows.cache"]
    assert circles(import_graph(root)) == [three, two]
    assert circles(import_graph(root, for_types=False)) == [two]


def test_what_leads_to_a_circle_is_not_in_it() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == [["b", "c"]]
    assert longest_chain(graph, "lmpool") == []


def test_a_chain_stays_in_its_package_and_a_circle_is_one_link(root: Path) -> None:
    loads = import_graph(root, for_types=False)
    names = ["lmpool.producer", "lmpool.producer.top", "lmpool.producer.middle", "lmpool.producer.low"]
    assert longest_chain(loads, "lmpool.producer") == names
    assert longest_chain(loads, "lmpool.producer", "lmpool.producer.middle") == names[2:]
    assert len(longest_chain(import_graph(root), "lmpool.producer")) == 2
    assert longest_chain(loads, "lmpool.prod") == []


def test_a_request_enters_what_all_of_its_kind_enter() -> None:
    journey = Journey([["beat", "a", "b", "b"], ["b", "a"], ["b", "b", "a"]])
    assert journey.files == ["b", "a"]
    assert journey.calls == 2


def test_the_types_of_a_prompt_have_its_ids_its_digest_or_one_that_has_them() -> None:
    prompt = namedtuple("prompt", "ids digest model")
    job = namedtuple("job", "digest entry")
    request, queue, other = (type(name, (), {}) for name in ("Request", "Queue", "Other"))
    model, digest, encoded = b"m" * 32, b"d" * 16, bytes([7, 0, 0, 0, 1, 1, 0, 0])
    asked, held, stranger, waiting = prompt(encoded, digest, model), request(), other(), queue()
    held.prompt, stranger.model, waiting.all = asked, model, [asked]
    objects = [asked, held, stranger, waiting, job(digest, b"1-0"), prompt([7], b"e" * 16, model)]
    types, beside = prompt_types(objects, [7, 257], foreign={model})
    assert types == {prompt, job, request}
    assert beside == {encoded, digest, model}


def test_the_parts_are_those_of_the_package() -> None:
    root = Path(__file__).resolve().parents[2]
    assert all((root / part / "lmpool").is_dir() for part in PARTS)
    assert WORKER in modules(root)
    assert PRODUCER in modules(root)
