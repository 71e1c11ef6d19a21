"""The faults of a simulation. Each is a coroutine that begins a fault, and that returns when the fault is healed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World

_MAX_DOWN_S = 6.0  # Max seconds that the server is down, full, or not reachable.
_MAX_CLOCK_S = 3600.0  # Max seconds by which a worker's clock is set; the server's is set by up to three times as many.
_CHANGE_CHECKS, _CHANGE_CHECK_S = 40, 0.05  # Checks whether a worker changes its version, and seconds between them.
_MAX_SNAPSHOT_S = 10.0  # Max age of a snapshot.


async def kill_worker(world: World, draw: Random) -> None:
    """SIGKILL of a worker, which its supervisor starts again."""
    if workers := world.running_workers():
        world.loop.kill(draw.choice(workers).process)


async def kill_supervisor(world: World, draw: Random) -> None:
    """SIGKILL of `lmpool up`, with which its workers end."""
    world.loop.kill(world.supervision.process)


async def drain_worker(world: World, draw: Random) -> None:
    """SIGTERM of a worker."""
    if workers := world.running_workers():
        draw.choice(workers).drain()


async def stop_worker(world: World, draw: Random) -> None:
    """SIGSTOP of a worker for up to three leases.

    If a worker changes its version within seconds, that one is stopped, until soon after its turn has expired.
    """
    for _ in range(_CHANGE_CHECKS if world.plan.changes[1] else 0):
        if world.oracle.changing:
            break
        await asyncio.sleep(_CHANGE_CHECK_S)
    if workers := world.running_workers():
        changing = [worker for worker in workers if worker.process in world.oracle.changing]
        leases = draw.uniform(1, 1.5) if changing else draw.uniform(0, 3)
        await _pause(world, draw.choice(changing or workers).process, leases * world.plan.lease_s)


async def kill_client(world: World, draw: Random) -> None:
    """SIGKILL of a client, which is started again."""
    world.loop.kill(draw.choice(world.clients).process)


async def kill_run(world: World, draw: Random) -> None:
    """SIGKILL of the run over a file, which is started again."""
    world.loop.kill(world.file_run.process)


async def stop_client(world: World, draw: Random) -> None:
    """SIGSTOP of a client."""
    await _pause(world, draw.choice(world.clients).process, draw.uniform(0.1, 10))


async def stop_server(world: World, draw: Random) -> None:
    """The server answers nothing for some seconds, as after SIGSTOP or a long command."""
    await _pause(world, world.server.process, draw.uniform(0.1, _MAX_DOWN_S))


async def _pause(world: World, process: object, seconds: float) -> None:
    world.loop.pause(process, seconds)  # type: ignore[arg-type]
    await asyncio.sleep(seconds)


async def restart_empty(world: World, draw: Random) -> None:
    """The server ends, and starts again without its keys."""
    await _restart(world, draw, None)


async def restart_old(world: World, draw: Random) -> None:
    """The server ends, and starts again with its keys of some seconds ago."""
    snapshot = world.server.snapshot()
    await asyncio.sleep(draw.uniform(0, _MAX_SNAPSHOT_S))
    await _restart(world, draw, snapshot)


async def restart_whole(world: World, draw: Random) -> None:
    """The server ends, and starts again with all its keys."""
    await _restart(world, draw, world.server)


async def _restart(world: World, draw: Random, contents: object) -> None:
    async with world.restarting:  # One restart after the other.
        server = world.server
        is_whole, clock_s = contents is server, server.process.clock_s
        kept = server.snapshot() if is_whole else contents
        server.kill()
        if not is_whole:
            world.lost_keys += 1
            world.oracle.last.clear()  # The server has lost the delivery counts too.
        await asyncio.sleep(draw.uniform(0.01, _MAX_DOWN_S))
        await server.start(kept, clock_s)


async def evict(world: World, draw: Random) -> None:
    """The server removes some of the keys that have a lifetime, as with `maxmemory-policy volatile-lru`."""
    items, share = world.server.live(), draw.choice((0.05, 0.5, 1.0))
    evicted = [key for key, item in items.items() if item.expireat is not None and draw.random() < share]
    world.lost_keys += bool(evicted)
    for key in evicted:
        del world.server.database[key]


async def fill(world: World, draw: Random) -> None:
    """The server refuses commands that need memory."""
    front = world.server.front
    front.is_full, world.full_at = True, math.inf
    await asyncio.sleep(draw.uniform(0.1, _MAX_DOWN_S))
    front.is_full, world.full_at = False, world.loop.time()


async def forget_scripts(world: World, draw: Random) -> None:
    """SCRIPT FLUSH."""
    world.server.front.engine.script_cache.clear()


async def jump_server_clock(world: World, draw: Random) -> None:
    """The server's clock is set: forward, so that keys expire early, or back, so that leases last longer."""
    step = draw.random() * draw.choice((1.0, -1.0, 60.0, -60.0, _MAX_CLOCK_S, 3 * _MAX_CLOCK_S))
    world.lost_keys += step > 0
    world.set_back_s += max(0.0, -step)
    world.server.process.clock_s += step


async def jump_worker_clock(world: World, draw: Random) -> None:
    """A worker's wall clock is set."""
    if workers := world.running_workers():
        draw.choice(workers).process.clock_s += draw.uniform(-_MAX_CLOCK_S, _MAX_CLOCK_S)


async def slow_links(world: World, draw: Random) -> None:
    """All links are slow."""
    world.network.delay_s = draw.choice((0.01, 0.1, 0.5))
    await asyncio.sleep(draw.uniform(1, 10))
    world.network.delay_s = 0.0


async def cut(world: World, draw: Random) -> None:
    """Some connections break."""
    share = draw.choice((0.2, 1.0))
    for pipe in [pipe for pipe in world.network.pipes if draw.random() < share]:
        pipe.cut(ConnectionResetError(104, "Connection reset by peer"))


async def half_open(world: World, draw: Random) -> None:
    """Some connections transport nothing any more, and neither side is notified."""
    for pipe in [pipe for pipe in world.network.pipes if draw.random() < 0.3]:
        pipe.is_half_open = pipe.peer.is_half_open = True


async def hang_step(world: World, draw: Random) -> None:
    """A step of a worker never ends."""
    if workers := world.running_workers():
        draw.choice(workers).next_step = "hang"


async def raise_in_step(world: World, draw: Random) -> None:
    """A step of a worker raises, or fails its prompts after a pause of the process."""
    if workers := world.running_workers():
        draw.choice(workers).next_step = draw.choice(("raise", "fail"))


async def slow_step(world: World, draw: Random) -> None:
    """A step of a worker takes up to three leases."""
    if workers := world.running_workers():
        worker = draw.choice(workers)
        worker.next_step_s = draw.uniform(0.5, 3 * world.plan.lease_s)


FAULTS: dict[str, Callable[[World, Random], Awaitable[None]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        kill_worker, kill_supervisor, drain_worker, stop_worker, kill_client, kill_run, stop_client, stop_server,
        restart_empty, restart_old, restart_whole, evict, fill, forget_scripts, jump_server_clock, jump_worker_clock,
        slow_links, cut, half_open, hang_step, raise_in_step, slow_step,
    )
}  # fmt: skip
"""Name of a kind of fault -> its coroutine."""
DISCONNECTING = ("stop server", "restart empty", "restart old", "restart whole", "cut", "half open")
"""Faults after which a command may have no reply."""
SILENT = ("forget scripts", "jump worker clock")
"""Faults that change nothing for clients."""
GENTLE = (*SILENT, "drain worker")
"""Faults that no client may notice."""
WORKER_FAULTS = ("kill worker", "stop worker")
"""Faults that may interrupt a worker while it changes its version of the weights."""
LOSSES = ("restart empty", "restart old")
"""Faults that may make the server forget a version."""
HARMLESS = ("kill client", "stop client", "kill run", "slow step")
"""Faults after which no job is delivered again: workers renew their leases during a slow step."""
