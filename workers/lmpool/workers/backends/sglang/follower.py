"""A process that runs SGLang's own scheduler as a rank above 0: `python -m lmpool.workers.backends.sglang.follower`.

Rank 0 is the scheduler in the worker (`engine.SglangEngine`). It broadcasts its requests to the other ranks, so that
all ranks run the same forwards. Rows and positions are captured in rank 0 only.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable

from lmpool.workers.backends.ranks import following

COMMAND = [sys.executable, "-P", "-m", "lmpool.workers.backends.sglang.follower"]
"""Starts a follower; -P keeps modules of the current folder from replacing installed modules."""


def set_log_level(level: str) -> None:
    """Let SGLang log entries of a level, such as "warning"; call this function before SGLang is imported."""
    logging.getLogger("sglang").setLevel(level.upper())
    # Hide SGLang's warnings about each model architecture whose packages are missing.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"sglang\.")


def main(prepare: Callable[[], None] = lambda: None) -> None:
    """Run a follower; `prepare` is called before SGLang is imported."""
    with following() as setup:
        prepare()
        set_log_level(setup["options"]["log_level"])
        from lmpool.workers.backends.sglang import engine

        server_args = engine.make_server_args(setup["options"])
        scheduler = engine.make_scheduler(server_args, engine.PortArgs(**setup["ports"]), setup["rank"])
        scheduler.run_event_loop()
        engine.end_scheduler(scheduler)


if __name__ == "__main__":
    main()
