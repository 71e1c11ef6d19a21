"""The random steps of a queue's test: what clients, workers, operators and a server short of memory may do."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.shared.broker.scripts.script_calls import MODEL, A, B, X, Y
from tests.shared.broker.scripts.stateful.queue_state import PROMPTS, WORKERS

CLIENTS = (A, B, X, Y)
BULK_CLIENTS = (X, Y)

_CLIENTS = st.sampled_from(CLIENTS)
_WORKERS = st.sampled_from(WORKERS)
_SIZES = st.sampled_from([1, 1, 1, 2, 8])
_PICKS = st.integers(0, 2**12 - 1)
_HOMES = st.sampled_from(["", "", *WORKERS, "w9"])
_PROMPT = st.tuples(st.sampled_from(PROMPTS), _HOMES)
# Long lists of prompts fill the streams, so that some prompts go to the backlog.
_PROMPTS = st.lists(_PROMPT, min_size=1, max_size=4) | st.lists(_PROMPT, min_size=8, max_size=20)
_ENDINGS = st.lists(st.sampled_from(["row", "row", "row", "missing", "failed", "dead"]), min_size=1, max_size=3)


_COUNTS = st.sampled_from([1, 2, 4, 100])
_JOBS = st.sampled_from([None, b"", b"later", b"done", b"1-1", b"1-1 w1", b"1-1 w9", b"x y z", b" ", b"9" * 40])
_REPLIES = st.sampled_from([b"", b"job", b"keep", b"elsewhere", MODEL.reply("nobody")])
_LOST = st.sampled_from(["waiting", "waiting", "row", "row", "lanes", "capacity", "workers", "workers", "lane", "rest"])
_SILENCES = st.sampled_from(["slow", "frozen", "killed", "ended", "failed", "closing"])

# (weight of a step, name of a method of `QueueMachine`, strategies for the method's arguments)
_STEPS: list[tuple[int, str, tuple[st.SearchStrategy[Any], ...]]] = [
    (6, "submit", (_CLIENTS, _PROMPTS, st.booleans(), st.booleans())),
    (2, "ask_again", (_CLIENTS, _PICKS)),
    (3, "cancel", (_CLIENTS, _PICKS)),
    (1, "expire", (_PROMPTS,)),
    (4, "heartbeat", (_WORKERS, _SIZES, st.booleans())),
    (8, "take", (_WORKERS, _COUNTS, st.sampled_from([False, False, False, True]))),
    (8, "finish", (_PICKS, _PICKS, _ENDINGS)),
    (2, "renew", (_PICKS,)),
    (2, "drop_unwanted", (_PICKS,)),
    (1, "move_up", ()),
    (2, "steal", (_WORKERS, _COUNTS, st.booleans())),
    (3, "claim", (_WORKERS, _COUNTS)),
    (5, "overtake", (_WORKERS, _PICKS, _COUNTS, st.booleans())),
    (2, "sweep", (_WORKERS, st.booleans())),
    (3, "fall_silent", (_WORKERS, _SILENCES)),
    (2, "retry", (_PICKS,)),
    (1, "clear", ()),
    (4, "lose", (_LOST, _PICKS)),
    (1, "spoil_waiting", (st.sampled_from(PROMPTS), _JOBS, _REPLIES)),
    (1, "run_ahead", (st.sampled_from(["", *WORKERS]),)),
]
STEPS = st.one_of(
    [st.tuples(st.just(name), st.tuples(*values)) for weight, name, values in _STEPS for _ in range(weight)]
)
"""Strategy for one step: the name of a method of `QueueMachine`, and its arguments.

One rule has all steps, because Hypothesis leaves out half of a machine's rules in each run: without "take" no job ends.
"""

TROUBLE = ("lose", "spoil_waiting", "run_ahead")
"""Names of the steps in which the server fails: it loses keys, or keys get wrong values."""

SIZES = st.lists(_SIZES, max_size=len(WORKERS))
"""Strategy for the first workers: for each, the number of prompts that the worker computes at once."""
