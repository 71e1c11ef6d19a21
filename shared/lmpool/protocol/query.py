"""Asks: what a job wants instead of a prompt's row."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from lmpool.errors import ProtocolError
from lmpool.protocol.job import Message, checked, described, unpack_flat
from lmpool.protocol.prompt import DIGEST_SIZE
from lmpool.protocol.sampling import Sampling
from lmpool.settings import shown
from lmpool.trie.kernels import OPS, Op

Selection = Literal["inner", "values", "nodes", "under"]

_SELECTIONS = get_args(Selection)
_MOST_BYTES = 8 * 1024 * 1024
_DIGEST_DIGITS = 32


class TrieAsk(Message, frozen=True):
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


class TopAsk(Message, frozen=True, tag="top"):
    """The `k` largest entries of the row, as `lmpool.protocol.sampling.pack_top` packs them."""

    k: Annotated[int, Meta(ge=1)]


class SampleAsk(Message, frozen=True, tag="sample"):
    """One token drawn from the row, as `lmpool.protocol.sampling.pack_token` packs it."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)]  # MessagePack has none above `picks.MOST_SEED`.

    @property
    def how(self) -> Sampling:
        """How it is drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)


class ScoreAsk(Message, frozen=True, tag="score"):
    """The log-probabilities of the prompt's own tokens from position `start` on, each after those before it.

    A forward of its own answers it, not the row: float32 of shape (length of the prompt - start,).
    """

    start: Annotated[int, Meta(ge=1)]


class FreshAsk(Message, frozen=True, tag="fresh"):
    """The row, computed by a forward of its own from nothing that is kept.

    Attributes:
        nonce: 16 bytes that tell this request from any other.
    """

    nonce: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]


PickAsk = TopAsk | SampleAsk
"""What is picked from a row."""

Ask = TrieAsk | TopAsk | SampleAsk | ScoreAsk | FreshAsk


def unpack_ask(data: bytes) -> Ask:
    """Read an ask.

    Raises:
        ProtocolError: too large, not MessagePack, or not an ask.
    """
    match unpack_flat(data, _MOST_BYTES, "ask"):
        case ["top", *_] as values:
            return checked(TopAsk, values, "an ask")
        case ["sample", float(), float(), _] as values:  # As a float, msgspec takes a whole number too.
            return checked(SampleAsk, values, "an ask")
        case ["score", *_] as values:
            return checked(ScoreAsk, values, "an ask")
        case ["fresh", *_] as values:
            return checked(FreshAsk, values, "an ask")
        case [str(op), str(), str(select), *_] if op not in OPS or select not in _SELECTIONS:
            expected = f"{', '.join(OPS)} of {', '.join(_SELECTIONS)}"
            raise ProtocolError(f"an ask for {shown(op, 40)} of {shown(select, 40)}: expected {expected}")
        case [_, _, _, _, _, _] as values:
            return _checked_trie(checked(TrieAsk, values, "an ask"))
        case other:
            raise ProtocolError(f"not an ask: {described(other)}")


def _checked_trie(ask: TrieAsk) -> TrieAsk:
    lengths = len(ask.vocabulary), len(ask.rows), len(ask.source)
    if lengths[0] != _DIGEST_DIGITS or lengths[1] not in (0, _DIGEST_DIGITS) or lengths[2] not in (0, DIGEST_SIZE):
        raise ProtocolError("an ask has a digest of the wrong length")
    if len(ask.nodes) % 4 or (ask.select == "under" and len(ask.nodes) != 4):
        raise ProtocolError(f"an ask for {ask.select!r} has {len(ask.nodes)} bytes of node ids")
    return ask
