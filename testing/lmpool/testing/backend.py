"""The synthetic backend with a vocabulary of the user's, and with steps that pass through a gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmpool.testing.gate import Gate
from lmpool.testing.model import SyntheticModel
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backend.contract import Backend, Finished
from lmpool.workers.backends.synthetic import SyntheticBackend


@dataclass(frozen=True, slots=True)
class GatedSettings:
    """Settings of the backend of one worker.

    Attributes:
        model: what it serves.
        gate: what its steps pass through.
    """

    model: SyntheticModel
    gate: Gate

    @property
    def served_as(self) -> str:
        """The model's name."""
        return self.model.name

    def open(self) -> Backend:
        """Make the backend."""
        return GatedBackend(self)


class GatedBackend(SyntheticBackend):
    """As `SyntheticBackend`, with a vocabulary of the user's; `step_ms` is waited for at the gate.

    Args:
        settings: see `GatedSettings`.
    """

    def __init__(self, settings: GatedSettings) -> None:
        model = settings.model
        super().__init__(replace(model.backend, step_ms=0.0))
        self._model = model
        self._gate = settings.gate

    def vocabulary(self) -> Vocabulary:
        """See `Backend.vocabulary`."""
        return self._model.tokens

    def step(self) -> Finished:
        """See `Backend.step`."""
        finished = super().step()
        self._gate.pass_after(self._model.step_ms / 1000)
        return finished
