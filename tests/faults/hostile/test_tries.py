"""A trie worker that receives arbitrary jobs and inputs still serves all other clients."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmpool.producer import SyncProducer
from lmpool.protocol.job import Job
from lmpool.protocol.query import OPS, SECRET_SIZE, TrieQuery, weights_name
from lmpool.protocol.row import VectorBlock
from lmpool.vocabulary import Vocabulary
from lmpool.workers.trie import TrieSettings
from tests.faults.hostile import strategies as hostile
from tests.faults.hostile.cases import cases
from tests.faults.hostile.commands import execute
from tests.support.pool import DEADLINE_S, Pool, until
from tests.support.trie_answers import answers, assert_right, draw_weights

A_BATCH = 25
TOKENS = (b"a", b"ab", b"abc", b"b", b"", b"ab")
VOCABULARY = Vocabulary(TOKENS)
FINGERPRINT = TrieSettings().open().info.fingerprint
SECRETS = [bytes([number]) * SECRET_SIZE for number in range(6)]
NAMES = [weights_name(secret) for secret in SECRETS]
weights = st.one_of(
    hostile.noise,
    st.lists(st.floats(width=32), max_size=8).map(
        lambda values: b"".join(*VectorBlock([b""], [np.array(values, np.float32)]).encoded())
    ),
    hostile.spoilt_rows(hostile.encoded_row([1], len(TOKENS))),
)
near = st.builds(
    TrieQuery,
    st.sampled_from(OPS),
    st.sampled_from([VOCABULARY.digest, "0" * 32]),
    st.sampled_from(["inner", "values", "nodes", "under"]),
    st.lists(st.integers(-2, 9), max_size=3).map(lambda nodes: np.array(nodes, "<i4").tobytes()),
    st.sampled_from(["", "0" * 32]),
    st.sampled_from(NAMES),
).map(lambda query: Job(b"", "", FINGERPRINT, False, query.pack()).pack())
entries = st.one_of(near.map(lambda job: [(b"m", job)]), hostile.job_entries(FINGERPRINT))


def test_arbitrary_trie_jobs_disturb_no_client(pool: Pool) -> None:
    worker = pool.start_trie_worker("--lease-s", 1)
    pool.start("--lease-s", 1, "--vocab-size", len(TOKENS))
    jobs, keys = pool.keys.model("trie").jobs, pool.keys
    redis = pool.redis
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S) as producer:
        trie = producer.trie(list(TOKENS))
        expected = answers(TOKENS)
        asked = draw_weights(1, len(TOKENS))
        assert_right(trie.weight_sum(asked), expected.of("sum", asked))

        @cases(200, a_batch=A_BATCH)
        @given(
            st.lists(entries, min_size=A_BATCH, max_size=A_BATCH),
            st.lists(weights, min_size=len(NAMES), max_size=len(NAMES)),
            st.none() | hostile.mutated(st.just(VOCABULARY.pack())) | hostile.noise,
            st.integers(0, 10**6),
        )
        def send(batch: list[list[tuple[bytes, bytes]]], stored: list[bytes], other: bytes | None, seed: int) -> None:
            for secret, name, data in zip(SECRETS, NAMES, stored, strict=True):
                redis.set(keys.weights() + name, secret + data)
                redis.set(keys.row("0" * 32) + name, data)
            redis.set(keys.vocabulary("0" * 32), b"" if other is None else other)
            if other is not None:
                redis.set(keys.vocabulary(VOCABULARY.digest), other)
            for fields in batch:
                execute(redis, "XADD", jobs, "*", *(part for pair in fields for part in pair))
            asked = draw_weights(seed, len(TOKENS))
            assert_right(trie.weight_sum(asked), expected.of("sum", asked))

        # Send jobs whose weights are missing on the server; other jobs must not wait for them.
        missing = TrieQuery("sum", VOCABULARY.digest, "inner", b"", "", bytes(16)).pack()
        for _ in range(400):
            redis.xadd(jobs, {"m": Job(b"", "", FINGERPRINT, False, missing).pack()})
        send()
        until(lambda: pool.jobs("trie") == 0 and pool.held("trie") == 0, "all that was sent is ended")
        assert_right(trie.weight_max(asked), expected.of("max", asked))
    assert worker.is_running, worker.text
    assert "Traceback" not in worker.text
