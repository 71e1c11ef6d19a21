"""What the sglang backend is told beyond what all engines are told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lmpool.card import MAX_ADAPTERS
from lmpool.checks import check_name, check_texts, shown
from lmpool.errors import SettingsError
from lmpool.workers.backend import Backend
from lmpool.workers.backends.engine_settings import EngineSettings
from lmpool.workers.backends.requirements import require, require_version

DISTRIBUTIONS = ("sglang",)
LEAST, BELOW = (0, 5, 17), (0, 5, 24)

_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True)
class SglangSettings(EngineSettings):
    """Settings of one sglang backend; those of `EngineSettings`, and:

    Attributes:
        device: "auto", or a torch device such as "cpu" or "cuda:1".
        adapters: LoRA adapters, as name=folder; may be given several times.

    Raises:
        SettingsError: a value is malformed, or SGLang is not installed in a version that this backend is made for.
    """

    device: str = "auto"
    adapters: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise SettingsError(f"device: {shown(self.device)} is neither 'auto' nor like 'cpu' or 'cuda:1'")
        check_texts("adapters", self.adapters)
        _ = self.adapter_folders
        require("backend", "lmpool[sglang]", "sglang")
        require_version("backend", DISTRIBUTIONS, LEAST, BELOW)

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or hub name."""
        found = {}
        for text in self.adapters:
            name, equals, folder = text.partition("=")
            if not equals or not folder:
                raise SettingsError(f"adapters: {shown(text)} is not name=folder")
            check_name("adapters", name)
            if name in found:
                raise SettingsError(f"adapters: {name!r} is given twice")
            found[name] = folder
        if len(found) > MAX_ADAPTERS:
            raise SettingsError(f"adapters: {len(found)} are too many: one model may have {MAX_ADAPTERS}")
        return found

    def open(self) -> Backend:
        """Make the backend; see `SglangBackend`."""
        from lmpool.workers.backends.sglang.backend import SglangBackend  # imports torch

        return SglangBackend(self)
