"""The prompts that a worker holds: one object per prompt, from reading its first stream entry to its result.

The event loop and the backend's thread share the object of a prompt. Only one of these threads writes each field.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from lmpool.broker.scripts import Fields
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import BULK, PRIORITY_FIELD
from lmpool.protocol.query import PickQuery, TrieQuery
from lmpool.workers.execution.contract import BackendJob

Status = Literal["accepted", "waiting", "pending", "ended"]


@dataclass(slots=True, eq=False)
class JobTrace:
    """The times of a traced job, in ns since 1970 by the local clock."""

    context: Any  # OpenTelemetry's context of the client's request.
    queued: int  # Time when the job was queued.
    taken: int  # Time when this worker read the job.
    stepped: tuple[int, int] | None = None  # Start and end of the step that computed the job; None without a step.
    batch: Any = None  # OpenTelemetry's context of the step's span.


class StreamEntry(msgspec.Struct, eq=False, gc=False):
    """One entry of a job stream that this worker holds: one request for a row, or for the answer to a query.

    Attributes:
        id: id of the entry in its stream; in a lane (a worker's own stream), a space and the worker's id follow.
        digest: digest of the prompt or of the query about it; 16 zero bytes if the entry does not decode.
        overwrite: whether the stored row is damaged and must be replaced.
        query: the query that is answered from the row; None for the row itself.
        failure: why the entry ends without a result; None while nothing has failed.
        is_dead: whether the entry becomes a dead letter when it ends.
        fields: the other fields of the stream entry.
        since: monotonic time when the worker read the entry.
        checked_at: monotonic time of the last check whether a client waits for the entry; 0 before the first check.
        host: token of the host whose shared memory the entry's first client reads (`Job.host`).
        socket: name of the first client's socket for datagrams (`Job.socket`).
        trace: times of the job for the client's trace; None without a trace.
    """

    id: bytes
    digest: bytes
    overwrite: bool = False
    query: TrieQuery | PickQuery | None = None
    failure: Failure | None = None
    is_dead: bool = False
    fields: Fields = {}
    since: float = msgspec.field(default_factory=time.monotonic)
    checked_at: float = 0.0
    host: bytes = b""
    socket: bytes = b""
    trace: JobTrace | None = None

    def failing(self, failure: Failure) -> StreamEntry:
        """Set the failure of the entry, and return the entry."""
        self.failure = failure
        return self


class DrawnTokens(msgspec.Struct, eq=False, gc=False):
    """The tokens drawn so far for a continuation, and the tokens that end it.

    Attributes:
        ends: tokens that end the continuation, as little-endian uint32.
        stops: sequences of several tokens that end the continuation, as little-endian uint32.
        tokens: the drawn tokens.
        logprobs: log-probabilities of the drawn tokens.
    """

    ends: frozenset[bytes]
    stops: tuple[bytes, ...]
    tokens: list[int] = []
    logprobs: list[np.float32] = []


class InFlightPrompt(BackendJob, eq=False):
    """A prompt that a worker holds, with the stream entries that wait for it.

    `ids`, `bulk` and the attributes marked with * belong to the backend's thread while the status is "pending".

    Attributes:
        entries: entry id -> entry.
        has_query: whether the first entry requests something other than the row.
        is_damaged: whether the cached row cannot be read, so that a new row must replace it.
        status: "accepted" at first; "waiting" while there is no memory for its answer; "pending" from its submission
            to the backend's thread until its result; "ended" after its result or when it is aborted.
        answer_bytes: bytes that are reserved for the prompt's answer (`AnswerMemory`).
        yields: whether the prompt was submitted as a bulk prompt or a continuation, which wait while rows are computed.
        patient_until: * number of the step from which the backend gets a bulk prompt even next to interactive prompts.
        drawn: * the tokens of a continuation so far; None for a prompt that is no continuation.
    """

    entries: dict[bytes, StreamEntry] = {}  # noqa: RUF012  msgspec copies the default
    has_query: bool = False
    is_damaged: bool = False
    status: Status = "accepted"
    answer_bytes: int = 0
    yields: bool = False
    patient_until: int = 0
    drawn: DrawnTokens | None = None

    @property
    def is_owed(self) -> bool:
        """Whether the backend's thread still has to return a result for this prompt."""
        return self.status in ("pending", "waiting")

    @property
    def wants_row(self) -> bool:
        """Whether an entry has no query: it requests the row, or values that only the backend can compute."""
        return any(entry.query is None for entry in self.entries.values())

    def restart(self) -> None:
        """Prepare another submission of the prompt, for the entries that were added after the last submission."""
        if self.drawn is not None:
            self.ids = self.ids[: len(self.ids) - 4 * len(self.drawn.tokens)]
            self.drawn = None
        self.status, self.is_damaged = "accepted", False
        self.bulk = all(entry.fields.get(PRIORITY_FIELD) == BULK for entry in self.entries.values())


InFlight = dict[bytes, InFlightPrompt]
"""All prompts that a worker holds, by digest."""

EntriesByDigest = Mapping[bytes, Sequence[StreamEntry]]
"""Digest of a row or of an answer -> the entries that wait for it."""


def entry_ids(in_flight: InFlight) -> list[bytes]:
    """The ids of all stream entries that a worker holds."""
    return [entry_id for prompt in in_flight.values() for entry_id in prompt.entries]
