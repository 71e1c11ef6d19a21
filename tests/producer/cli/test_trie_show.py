"""`lmpool trie show`: the branches below a prefix and their masses, as text and JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from lmpool.errors import EmptyPrompt, SettingsError, TokenOutOfRange, UnknownModel, UnknownNode
from lmpool.producer import Producer
from lmpool.producer.cli.options import run as run_async
from lmpool.producer.cli.trie_show import Branch, BranchReader, from_text, print_tree, to_text, trie_app
from lmpool.protocol.model_info import ModelInfo
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.trie.trie import Trie
from tests.producer.cli.test_cli import on, one_line
from tests.support.pool import Pool
from tests.support.tries import vocabularies

V = 4096
PROMPT = [1, 2, 3]
TOKENS = synthetic_vocabulary(V).tokens
WIDE: dict[str, Any] = {"depth": 3, "top": 256, "least": 0.0}


@pytest.fixture(scope="module")
def served(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose worker also computes tries."""
    pool = Pool(server_url, "trieshow", tmp_path_factory.mktemp("trieshow"))
    pool.start("--with-trie", "--vocab-size", V)
    yield pool
    pool.end()


def in_process(pool: Pool, *arguments: str) -> Result:
    """Run `lmpool trie show` in this process, which is ten times as fast as in a new process."""
    return CliRunner().invoke(trie_app, ["show", *arguments, "--redis", pool.url, "--prefix", pool.prefix])


def show(pool: Pool, *arguments: str) -> str:
    """Return the output of `lmpool trie show` for the prompt."""
    ended = on(pool, "trie", "show", "1,2,3", "--ids", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def tree(pool: Pool, *arguments: str) -> dict[str, Any]:
    ended = in_process(pool, "1,2,3", "--ids", "--json", *arguments)
    assert ended.exception is None
    shown: dict[str, Any] = json.loads(ended.stdout)["tree"]
    return shown


def probability(prefix: bytes) -> float:
    row = synthetic_row(PROMPT, vocab_size=V).astype(np.float64)
    return float(sum(np.exp(row[i]) for i, token in enumerate(TOKENS) if token.startswith(prefix)))


def walk(branch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield branch
    for child in branch.get("children", []):
        yield from walk(child)


# The output of the command


@pytest.mark.parametrize("text", ["", " ", " g", r"\xff"])
def test_every_branch_has_the_probability_of_its_tokens(served: Pool, text: str) -> None:
    shown = list(walk(tree(served, "--under", text, "--depth", "2", "--top", "5")))
    assert bytes.fromhex(shown[0]["prefix_hex"]) == from_text(text)
    trie = Trie(TOKENS)
    for branch in shown:
        prefix = bytes.fromhex(branch["prefix_hex"])
        assert branch["mass"] == pytest.approx(probability(prefix), rel=1e-4)
        assert branch["tokens"] == [i for i, token in enumerate(TOKENS) if token == prefix]
        assert branch["tokens_in_all"] == sum(token.startswith(prefix) for token in TOKENS)
        assert branch["node"] == trie.node(prefix)
        assert branch["prefix"].endswith(branch["edge"])


def test_the_parts_of_a_branch_sum_to_its_mass(served: Pool) -> None:
    opened = [branch for branch in walk(tree(served, "--depth", "3", "--top", "6")) if "children" in branch]
    assert len(opened) > 10
    for branch in opened:
        masses = [child["mass"] for child in branch["children"]]
        assert masses == sorted(masses, reverse=True)
        assert sum(masses) + branch["hidden"]["mass"] + branch["alone"] == pytest.approx(branch["mass"], rel=1e-6)
        assert [child["share"] for child in branch["children"]] == [mass / branch["mass"] for mass in masses]
        row = np.exp(synthetic_row(PROMPT, vocab_size=V)[branch["tokens"]]).sum()
        assert branch["alone"] == pytest.approx(float(row), abs=3e-6 * branch["mass"])


def test_each_branch_is_printed_on_one_line(served: Pool) -> None:
    options = ("--under", " ", "--depth", "2", "--top", "3")
    lines = show(served, *options).splitlines()
    shown = tree(served, *options)
    assert lines[0].startswith('" " after the tokens 1, 2, 3 · syn · ')
    assert len(lines) == 2 + sum(1 + bool(branch.get("hidden", {}).get("branches")) for branch in walk(shown))
    for line, child in zip([line for line in lines if re.match('[├└]── "', line)], shown["children"], strict=True):
        assert f'"{child["edge"]}"' in line
        assert f"{100 * child['mass']:.3g}"[:3] in line
        assert f"{child['share']:.1%}" in line
        assert all(str(token) in line for token in child["tokens"][:3])
    assert re.search(rf"└── … and {shown['hidden']['branches']} more +[\d.e-]+%", lines[-1])


def test_without_a_prompt_branches_show_their_share_of_the_tokens(served: Pool) -> None:
    ended = on(served, "trie", "show", "--under", " ", "--depth", "1", "--json")
    shown = json.loads(ended.stdout)
    assert (shown["prompt"], shown["n_tokens"]) == (None, V)
    for branch in walk(shown["tree"]):
        prefix = bytes.fromhex(branch["prefix_hex"])
        assert branch["mass"] == sum(token.startswith(prefix) for token in TOKENS) / V
    assert "of tokens" in on(served, "trie", "show", "--under", " ").stdout


def test_trie_workers_model_workers_and_this_process_agree(served: Pool, pool: Pool) -> None:
    pool.start("--vocab-size", V)
    options = ("--under", " ", "--depth", "2", "--top", "3")
    for how in (["--no-wait"], ["--timeout", "3"]):
        error = on(pool, "trie", "show", "1,2,3", "--ids", *how).stderr
        for advice in ("`lmpool trie-worker`", "--with-trie", "--local"):
            assert advice in error
    masses = [branch["mass"] for branch in walk(tree(served, *options))]
    assert [branch["mass"] for branch in walk(tree(pool, "--local", *options))] == pytest.approx(masses, rel=1e-5)
    pool.start_trie_worker()
    assert [branch["mass"] for branch in walk(tree(pool, *options))] == pytest.approx(masses, rel=1e-5)


def test_text_is_encoded_with_the_tokenizer_of_the_model(served: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode()

    async def find(producer: Producer) -> Letters:
        return Letters()

    monkeypatch.setattr("lmpool.producer.tokenizer.find_tokenizer", find)
    shown = json.loads(in_process(served, "hé\n", "--depth", "1", "--json").stdout)
    assert shown["prompt"] == list("hé\n".encode())
    assert r'all tokens after "hé\n"' in in_process(served, "hé\n", "--depth", "1").stdout


def test_errors_name_the_mistake(served: Pool) -> None:
    cases = [
        (["1,2", "--ids", "--under", "qqqq"], UnknownNode, "no token begins with b'qqqq'; tokens begin with at most"),
        (["1,2", "--ids", "--under", r"\q"], SettingsError, r"under: '\\q' has an unknown escape"),
        (["hello"], SettingsError, "the model 'syn' has no tokenizer; pass token ids with --ids"),
        (["--ids"], SettingsError, "ids: there is no prompt"),
        (["", "--ids"], EmptyPrompt, "at least 1 token id"),
        ([str(V), "--ids"], TokenOutOfRange, f"{V} is out of range"),
        (["1", "--ids", "--model", "nope", "--no-wait"], UnknownModel, "'nope' is not served"),
    ]
    for arguments, kind, message in cases:
        error = in_process(served, *arguments).exception
        assert isinstance(error, kind)
        assert message in str(error)


def test_a_mistake_ends_in_one_line_and_exit_code_2(served: Pool) -> None:
    assert "--depth" in one_line(on(served, "trie", "show", "1,2", "--ids", "--depth", "0"))


def test_a_model_without_a_vocabulary_has_no_trie(served: Pool, pool: Pool) -> None:
    info = ModelInfo.unpack(dict(served.redis.hgetall(served.keys.models()))[b"syn"])  # type: ignore[arg-type]
    pool.redis.hset(pool.keys.models(), "syn", replace(info, vocabulary="").pack())
    assert "the model 'syn' publishes no vocabulary" in one_line(on(pool, "trie", "show", "1", "--ids"))


def test_a_narrow_terminal_gets_cut_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown([b"a" * 60, b"ab", b"b"], b"", WIDE)[0]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    runner = CliRunner()
    with runner.isolation(color=True) as (out, *_):
        print_tree(root, "title", "mass")
        lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue().decode()).splitlines()
    assert len(lines) == 2 + sum(1 for _ in branches(root))
    assert all(len(line) <= 30 for line in lines)
    assert lines[-1].endswith("…")


# Branches of a trie


class RecordedMasses:
    """Reads the masses of a trie's nodes for a `BranchReader`, and records the requested nodes."""

    def __init__(self, trie: Trie) -> None:
        self.calls: list[list[int]] = []
        self._tokens = BranchReader(trie)

    async def __call__(self, nodes: NDArray[np.int32]) -> NDArray[np.float64]:
        self.calls.append(nodes.tolist())
        return await self._tokens.shares(nodes)


def grown(tokens: list[bytes], prefix: bytes, limits: dict[str, Any]) -> tuple[Branch, RecordedMasses]:
    trie = Trie(tokens)
    recorded = RecordedMasses(trie)
    return run_async(BranchReader(trie, recorded).read(prefix, **limits)), recorded


def branches(root: Branch) -> Iterator[Branch]:
    yield root
    for child in root.children:
        yield from branches(child)


def test_only_children_of_shown_branches_are_requested() -> None:
    trie = Trie(TOKENS)
    root, recorded = grown(TOKENS, b" ", {"depth": 3, "top": 2, "least": 0.0})
    shown = [root]
    for call in recorded.calls:
        assert call == [root.node, *(int(n) for branch in sort(shown) for n in trie.children(branch.node))]
        shown = [child for branch in shown for child in branch.children if child.longer]
    assert len(recorded.calls) == 3


def sort(shown: list[Branch]) -> list[Branch]:
    return sorted(shown, key=lambda branch: -branch.mass)


def test_a_level_requests_a_bounded_number_of_nodes() -> None:
    two = [bytes([first, second, third]) for first in range(64) for second in range(16) for third in (0, 1)]
    root, recorded = grown(two, b"", WIDE)
    assert [len(call) for call in recorded.calls] == [1 + 64, 1 + 64 * 16, 1 + 256 * 2]
    assert sum(branch.is_open for branch in branches(root)) == 1 + 64 + 256


def test_a_chain_is_one_branch_up_to_a_token_or_a_fork() -> None:
    root, recorded = grown([b"abcd", b"abcdef", b"xyz1", b"xyz2"], b"", WIDE)
    assert [(branch.edge, branch.tokens) for branch in branches(root)] == [
        (b"", []), (b"abcd", [0]), (b"ef", [1]), (b"xyz", []), (b"1", [2]), (b"2", [3]),
    ]  # fmt: skip
    assert len(recorded.calls) == 2


def test_light_branches_are_counted_and_not_shown() -> None:
    root, _ = grown([b"aa", b"ab", b"ac", b"b", b"c"], b"", {"depth": 2, "top": 2, "least": 0.3})
    assert [branch.edge for branch in root.children] == [b"a"]
    assert root.hidden == 2
    assert root.hidden_mass == pytest.approx(0.4)
    (heavy,) = root.children
    assert heavy.share == pytest.approx(0.6)
    assert (heavy.is_open, heavy.longer) == (False, 3)


def test_a_prefix_that_is_a_token_without_longer_ones_is_one_branch() -> None:
    root, recorded = grown([b"ab", b"ab", b"c"], b"ab", WIDE)
    assert (root.tokens, root.mass, root.alone, root.children) == ([0, 1], 2 / 3, 2 / 3, [])
    assert len(recorded.calls) == 1


def test_without_mass_there_are_no_shares() -> None:
    async def nothing(nodes: NDArray[np.int32]) -> NDArray[np.float32]:
        return np.zeros(nodes.size, np.float32)

    trie = Trie([b"a", b"ab", b"b"])
    root = asyncio.run(BranchReader(trie, nothing).read(b"", **WIDE))
    assert all(branch.share is None and branch.mass == 0 for branch in branches(root))
    print_tree(root, "nothing", "mass")


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(vocabularies)
def test_every_vocabulary_has_branches_that_sum_up_and_can_be_printed(tokens: list[bytes]) -> None:
    root, _ = grown(tokens, b"", WIDE)
    for branch in branches(root):
        assert branch.tokens == [i for i, token in enumerate(tokens) if token == branch.prefix]
        assert branch.mass == branch.below / len(tokens)
        if branch.is_open:
            parts = sum(child.below for child in branch.children) + len(branch.tokens)
            assert parts == branch.below
    json.dumps(root.as_dict())
    print_tree(root, "title", "mass")


def test_a_byte_that_completes_a_character_is_shown_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["€".encode(), "₭".encode(), "₭x".encode(), b"\xe2\x28"]
    print_tree(grown(tokens, b"", {**WIDE, "depth": 4})[0], "title", "mass")
    printed = capsys.readouterr().out
    assert r'"\xac" = "€"' in printed
    assert r'"\xad" = "₭"' in printed
    assert '"x"' in printed
    assert '"("' in printed


# Byte strings as text


@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_escaped_text_is_read_back(data: bytes) -> None:
    text = to_text(data)
    assert from_text(text) == data
    assert text.isprintable()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b" the", " the"),
        ("né€\u200b".encode(), r"né€\u200b"),
        (b'a\n\t\\"', r"a\n\t\\\""),
        (b"\xe2\x80", r"\xe2\x80"),
        ("\U000e0001".encode(), r"\U000e0001"),
        (b"\x00\x7f", r"\x00\x7f"),
    ],
)
def test_printable_text_stays_and_other_bytes_are_escaped(data: bytes, text: str) -> None:
    assert to_text(data) == text
    assert from_text(text) == data


@pytest.mark.parametrize("text", ["\\", r"\q", r"\x4", r"\ud800", r"\U00110000", r"\u12"])
def test_an_escape_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="escapes are"):
        from_text(text)


def test_invalid_utf8_from_the_shell_is_kept() -> None:
    assert from_text(b"\xe2 a".decode("utf-8", "surrogateescape")) == b"\xe2 a"
