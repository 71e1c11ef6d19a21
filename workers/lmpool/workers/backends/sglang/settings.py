"""What the sglang backend is told beyond what all engines are told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lmpool.errors import SettingsError
from lmpool.settings import shown
from lmpool.workers.backend.contract import Backend
from lmpool.workers.backends.engine_settings import EngineSettings, open_backend
from lmpool.workers.backends.requirements import require, require_version

DISTRIBUTIONS = ("sglang",)
LEAST, BELOW = (0, 5, 21), (0, 5, 24)

_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True)
class SglangSettings(EngineSettings):
    """Settings of one sglang backend; those of `EngineSettings`, and its own.

    Raises:
        SettingsError: a value is malformed, or SGLang is not installed in a version that this backend is made for.
    """

    device: str = field(default="auto", metadata={"help": '"auto", or a torch device such as "cpu" or "cuda:1".'})

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise SettingsError(f"device: {shown(self.device)} is neither 'auto' nor like 'cpu' or 'cuda:1'")
        require("backend", "lmpool[sglang]", "sglang")
        require_version("backend", DISTRIBUTIONS, LEAST, BELOW)

    def open(self) -> Backend:
        """Make the backend; see `SglangBackend`."""
        return open_backend("lmpool.workers.backends.sglang.backend:SglangBackend", self)
