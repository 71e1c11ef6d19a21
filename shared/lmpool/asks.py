"""Asks: what a job wants instead of a prompt's row."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

import msgpack

from lmpool.errors import ProtocolError
from lmpool.kernels import OPS, Op
from lmpool.messages import described, unpack_flat
from lmpool.picks import MOST_SEED, Sampling
from lmpool.prompts import DIGEST_SIZE

Selection = Literal["inner", "values", "nodes", "under"]

_SELECTIONS = get_args(Selection)
_MOST_BYTES = 8 * 1024 * 1024
_DIGEST_DIGITS = 32
_MOST_TEMPERATURE = 1e6


class TrieAsk(NamedTuple):
    """Values of trie nodes, computed from a row or from weights.

    Attributes:
        op: "sum" and "max" of weights, "logsumexp" of their logarithms. For a row: of its probabilities, or of
            its log-probabilities with "logsumexp".
        vocabulary: digest of the vocabulary.
        select: which values. "inner": of the inner nodes, (M,), enough for a client that has the weights; "values": of
            the inner nodes and then the weights, (M + V,); "nodes": of some nodes; "under": of the children of one.
        nodes: int32 ids of the nodes, or of the one node, as bytes.
        rows: fingerprint of the model whose row is wanted; "" when `source` names weights, or when the job
            itself has the prompt.
        source: digest of the prompt, or the name of the weights; b"" when the job itself has the prompt.
    """

    op: Op
    vocabulary: str
    select: Selection
    nodes: bytes = b""
    rows: str = ""
    source: bytes = b""

    def pack(self) -> bytes:
        """The ask as MessagePack."""
        return _pack(*self)


class TopAsk(NamedTuple):
    """The `k` largest entries of the row, as `lmpool.picks.pack_top` packs them."""

    k: int

    def pack(self) -> bytes:
        """The ask as MessagePack."""
        return _pack("top", self.k)


class SampleAsk(NamedTuple):
    """One token drawn from the row, as `lmpool.picks.pack_token` packs it."""

    how: Sampling

    def pack(self) -> bytes:
        """The ask as MessagePack."""
        return _pack("sample", *self.how)


class ScoreAsk(NamedTuple):
    """The log-probabilities of the prompt's own tokens from position `start` on, each after those before it.

    A forward of its own answers it, not the row: float32 of shape (length of the prompt - start,).
    """

    start: int

    def pack(self) -> bytes:
        """The ask as MessagePack."""
        return _pack("score", self.start)


class FreshAsk(NamedTuple):
    """The row, computed by a forward of its own from nothing that is kept.

    Attributes:
        nonce: 16 bytes that tell this request from any other.
    """

    nonce: bytes

    def pack(self) -> bytes:
        """The ask as MessagePack."""
        return _pack("fresh", self.nonce)


PickAsk = TopAsk | SampleAsk
"""What is picked from a row."""

Ask = TrieAsk | TopAsk | SampleAsk | ScoreAsk | FreshAsk


def _pack(*fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack_ask(data: bytes) -> Ask:
    """Read an ask.

    Raises:
        ProtocolError: too large, not MessagePack, or not an ask.
    """
    match unpack_flat(data, _MOST_BYTES, "ask"):
        case ["top", int(k)] if k > 0:
            return TopAsk(k)
        case ["sample", float(temperature), float(top_p), int(seed)]:
            return SampleAsk(_checked_sampling(Sampling(temperature, top_p, seed)))
        case ["score", int(start)] if start > 0:
            return ScoreAsk(start)
        case ["fresh", bytes(nonce)] if len(nonce) == DIGEST_SIZE:
            return FreshAsk(nonce)
        case [str(op), str(vocabulary), str(select), bytes(nodes), str(rows), bytes(source)]:
            return _checked_trie(TrieAsk(cast(Op, op), vocabulary, cast(Selection, select), nodes, rows, source))
        case other:
            raise ProtocolError(f"not an ask: {described(other)}")


def _checked_sampling(how: Sampling) -> Sampling:
    # In this form it refuses NaN too.
    if not (0 <= how.temperature <= _MOST_TEMPERATURE and 0 < how.top_p <= 1 and 0 <= how.seed <= MOST_SEED):
        raise ProtocolError(f"an ask for a sample with {how}")
    return how


def _checked_trie(ask: TrieAsk) -> TrieAsk:
    if ask.op not in OPS or ask.select not in _SELECTIONS:
        raise ProtocolError(
            f"an ask for {ask.op!r} of {ask.select!r}: expected {', '.join(OPS)} of {', '.join(_SELECTIONS)}"
        )
    lengths = len(ask.vocabulary), len(ask.rows), len(ask.source)
    if lengths[0] != _DIGEST_DIGITS or lengths[1] not in (0, _DIGEST_DIGITS) or lengths[2] not in (0, DIGEST_SIZE):
        raise ProtocolError("an ask has a digest of the wrong length")
    if len(ask.nodes) % 4 or (ask.select == "under" and len(ask.nodes) != 4):
        raise ProtocolError(f"an ask for {ask.select!r} has {len(ask.nodes)} bytes of node ids")
    return ask
