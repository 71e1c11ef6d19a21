"""Settings of a worker, except those of its backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import LIMITS
from lmpool.settings import check_choice, check_name, check_number, check_texts, shown


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker.

    Raises:
        SettingsError: a value is malformed.
    """

    prefix: str = field(default="lmpool", metadata={"help": "Prefix of all Redis keys."})
    lease_s: float = field(
        default=15.0,
        metadata={"help": "Seconds without a heartbeat after which other workers take over a worker's jobs."},
    )
    step_timeout_s: float = field(
        default=300.0,
        metadata={
            "help": "Max seconds of one step of the backend, or of loading one adapter. A backend that takes longer "
            "hangs: its worker releases its jobs to others and ends."
        },
    )
    max_deliveries: int = field(default=3, metadata={"help": "Deliveries after which a job is given up."})
    queue_limit: int = field(default=100_000, metadata={"help": "Max prompts that wait for the model at once."})
    row_ttl_s: float = field(default=3600.0, metadata={"help": "Seconds that a row stays in the cache."})
    shm_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes of shared memory for the rows of clients on this machine; 0 for none. Default: an eighth of "
            "the free memory, at most 4 GiB."
        },
    )
    log_every_s: float = field(default=60.0, metadata={"help": "Seconds between two log lines with counters."})
    with_trie: bool = field(
        default=False,
        metadata={"help": "Answer trie queries about rows in the step that computes the row."},
    )
    trie_mb: int = field(
        default=2048, metadata={"help": "Max megabytes of tries; the least recently used are dropped."}
    )
    trie_values_mb: int = field(default=512, metadata={"help": "Max megabytes of the values of recent rows."})
    metrics_port: int = field(
        default=0,
        metadata={
            "help": "Port for /metrics, /healthz and /readyz over HTTP; 0 for none. Every worker of a machine needs "
            "a port of its own."
        },
    )
    metrics_host: str = field(
        default="127.0.0.1", metadata={"help": "Address of this port; 0.0.0.0 for all addresses of this machine."}
    )
    log_format: str = field(default="text", metadata={"help": "Log format: text, or json with one object per line."})
    adapter_root: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folder that must contain the adapters, after following all links; may be given several times. "
            "Default: any folder that this worker can read."
        },
    )
    adapter_hub: bool = field(
        default=False,
        metadata={
            "help": "Load adapters that clients name by their names on the hub. --adapters accepts such names in any "
            "case."
        },
    )
    adapter_mb: int = field(default=8192, metadata={"help": "Max megabytes of the files of one adapter."})
    tracing: bool = field(
        default=False,
        metadata={
            "help": "Make OpenTelemetry spans of jobs whose clients trace them, and send them to "
            "OTEL_EXPORTER_OTLP_ENDPOINT (also: LMPOOL_TRACING=1)."
        },
    )

    def __post_init__(self) -> None:
        check_name("prefix", self.prefix)
        check_number("lease_s", self.lease_s, *LIMITS["lease_s"], whole=False)
        check_number("queue_limit", self.queue_limit, *LIMITS["queue_limit"])
        check_number("row_ttl_s", self.row_ttl_s, *LIMITS["row_ttl_s"], whole=False)
        check_number("step_timeout_s", self.step_timeout_s, least=0.1, most=10**9, whole=False)
        check_number("max_deliveries", self.max_deliveries, least=1, most=1000)
        if self.shm_bytes is not None:
            check_number("shm_bytes", self.shm_bytes, least=0, most=2**50)
        check_number("log_every_s", self.log_every_s, least=0.1, most=10**9, whole=False)
        check_number("trie_mb", self.trie_mb, least=1, most=10**9)
        check_number("trie_values_mb", self.trie_values_mb, least=0, most=10**9)
        check_number("metrics_port", self.metrics_port, least=0, most=65535)
        check_choice("log_format", self.log_format, ("text", "json"))
        check_texts("adapter_root", self.adapter_root)
        for root in self.adapter_root:
            if not Path(root).is_dir():
                raise SettingsError(f"adapter_root: {shown(root)} is no folder")
        check_number("adapter_mb", self.adapter_mb, least=1, most=10**9)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: one or two may be lost within a lease."""
        return self.lease_s / 5
