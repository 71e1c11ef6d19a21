"""Loading, replacing and removing adapters: offered to all workers, put in service when all have loaded it.

A change is over when every live worker has followed it, and when `KNOWN_FOR_S` have passed in which clients may still
have used what they knew before: since the last change of this name, whoever made it, for one that was given up or
waits still has been known too.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from lmpool.adapters import (
    KNOWN_FOR_S,
    Adapter,
    AdapterRegistry,
    Offer,
    Registered,
    check_adapter_name,
    check_source,
    name_of,
    qualify,
)
from lmpool.backoff import delays
from lmpool.checks import shown
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
)
from lmpool.producer.channel import TROUBLE
from lmpool.producer.lobby import WorkerInfo
from lmpool.producer.session import Session
from lmpool.producer.within import Within

T = TypeVar("T")

_LOOK_S = 0.1
_MARGIN_S = 0.5
_OUTLIVES_S = 10.0


class _Told(NamedTuple):
    """What a worker has told of the adapters of one name with its heartbeat.

    Attributes:
        worker_id: the worker.
        served: those in service that it has, as "name@revision".
        nonce: names the last offer that it has tried, or "".
        revision: what it has loaded then.
        refusal: why it could not.
    """

    worker_id: str
    served: list[str]
    nonce: str
    revision: str
    refusal: str


class AdapterChange:
    """One change of a model's adapters.

    Args:
        session: the session with the model's workers.
        name: of the adapter.
        within: for how long.

    Raises:
        SettingsError: `name` is none.
    """

    def __init__(self, session: Session, name: str, within: Within) -> None:
        self._session = session
        self._name = check_adapter_name("name", name)
        self._within = within
        self._waits_for = "the server has not answered"
        self._live: set[str] = set()

    async def add(self, source: str | Path) -> str:
        """Have all workers serve it; see `Producer.add_adapter`."""
        place = _resolved(source)
        before = (await self._session.adapters.all(self._within)).get(self._name)
        offer = Offer(place, secrets.token_hex(8))
        state = "it is not in service" + (f", revision {before} still is" if before else "")
        try:
            revision = await self._limited(partial(self._put_in_service, offer, before), state)
        except ProducerClosed:
            raise  # There is no connection any more: the offer expires.
        except BaseException:
            self._session.spawn(self._withdraw(offer.nonce))
            raise
        is_other = before not in (None, revision)
        await self._limited(partial(self._settle, revision, is_other=is_other), "it is in service")
        return revision

    async def remove(self) -> None:
        """Have no worker serve it; see `Producer.remove_adapter`."""
        known = await self._session.adapters.all(self._within)
        if self._name not in known or not await self._limited(self._take_out, "it is still in service"):
            served = ", ".join(known) or "none"
            model = self._session.card.name
            raise UnknownAdapter(f"the model {model!r} has no adapter {shown(self._name)}; it has: {served}")
        await self._limited(partial(self._settle, "", is_other=True), "it is not in service any more")

    async def _put_in_service(self, offer: Offer, before: str | None) -> str:
        await self._offer(offer)
        while True:
            loaded = await self._until_loaded(offer, before)
            if await self._insist(partial(self._registry.adopt, self._name, loaded, _known_for())):
                return loaded.revision
            # A first try whose answer was lost may have done it; or the offer has just gone.
            known = await self._insist(self._registry.read)
            if known.adapters.get(self._name) == Adapter(loaded.source, loaded.revision):
                return loaded.revision

    async def _offer(self, offer: Offer) -> None:
        lifetime = self._within.left + _OUTLIVES_S
        for wait in delays():
            if await self._insist(partial(self._registry.offer, self._name, offer, lifetime)):
                return
            await self._pause(wait)  # Workers write down what the server has lost.

    async def _until_loaded(self, offer: Offer, before: str | None) -> Offer:
        """Wait until all workers have loaded what is offered; returns the offer with its revision.

        Others may offer the same adapter at the same time, such as all processes of one program: theirs will do.
        """
        while True:
            known = await self._insist(self._registry.read)
            found, served = known.offers.get(self._name), known.adapters.get(self._name)
            if found is None:
                if served is not None and served.source == offer.source and served.revision != before:
                    return offer._replace(revision=served.revision)
                if not await self._is_lost(known, before):
                    raise self._interrupted()
                # Our own, though another's may have been there last: that one may have been taken back.
                await self._offer(offer)
                await self._pause(_LOOK_S)
                continue
            if found.source != offer.source:
                raise self._interrupted()
            loading = await self._insist(partial(self._registry.loading, found.nonce))
            told = await self._told()
            await self._check_survivors(loading, found)
            tried = [worker for worker in told if worker.nonce == found.nonce]
            for worker in tried:
                if worker.refusal:
                    raise AdapterRefused(f"the worker {worker.worker_id} cannot load it: {worker.refusal}")
                if found.revision and worker.revision != found.revision:
                    raise AdapterRefused(
                        f"the workers have found different weights in {offer.source}: {worker.worker_id} has revision "
                        f"{worker.revision}, others {found.revision}; was it written just now?"
                    )
            # One that drains meanwhile may yet end over it.
            if found.revision and told and len(tried) == len(told) and not loading:
                return found
            slow = ", ".join(sorted({worker.worker_id for worker in told if worker not in tried} | loading))
            self._waits_for = f"still loading or silent: {slow}" if slow else ""
            await self._pause(_LOOK_S)

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

    async def _is_lost(self, known: Registered, before: str | None) -> bool:
        """Whether an offer that is gone was lost, by a server short of memory, say; else somebody has made a change."""
        served = known.adapters.get(self._name)
        if served is None and before is not None and known.owner:
            return False  # Removed.
        if served is not None and served.revision != before:
            return False
        return not await self._insist(partial(self._registry.known_for, self._name))

    async def _take_out(self) -> bool:
        # Whoever has listed it may have been faster, or the server has lost it and workers write it down again.
        while not await self._insist(partial(self._registry.remove, self._name, _known_for())):
            if self._name not in await self._session.adapters.all(self._within):
                return False
        return True

    async def _settle(self, revision: str, *, is_other: bool) -> None:
        """Wait until nobody uses another revision any more.

        Args:
            revision: what is in service now; "" for none.
            is_other: this change has replaced another one. Others may have done so just before, and not waited.
        """
        loop = self._within.loop
        self._session.adapters.doubt()
        end = loop.time() + (_known_for() if is_other else 0.0)
        end = max(end, loop.time() + await self._insist(partial(self._registry.known_for, self._name)))
        wanted = [qualify(self._name, revision)] if revision else []
        while behind := [worker.worker_id for worker in await self._told() if worker.served != wanted]:
            self._waits_for = f"have not followed yet: {', '.join(behind)}"
            await self._pause(_LOOK_S)
        self._waits_for = "clients may use what they know for a moment"
        await self._pause(max(0.0, end - loop.time()))

    async def _withdraw(self, nonce: str) -> None:
        try:
            await self._registry.withdraw(self._name, nonce)
        except TROUBLE:
            pass  # It expires.

    @property
    def _registry(self) -> AdapterRegistry:
        return self._session.adapters.registry

    async def _told(self) -> list[_Told]:
        """What the live workers have told."""
        found = await self._insist(self._session.workers)
        self._live = {one.worker_id for one in found}
        workers = [one for one in found if one.fields.get("state") != "draining"]
        if not workers:
            self._waits_for = ""
        return [self._read(worker) for worker in workers]

    def _read(self, worker: WorkerInfo) -> _Told:
        try:
            served = json.loads(worker.fields.get("adapters", "[]"))
            nonce, revision, refusal = json.loads(worker.fields.get("adapter_offers", "{}")).get(self._name, ("",) * 3)
            own = [adapter for adapter in served if name_of(adapter) == self._name]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ServerError(f"what the worker {worker.worker_id} tells of its adapters does not decode") from error
        return _Told(worker.worker_id, own, nonce, revision, refusal)

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
        loop = self._within.loop
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            self._session.check_open()

    async def _limited(self, work: Callable[[], Awaitable[T]], state: str) -> T:
        try:
            async with self._within.limit():
                return await work()
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise self._late(state) from error

    def _late(self, state: str) -> LMPoolError:
        model = self._session.card
        text = f"not done within {self._within.seconds:g} s with the adapter {self._name!r} of {model.name!r}: {state}"
        if not self._waits_for:
            return NoWorker(f"{text}, and no live worker serves the model; start one with `{model.start_command}`")
        return DeadlineExceeded(f"{text} ({self._waits_for}); allow more time (timeout=)")

    def _interrupted(self) -> AdapterRefused:
        return AdapterRefused(
            f"the adapter {self._name!r} was not loaded: somebody else has changed it meanwhile; look at what is "
            "in service, and try again"
        )


def _known_for() -> float:
    """For how many seconds clients may use what is replaced now, those with slower clocks too."""
    return KNOWN_FOR_S + _MARGIN_S


def _resolved(source: str | Path) -> str:
    """A folder that is here by its full path: workers run in other folders."""
    text = check_source("source", str(source) if isinstance(source, Path) else source)
    try:
        place = Path(text).expanduser()
        return check_source("source", str(place.resolve())) if place.exists() else text
    except (OSError, RuntimeError, ValueError):  # Too long for a path, or ~somebody who is not known here.
        return text
