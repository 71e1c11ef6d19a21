"""Dead letters: jobs that workers gave up, with the reason; read, queued again, or dropped.

What is in them was written by anybody who may write to the queue, so nothing here trusts it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis

from lmpool.broker import scripts
from lmpool.broker.adapter_registry import AdapterRegistry
from lmpool.errors import InvalidPrompt, LMPoolError, ProtocolError, SettingsError
from lmpool.printable import printable
from lmpool.protocol.adapter import name_of, revision_of
from lmpool.protocol.job import Failure, Job, unpack_failure, unpack_job
from lmpool.protocol.keys import JOB_FIELD, ModelKeys
from lmpool.protocol.model_info import ModelCard
from lmpool.protocol.prompt import ask_digest, check_encoded, digest_of
from lmpool.protocol.query import Ask, unpack_ask

MOST_TEXT = 500
"""Characters that are shown of a text of somebody else's."""

_FAILURE_FIELD = b"e"
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_BEGINNING = re.compile(r"[0-9]{1,20}(-[0-9]{0,20})?|[0-9a-fA-F]{1,32}")
_MOST_NAMED = 8
# A letter may hold a job of 16 MB.
_AT_ONCE = 8
_DROPPED_AT_ONCE = 500
_KEPT_MS = 3_600_000


class DeadLetter(NamedTuple):
    """One job that was given up.

    Attributes:
        entry: its id among the dead: milliseconds since 1970 when it was given up, "-", a number.
        data: the job as it was queued.
        failure: how it ended.
        job: what `data` says; None when it does not decode.
        ask: what was wanted instead of the row; None for the row.
        digest: what was waited for; b"" when the job does not decode.
        fault: why it cannot be computed whoever computes it; "" when it can be tried again.
    """

    entry: str
    data: bytes
    failure: Failure
    job: Job | None = None
    ask: Ask | None = None
    digest: bytes = b""
    fault: str = ""

    @property
    def given_up(self) -> float:
        """When, in seconds since 1970."""
        return int(self.entry.partition("-")[0]) / 1000


def read_letter(entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """A letter from its entry in the stream, whatever that holds."""
    data = fields.get(JOB_FIELD, b"")
    letter = DeadLetter(entry.decode("ascii"), data, _read_failure(fields.get(_FAILURE_FIELD, b"")))
    try:
        job = unpack_job(data)
        prompt = digest_of(job.ids, job.adapter)
        letter = letter._replace(job=job, digest=ask_digest(prompt, job.ask) if job.ask else prompt)
        return letter._replace(ask=unpack_ask(job.ask) if job.ask else None)
    except ProtocolError as error:
        return letter._replace(fault=shortened(str(error)))


def _read_failure(data: bytes) -> Failure:
    try:
        failure = unpack_failure(data)
    except ProtocolError as error:
        failure = Failure("", f"the reason cannot be read: {error}")
    return Failure(shortened(failure.kind, 60), shortened(failure.text))


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """A text as it is printed, cut to `most` characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


class DeadLetters:
    """The dead letters of one model.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
    """

    def __init__(self, redis: Redis, keys: ModelKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def count(self) -> int:
        """How many there are."""
        return int(await self._redis.xlen(self._keys.dead))

    async def newest(self, most: int) -> list[DeadLetter]:
        """The newest, the last first."""
        found: list[DeadLetter] = []
        last = "+"
        while len(found) < most:
            count = min(_AT_ONCE, most - len(found))
            page = _letters(await self._redis.xrevrange(self._keys.dead, last, "-", count))
            if not page:
                break
            found += page
            last = f"({found[-1].entry}"
        return found

    async def oldest_first(self) -> AsyncGenerator[DeadLetter, None]:
        """All that there are now, a few in memory at a time."""
        first = "-"
        for newest in await self.newest(1):
            while page := _letters(await self._redis.xrange(self._keys.dead, first, newest.entry, _AT_ONCE)):
                for letter in page:
                    yield letter
                first = f"({page[-1].entry}"

    async def find(self, names: Sequence[str]) -> list[DeadLetter]:
        """Those that are called so, each once.

        Args:
            names: ids or digests (in hexadecimal), or beginnings of them that only one letter has.

        Raises:
            SettingsError: a name is that of none, or of several.
        """
        found: dict[str, DeadLetter] = {}
        begun: dict[str, list[str]] = {}
        for name in names:
            if letter := await self._at(name):
                found[letter.entry] = letter
            else:
                begun[name] = []
        if any(map(_BEGINNING.fullmatch, begun)):
            async for letter in self.oldest_first():
                for name, meant in begun.items():
                    if name and (letter.entry.startswith(name) or letter.digest.hex().startswith(name.lower())):
                        meant.append(letter.entry)
        for name, meant in begun.items():
            letter = await self._at(_the_one(name, meant))
            if letter is None:
                raise SettingsError(f"id: {meant[0]} is gone: somebody else has taken it meanwhile")
            found[letter.entry] = letter
        return list(found.values())

    async def _at(self, entry: str) -> DeadLetter | None:
        """The letter of an id."""
        is_id = _ID.fullmatch(entry) and all(int(number) < 2**64 for number in entry.split("-"))
        found = _letters(await self._redis.xrange(self._keys.dead, entry, entry, 1)) if is_id else []
        return found[0] if found else None

    async def drop(self, entries: Sequence[str]) -> int:
        """Remove some; returns how many there were."""
        dropped = 0
        for at in range(0, len(entries), _DROPPED_AT_ONCE):
            dropped += await self._redis.xdel(self._keys.dead, *entries[at : at + _DROPPED_AT_ONCE])
        return dropped

    async def drop_all(self) -> int:
        """Remove all that there are now; returns how many."""
        return int(await self._redis.xtrim(self._keys.dead, maxlen=0, approximate=False))

    async def retry(self, letter: DeadLetter, card: ModelCard, adapters: Collection[str]) -> bool:
        """Queue a job again, with no deliveries; its row is then in the cache for whoever asks.

        Args:
            letter: the job.
            card: of the model that is served now.
            adapters: those that are in service, as jobs call them; see `served_adapters`.

        Returns:
            False when nothing had to be queued, for the same is being computed already.

        Raises:
            LMPoolError: it cannot be computed, or the queue is full; the letter stays.
        """
        if reason := _refusal(letter, card, adapters):
            raise LMPoolError(f"{letter.entry}: {reason}")
        keys = [self._keys.jobs, self._keys.dead, self._keys.waiting + letter.digest]
        outcome = await scripts.RETRY(self._redis, keys, [letter.entry, letter.data, card.queue_limit, _KEPT_MS])
        if outcome == b"F":
            raise LMPoolError(
                f"{letter.entry}: the queue is at its limit of {card.queue_limit} prompts: try again later"
            )
        if outcome == b"G":
            raise LMPoolError(f"{letter.entry}: somebody else has taken it meanwhile")
        return bool(outcome == b"Q")

    async def served_adapters(self, card: ModelCard) -> set[str]:
        """The adapters in service, as jobs call them: "name@revision"."""
        known = await AdapterRegistry(self._redis, self._keys, card.fingerprint).read()
        return {f"{name}@{adapter.revision}" for name, adapter in known.adapters.items()}


def _the_one(name: str, meant: Sequence[str]) -> str:
    """The only id of those that a name may mean."""
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise SettingsError(f"id: {shortened(name, 60)!r} is none of the dead letters: see `lmpool dead list`")
    more = f" and {len(meant) - _MOST_NAMED} more" if len(meant) > _MOST_NAMED else ""
    raise SettingsError(f"id: {name!r} may be any of {', '.join(meant[:_MOST_NAMED])}{more}: name one of them")


def _letters(reply: Any) -> list[DeadLetter]:
    return [read_letter(entry, fields) for entry, fields in reply]


def _refusal(letter: DeadLetter, card: ModelCard, adapters: Collection[str]) -> str:
    """Why a job cannot be queued again; "" when it can."""
    if letter.fault or letter.job is None:
        return f"it cannot be read, so nobody can compute it: {letter.fault}"
    job = letter.job
    if job.fingerprint != card.fingerprint:
        theirs = shortened(job.fingerprint, 60)
        return f"it is for another model of this name: its fingerprint is {theirs}, not {card.fingerprint}"
    if card.is_trie:
        return ""
    try:
        check_encoded(job.ids, vocab_size=card.vocab_size, max_tokens=card.max_prompt_tokens)
    except InvalidPrompt as error:
        return str(error)
    if job.adapter and job.adapter not in adapters:
        name, revision = shortened(name_of(job.adapter), 60), shortened(revision_of(job.adapter), 60)
        return f"the adapter {name!r} of revision {revision!r} is not in service any more"
    return ""
