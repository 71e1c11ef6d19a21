"""A short soak run with planted defects reports these defects, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from tests.faults.chaos.plan import Kind
from tests.faults.chaos.settings import ChaosSettings
from tests.soak.strikes import ClientKind, Window
from tests.soak.watch import Judge
from tests.soak.worker import PLANT_VARIABLE


def test_wrong_rows_and_leaked_descriptors_of_a_worker_are_reported() -> None:
    options = ["--hours", "0.001", "--seed", "7", "--quiet", "--workers", "1", "--clients", "1"]
    command, environment = (
        [sys.executable, "-m", "tests.soak", *options],
        {**os.environ, PLANT_VARIABLE: "rows descriptors"},
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("VIOLATION ")]
    violations = [json.loads(line) for line in lines]
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = next(violation for violation in violations if violation["event"] == "wrong" and violation["kind"] == "rows")
    assert wrong["prompt"], wrong
    assert wrong["got"] != wrong["expected"]
    # A busy machine may have no time for one kind of request, which the run reports as "failed".
    others = {violation.get("what") for violation in violations if violation["event"] not in ("wrong", "failed")}
    assert others, "no leak was reported"
    assert others <= {"descriptors of worker 0.1", "growth of the descriptors of worker 0.1"}


def test_an_exception_is_permitted_only_for_its_kind_of_request_and_after_its_fault() -> None:
    now = time.monotonic()
    window = Window(ClientKind.FLUSH, now - 5.0, now - 4.9)
    line = {"kind": "adapter", "error": "UnknownAdapter", "text": "", "size": 8, "began": now - 1, "at": now}

    def violations(window: Window, **changes: object) -> int:
        judge = Judge(ChaosSettings(seconds=1, seed=7), [window])
        judge._judge({"event": "error", "client": "client 1.1", **line, **changes})
        return len(judge.violations)

    assert violations(window) == 0
    assert violations(window, kind="rows") == 1
    assert violations(window, error="WorkerError") == 1
    assert violations(window._replace(kind=Kind.CUT)) == 1
    assert violations(window._replace(hit=now - 60, over=now - 59)) == 1
    assert violations(window._replace(hit=now + 1, over=now + 2)) == 1
