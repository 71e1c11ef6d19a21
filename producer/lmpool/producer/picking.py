"""The calls of a producer that give less than a row."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from lmpool.checks import shown
from lmpool.errors import InvalidPrompt, SettingsError
from lmpool.picks import MOST_SEED, TopK
from lmpool.producer.adapters import by_revision
from lmpool.producer.checks import encode, iterate
from lmpool.producer.row_asker import ask_sample, ask_scores, ask_top, read_sampling
from lmpool.producer.session import Session
from lmpool.producer.slot import SessionSlot
from lmpool.producer.together import all_of
from lmpool.producer.within import Within, begin


class SampleOptions(TypedDict, total=False):
    """Options of `Producer.sample` and `Producer.batch_sample`.

    Attributes:
        temperature: divides the log-probabilities (default 1); 0 takes the likeliest token.
        top_p: draw among the likeliest tokens only, the fewest that have at least this probability together (default
            1: among all).
        seed: equal seeds draw equal tokens from equal rows, wherever they are drawn (`lmpool.picks.sample`); None, the
            default, draws anew each time.
        adapter: as `Producer.logprobs`.
        timeout: as `Producer.logprobs`.
    """

    temperature: float
    top_p: float
    seed: int | None
    adapter: str
    timeout: float | None


_OPTIONS = SampleOptions.__optional_keys__


class Picking:
    """Asks for the likeliest tokens, for a token that is drawn, for what a continuation scores.

    Mixed into `Producer`. Workers answer from the row, whether they have just computed it or the cache has it; only the
    answer travels. A row that is computed for an answer is cached for everyone.

    All calls take `adapter` and `timeout` as `Producer.logprobs` does and raise what it raises; those for several
    prompts check all of them before the first is sent, and end with the first failure.
    """

    _rows: SessionSlot
    _timeout: float

    @by_revision
    async def topk(self, ids: Any, k: int, *, adapter: str = "", timeout: float | None = None) -> TopK:
        """The `k` likeliest tokens, likeliest first; of equal ones the lowest id first.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            k: how many, 1 to V.

        Returns:
            log-probabilities, float32 of shape (k,), and token ids, int64 of shape (k,).

        Raises:
            SettingsError: `k` is out of range.
        """
        session, within = await self._begin(timeout)
        prompt = encode(session.card, ids, adapter)
        return await ask_top(session, prompt, _check_k(k, session), within)

    @by_revision
    async def batch_topk(
        self, prompts: Iterable[Any], k: int, *, adapter: str = "", timeout: float | None = None
    ) -> TopK:
        """As `topk`, for n prompts: both arrays have the shape (n, k)."""
        session, within = await self._begin(timeout)
        encoded = [encode(session.card, ids, adapter) for ids in iterate(prompts)]
        k = _check_k(k, session)
        found = await all_of([ask_top(session, prompt, k, within) for prompt in encoded])
        values = np.array([one.values for one in found], np.float32).reshape(-1, k)
        return TopK(values, np.array([one.ids for one in found], np.int64).reshape(-1, k))

    async def sample(self, ids: Any, **options: Unpack[SampleOptions]) -> int:
        """A token drawn from the distribution of the next one.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            options: see `SampleOptions`.

        Raises:
            SettingsError: an option is unknown or out of range.
        """
        return int((await self.batch_sample([ids], **options))[0])

    @by_revision
    async def batch_sample(self, prompts: Iterable[Any], **options: Unpack[SampleOptions]) -> NDArray[np.int64]:
        """As `sample`, for n prompts; the i-th is drawn with `seed` + i.

        Returns:
            int64 token ids of shape (n,).
        """
        if not options.keys() <= _OPTIONS:
            raise SettingsError(f"{min(options.keys() - _OPTIONS)}: not an option; there are {', '.join(_OPTIONS)}")
        session, within = await self._begin(options.get("timeout"))
        adapter, seed = options.get("adapter", ""), options.get("seed")
        encoded = [encode(session.card, ids, adapter) for ids in iterate(prompts)]
        how = read_sampling(options.get("temperature", 1.0), options.get("top_p", 1.0), seed)
        hows = [
            how._replace(seed=secrets.randbits(64) if seed is None else (how.seed + at) & MOST_SEED)
            for at in range(len(encoded))
        ]
        pairs = zip(encoded, hows, strict=True)
        drawn = await all_of([ask_sample(session, one, how, within, private=seed is None) for one, how in pairs])
        return np.array(drawn, np.int64)

    async def score(
        self, prompt: Any, continuation: Any, *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """What each token of a continuation scores: its log-probability after the prompt and the tokens before it.

        Workers of backends that can (`model.scores`) run one forward for it; otherwise the rows of all prefixes are
        computed. Forwards of different lengths round differently: expect what rows say to about 1e-4 in float32.

        Args:
            prompt: as for `Producer.logprobs`.
            continuation: token ids, at least one. Both together are at most as long as the model's longest prompt.

        Returns:
            float32 of shape (m,), one for each token of the continuation; their sum is what all of it scores.
        """
        return (await self.batch_score([prompt], [continuation], adapter=adapter, timeout=timeout))[0]

    @by_revision
    async def batch_score(
        self, prompts: Iterable[Any], continuations: Iterable[Any], *, adapter: str = "", timeout: float | None = None
    ) -> list[NDArray[np.float32]]:
        """As `score`, for n prompts with a continuation each.

        Raises:
            SettingsError: there are not as many continuations as prompts.
        """
        session, within = await self._begin(timeout)
        card = session.card
        firsts = [encode(card, ids, adapter) for ids in iterate(prompts)]
        try:
            seconds = [encode(card, ids, adapter) for ids in iterate(continuations)]
        except InvalidPrompt as error:
            raise type(error)(f"continuation: {error}") from error
        if len(firsts) != len(seconds):
            raise SettingsError(f"continuations: {len(seconds)} for {len(firsts)} prompts; each prompt needs one")
        return await all_of([ask_scores(session, *pair, within) for pair in zip(firsts, seconds, strict=True)])

    @by_revision
    async def warm(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> None:
        """Have a prompt's row computed and cached, without having it sent.

        The worker that computes it also keeps its keys and values for prompts that extend it. A row that is cached is
        not computed again, so then no worker is warmed.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
        """
        session, within = await self._begin(timeout)
        prompt = encode(session.card, ids, adapter)
        if session.kept(prompt) is None:
            await session.answer(prompt, within, touch=True)

    async def _begin(self, timeout: float | Within | None) -> tuple[Session, Within]:
        within = begin(timeout, self._timeout)
        return self._rows.current(within.loop) or await self._rows.open(within), within


def _check_k(k: Any, session: Session) -> int:
    vocab_size = session.card.vocab_size
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= vocab_size:
        raise SettingsError(f"k: {shown(k)} must be a whole number from 1 to {vocab_size}, the model's V")
    return int(k)
