"""Pages of the documentation name existing things, and the design pages are short."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.structure import modules

from lmpool.protocol.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs/design.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FURTHER = sorted((ROOT / "docs/design").glob("*.md"))
# Pages for users: guides, reference and tutorials.
BESIDE = [path for name in ("guides", "reference", "tutorials") for path in sorted((ROOT / "docs" / name).glob("*.md"))]
PAGES = [DESIGN, *FURTHER, CONTRIBUTING]
# Benchmark pages are left out: they name texts in the output of benchmarks.
ALL_PAGES = [
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if not path.name.startswith("benchmarks")),
    *FURTHER,
    *BESIDE,
    CONTRIBUTING,
    ROOT / "README.md",
    ROOT / "docker/redis/README.md",
]
PICTURE = ROOT / "docs/design/architecture.svg"
SOURCE = PICTURE.with_suffix(".dot")
MAX_LINES = {DESIGN: 120, CONTRIBUTING: 120, **dict.fromkeys(FURTHER, 200)}
MAX_COLUMNS = 120
# Max pages in each folder; docs itself may have more, for pages to which links from elsewhere lead.
MAX_PAGES = {"docs": 24, "benchmarks": 12, "design": 12, "guides": 12, "reference": 12, "tutorials": 12}
# Class names of other packages that pages may name.
FOREIGN_NAMES = {"AsyncLM", "AsyncTransformer", "BufferedProtocol", "InprocClient"}
ENTRY_POINTS = {"lmpool.commands", "lmpool.backends"}
SVG = "{http://www.w3.org/2000/svg}"


def named_in(page: Path) -> set[str]:
    """The texts in backticks on a page, without code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES[page]
    # Lines of tables may be longer, because Markdown needs each row of a table on one line.
    assert [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")] == []


def test_the_folder_of_the_pages_is_one_that_one_can_survey() -> None:
    folders = [ROOT / "docs", *(path for path in (ROOT / "docs").iterdir() if path.name in MAX_PAGES)]
    counts = {folder.name: sum(path.name != "__pycache__" for path in folder.iterdir()) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MAX_PAGES[name]} == {}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_on_a_page_exist(page: Path) -> None:
    tops = {path.name for path in ROOT.iterdir()}
    paths = {name for name in named_in(page) if name.partition("/")[0] in tops}
    scripts = {name for name in named_in(page) if re.fullmatch(r"\w+\.lua", name)}
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")))
    assert {name for name in paths if not (ROOT / name).exists()} == set()
    assert scripts <= {path.name for path in ROOT.glob("shared/lmpool/broker/lua/*/*.lua")}
    assert {name for name in links if not (page.parent / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_on_a_page_exist_and_are_named_without_doubt(page: Path) -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    for name in named_in(page):
        if re.fullmatch(r"(\w+/)*test_\w+", name) and not name.startswith("tests/"):
            matching = [path for path in files if f"/{path.with_suffix('')}".endswith(f"/{name}")]
            assert len(matching) == 1, (name, matching)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_and_modules_on_a_page_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    known = modules(ROOT)
    for name in named_in(page):
        if made := re.match(r"make ([a-z-]+)", name):
            assert made[1] in targets
        if re.fullmatch(r"lmpool(\.\w+)+", name) and name not in ENTRY_POINTS:
            assert name in known or name.rpartition(".")[0] in known.keys() - {"lmpool"}, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_classes_on_a_page_are_those_of_the_package(page: Path) -> None:
    defined = {
        node.name
        for path in modules(ROOT).values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    named = {name.partition(".")[0] for name in named_in(page) if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", name)}
    assert named - FOREIGN_NAMES <= defined | {"Connection"}


def test_the_keys_are_those_of_the_code() -> None:
    block = (ROOT / "docs/design/wire.md").read_text("utf-8").partition("```\n")[2].partition("```")[0]
    names = re.findall(r"^[* ] (lmpool:(?:<[^>]*>|\S)+)", block, re.MULTILINE)
    written = {re.sub("<[^>]*>", "X", name) for name in names}
    keys, model = Keys("lmpool"), Keys("lmpool").model("X")
    made = {getattr(model, name) for name in dir(model) if isinstance(getattr(model, name), bytes)} - {model.base}
    made = {key + b"X" if key.endswith(b":") else key for key in made}
    made |= {model.reply("X"), model.adapter_check("X"), model.adapter_load("X"), model.lane("X")}
    made |= {key.replace(b":0", b":X") for key in (model.version_turn(0), model.version_data("X", 0))}
    made |= {
        keys.models(),
        keys.trie_models(),
        keys.loading(),
        keys.worker("X"),
        keys.row("X") + b"X",
        keys.vocabulary("X"),
        keys.token_set(b"X"),
        keys.tokenizer("X"),
        keys.row_token(),
    }
    made |= {keys.weights() + b"X", keys.probe("X", "X")}
    assert written == {key.decode().replace(b"X".hex(), "X") for key in made}


def test_make_lists_its_targets_with_a_sentence_each() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    listed = re.findall(r"^## ([a-z-]+): .{10,}$", makefile, re.MULTILINE)
    phony = re.findall(r"[\w-]+", makefile.partition(".PHONY:")[2].partition("\n\n")[0].replace("$(VLLM_RUNS)", ""))
    # The target `collect`, a step of other targets, has no sentence.
    assert set(listed) == set(phony) - {"collect"}
    assert len(listed) == len(set(listed))


def test_the_makefile_names_existing_tests() -> None:
    targets = ("test-servers", "test-cluster", "test-smoke", "fuzz", "test-vllm", "test-sglang")
    recipes = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {Path(word.partition("::")[0]) for word in recipes.split() if word.startswith("tests/")}
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_hooks_before_a_commit_run_what_lint_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    entries = re.findall(r"entry: \.venv/bin/(.+)\n(?: +args: \[\"(.+)\"\])?", hooks)
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    assert [" ".join(words).strip() for words in entries] == re.findall(r"^\t\$\(BIN\)/(.+)$", recipe, re.MULTILINE)


# The picture of the architecture


def test_the_picture_shows_what_its_source_says() -> None:
    """Compare names and words of the picture and its source, because coordinates differ between Graphviz releases."""
    source = re.sub(r"^\s*//.*$", "", SOURCE.read_text("utf-8"), flags=re.MULTILINE)
    picture = ElementTree.fromstring(PICTURE.read_text("utf-8"))
    titles = {group.findtext(f"{SVG}title") for group in picture.iter(f"{SVG}g") if group.get("class") != "graph"}
    nodes = set(re.findall(r"^\s+(\w+) \[label", source, re.MULTILINE))
    edges = {f"{a}->{b}" for a, b in re.findall(r"(\w+) -> (\w+)", source)}
    clusters = set(re.findall(r"subgraph (\w+)", source))
    assert len(nodes) > 8
    assert titles == nodes | edges | clusters
    words = [line for label in re.findall(r'label="([^"]*)"', source) for line in label.split("\\n")]
    assert sorted(text.text or "" for text in picture.iter(f"{SVG}text")) == sorted(words)


def test_the_picture_says_how_large_it_is() -> None:
    """The picture's size and its view box must agree, because some renderers use the size and others use the box."""
    picture = ElementTree.fromstring(PICTURE.read_text("utf-8"))
    size = [float(picture.attrib[name].removesuffix("pt")) for name in ("width", "height")]
    left, top, *box = map(float, picture.attrib["viewBox"].split())
    assert (left, top) == (0, 0)
    assert size == pytest.approx(box, abs=1)
    assert min(size) > 100


def test_the_picture_can_be_read_on_a_light_and_on_a_dark_page() -> None:
    """The picture has no background; text outside boxes has a tone between black and white, text in boxes is white."""
    picture = ElementTree.fromstring(PICTURE.read_text("utf-8"))
    (graph,) = (group for group in picture.iter(f"{SVG}g") if group.get("class") == "graph")
    invisible = {None, "none", "transparent"}
    assert {shape.get("fill") for shape in graph} <= invisible
    groups = list(graph.iter(f"{SVG}g"))
    boxes = [group for group in groups if group.get("class") == "node"]
    assert {text.get("fill") for group in boxes for text in group.iter(f"{SVG}text")} == {"white"}
    others = [shape for group in groups if group.get("class") in ("edge", "cluster") for shape in group.iter()]
    assert {shape.get(name) for shape in others for name in ("fill", "stroke")} - invisible == {"#7a818c"}
