"""Makes checkouts of other releases: of a tag or a commit, and of a release that comes after this one."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.faults.chaos.fleet import PARTS, environment_of

ROOT = Path(__file__).parents[2]
LAST, NEXT = "last", "next"
"""Names of the newest tagged release, and of this checkout with the changes of `_PLANTED`."""

_BEFORE_TAGS = "f3ef2a02"
"""The commit before this package was added: the last release, as long as no release has a tag."""

_COPIED = (*PARTS, "pyproject.toml")
_ENCODER = r'''
class _PlantedEncoder:
    """Adds a field to each message except queries, which must not have unknown fields."""

    def encode(self, value: Any) -> bytes:
        data = msgspec.msgpack.encode(value)
        tag = value.__struct_config__.tag if isinstance(value, Message) else None
        if not isinstance(tag, int) and not isinstance(value, tuple):
            return data
        more = [""] * (type(value) is Job) + ["planted"]  # The field of a trace comes before new fields.
        assert data[0] >> 4 == 9 and (data[0] & 15) + len(more) < 16
        return bytes([data[0] + len(more)]) + data[1:] + b"".join(map(msgspec.msgpack.encode, more))


_ENCODER = _PlantedEncoder()
'''
_PLANTED = [
    ("shared/lmpool/protocol/job.py", r"^WIRE_VERSION = (\d+)$", r"WIRE_VERSION = \1 + 1"),
    ("shared/lmpool/protocol/job.py", r"^_ENCODER = .*\n", _ENCODER),
    ("shared/lmpool/protocol/model_info.py", r"\{_VERSION_FIELD: ", r'{"planted": [1], _VERSION_FIELD: '),
    ("shared/lmpool/rows/shared_memory.py", r'b"LMPSHM", (\d+)$', r'b"LMPSHM", \1 + 1'),
    ("workers/lmpool/workers/membership/heartbeat.py", r'"model": info.name,', r'"planted": 1, "model": info.name,'),
    ("shared/lmpool/broker/lua/parts/lanes.lua", r"'\*', \.\.\.\)", r"'*', 'planted', 1, ...)"),
    ("shared/lmpool/broker/lua/parts/notify.lua", r"'\*', \.\.\.\)", r"'*', 'planted', 1, ...)"),
    ("shared/lmpool/broker/lua/queue/finish.lua", r"'\*', 'd',", r"'*', 'planted', 1, 'd',"),
    ("shared/lmpool/broker/lua/queue/submit.lua", r"'\*', 'm',", r"'*', 'planted', 1, 'm',"),
]
"""The changes of the next release: a file, a pattern and its replacement. Each message gets a field that this release
does not know, and the versions of messages and of the layout of shared memory are raised by one."""


def make_checkout(name: str, folder: Path) -> Path:
    """Write another release into a folder, and return the folder.

    Args:
        name: `LAST`, `NEXT`, or a tag or commit of this repository.
        folder: the folder to create.
    """
    if name == NEXT:
        _copy(folder)
        for file, pattern, replacement in _PLANTED:
            path = folder / file
            text, changes = re.subn(pattern, replacement, path.read_text("utf-8"), flags=re.MULTILINE)
            assert changes, f"{file} has no {pattern}: adapt the planted change"
            path.write_text(text, "utf-8")
    else:
        _extract(last_release() if name == LAST else name, folder)
    _check(folder)
    return folder


def last_release() -> str:
    """The newest tag of a release before this commit, or a commit before the first tag; "" if the clone has neither.

    The tag of this commit does not count. After the first tag, `_BEFORE_TAGS` is unused: remove it then.
    """
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    if tag.returncode == 0:
        return tag.stdout.decode().strip()
    return "" if _git("cat-file", "-e", f"{_BEFORE_TAGS}^{{commit}}").returncode else _BEFORE_TAGS


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False, timeout=60)


def _extract(commit: str, folder: Path) -> None:
    archive = _git("archive", "--format=tar", commit, *_COPIED)
    if archive.returncode:
        raise ValueError(f"{commit!r} is no commit of this repository: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def _copy(folder: Path) -> None:
    """Copy the working tree, so that a run tests changes that are not committed yet."""
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".cache", "*.pyc"))
        else:
            shutil.copy2(source, target)


def _check(folder: Path) -> None:
    """Check that processes of the checkout use the modules of all its parts, and not those of this checkout."""
    names = "lmpool.protocol.job", "lmpool.producer.producer", "lmpool.workers.worker"
    script = f"import importlib; [print(importlib.import_module(name).__file__) for name in {names}]"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment_of(folder), capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    assert all(Path(path).is_relative_to(folder) for path in done.stdout.splitlines()), done.stdout
