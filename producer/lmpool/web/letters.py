"""The routes of dead letters: listed, opened, queued again, dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.routing import Route

from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError
from lmpool.producer.cli.dead_letters import DeadLetters, contents, summary
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name
from lmpool.web.answers import Refused, answers, read_body

MAX_SHOWN = 50
_MAX_IDS = 256
_MAX_AT_ONCE = 500


class Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """Which letters of which model are to be changed."""

    model: str
    ids: list[str]


class LetterRoutes:
    """Shows the dead letters of a pool, and changes them where that is allowed.

    Args:
        server: the Redis server.
        keys: the deployment's key names.
        allow_changes: whether letters may be queued again and dropped.
    """

    def __init__(self, server: Server, keys: Keys, *, allow_changes: bool) -> None:
        self._server = server
        self._keys = keys
        self._allow_changes = allow_changes
        self.routes = [
            Route("/api/dead", answers(self._newest)),
            Route("/api/dead/show", answers(self._show)),
            Route("/api/dead/retry", answers(self._retry), methods=["POST"]),
            Route("/api/dead/drop", answers(self._drop), methods=["POST"]),
        ]

    @asynccontextmanager
    async def _letters(self, model: str) -> AsyncIterator[tuple[DeadLetters, Discovery]]:
        check_name("model", model)
        redis = self._server.client()
        try:
            yield DeadLetters(redis, self._keys.model(model)), Discovery(redis, self._keys)
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            await redis.aclose()

    async def _newest(self, request: Request) -> dict[str, Any]:
        async with self._letters(request.query_params.get("model", "")) as (letters, _):
            newest, count = await letters.newest(MAX_SHOWN), await letters.count()
        return {"count": count, "letters": [summary(letter) for letter in newest]}

    async def _show(self, request: Request) -> dict[str, Any]:
        asked = request.query_params
        async with self._letters(asked.get("model", "")) as (letters, _):
            (letter,) = await letters.find([asked.get("id", "")])
        return {**summary(letter), **contents(letter, most_ids=_MAX_IDS)}

    async def _retry(self, request: Request) -> dict[str, Any]:
        chosen = await self._chosen(request)
        outcome: dict[str, Any] = {"queued": 0, "refused": {}}
        async with self._letters(chosen.model) as (letters, discovery):
            info = await discovery.info(chosen.model)
            adapters = await letters.served_adapters(info)
            for letter in await letters.find(chosen.ids):
                try:
                    await letters.retry(letter, info, adapters)
                    outcome["queued"] += 1
                except LMPoolError as error:
                    outcome["refused"][letter.entry] = str(error)
        return outcome

    async def _drop(self, request: Request) -> dict[str, Any]:
        chosen = await self._chosen(request)
        async with self._letters(chosen.model) as (letters, _):
            return {"dropped": await letters.drop([letter.entry for letter in await letters.find(chosen.ids)])}

    async def _chosen(self, request: Request) -> Chosen:
        if not self._allow_changes:
            raise Refused(403, "this page only shows: start `lmpool web --allow-changes` to change dead letters")
        chosen = await read_body(request, Chosen)
        if not 1 <= len(chosen.ids) <= _MAX_AT_ONCE:
            raise SettingsError(f"ids: {len(chosen.ids)} of them: name 1 to {_MAX_AT_ONCE} letters")
        return chosen
