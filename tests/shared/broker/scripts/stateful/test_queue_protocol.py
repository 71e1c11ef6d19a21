"""The queue's protocol: whatever clients, workers and operators do, in any order, whoever waits is answered.

`LMPOOL_FUZZ_STEPS` says how many steps are tried, `LMPOOL_FUZZ_SEED` from which seed on: each test says its own.
"""

from __future__ import annotations

import collections
import math
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from lmpool.embedded import EmbeddedServer
from tests.shared.broker.scripts.stateful.queue_machine import QueueMachine
from tests.shared.broker.scripts.stateful.queue_state import Caller

STEPS = int(os.environ.get("LMPOOL_FUZZ_STEPS", 2000))
SEED = int(os.environ.get("LMPOOL_FUZZ_SEED", 0))
STEPS_OF_ONE = 50
# Of one seed: Hypothesis remembers them all.
MAX_STEPS = 50_000


@pytest.fixture
def caller() -> Iterator[Caller]:
    """Runs scripts on a server of the test's own."""
    with tempfile.TemporaryDirectory(prefix="lp") as folder, EmbeddedServer(64 * 2**20, Path(folder) / "s") as running:
        yield Caller(running.url)


@pytest.mark.parametrize("number", range(SEED, SEED + math.ceil(STEPS / MAX_STEPS)))
def test_whoever_waits_is_answered_whatever_happens(caller: Caller, number: int) -> None:
    seen: collections.Counter[str] = collections.Counter()
    # Any callable will do.
    machine = seed(number)(cast(type[RuleBasedStateMachine], partial(QueueMachine, caller, seen)))
    run_state_machine_as_test(
        machine,
        settings=settings(
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            max_examples=max(1, min(STEPS, MAX_STEPS) // STEPS_OF_ONE),
            stateful_step_count=STEPS_OF_ONE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(seen.items())))
