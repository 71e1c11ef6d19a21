"""Build the documentation's site: `make docs`.

The pages are those of `docs/`, and some from elsewhere, as `PAGES` says; their links are made to lead from page to
page. A worker with a real model answers what the tutorials ask. Warnings are errors, and so is a page that no
navigation names, a public name that the reference lacks, or anything in a page that a browser would fetch elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

from lmpool.errors import LMPoolError
from lmpool.producer import SyncProducer
from tools import command_line, structure

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/redis/README.md": "redis.md",
    "examples/surprise.ipynb": "tutorials/surprise.ipynb",
}
"""Pages from elsewhere: path in the checkout -> in the site. What `docs/index.md` says stands behind the README."""
PUBLIC = ("lmpool.producer", "lmpool.producer.genlm", "lmpool.batch", "lmpool.testing", "lmpool.errors")
"""Modules whose public names the reference has."""
GENERATED: dict[str, Callable[[], str]] = {
    "% The site lists all commands here.": command_line.page,
    "% The site lists all files here.": lambda: structure.layout(ROOT),
}
"""Comment in a page -> the text that replaces it."""
START_LIMIT_S = 900.0
"""Seconds in which the worker must serve: a busy machine needed more than 120. One that ends is noticed at once."""

POLL_S = 5.0
"""Seconds of one wait for the model, after which the program that serves it is checked."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ELSEWHERE = re.compile(r"\s*(?:\w+:)?//")
_IN_STYLES = re.compile(r"(?:url\(|@import\s)\s*[\"']?((?:\w+:)?//[^\"')\s]+)")
# What browsers fetch by themselves, and by which attribute they name it.
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data",
            "embed": "src", "video": "src", "audio": "src"}  # fmt: skip


def staged(path: Path) -> Path | None:
    """Where a file of the checkout is in the site, relative to its sources; None if it is no page of it."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return Path(PAGES[name])
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs")
    return None


def relinked(text: str, page: Path, source: Path) -> str:
    """The text of a page, its links made those of the site.

    Args:
        text: Markdown.
        page: where it comes from, in the checkout.
        source: the folder where the sources of the site are put.
    """
    place = staged(page)
    assert place is not None
    folder = (source / place).parent

    def target(link: re.Match[str]) -> str:
        words, path, anchor = link.groups(default="")
        if re.match(r"[a-z]+:", path):
            return link[0]
        found = (page.parent / path).resolve()
        if found.is_dir():  # Nothing that a site could show.
            return words
        inside = staged(found)
        there = source / inside if inside is not None else found
        # A page has anchors, a file that is downloaded has none.
        return f"[{words}]({os.path.relpath(there, folder)}{anchor if inside is not None else ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else _LINK.sub(target, part) for index, part in enumerate(parts))


def stage(source: Path) -> None:
    """Put the sources of the site together in a folder, anew."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("__pycache__", "*.dot"))
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]:
        place = staged(page)
        assert place is not None
        there = source / place
        there.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text("utf-8")
        if page.suffix == ".md":
            text = relinked(text, page, source)
        for comment, generate in GENERATED.items():
            text = text.replace(comment, generate()) if comment in text else text
        if page == ROOT / "README.md":
            text = f"{text}\n{(ROOT / 'docs/index.md').read_text('utf-8')}"
        there.write_text(text, "utf-8")


class _Fetched(HTMLParser):
    """Collects what a page has a browser fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at the attribute that names it, and at styles."""
        named = dict(attrs)
        if tag == "link" and named.get("rel") in ("canonical", "next", "prev"):
            return
        address = named.get(_FETCHED.get(tag, "")) or ""
        if _ELSEWHERE.match(address):
            self.addresses.append(address)


def fetched_elsewhere(text: str) -> list[str]:
    """Addresses of other hosts from which a browser would fetch something for this page or style sheet."""
    parser = _Fetched()
    parser.feed(text)
    return [*parser.addresses, *_IN_STYLES.findall(text)]


def documented(site: Path) -> set[str]:
    """The names of Python that the site's inventory has."""
    _, _, body = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    lines = zlib.decompress(body).decode().splitlines()
    return {line.split(" ")[0] for line in lines if " py:" in line}


def public_names() -> Iterator[str]:
    """Names that users import."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        own = [public for public, kind in vars(module).items() if getattr(kind, "__module__", "") == name]
        yield from (f"{name}.{public}" for public in getattr(module, "__all__", own) if public[0] != "_")


def faults(site: Path) -> list[str]:
    """What is wrong with a site that is built, a sentence each."""
    found = [
        f"{path.relative_to(site)}: a browser would fetch {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for address in fetched_elsewhere(path.read_text("utf-8"))
    ]
    found += [
        f"{path.relative_to(site)}: it has a path of this machine, below {place}"
        for path in sorted(site.rglob("*.html"))
        for place in (f"{ROOT}/", f"{Path.home()}/", f"{sys.prefix}/")
        if place in path.read_text("utf-8")
    ]
    return found + [f"{name} is missing in docs/reference" for name in set(public_names()) - documented(site)]


def await_model(up: subprocess.Popen[bytes]) -> None:
    """Wait until the model is served.

    Raises:
        LMPoolError: the program that serves it has ended, or needs more than `START_LIMIT_S`.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            SyncProducer("smollm2", when_absent="wait", timeout=POLL_S).close()
            return
        except LMPoolError:
            if up.poll() is not None or time.monotonic() > deadline:
                raise


@contextmanager
def served(model: Path) -> Iterator[None]:
    """A pool of this program's own that serves a model as `smollm2`, and that programs find by themselves."""
    with tempfile.TemporaryDirectory(prefix="lmpool-site-") as folder:
        os.environ["LMPOOL_RUNTIME_DIR"] = os.environ["LMPOOL_SHM_DIR"] = folder
        os.environ.pop("LMPOOL_REDIS_URL", None)
        log = Path(folder, "up.log")
        with log.open("wb") as out:
            command = [sys.executable, "-m", "lmpool", "up", str(model), "--name", "smollm2"]
            up = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            await_model(up)
            yield
        except LMPoolError as error:
            sys.exit(f"lmpool up did not come up: {error}\n{log.read_text()}")
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)


def build(source: Path, site: Path, *options: str) -> int:
    """Have Sphinx build a site anew; returns its exit code, which is not 0 after any warning."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", *options, str(source), str(site)]
    with tempfile.TemporaryDirectory(prefix="lmpool-site-") as folder:
        # Notebooks see no settings of whoever builds, find `lmpool`, and show no warnings of libraries.
        settings = Path(folder, "profile_default")
        settings.mkdir()
        (settings / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "IPYTHONDIR": folder, "PATH": path, "PYTHONWARNINGS": "ignore"}
        return subprocess.run(command, check=False, env=environment).returncode


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="the folder that becomes the site")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2; without it tutorials are not executed")
    given = parser.parse_args()
    site: Path = given.site.resolve()
    source = site.with_name(f"{site.name}-source")
    stage(source)
    if given.model is None:
        code = build(source, site, "-D", "nb_execution_mode=off")
    else:
        with served(given.model.resolve()):
            code = build(source, site)
    if code:
        sys.exit(code)
    if found := faults(site):
        sys.exit("\n".join(found))
    print(f"file://{site}/index.html")


if __name__ == "__main__":
    main()
