"""A process that runs SGLang's own scheduler as a rank above 0: `python -m lmpool.workers.backends.sglang.follower`.

Rank 0 is the scheduler in the worker (`engine.SglangEngine`). It broadcasts its requests to the other ranks, so that
all ranks run the same forwards. Rows and positions are captured in rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable

from lmpool.workers.backends.settings import importing
from lmpool.workers.execution.ranks import following


def main(prepare: Callable[[], None] = lambda: None) -> None:
    """Run a follower; `prepare` is called before SGLang is imported."""
    with following() as setup:
        prepare()
        from lmpool.workers.backends.sglang.backend import set_log_level

        set_log_level(setup["options"]["log_level"])
        with importing():
            from sglang.srt.server_args import PortArgs

            from lmpool.workers.backends.sglang import engine

        server_args = engine.make_server_args(setup["options"])
        scheduler = engine.make_scheduler(server_args, PortArgs(**setup["ports"]), setup["rank"])
        scheduler.run_event_loop()
        engine.end_scheduler(scheduler)


if __name__ == "__main__":
    main()
