"""The names of all Redis keys, and the fields of job entries.

The text in braces is a Redis Cluster hash tag: all keys of one model's queue are on one master. Rows have no tag, so
they are spread over all masters. On a single server `submit.lua` and `finish.lua` also read rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP = "workers"
"""The one consumer group of every job stream."""

JOB_FIELD = b"m"
"""Field of a job entry: the encoded job."""

LIFETIME_FIELD = b"u"
"""Field of a job entry: for how many ms after its queueing its first client waits.

In an entry that may have to move, a space and the digest follow.
"""

SINCE_FIELD = b"t"
"""Field of a job entry that was moved: when it was queued, in ms since 1970."""

PRIORITY_FIELD = b"p"
"""Field of a job entry that yields to others: `BULK` or `CONTINUED`. See "Priorities" in docs/design/queue.md."""

BULK = b"bulk"
"""Priority of jobs that only bulk clients wait for; reply keys of bulk clients have it after "reply:"."""

CONTINUED = b"continued"
"""Priority of continuations of interactive clients."""

HOME_FIELD = b"h"
"""Field of a job entry: the worker that is the home of its prompt, or b""."""

CONTINUED_TIME, BULK_TIME = 1e11, 1e12
"""Virtual start times from which continuations and bulk prompts begin."""

REPLY_CAP = 1000
"""Approximate max messages in a reply stream."""

REPLY_TTL_MS = 120_000
"""Lifetime of a reply stream after its last message, in ms."""

WANTED_TTL_MS = 60_000
"""How long the key `wanted` lives after a client has last requested the model, in ms: longer than autoscalers pause."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool. Two prefixes on one server are two pools."""

    prefix: str = "lmpool"

    def models(self) -> bytes:
        """Hash: model name -> encoded model info, except that of the trie workers."""
        return f"{self.prefix}:models".encode()

    def trie_models(self) -> bytes:
        """Hash: the info of the trie workers, whose Redis user may write no other info."""
        return f"{self.prefix}:models:trie".encode()

    def worker(self, worker_id: str) -> bytes:
        """Hash: heartbeat and counters of one worker; expires."""
        return f"{self.prefix}:worker:{worker_id}".encode()

    def loading(self) -> bytes:
        """Hash: id of a worker that loads its model -> the model's name; expires."""
        return f"{self.prefix}:loading".encode()

    def rows(self) -> bytes:
        """Prefix of the rows of all models."""
        return f"{self.prefix}:row:".encode()

    def row(self, fingerprint: str) -> bytes:
        """Prefix of the strings that hold encoded rows (append the digest); each has a TTL."""
        return f"{self.prefix}:row:{fingerprint}:".encode()

    def vocabulary(self, digest: str) -> bytes:
        """String: one packed vocabulary; has a TTL."""
        return f"{self.prefix}:trie:{digest}".encode()

    def tokenizer(self, digest: str) -> bytes:
        """String: one packed tokenizer (`lmpool.protocol.tokenizer`); has a TTL."""
        return f"{self.prefix}:tokenizer:{digest}".encode()

    def token_set(self, name: bytes) -> bytes:
        """String: the bits of a set of tokens, under the digest of the set; has a TTL."""
        return f"{self.prefix}:tokens:{name.hex()}".encode()

    def weights(self) -> bytes:
        """Prefix of the strings that hold the weights of trie jobs (append their name); each has a TTL."""
        return f"{self.prefix}:weights:".encode()

    def probe(self, model: str, client_id: str) -> bytes:
        """String that a client writes to check that the master of a model's queue accepts writes; expires at once.

        It is among the weights, which every client may write, and has the model's tag.
        """
        return f"{self.prefix}:weights:{{{model}}}{client_id}".encode()

    def model(self, name: str) -> ModelKeys:
        """The keys of one model, all in one cluster slot."""
        return ModelKeys(f"{self.prefix}:{{{name}}}".encode())


class ModelKeys:
    """The keys of one model, which begin with `base`. Digests are appended as their 16 raw bytes."""

    def __init__(self, base: bytes) -> None:
        self.base: Final = base
        self.jobs: Final = base + b":jobs"
        """Stream with the consumer group `GROUP`: prompts for the worker that reads first."""
        self.lanes: Final = base + b":lanes"
        """Sorted set: worker id -> jobs in its lane, waiting and held; "" -> their sum; expires."""
        self.backlog: Final = base + b":backlog"
        """Sorted set: digest of a prompt that waits behind the streams -> its virtual start time."""
        self.backlog_jobs: Final = base + b":backlog:jobs"
        """Hash: digest of a prompt in the backlog -> "SINCE[,TOKENS] LIFETIME HOME JOB": when it was queued, in ms
        since 1970; the tokens that a continuation may generate; for how many ms its client waits; its home or ""."""
        self.virtual_time: Final = base + b":virtual_time"
        """Sorted set: reply key -> start time of the client's last prompt in the backlog; reply key and
        ":tokens" -> that of its last continuation. "", "continued" and "bulk" -> start time of the prompt of this
        kind that moved up last. "owed:continued", "owed" -> ended jobs that count towards the kind's next turn."""
        self.sole_client: Final = base + b":sole_client"
        """String: reply key of a client that asks alone and has more jobs in the streams than their capacity; "" if it
        had to give way recently; expires."""
        self.capacity: Final = base + b":capacity"
        """Hash: id of a worker that takes jobs -> how many prompts it computes at once; "" -> the sum; expires."""
        self.workers: Final = base + b":workers"
        """Sorted set: worker id -> its deadline, in ms by the server's clock; expires."""
        self.loading: Final = base + b":loading"
        """Sorted set: id of a worker that loads this model -> its deadline; expires."""
        self.claim_cursor: Final = base + b":claim_cursor"
        """String: the entry at which the next search for jobs of silent workers begins; expires."""
        self.dead: Final = base + b":dead"
        """Stream of dead letters: jobs that were given up, with the reason; capped."""
        self.reasons: Final = base + b":reasons"
        """Hash: entry -> why the worker of its last delivery ended; capped, expires."""
        self.waiting: Final = base + b":waiting:"
        """Prefix of the keys of clients that wait for a prompt; expire.

        If one client waits alone, a string: its reply key, a newline, and the entry or "later". Otherwise a hash
        {"job": entry or "later", reply key: ""}. An entry of `jobs` is its id; an entry of a lane is the id, a space,
        and the worker of the lane. "later" means that the job is in the backlog, "done" that the row was just stored.
        The field "keep" stands for an operator who has queued the job again.
        """
        self.wanted: Final = base + b":wanted"
        """String, empty: clients wait for a model that has no info; expires."""
        self.adapters: Final = base + b":adapters"
        """Hash: adapter -> version of the entry, a space, encoded `Adapter` (`lmpool.protocol.adapter`); "" -> the
        fingerprint of their model; "@" -> the version of the registry."""
        self.queue: Final = (self.jobs, self.dead, self.backlog, self.backlog_jobs, self.virtual_time)
        """The keys that, like the lanes, do not expire while workers serve the model; the stream of jobs first."""

    def lane(self, worker_id: str | bytes) -> bytes:
        """Stream like `jobs`, for one worker."""
        return self.base + b":lane:" + (worker_id.encode() if isinstance(worker_id, str) else worker_id)

    def reply(self, client_id: str, *, is_bulk: bool = False) -> bytes:
        """Stream of finished digests for one client, with small rows; capped, expires."""
        return self.base + b":reply:" + (BULK + b":" if is_bulk else b"") + client_id.encode()

    def adapter_check(self, nonce: str) -> bytes:
        """String: encoded `Adapter` that a worker must load before it is added to the registry; expires."""
        return self.base + b":adapter_check:" + nonce.encode()

    def adapter_load(self, content: str) -> bytes:
        """String: id of the worker that loads this adapter now, or that has ended while it loaded it; expires.

        `content` is "name@revision", or for an adapter to check the digest of its files.
        """
        return self.base + b":adapter_load:" + content.encode()
