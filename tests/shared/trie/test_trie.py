"""Tries have the same node numbers, lookups and values as tries that are built from nested dicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import InvalidVocabulary, UnknownNode
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from tests.support.tries import EXAMPLE, arrays_of, assert_same, reference, sums, tekken, vocabularies

# Numbers of nodes


def test_nodes_are_numbered_by_prefix_and_inner_nodes_with_them() -> None:
    trie = Trie(EXAMPLE)
    prefixes = [b"", b"a", b"ab", b"abc", b"abcd", b"ac", b"ace", b"b"]
    assert [trie.prefix(node) for node in range(trie.n_nodes)] == prefixes
    expected = {
        "parent": [-1, 0, 1, 2, 3, 1, 5, 0],
        "label": list(b"\0abcdceb"),
        "depth": [0, 1, 2, 3, 4, 2, 3, 1],
        "leaf": [7, 2, 1, 0, 4, 2, 6],
        "child_start": [0, 2, 4, 5, 6, 6, 7, 7, 7],
        "child": [1, 7, 2, 5, 3, 4, 6],
        # The inner nodes are "", "a" and "ab".
        "home": [0, 2, 1, 0, 2, 2, 1],
        "inner_parent": [-1, 0, 1],
        "value_of": [0, 1, 2, 3 + 4, 3 + 4, 3 + 6, 3 + 6, 3 + 0],
    }
    assert {name: array.tolist() for name, array in arrays_of(trie).items()} == expected
    assert (trie.n_tokens, trie.n_nodes, trie.n_inner) == (7, 8, 3)


@given(vocabularies)
def test_nodes_equal_those_of_a_trie_of_dicts(tokens: list[bytes]) -> None:
    trie, right = Trie(tokens), reference(tokens)
    assert trie.n_nodes == len(right.prefixes)
    assert trie.parent.tolist() == right.parents
    assert trie.depth.tolist() == list(map(len, right.prefixes))
    assert trie.label.tolist() == [prefix[-1] if prefix else 0 for prefix in right.prefixes]
    assert [right.prefixes[node] for node in trie.leaf] == tokens
    for node, prefix in enumerate(right.prefixes):
        assert trie.prefix(node) == prefix
        assert trie.node(prefix) == node
        assert trie.children(node).tolist() == right.children[node]
        assert trie.child[trie.child_start[node] : trie.child_start[node + 1]].tolist() == right.children[node]


@given(vocabularies)
def test_the_compressed_form_is_as_defined(tokens: list[bytes]) -> None:
    trie, right = Trie(tokens), reference(tokens)
    inner = [node for node in range(trie.n_nodes) if right.is_inner(node)]
    index = {node: place for place, node in enumerate(inner)} | {-1: -1}
    assert trie.n_inner == len(inner)
    assert trie.inner_parent.tolist() == [index[right.inner_above(node)] for node in inner]
    homes = [leaf if right.is_inner(leaf) else right.inner_above(leaf) for leaf in trie.leaf.tolist()]
    assert trie.home.tolist() == [index[home] for home in homes]
    for node, value in enumerate(trie.value_of.tolist()):
        if right.is_inner(node):
            assert value == index[node]
        elif value < trie.n_inner:
            assert right.below[inner[value]] == right.below[node]
        else:
            assert right.below[node] == {value - trie.n_inner}


@given(vocabularies, st.randoms(use_true_random=False))
def test_the_numbers_depend_on_the_byte_strings_only(tokens: list[bytes], rng: random.Random) -> None:
    trie = Trie(tokens)
    other = Trie(rng.sample([*tokens, *tokens], 2 * len(tokens)))
    assert np.array_equal(trie.parent, other.parent)
    assert np.array_equal(trie.label, other.label)


def test_arrays_have_the_types_that_kernels_expect_and_cannot_be_changed() -> None:
    trie = Trie(EXAMPLE)
    for name, array in arrays_of(trie).items():
        assert array.dtype == (np.uint8 if name == "label" else np.int32), name
        assert array.flags.c_contiguous
        assert array.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        trie.children(0)[0] = 1


# Vocabularies of every shape


@pytest.mark.parametrize("token", [b"", b"a", b"abc"])
def test_a_single_token_has_a_node_for_each_of_its_prefixes(token: bytes) -> None:
    trie = Trie([token])
    assert trie.n_nodes == len(token) + 1
    assert trie.n_inner == 1
    assert trie.home.tolist() == [0]
    assert trie.value_of.tolist() == [0] + [1] * len(token)


def test_duplicates_share_a_node_and_keep_their_weights_apart() -> None:
    trie = Trie([b"ab", b"", b"ab", b""])
    assert trie.leaf.tolist() == [2, 0, 2, 0]
    assert sums(trie, np.array([1, 2, 4, 8], np.float32)).tolist() == [15, 5]


def test_a_fan_of_all_bytes_is_in_order() -> None:
    fan = [bytes([first, second]) for second in reversed(range(256)) for first in range(256)]
    trie = Trie(fan)
    assert trie.n_nodes == 1 + 256 + 65536
    assert trie.label[trie.children(0)].tolist() == list(range(256))
    assert trie.label[trie.children(trie.node(b"\xff"))].tolist() == list(range(256))
    assert trie.node(b"\xff\xff") == trie.n_nodes - 1


def test_a_chain_of_nested_prefixes_is_one_line_of_inner_nodes() -> None:
    token = random.Random(0).randbytes(8000)
    trie = Trie([token[:size] for size in range(8000, 0, -1)])
    assert trie.parent.tolist() == list(range(-1, 8000))
    assert trie.n_inner == 8000  # All of the 8001 nodes but the last have children.
    assert trie.prefix(8000) == token
    assert trie.node(token) == 8000


@pytest.mark.parametrize(("ends", "more"), [([b""], 0), ([b"", b""], 0), ([b"a", b"b"], 2), ([b"", b"a" * 9], 9)])
def test_tokens_of_64_kib_are_tokens_like_others(ends: list[bytes], more: int) -> None:
    stem = random.Random(0).randbytes(65500)
    tokens = [stem + end for end in ends]
    trie = Trie(tokens)
    assert trie.n_nodes == 1 + len(stem) + more
    assert [trie.prefix(leaf) for leaf in trie.leaf] == tokens
    assert [trie.node(token) for token in tokens] == trie.leaf.tolist()


def test_300_000_random_tokens_have_one_node_per_prefix() -> None:
    rng = random.Random(0)
    tokens = [rng.randbytes(rng.randint(0, 5)) for _ in range(300_000)]
    trie = Trie(tokens)
    prefixes = sorted({token[:size] for token in tokens for size in range(len(token) + 1)})
    assert trie.n_nodes == len(prefixes)
    for node in rng.sample(range(trie.n_nodes), 2000):
        assert trie.prefix(node) == prefixes[node]
        assert trie.node(prefixes[node]) == node
    assert [prefixes[node] for node in trie.leaf] == tokens


def test_mistrals_tokenizer_has_268_555_nodes() -> None:
    trie = Trie(tekken())
    assert (trie.n_tokens, trie.n_nodes, trie.n_inner) == (131_072, 268_555, 60_419)
    assert [trie.prefix(leaf) for leaf in trie.leaf] == tekken()
    assert trie.prefix(trie.node(b" the")) == b" the"


def test_a_list_and_its_vocabulary_make_the_same_trie() -> None:
    vocabulary = Vocabulary(EXAMPLE)
    trie = Trie(vocabulary)
    assert trie.vocabulary is vocabulary
    assert trie.digest == vocabulary.digest
    assert_same(trie, Trie(EXAMPLE))
    assert_same(trie, Trie(token for token in EXAMPLE))


def test_a_value_other_than_a_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidVocabulary):
        Trie([])
    with pytest.raises(InvalidVocabulary):
        Trie(["text"])  # type: ignore[list-item]


def test_tries_are_equal_when_their_vocabularies_are() -> None:
    assert Trie([b"a", b"b"]) == Trie([b"a", b"b"])
    assert hash(Trie([b"a", b"b"])) == hash(Trie([b"a", b"b"]))
    assert Trie([b"a", b"b"]) != Trie([b"b", b"a"])
    assert Trie([b"a"]) != [b"a"]


def test_a_trie_is_shown_by_its_sizes() -> None:
    trie = Trie(EXAMPLE)
    assert repr(trie) == f"<Trie {trie.digest[:8]}: 7 tokens, 8 nodes, 3 inner>"
    assert trie.nbytes == sum(array.nbytes for array in arrays_of(trie).values()) + trie.vocabulary.nbytes


# Lookups of nodes


@pytest.mark.parametrize(
    ("prefix", "longest"), [(b"x", "b'', node 0"), (b"abx", "b'ab', node 2"), (b"acef", "b'ace', node 6")]
)
def test_a_prefix_that_no_token_has_names_the_longest_that_one_has(prefix: bytes, longest: str) -> None:
    with pytest.raises(UnknownNode, match=f"no token begins with {prefix!r}.*{longest}"):
        Trie(EXAMPLE).node(prefix)


def test_a_prefix_that_is_text_is_refused() -> None:
    with pytest.raises(UnknownNode, match=r"'ab' \(str\)"):
        Trie(EXAMPLE).node("ab")  # type: ignore[arg-type]


@pytest.mark.parametrize("node", [-1, 8, 10**30, np.int64(-3), np.uint64(2**64 - 1)])
def test_a_node_out_of_range_is_refused_with_the_range(node: Any) -> None:
    trie = Trie(EXAMPLE)
    calls: list[Callable[[Any], Any]] = [
        trie.check_node,
        trie.children,
        trie.prefix,
        lambda node: trie.check_nodes([0, node]),
    ]
    for call in calls:
        with pytest.raises(UnknownNode, match=f"node {int(node)} is out of range: nodes go from 0 to 7"):
            call(node)


@pytest.mark.parametrize("node", [True, 1.0, "1", None, np.bool_(True), np.float32(1)])
def test_a_node_that_is_not_an_integer_is_refused(node: Any) -> None:
    trie = Trie(EXAMPLE)
    calls: list[Callable[[Any], Any]] = [
        trie.check_node,
        trie.children,
        trie.prefix,
        lambda node: trie.check_nodes([0, node]),
    ]
    for call in calls:
        with pytest.raises(UnknownNode, match=f"{type(node).__name__}: nodes are integers"):
            call(node)


@pytest.mark.parametrize(
    "nodes", [[3, 0, 3], (3, 0, 3), np.array([3, 0, 3], np.uint8), np.array([3, 0, 3]), [np.int32(3), 0, np.uint64(3)]]
)
def test_several_nodes_become_an_int32_array(nodes: Any) -> None:
    checked = Trie(EXAMPLE).check_nodes(nodes)
    assert checked.dtype == np.int32
    assert checked.tolist() == [3, 0, 3]


@pytest.mark.parametrize("nodes", [[], (), range(0), np.zeros(0, np.int64)])
def test_no_nodes_are_no_nodes(nodes: Any) -> None:
    checked = Trie(EXAMPLE).check_nodes(nodes)
    assert checked.dtype == np.int32
    assert checked.shape == (0,)


@pytest.mark.parametrize(
    "nodes",
    [
        3,
        "12",
        b"12",
        {1, 2},
        np.array([[1]]),
        np.array(1),
        np.array([1.0]),
        np.array([True]),
        np.array([8]),
        np.array([-1]),
    ],
    ids=repr,
)
def test_unknown_nodes_are_refused_together(nodes: Any) -> None:
    with pytest.raises(UnknownNode):
        Trie(EXAMPLE).check_nodes(nodes)


# Values of nodes


@given(vocabularies, st.integers(0, 3), st.data())
def test_expanded_values_belong_to_the_tokens_below(tokens: list[bytes], rows: int, data: st.DataObject) -> None:
    trie, below = Trie(tokens), reference(tokens).below
    drawn = data.draw(st.lists(st.integers(-9, 9), min_size=rows * len(tokens), max_size=rows * len(tokens)))
    ws = np.array(drawn, np.float32).reshape(rows, len(tokens))
    inner = np.array([sums(trie, row) for row in ws], np.float32).reshape(rows, trie.n_inner)
    right = np.array([[row[list(under)].sum() for under in below] for row in ws]).reshape(rows, trie.n_nodes)
    values = trie.expand(inner, ws)
    assert values.dtype == np.float32
    assert np.array_equal(values, right)
    out = np.full_like(values, 99)
    assert trie.expand(inner, ws, out) is out
    assert np.array_equal(out, right)
    nodes = data.draw(st.lists(st.integers(0, trie.n_nodes - 1)))
    picked = trie.pick(inner, ws, nodes)
    assert picked.dtype == np.float32
    assert np.array_equal(picked, right[:, nodes])
    if rows:
        assert np.array_equal(trie.expand(inner[0], ws[0]), right[0])
        assert np.array_equal(trie.pick(inner[0], ws[0], nodes), right[0, nodes])


def test_values_are_moved_bit_for_bit() -> None:
    trie = Trie(EXAMPLE)
    inner = np.array([-np.inf, np.nan, -0.0], np.float32)
    ws = np.array([1e-45, np.inf, 0, 1, np.nan, 2, -np.inf], np.float32)
    right = np.concatenate([inner, ws])[trie.value_of]
    assert trie.expand(inner, ws).tobytes() == right.tobytes()
    assert trie.pick(inner, ws, range(8)).tobytes() == right.tobytes()


@pytest.mark.parametrize(
    ("inner", "ws"), [((2,), (7,)), ((3,), (8,)), ((1, 3), (2, 7)), ((3,), (1, 7)), ((1, 1, 3), (1, 1, 7)), ((), ())]
)
def test_values_of_other_shapes_are_refused(inner: tuple[int, ...], ws: tuple[int, ...]) -> None:
    trie = Trie(EXAMPLE)
    given_values = np.zeros(inner, np.float32), np.zeros(ws, np.float32)
    with pytest.raises(ValueError, match="3 inner nodes and 7 tokens"):
        trie.expand(*given_values)
    with pytest.raises(ValueError, match="3 inner nodes and 7 tokens"):
        trie.pick(*given_values, [0])


@pytest.mark.parametrize(
    "out", [np.zeros((1, 8), np.float32), np.zeros(7, np.float32), np.zeros(8)], ids=["2-D", "7", "f8"]
)
def test_values_are_not_put_where_they_do_not_fit(out: Any) -> None:
    with pytest.raises(ValueError, match="float32"):
        Trie(EXAMPLE).expand(np.zeros(3, np.float32), np.zeros(7, np.float32), out)
