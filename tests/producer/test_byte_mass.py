"""The probability of bytes equals the sum over all token sequences that spell the bytes, for any vocabulary."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import lmpool.testing
from lmpool.errors import DeadlineExceeded, InvalidVocabulary, LMPoolError, PromptTooLong, SettingsError
from lmpool.producer import Producer
from lmpool.producer.byte_mass import MAX_CONTINUATION_BYTES
from lmpool.producer.genlm.numbering import Token
from lmpool.protocol.tokenizer import special_tokens
from lmpool.synthetic import synthetic_row
from lmpool.testing import SyntheticModel
from lmpool.vocabulary import Vocabulary
from tests.support.pool import DEADLINE_S, Pool

PROMPT = [1, 2, 3]
# Token 0 ends the text, two tokens have the same bytes, and a character of two bytes can be cut.
TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"a", b"aab", b"abab", b"\xc3", b"\xa9", "é".encode(), b"b\xc3", b"\xa9a"]
MODEL = SyntheticModel(vocabulary=TOKENS, max_prompt_tokens=16)
STUDENT = SyntheticModel("student", vocabulary=[b"", *(bytes([byte]) for byte in b"ab\xc3\xa9")], seed=1)
TEXTS = [b"", b"a", b"aab", b"abab", "aéab".encode(), "éé".encode(), b"\xa9", b"c", b"abc", b"a", b"bbbbb"]


@pytest.fixture
async def producer() -> AsyncIterator[Producer]:
    """A producer of `MODEL`."""
    async with lmpool.testing.pool(MODEL) as pool, Producer(redis=pool.url, timeout=DEADLINE_S) as producer:
        yield producer


def brute_force(model: SyntheticModel, text: bytes, tokens: tuple[int, ...] = (), done: bytes = b"") -> float:
    """Add the probabilities of all token sequences that cover a text, one token after the other."""
    if done.startswith(text):
        return 1.0
    row, total = np.exp(model.row([*PROMPT, *tokens]).astype(np.float64)), 0.0
    for token, added in enumerate(model.tokens):
        joined = done + added
        if added and (text.startswith(joined) or joined.startswith(text)):
            total += row[token] * brute_force(model, text, (*tokens, token), joined)
    return total


def end_mass(text: bytes, tokens: tuple[int, ...] = (), done: bytes = b"") -> float:
    """Add the probabilities of all token sequences that spell a text exactly, each times that of token 0."""
    row = np.exp(MODEL.row([*PROMPT, *tokens]).astype(np.float64))
    longer = [(i, done + added) for i, added in enumerate(TOKENS) if added and text.startswith(done + added)]
    total = float(row[0]) if done == text else 0.0
    return total + sum(float(row[i]) * end_mass(text, (*tokens, i), joined) for i, joined in longer)


async def test_masses_equal_the_sum_over_all_token_sequences(producer: Producer) -> None:
    logprobs, upper = await producer.mass_of_bytes(PROMPT, TEXTS)
    assert logprobs.dtype == upper.dtype == np.float64
    assert np.array_equal(logprobs, upper)
    assert np.allclose(np.exp(logprobs), [brute_force(MODEL, text) for text in TEXTS], rtol=1e-6, atol=0)
    assert logprobs[0] == 0.0
    assert np.array_equal(logprobs[[7, 8]], [-np.inf, -np.inf])
    assert all(len(values) == 0 for values in await producer.mass_of_bytes(PROMPT, []))


async def test_tokens_of_genlm_count_by_their_bytes(producer: Producer) -> None:
    """The hash of a `Token` is its id, and two tokens of one id are equal."""
    plain = await producer.mass_of_bytes(PROMPT, TEXTS)
    tokens = await producer.mass_of_bytes(PROMPT, [Token(index % 3, text) for index, text in enumerate(TEXTS)])
    assert np.array_equal(tokens, plain)


async def test_a_certain_byte_has_no_larger_probability_than_1() -> None:
    model = SyntheticModel(vocabulary=[b"a" * (1 + i % 40) + bytes([i % 256]) for i in range(3000)])
    async with lmpool.testing.pool(model) as pool, Producer(redis=pool.url, timeout=DEADLINE_S) as producer:
        for token in range(20):
            found = await producer.mass_of_bytes([token], [b"a"])
            assert found.logprobs[0] <= found.upper[0] <= 0
            assert found.logprobs[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("text", [b"", b"ab", b"b\xc3"])
async def test_a_mass_is_that_of_all_next_bytes_and_of_the_end(producer: Producer, text: bytes) -> None:
    masses = np.exp((await producer.mass_of_bytes(PROMPT, [text, *(text + bytes([i]) for i in range(256))])).logprobs)
    assert masses[1:].sum() + end_mass(text) == pytest.approx(masses[0], rel=1e-5)


async def test_models_with_different_vocabularies_are_compared_by_bytes() -> None:
    async with lmpool.testing.pool(MODEL, STUDENT) as pool:
        for model in (MODEL, STUDENT):
            async with Producer(model.name, redis=pool.url, timeout=DEADLINE_S) as producer:
                found = np.exp((await producer.mass_of_bytes(PROMPT, TEXTS)).logprobs)
            assert np.allclose(found, [brute_force(model, text) for text in TEXTS], rtol=1e-6, atol=0)


async def test_prefixes_share_rows_and_are_not_read_twice(producer: Producer) -> None:
    text = "abaabé".encode()
    await producer.mass_of_bytes(PROMPT, [text])
    rows = producer.stats().requests
    producer.clear_cache()
    await producer.mass_of_bytes(PROMPT, [text[:end] for end in range(len(text) + 1)])
    assert producer.stats().requests == 2 * rows


@pytest.mark.parametrize("tolerance", [1e-3, 0.3])
async def test_with_a_tolerance_the_mass_lies_within_close_bounds(producer: Producer, tolerance: float) -> None:
    texts = [b"aabababbab", b"abab", b"ba"]
    lower, upper = await producer.mass_of_bytes(PROMPT, texts, tolerance=tolerance)
    expected = np.log([brute_force(MODEL, text) for text in texts])
    assert np.all(lower <= expected + 1e-6)
    assert np.all(expected <= upper + 1e-6)
    assert np.all(upper - lower <= np.log1p(tolerance) + 1e-9)
    assert np.any(lower < upper)
    rows = producer.stats().requests
    await producer.mass_of_bytes(PROMPT, texts)
    assert rows < producer.stats().requests - rows


async def test_the_limit_of_rows_ends_the_search_or_refuses_the_exact_sum(producer: Producer) -> None:
    text = b"aabababbab"
    with pytest.raises(SettingsError, match=r"the exact sum needs \d+ rows, .*; the limit is 5: raise max_rows, or"):
        await producer.mass_of_bytes(PROMPT, [text], max_rows=5)
    assert producer.stats().requests == 0
    lower, upper = await producer.mass_of_bytes(PROMPT, [text], tolerance=1e-9, max_rows=5)
    assert producer.stats().requests == 5
    assert lower[0] - 1e-6 <= np.log(brute_force(MODEL, text)) <= upper[0] + 1e-6
    assert lower[0] < upper[0] <= 0


async def test_special_tokens_end_the_text(producer: Producer) -> None:
    # By the given vocabulary, the tokens 3 and 5 end the text, so "ab" and one "a" add nothing.
    ends = [b"" if i in (3, 5) else token for i, token in enumerate(TOKENS)]
    (found,) = (await producer.mass_of_bytes(PROMPT, [b"a"], vocabulary=Vocabulary(ends))).logprobs
    row = np.exp(MODEL.row(PROMPT))
    assert np.exp(found) == pytest.approx(row[[1, 6, 7]].sum(), rel=1e-6)
    added = [{"id": 3, "content": "<s>", "special": True}, {"id": 9, "content": "  ", "special": False}]
    assert special_tokens(json.dumps({"added_tokens": added, "model": {}})) == [3]
    with pytest.raises(InvalidVocabulary, match=r"tokenizer\.json cannot be read"):
        special_tokens('{"added_tokens": [{"id": "x"}]}')


async def test_adapters_deadlines_and_long_prompts(pool: Pool, tmp_path: Any) -> None:
    pool.start("--vocab-size", 600, "--max-prompt-tokens", 6)
    async with pool.producer() as producer:
        (tmp_path / "weights").write_text("first")
        revision = await producer.add_adapter("poet", tmp_path)
        spelled = (await producer.trie()).structure.vocabulary
        for adapter in ("", "poet"):
            row = synthetic_row(PROMPT, vocab_size=600, adapter_revision=revision if adapter else "")
            found = (await producer.mass_of_bytes(PROMPT, [b"\xff"], adapter=adapter)).logprobs
            assert found[0] == pytest.approx(row[spelled.tokens.index(b"\xff")], rel=1e-6)
        with pytest.raises(PromptTooLong):
            await producer.mass_of_bytes(PROMPT, [b"\xf0\xf1\xf2\xf3\xf4"])
        for worker in pool.workers:
            worker.end()
        with pytest.raises(DeadlineExceeded):
            await producer.mass_of_bytes([9], [b"\xff"], timeout=0.2)


BAD: list[tuple[Any, dict[str, Any], type[LMPoolError], str]] = [
    ("ab", {}, SettingsError, "continuations: .* must be a list of byte strings"),
    (b"ab", {}, SettingsError, "continuations: .* must be a list of byte strings"),
    ([b"ab", "ab"], {}, SettingsError, r"continuations\[1\]: 'ab' must be bytes"),
    ([b"a" * (MAX_CONTINUATION_BYTES + 1)], {}, SettingsError, r"continuations\[0\]: has 4,097 bytes; the limit is"),
    ([b"a" * MAX_CONTINUATION_BYTES] * 8, {}, SettingsError, "continuations: their prefixes have 67,125,248 bytes"),
    ([b"a" * 100], {}, SettingsError, "needs a trillion or more rows"),
    ([b"a"], {"tolerance": 2}, SettingsError, "tolerance: 2 must be a number from 0 to 1"),
    ([b"a"], {"max_rows": 0}, SettingsError, "max_rows: 0 must be a whole number of at least 1"),
    ([b"a"], {"beam": 3}, SettingsError, "beam: not an option; there are tolerance, max_rows, vocabulary"),
    ([b"a"], {"vocabulary": [b"a"]}, InvalidVocabulary, "has 1 tokens; this model's rows have 13 entries"),
]


async def test_malformed_arguments_are_refused_in_one_line(producer: Producer) -> None:
    for texts, options, error, words in BAD:
        with pytest.raises(error, match=words) as caught:
            await producer.mass_of_bytes(PROMPT, texts, **options)
        assert "\n" not in str(caught.value)
