"""What a worker serves a model with: all that is made once its backend is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from redis.asyncio import Redis

from lmpool.broker.connection import CommandLine, reply_timeout
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_doubts
from lmpool.errors import SettingsError
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelCard
from lmpool.rows.cache import RowCache
from lmpool.rows.cluster import rows_on
from lmpool.workers.backend.contract import BackendSettings
from lmpool.workers.backend.engine_thread import Opened, Stepper
from lmpool.workers.dispatch import Delivery
from lmpool.workers.membership.adapters import AdapterKeeper, AdapterSources, AdapterTrials
from lmpool.workers.membership.heartbeat import Presence
from lmpool.workers.metrics.counters import Figures
from lmpool.workers.queries import Asked
from lmpool.workers.queue.consumer import Holdings, Intake, Unwanted
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.backend import warm_up
from lmpool.workers.trie.inputs import Larder

_log = logging.getLogger("lmpool.worker")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker is before it has a model.

    Attributes:
        server: the pool's Redis.
        settings: see `WorkerSettings`.
        worker_id: its name in Redis.
        figures: what it counts.
    """

    server: Server
    settings: WorkerSettings
    worker_id: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Serving:
    """The model that a worker serves, and the parts that do it.

    Attributes:
        card: the model's card.
        stepper: the backend.
        redis: a client for what is rare.
        reader: the connection that jobs are taken from.
        rows: the cache.
        larder: brings what trie jobs need.
        held: the prompts that the worker holds.
        intake: where jobs are taken.
        publisher: stores rows and ends jobs.
        delivery: what becomes of the prompts that are held.
        presence: keeps the worker visible.
        adapters: has the backend serve the adapters that the server names.
    """

    card: ModelCard
    stepper: Stepper
    redis: Redis
    reader: CommandLine
    rows: RowCache
    larder: Larder
    held: Holdings
    intake: Intake
    publisher: Publisher
    delivery: Delivery
    presence: Presence
    adapters: AdapterKeeper

    async def close(self) -> None:
        """Close all connections."""
        self.rows.close()
        self.larder.close()
        self.reader.close()
        await self.redis.aclose()


async def check_before_loading(server: Server, backend: BackendSettings, settings: WorkerSettings) -> None:
    """A wrong address, password or folder must not cost the loading of a model first.

    Raises:
        ServerError: the server cannot be used.
        SettingsError: an adapter lies where none may.
    """
    for doubt in await read_doubts(server):
        _log.warning("%s", doubt)
    sources = AdapterSources.of(settings)
    for source in getattr(backend, "adapter_folders", {}).values():
        sources.place(source, is_own=True)


async def assemble(
    worker: Identity, stepper: Stepper, opened: Opened, on_change: Callable[[], Awaitable[object]]
) -> Serving:
    """Make the parts that serve a model; none of them has used the server yet.

    Args:
        worker: who serves.
        stepper: the backend.
        opened: what it is.
        on_change: called when the adapters that it serves have changed.

    Raises:
        SettingsError: the model has the name of the trie workers, or its trie kernels lack what they need.
    """
    server, settings, figures = worker.server, worker.settings, worker.figures
    card = _card_of(opened, settings)
    if settings.with_trie:
        await asyncio.to_thread(warm_up, opened.device)
    keys = Keys(settings.prefix)
    model = keys.model(card.name)
    # Half a lease: a renewal whose reply does not come is sent again before the lease has passed.
    redis = server.client(reply_timeout_s=reply_timeout(card.lease_s / 2))
    reader = CommandLine(server, model.jobs)
    reader.reply_timeout_s = reply_timeout(card.lease_s)
    rows = rows_on(server, keys, card)
    unwanted = Unwanted(redis, model, figures)
    publisher = Publisher(server, rows, model, card.fingerprint, worker.worker_id, unwanted, figures)
    presence = Presence(redis, keys, card, worker.worker_id, opened.batch, opened.vocabulary)
    adapters = AdapterKeeper(
        AdapterRegistry(redis, model, card.fingerprint),
        stepper,
        opened.adapters,
        AdapterSources.of(settings),
        AdapterTrials(redis, keys, card.name, worker.worker_id, settings),
        on_change,
        presence.others,
    )
    larder = Larder(server, keys, opened.device, settings, figures)
    held = Holdings()
    return Serving(
        card=card,
        stepper=stepper,
        redis=redis,
        reader=reader,
        rows=rows,
        larder=larder,
        held=held,
        intake=Intake(redis, reader, model, card, worker.worker_id, settings.max_deliveries, unwanted, figures),
        publisher=publisher,
        delivery=Delivery(held, stepper, publisher, larder, Asked(larder, publisher, card), card, adapters),
        presence=presence,
        adapters=adapters,
    )


def _card_of(opened: Opened, settings: WorkerSettings) -> ModelCard:
    """The backend's card, with what the worker promises."""
    if opened.card.is_trie != (opened.card.backend == "trie"):
        raise SettingsError(f"name: trie workers serve as {TRIE_SERVICE!r}: serve the model under another name")
    return replace(
        opened.card,
        lease_s=settings.lease_s,
        queue_limit=settings.queue_limit,
        row_ttl_s=settings.row_ttl_s,
        vocabulary=opened.vocabulary.digest if opened.vocabulary else "",
        answers_tries=settings.with_trie,
    )
