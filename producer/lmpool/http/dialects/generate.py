"""vLLM's `/inference/v1/generate`: token ids in, token ids out, with log-probabilities of the prompt."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmpool.aio import gather
from lmpool.http.arrays import npy
from lmpool.http.dialects import openai
from lmpool.http.generation import Choice, TextSampling, generate, pieces
from lmpool.http.limits import MAX_PROMPTS, json_response, read_fields, turn_of
from lmpool.http.models import Target, Targets
from lmpool.http.scoring import TARGET_BYTES, Ranked, by_size
from lmpool.web.guard import Refused

PATH = "/inference/v1/generate"

_NEUTRAL: dict[str, Any] = {
    "token_offsets": (), "features": (), "content_parts": ([],), "reasoning_parser_kwargs": (),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},),
}  # fmt: skip
_IGNORED = (*openai.IGNORED, "reasoning_ended")
_IGNORED_PARAMS = ("output_kind", "stream_interval", "skip_clone", "flat_logprobs", "detokenize",
                   "skip_reading_prefix_cache", "routed_experts_prompt_start")  # fmt: skip
_NEUTRAL_PARAMS: dict[str, Any] = openai.NEUTRAL | {"extra_args": ({},), "trace_decode_token_ids": ()}


class TokensSampling(Struct, forbid_unknown_fields=True):
    """The fields of `sampling_params` that are served."""

    n: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: openai.Count | None = None
    logprobs: openai.Top | None = None
    prompt_logprobs: openai.Top | None = None
    prompt_logprob_token_ids: list[list[Annotated[int, Meta(ge=-1, le=0xFFFFFFFF)]]] | None = None
    prompt_logprob_start: openai.Count | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class TokensRequest(Struct, forbid_unknown_fields=True):
    """The fields of a request that are served."""

    token_ids: list[openai.TokenId]
    sampling_params: dict[str, Any]
    model: str = ""
    request_id: str = ""
    stream: bool = False
    stream_options: openai.StreamOptions = openai.StreamOptions()
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool = False


def routes(targets: Targets) -> list[Route]:
    """The route `/inference/v1/generate`."""

    async def handle(request: Request) -> Response:
        turn = turn_of(request.scope)
        ignored = tuple(name for name in _IGNORED if name != "request_id")
        wanted = read_fields(turn.body, TokensRequest, ignored, _NEUTRAL)
        params = read_fields(wanted.sampling_params, TokensSampling, _IGNORED_PARAMS, _NEUTRAL_PARAMS)
        openai.check_count(1, params.n)
        wanted.request_id = f"generate-tokens-{wanted.request_id or secrets.token_hex(16)}"
        async with targets.use(wanted.model, turn) as target:
            how = await _sampling(target, wanted, params)
            how.check(target, wanted.token_ids)

        async def complete(target: Target) -> Response:
            return json_response(await _complete(target, wanted, params, how))

        if not wanted.stream:
            return await targets.answer(wanted.model, turn, complete)
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            raise Refused(400, "prompt_logprobs, prompt_logprob_token_ids: not available with stream=true")

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with (
                targets.use(wanted.model, turn) as target,
                aclosing(_stream(target, wanted, params, how)) as all_,
            ):
                async for chunk in all_:
                    yield openai.event(chunk)

        return openai.stream(PATH, chunks())

    return [Route(PATH, handle, methods=["POST"])]


async def _sampling(target: Target, wanted: TokensRequest, params: TokensSampling) -> TextSampling:
    # Without max_tokens, a continuation may be as long as the model allows.
    room = max(1, target.info.max_prompt_tokens - len(wanted.token_ids) + 1)
    most = room if params.max_tokens is None else params.max_tokens
    return await TextSampling.of(target, params, most, params.seed, keep_stop=params.include_stop_str_in_output)


async def _complete(target: Target, wanted: TokensRequest, params: TokensSampling, how: TextSampling) -> dict[str, Any]:
    ids = wanted.token_ids
    answer: dict[str, Any] = {
        "request_id": wanted.request_id,
        "model": target.name,
        "created": int(time.time()),
        "output_mode": wanted.output_mode,
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": ids if wanted.return_token_ids else None,
    }
    if params.prompt_logprobs is not None:
        table = await openai.ranked(target, ids, 0, openai.limit_top(target, params.prompt_logprobs))
        answer["prompt_logprobs"] = await openai.encode_table(table, target.texts)
    if params.prompt_logprob_token_ids is not None:
        answer["prompt_token_id_logprobs"] = await _named_logprobs(target, ids, params)
    done = await gather([generate(target, ids, how, number) for number in range(params.n)])
    choices = [_choice(target, wanted, params, ids, number, each) for number, each in enumerate(done)]
    answer["choices"] = await gather(choices)
    answer["usage"] = openai.usage(len(ids), sum(len(each.ids) for each in done))
    return answer


async def _named_logprobs(target: Target, ids: list[int], params: TokensSampling) -> str:
    """`prompt_token_id_logprobs`: a .npy file in base64, float32 (rows, ids), −∞ for the ids −1."""
    rows, start = params.prompt_logprob_token_ids or [], params.prompt_logprob_start or 0
    if not rows or not max(map(len, rows)):
        raise Refused(400, "prompt_logprob_token_ids: expected at least one list with at least one token id")
    if (most := len(ids) - 1 - start) < len(rows):
        raise Refused(
            400, f"prompt_logprob_token_ids: {len(rows)} lists; the prompt has {max(0, most)} places for them"
        )
    target.turn.hold(TARGET_BYTES * len(rows) * max(map(len, rows)))
    found = await target.predict(ids[: start + len(rows)], start, targets=rows)
    assert found.targets is not None
    return base64.b64encode(b"".join(npy(np.ascontiguousarray(found.targets)))).decode("ascii")


async def _choice(
    target: Target, wanted: TokensRequest, params: TokensSampling, prompt: list[int], number: int, done: Choice
) -> dict[str, Any]:
    """A choice, or a chunk of a choice. `prompt` includes the tokens of earlier chunks."""
    answer: dict[str, Any] = {
        "index": number,
        "logprobs": None,
        "finish_reason": done.reason,
        "stop_reason": done.matched,
        "token_ids": done.ids,
    }
    if wanted.output_mode == "text":
        answer["text"] = done.text
    if params.logprobs is not None:
        table = await openai.choice_table(target, prompt, done, openai.limit_top(target, params.logprobs))
        most = None if params.logprobs < 0 else max(1, params.logprobs)
        answer["logprobs"] = {"content": await by_size(table.ids.size, _content, target, wanted, table, most)}
    return answer


def _content(target: Target, wanted: TokensRequest, table: Ranked, most: int | None) -> list[dict[str, Any]]:
    """The log-probabilities of new tokens, each with up to `most` candidates; the first is the token itself."""

    def entry(token: int, value: float, place: int) -> dict[str, Any]:
        if wanted.output_mode == "tokens":
            return {"token_id": token, "logprob": value, "rank": place or None}
        text = target.texts.token(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}

    content = []
    for row in zip(*(array.tolist() for array in table), strict=True):
        entries = [entry(token, value, place) for token, value, place, is_new in zip(*row, strict=True) if is_new]
        content.append({**entries[0], "top_logprobs": entries[:most]})
    return content


async def _stream(
    target: Target, wanted: TokensRequest, params: TokensSampling, how: TextSampling
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream."""
    head: dict[str, Any] = {"request_id": wanted.request_id, "output_mode": wanted.output_mode}
    if wanted.return_token_ids:
        head["prompt_token_ids"] = wanted.token_ids
    counts = [0] * params.n
    readers = [partial(_stream_choice, target, wanted, params, how, number) for number in range(params.n)]
    async with aclosing(openai.merged(readers)) as merging:
        async for number, choice in merging:
            counts[number] += len(choice["token_ids"])
            chunk = {**head, "choices": [choice]}
            if wanted.stream_options.continuous_usage_stats:
                chunk["usage"] = openai.usage(len(wanted.token_ids), counts[number])
            yield chunk
            head.pop("prompt_token_ids", None)
    if wanted.stream_options.include_usage:
        yield {**head, "choices": [], "usage": openai.usage(len(wanted.token_ids), sum(counts))}


async def _stream_choice(
    target: Target, wanted: TokensRequest, params: TokensSampling, how: TextSampling, number: int
) -> AsyncGenerator[dict[str, Any], None]:
    before = wanted.token_ids
    async with aclosing(pieces(target, before, how, number)) as continuing:
        async for piece in continuing:
            yield await _choice(target, wanted, params, before, number, Choice(*piece))
            before = before + piece.ids
