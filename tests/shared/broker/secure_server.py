"""A server with the settings of docker/redis: TLS with a private authority, client certificates, restricted users."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmpool.embedded import server_binary
from tests.support.pool import spoken, until

SHIPPED = Path(__file__).parents[3] / "docker" / "redis"
ROLES = ("producer", "adapters", "weights", "worker", "trie-worker", "web", "operator", "batch")
# The password contains characters that a URL must encode, and a text that tests search for in outputs.
PASSWORD = "s3cr3t/@:?#%{role}"


def installed_server(kind: str) -> str:
    """Path of a server program; `tools.install_server` downloads the program if it is missing.

    Args:
        kind: "debian" for Debian's Redis, which supports TLS, or "6.2" for Redis 6.2.
    """
    folder = Path(os.environ.get("LMPOOL_TEST_SERVERS", ".cache")) / f"redis-{kind}"
    command = [sys.executable, "-m", "tools.install_server", kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SHIPPED.parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def password_of(role: str) -> str:
    """The password of the user of a role."""
    return PASSWORD.format(role=role)


class SecureServer:
    """A server process with the settings that docker/redis contains.

    Args:
        folder: the folder for the server's files.
        tls: whether the server uses TLS on a port; otherwise it listens on a socket, for programs without TLS.
        extra: lines with more users for the file of users.
        is_cluster: whether the server is the only master of a cluster.
    """

    def __init__(self, folder: Path, *, tls: bool = True, extra: str = "", is_cluster: bool = False) -> None:
        self.folder = folder
        self.tls = tls
        self.is_cluster = is_cluster
        self.authority = trustme.CA()
        # redis-py connects to 127.0.0.1 instead of localhost when it connects to a cluster.
        self.certify("server", self.authority, "localhost", *(["127.0.0.1"] if is_cluster else []))
        self.certify("client", self.authority, "client")
        users = (SHIPPED / "users.acl").read_text()
        for role in ROLES:
            digest = hashlib.sha256(password_of(role).encode()).hexdigest()
            users = users.replace(f"#SHA256-OF-THE-PASSWORD-OF-{role} ", f"#{digest} ")
        admin = f"user admin on >{password_of('admin')} ~* &* +@all\n"
        (folder / "users.acl").write_text(users + admin + extra)
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("localhost", 0))
            bus.bind(("localhost", 0))
            self.port: int = probe.getsockname()[1]
            self._bus_port: int = bus.getsockname()[1]

    def certify(self, name: str, authority: trustme.CA, *hosts: str, **options: Any) -> None:
        """Write an authority's certificate (NAME.ca.crt), a certificate from it (NAME.crt), and its key (NAME.key)."""
        issued = authority.issue_cert(*hosts, **options)
        authority.cert_pem.write_to_path(str(self.folder / f"{name}.ca.crt"))
        issued.cert_chain_pems[0].write_to_path(str(self.folder / f"{name}.crt"))
        issued.private_key_pem.write_to_path(str(self.folder / f"{name}.key"))

    def url(
        self,
        role: str,
        *,
        password: str | None = None,
        host: str = "localhost",
        files: Mapping[str, str | None] | None = None,
    ) -> str:
        """The URL of a user; `files` replaces certificate files in the URL, and the value None omits a file."""
        user = f"{role}:{quote(password or password_of(role), safe='')}"
        if not self.tls:
            return spoken(f"unix://{user}@{self.folder}/s")
        defaults = {"ssl_ca_certs": "server.ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
        chosen = {name: str(self.folder / file) for name, file in defaults.items()} | dict(files or {})
        # On a busy machine, the host lookup and the TLS handshake take longer than the default five seconds.
        query = {"socket_connect_timeout": "60"} | {name: value for name, value in chosen.items() if value is not None}
        return spoken(f"rediss://{user}@{host}:{self.port}/0?{urlencode(query)}")

    def client(self, role: str) -> redis.Redis:
        """A redis-py client that connects as the user of a role.

        The client tries once: with redis-py's default of eleven times eleven attempts, a silent server would hold up
        the test for too long, and the error would not show the cause.
        """
        return redis.Redis.from_url(self.url(role), retry=Retry(NoBackoff(), 0), socket_timeout=60)

    def refusals(self) -> list[str]:
        """Refusals in the server's ACL log: user, command or key, reason, and whether a script ran the command."""
        with self.client("admin") as admin:
            log: Any = admin.acl_log()
        return sorted(
            f"{_text(line['username'])}: {_text(line['object'])} ({_text(line['reason'])}, {_text(line['context'])})"
            for line in log
        )

    @contextmanager
    def running(self) -> Iterator[SecureServer]:
        """Run the server while the context is open."""
        process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def answers() -> bool:
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{self.log}"
            with suppress(redis.ConnectionError, redis.TimeoutError), self.client("admin") as admin:
                return bool(admin.ping())
            return False

        try:
            until(answers, "the server answers")
            if self.is_cluster:
                self._take_all_slots()
            yield self
        finally:
            process.kill()
            process.wait()

    def _take_all_slots(self) -> None:
        with self.client("admin") as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: admin.cluster("info")["cluster_state"] == "ok", "the cluster is whole")

    def command(self) -> list[str]:
        """The command that starts the server with the settings of docker/redis and paths in the test's folder."""
        files = {"aclfile": "users.acl", "tls-ca-cert-file": "server.ca.crt", "tls-cert-file": "server.crt"}
        files["tls-key-file"] = "server.key"
        places = {name: str(self.folder / file) for name, file in files.items()}
        places |= {"dir": str(self.folder), "maxmemory": "512mb", "tls-port": str(self.port)}
        settings = (SHIPPED / "redis.conf").read_text()
        for name, value in places.items():
            settings, count = re.subn(rf"^{name} .*$", f"{name} {value}", settings, flags=re.MULTILINE)
            assert count == 1, f"redis.conf has {count} lines with {name}"
        if not self.tls:
            settings = re.sub(r"^tls-.*$", "", settings, flags=re.MULTILINE) + f"unixsocket {self.folder}/s\n"
        if self.is_cluster:
            settings += f"cluster-enabled yes\ntls-cluster yes\ncluster-port {self._bus_port}\n"
        (self.folder / "redis.conf").write_text(f"{settings}\nlogfile {self.folder}/log\n")
        return [installed_server("debian") if self.tls else server_binary(), str(self.folder / "redis.conf")]

    @property
    def log(self) -> str:
        """The text that the server has logged."""
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
