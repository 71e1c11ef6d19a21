"""Settings of a worker, except the settings of its backend."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lmpool.broker.bucket import STORES, check_url, is_url
from lmpool.errors import SettingsError
from lmpool.protocol.model_info import LIMITS, MAX_PARTITIONS
from lmpool.settings import check_choice, check_name, check_numbers, check_texts, option, shown

_UNLIMITED = 10**9  # Max value of settings that need no limit: a number that floats and Redis still represent exactly.
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[^\s:/@\[\]]{0,150})(?::(\d{1,5}))?")
_MAX_PORT = 65535  # The largest TCP port.


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker.

    Raises:
        SettingsError: a value is malformed.
    """

    prefix: str = option("Prefix of all Redis keys.", "lmpool")
    lease_s: float = option("Seconds without a heartbeat until others take a worker's jobs.", 15.0, *LIMITS["lease_s"])
    step_timeout_s: float = option(
        "Max seconds of a step or an adapter's load; then the worker releases its jobs and ends.",
        300.0,
        0.1,
        _UNLIMITED,
    )
    max_deliveries: int = option("Deliveries after which a job is given up.", 3, 1, 1000)
    queue_limit: int = option("Max prompts that wait for the model at once.", 100_000, *LIMITS["queue_limit"])
    partitions: int | None = option(
        "Min partitions of the model's queue. Default: the number of masters of a cluster, 1 on a single server.",
        None,
        1,
        MAX_PARTITIONS,
    )
    row_ttl_s: float = option("Seconds that a row stays in the cache.", 3600.0, *LIMITS["row_ttl_s"])
    shm_bytes: int | None = option(
        "Bytes of shared memory for rows; 0 for none. Default: 1/8 of the free memory, at most 4 GiB.", None, 0, 2**50
    )
    no_direct: bool = option("Send rows to clients on other hosts through Redis, not directly.", False)
    direct_address: str = option(
        "HOST:PORT at which clients on other hosts read rows. Default: the address from which the worker connects to "
        "Redis, and any free port.",
        "",
    )
    direct_bind: str = option("HOST:PORT at which the worker listens for them. Default: the same.", "")
    log_every_s: float = option("Seconds between two log lines with counters.", 60.0, 0.1, _UNLIMITED)
    with_trie: bool = option("Answer trie queries about rows in the step that computes the row.", False)
    trie_mb: int = option("Max megabytes of tries; the least recently used are dropped.", 2048, 1, _UNLIMITED)
    trie_values_mb: int = option("Max megabytes of the values of recent rows.", 512, 0, _UNLIMITED)
    metrics_port: int = option(
        "Port for /metrics, /healthz and /readyz over HTTP, one for each worker of a machine; 0 for none.", 0, 0, 65535
    )
    metrics_host: str = option("Address of this port; 0.0.0.0 for all addresses of this machine.", "127.0.0.1")
    log_format: str = option("Log format: text, or json with one object per line.", "text")
    adapter_root: list[str] = option(
        "Folder that must contain the adapters, with all links followed; may be repeated. Default: any folder.", []
    )
    adapter_hub: bool = option(
        "Load adapters that clients name by their names on the hub. --adapters accepts such names in any case.", False
    )
    adapter_mb: int = option("Max megabytes of the files of one adapter.", 8192, 1, _UNLIMITED)
    max_unavailable: int = option(
        "Max workers of the model that change to a published version of the weights at once.", 1, 1, 1000
    )
    weights_root: list[str] = option(
        "Folder, or URL of a folder in a bucket, that must contain published weights, with all links followed; may be "
        "repeated. Default: any folder and any bucket.",
        [],
    )
    tracing: bool = option("Send spans of traced jobs to OTEL_EXPORTER_OTLP_ENDPOINT (also: LMPOOL_TRACING=1).", False)

    def __post_init__(self) -> None:
        check_name("prefix", self.prefix)
        check_numbers(self)
        check_choice("log_format", self.log_format, ("text", "json"))
        for name in ("direct_address", "direct_bind"):
            split_address(name, getattr(self, name))
        for name in ("adapter_root", "weights_root"):
            check_texts(name, getattr(self, name))
            for root in getattr(self, name):
                if name == "weights_root" and is_url(root):
                    check_url(root, STORES)
                elif not Path(root).is_dir():
                    raise SettingsError(f"{name}: {shown(root)} is no folder")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: a quarter of a lease, because one or two heartbeats may be lost."""
        return self.lease_s / 4


def split_address(name: str, value: str) -> tuple[str, int | None]:
    """Split HOST, HOST:PORT or :PORT, with an IPv6 address in brackets; a missing part is "" or None.

    Raises:
        SettingsError: the address is malformed.
    """
    found = _ADDRESS.fullmatch(value)
    port = int(found[2]) if found and found[2] else None
    if found is None or (port or 0) > _MAX_PORT:
        raise SettingsError(f"{name}: {shown(value)} must be HOST:PORT, HOST or :PORT, such as 10.0.0.5:7000")
    return found[1].strip("[]"), port
