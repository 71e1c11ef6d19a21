"""What a worker serves a model with: all that is made once its backend is open."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.readers import read_alive, read_infos
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_doubts
from lmpool.errors import ModelMismatch, ProtocolError, SettingsError
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.rows.cache import RowCache
from lmpool.rows.cluster import rows_on
from lmpool.rows.shared_memory import SegmentReader
from lmpool.workers.dispatch import Dispatcher
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.execution.engine_thread import EngineThread, Opened
from lmpool.workers.membership.adapters import AdapterCache, AdapterSources, LoadNotes
from lmpool.workers.membership.heartbeat import CheckpointWatch, Heartbeat
from lmpool.workers.metrics.counters import Counters
from lmpool.workers.metrics.tracing import JobTraces
from lmpool.workers.queries import QueryAnswerer, TokenSets
from lmpool.workers.queue.consumer import Consumer, InFlightJobs, UnwantedJobs
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.queue.segment import SegmentWriter
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.backend import warm_up
from lmpool.workers.trie.inputs import TrieInputs

_log = logging.getLogger("lmpool.worker")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker has before it has a model.

    Attributes:
        server: the pool's Redis.
        settings: see `WorkerSettings`.
        worker_id: its name in Redis.
        counters: what it counts.
        files: that its model is loaded from.
    """

    server: Server
    settings: WorkerSettings
    worker_id: str
    counters: Counters
    files: CheckpointWatch


@dataclass(frozen=True, slots=True)
class Serving:
    """The model that a worker serves, and the parts that do it.

    Attributes:
        info: the model's info.
        engine_thread: runs the backend.
        redis: a client for what is rare.
        reader: the connection that jobs are taken from.
        rows: the cache of rows.
        segment: where rows lie that clients on this host wait for.
        segments: reads the rows in shared memory that queries and trie jobs are about.
        trie_inputs: brings what trie jobs need.
        in_flight: the jobs that the worker holds.
        consumer: takes jobs from the queue.
        publisher: stores rows and ends jobs.
        dispatcher: takes jobs to the backend, and its results to the publisher.
        heartbeat: keeps the worker visible.
        adapters: the adapters that the backend has loaded.
    """

    info: ModelInfo
    engine_thread: EngineThread
    redis: Redis
    reader: CommandConnection
    rows: RowCache
    segment: SegmentWriter
    segments: SegmentReader
    trie_inputs: TrieInputs
    in_flight: InFlightJobs
    consumer: Consumer
    publisher: Publisher
    dispatcher: Dispatcher
    heartbeat: Heartbeat
    adapters: AdapterCache

    async def close(self) -> None:
        """Close all connections."""
        self.segment.close()
        self.segments.close()
        self.rows.close()
        self.trie_inputs.close()
        self.reader.close()
        await self.redis.aclose()


async def check_before_loading(server: Server, backend: BackendSettings, settings: WorkerSettings) -> None:
    """Check what can be known before the model is loaded, which may take minutes.

    Raises:
        ModelMismatch: live workers serve another backend under this name.
        ServerError: the server cannot be used.
        SettingsError: an adapter lies where none may.
    """
    for doubt in await read_doubts(server):
        _log.warning("%s", doubt)
    sources = AdapterSources.of(settings)
    for source in getattr(backend, "adapter_folders", {}).values():
        sources.place(source, is_own=True)
    await _check_backend(server, backend, Keys(settings.prefix))


async def _check_backend(server: Server, backend: BackendSettings, keys: Keys) -> None:
    """Refuse a name under which live workers serve another backend: rows of two backends differ."""
    name, kind = backend.served_as, getattr(backend, "kind", "")
    if not kind:
        return
    redis = server.client()
    try:
        packed = (await read_infos(redis, keys, [name])).get(name.encode())
        served = ModelInfo.unpack(packed).backend if isinstance(packed, bytes) else kind
        if served != kind and (await read_alive(redis, keys.model(name))).serving:
            raise ModelMismatch(
                f"the model {name!r} is served by the backend {served}, not {kind}: "
                "serve it under another --name, or stop those workers first"
            )
    except ProtocolError as error:
        _log.warning("the info of the model %r cannot be read, and will be replaced: %s", name, error)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()


async def assemble(
    worker: WorkerContext,
    engine_thread: EngineThread,
    opened: Opened,
    max_adapters: int,
) -> Serving:
    """Make the parts that serve a model; none of them has used the server yet.

    Args:
        worker: who serves.
        engine_thread: the backend.
        opened: what it is.
        max_adapters: how many adapters the backend keeps loaded.

    Raises:
        SettingsError: the model has the name of the trie workers, or its trie kernels or traces lack what they need.
    """
    server, settings, counters = worker.server, worker.settings, worker.counters
    info = _info_of(opened, settings)
    if settings.with_trie:
        await asyncio.to_thread(warm_up, opened.device)
    keys = Keys(settings.prefix)
    model = keys.model(info.name)
    # Half a lease: a renewal whose reply does not come is sent again before the lease has passed.
    redis = server.client(reply_timeout_s=reply_timeout(info.lease_s / 2))
    reader = CommandConnection(server, model.jobs)
    reader.reply_timeout_s = reply_timeout(info.lease_s)
    segments = SegmentReader()
    rows = rows_on(server, keys, info, segments)
    segment = SegmentWriter(info, worker.worker_id, settings.shm_bytes, counters)
    engine_thread.write_to(segment.new_rows)
    unwanted = UnwantedJobs(redis, model, counters)
    publisher = Publisher(server, rows, model, info.fingerprint, worker.worker_id, unwanted, counters, segment)
    heartbeat = Heartbeat(
        redis, keys, info, worker.worker_id, opened.batch, opened.vocabulary, opened.tokenizer, worker.files
    )
    in_flight = InFlightJobs()
    adapters = AdapterCache(
        AdapterRegistry(redis, model, info.fingerprint),
        engine_thread,
        opened.adapters,
        max_adapters,
        AdapterSources.of(settings),
        LoadNotes(redis, keys, info.name, worker.worker_id),
        in_flight.__contains__,
        lambda: in_flight.adapters_of(engine_thread.outstanding),
    )
    trie_inputs = TrieInputs(server, keys, opened.device, settings, segments, counters)
    queries = QueryAnswerer(trie_inputs, publisher, info, TokenSets(redis, keys, info.vocab_size))
    traces = JobTraces(info.name, worker.worker_id) if settings.tracing else None
    return Serving(
        info=info,
        engine_thread=engine_thread,
        redis=redis,
        reader=reader,
        rows=rows,
        segment=segment,
        segments=segments,
        trie_inputs=trie_inputs,
        in_flight=in_flight,
        consumer=Consumer(
            redis, reader, model, info, worker.worker_id, settings.max_deliveries, unwanted, counters, traces
        ),
        publisher=publisher,
        dispatcher=Dispatcher(
            in_flight, engine_thread, publisher, trie_inputs, queries, info, adapters, segment, traces
        ),
        heartbeat=heartbeat,
        adapters=adapters,
    )


def _info_of(opened: Opened, settings: WorkerSettings) -> ModelInfo:
    """The backend's info, with what the worker promises."""
    if opened.info.is_trie != (opened.info.backend == "trie"):
        raise SettingsError(f"name: trie workers serve as {TRIE_SERVICE!r}: serve the model under another name")
    return replace(
        opened.info,
        lease_s=settings.lease_s,
        queue_limit=settings.queue_limit,
        row_ttl_s=settings.row_ttl_s,
        vocabulary=opened.vocabulary.digest if opened.vocabulary else "",
        tokenizer=opened.tokenizer.digest if opened.tokenizer else "",
        answers_tries=settings.with_trie,
    )
