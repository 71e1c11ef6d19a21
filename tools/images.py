"""Build the images of docker/Dockerfile with buildah, start them, and send requests: `make images`.

    python -m tools.images FOLDER [--model FOLDER_OF_A_MODEL] [TARGET ...]

The command needs neither a Docker daemon nor access to an image registry. `mmdebstrap` builds the base image from
Debian's packages; the program stores it in FOLDER under the name in FROM, so the Dockerfile needs no change. Run the
command as root, after `apt-get install buildah mmdebstrap`.

pip in the build uses the settings of `pip config list` on this machine. The build receives them as a secret, which no
layer contains, and mounts the files that they name.
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
"""Max megabytes (10^6 bytes) of an image."""

_MIRROR = "http://deb.debian.org/debian"
_SECURITY = "http://deb.debian.org/debian-security"


class Buildah:
    """The `buildah` command with images and containers in `folder`: no daemon, no user namespaces."""

    def __init__(self, folder: Path) -> None:
        # Prefer the storage driver overlay: vfs works everywhere, but copies all files of an image in each build step.
        for driver in ("overlay", "vfs"):
            store, run = folder / driver, folder / f"{driver}-run"
            self._storage = ["--root", str(store), "--runroot", str(run), "--storage-driver", driver]
            if subprocess.run(self.command("info"), capture_output=True, check=False).returncode == 0:
                break

    def command(self, *arguments: str) -> list[str]:
        """The command line of a buildah command."""
        return ["buildah", *self._storage, *arguments]

    def __call__(self, *arguments: str, shown: bool = False) -> str:
        """Run a buildah command and return its output, or print the output if `shown`."""
        done = subprocess.run(
            self.command(*arguments), stdout=None if shown else subprocess.PIPE, text=True, check=True
        )
        return "" if shown else done.stdout.strip()

    def has(self, image: str) -> bool:
        """Whether an image exists."""
        command = self.command("inspect", "--type", "image", image)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def inspect(self, image: str) -> dict[str, Any]:
        """The container settings of an image, with Docker's names."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]
        return found

    def megabytes(self, image: str) -> float:
        """Size of an image in megabytes (10^6 bytes)."""
        (found,) = json.loads(self("images", "--json", image))
        number, unit = found["size"].split()
        return float(number) * {"KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of an image; the context manager removes it."""
        name = self("from", image)
        try:
            yield name
        finally:
            self("rm", name)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the images")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"choose from {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--model", type=Path, help="model of the worker; without it no image is started")
    given = parser.parse_args()
    targets = given.targets or TARGETS
    buildah, began = Buildah(given.folder.resolve()), time.monotonic()
    _have_base(buildah)
    for target in targets:
        _build(buildah, target)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    too_large = []
    for target in targets:
        megabytes, limit = buildah.megabytes(name_of(target)), MAX_MB.get(target)
        print(f"{name_of(target)}: {megabytes:.0f} MB" + (f" of at most {limit}" if limit else ""), flush=True)
        if limit and megabytes > limit:
            too_large.append(target)
    if too_large:
        sys.exit(f"too large: {', '.join(too_large)}")
    if given.model:
        prove(buildah, name_of, given.model.resolve())


def name_of(target: str) -> str:
    """The name of an image, with the version of this checkout."""
    (version,) = re.findall(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    return f"localhost/lmpool-{target}:{version}"


def _have_base(buildah: Buildah) -> None:
    """Build the base image of the Dockerfile if it is missing."""
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    if buildah.has(base):
        return
    suite = base.partition(":")[2].removesuffix("-slim")
    print(f"building {base} from Debian's packages", flush=True)
    with tempfile.TemporaryDirectory(prefix="lmpool") as folder:
        tar = f"{folder}/base.tar"
        sources = [f"deb {_MIRROR} {suite} main", f"deb {_MIRROR} {suite}-updates main"]
        sources.append(f"deb {_SECURITY} {suite}-security main")
        # As in Debian's slim images, omit documentation and translations.
        options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")]
        options.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        # Avoid the package usrmerge, which requires all of Perl.
        options += ["--include=usr-is-merged", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
        command = ["mmdebstrap", "--quiet", "--variant=minbase", *options, suite, tar, *sources]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"mmdebstrap ended with {done.returncode}: {done.stderr[-2000:]}")
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, tar, "/")
        buildah("config", "--cmd", "/bin/bash", container)
        buildah("commit", "--quiet", "--rm", container, base)


def _build(buildah: Buildah, target: str) -> None:
    """Build one target; buildah reuses layers of other targets."""
    with tempfile.TemporaryDirectory(prefix="lmpool") as folder:
        conf = Path(folder, "pip.conf")
        settings, mounts = _pip_settings()
        conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()), "utf-8")
        volumes = [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]
        buildah(
            "build", "--quiet", "--isolation", "chroot", "--format", "docker", "--layers", "--target", target,
            "--tag", name_of(target), "--file", str(DOCKERFILE), "--secret", f"id=pip_conf,src={conf}", *volumes,
            # Pass no package index for torch, because the pip settings of this machine name the indices.
            "--build-arg", "TORCH_INDEX=", "--build-arg", f"REVISION={_revision()}", str(REPOSITORY),
            shown=True,
        )  # fmt: skip


def _pip_settings() -> tuple[dict[str, str], dict[str, str]]:
    """The pip settings of this machine, adapted to the build, and the mounts: path here -> path in the build."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^(?::env:|global)\.(\S+?)='(.*)'$", listed.stdout, re.MULTILINE))
    words = {word for value in settings.values() for word in value.split()}
    # The packages of a local index lie next to the index, so mount its parent folder.
    folders = {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")}
    paths = {path for path in folders | {word for word in words if word.startswith("/")} if Path(path).exists()}
    # Mount below /mnt: Debian's packages may write files at the original paths.
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
