"""Runs the simulations of several seeds, each in a process of its own, and shrinks the faults of seeds that fail."""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from statistics import median
from threading import Lock
from typing import NoReturn

from tests.simulation.mutants import MUTANTS, simulate_mutant
from tests.simulation.plan import REQUESTS, Plan, draw_plan
from tests.simulation.server import SimulatedClient
from tests.simulation.world import Result, World

MAX_CPU_S = 120
"""Seconds of the processor after which a simulation is ended, because it probably loops endlessly."""

_SHOWN_EVERY = 500  # Seeds between two lines that show the progress of a long run.

_forking = Lock()  # A child that is forked meanwhile would hold the pipe open.


def simulate(plan: Plan, mutant: str = "") -> Result:
    """Run a plan in a child of this process, which keeps nothing of other simulations and of the defect `mutant`.

    Raises:
        RuntimeError: the child failed, for example because the defect cannot be planted.
    """
    with _forking:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _run_child(plan, mutant, writer)
        os.close(writer)
    with os.fdopen(reader, "rb") as source:
        data = source.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code > 0:
        raise RuntimeError(f"the process of seed {plan.seed} has failed, see its traceback above")
    if code < 0:
        return Result([f"the simulation was ended by signal {-code}: an endless loop?"], "", 0.0, {}, [])
    return Result(**json.loads(data))


def _run_child(plan: Plan, mutant: str, writer: int) -> NoReturn:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        result = simulate_mutant(plan, mutant) if mutant else World(plan).run()
        with os.fdopen(writer, "wb") as out:
            out.write(json.dumps(asdict(result)).encode())
        code = 0
    except BaseException:  # noqa: BLE001  the process ends, and must not run the cleanup of killed processes
        traceback.print_exc()
    finally:
        os._exit(code)


def shrink(plan: Plan) -> tuple[Plan, Result]:
    """Leave out faults as long as the plan still fails."""
    result, at = simulate(plan), 0
    while at < len(plan.faults):
        less = replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
        tried = simulate(less)
        if tried.violations:
            plan, result = less, tried
        else:
            at += 1
    return plan, result


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring; the exit code is 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed and print its log")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this time")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--shrink", action="store_true", help="leave out faults that a failure does not need")
    parser.add_argument("--apply", action="store_true", help="only check that each planted defect can be planted")
    parser.add_argument("--trace", default="", help="log the commands of the server that contain this text")
    parser.add_argument(
        "--mutant", choices=MUTANTS, metavar="NAME", help="run seeds until one shows this planted defect"
    )
    parser.add_argument("--mutants", action="store_true", help="do so for each defect of mutants.py, and print a table")
    given = parser.parse_args(arguments)
    SimulatedClient.traced = given.trace.encode()
    gc.freeze()  # Else each child would copy the memory of all imported modules when it collects garbage.
    if (given.seed is None and given.shrink) or (given.seed is not None and (given.mutant or given.mutants)):
        parser.error("--shrink needs --seed, and --seed excludes --mutant and --mutants")
    if given.seed is not None:
        return _one(given.seed, given.requests, shrinks=given.shrink)
    if given.apply:
        return _apply()
    if given.mutant or given.mutants:
        return _find_mutants([given.mutant] if given.mutant else list(MUTANTS), given)
    until, seeds = time.monotonic() + given.seconds, iter(range(given.first, given.first + given.count))
    outcomes, failed, done = Counter[str](), list[int](), 0

    def run(_: int) -> None:
        nonlocal done
        while time.monotonic() < until and (seed := next(seeds, None)) is not None:
            result = simulate(draw_plan(seed, given.requests))
            done += 1
            outcomes.update(result.outcomes)
            if done % _SHOWN_EVERY == 0:
                print(f"{done} seeds, {len(failed)} failed", flush=True)
            if result.violations:
                failed.append(seed)
                again = f"python -m tests.simulation --seed {seed} --requests {given.requests}"
                print(f"seed {seed} failed:", *result.violations[:3], f"repeat it: {again}", sep="\n  ", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, range(given.jobs)))
    how = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    print(f"{done} seeds, {sum(outcomes.values())} requests ({how}), {len(failed)} failed: {failed}")
    return int(bool(failed))


def _apply() -> int:
    """Plant each defect in a process of its own, without a simulation."""
    for plant in MUTANTS.values():
        if (child := os.fork()) == 0:
            code = 1
            try:
                plant()
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            return 1
    print(f"{len(MUTANTS)} defects can be planted")
    return 0


def _find_mutants(names: Sequence[str], given: argparse.Namespace) -> int:
    """Print how many seeds it takes to find each defect; the exit code is 1 if a defect was not found."""
    found, plans = (
        list[int](),
        [draw_plan(seed, given.requests) for seed in range(given.first, given.first + given.count)],
    )

    def find(name: str) -> tuple[int, str] | None:
        for seeds, plan in enumerate(plans, 1):
            violations = simulate(plan, name).violations
            if violations and not simulate(plan).violations:
                return seeds, violations[0]
        return None

    print("| planted defect | seeds | first failure |", "| --- | --- | --- |", sep="\n")
    with ThreadPoolExecutor(given.jobs) as pool:
        for name, outcome in zip(names, pool.map(find, names), strict=True):
            seeds, failure = outcome or (f"not in {given.count}", "")
            found += [outcome[0]] if outcome else []
            print(f"| {name} | {seeds} | {failure} |", flush=True)
    print(f"{len(found)} of {len(names)} found, after a median of {median(found or [0]):g} seeds")
    return int(len(found) < len(names))


def _one(seed: int, requests: int, *, shrinks: bool) -> int:
    plan = draw_plan(seed, requests)
    if shrinks:
        plan, result = shrink(plan)
    else:
        result = simulate(plan)
    print(*result.lines, sep="\n")
    print(f"seed {seed}: {result.seconds:.1f} virtual seconds, {result.outcomes}, log {result.digest}")
    print(*result.violations, sep="\n")
    return 1 if result.violations else 0
