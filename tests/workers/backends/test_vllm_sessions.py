"""Sessions of the vllm backend (kept requests): which prompts extend or open a session, and the exact limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmpool.protocol.job import encode_prompt
from lmpool.workers.backends.vllm import sessions as sessions_module
from lmpool.workers.backends.vllm.sessions import KvSession, KvSessions

PLENTY = 10**6


def ids(*tokens: int) -> bytes:
    """An encoded prompt."""
    return encode_prompt(tokens, vocab_size=2**32, max_tokens=1000).ids


def taken(sessions: KvSessions, adapter: str, prompt: bytes) -> str | None:
    """The name of the vLLM request of the session that a prompt extends, or None if it extends no session."""
    session = sessions.take(adapter, prompt)
    if session is None:
        return None
    assert session.adapter == adapter
    assert prompt.startswith(session.ids)
    return session.request


def may_grow_from(prompt: bytes, earlier: bytes, block: int) -> bool:
    """Whether a prompt extends an earlier prompt by few enough tokens to use its session."""
    new, old = (len(prompt) - len(earlier)) // 4, len(earlier) // 4
    return prompt.startswith(earlier) and 1 <= new <= min(block, old)


# Prompts that extend a session


def test_a_prompt_that_is_one_token_longer_continues_a_session_once() -> None:
    sessions = KvSessions(8, PLENTY)
    assert sessions.keep("", ids(1, 2), "request") == []
    assert taken(sessions, "", ids(1, 2, 3)) == "request"
    assert taken(sessions, "", ids(1, 2, 3)) is None
    assert len(sessions) == 0


@pytest.mark.parametrize("other", [(1, 2), (1,), (1, 2, 3, 4), (1, 9, 3), (9, 1, 2), (2,)])
def test_any_other_prompt_does_not(other: tuple[int, ...]) -> None:
    sessions = KvSessions(8, PLENTY)
    sessions.keep("", ids(1, 2), "request")
    assert taken(sessions, "", ids(*other)) is None
    assert len(sessions) == 1


@pytest.mark.parametrize("new", range(1, 9))
def test_a_prompt_that_is_up_to_a_block_longer_continues_a_session(new: int) -> None:
    sessions = KvSessions(8, PLENTY, block=8)
    kept, grown = ids(*range(20)), ids(*range(20 + new))
    sessions.keep("", kept, "request")
    assert sessions.take("", grown) == KvSession("", kept, "request")
    assert sessions.take("", grown) is None


@pytest.mark.parametrize(
    ("kept", "prompt"),
    [
        (range(20), range(29)),
        (range(3), range(7)),
        (range(20), [*range(19), 99, 20, 21]),
        (range(20), [99, *range(1, 22)]),
        (range(20), range(20)),
        (range(20), range(19)),
    ],
    ids=["more than a block longer", "more than twice as long", "another end", "another beginning", "same", "shorter"],
)
def test_no_other_prompts_continue_a_session(kept: Iterable[int], prompt: Iterable[int]) -> None:
    sessions = KvSessions(8, PLENTY, block=8)
    sessions.keep("", ids(*kept), "request")
    assert sessions.take("", ids(*prompt)) is None
    assert len(sessions) == 1


def test_of_several_sessions_the_longest_is_continued() -> None:
    sessions = KvSessions(8, PLENTY, block=8)
    for length in (10, 13, 11):
        sessions.keep("", ids(*range(length)), f"{length}")
    assert [taken(sessions, "", ids(*range(15))) for _ in range(4)] == ["13", "11", "10", None]


def test_prompts_that_share_a_checksum_do_not_continue_each_others_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "crc32", lambda *_: 7)
    sessions = KvSessions(8, PLENTY, block=8)
    sessions.keep("", ids(1, 2, 3), "request")
    assert sessions.take("", ids(1, 9, 3, 4)) is None
    assert sessions.take("other", ids(1, 2, 3, 4)) is None
    assert sessions.keep("", ids(1, 9, 3), "another") == ["request"], "the later one replaces it"
    assert taken(sessions, "", ids(1, 9, 3, 4, 5)) == "another"


def test_with_very_large_blocks_the_lookup_is_limited() -> None:
    sessions = KvSessions(8, PLENTY, block=1056)
    sessions.keep("", ids(*range(500)), "request")
    assert sessions.take("", ids(*range(565))) is None
    assert taken(sessions, "", ids(*range(564))) == "request"


@pytest.mark.parametrize(("kept", "prompt"), [("", "one"), ("one", ""), ("one", "other")])
def test_each_adapter_has_its_own_sessions(kept: str, prompt: str) -> None:
    sessions = KvSessions(8, PLENTY)
    sessions.keep(kept, ids(1), "request")
    assert taken(sessions, prompt, ids(1, 2)) is None
    assert sessions.keep(prompt, ids(1), "another") == []
    assert taken(sessions, kept, ids(1, 2)) == "request"
    assert taken(sessions, prompt, ids(1, 2)) == "another"


def test_of_two_sessions_of_one_prompt_the_later_stays() -> None:
    sessions = KvSessions(8, PLENTY)
    sessions.keep("", ids(1), "first")
    assert sessions.keep("", ids(1), "second") == ["first"]
    assert taken(sessions, "", ids(1, 2)) == "second"


# Limits on the number of sessions and their tokens


def test_beyond_the_max_number_the_oldest_session_is_closed() -> None:
    sessions = KvSessions(2, PLENTY)
    assert [sessions.keep("", ids(token), f"{token}") for token in range(4)] == [[], [], ["0"], ["1"]]
    assert taken(sessions, "", ids(2, 0)) == "2"
    assert sessions.keep("", ids(4), "4") == []


def test_beyond_the_max_tokens_the_oldest_sessions_are_closed() -> None:
    sessions = KvSessions(100, 6)
    assert sessions.keep("", ids(1, 1, 1), "three") == []
    assert sessions.keep("", ids(2, 2), "two") == []
    assert sessions.keep("", ids(3), "one") == []
    assert sessions.keep("", ids(4), "one more") == ["three"]
    assert sessions.keep("", ids(5, 5, 5, 5, 5), "five") == ["two", "one"]
    assert len(sessions) == 2


def test_a_session_that_is_kept_again_counts_as_new() -> None:
    sessions = KvSessions(2, PLENTY)
    for name in ("a", "b"):
        sessions.keep("", ids(ord(name)), name)
    sessions.keep("", ids(ord("a")), "a again")
    assert sessions.keep("", ids(0), "c") == ["b"]


def test_a_session_beyond_the_cap_alone_is_closed_and_no_other_one() -> None:
    sessions = KvSessions(8, 2)
    sessions.keep("", ids(1, 2), "short")
    assert sessions.keep("", ids(1, 2, 3), "long") == ["long"]
    assert taken(sessions, "", ids(1, 2, 3)) == "short"


@pytest.mark.parametrize("number", [0, 1, 2, 3, 9])
def test_the_oldest_session_can_be_closed_to_free_capacity(number: int) -> None:
    sessions = KvSessions(8, PLENTY)
    for token in range(3):
        sessions.keep("", ids(token), f"{token}")
    closed = sessions.close_oldest(number)
    assert closed == ["0", "1", "2"][:number]
    assert len(sessions) == 3 - len(closed)


def test_none_at_all_are_kept_when_none_may_be() -> None:
    sessions = KvSessions(0, PLENTY)
    assert not sessions.is_growing("", ids(1))
    assert not sessions.is_growing("", ids(1, 2))
    assert sessions.keep("", ids(1, 2), "request") == ["request"]
    assert taken(sessions, "", ids(1, 2, 3)) is None
    assert len(sessions) == 0
    assert sessions.close_oldest(5) == []


def test_all_tokens_are_counted() -> None:
    sessions = KvSessions(8, 6)
    for length in range(1, 6):
        assert sessions.keep("", ids(*range(length)), "growing") == []
        assert taken(sessions, "", ids(*range(length + 1))) == "growing"
    assert sessions.keep("", ids(1, 2), "other") == ["other"], "a taken session holds its memory"
    sessions.forget("growing")
    for count in range(100):
        assert sessions.keep("", ids(1, 1, 1), "again") == (["again"] if count else [])
    assert sessions.keep("", ids(2, 2, 2), "fits") == []
    assert sessions.keep("", ids(3), "does not") == ["again"]


# Detection of growing prompts


def test_a_prompt_grows_that_is_one_token_longer_than_one_seen_before() -> None:
    sessions = KvSessions(8, PLENTY)
    grows = [sessions.is_growing("", ids(*prompt)) for prompt in [(1, 2), (1, 2), (1, 2, 3), (1, 2, 4), (1,), (2, 3)]]
    assert grows == [False, False, True, True, False, False]
    assert sessions.is_growing("", ids(1, 2, 3, 4)), "what grew is seen too"
    assert not sessions.is_growing("", ids(1, 2, 3, 4, 5, 6)), "two tokens longer"


def test_a_prompt_grows_that_is_up_to_a_block_longer_and_no_more_than_twice_as_long() -> None:
    sessions = KvSessions(8, PLENTY, block=8)
    for length, grows in ((2, False), (5, False), (8, True), (16, True), (25, False), (26, True)):
        assert sessions.is_growing("", ids(*range(length))) == grows


def test_growing_with_another_adapter_is_not_growing() -> None:
    sessions = KvSessions(8, PLENTY)
    sessions.is_growing("one", ids(1))
    assert not sessions.is_growing("", ids(1, 2))
    assert not sessions.is_growing("other", ids(1, 2))
    assert sessions.is_growing("one", ids(1, 2))


def test_only_so_many_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_RECENT", 10)
    sessions = KvSessions(8, PLENTY)
    for token in range(10):
        sessions.is_growing("", ids(token))
    assert sessions.is_growing("", ids(1, 0))
    assert not sessions.is_growing("", ids(0, 0)), "one was forgotten when the eleventh came"
    sessions.is_growing("", ids(5))
    for token in range(10, 17):
        sessions.is_growing("", ids(token))
    assert sessions.is_growing("", ids(5, 0)), "a repeated prompt counts as recent"
    for token in range(100, 1000):
        sessions.is_growing("", ids(token))
    assert len(sessions._recent) == 10


# Random sequences of calls

_tokens = st.integers(0, 2)
_prompts = st.lists(_tokens, min_size=1, max_size=6).map(lambda tokens: ids(*tokens))
_adapters = st.sampled_from(["", "one"])


class AgainstALedger(RuleBasedStateMachine):
    """Compares KvSessions with a plain list of sessions, whose tokens are counted again after each call."""

    @initialize(most=st.integers(0, 5), most_tokens=st.integers(0, 16), block=st.integers(1, 3))
    def open(self, most: int, most_tokens: int, block: int) -> None:
        self.sessions = KvSessions(most, most_tokens, block)
        self.most, self.most_tokens, self.block = most, most_tokens, block
        self.waiting: list[tuple[tuple[str, bytes], str]] = []
        self.taken: dict[str, tuple[str, bytes]] = {}
        self.seen: set[tuple[str, bytes]] = set()
        self.names = map(str, itertools.count())

    @rule(adapter=_adapters, prompt=_prompts)
    def keep(self, adapter: str, prompt: bytes, name: str | None = None) -> None:
        name = next(self.names) if name is None else name
        expected = [request for key, request in self.waiting if key == (adapter, prompt)]
        self.waiting = [item for item in self.waiting if item[1] not in expected]
        if -(-len(prompt) // 4 // self.block) * self.block > self.most_tokens:
            expected.append(name)
        else:
            self.waiting.append(((adapter, prompt), name))
        while self.waiting and (len(self.waiting) > self.most or self.tokens() > self.most_tokens):
            expected.append(self.waiting.pop(0)[1])
        assert self.sessions.keep(adapter, prompt, name) == expected

    @rule(adapter=_adapters, prompt=_prompts)
    def take(self, adapter: str, prompt: bytes) -> None:
        fitting = [
            (key, request)
            for key, request in self.waiting
            if key[0] == adapter and may_grow_from(prompt, key[1], self.block)
        ]
        key, expected = max(fitting, key=lambda item: len(item[0][1]), default=(("", b""), None))
        assert taken(self.sessions, adapter, prompt) == expected
        self.waiting = [item for item in self.waiting if item[1] != expected]
        if expected is not None:
            self.taken[expected] = key

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), token=_tokens, is_kept=st.booleans())
    def end_one(self, data: st.DataObject, token: int, is_kept: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.taken)))
        adapter, prompt = self.taken.pop(name)
        if is_kept:
            self.keep(adapter, prompt + ids(token), name)
        else:
            self.sessions.forget(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=st.lists(_tokens, min_size=1, max_size=4))
    def continue_one(self, data: st.DataObject, tokens: list[int]) -> None:
        (adapter, prompt), _ = data.draw(st.sampled_from(self.waiting))
        self.take(adapter, prompt + ids(*tokens))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def keep_one_again(self, data: st.DataObject) -> None:
        (adapter, prompt), _ = data.draw(st.sampled_from(self.waiting))
        self.keep(adapter, prompt)

    @rule(number=st.integers(0, 3))
    def close_oldest(self, number: int) -> None:
        expected = [request for _, request in self.waiting[:number]]
        del self.waiting[:number]
        assert self.sessions.close_oldest(number) == expected

    @rule(adapter=_adapters, prompt=_prompts)
    def see(self, adapter: str, prompt: bytes) -> None:
        expected = self.most > 0 and any(
            name == adapter and may_grow_from(prompt, earlier, self.block) for name, earlier in self.seen
        )
        self.seen.add((adapter, prompt))
        assert self.sessions.is_growing(adapter, prompt) == expected

    @invariant()
    def counts(self) -> None:
        assert len(self.sessions) == len(self.waiting)

    def tokens(self) -> int:
        held = [prompt for (_, prompt), _ in self.waiting] + [prompt for _, prompt in self.taken.values()]
        return sum(-(-len(prompt) // 4 // self.block) * self.block for prompt in held)


AgainstALedger.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_what_is_kept_and_closed_is_exact = AgainstALedger.TestCase
