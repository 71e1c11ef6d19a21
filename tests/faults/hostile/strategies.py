"""Hypothesis strategies for values that lmpool did not write: noise, changed bytes, valid encodings of wrong values."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st

from lmpool.protocol.job import WIRE_VERSION, Failure, Job
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.picks import Sampling
from lmpool.protocol.query import (
    OPS,
    EntriesQuery,
    FreshQuery,
    GenerateQuery,
    HeadQuery,
    MassQuery,
    PositionsQuery,
    SampleQuery,
    TopQuery,
    TrieQuery,
    pack_stops,
)
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.protocol.token_set import TokenSet
from lmpool.synthetic import synthetic_row
from lmpool.vocabulary import Vocabulary

noise = st.binary(max_size=80)
texts = st.text(max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(2**63), 2**64 - 1)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | names | noise,
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(names | numbers, inner, max_size=4),
    max_leaves=12,
)
packed = anything.map(lambda value: bytes(msgpack.packb(value)))
nested = st.integers(1, 3000).map(lambda depth: b"\x91" * depth)
claims = st.sampled_from(
    [b"\xdc\xff\xff" + b"\xa0" * 200, *(kind + b"\xff" * 4 for kind in b"\xdd \xdf \xdb \xc6 \xc9".split())]
)
"""Short msgpack messages whose headers announce up to 4 billion elements or bytes."""
odd_bytes = noise | packed | nested | claims


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid value with some bytes changed, inserted, removed or repeated, or with its end cut off."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(1, 8))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= draw(st.integers(1, 255))
            case 1:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length]
            case _:
                del data[at:]
    return bytes(data)


# Jobs


digests = st.binary(min_size=16, max_size=16)
digits = st.binary(min_size=16, max_size=16).map(bytes.hex)
ids = st.lists(st.integers(0, 600) | st.integers(0, 2**32 - 1), max_size=8).map(
    lambda values: np.array(values, "<u4").tobytes()
)
trie_queries = st.builds(
    TrieQuery,
    st.sampled_from(OPS),
    digits,
    st.sampled_from(["inner", "values", "nodes", "under"]),
    st.lists(st.integers(-3, 2000), max_size=4).map(lambda nodes: np.array(nodes, "<i4").tobytes()),
    st.just("") | digits,
    st.just(b"") | digests,
)
samplings = st.builds(Sampling, st.floats(0, 1e6), st.floats(1e-300, 1.0), st.integers(0, 2**64 - 1))
sets_of_tokens = st.one_of(
    st.just(b""),
    st.sets(st.integers(0, 70), min_size=1).map(lambda ids: TokenSet(np.array(sorted(ids)), 71).packed),
    st.binary(max_size=20),
)
some_ids = st.lists(st.integers(0, 70), min_size=1, max_size=9).map(lambda ids: np.array(ids, "<u4").tobytes())
valid_queries = st.one_of(
    st.builds(TopQuery, st.integers(1, 600), sets_of_tokens),
    st.builds(MassQuery, sets_of_tokens.filter(bool)),
    st.builds(EntriesQuery, some_ids, st.sampled_from([1.0, 0.5])),
    st.builds(lambda how, tokens: SampleQuery(how.temperature, how.top_p, how.seed, tokens), samplings, sets_of_tokens),
    st.builds(PositionsQuery, st.integers(0, 9), st.integers(0, 3), temperature=st.sampled_from([1.0, 0.5])),
    st.builds(
        PositionsQuery,
        st.integers(0, 9),
        st.integers(0, 3),
        st.just(b"\1\0\0\0" * 2),
        st.sampled_from([0, 1, 2]),
        tail=st.booleans(),
        stop=st.integers(0, 9),
    ),
    st.builds(PositionsQuery, st.integers(0, 9), st.just(0), st.just(b"\1\0\0\0")),
    st.builds(PositionsQuery, st.integers(0, 9), st.integers(0, 3), values=st.just("logits")),
    st.builds(PositionsQuery, st.integers(0, 9), next_token=st.booleans(), logz=st.just(True)),
    st.builds(PositionsQuery, st.integers(0, 9), st.integers(1, 3), values=st.just("logits"), allowed=sets_of_tokens),
    st.builds(FreshQuery, digests),
    st.builds(PositionsQuery, st.integers(0, 9), values=st.just("hidden"), size=st.integers(1, 99)),
    st.builds(
        HeadQuery, st.sampled_from(["facts", "bias", "weights", "rank", "up"]), st.integers(0, 9), st.integers(0, 9)
    ),
    st.builds(
        GenerateQuery,
        st.integers(1, 9),
        st.floats(0, 1e6),
        st.floats(1e-300, 1.0),
        st.integers(0, 2**64 - 1),
        st.lists(st.lists(st.integers(0, 600), min_size=1, max_size=3), max_size=3).map(pack_stops),
    ),
    trie_queries,
).map(lambda query: query.pack())
wrong_queries = st.one_of(
    st.builds(TopQuery, numbers).map(lambda query: query.pack()),
    st.builds(Sampling, st.floats(), st.floats(), numbers).map(lambda how: SampleQuery(*how).pack()),
    st.builds(PositionsQuery, numbers, numbers, st.binary(max_size=9), names, numbers).map(lambda query: query.pack()),
    st.builds(GenerateQuery, numbers, st.floats(), st.floats(), numbers, st.binary(max_size=20)).map(
        lambda query: query.pack()
    ),
    st.builds(FreshQuery, noise).map(lambda query: query.pack()),
    st.lists(anything, max_size=8).map(lambda fields: bytes(msgpack.packb(fields))),
)
asks = valid_queries | wrong_queries | mutated(valid_queries)


def jobs(fingerprint: str) -> st.SearchStrategy[bytes]:
    """Jobs for a model with this fingerprint: valid jobs, and jobs with a wrong part."""
    adapters = st.sampled_from(["", "", "poet@", "@", "poet@0f"]) | names
    right = st.builds(Job, ids, st.just(""), st.just(fingerprint), st.booleans(), st.just(b"") | valid_queries)
    others = st.builds(
        Job, ids | noise, adapters, st.just(fingerprint) | names, st.booleans(), st.just(b"") | asks | odd_bytes
    )
    valid = st.one_of(right, others).map(Job.pack)
    fields = st.lists(st.just(WIRE_VERSION) | anything, min_size=6, max_size=9).map(
        lambda values: bytes(msgpack.packb(values))
    )
    return st.one_of(valid, valid, mutated(valid), fields, odd_bytes)


def job_entries(fingerprint: str) -> st.SearchStrategy[list[tuple[bytes, bytes]]]:
    """Entries of a queue: pairs of field and value, with too many, repeated or unknown fields."""
    encoded = jobs(fingerprint)
    pairs = st.tuples(st.sampled_from([b"m", b"m", b"", b"x", b"e"]) | noise, encoded | odd_bytes)
    return st.one_of(encoded.map(lambda job: [(b"m", job)]), st.lists(pairs, min_size=1, max_size=5))


# Other messages


failures = st.builds(
    Failure,
    st.sampled_from(["WorkerError", "ModelMismatch", "AdapterChanged", "ProducerClosed", "BaseException"]) | names,
    names,
).map(Failure.pack)
vocabularies = st.lists(noise, min_size=1, max_size=8).map(lambda tokens: Vocabulary(tokens).pack())
INFO = ModelInfo("syn", "synthetic", 512, 1000, "seed-0", "float32")
info_changes = st.dictionaries(st.sampled_from(["wire_version", *asdict(INFO)]) | names, anything, max_size=3)
infos = st.one_of(
    info_changes.map(lambda changed: bytes(msgpack.packb({"wire_version": WIRE_VERSION, **asdict(INFO), **changed}))),
    mutated(st.just(INFO.pack())),
    st.integers(1, 2**32 - 1).map(lambda size: replace(INFO, vocab_size=size).pack()),
    odd_bytes,
)
heartbeats = st.one_of(
    noise,
    anything.map(lambda value: json.dumps(value, default=repr).encode()),
    st.integers(1, 5000).map(lambda depth: b"[" * depth),
)


# Rows


def encoded_row(prompt: list[int], vocab_size: int, *, dtype: Encoding = Encoding.F32) -> bytes:
    """Return the encoded row of a prompt by the synthetic model."""
    row = synthetic_row(prompt, vocab_size=vocab_size)
    numbers, log_z = row[None], None
    if dtype is Encoding.F16:
        numbers, log_z = numbers.astype("<f2"), np.zeros(1, np.float32)
    return RowBlock([bytes(16)], np.ascontiguousarray(numbers, dtype.dtype), log_z, dtype).encode(0)


def with_header(row: bytes, **changed: Any) -> bytes:
    """Return an encoded row with other numbers in its header."""
    kept = dict(
        zip(("magic", "version", "encoding", "zero", "size", "log_z"), struct.unpack_from("<4sBBHIf", row), strict=True)
    )
    return struct.pack("<4sBBHIf", *(kept | changed).values()) + row[16:]


@st.composite
def spoilt_rows(draw: st.DrawFn, valid: bytes) -> bytes:
    """Values under the key of a float32 row that every reader must refuse."""
    vocab_size = (len(valid) - 16) // 4
    at = 16 + 4 * draw(st.integers(0, vocab_size - 1))
    match draw(st.integers(0, 9)):
        case 0:
            return draw(st.binary(min_size=1, max_size=4 * len(valid)))
        case 1:
            return valid[: draw(st.integers(1, len(valid) - 1))]
        case 2:
            return valid + draw(st.binary(min_size=1, max_size=3 * len(valid)))
        case 3:
            return valid[:at] + struct.pack("<f", float("nan")) + valid[at + 4 :]
        case 4:
            most = draw(st.floats(1.5, 2.0**100, width=32) | st.just(float("inf")))
            return valid[:at] + struct.pack("<f", most) + valid[at + 4 :]
        case 5:
            low = draw(st.sampled_from([float("-inf"), -1e30, -100.0]))
            return valid[:16] + np.full(vocab_size, low, "<f4").tobytes()
        case 6:
            return with_header(valid, version=draw(st.integers(2, 255)))
        case 7:
            return with_header(valid, encoding=draw(st.sampled_from([0, 2, 3, 4, 255])))
        case 8:
            return with_header(valid, size=draw(st.integers(0, 2**32 - 1).filter(lambda size: size != vocab_size)))
        case _:
            return with_header(valid, log_z=draw(st.sampled_from([float("nan"), float("inf"), float("-inf")])))
