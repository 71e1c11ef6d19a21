"""Queries for results other than a prompt's row (top-k, a sample, trie values, ...), and how they are computed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder
from msgspec.structs import replace
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.job import DIGEST_SIZE, Message, unpack
from lmpool.protocol.picks import Sampling, TopK, logsumexp, tempered, top
from lmpool.protocol.row import FACTS, Row, check_largest, check_logits, check_logprobs

MAX_SEED = 2**64 - 1
"""Largest seed of a random draw; MessagePack has no larger integers."""

Op = Literal["sum", "max", "logsumexp"]
"""How the weights below a trie node are combined."""

OPS: tuple[Op, ...] = get_args(Op)
Selection = Literal["inner", "values", "nodes", "under"]
"""Which values of a trie a query requests; see `TrieQuery`."""

PositionValues = Literal["logprobs", "logits", "hidden"]
"""Which values a query requests for each position of a text; see `PositionsQuery`."""

MAX_ANSWER = 1 << 21
"""Max numbers in the result for several positions (8 MiB), so that one result cannot fill a worker's memory."""

NO_TOKEN = 0xFFFFFFFF
"""Id that pads lists of tokens: of a continuation that ended early, of targets. No vocabulary has this id."""

SECRET_SIZE = 16
"""Bytes of the secret that is stored before the weights of a trie job."""

MAX_GENERATED = 1 << 20
"""Max tokens of one continuation; no model accepts prompts of this length."""

MAX_STOP_NUMBERS = 1 << 14
"""Max numbers in the stop sequences of a continuation; tokens and sequence lengths both count."""

_MAX_BYTES = 8 * 1024 * 1024  # Max bytes of an encoded query; the node ids of a large trie take the most.
_DIGEST_DIGITS = 32  # Hexadecimal digits of a fingerprint or of a vocabulary's digest.


class Continuation(NamedTuple):
    """Tokens that were drawn one after another, each from the row of the tokens before it.

    Attributes:
        ids: int64 token ids of shape (m,).
        logprobs: float32 (m,), the log-probability of each token in its row, at any temperature.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


# Results on the wire: float32 arrays


def pack_top(largest: TopK) -> NDArray[np.float32]:
    """A `TopK` as float32 of shape (2k,) or (n, 2k): the values, then the bits of the ids."""
    return np.concatenate((largest.values, largest.ids.astype("<u4").view(np.float32)), axis=-1)


def unpack_top(answer: NDArray[np.float32], vocab_size: int, *, of_row: bool = True) -> TopK:
    """Decode the result of `pack_top`; `of_row` says that the values are log-probabilities of a whole row.

    Raises `ProtocolError` if an id is not below `vocab_size` or repeated, or the values cannot be the largest of a row.
    """
    k = answer.shape[-1] // 2
    values, ids = answer[..., :k].copy(), np.ascontiguousarray(answer[..., k:]).view("<u4").astype(np.int64)
    ordered = np.sort(ids, axis=-1)
    is_falling = (values[..., 1:] <= values[..., :-1]).all()  # The comparison is False if a value is NaN.
    if not is_falling or ids.max() >= vocab_size or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ProtocolError(f"these are not the largest entries of a row of {vocab_size}")
    for most in (values[..., 0].min(), values[..., 0].max()):
        if of_row:
            check_largest(most, vocab_size)
        elif not most < np.inf:
            raise ProtocolError(f"the largest of {vocab_size} entries is {most}")
    return TopK(values, ids)


def stack_tops(tops: Sequence[TopK], k: int) -> TopK:
    """The `k` largest entries of each of n rows, in arrays of shape (n, k)."""
    values = np.array([best.values for best in tops], np.float32).reshape(-1, k)
    return TopK(values, np.array([best.ids for best in tops], np.int64).reshape(-1, k))


def pack_token(token: int) -> NDArray[np.float32]:
    """The bits of a token id, as float32 of shape (1,)."""
    return np.array([token], "<u4").view(np.float32)


def unpack_token(answer: NDArray[np.float32], vocab_size: int) -> int:
    """Decode the result of `pack_token`; raises `ProtocolError` for an id that is not below `vocab_size`."""
    token = int(answer.view("<u4")[0])
    if token >= vocab_size:
        raise ProtocolError(f"{token} was drawn from a row of {vocab_size} entries")
    return token


def pack_continuation(made: Continuation, length: int) -> NDArray[np.float32]:
    """A continuation of up to `length` tokens as float32 (2 * length,): the bits of the ids, then log-probabilities."""
    answer = np.zeros(2 * length, np.float32)
    ids = answer[:length].view("<u4")
    ids[:] = NO_TOKEN
    ids[: len(made.ids)] = made.ids
    answer[length : length + len(made.ids)] = made.logprobs
    return answer


def unpack_continuation(answer: NDArray[np.float32], vocab_size: int) -> Continuation:
    """Decode the result of `pack_continuation`; raises `ProtocolError` if the numbers cannot be a continuation."""
    length = len(answer) // 2
    ids = np.ascontiguousarray(answer[:length]).view("<u4").astype(np.int64)
    count = int((ids != NO_TOKEN).sum())
    ids, logprobs = ids[:count], answer[length : length + count].copy()
    if not count or ids.max() >= vocab_size:
        raise ProtocolError(f"these {count} tokens do not continue a prompt of a model with V = {vocab_size}")
    return Continuation(ids, check_logprobs(logprobs))


# Queries


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights of one trie job, stored under a Redis key that any client may write and only trie workers may read.

    Every client can read jobs and so knows the weights' name. The name is the digest of a secret that is stored with
    the weights, so trie workers notice when another client has overwritten them.
    """

    values: NDArray[np.float32]  # float32 (V,), C-contiguous.
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_SIZE))  # Random bytes, for this job only.

    @property
    def name(self) -> bytes:
        """The name of the weights in Redis and in the job."""
        return weights_name(self.secret)


def weights_name(secret: bytes) -> bytes:
    """The name of weights that are stored with a secret: the secret's 128-bit BLAKE2b."""
    return hashlib.blake2b(secret, digest_size=DIGEST_SIZE).digest()


class QueryMessage(Message, frozen=True, forbid_unknown_fields=True):
    """A query. Its fields decide its result, so a worker refuses a query with a field that it does not know.

    A new option of a query must therefore be a query with another tag.
    """


class TrieQuery(QueryMessage, frozen=True):
    """Values of trie nodes, computed from a row or from weights.

    Attributes:
        op: "sum" or "max" of weights (for a row, its probabilities), or "logsumexp" of log-weights (for a row, its
            log-probabilities).
        vocabulary: digest of the vocabulary.
        select: "inner": values of the inner nodes, (M,), for a client with the weights; "values": values of the inner
            nodes, then the weights, (M + V,); "nodes": values of `nodes`; "under": values of the children of one node.
        nodes: int32 node ids as bytes: the requested nodes for "nodes", the parent node for "under".
        rows: fingerprint of the model of the row; "" if `source` names weights, or for the row of the job's own prompt.
        source: digest of the row's prompt, or the name of the weights; b"" for the row of the job's own prompt.
    """

    op: Op
    vocabulary: str
    select: Selection
    nodes: bytes = b""
    rows: str = ""
    source: bytes = b""

    def check(self) -> None:
        lengths = len(self.vocabulary), len(self.rows), len(self.source)
        if lengths[0] != _DIGEST_DIGITS or lengths[1] not in (0, _DIGEST_DIGITS) or lengths[2] not in (0, DIGEST_SIZE):
            raise ProtocolError("a query has a digest of the wrong length")
        if len(self.nodes) % 4 or (self.select == "under" and len(self.nodes) != 4):
            raise ProtocolError(f"a query for {self.select!r} has {len(self.nodes)} bytes of node ids")


class TopQuery(QueryMessage, frozen=True, tag="top"):
    """The `k` largest entries of the row (see `pack_top`), only of tokens in `allowed` (`TokenSet.packed`) if given."""

    k: Annotated[int, Meta(ge=1)]
    allowed: bytes = b""


class SampleQuery(QueryMessage, frozen=True, tag="sample"):
    """One token drawn from the row, encoded by `pack_token`; only from the tokens in `allowed` if given."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)]
    allowed: bytes = b""


class MassQuery(QueryMessage, frozen=True, tag="mass"):
    """The logarithm of the sum of the probabilities of the tokens in `allowed`, float32 of shape (1,)."""

    allowed: Annotated[bytes, Meta(min_length=1)]


class EntriesQuery(QueryMessage, frozen=True, tag="entries"):
    """The entries of some tokens in the row, float32 (k,); `targets` are little-endian uint32 ids."""

    targets: Annotated[bytes, Meta(min_length=4)]
    temperature: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0  # Divides the logits first.

    def check(self) -> None:
        if len(self.targets) % 4:
            raise ProtocolError("a query for entries has targets that are no whole ids")

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """The ids of `targets`: int64 (k,)."""
        return np.frombuffer(self.targets, "<u4").astype(np.int64)


class PositionsQuery(QueryMessage, frozen=True, tag="predictions"):
    """Predictions after each token of the prompt from position `start` on, computed in a separate forward pass.

    The result is float32 of shape (n * width,), position after position. A position's numbers are, if requested: the
    top tokens (`pack_top`), the targets, the next token, logZ, the tail. Without any of these, they are the whole row.

    Attributes:
        start: the first position. The prediction at position i is about the token after the tokens 0 to i.
        stop: the position after the last one; 0 for all positions of the prompt.
        top: number of the most likely tokens to return at each position; 0 for none.
        targets: little-endian uint32 ids of entries to return.
        each: number of targets per position, if each position has its own; 0 if `targets` are for all positions. The
            id `NO_TOKEN` is padding, whose entry is -inf.
        next_token: whether to return the entry of the token that follows the position. The last position of a prompt
            has no such token: its value has no meaning, and a query for nothing else leaves this position out.
        logz: whether to return the logarithm of the sum of the exponentials of the logits.
        tail: whether to return the logarithm of the sum over the tokens that are neither in `top` nor in `targets`.
        values: "logprobs" or "logits" for the entries; "hidden": only the last hidden states, by `pack_numbers`.
        temperature: divides the logits first.
        size: float32 numbers per position that carry a hidden state; 0 for other values.
        allowed: tokens to which `top` is limited (`TokenSet.packed`). Backends get these ids as `choices` (`among`).
        choices: little-endian uint32 ids, ascending, to which `top` is limited; only within a worker.
    """

    start: Annotated[int, Meta(ge=0)]
    top: Annotated[int, Meta(ge=0)] = 0
    targets: bytes = b""
    each: Annotated[int, Meta(ge=0)] = 0
    next_token: bool = False
    logz: bool = False
    tail: bool = False
    values: PositionValues = "logprobs"
    temperature: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    size: Annotated[int, Meta(ge=0)] = 0
    allowed: bytes = b""
    choices: bytes = b""
    stop: Annotated[int, Meta(ge=0)] = 0

    def check(self) -> None:
        is_hidden = self.values == "hidden"
        if len(self.targets) % 4 or len(self.choices) % 4 or (self.each and len(self.targets) % (4 * self.each)):
            raise ProtocolError("a query for positions has targets that are no whole ids")
        if is_hidden != (self.size > 0) or (is_hidden and self.is_of_entries):
            raise ProtocolError("a query for hidden states requests something else too, or has no size")
        if (bool(self.allowed) > (self.top > 0)) or (self.tail and not (self.top or self.targets)):
            raise ProtocolError("a query for positions limits or completes tokens that it does not request")

    @classmethod
    def scores_from(cls, start: int, *, logits: bool = False, temperature: float = 1.0) -> Self:
        """The scores of the prompt's own tokens from `start` on, or their logits; `start` must not be 0."""
        return cls(start - 1, next_token=True, values="logits" if logits else "logprobs", temperature=temperature)

    def among(self, ids: NDArray[np.int64]) -> Self:
        """This query, with `top` limited to the tokens with these ascending ids."""
        return replace(self, choices=ids.astype("<u4").tobytes(), allowed=b"")

    @property
    def is_of_entries(self) -> bool:
        """Whether the query requests less than whole rows."""
        return bool(self.top or self.targets or self.next_token or self.logz or self.tail)

    @property
    def is_of_next_token(self) -> bool:
        """Whether the query requests nothing but the entry of the token that follows each position."""
        return self.next_token and not (self.top or self.targets or self.logz)

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """The ids of `targets`: int64 (m,), or (n, m) if each position has its own."""
        ids = np.frombuffer(self.targets, "<u4").astype(np.int64)
        return ids.reshape(-1, self.each) if self.each else ids

    @property
    def choice_ids(self) -> NDArray[np.int64] | None:
        """The ids of `choices`, int64 (m,); None if `top` is not limited."""
        return np.frombuffer(self.choices, "<u4").astype(np.int64) if self.choices else None

    def targets_at(self, positions: range) -> NDArray[np.int64]:
        """The ids of the targets of some positions: int64 (n, m), with `NO_TOKEN` as padding."""
        ids = self.target_ids
        if self.each:
            return ids[positions.start - self.start : positions.stop - self.start]
        return np.broadcast_to(ids, (len(positions), len(ids)))

    @property
    def targets_per_position(self) -> int:
        """The number of targets of a position."""
        return self.each or len(self.targets) // 4

    def width(self, vocab_size: int) -> int:
        """How many numbers the result has per position."""
        singles = self.next_token + self.logz + self.tail
        return (2 * self.top + self.targets_per_position + singles) or self.size or vocab_size

    def span(self, length: int) -> range:
        """The requested positions of a prompt of `length` tokens."""
        last = length - 1 if self.is_of_next_token else length
        return range(self.start, min(self.stop or last, last))

    def most_positions(self, vocab_size: int) -> int:
        """Max positions that one job may request."""
        return max(1, MAX_ANSWER // self.width(vocab_size))

    def of(self, logits: Row, log_z: Row, positions: range, following: NDArray[Any]) -> Row:
        """The result for n positions, float32 (n, width).

        Args:
            logits: (n, V).
            log_z: the log-sum-exp (n,) of the logits.
            positions: the n positions.
            following: the token after each position; missing tokens at the end are replaced by token 0.
        """
        temperature = np.float32(self.temperature)
        if temperature == 1:
            entries = logits - log_z[:, None] if self.values == "logprobs" else logits
        else:
            entries = tempered(logits, self.temperature) if self.values == "logprobs" else logits / temperature
            log_z = logsumexp(logits / temperature) if self.logz else log_z
        if not self.is_of_entries:
            return entries
        columns, named = list[Row](), list[NDArray[np.int64]]()
        if self.top:
            best = stack_tops([top(row, self.top, self.choice_ids) for row in entries], self.top)
            columns.append(pack_top(best))
            named.append(best.ids)
        if self.targets:
            ids = self.targets_at(positions)
            is_padding = ids == NO_TOKEN
            named.append(np.where(is_padding, entries.shape[1], ids))
            found = np.take_along_axis(entries, np.where(is_padding, 0, ids), axis=1)
            columns.append(np.where(is_padding, -np.float32(np.inf), found))
        if self.next_token:
            tokens = np.zeros(len(logits), np.int64)
            tokens[: len(following)] = following
            columns.append(np.take_along_axis(entries, tokens[:, None], axis=1))
        if self.logz:
            columns.append(log_z[:, None])
        if self.tail:
            rest = np.pad(entries, ((0, 0), (0, 1)))  # The last column takes the place of padding.
            np.put_along_axis(rest, np.concatenate(named, axis=1), -np.inf, axis=1)
            columns.append(logsumexp(rest[:, :-1])[:, None])
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def with_rows(self, rows: Row, log_z: Row, positions: range, ids: NDArray[Any]) -> Predictions:
        """The predictions at positions of a text, computed from rows (n, V) and their log-sum-exp (n,).

        `ids`: the text's token ids.
        """
        following = ids[positions.start + 1 : positions.stop + 1]
        found = self.of(rows, log_z, positions, following)
        return self.split(found, positions, len(ids), rows.shape[1])

    def split(self, answer: Row, positions: range, length: int, vocab_size: int) -> Predictions:
        """Decode the result for positions of a text of `length` tokens.

        Raises:
            ProtocolError: the numbers cannot be the predictions of a model.
        """
        rows, at = answer.reshape(len(positions), -1), 0
        check = check_logprobs if self.values == "logprobs" else check_logits

        def take(width: int) -> Row:
            nonlocal at
            at += width
            return rows[:, at - width : at]

        if not self.is_of_entries:
            return Predictions(positions.start, full=check(rows))
        of_row = self.values == "logprobs" and not (self.allowed or self.choices)
        best = unpack_top(take(2 * self.top), vocab_size, of_row=of_row) if self.top else None
        targets = check(take(self.targets_per_position).copy()) if self.targets else None
        following = None
        if self.next_token:
            following = check(take(1)[:, 0].copy())
            following[max(0, length - 1 - positions.start) :] = np.nan
        log_z = check_logits(take(1)[:, 0].copy()) if self.logz else None
        tail = check(take(1)[:, 0].copy()) if self.tail else None
        return Predictions(positions.start, best, targets, following, log_z, tail)


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A model's predictions at n positions of a text; position i is about the token after the tokens 0 to i.

    What was not requested is None. Entries are log-probabilities, or logits if the call says so.

    Attributes:
        start: the first position.
        top: the most likely tokens: values float32 (n, k), largest first, and ids int64 (n, k).
        targets: float32 (n, m), the entries of the target tokens; -inf in place of padding.
        next_token: float32 (n,), the entry of the token that follows each position in the text; NaN at the text's last
            position, which no token follows.
        logz: float32 (n,), the logarithm of the sum of the exponentials of the logits, after their division by the
            temperature.
        tail: float32 (n,), the log-sum-exp of the entries that are neither in `top` nor in the targets, summed without
            cancellation: of log-probabilities, the log of the other tokens' probability. -inf if there are none.
        full: float32 (n, V), whole rows.
    """

    start: int
    top: TopK | None = None
    targets: NDArray[np.float32] | None = None
    next_token: NDArray[np.float32] | None = None
    logz: NDArray[np.float32] | None = None
    tail: NDArray[np.float32] | None = None
    full: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """The number of positions."""
        found = self.top.values if self.top is not None else None
        arrays = (found, self.targets, self.next_token, self.logz, self.tail, self.full)
        return next((len(array) for array in arrays if array is not None), 0)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The predictions of consecutive parts."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        tops = [part.top for part in parts if part.top is not None]
        best = TopK(*(np.concatenate(arrays) for arrays in zip(*tops, strict=True))) if tops else None
        names = ("targets", "next_token", "logz", "tail", "full")
        return cls(parts[0].start, best, *map(joined, names))


class GenerateQuery(QueryMessage, frozen=True, tag="generate"):
    """Tokens drawn one after another, encoded by `pack_continuation`."""

    most: Annotated[int, Meta(ge=1, le=MAX_GENERATED)]  # Max tokens to generate.
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)]  # Token i of the continuation is drawn with `seed` + i.
    # Stop sequences in little-endian uint32: the length and then the tokens of each sequence (`pack_stops`).
    stop: Annotated[bytes, Meta(max_length=4 * MAX_STOP_NUMBERS)] = b""

    def check(self) -> None:
        _ = self.stops

    def draw(self, number: int) -> Sampling:
        """The parameters of the draw of token `number` of the continuation."""
        return Sampling(self.temperature, self.top_p, (self.seed + number) & MAX_SEED)

    @property
    def stops(self) -> list[bytes]:
        """The stop sequences, as little-endian uint32; raises `ProtocolError` if one is empty or cut off."""
        at, stops = 0, list[bytes]()
        while at < len(self.stop):
            size = 4 * int.from_bytes(self.stop[at : at + 4], "little")
            stops.append(self.stop[at + 4 : at + 4 + size])
            if not size or len(stops[-1]) < size:
                raise ProtocolError("a query to generate has stop sequences that are empty or cut off")
            at += 4 + size
        return stops


def pack_stops(stops: Iterable[Sequence[int]]) -> bytes:
    """Sequences of tokens in the form of `GenerateQuery.stop`."""
    return np.array([number for stop in stops for number in (len(stop), *stop)], "<u4").tobytes()


class HeadQuery(QueryMessage, frozen=True, tag="head"):
    """A part of the model's head (`protocol.row.Head`), which turns hidden states into rows; a job may name any prompt.

    Attributes:
        part: "facts": the result of `pack_facts`. "bias": float32 (V,). "weights": `count` rows of the head's weights
            from row `first` on, by `pack_numbers`. Of the job's adapter: "rank": the rank r of its LoRA factors of the
            head, float32 (1,), 0 if it has none. "down" and "up": `count` float32 numbers of a factor from number
            `first` on, of shape (r, d) and (V, r); "up" is multiplied by the adapter's scale.
    """

    part: Literal["facts", "bias", "weights", "rank", "down", "up"]
    first: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=0)] = 0

    @property
    def is_of_adapter(self) -> bool:
        """Whether the part belongs to an adapter, and not to the model."""
        return self.part in ("rank", "down", "up")

    def numbers(self, vocab_size: int, width: int) -> int:
        """How many float32 numbers the result has; `width`: numbers that carry a row of the weights."""
        sizes = {"facts": FACTS, "bias": vocab_size, "weights": self.count * width, "rank": 1}
        return sizes.get(self.part, self.count)


class FreshQuery(QueryMessage, frozen=True, tag="fresh"):
    """The row, computed in a separate forward pass without cached keys and values. The nonce identifies the request."""

    nonce: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]


PickQuery = TopQuery | SampleQuery | MassQuery | EntriesQuery
"""A query that is answered from the row."""

Query = TrieQuery | PickQuery | PositionsQuery | GenerateQuery | HeadQuery | FreshQuery


_TRIE_QUERIES = Decoder(TrieQuery)
_DECODERS: dict[bytes, Decoder[Any]] = {
    str(kind.__struct_config__.tag).encode(): Decoder(kind) for kind in get_args(Query) if kind is not TrieQuery
}


def unpack_query(data: bytes) -> Query:
    """Decode a query. Raises `ProtocolError` for bytes that are no query."""
    tag = data[2 : 2 + (data[1] & 0x1F)] if len(data) > 1 else b""  # The tag is a short string: byte 1 has its length.
    try:
        query: Query = unpack(_DECODERS.get(tag, _TRIE_QUERIES), data, _MAX_BYTES, "a query")
    except ProtocolError as error:
        raise ProtocolError(f"{error}; if the client has a later release, upgrade the workers first") from error
    query.check()
    return query
