"""The loop keeps asyncio's promises in virtual time, and code that leaves the simulation raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import asyncio, socket, subprocess, threading, time
from random import Random
from tests.simulation import isolation, threads
from tests.simulation.loop import Escaped, Process, SimulatedLoop, Stuck
from tests.simulation.network import Network
loop = SimulatedLoop(Random(1))
network = Network(loop)
isolation.begin(loop, Random(2))
"""


def run(code: str) -> str:
    """Run code in an isolated process; return what it printed."""
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "escape",
    [
        "time.sleep(1)",
        "socket.socket().connect(('127.0.0.1', 1))",
        "subprocess.Popen(['true'])",
        "threading.Event().wait()",
    ],
)
def test_code_that_uses_real_time_sockets_or_processes_raises(escape: str) -> None:
    assert "Escaped: " in run(f"async def main():\n    {escape}\nloop.run_until_complete(main())")


def test_a_wait_that_nothing_ends_is_reported() -> None:
    assert "Stuck: " in run("loop.run_until_complete(loop.create_future())")


def test_time_passes_only_while_all_wait() -> None:
    code = """
async def main():
    real, began = isolation._real_monotonic(), time.monotonic()
    await asyncio.sleep(2000)
    print(2000 <= time.monotonic() - began < 2001, isolation._real_monotonic() - real < 60)
loop.run_until_complete(main())
"""
    assert run(code) == "True True\n"


def test_a_killed_process_runs_nothing_more_and_a_stopped_one_later() -> None:
    code = """
async def work(name):
    try:
        for _ in range(3):
            await asyncio.sleep(1)
            print(name, int(loop.time()))
    finally:
        print(name, "ends")

async def main():
    dead, late = Process("dead"), Process("late")
    tasks = [loop.create_task(work(p.name), context=loop.context_of(p)) for p in (dead, late)]
    await asyncio.sleep(1.5)
    loop.kill(dead)
    loop.pause(late, 10)
    await tasks[1]
loop.run_until_complete(main())
import os; print(flush=True); os._exit(0)  # Nothing of the killed process may run, also not at the end.
"""
    lines = run(code).split("\n")
    assert sorted(lines[:2]) == ["dead 1", "late 1"]
    assert lines[2:5] == ["late 11", "late 12", "late ends"]


def test_bytes_arrive_in_order_in_pieces_and_the_end_of_a_process_closes_its_connections() -> None:
    code = """
received, ended = [], asyncio.Event()
class Server(asyncio.Protocol):
    def data_received(self, data): received.append(data)
    def connection_lost(self, error): ended.set()

async def client():
    transport, _ = await loop.create_unix_connection(asyncio.Protocol, "/s")
    for number in range(200):
        transport.write(b"%03d," % number)
    await asyncio.sleep(100)

async def main():
    await loop.create_unix_server(Server, "/s")
    process = Process("client")
    task = loop.create_task(client(), context=loop.context_of(process))
    await asyncio.sleep(10)
    loop.kill(process)
    await ended.wait()
    print(b"".join(received) == b"".join(b"%03d," % number for number in range(200)), len(received) > 200)
loop.run_until_complete(main())
"""
    assert run(code).startswith("True True\n")


def test_a_thread_waits_in_virtual_time() -> None:
    code = """
async def main():
    queue = threads.SimpleQueue()
    def work():
        print(queue.get())
        time.sleep(50)
        print(round(time.monotonic()))
    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.sleep(10)
    queue.put("item")
    await asyncio.sleep(60)
    print(thread.is_alive())
loop.run_until_complete(main())
"""
    assert run(code) == "item\n60\nFalse\n"
