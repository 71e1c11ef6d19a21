"""Asks: what a job wants instead of a row, computed from the row or from weights where these are."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

import msgpack

from lmpool.errors import ProtocolError
from lmpool.kernels import OPS, Op
from lmpool.messages import unpack_flat
from lmpool.prompts import DIGEST_SIZE

Selection = Literal["inner", "values", "nodes", "under"]

_SELECTIONS = get_args(Selection)
_MOST_BYTES = 8 * 1024 * 1024
_DIGEST_DIGITS = 32


class TrieAsk(NamedTuple):
    """Values of trie nodes.

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
        packed: bytes = msgpack.packb(tuple(self))
        return packed


def unpack_ask(data: bytes) -> TrieAsk:
    """Read an ask.

    Raises:
        ProtocolError: too large, not MessagePack, or not an ask.
    """
    match unpack_flat(data, _MOST_BYTES, "ask"):
        case [str(op), str(vocabulary), str(select), bytes(nodes), str(rows), bytes(source)]:
            ask = TrieAsk(cast(Op, op), vocabulary, cast(Selection, select), nodes, rows, source)
        case other:
            raise ProtocolError(f"not an ask: {str(other)[:80]}")
    if op not in OPS or select not in _SELECTIONS:
        raise ProtocolError(f"an ask for {op!r} of {select!r}: expected {', '.join(OPS)} of {', '.join(_SELECTIONS)}")
    if len(vocabulary) != _DIGEST_DIGITS or len(rows) not in (0, _DIGEST_DIGITS) or len(source) not in (0, DIGEST_SIZE):
        raise ProtocolError("an ask has a digest of the wrong length")
    if len(nodes) % 4 or (select == "under" and len(nodes) != 4):
        raise ProtocolError(f"an ask for {select!r} has {len(nodes)} bytes of node ids")
    return ask
