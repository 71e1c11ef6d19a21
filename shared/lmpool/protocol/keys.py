"""Every Redis key that lmpool uses, in one place.

The text in braces is a Redis Cluster hash tag: what belongs to one model's queue is on one master. Rows have no tag,
so that they spread over all of them; on one server `submit.lua` and `finish.lua` look at rows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP = "workers"
"""The one consumer group of every job stream."""

JOB_FIELD = b"m"
"""The field of a job entry that holds the encoded job."""

LIFETIME_FIELD = b"u"
"""The field of a job entry that says for how long it was waited for at first: a number of ms from its queueing.

In an entry that may have to go elsewhere, a space and the digest follow.
"""

SINCE_FIELD = b"t"
"""The field of a job entry that was moved, from the backlog or another stream: when it was queued, in ms since 1970."""

PRIORITY_FIELD = b"p"
"""The field of a job entry that yields to others: `BULK`, or "continued" for a continuation of another client."""

BULK = b"bulk"
"""What entries, and reply keys behind "reply:", say of the clients that yield to all others."""

HOME_FIELD = b"h"
"""The field of a job entry that names the worker whose lane its client wanted: its home, or b""."""

CONTINUED = b"continued"
"""What entries say of continuations of interactive clients: these yield to rows."""

CONTINUED_TIME, BULK_TIME = 1e11, 1e12
"""Where the virtual start times of continuations and those of bulk clients begin."""

REPLY_CAP = 1000
"""About the most messages in a reply stream."""

REPLY_TTL_MS = 120_000
"""Lifetime of a reply stream behind its last message."""

WANTED_TTL_MS = 60_000
"""How long a model that has no info is wanted after a client has last looked for it: longer than autoscalers pause."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names the keys of one deployment.

    Args:
        prefix: what every key starts with; two prefixes on one server are two pools.
    """

    prefix: str = "lmpool"

    def models(self) -> bytes:
        """Hash: model name -> encoded model info, of all but the trie workers."""
        return f"{self.prefix}:models".encode()

    def trie_models(self) -> bytes:
        """Hash: the same with the info of the trie workers alone: their Redis user may write no other info."""
        return f"{self.prefix}:models:trie".encode()

    def worker(self, worker_id: str) -> bytes:
        """Hash: heartbeat and counters of one worker; expires."""
        return f"{self.prefix}:worker:{worker_id}".encode()

    def loading(self) -> bytes:
        """Hash: id of a worker that loads its model -> the model's name; expires with the last such worker."""
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
        """String: the bits of a set of tokens, under the digest of what it is; has a TTL."""
        return f"{self.prefix}:tokens:{name.hex()}".encode()

    def weights(self) -> bytes:
        """Prefix of the strings that hold the weights of trie jobs (append their name); each has a TTL."""
        return f"{self.prefix}:weights:".encode()

    def probe(self, model: str, client_id: str) -> bytes:
        """String: what a client writes to see whether the server of a model's queue takes writes; expires at once.

        Among the weights, for those are what every client may write; with the model's tag, to be on its master.
        """
        return f"{self.prefix}:weights:{{{model}}}{client_id}".encode()

    def model(self, name: str) -> ModelKeys:
        """The keys of one model, all in one cluster slot."""
        return ModelKeys(f"{self.prefix}:{{{name}}}".encode())


class ModelKeys:
    """Names the keys of one model. Digests are appended as their 16 raw bytes.

    Args:
        base: what all of them begin with.
    """

    __slots__ = (
        "adapters", "backlog", "backlog_jobs", "base", "capacity", "claim_cursor", "dead", "jobs", "lanes", "loading",
        "queue", "reasons", "sole_client", "virtual_time", "waiting", "wanted", "workers",
    )  # fmt: skip

    def __init__(self, base: bytes) -> None:
        self.base: Final = base
        self.jobs: Final = base + b":jobs"
        """Stream with the consumer group `GROUP`; one entry per prompt that workers are about to take, whichever comes
        first. Each worker has a `lane` beside it."""
        self.lanes: Final = base + b":lanes"
        """Sorted set: worker id -> how many jobs its lane has, waiting and held; "" -> the sum of these; expires."""
        self.backlog: Final = base + b":backlog"
        """Sorted set: digests of prompts that wait behind the streams, with their virtual start times; those that only
        bulk clients wait for begin at `BULK_TIME`."""
        self.backlog_jobs: Final = base + b":backlog:jobs"
        """Hash: digest of a prompt in the backlog -> when it was queued and for how long it is waited for (in ms since
        1970, and in ms), its home or nothing, and its encoded job, with spaces between."""
        self.virtual_time: Final = base + b":virtual_time"
        """Sorted set: reply key with the virtual start time of its client's last prompt in the backlog, and reply key
        and ":tokens" with that of its last continuation; "" with the virtual time, which is the start time of the
        prompt that moved up last; "continued" and "bulk" with those of jobs that yield; "owed:continued" and "owed"
        with the sixteenths of a prompt that are due to these."""
        self.sole_client: Final = base + b":sole_client"
        """String: reply key of a client that asks alone and has more in the streams than their capacity; with "-"
        before it while that goes back to the backlog; expires."""
        self.capacity: Final = base + b":capacity"
        """Hash: id of a worker that takes jobs -> how many prompts it computes at once; "" -> the sum; expires."""
        self.workers: Final = base + b":workers"
        """Sorted set: worker id with its deadline: the server's time in ms until which it is alive; expires."""
        self.loading: Final = base + b":loading"
        """Sorted set: id of a worker that loads this model, with its deadline; expires."""
        self.claim_cursor: Final = base + b":claim_cursor"
        """String: the entry at which the next search for jobs of silent workers begins; expires."""
        self.dead: Final = base + b":dead"
        """Stream of jobs that were given up, with the reason; capped."""
        self.reasons: Final = base + b":reasons"
        """Hash: entry -> why the worker ended that held it at its last delivery; capped, expires."""
        self.waiting: Final = base + b":waiting:"
        """Prefix of what says who waits for a prompt: strings or hashes; expire.

        Where one client waits alone, a string: its reply key, a newline, and the entry or "later". Else a hash
        {"job": entry or "later", reply key: ""}. An entry of `jobs` is its id; one of a lane is the id, a space, and
        the worker whose lane it is.

        "later" means that the job is in the backlog, "done" that the row has just been stored. The field "keep" stands
        for an operator who has queued the job again.
        """
        self.wanted: Final = base + b":wanted"
        """String, empty: there while clients wait for somebody to serve the model, whose info they lack; expires."""
        self.adapters: Final = base + b":adapters"
        """Hash: adapter -> version of the entry, a space, encoded `Adapter` (`lmpool.protocol.adapter`); "" -> the
        fingerprint of their model; "@" -> the version of the registry."""
        self.queue: Final = (self.jobs, self.dead, self.backlog, self.backlog_jobs, self.virtual_time)
        """The keys that, with the lanes, have no expiry while workers serve the model, the stream of jobs first."""

    def lane(self, worker_id: str | bytes) -> bytes:
        """Stream as `jobs` with the prompts that one worker is to take."""
        return self.base + b":lane:" + (worker_id.encode() if isinstance(worker_id, str) else worker_id)

    def reply(self, client_id: str, *, is_bulk: bool = False) -> bytes:
        """Stream of finished digests for one client, with small rows; capped, expires. It says which ones yield."""
        return self.base + b":reply:" + (BULK + b":" if is_bulk else b"") + client_id.encode()

    def adapter_check(self, nonce: str) -> bytes:
        """String: encoded `Adapter` that a worker must load before it is added to the registry; expires."""
        return self.base + b":adapter_check:" + nonce.encode()

    def adapter_load(self, content: str) -> bytes:
        """String: id of the worker that loads this adapter now, or that has ended while it loaded it; expires.

        Args:
            content: "name@revision", or for an adapter to check the digest of its files.
        """
        return self.base + b":adapter_load:" + content.encode()
