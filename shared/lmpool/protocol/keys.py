"""Builds the names of all Redis keys of a pool, and names the fields of the stream entries that carry jobs.

The text in braces in a key is a Redis Cluster hash tag: all keys of one partition of a model's queue are on one master.
Rows have no hash tag, so they are spread over all masters. On a single server `submit.lua` and `finish.lua` also read
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lmpool.protocol.model_info import ModelInfo

GROUP = "workers"
"""Name of the only consumer group of every job stream."""

JOB_FIELD = b"m"
"""Field of a job's stream entry: the encoded job."""

LIFETIME_FIELD = b"u"
"""Field of a job's stream entry: ms from the queueing of the job until its first client stops waiting.

If the job may have to move to another stream or back to the backlog, a space and the prompt's digest follow.
"""

SINCE_FIELD = b"t"
"""Field of a stream entry that came from another stream or the backlog: ms since 1970 when the job was first queued."""

PRIORITY_FIELD = b"p"
"""Priority field of a stream entry whose job yields to other jobs: `BULK` or `CONTINUED`. See docs/design/queue.md."""

BULK = b"bulk"
"""Priority of jobs that only bulk clients wait for; the reply keys of bulk clients contain "reply:bulk:"."""

CONTINUED = b"continued"
"""Priority of jobs that generate a continuation for an interactive client."""

HOME_FIELD = b"h"
"""Field of a stream entry: the home of the prompt, the worker that computed most of its prefix; b"" for none."""

WAKE_FIELD = b"wake"
"""Only field of a lane's entry that wakes the lane's worker: ms after which the worker checks for jobs."""

CONTINUED_TIME, BULK_TIME = 1e11, 1e12
"""First virtual start times of continuations and of bulk prompts; all other prompts have lower start times."""

REPLY_CAP = 1000
"""Approximate max messages in a reply stream."""

REPLY_TTL_MS = 120_000
"""Lifetime of a reply stream after its last message, in ms."""

WANTED_TTL_MS = 60_000
"""Lifetime of the key `wanted` after a client's last request for the model, in ms; autoscalers poll more often."""

ROW_TOKEN_TTL_MS = 24 * 3600 * 1000
"""Lifetime of the token of row servers, which every worker renews every ten minutes, in ms."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool. Pools on the same server have different prefixes."""

    prefix: str = "lmpool"

    def models(self) -> bytes:
        """Hash: model name -> encoded model info, except the info of the trie workers; a model's name and "@" -> the
        number of the version that clients use (`lmpool.protocol.version`)."""
        return f"{self.prefix}:models".encode()

    def trie_models(self) -> bytes:
        """Hash: the info of the trie workers, whose Redis user may not write infos of models."""
        return f"{self.prefix}:models:trie".encode()

    def worker(self, worker_id: str) -> bytes:
        """Hash: heartbeat and counters of one worker; expires."""
        return f"{self.prefix}:worker:{worker_id}".encode()

    def loading(self) -> bytes:
        """Hash: id of a worker that loads its model -> the model's name; expires."""
        return f"{self.prefix}:loading".encode()

    def rows(self) -> bytes:
        """Prefix of the keys of rows, for all models."""
        return f"{self.prefix}:row:".encode()

    def row(self, fingerprint: str) -> bytes:
        """Prefix of the string keys that hold a model's encoded rows (append the digest); each key has a TTL."""
        return f"{self.prefix}:row:{fingerprint}:".encode()

    def row_token(self) -> bytes:
        """String: the secret with which clients read rows from row servers; workers set it and renew its lifetime."""
        return f"{self.prefix}:row_token".encode()

    def vocabulary(self, digest: str) -> bytes:
        """String: one packed vocabulary; has a TTL."""
        return f"{self.prefix}:trie:{digest}".encode()

    def tokenizer(self, digest: str) -> bytes:
        """String: one packed tokenizer (`lmpool.protocol.tokenizer`); has a TTL."""
        return f"{self.prefix}:tokenizer:{digest}".encode()

    def token_set(self, name: bytes) -> bytes:
        """String: the bits of a token set, named by the digest of the set; has a TTL."""
        return f"{self.prefix}:tokens:{name.hex()}".encode()

    def weights(self) -> bytes:
        """Prefix of the string keys that hold weights of trie jobs (append the weights' name); each key has a TTL."""
        return f"{self.prefix}:weights:".encode()

    def probe(self, model: str, client_id: str) -> bytes:
        """String that a client writes to check that the master of a model's queue accepts writes; expires at once.

        This key is among the keys of weights, which every client may write, and has the model's hash tag.
        """
        return f"{self.prefix}:weights:{{{model}}}{client_id}".encode()

    def model(self, name: str, partition: int = 0) -> ModelKeys:
        """The keys of one partition of a model's queue, all in one cluster slot.

        The registries of adapters and versions, `wanted` and `loading` are used in partition 0 only, and these
        registries are shared by all versions of a model. A name of a model contains no
        brace, so no model has the keys of another model's partition.
        """
        return ModelKeys(f"{self.prefix}:{{{name}{f'{{{partition}' if partition else ''}}}".encode())

    def partitions(self, info: ModelInfo) -> list[ModelKeys]:
        """The keys of each partition of a model's queue."""
        return [self.model(info.name, number) for number in info.partitions]


class ModelKeys:
    """The keys of one partition of a model's queue, which begin with `base`; digests are appended as 16 raw bytes."""

    def __init__(self, base: bytes) -> None:
        self.base: Final = base
        self.jobs: Final = base + b":jobs"
        """Stream with the consumer group `GROUP`: jobs for the worker that reads them first."""
        self.lanes: Final = base + b":lanes"
        """Sorted set: worker id -> number of waiting and held jobs in its lane (see `lane`); "" -> sum; expires."""
        self.backlog: Final = base + b":backlog"
        """Sorted set: digest of a prompt that waits because the streams are full -> its virtual start time."""
        self.backlog_jobs: Final = base + b":backlog:jobs"
        """Hash: digest of a prompt in the backlog -> "SINCE[,TOKENS] LIFETIME HOME JOB": when it was queued, in ms
        since 1970; max tokens of a continuation; ms that its client waits; `HOME_FIELD`; the encoded job."""
        self.virtual_time: Final = base + b":virtual_time"
        """Sorted set: reply key -> start time of the client's last prompt in the backlog; reply key, ":tokens" -> start
        time of its last continuation; "", "continued", "bulk" -> start time of this kind's last prompt that moved to a
        stream; "owed:continued", "owed" (for bulk) -> number of ended jobs since the last turn of the kind."""
        self.sole_client: Final = base + b":sole_client"
        """String: reply key of the only client with requests, if its jobs in the streams exceed their capacity; "" if
        these jobs were recently moved back for another client; expires."""
        self.capacity: Final = base + b":capacity"
        """Hash: id of a worker that takes jobs -> max prompts computed at once; "" -> sum for all workers; expires."""
        self.workers: Final = base + b":workers"
        """Sorted set: worker id -> server time in ms after which the worker counts as lost; expires."""
        self.loading: Final = base + b":loading"
        """Sorted set: id of a worker that loads this model -> time in ms after which it counts as lost; expires."""
        self.watcher: Final = base + b":watcher"
        """String: id of the idle worker that checks for jobs which other workers do not read in time; expires."""
        self.turn: Final = base + b":turn"
        """String: id of the worker that last checked for lost jobs and workers; it expires when the next worker may."""
        self.complete_turn: Final = base + b":complete_turn"
        """String: id of the worker that last made all checks in its turn; it expires when a next worker must."""
        self.claim_cursor: Final = base + b":claim_cursor"
        """String: id of the stream entry at which the next search for jobs of silent workers begins; expires."""
        self.dead: Final = base + b":dead"
        """Stream of dead letters: jobs that were given up, with the reason; capped."""
        self.reasons: Final = base + b":reasons"
        """Hash: job entry -> why the worker to which the job was last delivered ended; capped, expires."""
        self.waiting: Final = base + b":waiting:"
        """Prefix of the keys (append a prompt's digest) that name the clients waiting for a prompt; each key expires.

        If one client waits, the key is a string: the client's reply key, a newline, and the entry or "later". Otherwise
        the key is a hash {"job": entry or "later", reply key: ""}. For an entry of a lane, a space and the lane's
        worker follow the entry's id. "later" stands for a job in the backlog, "done" for a row that was just stored.
        The field "keep" stands for an operator who has queued the job again.
        """
        self.partition: Final = base + b":partition:"
        """Prefix of the keys (append a prompt's digest) that hold the number of the partition in which clients wait for
        a prompt, in the partition that the digest decides (`lmpool.producer.client.partitions`); each key expires."""
        self.wanted: Final = base + b":wanted"
        """Empty string that exists while clients wait for a model that has no info in `models`; expires."""
        self.adapters: Final = base + b":adapters"
        """Hash: adapter name -> version of the entry, a space, encoded `Adapter` (`lmpool.protocol.adapter`); "" ->
        fingerprint of the model; "@" -> version of the registry."""
        self.moved: Final = base + b":moved"
        """Stream that has an entry once clients must use another version of the model's weights; expires."""
        self.versions: Final = base + b":versions"
        """Stream of the versions of the model's weights: id "12-0" -> encoded `Version` (`lmpool.protocol.version`)."""
        self.version_states: Final = base + b":versions:state"
        """Hash: number of a version -> its state; number and ":tries" -> how often workers began to load it;
        "owner" -> `ModelInfo.lineage`; "tensors" -> packed types of the model's tensors (`lmpool.protocol.tensors`)."""
        self.queue: Final = (self.jobs, self.dead, self.backlog, self.backlog_jobs, self.virtual_time)
        """The keys, besides the lanes, that do not expire while workers serve the model; `jobs` is the first."""

    def lane(self, worker_id: str | bytes) -> bytes:
        """The lane of a worker: a stream of jobs that only this worker reads."""
        return self.base + b":lane:" + (worker_id.encode() if isinstance(worker_id, str) else worker_id)

    def reply(self, client_id: str, *, is_bulk: bool = False) -> bytes:
        """Stream of messages for one client: digests of finished prompts, with small rows; capped, expires."""
        return self.base + b":reply:" + (BULK + b":" if is_bulk else b"") + client_id.encode()

    def adapter_check(self, nonce: str) -> bytes:
        """String: encoded `Adapter` that a worker must load before the adapter is added to the registry; expires."""
        return self.base + b":adapter_check:" + nonce.encode()

    def adapter_load(self, content: str) -> bytes:
        """String: id of the worker that is loading an adapter, or that ended during the load; expires.

        `content` is "name@revision"; for an adapter that is being checked, it is the digest of the adapter's files.
        """
        return self.base + b":adapter_load:" + content.encode()

    def version_turn(self, slot: int) -> bytes:
        """String: id of a worker that changes to another version; there are `--max-unavailable` slots; expires."""
        return self.base + f":versions:turn:{slot}".encode()

    def version_data(self, nonce: str, index: int) -> bytes:
        """String: one part of the file of a version that the pool stores."""
        return self.base + f":versions:data:{nonce}:{index}".encode()
