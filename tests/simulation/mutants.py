"""Defects that the simulation must find: each replaces some text of the package or of its Lua scripts.

Many are the rules that the models in `tests/models` break; the others are defects of earlier releases, or defects that
a programmer could make in the parts of the package on which the promises of `docs/design/promises.md` rest.

Some defects are not planted. Four only cost time: a worker steals a job that has just arrived; a worker ends a claim
although no client waits for the claimed jobs; a client does not check rows whose messages were lost, because it sends
the requests again after a lease; clients get no notice of a new version, because they also check for one every few
seconds. Five need conditions that the simulation lacks: a new stream without consumers, with ids of a later time; three
errors in the numbers of versions, which need sparse versions; and a decision about a version that is replaced, which
needs workers that decide differently. The last one, a message of the previous version that a client accepts, needs a
message that arrives at the same moment as the new version.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from textwrap import dedent
from typing import Any

from lmpool.broker import scripts
from lmpool.broker.connection import Connection
from lmpool.broker.registries import VersionRegistry
from lmpool.producer.client import session as client_session
from lmpool.producer.client.partitions import Partitions
from lmpool.producer.client.requests import DeadlineTimers, PendingRequests
from lmpool.producer.client.session import Session
from lmpool.producer.client.submit import Submitter
from lmpool.producer.client.versions import WeightVersions
from lmpool.protocol import job
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.dispatch import FetchLoop
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.membership.partitions import PartitionMover
from lmpool.workers.membership.versions import VersionKeeper
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.leases import Leases
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.worker import Worker
from tests.simulation.oracle import Oracle
from tests.simulation.plan import Plan
from tests.simulation.world import Result, World

Mutant = Callable[[], None]
"""Plants a defect in this process."""


def lua(file: str, old: str, new: str) -> Mutant:
    """Replace text of a Lua file, which occurs there once, in all scripts that include the file."""

    def plant() -> None:
        scripts._TEXTS[file] = _replaced(scripts._TEXTS[file], old, new)
        for script in vars(scripts).values():
            if isinstance(script, scripts.Script):
                script.__init__(script.name)  # type: ignore[misc]

    return plant


def python(function: Any, *texts: str) -> Mutant:
    """Replace texts of a function, a method or a property: `texts` has old texts, each with the new text."""

    def plant() -> None:
        original: Any = function.fget if isinstance(function, property) else inspect.unwrap(function)
        module = sys.modules[original.__module__]
        scope: dict[str, Any] = {}
        source = dedent(inspect.getsource(original))
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            source = _replaced(source, old, new)
        exec(source, vars(module), scope)
        *owner, name = original.__qualname__.split(".")
        # Other modules may have imported a function.
        owners = [getattr(module, *owner)] if owner else [each for each in _package() if hasattr(each, name)]
        for each in owners:
            if owner or getattr(each, name) is function:
                setattr(each, name, scope[name])

    return plant


def _package() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(("lmpool", "tests.simulation"))]


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{old!r} occurs {text.count(old)} times, not once")
    return text.replace(old, new)


def both(*mutants: Mutant) -> Mutant:
    """Plant several changes, which together are one defect."""

    def plant() -> None:
        for mutant in mutants:
            mutant()

    return plant


def simulate_mutant(plan: Plan, name: str) -> Result:
    """Run a plan with a planted defect, until the first violation. It stays in this process."""

    def violation(self: Oracle, text: str) -> None:
        report(self, text)
        raise SystemExit

    MUTANTS[name]()
    report, Oracle.violation = Oracle.violation, violation  # type: ignore[method-assign]
    world = World(plan)
    try:
        return world.run()
    except SystemExit:
        return Result(world.oracle.violations, "", world.loop.time(), {}, world.lines)


_LANES: dict[str, Mutant] = {
    # Rules that Lanes.tla breaks.
    "a client that cancels searches for its job in the shared stream only": lua(
        "cancel", "local stream, id = locate(job or '')", "local stream, id = jobs, string.match(job or '', '^%S*')"
    ),
    "a job ends before its row is stored": both(
        python(
            Publisher._attempt,
            "if parts is not None and",
            "if False and",
            "refused = await self.rows.put(block, overwrite, then=end, shared=shared)",
            "await end(self.rows.queue, ())\n    refused = await self.rows.put(block, overwrite, shared=shared)",
        ),
        lua("finish", "(was_stored or redis.call('EXISTS', row) == 1)", "true"),
        lua("finish", "if size == 0 or type(size) == 'table' then\n    left", "if false then\n    left"),
    ),
    "a prompt that may have crashed two workers runs together with others": lua(
        "claim_expired", "local is_last = deliveries == max_deliveries - 1", "local is_last = false"
    ),
    "a stolen job keeps its old place in the waiting key": lua(
        "moving",
        "place(waiting_for .. job.digest, entry, ",
        "local _ = worker or place(waiting_for .. job.digest, entry, ",
    ),
    "a worker steals a job that another worker holds": lua(
        "moving", "command, from, to = 'XREVRANGE', to, from", "command, from, to = 'XREVRANGE', '+', '-'"
    ),
    "a stolen job also stays in the lane of its owner": lua(
        "moving",
        "  count_added()\n  remove_entries(entries)",
        "  count_added()\n  remove_entries(worker and {} or entries)",
    ),
    "a worker that was declared dead steals before it registers again": lua(
        "find_work", "or not has_lanes or redis.pcall('HEXISTS', capacities, worker) ~= 1", "or not has_lanes"
    ),
    "the lane of a dead worker is removed although other workers hold jobs of it": lua(
        "remove_gone",
        "elseif #held == 0 and (tonumber(redis.pcall('XLEN', lane_of .. name)) or 0) == 0",
        "elseif #held == 0",
    ),
    "jobs stay in the lane of a dead worker": lua(
        "remove_gone", "close_lane(name, MAX_MOVED - moved)", "close_lane(name, 0)"
    ),
    "claims search only lanes that get new jobs": lua(
        "claim_expired",
        "is_full or worker ~= consumer and scan_lane(worker)",
        "is_full or worker ~= consumer and redis.call('HEXISTS', capacities, worker) == 1 and scan_lane(worker)",
    ),
    "a worker that drains drops the jobs of its lane": lua(
        "close_lane",
        "return close_lane",
        "move = function(_, moved)\n  for _, job in ipairs(moved) do remove_entries"
        "({job.entry}) end\nend\nreturn close_lane",
    ),
    "heartbeats of a worker that drains list its lane again": python(
        Heartbeat.send, "self._register(0 if is_draining else self.batch)", "self._register(self.batch)"
    ),
    "a worker that drains is the home of new jobs": lua(
        "lanes",
        "deadline >= opened_at and redis.pcall('HEXISTS', capacities, worker) == 1 or false",
        "deadline >= opened_at",
    ),
    "a worker does not claim from its own lane": lua(
        "claim_expired", "local is_full = scan_lane(consumer)", "local is_full = false"
    ),
    # Other defects of the queue.
    "a finished job stays in its stream": both(
        lua("finish", "redis.pcall('XDEL', stream, id or entry) == 1 and worker", "worker"),
        lua("finish", "remove_entries(entries, true)", "remove_entries({}, true)"),
    ),
    "the sum of the lengths of lanes is not updated": lua(
        "streams", "tonumber(redis.pcall('ZINCRBY', lanes, more, '')) or 0", "in_lanes()"
    ),
    "the sum of the capacities is not updated": lua("moving", "redis.pcall('HINCRBY', capacities, '', -size)", ""),
    "a job that leaves a closed lane is copied": lua(
        "moving",
        "  count_added()\n  remove_entries(entries)",
        "  count_added()\n  remove_entries(worker and entries or {})",
    ),
    "the prompt of a cancelled request keeps its job": lua("cancel", "      remove_entries({job})", ""),
    "a job in the backlog is lost when it moves up": lua(
        "fair_queue", "if at and (now < deadline", "if at and i < 3 and (now < deadline"
    ),
    "the backlog does not move up": both(
        lua("finish", "move_up(#entries)", ""), lua("cancel", "move_up()", ""), lua("find_work", "  move_up()\n", "")
    ),
    "clients that join a job are not told of its row": lua(
        "notify",
        "local clients = sole and {sole} or redis.pcall('HRANDFIELD', waiting, MAX_NOTIFIED) or {}",
        "local clients = sole and {sole} or redis.pcall('HRANDFIELD', waiting, 2) or {}",
    ),
    "the backlog of one client delays the prompts of another": lua(
        "submit", "local member = kind == CONTINUED and reply .. TOKENS or reply", "local member = 'all'"
    ),
    "jobs of dead workers are not claimed": python(
        FetchLoop.claim, "async with self.paused():", "return\n    async with self.paused():"
    ),
    "jobs of a read without a reply are not claimed": both(
        python(
            Worker._beat,
            "if beat.has_turn or has_lost_jobs:",
            "if beat.has_turn:",
            "self._is_complete |= beat.is_complete",
            "self._is_complete = False",
        ),
    ),
    "a worker renews no leases": python(Leases.renew, "range(0, len(entry_ids), scripts.MAX_AT_ONCE)", "()"),
    "a job is never given up": python(Leases.claim, "if deliveries >= self._max_deliveries:", "if False:"),
    "a worker does not count the delivery of a claimed job": lua(
        "claim_expired", "'RETRYCOUNT', deliveries + 1", "'RETRYCOUNT', deliveries"
    ),
    "a failed job ends although another worker has taken it over": lua(
        "finish", "elseif not failure or is_held(entry, ARGV[6]) then", "else"
    ),
    "a job for which a client waits is dropped when it is old": lua(
        "waiting", "return count > 1 or count == 0", "return count > 2 or count == 0"
    ),
}

_WORKERS: dict[str, Mutant] = {
    "a heartbeat has no lifetime": lua("heartbeat", "redis.call('PEXPIRE', KEYS[1], ARGV[1])", ""),
    "a row is stored without a lifetime": lua(
        "finish", "redis.pcall('SET', row, part, 'PX', row_ms, 'NX')", "redis.pcall('SET', row, part, 'NX')"
    ),
    "a reply stream has no lifetime": both(
        lua("finish", "      redis.call('PEXPIRE', reply, ARGV[4])", ""),
        lua("notify", "    redis.call('PEXPIRE', reply, ARGV[4])", ""),
    ),
    "a worker that drains takes new jobs": both(
        python(
            FetchLoop.fetch,
            "while not lifecycle.stopping.is_set():",
            "while True:",
            "lifecycle.stopping.is_set() or self._capacity_for_new() > 0",
            "self._capacity_for_new() > 0",
        ),
        python(FetchLoop._take, "not self.lifecycle.stopping.is_set() and ", ""),
    ),
    "a worker that ends does not wait for its prompts": both(
        python(
            Worker._drain,
            "await lifecycle.wait_for(lambda: not in_flight or not engine_thread.owed)",
            "",
            "await lifecycle.wait_for(lambda: not in_flight)\n",
            "in_flight.clear()\n",
        ),
    ),
    "the info of a model is removed when one of several workers ends": both(
        python(Heartbeat.leave, "and not await self._serving(other, seen)", ""),
        python(Heartbeat._forget, "if has_workers or not await", "if not await"),
    ),
    "a worker that the server has lost does not register again": python(
        Heartbeat.send, "if is_lost or is_draining or self._beats % _REGISTER_BEATS == 0:", "if is_draining:"
    ),
    "workers are not removed when their deadlines have passed": lua(
        "remove_gone",
        "redis.call('ZRANGEBYSCORE', workers, '-inf', now",
        "redis.call('ZRANGEBYSCORE', workers, '-inf', 0",
    ),
    "a lost consumer group is not created again": python(Consumer.take, "await self.ensure_group()\n", "pass\n"),
    "a lost script is not sent again": python(
        scripts.Script.on, 'return await call("EVAL", self.source, len(keys), *keys, *args)', "raise"
    ),
    "a lost script ends the calls of a pipeline": python(
        scripts.run_in_order, "await call[0](redis, *call[1:]) if failed[at] else replies[at]", "replies[at]"
    ),
    "a silent connection is never closed": python(Connection._close_late, "self._timer = None", "return"),
    "an answer for one query is taken for another": python(
        job.query_digest, "hashlib.blake2b(query,", "hashlib.blake2b(query[:1],"
    ),
    "the digest of a prompt ignores the adapter": python(job.digest_of, "if not adapter:", "if True:"),
}

_PARTITIONS: dict[str, Mutant] = {
    "the last client decides the partition of a prompt": lua("meet", "if is_usable(partition) then", "if false then"),
    "clients do not record the partition of a prompt": python(
        Partitions.meet, "[request for request in chosen if not request.is_private]", "[]"
    ),
    "a submission does not read the recorded partition": lua("submit", "if partition ~= '' then", "if false then"),
    "clients that wait in the partition of the digest are not seen": lua(
        "meet", "partition = is_waiting and own or proposed", "partition = proposed"
    ),
    "a worker moves to another partition while it holds jobs": both(
        python(FetchLoop.is_idle, "not self.in_flight and ", ""),
        python(Worker._check_partitions, "was_idle=was_idle", "was_idle=True"),
    ),
    "no worker moves to a partition that has jobs and no worker": python(
        PartitionMover.better_partition, "others = {", "return None\n    others = {"
    ),
    "a worker that moves stays registered": python(
        PartitionMover.move, "await self._heartbeat.leave_partition(own)", "pass"
    ),
    "a worker that moves does not use the keys of its new partition": python(
        PartitionMover._use,
        "self._heartbeat.partition, self._consumer.reader.keys = number, keys",
        "self._heartbeat.partition = number",
    ),
}

_VERSIONS: dict[str, Mutant] = {
    "all workers change to a new version at once": python(
        VersionRegistry.take_turn, "for slot in range(slots):", "for slot in range(1000):"
    ),
    "a client goes back to the version that new clients use": python(
        client_session._is_older, "info.version < seen.version and", "False and"
    ),
    "a turn to change does not expire": python(VersionRegistry.take_turn, ", nx=True, px=lease_ms)", ", nx=True)"),
    "a worker registers for a version before the version is tried": python(
        VersionKeeper._decide, "return decided == wire.SERVED and not reason", "return True"
    ),
    "a worker starts with a version that no worker has tried": python(
        VersionKeeper.start, "chain(is_tried=False)", "chain()"
    ),
    "a client accepts a late reply to a submission to the previous version": python(
        Submitter._submit_portion, "if self._connections.model.rows is not rows:", "if False:"
    ),
    "the version of new clients is written at registrations only": python(
        Worker.send_heartbeat, "await self.versions.keep()", "pass"
    ),
    "the only worker of the newest version changes before the others": python(
        VersionKeeper._lets_others_go_first, "if now < self._waits_until:", "if False:"
    ),
    "workers try a version that ends them again and again": python(
        VersionKeeper.change, "await self._insist(count_try) > _MAX_TRIES", "False"
    ),
    "a worker does not load its weights again after it refused a version": python(
        VersionKeeper.change, "if not is_served and has_changed:", "if False:"
    ),
    "a client does not send its requests again when its version is left": python(
        PendingRequests.restart, "for request in self._requests.values():", "for request in ():"
    ),
    "a worker whose turn has expired ends the turn of another": python(
        VersionRegistry.end_turn, "if await self.redis.get(key) == worker_id.encode():", "if True:"
    ),
    "clients never use a new version": python(VersionKeeper._point, "values = [", "return\n    values = ["),
    "rows of two versions have the same key": python(
        ModelInfo.of_version, 'revision=f"{revision}@{version.number}.{version.nonce}"', "revision=revision"
    ),
    "a client keeps the rows of the version before in its memory": python(
        PendingRequests.restart, "self._cache.clear()\n", "pass\n"
    ),
    "a worker changes its version while it holds prompts": python(
        Worker._drain,
        "await lifecycle.wait_for(lambda: not in_flight or not engine_thread.owed)",
        "self.versions.next is None and await lifecycle.wait_for(lambda: not in_flight or not engine_thread.owed)"
        "\n    in_flight = in_flight if self.versions.next is None else {}",
    ),
    "the registry is not restored after a loss": python(
        VersionKeeper._restore, "for version in self._chain:", "for version in ():"
    ),
    "a publisher removes all versions from the registry": python(
        WeightVersions._wait,
        "await self._insist(partial(self._registry.forget, old, keep_entries=True), deadline)\n",
        "await self._insist(partial(self._registry.forget, registered.versions), deadline)\n",
    ),
}

_CLIENTS: dict[str, Mutant] = {
    "a client does not send lost requests again": python(Session._recheck, "silent = [", "silent = [] and ["),
    "deadlines of clients are not checked": python(DeadlineTimers._end, "self._expire(waiter)", "pass"),
    "a client whose submission failed does not send it again": python(
        Submitter._send, "        self.retry_soon()\n", ""
    ),
    "a client that ends keeps its requests": python(
        Submitter.cancel_all, "await self._cancel(partition, parts.get(partition, []))", ""
    ),
    "a cancelled request is not withdrawn": python(
        Submitter.cancel, "if request.stage is not Stage.UNSENT:", "if False:"
    ),
    "a request that was refused by a full queue waits forever": python(
        Submitter._submit_portion, "if self.is_full and self._waits:", "if False:"
    ),
    "a client that joins a job is not registered": lua(
        "submit",
        "redis.call('HSET', waiting, reply, '')\n  end\n  if job == LATER",
        "redis.call('EXISTS', waiting)\n  end\n  if job == LATER",
    ),
    "a prompt of a batch gets the outcome of the prompt before it": lua(
        "submit", "outcome[i] = is_done[waiting]\n", "outcome[i] = i > 1 and outcome[i - 1] or is_done[waiting]\n"
    ),
}

MUTANTS: dict[str, Mutant] = _LANES | _WORKERS | _PARTITIONS | _VERSIONS | _CLIENTS
"""Defect, as a sentence -> plants it."""
