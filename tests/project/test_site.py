"""The build of the documentation's site reports errors, and its reference matches the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from tools import command_line, site

from lmpool.errors import LMPoolError

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def test_a_page_that_no_navigation_names_ends_the_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, built = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    shutil.copy(ROOT / "docs/conf.py", source)
    (source / "index.md").write_text("# Start\n\n```{toctree}\nknown\n```\n")
    (source / "known.md").write_text("# Known\n\n`code`, and [back](index.md#start)\n")
    assert site.build(source, built) == 0
    faults = site.faults(built)
    assert "lmpool.producer.Producer is missing in docs/reference" in faults
    assert [fault for fault in faults if "fetch" in fault] == []

    (source / "lost.md").write_text("# Lost\n\n[nowhere](gone.md)\n")
    assert site.build(source, built) != 0
    err = capfd.readouterr().err
    assert "lost.md: WARNING: document isn't included in any toctree" in err
    assert "'gone.md'" in err


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', ["//fonts.example/a.css"]),
        ("<style>@import 'http://a.example/x.css'</style>", ["http://a.example/x.css"]),
        ("src: url(https://a.example/f.woff2) format(woff2)", ["https://a.example/f.woff2"]),
        ('<img src="_images/a.svg"><a href="https://example.org">read on</a>', []),
        ('<svg xmlns="http://www.w3.org/2000/svg"><style>a{fill:url(#b)}</style></svg>', []),
    ],
)
def test_links_to_other_hosts_are_found(text: str, addresses: list[str]) -> None:
    assert site.fetched_elsewhere(text) == addresses


def test_a_worker_that_ends_is_not_waited_for_and_a_slow_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LMPOOL_RUNTIME_DIR", "LMPOOL_SHM_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("LMPOOL_REDIS_URL", raising=False)
    monkeypatch.setattr(site, "POLL_S", 0.05)
    with subprocess.Popen(["sleep", "600"]) as up:
        ending = threading.Timer(0.5, up.kill)
        ending.start()
        with pytest.raises(LMPoolError):
            site.await_model(up)
        assert up.poll() is not None, "waited as long as it ran"
        ending.join()


def test_the_site_is_built_without_test_dependencies() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^docs: \$\(DOCS_INSTALLED\) \$\(SMOLLM2\)$", makefile, re.MULTILINE)
    assert "$(PIP_INSTALL) -e '.[docs]'" in makefile.partition("\n$(DOCS_INSTALLED):")[2].partition("\n\n")[0]


def test_links_lead_from_page_to_page_wherever_a_page_comes_from(tmp_path: Path) -> None:
    text = "[a](docs/bulk.md#what-goes-in) ![b](docs/design/architecture.svg) [`c[0]`](CONTRIBUTING.md) [d](examples)"
    linked = site.relinked(f"{text}\n```\n[e](docs/bulk.md)\n```\n", ROOT / "README.md", tmp_path)
    assert linked.splitlines()[0] == (
        "[a](bulk.md#what-goes-in) ![b](design/architecture.svg) [`c[0]`](contributing.md) d"
    )
    assert linked.splitlines()[2] == "[e](docs/bulk.md)"
    back = site.relinked("[start](../../README.md) [out](https://x.y/z)", REFERENCE / "producer.md", tmp_path)
    assert back == "[start](../index.md) [out](https://x.y/z)"


def test_the_site_has_every_page_of_the_documentation_and_the_commands(tmp_path: Path) -> None:
    site.stage(tmp_path / "source")
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(tmp_path / "source") for path in (tmp_path / "source").rglob("*.md")} > pages
    assert "# lmpool\n" in (tmp_path / "source/index.md").read_text("utf-8")
    assert "## lmpool dead retry\n" in (tmp_path / "source/reference/command-line.md").read_text("utf-8")


def test_the_reference_of_the_command_line_has_every_option() -> None:
    page = command_line.page()
    rows = set(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    named = {name for row in rows for name in re.findall(r"`(--?[a-z][a-z-]*)`", row)}
    commands = dict(command_line.all_commands())
    assert {"lmpool up", "lmpool batch run", "lmpool trie show"} <= commands.keys()
    for words, command in commands.items():
        assert f"\n## {words}\n" in f"\n{page}"
        assert {name for param in command_line.options_of(command) for name in param.opts} <= named, words
    assert "| `--lease-s` float | Seconds without" in page
    assert "| `--wait`, `--no-wait` | Wait up to" in page


def test_every_environment_variable_is_explained() -> None:
    page = (REFERENCE / "environment.md").read_text("utf-8")
    explained = set(re.findall(r"`(LMPOOL_[A-Z0-9_]+)`", page))
    folders = ("shared", "producer", "workers", "testing", "tests", "benchmarks", "tools", "examples", "docker", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path.read_text("utf-8", "ignore") for path in (*files, ROOT / "Makefile") if path.suffix != ".pyc"]
    read = {name for text in texts for name in re.findall(r"\bLMPOOL_[A-Z0-9_]*[A-Z0-9]\b", text)}
    of_compose = set(
        re.findall(r"^#? ?(LMPOOL_[A-Z0-9_]+)=", (ROOT / "docker/.env.example").read_text("utf-8"), re.MULTILINE)
    )
    assert explained | of_compose == read


def test_every_command_line_on_a_page_names_a_command_and_its_options() -> None:
    commands = {words: command_line.options_of(command) for words, command in command_line.all_commands()}
    known = {words: {name for param in options for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
             for words, options in commands.items()}  # fmt: skip
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "docker/redis/README.md"]
    seen, wrong = 0, list[tuple[str, str, object]]()
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        code = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        inline = re.findall(r"`(lmpool [^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
        for line in [*"\n".join(code).splitlines(), *inline]:
            for given in re.findall(r"(?:^|[\s/])(?<!namespace )lmpool ([a-z][^#|;&>]*)", line):
                words, options = given.split(), set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", given))
                names = [f"lmpool {' '.join(words[:count])}" for count in (2, 1)]
                command = next((name for name in names if name in known), None)
                groups = {name.rpartition(" ")[0] for name in known}
                if command is None and (options or names[1] not in groups):
                    wrong.append((page.name, given, "no command"))
                elif command is not None and options - known[command]:
                    wrong.append((page.name, given, options - known[command]))
                seen += 1
    assert wrong == []
    assert seen > 100
