"""The protocol of partitions: workers move, masters go down for a while, and each client gets each result.

`LMPOOL_FUZZ_STEPS` is the number of steps, and `LMPOOL_FUZZ_SEED` the first seed. Each test prints its seed.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from lmpool.embedded import EmbeddedServer
from tests.partitions.partition_machine import PartitionMachine

STEPS = int(os.environ.get("LMPOOL_FUZZ_STEPS", 2000))
SEED = int(os.environ.get("LMPOOL_FUZZ_SEED", 0))
STEPS_OF_ONE = 50
# Max steps of one seed, because Hypothesis keeps all steps of a seed in memory.
MAX_STEPS = 50_000


@pytest.mark.parametrize("number", range(SEED, SEED + math.ceil(STEPS / MAX_STEPS)))
def test_every_client_gets_each_result_while_workers_move_and_masters_fail(number: int) -> None:
    seen: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="lp") as folder,
        EmbeddedServer(64 * 2**20, Path(folder) / "s") as running,
        asyncio.Runner() as runner,
    ):
        machine = partial(PartitionMachine, running.url, runner.get_loop(), seen)
        run_state_machine_as_test(
            # Hypothesis accepts any callable that returns a machine, but its types require a class.
            seed(number)(cast(type[RuleBasedStateMachine], machine)),
            settings=settings(
                phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
                max_examples=max(1, min(STEPS, MAX_STEPS) // STEPS_OF_ONE),
                stateful_step_count=STEPS_OF_ONE,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"seed {number}:", ", ".join(f"{name}: {count}" for name, count in sorted(seen.items())))
