"""Refusals: why a job that can be read cannot be done here; a client that knows the model sends none of them."""

from __future__ import annotations

from lmpool.errors import InvalidPrompt, ModelMismatch, PromptTooLong, ProtocolError, SourceMissing, UnknownAdapter
from lmpool.protocol.adapter import is_qualified
from lmpool.protocol.job import Failure, Job, check_encoded
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import MAX_ANSWER, GenerateQuery, HeadQuery, PositionsQuery, Query, TopQuery, TrieQuery
from lmpool.protocol.row import width_of
from lmpool.settings import shown


def refusal(job: Job, query: Query | None, info: ModelInfo) -> Failure | None:
    """Why a worker that serves this cannot do a job, if so.

    Args:
        job: what is asked.
        query: what of it, read; None for the row.
        info: what the worker serves.
    """
    return _prompt_refusal(job, info) or _query_refusal(query, len(job.ids) // 4, info)


def _prompt_refusal(job: Job, info: ModelInfo) -> Failure | None:
    """Why a prompt cannot be served here, if so."""
    if job.fingerprint != info.fingerprint:
        text = f"the model {info.name!r} has changed: its fingerprint is {info.fingerprint}, not {job.fingerprint}"
        return Failure(ModelMismatch.__name__, text)
    if info.is_trie:
        return None
    try:
        check_encoded(job.ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
    except InvalidPrompt as error:
        return Failure(type(error).__name__, str(error))
    # Whether this worker has it is seen when the backend is to compute it.
    if job.adapter and not is_qualified(job.adapter):
        text = f"{shown(job.adapter)} names no adapter: a job calls one name@revision"
        return Failure(UnknownAdapter.__name__, text)
    return None


def _query_refusal(query: Query | None, length: int, info: ModelInfo) -> Failure | None:
    """Why a query cannot be answered here, if so."""
    if info.is_trie:
        if isinstance(query, TrieQuery):
            return None
        wanted = "a row" if query is None else "something else than values of a trie"
        return Failure(ProtocolError.__name__, f"a trie worker was asked for {wanted}")
    if isinstance(query, TopQuery) and query.k > info.vocab_size:
        text = f"the {query.k} largest entries of a row that has {info.vocab_size}"
        return Failure(ProtocolError.__name__, text)
    if isinstance(query, GenerateQuery) and length + query.most - 1 > info.max_prompt_tokens:
        text = f"{query.most} tokens after a prompt of {length}: at most {info.max_prompt_tokens} in all"
        return Failure(PromptTooLong.__name__, text)
    if isinstance(query, HeadQuery):
        return _head_refusal(query, info)
    return _positions_refusal(query, length, info) if isinstance(query, PositionsQuery) else None


def _head_refusal(query: HeadQuery, info: ModelInfo) -> Failure | None:
    """Why what is asked of the head cannot be told here, if so."""
    if not info.hidden:
        return Failure(SourceMissing.__name__, "this worker does not tell the model's head")
    rows = query.first + query.count
    is_whole = query.part != "weights" or (query.count > 0 and rows <= info.vocab_size)
    if not is_whole or query.count * width_of(info.hidden, info.dtype) > MAX_ANSWER:
        text = f"{query.count} rows of the head from {query.first} on: it has {info.vocab_size}, or these are too many"
        return Failure(ProtocolError.__name__, text)
    return None


def _positions_refusal(query: PositionsQuery, length: int, info: ModelInfo) -> Failure | None:
    """Why what is asked of the positions of a prompt of so many tokens cannot be answered here, if so."""
    span = query.span(length)
    most, largest = query.most_positions(info.vocab_size), max(query.top - 1, int(query.target_ids.max(initial=0)))
    if not info.positions:
        text = "this worker does not answer for several positions: ask for the rows of all prefixes"
        return Failure(SourceMissing.__name__, text)
    if query.values == "hidden" and (not info.hidden or query.size != width_of(info.hidden, info.dtype)):
        return Failure(SourceMissing.__name__, "this worker tells no hidden states of that size")
    if not span:
        text = f"positions from {query.start} on, of a prompt of {length} tokens"
    elif len(span) > most:
        text = f"{len(span)} positions in one job: at most {most} of what is wanted of them"
    elif largest >= info.vocab_size:
        text = f"entry {largest} of rows that have {info.vocab_size}"
    else:
        return None
    return Failure(ProtocolError.__name__, text)
