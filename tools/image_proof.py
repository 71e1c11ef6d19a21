"""Start the worker, trie worker and web images of docker/Dockerfile on a server with users, and send requests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from lmpool.embedded import server_binary

if TYPE_CHECKING:
    from tools.images import Buildah

# Max seconds until a container is healthy, or a command in it ends: a worker on a busy machine needed over 180 s.
DEADLINE_S = 900.0
_USERS = Path(__file__).resolve().parents[1] / "docker" / "redis" / "users.acl"
_UID = "10001"  # The user of the images.


def prove(buildah: Buildah, name_of: Callable[[str], str], model: Path) -> None:
    """Start a server, a worker, a trie worker and the web service; send requests; stop the containers.

    Args:
        buildah: the store of the images.
        name_of: target -> name of its image.
        model: folder of the model that the worker serves.

    Raises:
        SystemExit: a container does not respond, or ends with another exit code than expected.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(_server())

        def start(target: str, role: str) -> Container:
            name = stack.enter_context(buildah.container(name_of(target)))
            return stack.enter_context(Container(buildah, name_of(target), name, server[role]).closing())

        client = start("client", "producer")
        print(client.run("--version").strip(), flush=True)
        # The containers share the network of this machine, so each container needs a different port.
        worker, trie, web = start("worker", "worker"), start("trie", "trie-worker"), start("web", "web")
        worker.start("/models/proof", "--name", "proof", mounts={"/models/proof": _readable(model, stack)})
        trie.start("--metrics-port", "9101", ports=("9100", "9101"))
        token = secrets.token_hex(16)
        web.start(environment={"LMPOOL_WEB_TOKEN": token})
        for container in (worker, trie, web):
            container.until_healthy()
            print(f"{container.image} is healthy after {time.monotonic() - began:.1f} s", flush=True)
        row = json.loads(client.run("logprobs", "1,2,3", "--ids", "--top", "3", "--json"))
        print(f"the beginning of a row: {json.dumps(row)[:200]}", flush=True)
        print(client.run("trie", "show", "1,2,3", "--ids", "--depth", "1", "--top", "3"), flush=True)
        request = Request("http://127.0.0.1:8642/api/demand/proof", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=DEADLINE_S) as response:
            demand = json.load(response)
        print(f"the web service reports: {demand}", flush=True)
        _check(demand["workers"] == 1, "the web service sees one worker")
        for container in (worker, trie):
            container.stop()
        # The signal ends the web service's process after the last response, so buildah returns 1.
        web.stop(code=1)
    print(f"all images work: {time.monotonic() - began:.0f} s", flush=True)


def _readable(model: Path, stack: ExitStack) -> Path:
    """A copy of a model's folder that the user of a container can read."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmpool")), "model")
    shutil.copytree(model, folder)
    for path in (folder.parent, folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


def _check(is_so: bool, text: str) -> None:
    if not is_so:
        sys.exit(f"check failed: {text}")


class Container:
    """A container that runs its image's entry point, in this machine's network.

    Args:
        buildah: the store of images and containers.
        image: name of the image.
        name: name of the container.
        url: the pool's server.
    """

    def __init__(self, buildah: Buildah, image: str, name: str, url: str) -> None:
        self.image = image
        self._buildah = buildah
        self._name = name
        self._url = url
        self._config = buildah.inspect(image)
        self._ports = ("", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the container
        _check(self._config["User"] == f"{_UID}:{_UID}", f"{image} runs as {_UID}")
        _check(self._config.get("StopSignal") == "SIGTERM", f"{image} is stopped by SIGTERM")

    def _command(
        self, words: list[str], mounts: Mapping[str, Path] | None = None, environment: dict[str, str] | None = None
    ) -> list[str]:
        settings = {"LMPOOL_REDIS_URL": self._url, "HF_HUB_OFFLINE": "1", **(environment or {})}
        options = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        options += [word for there, here in (mounts or {}).items() for word in ("--volume", f"{here}:{there}:ro")]
        return self._buildah.command("run", "--isolation", "chroot", *options, self._name, "--", *words)

    def run(self, *arguments: str) -> str:
        """Run the entry point to its end and return its output."""
        command = self._command([*self._config["Entrypoint"], *arguments])
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        _check(done.returncode == 0, f"{arguments} ends well: {done.stdout}{done.stderr}")
        return done.stdout

    def start(
        self,
        *arguments: str,
        mounts: Mapping[str, Path] | None = None,
        environment: dict[str, str] | None = None,
        ports: tuple[str, str] = ("", ""),
    ) -> None:
        """Start the entry point.

        Args:
            arguments: additional arguments.
            mounts: path in the container -> local file or folder, mounted read-only.
            environment: additional variables.
            ports: the port in the image's health check, and the port that replaces it.
        """
        self._ports = ports
        command = self._command([*self._config["Entrypoint"], *arguments], mounts, environment)
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def until_healthy(self) -> None:
        """Wait until the image's health check succeeds."""
        kind, *check = self._config["Healthcheck"]["Test"]
        _check(kind == "CMD", f"{self.image} has a health check: {kind}")
        command = self._command([word.replace(*self._ports) if self._ports[0] else word for word in check])
        end = time.monotonic() + DEADLINE_S
        while subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode:
            assert self._process is not None
            continues = self._process.poll() is None and time.monotonic() < end
            _check(continues, f"{self.image} becomes healthy; its output:\n{self._text()}")
            time.sleep(0.2)

    def stop(self, code: int = 0) -> None:
        """Send SIGTERM to the program, as container runtimes do.

        Args:
            code: expected exit code of `buildah run`: the program's exit code, or 1 if a signal ended the program.
        """
        assert self._process is not None
        inside = _inside(self._process.pid)
        _check(bool(inside), f"{self.image} runs")
        os.kill(inside[0], signal.SIGTERM)
        ended = self._process.wait(DEADLINE_S)
        _check(
            ended == code, f"{self.image} ends with {code} on SIGTERM, not with {ended}; its output:\n{self._text()}"
        )

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    @contextmanager
    def closing(self) -> Iterator[Container]:
        """Kill the container's processes at the end of the block."""
        try:
            yield self
        finally:
            if self._process is not None and self._process.poll() is None:
                for pid in _inside(self._process.pid):
                    os.kill(pid, signal.SIGKILL)
                self._process.wait(DEADLINE_S)
            self._log.close()


def _inside(pid: int) -> list[int]:
    """Process ids of a container's programs, descendants of `buildah run`; the first is the entry point."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # Skip a process that has ended.
        children.setdefault(int(rest.split()[1]), []).append(int(stat.parent.name))
    below, found = [pid], []
    while below:
        below = [child for parent in below for child in children.get(parent, [])]
        found += below
    return [child for child in found if _is_ours(child)]


def _is_ours(pid: int) -> bool:
    """Whether a process is a program of the container, and not a process of buildah."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


@contextmanager
def _server() -> Iterator[dict[str, str]]:
    """Run a server with the users of docker/redis on a local port; yields role -> URL."""
    passwords: dict[str, str] = {}

    def new_hash(match: re.Match[str]) -> str:
        password = passwords[match[1]] = secrets.token_hex(16)
        return f"#{hashlib.sha256(password.encode()).hexdigest()}"

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lmpool") as folder:
        users = re.sub(r"#SHA256-OF-THE-PASSWORD-OF-([\w-]+)", new_hash, _USERS.read_text("utf-8"))
        Path(folder, "users.acl").write_text(users, "utf-8")
        settings: dict[str, Any] = {"bind": "127.0.0.1", "port": port, "save": "", "dir": folder, "loglevel": "warning"}
        settings |= {"aclfile": f"{folder}/users.acl", "maxmemory": "512mb", "maxmemory-policy": "volatile-lru"}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen([server_binary(), *words], stdout=subprocess.DEVNULL)
        try:
            yield {role: f"redis://{role}:{password}@127.0.0.1:{port}/0" for role, password in passwords.items()}
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
