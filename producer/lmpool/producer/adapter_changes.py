"""Changes of a model's adapters: one is offered to all workers, and put in service when all have loaded it.

A change is over when every live worker has followed it, and when `KNOWN_FOR_S` have passed in which clients may still
have used what they knew before. These count from the last change of this name, whoever made it: clients may know a
change that was given up or still waits, too. It is made over a state of the registry that every live worker has seen.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from lmpool.aio import delays
from lmpool.broker.registries import KNOWN_FOR_S, MARGIN_S, AdapterRegistry
from lmpool.errors import (
    AdapterRefused,
    AuthenticationFailed,
    DeadlineExceeded,
    LMPoolError,
    NoWorker,
    ProducerClosed,
    ServerError,
    SettingsError,
    UnknownAdapter,
    argument,
)
from lmpool.producer.client.connections import TROUBLE
from lmpool.producer.client.discovery import WorkerInfo
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import Session
from lmpool.protocol.adapter import (
    Adapter,
    Generation,
    Offer,
    Registered,
    check_adapter_name,
    check_source,
    name_of,
    qualify,
)
from lmpool.settings import shown

T = TypeVar("T")

_LOOK_S = 0.1
_CONFIRM_S = 0.5
_OUTLIVES_S = 10.0
_MAX_REPLICAS = 1000


class _WorkerReport(NamedTuple):
    """What a worker's heartbeat reports of the adapters of one name.

    Attributes:
        worker_id: the worker.
        seen: the last generation of the registry that it has seen.
        served: those in service that it has, as "name@revision".
        nonce: names the last offer that it has tried, or "".
        revision: of the adapter that it has loaded for that offer.
        refusal: why it could not load it.
    """

    worker_id: str
    seen: str = ""
    served: Sequence[str] = ()
    nonce: str = ""
    revision: str = ""
    refusal: str = ""


class AdapterChange:
    """One change of a model's adapters.

    Args:
        session: the session with the model's workers.
        name: of the adapter.
        deadline: until when.
        replicas: how many replicas of the server must have it before it is over.

    Raises:
        SettingsError: `name` or `replicas` is malformed.
    """

    def __init__(self, session: Session, name: str, deadline: Deadline, replicas: int = 0) -> None:
        self._session = session
        self._name = check_adapter_name("name", name)
        self._deadline = deadline
        self._replicas = check_replicas(replicas)
        self._waits_for = "the server has not answered"
        self._live: set[str] = set()
        self._offering: asyncio.Future[bool] | None = None
        self._heard: dict[str, float] = {}  # When a worker was last listed that still counts as live.

    async def add(self, source: str | Path) -> str:
        """Have all workers serve it; see `Producer.add_adapter`."""
        place = _resolved(source)
        before = (await self._session.adapters.all(self._deadline)).get(self._name)
        offer = Offer(place, secrets.token_hex(8))
        state = "it is not in service" + (f", revision {before} still is" if before else "")
        try:
            made = await self._limited(partial(self._put_in_service, offer, before), state)
        except ProducerClosed:
            raise  # There is no connection any more: the offer expires.
        except BaseException:
            self._session.spawn(self._withdraw(offer.nonce))
            raise
        revision = made.adapters[self._name].revision
        await self._finish(made, "it is in service", is_other=before not in (None, revision))
        return revision

    async def remove(self) -> None:
        """Have no worker serve it; see `Producer.remove_adapter`."""
        made = await self._limited(self._take_out, "it is still in service")
        await self._finish(made, "it is not in service any more", is_other=True)

    async def _finish(self, made: Registered, state: str, *, is_other: bool) -> None:
        self._session.adapters.changed(made)
        await self._limited(partial(self._settle, made, is_other=is_other), state)
        if self._replicas:
            await self._limited(partial(self._replicate, made), f"{state}, but a failover could undo that")

    async def _put_in_service(self, offer: Offer, before: str | None) -> Registered:
        """Returns what the registry was made."""
        await self._offer(offer)
        while True:
            loaded, known = await self._until_loaded(offer, before)
            adapter = Adapter(loaded.source, loaded.revision)
            adopt = partial(self._registry.adopt, self._name, loaded, known, _known_for())
            if (generation := await self._insist(adopt)) is not None:
                return _changed(known, known.adapters | {self._name: adapter}, generation)
            # A first try whose answer was lost may have done it; or the offer has just gone.
            known = await self._insist(self._registry.read)
            if known.adapters.get(self._name) == adapter:
                return known

    async def _offer(self, offer: Offer) -> None:
        lifetime = self._deadline.left + _OUTLIVES_S
        for wait in delays():
            if await self._insist(partial(self._try_to_offer, offer, lifetime)):
                return
            await self._pause(wait)  # Workers write down what the server has lost.

    async def _try_to_offer(self, offer: Offer, lifetime: float) -> bool:
        # A change may be given up while this is on its way to the server: taking it back then comes after it.
        self._offering = asyncio.ensure_future(self._registry.offer(self._name, offer, lifetime))
        return await asyncio.shield(self._offering)

    async def _until_loaded(self, offer: Offer, before: str | None) -> tuple[Offer, Registered]:
        """Wait until all workers have loaded what is offered; returns the offer with its revision, and the registry.

        Others may offer the same adapter at the same time, such as all processes of one program: their offers will do.
        """
        while True:
            known = await self._insist(self._registry.read)
            offered, served = known.offers.get(self._name), known.adapters.get(self._name)
            if offered is None:
                if served is not None and served.source == offer.source and served.revision != before:
                    return replace(offer, revision=served.revision), known
                if not await self._is_lost(known, before):
                    raise self._interrupted()
                # This one, though another's may have been there last: that one may have been taken back.
                await self._offer(offer)
                await self._pause(_LOOK_S)
                continue
            if offered.source != offer.source:
                raise self._interrupted()
            loading = await self._insist(partial(self._registry.loading, offered.nonce))
            reports = await self._reports()
            await self._check_survivors(loading, offered)
            tried = [worker for worker in reports if worker.nonce == offered.nonce]
            self._check_loaded(offered, tried)
            # One that drains meanwhile may yet end over it.
            if slow := {worker.worker_id for worker in reports if worker not in tried} | loading:
                self._waits_for = f"still loading or silent: {', '.join(sorted(slow))}"
            elif offered.revision and reports and self._have_seen(known, reports):
                return offered, known
            await self._pause(_LOOK_S)

    def _check_loaded(self, offer: Offer, tried: Sequence[_WorkerReport]) -> None:
        for worker in tried:
            if worker.refusal:
                raise AdapterRefused(f"the worker {worker.worker_id} cannot load it: {worker.refusal}")
            if offer.revision and worker.revision != offer.revision:
                raise AdapterRefused(
                    f"the workers have found different weights in {offer.source}: {worker.worker_id} has revision "
                    f"{worker.revision}, others {offer.revision}; was it written just now?"
                )

    async def _check_survivors(self, loading: set[str], offer: Offer) -> None:
        """Refuse what a worker has not survived: it would end the others, or those that start later.

        Args:
            loading: who loaded it before we looked who lives.
            offer: the adapter.
        """
        if not loading - self._live:
            return
        # One that leaves in good order takes its note back.
        loading &= await self._insist(partial(self._registry.loading, offer.nonce))
        for worker in sorted(loading - self._live):
            raise AdapterRefused(
                f"the worker {worker} ended or fell silent while it loaded it, so it was not put in service: look at "
                "that worker's log, mend the adapter, and add it again"
            )

    def _have_seen(self, known: Registered, reports: Sequence[_WorkerReport]) -> bool:
        """Whether no live worker has seen another state, which it will write down or give up.

        A change over a state that a worker knows to be old would undo what is missing there.
        """
        if behind := ", ".join(worker.worker_id for worker in reports if worker.seen != str(known.generation)):
            self._waits_for = f"have seen another state of the adapters: {behind}"
        return not behind

    async def _is_lost(self, known: Registered, before: str | None) -> bool:
        """Whether an offer that is gone was lost, by a server short of memory, say; else somebody has made a change."""
        served = known.adapters.get(self._name)
        if served is None and before is not None and known.owner:
            return False  # Removed.
        if served is not None and served.revision != before:
            return False
        return not await self._insist(partial(self._registry.replaced_for, self._name))

    async def _take_out(self) -> Registered:
        """Returns what the registry was made."""
        tried = False
        while True:
            # What this client believes: the server may have forgotten that there is one, or that there is none.
            await self._session.adapters.all(self._deadline)
            known = await self._insist(self._registry.read)
            if self._name not in known.adapters and known.owner == self._session.fingerprint:
                if tried:  # And the answer was lost, or somebody else was faster.
                    return known
                served = ", ".join(known.adapters) or "none"
                model = self._session.info.name
                raise UnknownAdapter(f"the model {model!r} has no adapter {shown(self._name)}; it has: {served}")
            if self._have_seen(known, await self._reports()):
                remove = partial(self._registry.remove, self._name, known, _known_for())
                tried = True
                if (generation := await self._insist(remove)) is not None:
                    left = {name: adapter for name, adapter in known.adapters.items() if name != self._name}
                    return _changed(known, left, generation)
            await self._pause(_LOOK_S)

    async def _settle(self, made: Registered, *, is_other: bool) -> None:
        """Wait until nobody uses another revision any more.

        Args:
            made: what the registry was made.
            is_other: this change has replaced another one. Others may have done so just before, and not waited.
        """
        loop = self._deadline.loop
        end = loop.time() + (_known_for() if is_other else 0.0)
        adapter = made.adapters.get(self._name)
        expected = [qualify(self._name, adapter.revision)] if adapter else []
        while True:
            await self._check_made(made)
            if behind := [worker.worker_id for worker in await self._reports() if list(worker.served) != expected]:
                self._waits_for = f"have not followed yet: {', '.join(behind)}"
                await self._pause(_LOOK_S)
                continue
            left = max(end - loop.time(), await self._insist(partial(self._registry.known_for, self._name)))
            if left <= 0:
                return
            self._waits_for = "clients may use what they know for a moment"
            await self._pause(left)

    async def _check_made(self, made: Registered) -> Registered:
        """Wait until what was made is what the server has; returns the registry.

        Raises:
            AdapterRefused: somebody else has changed the adapter of this name.
        """
        while (known := await self._insist(self._registry.read)).owner != made.owner or known.forgets(made):
            self._waits_for = "the server has forgotten it: a worker that has seen it writes it down again"
            await self._pause(_LOOK_S)
        if _revision(known, self._name) != _revision(made, self._name):
            raise self._interrupted()
        return known

    async def _replicate(self, made: Registered) -> None:
        """Wait until so many replicas have it."""
        connection = self._session.adapters.own_connection()
        try:
            while True:
                known = await self._check_made(made)
                confirm = partial(self._registry.confirm, connection, known, self._replicas, _CONFIRM_S)
                if (have := await self._insist(confirm)) >= self._replicas:
                    return
                self._waits_for = f"{have} of {self._replicas} replicas have it{'' if have else ': is any connected?'}"
        finally:
            connection.close()

    async def _withdraw(self, nonce: str) -> None:
        if self._offering is not None:
            await asyncio.wait([self._offering])
        try:
            await self._registry.withdraw(self._name, nonce)
        except TROUBLE:
            pass  # It expires.

    @property
    def _registry(self) -> AdapterRegistry:
        return self._session.adapters.registry

    async def _reports(self) -> list[_WorkerReport]:
        """The reports of the live workers."""
        reports, now = {}, self._deadline.loop.time()
        workers = await self._insist(self._session.workers)
        self._live = {worker.worker_id for worker in workers}
        for worker in workers:
            self._heard.pop(worker.worker_id, None)
            if worker.fields.get("state") != "draining":
                reports[worker.worker_id] = self._read(worker)
        # Heartbeats come three times a lease: a server that has forgotten one has it again by then.
        patience = self._session.info.lease_s / 2
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard < patience}
        silent = [_WorkerReport(name) for name in self._heard]
        self._heard |= dict.fromkeys(reports, now)
        if not reports and not silent:
            self._waits_for = ""
        return [*reports.values(), *silent]

    def _read(self, worker: WorkerInfo) -> _WorkerReport:
        try:
            seen, served = worker.fields.get("adapters_seen", ""), json.loads(worker.fields.get("adapters", "[]"))
            nonce, revision, refusal = json.loads(worker.fields.get("adapter_offers", "{}")).get(self._name, ("",) * 3)
            named = [adapter for adapter in served if name_of(adapter) == self._name]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ServerError(f"what the worker {worker.worker_id} tells of its adapters does not decode") from error
        return _WorkerReport(worker.worker_id, seen, named, nonce, revision, refusal)

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until the server answers."""
        for wait in delays():
            self._session.check_open()
            try:
                return await attempt()
            except (SettingsError, AdapterRefused, ProducerClosed):
                raise
            except TROUBLE as error:
                why = self._session.explain(error)
                if isinstance(why, AuthenticationFailed):
                    raise AuthenticationFailed(
                        f"{why}; changing adapters is a right of its own: name the server as the user `adapters` "
                        "(docker/redis/users.acl) or another one that has it"
                    ) from error
                self._waits_for = str(why)
            await self._pause(wait)
        raise AssertionError("the waits never end")

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than the session lasts."""
        loop = self._deadline.loop
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            self._session.check_open()

    async def _limited(self, work: Callable[[], Awaitable[T]], state: str) -> T:
        try:
            async with self._deadline.limit():
                return await work()
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise self._late(state) from error

    def _late(self, state: str) -> LMPoolError:
        model, seconds = self._session.info, self._deadline.seconds
        text = f"not done within {seconds:g} s with the adapter {self._name!r} of {model.name!r}: {state}"
        if not self._waits_for:
            return NoWorker(f"{text}, and no live worker serves the model; start one with `{model.start_command}`")
        return DeadlineExceeded(f"{text} ({self._waits_for}); allow more time ({argument('timeout')})")

    def _interrupted(self) -> AdapterRefused:
        return AdapterRefused(
            f"the adapter {self._name!r} is not what it was to be: somebody else has changed it meanwhile; look at "
            "what is in service, and try again"
        )


def _known_for() -> float:
    """For how many seconds clients may use what is replaced now, those with slower clocks too."""
    return KNOWN_FOR_S + MARGIN_S


def _changed(seen: Registered, adapters: dict[str, Adapter], generation: Generation) -> Registered:
    return seen._replace(adapters=adapters, generation=generation, base=seen.generation)


def _revision(known: Registered, name: str) -> str:
    return known.adapters[name].revision if name in known.adapters else ""


def check_replicas(replicas: object) -> int:
    """The number, if it can be one of replicas.

    Raises:
        SettingsError: it cannot.
    """
    if type(replicas) is not int or not 0 <= replicas <= _MAX_REPLICAS:
        raise SettingsError(f"replicas: {shown(replicas)} must be a number from 0 to {_MAX_REPLICAS}")
    return replicas


def _resolved(source: str | Path) -> str:
    """A folder that is here by its full path: workers run in other folders."""
    text = check_source("source", str(source) if isinstance(source, Path) else source)
    try:
        place = Path(text).expanduser()
        return check_source("source", str(place.resolve())) if place.exists() else text
    except (OSError, RuntimeError, ValueError):  # Too long for a path, or ~somebody who is not known here.
        return text
