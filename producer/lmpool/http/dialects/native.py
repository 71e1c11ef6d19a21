"""lmpool's own routes, `/v1/rows` and `/v1/positions`, which return arrays as .npy, safetensors or Arrow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, MsgspecError, Struct
from msgspec.json import decode
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmpool.errors import SettingsError
from lmpool.http.arrays import NPY, TYPES, Arrays, Format, pack, read_npy
from lmpool.http.dialects.openai import TokenId, check_count, kind_of
from lmpool.http.limits import PiecewiseResponse, Turn, read_fields, turn_of
from lmpool.http.models import Target, Targets
from lmpool.http.scoring import TARGET_BYTES
from lmpool.protocol.query import Predictions
from lmpool.web.guard import Refused

_Id = Annotated[int, Meta(ge=-1, le=0xFFFFFFFF)]  # A token id, or -1 as padding.
_MAX_AXES = 2  # A .npy body has the ids of one text, or one text per row.


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both routes.

    `ids` are the token ids of one text, or one list for each of several texts; -1 pads the end of a text.
    """

    ids: list[_Id | list[_Id]]
    model: str = ""
    adapter: str = ""
    timeout: float | None = None
    format: Format | None = None


class RowsRequest(_Common, kw_only=True):
    """The fields of `/v1/rows`, as arguments of `Producer.batch_logprobs`."""

    targets: list[TokenId | list[TokenId]] | None = None
    mode: Literal["logprobs", "logits"] = "logprobs"
    temperature: float = 1.0
    keep_row: bool = False


class PositionsRequest(_Common, kw_only=True):
    """The fields of `/v1/positions`, as arguments of `Producer.positions`."""

    start: Annotated[int, Meta(ge=0)] = 0
    top: Annotated[int, Meta(ge=0)] = 0
    targets: list[_Id | list[_Id | list[_Id]]] | None = None  # Lists of lists of lists for several texts.
    next_token: bool = False
    logz: bool = False
    tail: bool = False
    full: bool = False
    temperature: float = 1.0


def routes(targets: Targets) -> list[Route]:
    """The routes `/v1/rows` and `/v1/positions`."""

    async def rows(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = _read(turn, RowsRequest)
        prompts, is_one = _texts(wanted.ids)

        async def compute(target: Target) -> Response:
            width = target.info.vocab_size if wanted.targets is None else _longest(wanted.targets)
            turn.hold(4 * len(prompts) * width)
            names = ("targets", "mode", "temperature", "keep_row")
            options: dict[str, Any] = {name: getattr(wanted, name) for name in names}
            found = await target.producer.batch_logprobs(prompts, **options, **target.options)
            return _respond({"rows": found[0] if is_one else found}, wanted.format or "npy")

        return await targets.answer(wanted.model, turn, compute, wanted.adapter)

    async def positions(request: Request) -> Response:
        turn = turn_of(request.scope)
        wanted = _read(turn, PositionsRequest)
        prompts, is_one = _texts(wanted.ids)

        async def compute(target: Target) -> Response:
            arrays = _joined(await _predict(target, wanted, prompts, is_one=is_one), is_one=is_one)
            return _respond(arrays, wanted.format or ("npy" if len(arrays) == 1 else "safetensors"))

        return await targets.answer(wanted.model, turn, compute, wanted.adapter)

    handlers = {"/v1/rows": rows, "/v1/positions": positions}
    return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]


def _read(turn: Turn, kind: Any) -> Any:
    """The fields of a request: a JSON body, or a .npy body of token ids with the other fields after the path."""
    if turn.body.startswith(NPY):
        # Decode the parameters as JSON where that is possible: "3", "true", "[1,2]"; a model's name is no JSON.
        given = {name: _value(text) for name, text in turn.query.items()}
        wanted = read_fields({**given, "ids": []}, kind)
        wanted.ids = read_npy(turn.body)
    else:
        wanted = read_fields(turn.body, kind)
    turn.limit_time(wanted.timeout)
    wanted.format = wanted.format or _accepted(turn)
    return wanted


def _value(text: str) -> Any:
    try:
        return decode(text)
    except (MsgspecError, RecursionError):
        return text


def _accepted(turn: Turn) -> Format | None:
    """The format that the header Accept names, or None."""
    return next((name for name, kind in TYPES.items() if kind in turn.headers.get("accept", "")), None)


def _texts(ids: Any) -> tuple[list[Any], bool]:
    """The texts of a request, and whether the request has one text without a list around it."""
    if isinstance(ids, np.ndarray):
        if not 1 <= ids.ndim <= _MAX_AXES:
            raise Refused(400, f"ids: an array with shape {ids.shape}: expected (n,) or (m, n)")
        is_one = ids.ndim == 1
    else:
        is_one = kind_of("ids", ids) is not list
    # An array of many empty texts is small, so count the texts before each becomes an object.
    check_count(1 if is_one else len(ids), 1)
    return [_unpadded(text) for text in ([ids] if is_one else ids)], is_one


def _longest(targets: list[Any]) -> int:
    """The number of ids in the longest list of ids in nested lists."""
    return max((_longest(each) for each in targets if isinstance(each, list)), default=len(targets))


def _unpadded(text: Any) -> Any:
    """A text without the -1 at its end."""
    end = len(text)
    while end and text[end - 1] == -1:
        end -= 1
    return text[:end]


async def _predict(target: Target, wanted: PositionsRequest, texts: list[Any], *, is_one: bool) -> list[Predictions]:
    """The predictions for each text."""
    count = sum(max(0, len(text) - wanted.start) for text in texts)
    width = target.info.vocab_size if wanted.full else 0
    # Lists of different lengths become one array.
    target.turn.hold(TARGET_BYTES * count * _longest(wanted.targets or []))
    target.turn.hold(4 * count * (width + 3 * wanted.top + 8))
    options: dict[str, Any] = {
        name: value for name in ("top", "next_token", "logz", "tail", "full") if (value := getattr(wanted, name))
    }
    if wanted.targets is not None:
        if kind_of("targets", wanted.targets) is list:
            inner = {kind_of("targets", each) for each in wanted.targets if isinstance(each, list)}
            if is_one and list in inner:
                raise Refused(400, "targets: lists of lists of lists are for several texts; the request has one text")
        options["targets"] = [wanted.targets] if is_one else wanted.targets
    options["temperature"] = wanted.temperature
    return await target.producer.batch_positions(texts, wanted.start, **options, **target.options)


def _joined(found: list[Predictions], *, is_one: bool) -> Arrays:
    """The arrays of a response: text after text, and `lengths` with the positions of each text, for several texts."""
    each: list[dict[str, NDArray[Any]]] = []
    for one in found:
        arrays: dict[str, NDArray[Any]] = {} if one.top is None else {"top": one.top.values, "top_ids": one.top.ids}
        for name in ("targets", "next_token", "logz", "tail", "full"):
            if (value := getattr(one, name)) is not None:
                arrays[name] = value
        each.append(arrays)
    if is_one:
        return each[0]
    widths = {arrays["targets"].shape[1] for arrays in each if "targets" in arrays}
    if len(widths) > 1:
        raise SettingsError(f"targets: lists of {sorted(widths)} ids; pad them with -1 to the same number")
    joined = {name: np.concatenate([arrays[name] for arrays in each]) for name in each[0]}
    return {**joined, "lengths": np.array(list(map(len, found)), np.int64)}


def _respond(arrays: Arrays, form: Format) -> Response:
    return PiecewiseResponse(pack(arrays, form), TYPES[form])
