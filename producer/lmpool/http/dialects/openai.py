"""OpenAI's completions with vLLM's fields, and the models, tokens and health of vLLM's server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lmpool.aio import end_tasks, gather
from lmpool.errors import LMPoolError
from lmpool.http.errors import describe
from lmpool.http.generation import Choice, TextSampling, generate, pieces
from lmpool.http.limits import MAX_PROMPTS, Turn, json_response, read_fields, turn_of
from lmpool.http.models import Target, Targets, TokenTexts, placeholder
from lmpool.http.scoring import ENTRY_BYTES, Ranked, by_size, prompt_logprobs_json, rank
from lmpool.protocol.picks import TopK
from lmpool.protocol.query import Continuation, Predictions
from lmpool.web.guard import Refused

_log = logging.getLogger("lmpool")

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
"""A token id of some vocabulary; the model's V is checked later."""
Top = Annotated[int, Meta(ge=-1)]
"""A number of most likely tokens; -1 for all tokens."""

NEUTRAL: dict[str, Any] = {
    "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "length_penalty": (1,), "min_tokens": (0,), "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": ([],),
    "logprob_token_ids": ([],), "structured_outputs": (), "repetition_detection": (), "thinking_token_budget": (-1,),
    "watermarking": (False,), "spaces_between_special_tokens": (True,),
}  # fmt: skip
"""vLLM's sampling parameters that are not served, and the values that have no effect."""

_NEUTRAL: dict[str, Any] = NEUTRAL | {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "response_format": ({"type": "text"},),
    "prompt_embeds": ([],), "truncate_prompt_tokens": (-1,), "truncation_side": ("left", "right"),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},),
}  # fmt: skip
IGNORED = ("user", "priority", "cache_salt", "session_id", "request_id", "stream_interval", "return_token_offsets",
           "mm_payload", "return_mm_kwargs", "routed_experts_prompt_start")  # fmt: skip
"""Fields that change no result of a pool."""


class StreamOptions(Struct, frozen=True):
    """Which chunks of a stream have the usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(Struct, forbid_unknown_fields=True):
    """The fields of `/v1/completions` that are served."""

    prompt: str | list[str | TokenId | list[TokenId]]  # A text, token ids, or a list of either.
    model: str = ""
    echo: bool = False
    logprobs: Top | None = None
    max_tokens: Count = 16
    n: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    prompt_logprobs: Top | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class _Completion:
    """One continuation of a request: the prompt, its text, and the number of the continuation."""

    number: int
    prompt: list[int]
    text: str


def routes(targets: Targets) -> list[Route]:
    """The routes `/v1/completions`, `/tokenize` and `/detokenize`."""

    async def completions(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = read_fields(turn.body, CompletionRequest, IGNORED, _NEUTRAL)
        if wanted.stream:
            return await _begin_stream(targets, turn, wanted)

        async def complete(target: Target) -> Response:
            return json_response(await _complete(target, wanted))

        return await targets.answer(wanted.model, turn, complete)

    async def tokenize(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = read_fields(turn.body, _TokenizeRequest, IGNORED)
        async with targets.use(wanted.model, turn) as target:
            texts = target.texts
            ids = await texts.encode(wanted.prompt, turn.deadline, add_special_tokens=wanted.add_special_tokens)
            tokens = list(map(texts.token, ids)) if wanted.return_token_strs else None
            most = target.info.max_prompt_tokens
            return json_response({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": tokens})

    async def detokenize(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = read_fields(turn.body, _DetokenizeRequest, IGNORED)
        async with targets.use(wanted.model, turn) as target:
            return json_response({"prompt": await target.producer.decode(wanted.tokens, timeout=turn.deadline.left)})

    handlers = {"/v1/completions": completions, "/tokenize": tokenize, "/detokenize": detokenize}
    return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]


class _TokenizeRequest(Struct, forbid_unknown_fields=True):
    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str = ""


def check_count(prompts: int, n: int) -> None:
    """Raise `Refused` if a request has too many continuations, or no prompt."""
    if not prompts:
        raise Refused(400, "the request has no prompt")
    if (count := prompts * n) > MAX_PROMPTS:
        raise Refused(400, f"the request has {count} continuations; the limit is {MAX_PROMPTS}: send several requests")


def kind_of(name: str, items: Sequence[Any]) -> type:
    """The type of the items of a list, `NoneType` for an empty list; raises `Refused` for items of several types."""
    kinds = set(map(type, items)) or {type(None)}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise Refused(400, f"{name}: a list has items of the types {names}; give items of one type")
    return kinds.pop()


async def _completions(target: Target, wanted: CompletionRequest) -> list[_Completion]:
    """The continuations of a request, those of the first prompt first."""
    given: Any = wanted.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or kind_of("prompt", given) is int else given
    check_count(len(prompts), wanted.n)
    texts, deadline = target.texts, target.turn.deadline
    jobs: list[_Completion] = []
    for prompt in prompts:
        ids, text = prompt, ""
        if isinstance(prompt, str):
            ids = await texts.encode(prompt, deadline, add_special_tokens=wanted.add_special_tokens)
            text = prompt
        elif wanted.echo:
            text = texts.decode(prompt)
        jobs += [_Completion(len(jobs) + number, ids, text) for number in range(wanted.n)]
    return jobs


async def _sampling(target: Target, wanted: CompletionRequest) -> TextSampling:
    keep_stop = wanted.include_stop_str_in_output
    return await TextSampling.of(target, wanted, wanted.max_tokens, wanted.seed, keep_stop=keep_stop)


def limit_top(target: Target, top: int | None) -> int:
    """The number of most likely tokens that a request asks for: -1 means all, None means none."""
    vocab_size = target.info.vocab_size
    if top is not None and top > vocab_size:
        raise Refused(400, f"logprobs: {top} is more than the {vocab_size} tokens of the model")
    return vocab_size if top == -1 else top or 0


def table_of(found: Predictions, follows: Sequence[int], top: int) -> Ranked:
    """The tokens that follow the first positions of a text, with the `top` most likely tokens in their places."""
    n = len(follows)
    assert found.next_token is not None
    best = TopK(found.top.values[:n, :top], found.top.ids[:n, :top]) if found.top is not None and top else None
    return rank(np.array(follows, np.int64), found.next_token[:n], best)


async def ranked(target: Target, ids: list[int], start: int, top: int) -> Ranked:
    """The tokens `ids[start + 1:]` with their log-probabilities and the most likely tokens in their places."""
    found = await _predict(target, ids, start, top)
    return table_of(found, ids[start + 1 :], top)


async def _predict(target: Target, ids: list[int], start: int, top: int, copies: int = 1) -> Predictions:
    """The predictions from a position on, which the response has in this many copies."""
    target.turn.hold(copies * (len(ids) - start) * (top + 1) * ENTRY_BYTES)
    return await target.predict(ids, start, next_token=True, **({"top": top} if top else {}))


async def _complete(target: Target, wanted: CompletionRequest) -> dict[str, Any]:
    jobs, how = await _completions(target, wanted), await _sampling(target, wanted)
    firsts = jobs[:: wanted.n]
    for job in firsts:
        how.check(target, job.prompt)
    # Request the positions of prompts first: afterwards, workers have the keys and values of the prompts.
    scored = await gather([_score_prompt(target, wanted, job.prompt, how) for job in firsts])
    choices = await gather([_choice(target, wanted, job, how, scored[job.number // wanted.n]) for job in jobs])
    return {
        **_head(target),
        "choices": [choice for choice, _ in choices],
        "usage": usage(sum(len(job.prompt) for job in firsts), sum(count for _, count in choices)),
    }


class _Scores(NamedTuple):
    """A prompt's log-probabilities, which all of its continuations share.

    Attributes:
        top: the most likely tokens at all positions, or None.
        echoed: the field `logprobs` of the prompt's tokens, or None.
        listed: the field `prompt_logprobs`, or None.
    """

    top: TopK | None = None
    echoed: dict[str, list[Any]] | None = None
    listed: Raw | None = None


async def _score_prompt(target: Target, wanted: CompletionRequest, prompt: list[int], how: TextSampling) -> _Scores:
    is_echoed = wanted.echo and wanted.logprobs is not None
    if wanted.prompt_logprobs is None and not is_echoed:
        return _Scores()
    listed_top = limit_top(target, wanted.prompt_logprobs)
    top = max(listed_top, limit_top(target, wanted.logprobs) if is_echoed else 0, int(how.is_one_greedy_token))
    found, listed = await _predict(target, prompt, 0, top, wanted.n), None
    echoed = await _echoed(target, wanted, prompt, found) if is_echoed else None
    if wanted.prompt_logprobs is not None:
        listed = await encode_table(table_of(found, prompt[1:], listed_top), target.texts)
    return _Scores(found.top, echoed, listed)


async def _choice(
    target: Target, wanted: CompletionRequest, job: _Completion, how: TextSampling, scored: _Scores
) -> tuple[dict[str, Any], int]:
    """One choice of a response, and the number of its new tokens."""
    known: Continuation | None = None
    if scored.top is not None and how.is_one_greedy_token:
        known = Continuation(scored.top.ids[-1, :1], scored.top.values[-1, :1])
    done = await generate(target, job.prompt, how, job.number, known)
    answer: dict[str, Any] = {
        "index": job.number,
        "text": (job.text if _has_prompt(wanted) else "") + done.text,
        "logprobs": None,
        "finish_reason": done.reason,
        "stop_reason": done.matched,
        "prompt_logprobs": scored.listed,
    }
    if wanted.logprobs is not None:
        found = _joined(scored.echoed, await _logprobs(target, wanted, job.prompt, done, scored.top))
        answer["logprobs"] = found | {"text_offset": offsets(found["tokens"])}
    if wanted.return_token_ids:
        answer |= {"prompt_token_ids": job.prompt, "token_ids": done.ids}
    return answer, len(done.ids)


def _has_prompt(wanted: CompletionRequest) -> bool:
    """Whether the text of a choice begins with the prompt, which vLLM leaves out if it returns the prompt's ids."""
    return wanted.echo and not wanted.return_token_ids


async def encode_table(table: Ranked, texts: TokenTexts) -> Raw:
    """The JSON of `prompt_logprobs_json`; of a large table in a thread, so that other requests go on."""
    return await by_size(table.ids.size, prompt_logprobs_json, table, texts)


async def choice_table(target: Target, prompt: list[int], done: Choice, top: int, best: TopK | None = None) -> Ranked:
    """The new tokens of a choice with the `top` most likely tokens in their places.

    `best` are the most likely tokens at all positions of the prompt, if they are known: the last ones are those of the
    first new token.
    """
    ids, values = np.array(done.ids, np.int64), np.array(done.logprobs, np.float32)
    if top == 0 or not done.ids:  # The continuation has all that is needed.
        return rank(ids, values, None)
    if best is not None and len(ids) == 1 and best.ids.shape[1] >= top:
        return rank(ids, values, TopK(best.values[-1:, :top], best.ids[-1:, :top]))
    # Leave out the last token, because a continuation may end one token after the longest prompt.
    target.turn.hold(len(ids) * (top + 1) * ENTRY_BYTES)
    found = await target.predict(prompt + done.ids[:-1], len(prompt) - 1, top=top)
    return rank(ids, values, found.top)


async def _logprobs(
    target: Target, wanted: CompletionRequest, prompt: list[int], done: Choice, best: TopK | None = None
) -> dict[str, list[Any]]:
    """The field `logprobs` of the new tokens, without `text_offset`; `best` is as for `choice_table`."""
    table = await choice_table(target, prompt, done, limit_top(target, wanted.logprobs), best)
    return await by_size(table.ids.size, table_logprobs, table, _namer(target, wanted))


async def _echoed(
    target: Target, wanted: CompletionRequest, prompt: list[int], scored: Predictions
) -> dict[str, list[Any]]:
    """The field `logprobs` of the prompt, without `text_offset`."""
    name = _namer(target, wanted)
    table = table_of(scored, prompt[1:], limit_top(target, wanted.logprobs))
    found = await by_size(table.ids.size, table_logprobs, table, name)
    # No token precedes the first one.
    first: dict[str, list[Any]] = {"tokens": [name(prompt[0])], "token_logprobs": [None], "top_logprobs": [None]}
    return _joined(first, found)


def _joined(before: dict[str, list[Any]] | None, new: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The field `logprobs` of new tokens, after that of earlier ones if there are any."""
    return new if before is None else {field: before[field] + new[field] for field in new}


def _namer(target: Target, wanted: CompletionRequest) -> Callable[[int], str]:
    return placeholder if wanted.return_tokens_as_token_ids else target.texts.token


def table_logprobs(table: Ranked, name: Callable[[int], str]) -> dict[str, list[Any]]:
    """The lists `tokens`, `token_logprobs` and `top_logprobs` of OpenAI's format; `name` gives the text of a token."""
    tops = []
    for ids, values, kept in zip(table.ids.tolist(), table.logprobs.tolist(), table.is_new.tolist(), strict=True):
        tops.append({name(i): value for i, value, is_new in zip(ids, values, kept, strict=True) if is_new})
    tokens = [name(token) for token in table.ids[:, 0].tolist()]
    return {"tokens": tokens, "token_logprobs": table.logprobs[:, 0].tolist(), "top_logprobs": tops}


def offsets(tokens: Iterable[str], start: int = 0) -> list[int]:
    """The places in the text at which tokens begin, counted from the texts of the tokens."""
    return list(accumulate(map(len, tokens), initial=start))[:-1]


def _head(target: Target) -> dict[str, Any]:
    """The fields that a response, or each chunk of a stream, begins with."""
    return {
        "id": f"cmpl-{secrets.token_hex(16)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": target.name,
    }


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """The field `usage`."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": prompt_tokens + new_tokens}


# Streams


async def _begin_stream(targets: Targets, turn: Turn, wanted: CompletionRequest) -> Response:
    """Check a request, and return its stream: errors before the first chunk are responses of their own."""
    if wanted.prompt_logprobs is not None:
        raise Refused(400, "prompt_logprobs: not available with stream=true")
    async with targets.use(wanted.model, turn) as target:
        jobs, how = await _completions(target, wanted), await _sampling(target, wanted)
        for job in jobs[:: wanted.n]:
            how.check(target, job.prompt)

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with targets.use(wanted.model, turn) as target:
            head, counts = _head(target), [0] * len(jobs)
            async with aclosing(merged([partial(_stream_choice, target, wanted, job, how) for job in jobs])) as merging:
                async for number, (answer, count) in merging:
                    counts[number] += count
                    chunk = {**head, "choices": [answer]}
                    if wanted.stream_options.continuous_usage_stats:
                        chunk["usage"] = usage(len(jobs[number].prompt), counts[number])
                    yield event(chunk)
            if wanted.stream_options.include_usage:
                total = usage(sum(len(job.prompt) for job in jobs[:: wanted.n]), sum(counts))
                yield event({**head, "choices": [], "usage": total})

    return stream("/v1/completions", chunks())


async def _stream_choice(
    target: Target, wanted: CompletionRequest, job: _Completion, how: TextSampling
) -> AsyncGenerator[tuple[dict[str, Any], int], None]:
    """The chunks of one choice, each with the number of its new tokens."""
    done, offset, is_first = Choice(), 0, True
    async with aclosing(pieces(target, job.prompt, how, job.number)) as continuing:
        async for piece in continuing:
            answer: dict[str, Any] = {
                "index": job.number,
                "text": (job.text if is_first and _has_prompt(wanted) else "") + piece.text,
                "logprobs": None,
                "finish_reason": piece.reason,
                "stop_reason": piece.matched,
            }
            if wanted.logprobs is not None:
                before, new = job.prompt + done.ids, Choice(piece.ids, piece.logprobs)
                found = await _logprobs(target, wanted, before, new)
                if wanted.echo and is_first:
                    scored = await _predict(target, job.prompt, 0, limit_top(target, wanted.logprobs))
                    found = _joined(await _echoed(target, wanted, job.prompt, scored), found)
                answer["logprobs"] = found | {"text_offset": offsets(found["tokens"], offset)}
                offset += sum(map(len, found["tokens"]))
            if wanted.return_token_ids:
                answer["token_ids"] = piece.ids
                if is_first:
                    answer["prompt_token_ids"] = job.prompt
            done.add(piece)
            is_first = False
            yield answer, len(piece.ids)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def stream(path: str, chunks: AsyncGenerator[bytes, None]) -> Response:
    """The response that sends the chunks of a stream, an error as the last chunk, and the mark of the end."""

    async def sent() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(chunks) as sending:
                async for chunk in sending:
                    yield chunk
        except Exception as error:  # noqa: BLE001  # The client gets the error as the last chunk.
            if not isinstance(error, LMPoolError):
                _log.exception("a stream of %s failed", path)
            yield event(describe(path, error))
        yield b"data: [DONE]\n\n"

    return StreamingResponse(sent(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def merged(streams: Sequence[Any]) -> AsyncGenerator[tuple[int, Any], None]:
    """Merge asynchronous iterators, made by functions, into one: the number of an iterator, and its next item."""
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(len(streams))

    async def read(number: int) -> None:
        failed: BaseException | None = None
        try:
            async with aclosing(streams[number]()) as items:
                async for item in items:
                    await queue.put((number, item, None))
        except Exception as error:  # noqa: BLE001  # The reader of the merged stream raises the exception.
            failed = error
        await queue.put((-1, None, failed))

    tasks = [asyncio.ensure_future(read(number)) for number in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            number, item, failed = await queue.get()
            if failed is not None:
                raise failed
            if number < 0:
                left -= 1
            else:
                yield number, item
    finally:
        await end_tasks(tasks)
