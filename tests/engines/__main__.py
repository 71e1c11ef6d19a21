"""Runs tests in several variants of one engine: imports the engine once, and forks a process for each run.

    python -m tests.engines VARIANT PATH... [-- VARIANT PATH...]...

Importing an engine takes as long as many of its tests. Each run of tests needs a process, because an engine does not
free all resources. The first variant decides which shims are installed before the engine is imported.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import pytest

from lmpool.workers.backends.settings import importing
from tests.contract.subjects import chosen

_IMPORTED_FIRST = {
    "vllm": ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu_worker"),
    "sglang": ("lmpool.workers.backends.sglang.engine",),
}
"""Engine -> modules to import before the fork. They must start no thread, because threads do not survive a fork."""


def main(arguments: Sequence[str]) -> int:
    """Run all variants; returns 1 if a run fails."""
    runs: list[list[str]] = [[]]
    for word in arguments:
        if word == "--":
            runs.append([])
        else:
            runs[-1].append(word)
    os.environ["LMPOOL_CONTRACT"] = runs[0][0]
    chosen()  # Call `chosen` for its side effect: it installs the shims.
    with importing():
        for name in ("tests.contract.model", *_IMPORTED_FIRST[runs[0][0].partition("-")[0]]):
            import_module(name)
    gc.freeze()
    return max([_run(variant, paths) for variant, *paths in runs])


def _run(variant: str, paths: list[str]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ["LMPOOL_CONTRACT"] = variant
            print(f"{variant}: {' '.join(paths)}", flush=True)
            code = int(pytest.main(paths))
        except BaseException:  # noqa: BLE001  # The exception must not reach the loop of the parent process.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return int(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)


if __name__ == "__main__":
    # Exit without the interpreter's cleanup, in which libraries of Triton print long messages about open resources.
    os._exit(main(sys.argv[1:]))
