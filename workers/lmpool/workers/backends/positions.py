"""Values at the positions of a prompt: computed from logits, and assembled from the parts that an engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import WorkerError
from lmpool.protocol.job import decode_ids
from lmpool.protocol.query import PositionsQuery, TopK, pack_top
from lmpool.workers.backends.row_encoder import log_z_of, rows_per_slice
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of

NO_DISTRIBUTION = "the model returned logits that are no distribution: NaN or infinite"


def values_at_positions(logits: Tensor, query: PositionsQuery, following: Sequence[int]) -> NDArray[np.float32]:
    """The values that a query requests, of positions with these logits.

    Args:
        logits: tensor of shape (m, V) of any float dtype, on any device.
        query: the query.
        following: the token after each position.

    Returns:
        float32 of shape (m, width); NaN where logits are no distribution.
    """
    tokens, at_once = torch.tensor(following, device=logits.device), rows_per_slice(logits)
    if query.values == "scores":
        # Unlike log_softmax, the loss makes no row of float32.
        pairs = zip(torch.split(logits, at_once), torch.split(tokens, at_once), strict=True)
        losses = [torch.nn.functional.cross_entropy(part.float(), token, reduction="none") for part, token in pairs]
        scores: NDArray[np.float32] = (-torch.cat(losses)).cpu().numpy()
        return scores[:, None]
    ids = query.target_ids
    targets, parts = torch.from_numpy(ids).to(logits.device), []
    for first in range(0, len(logits), at_once):
        values = _values_at(logits[first : first + at_once].float(), query)
        if query.is_of_next_token:
            values = values.gather(1, tokens[first : first + at_once, None])
        elif query.targets:
            values = values[:, targets]
        if query.top:
            best = _largest_of(values, query.top)
            parts.append(pack_top(best._replace(ids=ids[best.ids]) if query.targets else best))
        else:
            parts.append(values.cpu().numpy())
    return np.concatenate(parts)


def _values_at(logits: Tensor, query: PositionsQuery) -> Tensor:
    """Log-probabilities or logits, float32 (m, V), or their logZ, (m, 1); NaN where logits are no distribution."""
    if query.values == "logprobs":
        return torch.log_softmax(logits, dim=-1)
    log_z = log_z_of(logits)[:, None]
    return torch.where(log_z.isfinite(), log_z if query.values == "logz" else logits, torch.nan)


def _largest_of(rows: Tensor, k: int) -> TopK:
    """The `k` largest entries of each row, in the order of `lmpool.protocol.query.top`."""
    values, ids = torch.topk(rows, min(k + 1, rows.shape[1]), dim=-1)
    least = values[:, k - 1 : k]
    # topk does not define which of equal entries it returns. Where it leaves out one that equals the least, take the
    # lowest ids instead.
    is_unsure = (values[:, k:] == least).any(dim=1)
    values, ids = values[:, :k], ids[:, :k]
    if is_unsure.any():
        count = torch.arange(rows.shape[1], device=rows.device)
        equal = torch.where(rows[is_unsure] == least[is_unsure], count, rows.shape[1])
        lowest = torch.topk(equal, k, dim=-1, largest=False, sorted=True).values
        above = (values[is_unsure] > least[is_unsure]).sum(dim=1, keepdim=True)
        place = count[:k] - above
        ids[is_unsure] = torch.where(place < 0, ids[is_unsure], lowest.gather(1, place.clamp(min=0)))
    found = TopK(values.cpu().numpy(), ids.cpu().numpy())
    order = np.lexsort((found.ids, -found.values), axis=-1)
    return TopK(np.take_along_axis(found.values, order, axis=1), np.take_along_axis(found.ids, order, axis=1))


class Piece(NamedTuple):
    """Consecutive positions of one prompt in a forward.

    Attributes:
        request: the engine's name of the prompt.
        positions: positions in the prompt.
        row: index of the first position among the forward's logits or hidden states; the others follow.
    """

    request: str
    positions: range
    row: int


class _OpenAnswer:
    """The answer of a prompt in flight: parts of it, or the reason why it failed."""

    def __init__(self, job: BackendJob, query: PositionsQuery) -> None:
        self.job = job
        self.query = query
        self.missing = job.span
        self.parts: list[NDArray[np.float32]] = []
        self.failure = ""

    def add(self, logits: Tensor) -> None:
        """Add the values of the next positions."""
        begin = self.missing.start
        self.missing = range(begin + len(logits), self.missing.stop)
        if self.failure:
            return
        # The logits of a position predict the token after it.
        following = decode_ids(self.job.ids)[begin + 1 : begin + len(logits) + 1].tolist()
        try:
            self.parts.append(values_at_positions(logits, self.query, following))
            self.failure = NO_DISTRIBUTION if np.isnan(self.parts[-1]).any() else ""
        except QUERY_ERRORS as error:  # It must not end the engine's step, which would end the engine.
            self.failure = failure_of(error)
        if self.failure:
            self.parts.clear()


class PositionAnswers:
    """The answers of all jobs in flight that request values at positions, by the engine's request names.

    An engine may compute a position again after it has evicted a prompt from its memory.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenAnswer] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._open

    def open(self, request: str, job: BackendJob) -> None:
        """Start the answer of a job that has a positions query."""
        assert job.positions is not None
        self._open[request] = _OpenAnswer(job, job.positions)

    def drop(self, request: str) -> None:
        """Discard the answer of a request, if there is one."""
        self._open.pop(request, None)

    def first_missing(self, request: str) -> int | None:
        """The first position that is still to compute; None for requests that answer with a row."""
        answer = self._open.get(request)
        return None if answer is None else answer.missing.start

    def wanted(self, request: str, computed: range, row: int) -> list[Piece]:
        """The missing positions among `computed`, of which the first has the index `row` in the forward's logits."""
        answer = self._open.get(request)
        missing = range(0) if answer is None else answer.missing
        wanted = range(max(missing.start, computed.start), min(missing.stop, computed.stop))
        return [Piece(request, wanted, row + wanted.start - computed.start)] if wanted else []

    def add(self, pieces: Sequence[Piece], first: int, logits: Tensor) -> None:
        """Add the values of a slice of a forward's logits.

        Args:
            pieces: the wanted positions of the forward.
            first: index of the first row of the slice.
            logits: tensor (n, V) of any float dtype, on any device; it may change afterwards.

        Raises:
            WorkerError: the engine has left out a position.
        """
        for piece in pieces:
            begin, end = max(piece.row, first), min(piece.row + len(piece.positions), first + len(logits))
            answer = self._open.get(piece.request)
            if begin < end and answer is not None:
                position = piece.positions[begin - piece.row]
                if position != answer.missing.start:
                    raise WorkerError(f"the engine has computed position {position}, and not {answer.missing.start}")
                answer.add(logits[begin - first : end - first])

    def take(self, request: str) -> NDArray[np.float32] | str:
        """Remove and return the answer of a finished request, float32 (n * width,), or the reason of its failure."""
        answer = self._open.pop(request)
        if not answer.failure and answer.missing:
            raise WorkerError(f"the engine has ended a prompt without position {answer.missing.start}")
        return answer.failure or np.concatenate(answer.parts).ravel()
