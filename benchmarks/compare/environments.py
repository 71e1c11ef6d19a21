"""Virtual environments of commits, each built once in `.cache/compare`, with the same versions of other packages."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.harness.processes import REPOSITORY, BenchmarkError, run
from benchmarks.harness.report import current_commit

_FOLDER = REPOSITORY / ".cache" / "compare"
_STAMP = "installed.json"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with lmpool of one commit: a description of the commit, and the path of the interpreter."""

    commit: str
    python: str

    @classmethod
    def of(cls, commit: str, extra: str) -> Environment:
        """The environment of a commit; build it if it is missing.

        Args:
            commit: any name that git accepts; "" for the working tree with its changes.
            extra: the extra of lmpool that the workers need.

        Raises:
            BenchmarkError: the commit does not exist, or the installation failed.
        """
        if not commit:
            folder = _FOLDER / f"working-tree-{extra}"
            return cls(f"the working tree at {current_commit()}", _installed(REPOSITORY, folder, extra))
        full = resolve(commit)
        source = _FOLDER / full / "source"
        if not source.exists():
            _check_out(full, source)
        title = _git("show", "--no-patch", "--format=%h (%cs, %s)", full).strip()
        return cls(title, _installed(source, _FOLDER / full / extra, extra))

    @classmethod
    def existing(cls, python: str) -> Environment:
        """An existing environment.

        Raises:
            BenchmarkError: the interpreter or the command `lmpool` next to it does not exist.
        """
        # Do not resolve the symbolic link: Python finds the environment only by the path inside the environment.
        environment = cls(f"lmpool of {python}", str(Path(python).absolute()))
        for program in (environment.python, environment.command):
            if not Path(program).exists():
                raise BenchmarkError(f"there is no {program}")
        return environment

    @property
    def command(self) -> str:
        """The command `lmpool` of this environment."""
        return str(Path(self.python).with_name("lmpool"))


def resolve(commit: str) -> str:
    """The full hash of a commit; BenchmarkError if this repository does not have it."""
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").strip()
    except BenchmarkError as error:
        # Suggest a reason if git prints none, for example for a commit that does not exist.
        why = str(error).partition("failed:\n")[2] or "`git log` lists the commits; a shallow clone has few"
        raise BenchmarkError(f"{REPOSITORY} has no commit {commit!r}: {why}") from None


def _check_out(commit: str, source: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        raise BenchmarkError(f"git archive {commit} failed: {archive.stderr.decode(errors='replace').strip()}")
    partly = source.with_name("unpacking")
    shutil.rmtree(partly, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(partly, filter="data")
    partly.rename(source)


def _installed(source: Path, folder: Path, extra: str) -> str:
    """Install `source` into a new environment, with the package versions of the current one; return its interpreter."""
    pins = _pins()
    stamp, wanted = folder / _STAMP, json.dumps([pins, (source / "pyproject.toml").read_text(), sys.version])
    python = str(folder / "bin" / "python")
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {source} into {folder} (once; a minute)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(folder))
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--constraint", str(constraints), "--editable", f"{source}[{extra}]")
    stamp.write_text(wanted)
    return python


def _pins() -> list[str]:
    """The packages of this environment as constraints for pip, without local version labels such as +cpu."""
    versions = {re.sub(r"[-_.]+", "-", package.name).lower(): package.version for package in distributions()}
    return sorted(f"{name}=={version.partition('+')[0]}" for name, version in versions.items() if name != "lmpool")


def _git(*arguments: str) -> str:
    return run("git", "-C", str(REPOSITORY), *arguments)
