"""Asking the pool for values of tries: by weights that are sent, or by a prompt whose row is in the pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import CorruptRow, InvalidWeights, RequestFailed, SettingsError, SourceMissing, UnknownVocabulary
from lmpool.producer.client.session import Session
from lmpool.producer.client.sessions import SessionSlot
from lmpool.producer.deadline import Deadline
from lmpool.protocol.prompt import Prompt, digest_of
from lmpool.protocol.query import Selection, TrieAsk
from lmpool.trie.kernels import Kernels, Op
from lmpool.trie.trie import Trie
from lmpool.trie.weights import SentWeights

Values = NDArray[np.float32]

_NO_PROMPT = Prompt(b"", digest_of(b""))
_MOST_MISSING = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """Which nodes are wanted of a trie, and how the pool is asked for them.

    Attributes:
        trie: the trie.
        nodes: int32 ids; None for all.
        select: the ask's selection for those nodes.
        sent: the ask's node ids.
    """

    trie: Trie
    nodes: NDArray[np.int32] | None
    select: Selection
    sent: bytes

    @classmethod
    def read(cls, trie: Trie, nodes: Any, under: Any) -> Choice:
        """What the arguments `nodes` and `under` mean.

        Raises:
            UnknownNode: no such node or prefix.
            SettingsError: both were given.
        """
        if nodes is not None and under is not None:
            raise SettingsError("nodes: either nodes or under can be given, not both")
        if nodes is not None:
            ids = trie.check_nodes(nodes)
            return cls(trie, ids, "nodes", ids.astype("<i4").tobytes())
        if under is not None:
            if not isinstance(under, bytes):
                raise SettingsError(f"under: {under!r:.80} is not bytes: pass the prefix as bytes, such as b' the'")
            node = trie.node(under)
            return cls(trie, trie.children(node), "under", node.to_bytes(4, "little"))
        return cls(trie, None, "inner", b"")

    @property
    def size(self) -> int:
        """Number of the nodes."""
        return self.trie.n_nodes if self.nodes is None else len(self.nodes)

    def compute(self, kernels: Kernels, op: Op, weights: Values) -> Values:
        """The values of the nodes in this process: (B, V) -> (B, size)."""
        if self.nodes is None:
            return kernels.values(op, weights)
        return self.trie.pick(kernels.inner(op, weights), weights, self.nodes)


class TrieAsker:
    """Asks trie workers, and model workers that answer tries themselves.

    Args:
        trie: the trie.
        rows: the session with the model's workers.
        tries: the session with the trie workers.

    Attributes:
        rows: as above.
    """

    def __init__(self, trie: Trie, rows: SessionSlot, tries: SessionSlot) -> None:
        self._trie = trie
        self.rows = rows
        self._tries = tries

    async def of_weights(
        self, op: Op, weights: Values, choice: Choice, deadline: Deadline, out: Values | None = None
    ) -> Values:
        """The values for weights of shape (V,), which travel to a trie worker.

        Args:
            op: what to take over the weights.
            weights: float32 (V,), which must not change meanwhile.
            choice: of which nodes.
            deadline: for how long.
            out: where to put the values, if not in an array of their own.
        """
        if choice.size == 0:
            return _put(np.empty(0, np.float32), out)
        length = self._trie.n_inner if choice.nodes is None else choice.size
        session = self._tries.current(deadline.loop) or await self._tries.open(deadline)

        async def ask() -> Values:
            sent = SentWeights(weights)
            packed = TrieAsk(op, self._trie.digest, choice.select, choice.sent, "", sent.name).pack()
            return await session.answer(_NO_PROMPT.asking(packed, length), deadline, weights=sent)

        # The server may have lost the weights: it restarted, or they waited too long.
        found = await self._insist(session, ask, deadline)
        return self._trie.expand(found, weights, out) if choice.nodes is None else _put(found, out)

    def encode(self, models: Session, prompts: Iterable[Any], adapter: str) -> list[Prompt]:
        """Prompts of the model, all checked before any is sent.

        Raises:
            InvalidPrompt: one is none for this model.
            InvalidWeights: the model's rows are not as long as the vocabulary.
        """
        encoded = [models.encode(ids, adapter) for ids in prompts]
        card, tokens = models.card, self._trie.n_tokens
        if tokens != card.vocab_size:
            raise InvalidWeights(
                f"the rows of the model {card.name!r} have {card.vocab_size} entries, but the vocabulary has {tokens} "
                "tokens: use `await producer.trie()` for the model's own"
            )
        return encoded

    async def of_prompt(
        self, op: Op, models: Session, prompt: Prompt, choice: Choice, deadline: Deadline, out: Values | None = None
    ) -> Values:
        """The values for a prompt's row, which stays where it is; see `of_weights`."""
        if choice.size == 0:
            return _put(np.empty(0, np.float32), out)
        trie = self._trie
        length = trie.n_inner + trie.n_tokens if choice.nodes is None else choice.size
        ask = TrieAsk(op, trie.digest, "values" if choice.nodes is None else choice.select, choice.sent)
        found = await self._of_row(models, prompt, ask, length, deadline)
        if choice.nodes is None:
            return trie.expand(found[: trie.n_inner], found[trie.n_inner :], out)
        return _put(found, out)

    async def row(self, op: Op, models: Session, prompt: Prompt, deadline: Deadline) -> Values:
        """The weights that a prompt stands for, (V,), for computing in this process."""
        row = models.kept(prompt)
        if row is None:
            row = await models.answer(prompt, deadline)
        return row if op == "logsumexp" else np.exp(row)

    async def _of_row(self, models: Session, prompt: Prompt, ask: TrieAsk, length: int, deadline: Deadline) -> Values:
        async def ask_models() -> Values:
            return await models.answer(prompt.asking(ask.pack(), length), deadline)

        if models.card.answers_tries:
            try:
                return await self._insist(models, ask_models, deadline, 1)
            except SourceMissing:
                pass  # Another worker of this model has no tries.
        tries = self._tries.current(deadline.loop) or await self._tries.open(deadline)

        async def ask_once() -> Values:
            # The model may have other weights than the last time, and its rows other names.
            packed = TrieAsk(ask.op, ask.vocabulary, ask.select, ask.nodes, models.fingerprint, prompt.digest).pack()
            return await tries.answer(_NO_PROMPT.asking(packed, length), deadline)

        async def compute(error: RequestFailed) -> None:
            # Fetching a damaged row has it computed anew.
            await models.answer(prompt, deadline, touch=isinstance(error, SourceMissing))

        return await self._insist(tries, ask_once, deadline, mend=compute)

    async def _insist(
        self,
        session: Session,
        ask: Callable[[], Awaitable[Values]],
        deadline: Deadline,
        missing: int = _MOST_MISSING,
        mend: Callable[[RequestFailed], Awaitable[None]] | None = None,
    ) -> Values:
        """Ask until what the job names is there.

        Args:
            session: whom.
            ask: asks once.
            deadline: for how long.
            missing: how often the row or the weights may be missing.
            mend: brings them; otherwise asking again does.

        Raises:
            UnknownVocabulary: the pool does not know the vocabulary even though it was sent there.
            SourceMissing, CorruptRow: what the job names was missing or damaged as often as it may be.
            LMPoolError: whatever else `ask`, `mend` or registering the vocabulary end in.
        """
        knows = True
        while True:
            try:
                return await ask()
            except UnknownVocabulary:
                if not knows:
                    raise
                knows = False
                await session.vocabularies.register(self._trie.vocabulary, deadline)
            except (SourceMissing, CorruptRow) as error:
                missing -= 1
                if not missing:
                    raise
                if mend is not None:
                    await mend(error)


def _put(values: Values, out: Values | None) -> Values:
    """The values, in `out` when there is one."""
    if out is None:
        return values
    out[:] = values
    return out
