"""Write the hashes of the wheels into docker/requirements.txt: `make pin-hashes`.

Each line has one version and the SHA-256 hashes of its wheels for Linux on x86-64 and ARM, from the index. Change
versions in the file by hand, then run this program. torch has no hash: its build is an argument of docker/Dockerfile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "docker" / "requirements.txt"
PYTHON = "3.11"
"""The version of Python in the base image of docker/Dockerfile."""
GLIBC = range(17, 37)
"""Minor versions of glibc that wheels may require: the base image has 2.36."""
WITHOUT = {"torch"}

_PIN = re.compile(r"^(?P<mark># bulk: )?(?P<name>[\w.-]+)==(?P<version>\S+).*$", re.MULTILINE)


def hashes_of(pins: list[str], machine: str) -> dict[str, str]:
    """Name of a package -> hash of the wheel that pip chooses for a machine ("x86_64" or "aarch64")."""
    with tempfile.TemporaryDirectory(prefix="lmpool-pins-") as folder:
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
            "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}",
            *platforms, f"--platform=manylinux2014_{machine}", f"--target={folder}", f"--report={folder}/report", *pins,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        report = json.loads(Path(folder, "report").read_text("utf-8"))
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in report["install"]
    }


def main() -> None:
    """Run the command line."""
    text = REQUIREMENTS.read_text("utf-8")
    found: dict[str, list[str]] = {}
    # pip resolves one version per package, so resolve the versions for the extra `bulk` separately.
    for mark in (None, "# bulk: "):
        chosen = [pin for pin in _PIN.finditer(text) if pin["mark"] == mark and pin["name"] not in WITHOUT]
        pins = {pin["name"]: f"{pin['name']}=={pin['version']}" for pin in chosen}
        for machine in ("x86_64", "aarch64"):
            for name, digest in hashes_of(list(pins.values()), machine).items():
                found.setdefault(pins[name], []).append(digest)

    def pinned(pin: re.Match[str]) -> str:
        version = f"{pin['name']}=={pin['version']}"
        digests = dict.fromkeys(found.get(version, []))
        return " ".join([(pin["mark"] or "") + version, *(f"--hash=sha256:{digest}" for digest in digests)])

    REQUIREMENTS.write_text(_PIN.sub(pinned, text), "utf-8")


if __name__ == "__main__":
    main()
