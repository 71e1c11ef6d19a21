"""The Lua scripts of `lua/`: what must happen in Redis at once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from lmpool.broker.connection import Argument
from lmpool.broker.replies import is_refusal

Call = Callable[..., Awaitable[Any]]
"""Runs one command: `call` of a connection."""

MAX_AT_ONCE = 200
"""Most prompts in one call of a script: while it runs, the server serves nobody else."""

# In folders by what they work on; names are unique all the same.
_FILES = {path.stem: path for path in Path(__file__).with_name("lua").glob("*/*.lua")}
_INCLUDE = re.compile("^-- include (\\w+)$", re.MULTILINE)


def _text(name: str, included: set[str]) -> str:
    """A file with the texts of the files that it includes, each where it is first named."""
    if name in included:
        return ""
    included.add(name)
    return _INCLUDE.sub(lambda match: _text(match[1], included), _read(name))


# Several scripts include the same files. All are read at once: a release that is installed later may have others.
@cache
def _read(name: str) -> str:
    return _FILES[name].read_text("utf-8")


class Script:
    """One script, sent whole only when the server does not know it yet.

    In its text, a line "-- include NAME" stands for the text of another file of `lua/`.

    Args:
        name: its file in `lua/`.
    """

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _text(name, set())
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
        """Run the script off that path; returns what it returns.

        Raises:
            NoPermissionError: the server's user may not do what the script does.
            RedisError, OSError: the server cannot be used.
        """
        try:
            try:
                return await redis.evalsha(self.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.eval(self.source, len(keys), *keys, *args)
        except ResponseError as error:
            # Servers report a refusal as any other error in a script.
            if is_refusal(error):
                raise NoPermissionError(str(error)) from error
            raise


SUBMIT = Script("submit")
CANCEL = Script("cancel")
FINISH = Script("finish")
REFILL = Script("refill")
DROP_UNWANTED = Script("drop_unwanted")
CLAIM_EXPIRED = Script("claim_expired")
HEARTBEAT = Script("heartbeat")
REGISTER = Script("register")
ALIVE = Script("alive")
ADD_DEADLINES = Script("add_deadlines")
RENEW = Script("renew")
RELEASE = Script("release")
RETRY = Script("retry")
REMOVE_GONE = Script("remove_gone")
SWAP = Script("swap")
ENTRIES = Script("entries")
CHANGE_ADAPTER = Script("change_adapter")
FIELDS = Script("fields")
SURVEY = Script("survey")
KEEP_QUEUE = Script("keep_queue")
EXPIRE_QUEUE = Script("expire_queue")
CLEAR = Script("clear")
STEAL = Script("steal")
CLOSE_LANE = Script("close_lane")
