"""The queue's protocol: after any sequence of actions, every waiting client gets a result.

`LMPOOL_FUZZ_STEPS` is the number of steps, and `LMPOOL_FUZZ_SEED` the first seed. Each test prints its seed.
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
# Max steps of one seed, because Hypothesis keeps all steps of a seed in memory.
MAX_STEPS = 50_000


@pytest.fixture
def caller() -> Iterator[Caller]:
    """A caller of scripts on a server that only this test uses."""
    with tempfile.TemporaryDirectory(prefix="lp") as folder, EmbeddedServer(64 * 2**20, Path(folder) / "s") as running:
        yield Caller(running.url)


@pytest.mark.parametrize("number", range(SEED, SEED + math.ceil(STEPS / MAX_STEPS)))
def test_every_waiting_client_gets_a_result_in_any_schedule(caller: Caller, number: int) -> None:
    seen: collections.Counter[str] = collections.Counter()
    # Hypothesis accepts any callable that returns a machine, but its types require a class.
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
