"""What is wanted of prompts' positions, put together from the parts in which an engine computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import WorkerError
from lmpool.protocol.job import decode_ids
from lmpool.workers.backends.row_encoder import expected_at
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of

NO_DISTRIBUTION = "the model returned logits that are no distribution: NaN or infinite"

_NOTHING = range(0)


class Piece(NamedTuple):
    """Neighbouring positions of one prompt among those that a forward has computed.

    Attributes:
        request: the engine's name of the prompt.
        positions: those of the prompt.
        row: which of the forward's logits, or states, is that of the first one; the others follow it.
    """

    request: str
    positions: range
    row: int


class _Open:
    """A prompt that the engine computes: its answer so far, or the reason why it has none."""

    def __init__(self, job: BackendJob) -> None:
        self.job = job
        self.missing = job.span
        self.parts: list[NDArray[np.float32]] = []
        self.failure = ""


class PositionAnswers:
    """The answers of jobs that want something of positions, by the names of the engine's requests.

    Nothing is kept of a position but what is wanted of it. An engine may compute one again, as it does when it had to
    take a prompt's memory away.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._open

    def open(self, request: str, job: BackendJob) -> None:
        """A request computes a job from now on."""
        self._open[request] = _Open(job)

    def drop(self, request: str) -> None:
        """Nobody waits for a request any more."""
        self._open.pop(request, None)

    def first_missing(self, request: str) -> int | None:
        """The first position that must be computed yet; None for requests that answer with a row."""
        held = self._open.get(request)
        return None if held is None else held.missing.start

    def wanted(self, request: str, computed: range, row: int) -> list[Piece]:
        """What is wanted of the positions that a forward has computed of a prompt, the first one's logits in `row`."""
        held = self._open.get(request)
        missing = _NOTHING if held is None else held.missing
        wanted = range(max(missing.start, computed.start), min(missing.stop, computed.stop))
        return [Piece(request, wanted, row + wanted.start - computed.start)] if wanted else []

    def add(self, pieces: Sequence[Piece], first: int, logits: Tensor) -> None:
        """Take what is wanted of some logits.

        Args:
            pieces: what is wanted of the forward.
            first: which of its rows is the first of these.
            logits: tensor (n, V) of any float dtype, on any device; it may change afterwards.

        Raises:
            WorkerError: the engine has left out a position.
        """
        for piece in pieces:
            begin, end = max(piece.row, first), min(piece.row + len(piece.positions), first + len(logits))
            held = self._open.get(piece.request)
            if begin < end and held is not None:
                position = piece.positions[begin - piece.row]
                if position != held.missing.start:
                    raise WorkerError(f"the engine has computed position {position}, and not {held.missing.start}")
                _add(held, logits[begin - first : end - first])

    def take(self, request: str) -> NDArray[np.float32] | str:
        """The answer of a request that the engine has ended, float32 (n * width,), or the reason why it has none.

        Raises:
            WorkerError: not all of the positions were computed.
        """
        held = self._open.pop(request)
        if not held.failure and held.missing:
            raise WorkerError(f"the engine has ended a prompt without position {held.missing.start}")
        return held.failure or np.concatenate(held.parts).ravel()


def _add(held: _Open, logits: Tensor) -> None:
    """Take what is wanted of the next positions."""
    query, begin = held.job.positions, held.missing.start
    assert query is not None
    held.missing = range(begin + len(logits), held.missing.stop)
    if held.failure:
        return
    # A position's logits predict the token after it.
    following = decode_ids(held.job.ids)[begin + 1 : begin + len(logits) + 1].tolist()
    try:
        held.parts.append(expected_at(logits, query, following))
        held.failure = NO_DISTRIBUTION if np.isnan(held.parts[-1]).any() else ""
    except QUERY_ERRORS as error:  # Raised on, it would end the engine's step, and so the engine.
        held.failure = failure_of(error)
    if held.failure:
        held.parts.clear()
