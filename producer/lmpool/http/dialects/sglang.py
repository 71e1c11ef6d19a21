"""SGLang's `/generate`: log-probabilities of prompts and continuations, each with its token id and text."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmpool.aio import gather
from lmpool.http.dialects.openai import Count, TokenId, check_count, event, kind_of, merged, stream
from lmpool.http.generation import Choice, TextSampling, generate, pieces
from lmpool.http.limits import MAX_PROMPTS, json_response, read_fields, turn_of
from lmpool.http.models import Target, Targets
from lmpool.http.scoring import ENTRY_BYTES, by_size
from lmpool.protocol.query import Predictions
from lmpool.web.guard import Refused

PATH = "/generate"

IGNORED = ("session_id", "log_metrics", "priority", "extra_key", "no_logs", "custom_labels", "conversation_id",
           "routing_key", "background", "cache_salt", "require_reasoning", "modalities", "external_trace_header",
           "return_sampling_mask", "kv_hints", "data_parallel_rank", "routed_dp_rank", "bootstrap_host",
           "bootstrap_port", "bootstrap_room", "return_bytes", "return_entropy")  # fmt: skip
"""Fields that change no log-probability of a pool."""

_NEUTRAL: dict[str, Any] = {
    "input_embeds": (), "image_data": ([],), "video_data": ([],), "audio_data": ([],), "session_params": (),
    "custom_logit_processor": (), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_flat_raw_output_top_logprobs": (False,), "watermark": (), "max_thinking_tokens": (),
}  # fmt: skip
_IGNORED_PARAMS = ("stream_interval", "custom_params")
_NEUTRAL_PARAMS: dict[str, Any] = {
    "top_k": (-1, 1 << 30), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,), "watermark": (),
    "repetition_penalty": (1,), "min_new_tokens": (0,), "beam_width": (1,), "json_schema": (), "regex": (), "ebnf": (),
    "structural_tag": (), "stop_regex": ([], ""), "logit_bias": ({},), "spaces_between_special_tokens": (True,),
}  # fmt: skip


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """The fields of a request that are served. In a batch, most fields are one value for all texts, or a list."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: Count | list[Count] = 0
    token_ids_logprob: list[TokenId | list[TokenId]] | None = None
    return_text_in_logprobs: bool = False
    return_flat_raw_top_logprobs: bool = False
    return_flat_raw_top_logprobs_b64: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    lora_path: str | list[str | None] | None = None
    model: str = ""


class SamplingParams(Struct, forbid_unknown_fields=True):
    """The fields of `sampling_params` that are served, with SGLang's defaults."""

    max_new_tokens: Count = 128
    temperature: float = 1.0
    top_p: float = 1.0
    n: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """One result of a response: the continuation with this number, of a text with its own values of the fields."""

    number: int
    ids: list[int]
    rid: str
    params: SamplingParams
    has_logprobs: bool
    start: int  # First token of the prompt whose log-probability is wanted; len(ids) for none.
    top: int
    named: list[int] | None
    adapter: str


def routes(targets: Targets) -> list[Route]:
    """The route `/generate`, and the facts about the model that SGLang's client reads first."""

    async def handle(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = read_fields(turn.body, GenerateRequest, IGNORED, _NEUTRAL)
        async with targets.use(wanted.model, turn) as target:
            jobs, is_batch = await _jobs(target, wanted)
            hows = [await _sampling(target, job) for job in jobs]
            for job, how in zip(jobs, hows, strict=True):
                how.check(target, job.ids)

        async def complete(target: Target) -> Response:
            answers = await gather([_complete(*pair, target, wanted) for pair in zip(jobs, hows, strict=True)])
            return json_response(answers if is_batch else answers[0])

        if not wanted.stream:
            return await targets.answer(wanted.model, turn, complete)

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with targets.use(wanted.model, turn) as target:
                readers = [partial(_stream, *pair, target, wanted) for pair in zip(jobs, hows, strict=True)]
                async with aclosing(merged(readers)) as merging:
                    async for number, answer in merging:
                        yield event({**answer, "index": number} if is_batch else answer)

        return stream(PATH, chunks())

    async def model_info(request: Request) -> Response:
        async with targets.use("", turn_of(request.scope)) as target:
            info = target.info
            return json_response({
                "model_path": info.source or info.name, "served_model_name": info.base, "tokenizer_path": info.source,
                "is_generation": True, "weight_version": info.revision,
            })  # fmt: skip

    paths = "/model_info", "/get_model_info"
    return [Route(PATH, handle, methods=["POST"]), *(Route(path, model_info) for path in paths)]


async def _jobs(target: Target, wanted: GenerateRequest) -> tuple[list[_Job], bool]:
    """The results that a request asks for, and whether it asks for a list of results."""
    given: Any = wanted.text if wanted.input_ids is None else wanted.input_ids
    if given is None or (wanted.text is not None and wanted.input_ids is not None):
        raise Refused(400, "give either text or input_ids")
    is_one = isinstance(given, str) or kind_of("input_ids", given) is int
    texts: list[Any] = [given] if is_one else given
    check_count(len(texts), 1)

    def one(name: str, at: int, value: Any) -> Any:
        """The value of a field for text `at`."""
        if not isinstance(value, list):
            return value
        if is_one:
            raise Refused(400, f"{name}: a list of values is for a list of texts; the request has one text")
        if len(value) != len(texts):
            raise Refused(400, f"{name}: {len(value)} values for {len(texts)} texts; give one for each, or one for all")
        return value[at]

    jobs: list[_Job] = []
    for at, text in enumerate(texts):
        ids = await target.texts.encode(text, target.turn.deadline) if isinstance(text, str) else text
        fields = one("sampling_params", at, wanted.sampling_params)
        params = read_fields(fields, SamplingParams, _IGNORED_PARAMS, _NEUTRAL_PARAMS)
        check_count(len(texts), params.n)
        named: Any = wanted.token_ids_logprob
        if named and kind_of("token_ids_logprob", named) is list:
            named = one("token_ids_logprob", at, named)
        start, rid = one("logprob_start_len", at, wanted.logprob_start_len), one("rid", at, wanted.rid)
        if start > len(ids):
            raise Refused(400, f"logprob_start_len: {start} is more than the {len(ids)} tokens of the prompt")
        jobs += [
            _Job(
                number, ids, rid or secrets.token_hex(16), params, one("return_logprob", at, wanted.return_logprob),
                len(ids) if start < 0 else start, one("top_logprobs_num", at, wanted.top_logprobs_num), named,
                one("lora_path", at, wanted.lora_path) or target.adapter,
            )
            for number in range(params.n)
        ]  # fmt: skip
    return jobs, not is_one or len(jobs) > 1


async def _sampling(target: Target, job: _Job) -> TextSampling:
    params = job.params
    keep_stop = params.no_stop_trim
    return await TextSampling.of(target, params, params.max_new_tokens, params.sampling_seed, keep_stop=keep_stop)


async def _complete(job: _Job, how: TextSampling, target: Target, wanted: GenerateRequest) -> dict[str, Any]:
    target = replace(target, adapter=job.adapter)
    done = await generate(target, job.ids, how, job.number)
    return _answer(job, done, await _logprobs(job, done, target, wanted), target, wanted)


async def _stream(
    job: _Job, how: TextSampling, target: Target, wanted: GenerateRequest
) -> AsyncGenerator[dict[str, Any], None]:
    """The results of a stream: each has the whole text so far, as SGLang sends it."""
    target, done = replace(target, adapter=job.adapter), Choice()
    logprobs: dict[str, Any] = {}
    async with aclosing(pieces(target, job.ids, how, job.number)) as continuing:
        async for piece in continuing:
            # Only the first piece has the prompt's log-probabilities; a later one continues the prompt and its tokens.
            before = job.ids + done.ids
            at = replace(job, ids=before, start=len(before)) if logprobs else job
            new = await _logprobs(at, Choice(*piece), target, wanted)
            outputs = {name: logprobs[name] + new[name] for name in logprobs if name.startswith("output_")}
            logprobs = logprobs | outputs if logprobs else new
            done.add(piece)
            yield _answer(job, done, logprobs, target, wanted)


def _answer(
    job: _Job, done: Choice, logprobs: dict[str, Any], target: Target, wanted: GenerateRequest
) -> dict[str, Any]:
    reason: dict[str, Any] | None = None
    if done.reason == "length":
        reason = {"type": "length", "length": job.params.max_new_tokens}
    elif done.reason == "stop":
        reason = {"type": "stop", "matched": done.ids[-1] if done.matched is None else done.matched}
    info: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": reason,
        "prompt_tokens": len(job.ids),
        "completion_tokens": len(done.ids),
        "cached_tokens": 0,
        "weight_version": target.info.revision,
        **logprobs,
    }
    answer = {"text": done.text, "output_ids": list(done.ids), "meta_info": info}
    return {**answer, "prompt_token_ids": job.ids} if wanted.return_prompt_token_ids else answer


async def _logprobs(job: _Job, done: Choice, target: Target, wanted: GenerateRequest) -> dict[str, Any]:
    """The log-probabilities of the prompt from `job.start` on, and of the new tokens; {} if none are wanted."""
    if not job.has_logprobs:
        return {}
    # Position i predicts token i + 1. The last new token predicts nothing that is wanted, and may be one token after
    # the longest prompt. The first token of the input has no log-probability in SGLang's format.
    ids, start = job.ids + done.ids[:-1], min(job.start, len(job.ids) - 1)
    has_input = len(job.ids) - 1 > job.start
    entries = (len(ids) - start) * (job.top + len(job.named or ()) + 1)
    target.turn.hold(entries * ENTRY_BYTES)
    found = Predictions(start)
    if has_input or ((job.top or job.named) and done.ids):
        options: dict[str, Any] = {"top": job.top} if job.top else {}
        if job.named:
            options["targets"] = job.named
        found = await target.predict(ids, start, next_token=True, **options)
    return await by_size(entries, _listed, job, done, found, target, wanted)


def _listed(job: _Job, done: Choice, found: Predictions, target: Target, wanted: GenerateRequest) -> dict[str, Any]:
    """The fields of log-probabilities, from the predictions from `job.start`, or the prompt's last token, on."""
    texts = target.texts if wanted.return_text_in_logprobs else None

    def listed(values: Any, ids: Any) -> list[tuple[float | None, int, str | None]]:
        return [
            (value, token, None if texts is None else texts.token(token))
            for value, token in zip(values, ids, strict=True)
        ]

    def rows(values: NDArray[np.float32], ids: NDArray[np.int64]) -> list[Any]:
        return [listed(*row) for row in zip(values.tolist(), ids.tolist(), strict=True)]

    n_input = max(0, len(job.ids) - 1 - job.start)  # Also the place in `found` of the first new token.
    end, lead = n_input + len(done.ids), [None] * (job.start < len(job.ids))
    own = [] if found.next_token is None else found.next_token[:n_input].tolist()
    info: dict[str, Any] = {
        "input_token_logprobs": listed([*lead, *own], job.ids[job.start :]),
        "output_token_logprobs": listed(done.logprobs, done.ids),
        "output_token_logprobs_length": len(done.ids),
    }
    if job.top:
        values, top_ids = found.top or (np.empty((0, job.top), np.float32), np.empty((0, job.top), np.int64))
        if wanted.return_flat_raw_top_logprobs:
            info |= _flat(values[:n_input], top_ids[:n_input], len(lead), wanted.return_flat_raw_top_logprobs_b64)
        else:
            info["input_top_logprobs"] = [*lead, *rows(values[:n_input], top_ids[:n_input])]
        info["output_top_logprobs"] = rows(values[n_input:end], top_ids[n_input:end])
    if job.named is not None:
        named_values = np.empty((0, len(job.named)), np.float32) if found.targets is None else found.targets
        named_ids = np.broadcast_to(np.array(job.named, np.int64), named_values.shape)
        info["input_token_ids_logprobs"] = [*lead, *rows(named_values[:n_input], named_ids[:n_input])]
        info["output_token_ids_logprobs"] = rows(named_values[n_input:end], named_ids[n_input:end])
    return info


def _flat(values: NDArray[np.float32], ids: NDArray[np.int64], null_prefix: int, is_base64: bool) -> dict[str, Any]:
    """SGLang's flat form of `input_top_logprobs`: arrays (n, k) in place of a list per token."""
    flat: dict[str, Any] = {
        "input_top_logprobs_shape": list(values.shape),
        "input_top_logprobs_null_prefix": null_prefix,
    }
    for name, array, dtype in (("val", values, "float32"), ("idx", ids, "int32")):
        if is_base64:
            data = array.astype(f"<{dtype[0]}4").tobytes()
            flat[f"input_top_logprobs_{name}_flat_b64"] = base64.b64encode(data).decode("ascii")
            flat[f"input_top_logprobs_{name}_flat_b64_dtype"] = dtype
        else:
            flat[f"input_top_logprobs_{name}_flat"] = array.reshape(-1).tolist()
    return flat
