"""Build the images of docker/Dockerfile with buildah, and have them serve and ask: `make images`.

    python -m tools.images FOLDER [--model FOLDER_OF_A_MODEL] [TARGET ...]

For a machine without a Docker daemon that reaches no registry of images: the image that the Dockerfile begins with is
made by `mmdebstrap` of Debian's packages and put into FOLDER under the very name that FROM has, so the Dockerfile is
built as it is. Everywhere else that name is fetched. Needs root, and `apt-get install buildah mmdebstrap`.

pip in the build reads what `pip config list` says here: as a secret, which is in no layer. Files that this names are
mounted for the time of the build.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.image_proof import prove

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
TARGETS = ("client", "trie", "web", "worker")
MAX_MB = {"client": 350, "worker": 1600}
"""Most megabytes (10^6 bytes) of an image."""

_MIRROR = "http://deb.debian.org/debian"
_SECURITY = "http://deb.debian.org/debian-security"


class Buildah:
    """The `buildah` command with a store of its own: no daemon, no user namespaces.

    Args:
        folder: where images and containers are kept.
    """

    def __init__(self, folder: Path) -> None:
        # Plain folders do everywhere, but copy all files of an image for each step of its making.
        for driver in ("overlay", "vfs"):
            store, run = folder / driver, folder / f"{driver}-run"
            self._storage = ["--root", str(store), "--runroot", str(run), "--storage-driver", driver]
            if subprocess.run(self.command("info"), capture_output=True, check=False).returncode == 0:
                break

    def command(self, *arguments: str) -> list[str]:
        """The command line of one of its commands."""
        return ["buildah", *self._storage, *arguments]

    def __call__(self, *arguments: str, shown: bool = False) -> str:
        """Run one of its commands; returns what it has printed, unless that is shown."""
        done = subprocess.run(
            self.command(*arguments), stdout=None if shown else subprocess.PIPE, text=True, check=True
        )
        return "" if shown else done.stdout.strip()

    def has(self, image: str) -> bool:
        """Whether an image is there."""
        look = self.command("inspect", "--type", "image", image)
        return subprocess.run(look, capture_output=True, check=False).returncode == 0

    def inspect(self, image: str) -> dict[str, Any]:
        """The settings that an image has for containers, as Docker names them."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]
        return found

    def megabytes(self, image: str) -> float:
        """10^6 bytes of an image's files."""
        (found,) = json.loads(self("images", "--json", image))
        number, unit = found["size"].split()
        return float(number) * {"KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of an image, which is removed at the end."""
        name = self("from", image)
        try:
            yield name
        finally:
            self("rm", name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where images are kept")
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; all of them if none is given"
    )
    parser.add_argument("--model", type=Path, help="what the worker serves; without it nothing is started")
    given = parser.parse_args()
    targets = given.targets or TARGETS
    buildah, began = Buildah(given.folder.resolve()), time.monotonic()
    _have_base(buildah)
    for target in targets:
        _build(buildah, target)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    too_large = []
    for target in targets:
        megabytes, most = buildah.megabytes(name_of(target)), MAX_MB.get(target)
        print(f"{name_of(target)}: {megabytes:.0f} MB" + (f" of at most {most}" if most else ""), flush=True)
        if most and megabytes > most:
            too_large.append(target)
    if too_large:
        sys.exit(f"too large: {', '.join(too_large)}")
    if given.model:
        prove(buildah, name_of, given.model.resolve())


def name_of(target: str) -> str:
    """The name of an image of this release."""
    (version,) = re.findall(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    return f"localhost/lmpool-{target}:{version}"


def _have_base(buildah: Buildah) -> None:
    """Make the image that the Dockerfile begins with, if it is not there."""
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    if buildah.has(base):
        return
    suite = base.partition(":")[2].removesuffix("-slim")
    print(f"making {base} of Debian's packages", flush=True)
    with tempfile.TemporaryDirectory(prefix="lmpool") as folder:
        tar = f"{folder}/base.tar"
        sources = [f"deb {_MIRROR} {suite} main", f"deb {_MIRROR} {suite}-updates main"]
        sources.append(f"deb {_SECURITY} {suite}-security main")
        # As the slim images of Debian: neither documentation nor translations.
        options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")]
        options.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        # Else a package that merges /usr comes along, with all of Perl.
        options += ["--include=usr-is-merged", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
        command = ["mmdebstrap", "--quiet", "--variant=minbase", *options, suite, tar, *sources]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"mmdebstrap has ended with {done.returncode}: {done.stderr[-2000:]}")
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, tar, "/")
        buildah("config", "--cmd", "/bin/bash", container)
        buildah("commit", "--quiet", "--rm", container, base)


def _build(buildah: Buildah, target: str) -> None:
    """Build one target; what others have built already is kept."""
    with tempfile.TemporaryDirectory(prefix="lmpool") as folder:
        conf = Path(folder, "pip.conf")
        settings, mounts = _pip_settings()
        conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()), "utf-8")
        volumes = [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]
        buildah(
            "build", "--quiet", "--isolation", "chroot", "--format", "docker", "--layers", "--target", target,
            "--tag", name_of(target), "--file", str(DOCKERFILE), "--secret", f"id=pip_conf,src={conf}", *volumes,
            # Where this machine has torch is for its pip to know.
            "--build-arg", "TORCH_INDEX=", "--build-arg", f"REVISION={_revision()}", str(REPOSITORY),
            shown=True,
        )  # fmt: skip


def _pip_settings() -> tuple[dict[str, str], dict[str, str]]:
    """What pip is told on this machine: names and values; and where files that these name are found in the build."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^(?::env:|global)\.(\S+?)='(.*)'$", told.stdout, re.MULTILINE))
    words = {word for value in settings.values() for word in value.split()}
    # An index in a folder has its files beside it.
    folders = {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")}
    paths = {path for path in folders | {word for word in words if word.startswith("/")} if Path(path).exists()}
    # Not where they are here: packages of Debian write their own files there.
    mounts = {path: f"/mnt{path}" for path in sorted(paths)}
    for name, value in settings.items():
        for path, there in mounts.items():
            value = re.sub(rf"(^|\s|file://){re.escape(path)}(?=/|\s|$)", rf"\g<1>{there}", value)
        settings[name] = value
    return settings, mounts


def _revision() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
