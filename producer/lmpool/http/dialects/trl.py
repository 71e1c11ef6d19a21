"""TRL's `/get_sequence_logprobs/`: the log-probabilities of the completions of given texts.

TRL up to release 1.8 uses this route of its own server; later releases use `/v1/completions` with `prompt_logprobs`.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmpool.aio import gather
from lmpool.http.dialects.openai import check_count
from lmpool.http.limits import json_response, read_fields, turn_of
from lmpool.http.models import Target, Targets
from lmpool.http.scoring import ENTRY_BYTES, by_size
from lmpool.protocol.job import encode_prompt
from lmpool.web.guard import Refused

PATH = "/get_sequence_logprobs/"

_PADDED_BYTES = 20  # Bytes of an entry of the padded arrays, 8 bytes, and of its base64.


class SequenceLogprobsRequest(Struct, forbid_unknown_fields=True):
    """The fields of a request, with TRL's defaults; `model` is lmpool's own."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    top_logprobs: Annotated[int, Meta(ge=1)] = 100
    temperature: float = 1.0
    response_format: Literal["json", "binary"] = "json"
    model: str = ""


class _Scored(Struct):
    """One completion of n tokens: the most likely tokens, (n, k), and the tokens that follow, (n,)."""

    values: NDArray[np.float32]
    ids: NDArray[np.int64]
    actual_values: NDArray[np.float32]
    actual_ids: NDArray[np.int64]


def routes(targets: Targets) -> list[Route]:
    """The route `/get_sequence_logprobs/`."""

    async def handle(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = read_fields(turn.body, SequenceLogprobsRequest)
        check_count(len(wanted.sequences), 1)
        if (lengths := len(wanted.prompt_lengths)) != (count := len(wanted.sequences)):
            raise Refused(400, f"prompt_lengths: {lengths} lengths for {count} sequences; give one for each")
        pairs = list(zip(wanted.sequences, wanted.prompt_lengths, strict=True))
        for at, (ids, length) in enumerate(pairs):
            if not 0 <= length <= len(ids):
                limit = f"{len(ids)}, the sequence's length"
                raise Refused(400, f"prompt_lengths[{at}]: {length} must be from 0 to {limit}")
        sizes = [len(ids) - length for ids, length in pairs]

        async def score(target: Target) -> Response:
            if wanted.top_logprobs > (most := target.info.vocab_size):
                raise Refused(400, f"top_logprobs: {wanted.top_logprobs} is more than the {most} tokens of the model")
            entries, make = sum(sizes) * wanted.top_logprobs, _lists
            turn.hold(entries * ENTRY_BYTES)
            if wanted.response_format == "binary":
                entries, make = count * max(sizes) * wanted.top_logprobs, _binary
                turn.hold(entries * _PADDED_BYTES)
            scored = await gather([_score(target, wanted, *pair) for pair in pairs])
            return json_response(await by_size(entries, make, scored))

        return await targets.answer(wanted.model, turn, score)

    return [Route(PATH, handle, methods=["POST"])]


async def _score(target: Target, wanted: SequenceLogprobsRequest, ids: list[int], length: int) -> _Scored:
    encode_prompt(ids, vocab_size=target.info.vocab_size, max_tokens=target.info.max_prompt_tokens)
    n, k = len(ids) - length, wanted.top_logprobs
    # The first token of a text has no log-probability; TRL's server leaves its place empty.
    empty = _Scored(
        np.full((n, k), -np.inf, np.float32),
        np.zeros((n, k), np.int64),
        np.full(n, -np.inf, np.float32),
        np.array(ids[length:], np.int64),
    )
    first = max(1, length)
    if first >= len(ids):
        return empty
    options = {} if wanted.temperature == 1 else {"temperature": wanted.temperature}
    found = await target.predict(ids, first - 1, top=k, next_token=True, **options)
    assert found.top is not None
    assert found.next_token is not None
    empty.values[first - length :], empty.ids[first - length :] = found.top.values[:-1], found.top.ids[:-1]
    empty.actual_values[first - length :] = found.next_token[:-1]
    return empty


def _binary(scored: list[_Scored]) -> dict[str, Any]:
    """The response with arrays in base64: float32 and int32, (batch, longest completion, k), padded at the end."""
    lengths = [len(each.ids) for each in scored]

    def packed(name: str, fill: float, dtype: str) -> str:
        arrays = [getattr(each, name) for each in scored]
        whole = np.full((len(scored), max(lengths), *arrays[0].shape[1:]), fill, dtype)
        for place, array in zip(whole, arrays, strict=True):
            place[: len(array)] = array
        return base64.b64encode(whole.tobytes()).decode("ascii")

    return {
        "logprobs_b64": packed("values", -np.inf, "<f4"),
        "token_ids_b64": packed("ids", 0, "<i4"),
        "actual_logprobs_b64": packed("actual_values", -np.inf, "<f4"),
        "actual_token_ids_b64": packed("actual_ids", 0, "<i4"),
        "shape": [len(scored), max(lengths), scored[0].ids.shape[1]],
        "completion_lengths": lengths,
    }


def _lists(scored: list[_Scored]) -> dict[str, Any]:
    """The response with lists; an empty list for the first token of a text."""
    logprobs, token_ids = [], []
    for each in scored:
        is_known = np.isfinite(each.values[:, 0]).tolist()
        logprobs.append([row if known else [] for row, known in zip(each.values.tolist(), is_known, strict=True)])
        token_ids.append([row if known else [] for row, known in zip(each.ids.tolist(), is_known, strict=True)])
    return {"logprobs": logprobs, "logprob_token_ids": token_ids}
