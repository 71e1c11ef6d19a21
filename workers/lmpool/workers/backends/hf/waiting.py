"""A prompt that waits for its forward, or for the next of several."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.prompt import decode_ids
from lmpool.workers.backend.contract import BackendJob


@dataclass(slots=True)
class Waiting:
    """What is left to do for one job.

    A long prompt is computed a part at a time, so that others go between, and its tokens are scored so too, for the
    logits of all positions at once would take too much memory; the keys and values of one part serve the next.

    Attributes:
        ids: the prompt.
        next: position of the next token to score; 0 when the row is wanted.
        fresh: nothing that is kept of other prompts may be used.
        adapter: "name@revision", or "".
        reached: up to which token the KV pool has been filled by parts for which no logits are wanted.
        computed: tokens that these parts have computed.
        root: of a long fresh prompt in the KV pool, where nobody else finds it; None before its first part.
        scores: of the tokens that have been scored.
    """

    ids: list[int]
    next: int = 0
    fresh: bool = False
    adapter: str = ""
    reached: int = 0
    computed: int = 0
    root: int | None = None
    scores: list[NDArray[np.float32]] = field(default_factory=list)

    @classmethod
    def of(cls, job: BackendJob) -> Waiting:
        """What is to be done for a job."""
        return cls(decode_ids(job.ids).tolist(), job.score_from, job.fresh, job.adapter)

    @property
    def kind(self) -> str:
        """Jobs of one kind can run together."""
        return "score" if self.next else "fresh" if self.fresh else "row"

    def part(self, most: int, horizon: int) -> tuple[list[int], int]:
        """What to run next: token ids, and of how many of the last ones the logits are wanted.

        Args:
            most: so many at most.
            horizon: what is longer gives its prefixes other logits than they have alone, so a part does not cross it.
        """
        if not self.next:
            return self.ids, 1
        end = min(len(self.ids), self.next + most)
        if self.next <= horizon:
            end = min(end, horizon + 1)
        return self.ids[: end - 1], end - self.next

    def targets(self, kept: int) -> list[int]:
        """The tokens that the logits of a part predict."""
        return self.ids[self.next : self.next + kept]

    def add(self, scores: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Take the scores of a part; returns those of all tokens when these were the last."""
        self.scores.append(scores)
        self.next += len(scores)
        return np.concatenate(self.scores) if self.next == len(self.ids) else None
