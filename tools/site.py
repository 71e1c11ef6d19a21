"""Build the documentation site: `make docs`.

The pages are the files of `docs/` and the files in `PAGES`. The program adapts the pages' links to the site. A worker
with a real model serves the tutorials. The build fails on a warning, a page that the navigation lacks, a public name
that the reference lacks, and a resource that a browser would fetch from another host.
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
    "SECURITY.md": "security.md",
    "docker/redis/README.md": "redis.md",
    "examples/surprise.ipynb": "tutorials/surprise.ipynb",
}
"""Pages outside `docs/`: path in the checkout -> path in the site. `docs/index.md` is appended to the README."""
PUBLIC = (
    "lmpool.producer",
    "lmpool.producer.genlm",
    "lmpool.batch",
    "lmpool.distill",
    "lmpool.testing",
    "lmpool.errors",
)
"""Modules whose public names the reference must have."""
GENERATED: dict[str, Callable[[], str]] = {
    "% The site lists all commands here.": command_line.page,
    "% The site lists all files here.": lambda: structure.layout(ROOT),
}
"""Comment in a page -> the text that replaces it."""
START_LIMIT_S = 900.0
"""Max seconds until the worker serves the model: a busy machine needed more than 120 s."""

POLL_S = 5.0
"""Seconds between two checks that the worker still runs while it loads the model."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ELSEWHERE = re.compile(r"\s*(?:\w+:)?//")
_IN_STYLES = re.compile(r"(?:url\(|@import\s)\s*[\"']?((?:\w+:)?//[^\"')\s]+)")
# Elements that make a browser fetch a resource, and the attribute with its address.
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data",
            "embed": "src", "video": "src", "audio": "src"}  # fmt: skip


def staged(path: Path) -> Path | None:
    """The path of a file of the checkout in the site's sources, or None if the file is not a page of the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return Path(PAGES[name])
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs")
    return None


def relinked(text: str, page: Path, source: Path) -> str:
    """The text of a page with the links of the site.

    Args:
        text: Markdown.
        page: path of the page in the checkout.
        source: the folder of the site's sources.
    """
    target_path = staged(page)
    assert target_path is not None
    folder = (source / target_path).parent

    def target(link: re.Match[str]) -> str:
        words, path, anchor = link.groups(default="")
        if re.match(r"[a-z]+:", path):
            return link[0]
        found = (page.parent / path).resolve()
        if found.is_dir():  # Remove the link: the site has no page for a folder.
            return words
        inside = staged(found)
        there = source / inside if inside is not None else found
        # Keep the anchor of a link to a page; a link to a downloaded file has no anchor.
        return f"[{words}]({os.path.relpath(there, folder)}{anchor if inside is not None else ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else _LINK.sub(target, part) for index, part in enumerate(parts))


def stage(source: Path) -> None:
    """Write the sources of the site into a new folder."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("__pycache__", "*.dot"))
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]:
        path = staged(page)
        assert path is not None
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text("utf-8")
        if page.suffix == ".md":
            text = relinked(text, page, source)
        for comment, generate in GENERATED.items():
            text = text.replace(comment, generate()) if comment in text else text
        if page == ROOT / "README.md":
            text = f"{text}\n{(ROOT / 'docs/index.md').read_text('utf-8')}"
        target.write_text(text, "utf-8")


class _Fetched(HTMLParser):
    """Collects the addresses on other hosts that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address that a browser would fetch for an element."""
        named = dict(attrs)
        if tag == "link" and named.get("rel") in ("canonical", "next", "prev"):
            return
        address = named.get(_FETCHED.get(tag, "")) or ""
        if _ELSEWHERE.match(address):
            self.addresses.append(address)


def fetched_elsewhere(text: str) -> list[str]:
    """Addresses on other hosts that a browser would fetch for this page or style sheet."""
    parser = _Fetched()
    parser.feed(text)
    return [*parser.addresses, *_IN_STYLES.findall(text)]


def documented(site: Path) -> set[str]:
    """The Python names in the site's inventory."""
    _, _, body = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    lines = zlib.decompress(body).decode().splitlines()
    return {line.split(" ")[0] for line in lines if " py:" in line}


def public_names() -> Iterator[str]:
    """The public names that users import."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        own = [public for public, kind in vars(module).items() if getattr(kind, "__module__", "") == name]
        yield from (f"{name}.{public}" for public in getattr(module, "__all__", own) if public[0] != "_")


def faults(site: Path) -> list[str]:
    """The faults of a built site, one sentence each."""
    found = [
        f"{path.relative_to(site)}: a browser would fetch {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for address in fetched_elsewhere(path.read_text("utf-8"))
    ]
    found += [
        f"{path.relative_to(site)}: the page contains a path of this machine, below {folder}"
        for path in sorted(site.rglob("*.html"))
        for folder in (f"{ROOT}/", f"{Path.home()}/", f"{sys.prefix}/")
        if folder in path.read_text("utf-8")
    ]
    return found + [f"{name} is missing in docs/reference" for name in set(public_names()) - documented(site)]


def await_model(up: subprocess.Popen[bytes]) -> None:
    """Wait until the model is served.

    Raises:
        LMPoolError: the worker that serves the model ended, or is not ready after `START_LIMIT_S`.
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
    """Run a pool that serves a model as `smollm2`, and that programs find without settings."""
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
            sys.exit(f"lmpool up failed: {error}\n{log.read_text()}")
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)


def build(source: Path, site: Path, *options: str) -> int:
    """Build a site with Sphinx into a new folder, and return the exit code, which is not 0 after a warning."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", *options, str(source), str(site)]
    with tempfile.TemporaryDirectory(prefix="lmpool-site-") as folder:
        # Make notebooks ignore the user's IPython settings, find `lmpool` in PATH, and hide warnings of libraries.
        settings = Path(folder, "profile_default")
        settings.mkdir()
        (settings / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "IPYTHONDIR": folder, "PATH": path, "PYTHONWARNINGS": "ignore"}
        return subprocess.run(command, check=False, env=environment).returncode


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2; without it the tutorials do not run")
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
