"""The tries of `lmpool.producer.genlm` and of genlm-backend have equal node numbers and results."""

from __future__ import annotations

import asyncio
import base64
import copy
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from genlm.backend.tokenization import Token as TheirToken
from genlm.backend.trie import ParallelTokenCharacterTrie as TheirParallel
from genlm.backend.trie import TokenCharacterTrie as TheirSequential
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary, InvalidWeights, SettingsError
from lmpool.producer.genlm import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, Token, TokenCharacterTrie

PAIRS = [(TokenCharacterTrie, TheirSequential), (ParallelTokenCharacterTrie, TheirParallel)]
both_classes = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["sequential", "parallel"])
both_ops = pytest.mark.parametrize("op", ["sum", "max"])
DECODE = [TheirToken(0, b"a"), TheirToken(1, b"b"), TheirToken(2, b"ab"), TheirToken(3, b"<eos>")]
WS = [0.1, 0.2, 0.2, 0.5]


class EndOfSequence:
    """An item of a vocabulary that yields itself when it is iterated, as the end-of-sequence item of genlm-control."""

    def __init__(self, name: str = "EOS") -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EndOfSequence) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[EndOfSequence]:
        return iter([self])


EOS = EndOfSequence()
words = st.binary(max_size=4) | st.lists(st.sampled_from([0, 1, 97, 254, 255]), max_size=5).map(bytes)
vocabularies = st.lists(words, min_size=1, max_size=25).map(
    lambda strings: [TheirToken(7 + i, word) for i, word in enumerate(strings)]
)
tuples = st.tuples(st.sampled_from([97, 255, "a", EOS])) | st.just((97, 98))
others = st.text("aé字", max_size=3) | tuples | st.just(EOS)
mixed_vocabularies = st.tuples(vocabularies, st.lists(others, unique=True, max_size=6)).flatmap(
    lambda parts: st.permutations([*parts[0], *parts[1]])
)


def tekken(count: int) -> list[TheirToken]:
    """The first tokens of the Tekken vocabulary of mistral_common."""
    text = files("mistral_common").joinpath("data/tekken_240911.json").read_text("utf-8")
    listed = json.loads(text)["vocab"][:count]
    return [TheirToken(i, base64.b64decode(entry["token_bytes"])) for i, entry in enumerate(listed)]


def assert_same_structure(ours: TokenCharacterTrie, theirs: Any) -> None:
    assert ours.children == theirs.children
    assert [list(kids) for kids in ours.children] == [list(kids) for kids in theirs.children]
    assert ours.root == theirs.root
    assert ours.decode == theirs.decode
    assert list(ours.word2leaf.items()) == list(theirs.word2leaf.items())
    assert list(ours.leaf2word.items()) == list(theirs.leaf2word.items())
    assert ours.node2prefix == theirs.node2prefix
    assert [kids.tolist() for kids in ours.jump] == [kids.tolist() for kids in theirs.jump]
    assert_same_array(ours.ordering, theirs.ordering)
    assert_same_array(ours.idx_to_leaf, theirs.idx_to_leaf)


def assert_same_array(ours: NDArray[Any], theirs: NDArray[Any]) -> None:
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def assert_close(ours: NDArray[Any], theirs: NDArray[Any], *, atol: float = 0.0) -> None:
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=atol)


def our_tokens(decode: list[Any]) -> list[Any]:
    """The vocabulary with lmpool's `Token` objects in place of genlm-backend's."""
    return [Token(item.token_id, item.byte_string) if isinstance(item, TheirToken) else item for item in decode]


def weights_for(decode: list[Any], seed: int) -> NDArray[np.float32]:
    """Three rows of weights: probabilities with zeros, log-probabilities with -inf, and numbers of both signs."""
    draws = np.random.default_rng(seed).dirichlet(np.full(len(decode), 0.1)).astype(np.float32)
    with np.errstate(divide="ignore"):
        logs = np.log(draws)
    return np.stack([draws, logs, np.where(np.arange(len(decode)) % 3, 0.25 - draws, 0)]).astype(np.float32)


# Node numbers of tries


@given(vocabularies)
def test_nodes_have_genlms_numbers(decode: list[Any]) -> None:
    theirs = TheirSequential(decode)
    assert_same_structure(TokenCharacterTrie(decode), theirs)
    assert TokenCharacterTrie(our_tokens(decode)).children == theirs.children


@given(mixed_vocabularies)
def test_nodes_of_letters_that_are_no_bytes_have_genlms_numbers(decode: list[Any]) -> None:
    assert_same_structure(TokenCharacterTrie(decode), TheirSequential(decode))


@both_classes
def test_a_real_vocabulary_with_an_end_of_sequence_has_genlms_numbers(ours: Any, theirs: Any) -> None:
    for decode in (tekken(5000), [*tekken(5000), EOS]):
        assert_same_structure(ours(decode), theirs(decode))


@pytest.mark.parametrize("count", [2, 254, 255, 256, 600])
def test_any_number_of_other_letters_is_numbered(count: int) -> None:
    letters = [chr(1000 + i) for i in range(count)]
    decode = [TheirToken(0, b"\xff\xff\x00"), TheirToken(1, b"\xff"), TheirToken(2, b""), *letters, "".join(letters)]
    assert_same_structure(TokenCharacterTrie(decode), TheirSequential(decode))


def test_the_node_map_contains_all_nodes_and_items() -> None:
    decode = tekken(500)
    trie = TokenCharacterTrie(decode)
    assert sorted(trie.node_map[trie.node_map >= 0]) == list(range(trie.structure.n_nodes))
    for node, mapped in enumerate(trie.node_map.tolist()):
        if mapped < 0:
            token = decode[-1 - mapped]
            assert trie.leaf2word[node] == (token.byte_string, token.token_id)
        else:
            assert trie.structure.prefix(mapped) == bytes(trie.node2prefix[node])


def test_a_token_may_be_longer_than_the_recursion_limit() -> None:
    trie = TokenCharacterTrie([Token(0, b"a" * 50_000), Token(1, b"a" * 20_000)])
    assert trie.root == 50_002
    assert trie.weight_sum([1.0, 2.0])[[trie.root, 30_000, trie.word2leaf[b"a" * 20_000, 1]]].tolist() == [3, 1, 2]


# Weights of nodes


@both_ops
@both_classes
@given(decode=mixed_vocabularies, seed=st.integers(0, 99), wide=st.booleans())
def test_weights_are_genlms(ours: Any, theirs: Any, op: str, decode: list[Any], seed: int, wide: bool) -> None:
    rows = weights_for(decode, seed).astype(np.float64 if wide else np.float32)
    trie, reference = ours(decode), theirs(decode)
    for row in rows:
        # Numbers of both signs may cancel, so compare with an absolute tolerance for float32 numbers up to 1.
        assert_close(getattr(trie, f"weight_{op}")(row), getattr(reference, f"weight_{op}")(row), atol=2e-7)


@both_ops
@both_classes
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_of_a_real_vocabulary_are_genlms(ours: Any, theirs: Any, op: str, dtype: Any) -> None:
    decode = [*tekken(5000), EOS]
    trie, reference, exact = ours(decode), theirs(decode), TheirSequential(decode)
    for row in weights_for(decode, 1)[:2].astype(dtype):
        values, wanted = (getattr(each, f"weight_{op}")(row) for each in (trie, reference))
        assert values.dtype == wanted.dtype
        # genlm-backend's parallel class adds in float32; its relative error at the root is 3e-6 here.
        np.testing.assert_allclose(values, wanted, rtol=1e-5 if theirs is TheirParallel else 1e-6)
        if op == "sum":
            np.testing.assert_allclose(values, exact.weight_sum(row), rtol=1e-6)


@both_classes
def test_a_maximum_below_zero_follows_genlms_class(ours: Any, theirs: Any) -> None:
    trie = ours(DECODE)
    values = trie.weight_max(np.array([-1, -2, -3, -4], np.float32))
    assert values[trie.root] == theirs(DECODE).weight_max(torch.tensor([-1.0, -2, -3, -4]))[trie.root]
    assert values[trie.root] == (0 if ours is TokenCharacterTrie else -1)
    assert values[trie.word2leaf[b"ab", 2]] == -3


def test_a_light_node_keeps_its_sum_in_float64() -> None:
    trie = TokenCharacterTrie(DECODE)
    values = trie.weight_sum(np.array([1e-300, 1.0, 2e-300, 1e9]))
    assert values[trie.children[trie.root][97]] == pytest.approx(3e-300, rel=1e-12, abs=0)


FORMS: list[Callable[[NDArray[np.float32]], Any]] = [
    lambda rows: rows,
    list,
    tuple,
    lambda rows: rows.tolist(),
    lambda rows: np.asfortranarray(rows),
    torch.from_numpy,
    lambda rows: list(torch.from_numpy(rows)),
    lambda rows: torch.from_numpy(rows).double().requires_grad_(),
    lambda rows: torch.from_numpy(rows).bfloat16(),
    lambda rows: [rows[0], torch.from_numpy(rows[1]).half(), rows[2].tolist()],
]


@both_ops
@both_classes
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_in_any_form_is_computed_row_by_row(ours: Any, theirs: Any, op: str, form: Any) -> None:
    rows = np.array([WS, [0, 0.25, 0.5, 0.25], [0.75, -0.25, 0, 1]], np.float32)
    wanted = np.stack([getattr(theirs(DECODE), f"weight_{op}")(torch.from_numpy(row)) for row in rows])
    values = getattr(ours(DECODE), f"batch_weight_{op}")(form(rows))
    assert values.shape == wanted.shape
    assert values.dtype == wanted.dtype
    np.testing.assert_allclose(values, wanted, rtol=4e-3)


@both_classes
def test_an_empty_batch_has_no_rows(ours: Any, theirs: Any) -> None:
    trie = ours(DECODE)
    assert trie.batch_weight_sum([]).shape == (0, len(trie.children))


@both_classes
@pytest.mark.parametrize(
    ("ws", "message"),
    [
        ([1.0, 2.0], "2 weights for a vocabulary of 4 items"),
        ([[1.0]], r"shape \(1, 1\): one vector has shape \(4,\)"),
        ([0.0, float("nan"), 0.0, 0.0], "weight 1 .*is NaN"),
        (["a", "b", "c", "d"], "must be real numbers"),
        ([[1.0], 2.0, 3.0, 4.0], "inhomogeneous"),
        (None, "shape"),
    ],
)
def test_invalid_weights_are_refused(ours: Any, theirs: Any, ws: Any, message: str) -> None:
    with pytest.raises(InvalidWeights, match=message):
        ours(DECODE).weight_sum(ws)
    with pytest.raises(InvalidWeights):
        ours(DECODE).batch_weight_max(ws if ws is None else [ws])


# Accepted and refused vocabularies


@both_classes
def test_plain_bytes_are_accepted_with_one_warning_at_the_caller(ours: Any, theirs: Any) -> None:
    decode = [TheirToken(0, b"hello"), b"world", TheirToken(2, b"test"), b"data"]
    with pytest.warns(DeprecationWarning, match="Passing plain bytes to TokenCharacterTrie is deprecated") as caught:
        trie = ours(decode)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_structure(trie, theirs(decode))
    assert trie.word2leaf.keys() == {(b"hello", 0), b"world", (b"test", 2), b"data"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("decode", "message"),
    [
        ([b"hello", b"world", b"hello"], r"Duplicate word in vocabulary: b'hello' is item 0 and item 2"),
        ([Token(0, b"a"), Token(1, b"b"), Token(0, b"a")], r"Duplicate word in vocabulary: \(b'a', 0\)"),
        ([EOS, EndOfSequence()], "Duplicate word in vocabulary: EOS"),
        ([Token(0, b"a"), 7], "item 1 of the vocabulary is 7"),
        ([["a"]], "hashable"),
        ([], "0 tokens"),
    ],
)
def test_a_vocabulary_with_duplicates_or_unreadable_items_is_refused(decode: list[Any], message: str) -> None:
    with pytest.raises(InvalidVocabulary, match=message) as caught:
        TokenCharacterTrie(decode)
    assert isinstance(caught.value, ValueError)


def test_duplicate_plain_bytes_are_warned_about_and_refused() -> None:
    duplicate = pytest.raises(ValueError, match="Duplicate word in vocabulary")
    with pytest.warns(DeprecationWarning, match="Passing plain bytes"), duplicate:
        TokenCharacterTrie([b"hello", b"hello"])


def test_the_device_is_genlms() -> None:
    assert ParallelTokenCharacterTrie(DECODE).device == TheirParallel(DECODE).device
    assert ParallelTokenCharacterTrie(DECODE, device="cpu").device == "cpu"
    with pytest.raises(ValueError, match="device: 'invalid' is not one of cpu, cuda"):
        ParallelTokenCharacterTrie(DECODE, device="invalid")


def test_torch_is_not_loaded_for_a_trie() -> None:
    code = (
        "import sys\nfrom lmpool.producer.genlm import ParallelTokenCharacterTrie as T, Token\n"
        "assert 'numba' not in sys.modules\n"
        "assert T([Token(0, b'a'), Token(1, b'ab')]).weight_sum([1, 2]).tolist() == [1, 2, 2, 3, 3]\n"
        "assert not {'torch', 'transformers', 'genlm', 'graphviz'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Comparison and use of tokens


def test_tokens_are_compared_by_their_ids_and_used_as_bytes() -> None:
    first, second = Token(1, b"x"), Token(2, b"x")
    assert first != second
    assert first == Token(1, b"other") == TheirToken(1, b"x")
    assert TheirToken(1, b"x") == first
    assert len({first, second, Token(1, b"x")}) == 2
    assert first == b"x"
    assert b"".join([first, second]) == b"xx"
    assert sorted([second, first]) == [first, second]
    assert first < second <= second
    assert second > first >= first
    assert type(first.byte_string) is bytes
    assert repr(first) == "Token(token_id=1, byte_string=b'x')"
    assert (Token.as_bytes(first), Token.as_bytes(b"y")) == (b"x", b"y")
    assert [Token.is_plain_bytes(x) for x in (b"x", first, TheirToken(1, b"x"), "x")] == [True, False, False, False]


def test_a_copied_token_keeps_its_id() -> None:
    copied = copy.deepcopy([Token(5, b"abc")])[0]
    assert (type(copied), copied.token_id, copied.byte_string) == (Token, 5, b"abc")


def test_a_token_needs_an_int_and_bytes() -> None:
    with pytest.raises(TypeError, match="token_id must be an int, not str"):
        Token("1", b"x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="byte_string must be bytes, not str"):
        Token(1, "x")  # type: ignore[arg-type]


# The drawing of a trie


@pytest.mark.parametrize("values", [None, [0.25, 0.5], [0.0], [1.0]])
def test_the_drawing_is_genlms(values: list[float] | None) -> None:
    decode = [TheirToken(0, b"a"), TheirToken(1, b""), TheirToken(2, b"\xffb"), EOS]
    ours, theirs = TokenCharacterTrie(decode), TheirSequential(decode)
    ws = None if values is None else torch.tensor(values * len(ours.children))[: len(ours.children)]
    assert ours.visualize(ws).source == theirs.visualize(ws).source


def test_drawing_needs_a_weight_for_each_node_and_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = TokenCharacterTrie(DECODE)
    with pytest.raises(ValueError, match=r"shape \(3,\) for 13 nodes"):
        trie.visualize(torch.zeros(3))
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(SettingsError, match=r"pip install 'lmpool\[genlm\]'"):
        trie.visualize()


# Asynchronous tries


def counted(trie: AsyncTokenCharacterTrie, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the batches that the trie computes after this call: (operation, number of rows)."""
    batches: list[tuple[str, int]] = []

    def counting(op: str) -> Callable[[Any], Any]:
        compute = getattr(trie.trie, f"batch_weight_{op}")

        def count(ws: Any) -> Any:
            batches.append((op, len(ws)))
            return compute(ws)

        return count

    for op in ("sum", "max"):
        monkeypatch.setattr(trie.trie, f"batch_weight_{op}", counting(op))
    return batches


@pytest.mark.parametrize("backend", ["sequential", "parallel"])
async def test_concurrent_requests_are_one_batch_for_each_operation(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE, backend=backend)
    trie.start()
    batches = counted(trie, monkeypatch)
    rows = [torch.tensor(WS) * k for k in range(5)]
    results = await asyncio.gather(*map(trie.weight_sum, rows), *map(trie.weight_max, rows))
    assert sorted(batches) == [("max", 5), ("sum", 5)]
    np.testing.assert_array_equal(results[:5], trie.trie.batch_weight_sum(rows))
    np.testing.assert_array_equal(results[5:], trie.trie.batch_weight_max(rows))


async def test_a_bad_request_fails_alone() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    results: list[Any] = await asyncio.gather(trie.weight_sum(WS), trie.weight_sum([1.0]), return_exceptions=True)
    assert results[0][trie.trie.root] == pytest.approx(1)
    assert isinstance(results[1], InvalidWeights)


async def test_an_error_fails_all_requests_of_its_batch_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    with monkeypatch.context() as broken:
        broken.setattr(trie.trie, "batch_weight_sum", lambda ws: [][1])
        failed = await asyncio.gather(trie.weight_sum(WS), trie.weight_sum(WS), return_exceptions=True)
    assert [type(error) for error in failed] == [IndexError] * 2
    assert (await trie.weight_sum(WS))[trie.trie.root] == pytest.approx(1)


async def test_a_cancelled_request_does_not_cancel_its_batch() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    quitter, other = (asyncio.create_task(trie.weight_sum(WS)) for _ in range(2))
    await asyncio.sleep(0)
    quitter.cancel()
    assert (await other)[trie.trie.root] == pytest.approx(1)
    assert quitter.cancelled()


async def test_cleanup_lets_requests_finish_and_shutdown_cancels_them() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    await trie.cleanup()
    for end, cancelled in ((trie.cleanup, False), (trie.shutdown, True)):
        request = asyncio.create_task(trie.weight_max(WS))
        await asyncio.sleep(0)
        ending = end()
        if ending is not None:
            await ending
        await asyncio.wait([request])
        assert request.cancelled() is cancelled
    assert (await trie.weight_max(WS))[trie.trie.root] == pytest.approx(0.5)


def test_a_trie_works_in_several_event_loops() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)

    async def leave_a_request_behind() -> None:
        task = asyncio.create_task(trie.weight_sum(WS))
        await asyncio.sleep(0)
        task.cancel()

    for _ in range(2):
        assert asyncio.run(trie.weight_sum(WS))[trie.trie.root] == pytest.approx(1)
        asyncio.run(leave_a_request_behind())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_trie_works_after_an_event_loop_was_closed_with_a_pending_batch() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    loop = asyncio.new_event_loop()
    left = loop.create_task(trie.weight_sum(WS))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert not left.done()
    assert asyncio.run(trie.weight_sum(WS))[trie.trie.root] == pytest.approx(1)
    trie.shutdown()
    # Python warns when it collects a coroutine that never ran, so collect `left` within this test.
    del left, loop
    gc.collect()


async def test_a_trie_works_after_all_tasks_were_cancelled() -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    request = asyncio.create_task(trie.weight_sum(WS))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.wait([request])
    assert (await trie.weight_sum(WS))[trie.trie.root] == pytest.approx(1)


def test_an_unused_trie_is_collected_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE)
    asyncio.run(trie.weight_sum(WS))
    del trie
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend: 'invalid' is not one of sequential, parallel"):
        AsyncTokenCharacterTrie.from_vocab(DECODE, backend="invalid")
