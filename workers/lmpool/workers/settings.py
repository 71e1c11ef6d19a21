"""Settings of a worker that do not depend on its backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import LIMITS
from lmpool.settings import check_choice, check_name, check_number, check_texts, shown


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker serves.

    Raises:
        SettingsError: a value is malformed.
    """

    prefix: str = field(default="lmpool", metadata={"help": "Prefix of all Redis keys."})
    lease_s: float = field(
        default=15.0,
        metadata={"help": "Seconds without a heartbeat after which a worker's jobs are given to another."},
    )
    step_timeout_s: float = field(
        default=300.0,
        metadata={
            "help": "Seconds that the backend may take over one step, or over loading one adapter. One that takes "
            "longer hangs: its worker hands its jobs to others and ends."
        },
    )
    max_deliveries: int = field(default=3, metadata={"help": "Deliveries after which a job is given up."})
    queue_limit: int = field(default=100_000, metadata={"help": "Prompts that may wait for the model at once."})
    row_ttl_s: float = field(default=3600.0, metadata={"help": "Seconds that a row stays in the cache."})
    shm_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes of memory for the rows that clients on this machine read; 0 for none. Default: an eighth of "
            "what is free, at most 4 GiB."
        },
    )
    log_every_s: float = field(default=60.0, metadata={"help": "Seconds between two lines of counters in the log."})
    with_trie: bool = field(
        default=False, metadata={"help": "Answer trie jobs about the model's rows in the step that computes the row."}
    )
    trie_mb: int = field(
        default=2048, metadata={"help": "Megabytes that tries may take; the least recently used are dropped."}
    )
    trie_values_mb: int = field(default=512, metadata={"help": "Megabytes that the values of recent rows may take."})
    metrics_port: int = field(
        default=0,
        metadata={
            "help": "Port for /metrics, /healthz and /readyz over HTTP; 0 for none. Every worker of a machine needs "
            "its own."
        },
    )
    metrics_host: str = field(
        default="127.0.0.1", metadata={"help": "Address that this port is open on; 0.0.0.0 for all of this machine's."}
    )
    log_format: str = field(default="text", metadata={"help": "Text, or json for one object a line."})
    adapter_root: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folder in which adapters must lie, all links followed; may be given several times. Without it an "
            "adapter may lie wherever this worker can read."
        },
    )
    adapter_hub: bool = field(
        default=False,
        metadata={
            "help": "Load adapters that are offered by their names on the hub. Those of --adapters may have such names "
            "in any case."
        },
    )
    adapter_mb: int = field(default=8192, metadata={"help": "Megabytes that the files of one adapter may take."})
    tracing: bool = field(
        default=False,
        metadata={
            "help": "Make OpenTelemetry spans of the jobs whose clients trace them, and send them where "
            "OTEL_EXPORTER_OTLP_ENDPOINT says (also: LMPOOL_TRACING=1)."
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
        """Seconds between two heartbeats, so that a missed one or two do no harm."""
        return self.lease_s / 5
