"""Settings of a worker that do not depend on its backend."""

from __future__ import annotations

from dataclasses import dataclass

from lmpool.card import LIMITS
from lmpool.checks import check_choice, check_name, check_number


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker serves.

    Attributes:
        prefix: prefix of all Redis keys.
        lease_s: seconds without a sign of life after which a worker's jobs are given to another.
        step_timeout_s: seconds that the backend may take over one step, or over loading one adapter. One that takes
            longer hangs: its worker hands its jobs to others and ends.
        max_deliveries: deliveries after which a job is given up.
        queue_limit: prompts that may wait for the model at once.
        row_ttl_s: seconds that a row stays in the cache.
        log_every_s: seconds between two lines of counters in the log.
        with_trie: answer trie jobs about the model's rows in the step that computes the row.
        trie_mb: megabytes that tries may take; the least recently used are dropped.
        trie_values_mb: megabytes that the values of recent rows may take.
        metrics_port: port for /metrics, /healthz and /readyz over HTTP; 0 for none. Every worker of a machine needs its
            own.
        metrics_host: address that this port is open on; 0.0.0.0 for all of this machine's.
        log_format: text, or json for one object a line.

    Raises:
        SettingsError: a value is malformed.
    """

    prefix: str = "lmpool"
    lease_s: float = 15.0
    step_timeout_s: float = 300.0
    max_deliveries: int = 3
    queue_limit: int = 100_000
    row_ttl_s: float = 3600.0
    log_every_s: float = 60.0
    with_trie: bool = False
    trie_mb: int = 2048
    trie_values_mb: int = 512
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    log_format: str = "text"

    def __post_init__(self) -> None:
        check_name("prefix", self.prefix)
        for name in ("lease_s", "queue_limit", "row_ttl_s"):  # They travel on the card.
            least, most = LIMITS[name]
            check_number(self, name, least=least, most=most)
        check_number(self, "step_timeout_s", least=0.1, most=10**9)
        check_number(self, "max_deliveries", least=1, most=1000)
        check_number(self, "log_every_s", least=0.1, most=10**9)
        check_number(self, "trie_mb", least=1, most=10**9)
        check_number(self, "trie_values_mb", least=0, most=10**9)
        check_number(self, "metrics_port", least=0, most=65535)
        check_choice("log_format", self.log_format, ("text", "json"))

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two signs of life, so that a missed one or two do no harm."""
        return self.lease_s / 5
