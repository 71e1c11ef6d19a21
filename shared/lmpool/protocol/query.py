"""Queries: what a job wants instead of a prompt's row, and how that is taken from a row, the same wherever it is."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from lmpool.errors import NoProbability, ProtocolError
from lmpool.protocol.job import Message, checked, described, unpack_flat
from lmpool.protocol.prompt import DIGEST_SIZE
from lmpool.protocol.row import Row, check_largest, check_logprobs
from lmpool.settings import shown

MAX_SEED = 2**64 - 1
"""Largest seed of a sampling."""

Op = Literal["sum", "max", "logsumexp"]
"""What is taken over the weights below a node."""

OPS: tuple[Op, ...] = get_args(Op)
Selection = Literal["inner", "values", "nodes", "under"]
"""Which values of a trie are wanted; see `TrieQuery`."""

PositionValues = Literal["logprobs", "logits", "scores", "score_logits", "logz", "hidden"]
"""What is told of positions; see `PositionsQuery`."""

MAX_ANSWER = 1 << 21
"""Numbers of an answer for several positions (8 MiB): more would fill a worker's memory, or the server's, at once."""

SECRET_SIZE = 16
"""Bytes of the secret that is stored before the encoding of weights."""

MAX_GENERATED = 1 << 20
"""Tokens of one continuation; the longest prompt of a model is shorter."""

MAX_STOP_NUMBERS = 1 << 14
"""Tokens of the sequences that end a continuation, and how many these are, together."""

# Where a continuation has ended before its longest: no vocabulary is so large.
_NO_TOKEN = 0xFFFFFFFF
# One number of each position.
_OF_NEXT_TOKEN = ("scores", "score_logits")
_SINGLE = (*_OF_NEXT_TOKEN, "logz")
_SELECTIONS = get_args(Selection)
_MAX_BYTES = 8 * 1024 * 1024
_DIGEST_DIGITS = 32
# Tokens that nearly always have what `top_p` asks for: sorting all takes far longer.
_FEW, _FEW_MORE = 1024, 4
_BLOCK = 256


class TopK(NamedTuple):
    """The largest entries of one row, or of several.

    Attributes:
        values: float32 log-probabilities of shape (k,) or (n, k), largest first; of equal ones the lowest id first.
        ids: their int64 token ids, of the same shape.
    """

    values: NDArray[np.float32]
    ids: NDArray[np.int64]


class Sampling(NamedTuple):
    """How one token is drawn.

    Attributes:
        temperature: divides the log-probabilities; 0 takes the likeliest token.
        top_p: draws among the likeliest tokens only, the fewest that have at least this probability together.
        seed: a whole number from 0 to `MAX_SEED`; equal seeds draw equal tokens from equal rows.
    """

    temperature: float
    top_p: float
    seed: int


class Continuation(NamedTuple):
    """Tokens that were drawn one after another, each from the row of what stands before it.

    Attributes:
        ids: int64 token ids of shape (m,).
        logprobs: float32 (m,), what each of them has in its row, whatever the temperature.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def top(row: Row, k: int) -> TopK:
    """The `k` largest entries of a row of shape (V,), 1 <= k <= V."""
    ids = _largest(row, k)
    return TopK(row[ids], ids)


class Kept(NamedTuple):
    """What a token is drawn from.

    Attributes:
        ids: int64 (m,) token ids, the largest weight first, of equal ones the lowest id; None for all of the row.
        weights: float32 (m,), in proportion to the probabilities that they are drawn with; the largest is 1.
    """

    ids: NDArray[np.int64] | None
    weights: NDArray[np.float32]


def kept(row: Row, temperature: float, top_p: float) -> Kept:
    """The tokens of a row of shape (V,) that may be drawn, and how much each weighs: what `sample` draws from.

    Args:
        row: float32 log-probabilities, one of them above -inf.
        temperature: as `Sampling`.
        top_p: as `Sampling`.
    """
    if temperature == 0:
        return Kept(np.array([row.argmax()]), np.ones(1, np.float32))
    # Shifted first: divided by a small temperature, log-probabilities alone could all be 0 as probabilities.
    weights = row - np.maximum.reduce(row)
    if temperature != 1:
        with np.errstate(over="ignore"):  # A tiny temperature makes -inf of what is not the likeliest.
            # Beyond these, which float32 has, nothing changes: only the likeliest has any weight, or all have the same.
            weights /= np.float32(min(max(temperature, 1e-30), 1e30))
    # As exact as the row is; what is added up is in float64.
    np.exp(weights, out=weights)
    if top_p == 1:
        return Kept(None, weights)
    ids = _nucleus(weights, top_p)
    return Kept(ids, weights[ids])


def sample(row: Row, how: Sampling) -> int:
    """A token drawn from a row of shape (V,)."""
    if how.temperature == 0:  # The one that is kept; arrays of one would take longer than finding it.
        return int(row.argmax())
    ids, weights = kept(row, how.temperature, how.top_p)
    place = _at_share(weights, _share(how.seed))
    return place if ids is None else int(ids[place])


def _share(seed: int) -> float:
    """A number from 0 up to 1, and without it, that a seed stands for.

    A hash, since making one of numpy's generators takes ten times as long as this, and a fifth of a draw.
    """
    drawn = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(drawn, "little") >> 11) * 2.0**-53


def _at_share(weights: NDArray[np.float32], share: float) -> int:
    """The first place up to which the weights have more than this share of their sum, 0 <= `share` < 1."""
    # First among the sums of blocks: adding up all of a large vocabulary one by one takes four times as long.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    mass = sums.cumsum()
    wanted = share * mass[-1]
    block = _first_above(mass, wanted, sums)
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    rest = wanted - mass[block - 1] if block else wanted
    return block * _BLOCK + _first_above(part.cumsum(dtype=np.float64), rest, part)


def _first_above(mass: NDArray[np.float64], wanted: float, weights: NDArray[np.floating]) -> int:
    """The first place where `mass`, the sums of weights up to there, is above what is wanted."""
    place = int(mass.searchsorted(wanted, side="right"))
    # Sums are rounded: what is wanted may be all of them. What weighs nothing is never drawn.
    return place if place < len(mass) else int(np.flatnonzero(weights)[-1])


def top_of(row: Row, k: int, ids: NDArray[np.int64]) -> TopK:
    """As `top`, of some entries only, 1 <= k <= n; their ids are (n,), ascending."""
    best = top(row[ids], k)
    return TopK(best.values, ids[best.ids])


def sample_of(row: Row, how: Sampling, ids: NDArray[np.int64]) -> int:
    """As `sample`, among some tokens only, as if they were all; their ids are ascending.

    Raises:
        NoProbability: none of them has any.
    """
    values = row[ids]
    if values.max() == -np.inf:
        raise NoProbability(f"none of the {len(ids)} allowed tokens has a probability above 0")
    return int(ids[sample(values, how)])


def mass_of(row: Row, ids: NDArray[np.int64]) -> np.float32:
    """The logarithm of the probability that some tokens have together; -inf if they have none."""
    values = row[ids]
    if (most := values.max()) == -np.inf:
        return np.float32(most)
    return np.float32(most + np.log(np.exp(values - most).sum(dtype=np.float64)))


def _largest(values: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The ids of the `k` largest values, largest first; of equal ones the lowest id first."""
    least = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > least)
    # Which of the values that equal the least are taken must not depend on how a partition orders them.
    ids = np.concatenate((above, np.flatnonzero(values == least)[: k - len(above)]))
    ordered: NDArray[np.int64] = ids[np.lexsort((ids, -values[ids]))]
    return ordered


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """The fewest tokens that have `top_p` of the weight together, likeliest first."""
    wanted = top_p * weights.sum(dtype=np.float64)
    few = _FEW
    while True:
        ids = _largest(weights, min(few, len(weights)))
        mass = np.cumsum(weights[ids], dtype=np.float64)
        if mass[-1] >= wanted or few >= len(weights):
            break
        few *= _FEW_MORE
    return ids[: int(np.searchsorted(mass, wanted)) + 1]


def pack_top(largest: TopK) -> NDArray[np.float32]:
    """A result as an answer travels: float32 of shape (2k,) or (n, 2k), the values and then the bits of the ids."""
    return np.concatenate((largest.values, largest.ids.astype("<u4").view(np.float32)), axis=-1)


def unpack_top(answer: NDArray[np.float32], vocab_size: int, *, of_row: bool = True) -> TopK:
    """Read what `pack_top` made, of a whole row of log-probabilities or of others.

    Raises:
        ProtocolError: an id is not below `vocab_size` or comes twice, or the values are not the largest of a row, in
            order.
    """
    k = answer.shape[-1] // 2
    values, ids = answer[..., :k].copy(), np.ascontiguousarray(answer[..., k:]).view("<u4").astype(np.int64)
    ordered = np.sort(ids, axis=-1)
    # In this form it refuses NaN too.
    is_falling = (values[..., 1:] <= values[..., :-1]).all()
    if not is_falling or ids.max() >= vocab_size or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ProtocolError(f"these are not the largest entries of a row of {vocab_size}")
    for most in (values[..., 0].min(), values[..., 0].max()):
        if of_row:
            check_largest(most, vocab_size)
        elif not most < np.inf:
            raise ProtocolError(f"the largest of {vocab_size} entries is {most}")
    return TopK(values, ids)


def stack_tops(tops: Sequence[TopK], k: int) -> TopK:
    """The largest entries of n rows, `k` of each, in arrays of shape (n, k)."""
    values = np.array([best.values for best in tops], np.float32).reshape(-1, k)
    return TopK(values, np.array([best.ids for best in tops], np.int64).reshape(-1, k))


def pack_token(token: int) -> NDArray[np.float32]:
    """A token id as an answer travels: float32 of shape (1,), the bits of the id."""
    return np.array([token], "<u4").view(np.float32)


def unpack_token(answer: NDArray[np.float32], vocab_size: int) -> int:
    """Read what `pack_token` made.

    Raises:
        ProtocolError: the id is not below `vocab_size`.
    """
    token = int(answer.view("<u4")[0])
    if token >= vocab_size:
        raise ProtocolError(f"{token} was drawn from a row of {vocab_size} entries")
    return token


def pack_continuation(made: Continuation, length: int) -> NDArray[np.float32]:
    """A continuation as an answer travels: float32 of shape (2 * length,), the bits of the ids and then the values.

    Args:
        made: of at most `length` tokens; what is missing is filled up.
        length: so many tokens were asked for.
    """
    answer = np.zeros(2 * length, np.float32)
    ids = answer[:length].view("<u4")
    ids[:] = _NO_TOKEN
    ids[: len(made.ids)] = made.ids
    answer[length : length + len(made.ids)] = made.logprobs
    return answer


def unpack_continuation(answer: NDArray[np.float32], vocab_size: int) -> Continuation:
    """Read what `pack_continuation` made.

    Raises:
        ProtocolError: no token, an id that is not below `vocab_size`, or a value that is no log-probability.
    """
    length = len(answer) // 2
    ids = np.ascontiguousarray(answer[:length]).view("<u4").astype(np.int64)
    count = int((ids != _NO_TOKEN).sum())
    ids, logprobs = ids[:count], answer[length : length + count].copy()
    if not count or ids.max() >= vocab_size:
        raise ProtocolError(f"these {count} tokens do not continue a prompt of a model with V = {vocab_size}")
    return Continuation(ids, check_logprobs(logprobs))


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights of one trie job, stored where any client of the pool may write and only trie workers may read.

    Jobs can be read by every client, so every client knows the name. Since it is the digest of a secret that is stored
    with the weights, trie workers see whether somebody else has written there.

    Attributes:
        values: float32 (V,), C-contiguous.
        secret: random bytes, used once.
    """

    values: NDArray[np.float32]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_SIZE))

    @property
    def name(self) -> bytes:
        """The name under which they are stored, and by which the job names them."""
        return weights_name(self.secret)


def weights_name(secret: bytes) -> bytes:
    """The name of weights that are stored with a secret: its 128-bit BLAKE2b."""
    return hashlib.blake2b(secret, digest_size=DIGEST_SIZE).digest()


class TrieQuery(Message, frozen=True):
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


class TopQuery(Message, frozen=True, tag="top"):
    """The `k` largest entries of the row, as `lmpool.protocol.query.pack_top` packs them.

    Attributes:
        k: how many.
        allowed: those of these tokens only (`TokenSet.packed`); of all if there are none.
    """

    k: Annotated[int, Meta(ge=1)]
    allowed: bytes = b""


class SampleQuery(Message, frozen=True, tag="sample"):
    """One token drawn from the row, as `lmpool.protocol.query.pack_token` packs it; `allowed` as `TopQuery`."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)]  # MessagePack has none above `MAX_SEED`.
    allowed: bytes = b""

    @property
    def how(self) -> Sampling:
        """How it is drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)


class MassQuery(Message, frozen=True, tag="mass"):
    """The logarithm of the probability that some tokens have together, float32 of shape (1,).

    Attributes:
        allowed: the tokens (`TokenSet.packed`).
    """

    allowed: Annotated[bytes, Meta(min_length=1)]


class PositionsQuery(Message, frozen=True, tag="positions"):
    """What the model expects behind each of the prompt's tokens from position `start` on.

    A forward of its own answers it, not the row: float32 of shape (n * width,), position after position.

    Attributes:
        start: the first position. At position i is wanted what comes after the tokens 0 to i.
        top: so many of the likeliest tokens, as `lmpool.protocol.query.pack_top` packs them; 0 for none.
        targets: otherwise these entries, little-endian uint32 ids; if there are none either, whole rows.
        values: of what. "scores": neither of these, but the log-probability of the token that follows; the last
            position has none. "score_logits": its logit. "logz": the logarithm of the sum of the exponentials of the
            logits. "hidden": the last hidden states, as `lmpool.protocol.hidden.pack_numbers` packs them.
        size: numbers of each position that a hidden state takes.
        allowed: the `top` likeliest of these tokens only (`TokenSet.packed`); of all if there are none. Backends get
            their ids as `targets` instead (`among`).
    """

    start: Annotated[int, Meta(ge=0)]
    top: Annotated[int, Meta(ge=0)] = 0
    targets: bytes = b""
    values: PositionValues = "logprobs"
    size: Annotated[int, Meta(ge=0)] = 0
    allowed: bytes = b""

    @classmethod
    def scores_from(cls, start: int, *, logits: bool = False) -> Self:
        """What the prompt's own tokens from `start` on score, or their logits; `start` must not be the first."""
        return cls(start - 1, values="score_logits" if logits else "scores")

    def among(self, ids: NDArray[np.int64]) -> Self:
        """As it is, of these tokens only; their ids are ascending."""
        return replace(self, targets=ids.astype("<u4").tobytes(), allowed=b"")

    @property
    def is_of_next_token(self) -> bool:
        """Whether what is wanted is about the token that follows each position."""
        return self.values in _OF_NEXT_TOKEN

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """The ids of `targets`, int64 (m,)."""
        return np.frombuffer(self.targets, "<u4").astype(np.int64)

    def width(self, vocab_size: int) -> int:
        """Numbers of each position."""
        return 2 * self.top or len(self.targets) // 4 or self.size or (1 if self.values in _SINGLE else vocab_size)

    def span(self, length: int) -> range:
        """The positions of a prompt of so many tokens that are asked for."""
        return range(self.start, length - 1 if self.is_of_next_token else length)

    def most_positions(self, vocab_size: int) -> int:
        """So many positions one job may ask for."""
        return max(1, MAX_ANSWER // self.width(vocab_size))

    def of(
        self, logits: NDArray[np.float32], log_z: NDArray[np.float32], following: NDArray[Any]
    ) -> NDArray[np.float32]:
        """What is wanted of positions: float32 (n, width).

        Args:
            logits: float32 (n, V).
            log_z: float32 (n,), the logarithms of the sums of their exponentials.
            following: the tokens that follow, (n,).
        """
        if self.values == "logz":
            return log_z[:, None]
        rows = logits if self.values in ("logits", "score_logits") else logits - log_z[:, None]
        if self.top:
            ids = self.target_ids
            tops = [top_of(row, self.top, ids) if self.targets else top(row, self.top) for row in rows]
            return pack_top(stack_tops(tops, self.top))
        if self.is_of_next_token:
            return np.take_along_axis(rows, following.astype(np.int64)[:, None], axis=1)
        return rows[:, self.target_ids] if self.targets else rows


class GenerateQuery(Message, frozen=True, tag="generate"):
    """Tokens drawn one after another, as `lmpool.protocol.query.pack_continuation` packs them.

    Attributes:
        most: so many at most.
        temperature: as `Sampling`.
        top_p: as `Sampling`.
        seed: the token at place i is drawn with the seed + i.
        stop: little-endian uint32: of each sequence of tokens that ends it, how many it has, and these.
    """

    most: Annotated[int, Meta(ge=1, le=MAX_GENERATED)]
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)]
    stop: Annotated[bytes, Meta(max_length=4 * MAX_STOP_NUMBERS)] = b""

    @property
    def how(self) -> Sampling:
        """How the first token is drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)

    @property
    def stops(self) -> list[bytes]:
        """The sequences of tokens that end it, as little-endian uint32.

        Raises:
            ProtocolError: `stop` is not made of whole ones.
        """
        numbers, at, stops = np.frombuffer(self.stop[: len(self.stop) // 4 * 4], "<u4").tolist(), 0, []
        while at < len(numbers):
            end = at + 1 + numbers[at]
            stops.append(self.stop[4 * (at + 1) : 4 * end])
            if not numbers[at] or end > len(numbers):
                raise ProtocolError("a query to generate has sequences to stop at that are empty or cut off")
            at = end
        return stops


def pack_stops(stops: Iterable[Sequence[int]]) -> bytes:
    """Sequences of tokens as `GenerateQuery.stop` has them."""
    return np.array([number for stop in stops for number in (len(stop), *stop)], "<u4").tobytes()


def drawn_at(how: Sampling, place: int) -> Sampling:
    """How the token at a place of a continuation is drawn, when this is how the first is."""
    return how._replace(seed=(how.seed + place) & MAX_SEED)


class HeadQuery(Message, frozen=True, tag="head"):
    """What turns hidden states into rows (`lmpool.protocol.hidden.Head`); whatever the prompt is.

    Attributes:
        part: "facts": as `lmpool.protocol.hidden.pack_facts` packs them. "bias": float32 (V,). "weights": some rows of
            them, as `lmpool.protocol.hidden.pack_numbers` packs them.
        first: the first row.
        count: so many rows.
    """

    part: Literal["facts", "bias", "weights"]
    first: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=0)] = 0


class FreshQuery(Message, frozen=True, tag="fresh"):
    """The row, computed by a forward of its own from nothing that is kept.

    Attributes:
        nonce: 16 bytes that tell this request from any other.
    """

    nonce: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]


PickQuery = TopQuery | SampleQuery | MassQuery
"""What is picked from a row."""

Query = TrieQuery | TopQuery | SampleQuery | MassQuery | PositionsQuery | GenerateQuery | HeadQuery | FreshQuery


def unpack_query(data: bytes) -> Query:
    """Read a query.

    Raises:
        ProtocolError: too large, not MessagePack, or not a query.
    """
    match unpack_flat(data, _MAX_BYTES, "query"):
        case ["top", *_] as values:
            return checked(TopQuery, values, "a query")
        case ["mass", *_] as values:
            return checked(MassQuery, values, "a query")
        case ["sample", float(), float(), _, _] as values:  # As a float, msgspec takes a whole number too.
            return checked(SampleQuery, values, "a query")
        case ["positions", int(), int(k), bytes(targets), str(kind), int(size), bytes(allowed)] as values:
            # One of them at most, or clients would read the answer as something else.
            is_hidden = kind == "hidden"
            is_one = (k > 0) + bool(targets) + (kind in _SINGLE) + is_hidden <= 1
            if len(targets) % 4 or not is_one or is_hidden != (size > 0) or bool(allowed) > (k > 0):
                raise ProtocolError("a query for positions wants more than one thing of them, or no whole ids")
            return checked(PositionsQuery, values, "a query")
        case ["generate", int(), float(), float(), int(), bytes(stop)] as values if len(stop) % 4 == 0:
            query = checked(GenerateQuery, values, "a query")
            _ = query.stops
            return query
        case ["head", *_] as values:
            return checked(HeadQuery, values, "a query")
        case ["fresh", *_] as values:
            return checked(FreshQuery, values, "a query")
        case [str(op), str(), str(select), *_] if op not in OPS or select not in _SELECTIONS:
            expected = f"{', '.join(OPS)} of {', '.join(_SELECTIONS)}"
            raise ProtocolError(f"a query for {shown(op, 40)} of {shown(select, 40)}: expected {expected}")
        case [_, _, _, _, _, _] as values:
            return _checked_trie(checked(TrieQuery, values, "a query"))
        case other:
            raise ProtocolError(f"not a query: {described(other)}")


def _checked_trie(query: TrieQuery) -> TrieQuery:
    lengths = len(query.vocabulary), len(query.rows), len(query.source)
    if lengths[0] != _DIGEST_DIGITS or lengths[1] not in (0, _DIGEST_DIGITS) or lengths[2] not in (0, DIGEST_SIZE):
        raise ProtocolError("a query has a digest of the wrong length")
    if len(query.nodes) % 4 or (query.select == "under" and len(query.nodes) != 4):
        raise ProtocolError(f"a query for {query.select!r} has {len(query.nodes)} bytes of node ids")
    return query
