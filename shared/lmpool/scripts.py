"""The Lua scripts of `lua/`: what must happen in Redis at once."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from lmpool.link import Argument

Call = Callable[..., Awaitable[Any]]
"""Runs one command: `call` of a line."""

_FOLDER = Path(__file__).with_name("lua")


class Script:
    """One script, sent whole only when the server does not know it yet.

    Args:
        name: its file in `lua/`.
        begins_with: a file there that its text begins with, or "".
    """

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str, begins_with: str = "") -> None:
        self.name = name
        self.source = "".join((_FOLDER / f"{part}.lua").read_text("utf-8") for part in (begins_with, name) if part)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def on(self, call: Call, keys: Sequence[bytes], args: Sequence[Argument]) -> Any:
        """Run the script on the path of a request.

        Raises:
            ServerError: the server cannot be used.
        """
        try:
            return await call(b"EVALSHA", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await call(b"EVAL", self.source, len(keys), *keys, *args)

    async def __call__(self, redis: Redis, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """Run the script off that path; returns what it returns."""
        try:
            return await redis.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await redis.eval(self.source, len(keys), *keys, *args)


_QUEUE = "queue"

SUBMIT = Script("submit", _QUEUE)
CANCEL = Script("cancel", _QUEUE)
FINISH = Script("finish", _QUEUE)
REFILL = Script("refill", _QUEUE)
UNWANTED = Script("unwanted", _QUEUE)
CLAIM = Script("claim")
BEAT = Script("beat")
RENEW = Script("renew")
RELEASE = Script("release")
RETRY = Script("retry", _QUEUE)
SWEEP = Script("sweep", _QUEUE)
SWAP = Script("swap")
ENTRIES = Script("entries")
OFFER = Script("offer")
ADOPT = Script("adopt")
REMOVE = Script("remove")
RESTORE = Script("restore")
FIELDS = Script("fields")
SURVEY = Script("survey", _QUEUE)

MOST_AT_ONCE = 500
"""Prompts in one call of a script: Lua's stack and other clients' patience are limited."""
