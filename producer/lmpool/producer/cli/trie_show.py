"""`lmpool trie show`: the branches below a prefix and their probabilities after a prompt.

`BranchReader` requests masses (sums of probabilities) of trie nodes, level by level; `print_tree` draws the branches.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from lmpool.cli import Terminal, say_json
from lmpool.errors import SettingsError, printable
from lmpool.producer.cli.options import TEXT, AreIds, AsJson, PoolOptions, read_prompt, run, with_options
from lmpool.producer.tokenizer import read_tokens
from lmpool.settings import shown
from lmpool.trie.trie import Trie

# Without a callback, typer would name the group's only command `trie` instead of `trie show`.
trie_app = typer.Typer(name="trie", help="The token trie of a model.", no_args_is_help=True, callback=lambda: None)

_ESCAPE = re.compile(rb'\\(?:x([0-9A-Fa-f]{2})|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[\\"nrt]|)')
_LATIN_CONTROLS = re.compile("[\x80-\xa0\xad]")  # Invisible characters that Python would escape like a byte.

_MAX_OPENED = 256  # Max branches opened per level: a branch has at most 256 children, so this bounds output.
_MAX_DEPTH = 64  # Max levels of branches: tokens of more bytes are rare.
_MAX_CHILDREN = 256  # Max branches listed below a branch: a node has at most one child per byte value.
_MAX_IDS = 10  # Max token ids of the prompt that the title shows.
_MAX_TOKENS = 3  # Max token ids that a branch's line shows.
_GUIDE_CELLS = 4  # Terminal columns by which rich indents each level of a tree.
_MAX_LABEL_CELLS = 40  # Max terminal columns of a quoted byte string.
_MIN_ALONE = 1e-5  # A smaller share of a branch may be a rounding error: shares are differences of float32 sums.


@dataclass(slots=True)
class Branch:
    """All tokens that begin with a prefix. A chain of nodes without a fork or a token is one branch.

    Attributes:
        node: the last node of the chain.
        prefix: the bytes from the root of the trie to that node.
        edge: the bytes that follow the parent branch's prefix in this branch's prefix.
        tokens: ids of the tokens that are equal to the prefix.
        below: number of all tokens of the branch.
        mass: sum of the weights of all tokens of the branch.
        share: the mass divided by the mass of the parent branch; None at the top, or if the parent's mass is 0.
        alone: sum of the weights of `tokens`, to within 1e-6 of the mass; None when unknown.
        children: the listed branches below this branch, in order of falling mass.
        hidden: number of unlisted branches below this branch; 0 if no branch is listed, except at the top.
        hidden_mass: mass of the unlisted branches below this branch.
    """

    node: int
    prefix: bytes
    edge: bytes
    tokens: list[int]
    below: int
    mass: float = 0.0
    share: float | None = None
    alone: float | None = None
    children: list[Branch] = field(default_factory=list)
    hidden: int = 0
    hidden_mass: float = 0.0

    @property
    def longer(self) -> int:
        """Number of tokens that are longer than the prefix."""
        return self.below - len(self.tokens)

    @property
    def is_open(self) -> bool:
        """Whether the branches below this branch are listed."""
        return bool(self.children or self.hidden)

    def as_dict(self) -> dict[str, Any]:
        """The branch for JSON: byte strings as text with escapes, and as hex digits, which need no unescaping."""
        branch = {name: getattr(self, name) for name in ("node", "mass", "share", "tokens", "alone")}
        branch |= {"prefix": to_text(self.prefix), "prefix_hex": self.prefix.hex(), "edge": to_text(self.edge)}
        branch["tokens_in_all"] = self.below
        if self.is_open:
            branch["children"] = [child.as_dict() for child in self.children]
            branch["hidden"] = {"branches": self.hidden, "mass": self.hidden_mass}
        return branch


class BranchReader:
    """Finds the branches below prefixes of a trie.

    Args:
        trie: the trie.
        masses: called with `nodes=`, int32 (k,); returns the masses of the nodes, floats (k,). Default: `shares`.
    """

    def __init__(self, trie: Trie, masses: Callable[..., Awaitable[NDArray[Any]]] | None = None) -> None:
        self._trie = trie
        self._masses = masses or self.shares
        self._tokens: dict[int, list[int]] = {}
        for token, node in enumerate(trie.leaf.tolist()):
            self._tokens.setdefault(node, []).append(token)
        self._below = np.bincount(trie.leaf, minlength=trie.n_nodes)
        for depth in range(int(trie.depth.max()), 0, -1):
            level = np.flatnonzero(trie.depth == depth)
            np.add.at(self._below, trie.parent[level], self._below[level])

    async def shares(self, nodes: NDArray[np.int32]) -> NDArray[np.float64]:
        """For each node, the share of all tokens that end at the node or below it."""
        return self._below[nodes] / self._trie.n_tokens

    async def read(self, prefix: bytes, depth: int, top: int, least: float) -> Branch:
        """The branch of a prefix with the branches below it; raises `UnknownNode` if no token begins with the prefix.

        Args:
            prefix: the prefix.
            depth: levels of branches. Each level takes one request.
            top: max branches listed below each branch.
            least: a branch is left out if its mass is less than this part of the prefix's mass.
        """
        root = self._branch(self._trie.node(prefix), len(prefix))
        opened = [root]
        for _ in range(depth):
            heads = [self._trie.children(branch.node) for branch in opened]
            nodes = np.concatenate([np.array([root.node], np.int32), *heads])
            values = (await self._masses(nodes=nodes)).astype(np.float64)
            masses = dict(zip(nodes.tolist(), values.tolist(), strict=True))
            root.mass = masses[root.node]
            for branch, head in zip(opened, heads, strict=True):
                self._open(branch, {node: masses[node] for node in head.tolist()}, top, least * root.mass)
            longer = [child for branch in opened for child in branch.children if child.longer]
            opened = sorted(longer, key=lambda branch: -branch.mass)[:_MAX_OPENED]
            if not opened:
                break
        return root

    def _branch(self, node: int, above: int) -> Branch:
        prefix = self._trie.prefix(node)
        return Branch(node, prefix, prefix[above:], self._tokens.get(node, []), int(self._below[node]))

    def _open(self, branch: Branch, masses: dict[int, float], top: int, least: float) -> None:
        """List the branches below a branch, one for each child of its node; `masses` contains the children's masses."""
        branch.alone = max(0.0, branch.mass - sum(masses.values())) if branch.tokens else 0.0
        order = sorted(masses, key=lambda node: -masses[node])
        kept = [node for node in order[:top] if masses[node] >= least]
        for node in kept:
            end = node
            while end not in self._tokens and (children := self._trie.children(end)).size == 1:
                end = int(children[0])
            child = self._branch(end, len(branch.prefix))
            child.mass = masses[node]
            child.share = child.mass / branch.mass if branch.mass else None
            child.alone = None if child.longer else child.mass
            branch.children.append(child)
        # If no branch below this branch is listed, its line shows only the number of longer tokens.
        if kept or branch.edge == b"":
            branch.hidden = len(masses) - len(kept)
            branch.hidden_mass = sum(masses[node] for node in order[len(kept) :])


def to_text(data: bytes) -> str:
    r"""A byte string as text with escapes.

    Printable UTF-8 stands for itself. A quotation mark and a backslash have a backslash before them. Line breaks and
    tabs are `\n`, `\r` and `\t`. `\xe2` is one byte; `\u200b` and `\U000e0001` are the UTF-8 of a character.
    """
    text = data.replace(b"\\", rb"\\").replace(b'"', rb"\"").decode("utf-8", "backslashreplace")
    return printable(_LATIN_CONTROLS.sub(lambda char: f"\\u{ord(char[0]):04x}", text))


def from_text(text: str) -> bytes:
    """The byte string of a text that `to_text` can write; raises `SettingsError` for an escape that does not exist."""

    def read(escape: re.Match[bytes]) -> bytes:
        if escape[1]:
            return bytes.fromhex(escape[1].decode())
        return escape[0].decode("unicode_escape").encode()

    try:
        return _ESCAPE.sub(read, text.encode("utf-8", "surrogateescape"))
    except UnicodeError:
        raise SettingsError(
            rf"under: {shown(text, 120)} has an unknown escape: escapes are \\ \" \n \r \t, \xe2 for a byte, and "
            r"\u200b or \U0001f600 for a character"
        ) from None


@trie_app.command()
@with_options
def show(
    at: PoolOptions,
    prompt: Annotated[str | None, TEXT] = None,
    under: Annotated[
        str, typer.Option(help=r"The prefix, such as ' the'; \xe2 is a byte, \n a line break, \\ a backslash.")
    ] = "",
    ids: AreIds = False,
    depth: Annotated[int, typer.Option(min=1, max=_MAX_DEPTH, help="Levels of branches below the prefix.")] = 3,
    top: Annotated[int, typer.Option(min=1, max=_MAX_CHILDREN, help="Branches shown per branch.")] = 8,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out smaller parts of the prefix's mass.")
    ] = 0.001,
    local: Annotated[bool, typer.Option("--local", help="Compute here, not on a trie worker.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the branches below a prefix, with the probability of each after a prompt, or else its part of all tokens."""
    shown_prefix = from_text(under)
    if ids and prompt is None:
        raise SettingsError("ids: there is no prompt; pass its token ids, such as `lmpool trie show 1,2,3 --ids`")
    prompt = None if prompt is None else read_prompt(prompt, ids)

    async def read() -> tuple[str, list[int] | None, int, Branch]:
        async with at.producer() as producer:
            tokens = None if prompt is None else await read_tokens(producer, prompt, ids, at.timeout)
            trie, masses = await producer.trie(), None
            if tokens is not None:
                masses = partial(trie.weight_sum, prompt=tokens, local=local)
            root = await BranchReader(trie.structure, masses).read(shown_prefix, depth, top, least)
            return producer.model.name, tokens, trie.structure.n_tokens, root

    name, tokens, n_tokens, root = run(read())
    if as_json:
        say_json({"model": name, "prompt": tokens, "n_tokens": n_tokens, "tree": root.as_dict()})
        return
    title, mass, measure = _quoted(root.prefix) if root.prefix else "all tokens", "", "of tokens"
    if tokens is not None:
        listed = "the tokens " + ", ".join(map(str, tokens[:_MAX_IDS])) + ("…" if len(tokens) > _MAX_IDS else "")
        title += f" after {listed if ids else _quoted((prompt or '').encode('utf-8', 'surrogateescape'))}"
        mass, measure = f"{_percent(root.mass)} of the probability, ", "probability"
    print_tree(root, f"{title} · {name} · {mass}{root.below} of {n_tokens} tokens", measure)


def print_tree(root: Branch, title: str, measure: str) -> None:
    """Print a title and the branches below a prefix, cut to the terminal; `measure` names the column of masses."""
    lines = [(0, "branch", measure, "of parent", "tokens", "dim"), *_lines(root, 0)]
    label_cells = max(_GUIDE_CELLS * depth + cell_len(label) for depth, label, *_ in lines)
    mass_cells = max(len(mass) for _, _, mass, *_ in lines)
    # `path` holds the branch drawn last on each level of the tree; the header is a line above the tree.
    shown: list[Text | Tree] = [Text(printable(title), style="bold")]
    path: list[Tree] = []
    for depth, label, mass, share, tokens, style in lines:
        parts = [(set_cell_size(label, label_cells - _GUIDE_CELLS * depth), style)]
        parts += [(f"  {mass:>{mass_cells}}  {share:>9}  ", "cyan"), (tokens, "dim")]
        text = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        text.rstrip()
        if len(shown) < 2:
            shown.append(text)
        else:
            path[depth:] = [path[depth - 1].add(text) if depth else Tree(text, guide_style="bright_black")]
    Terminal().print(Group(*shown, path[0]))


def _percent(part: float) -> str:
    """A fraction as a percentage with three significant digits."""
    return f"{100 * part:#.3g}".rstrip(".") + "%"


def _quoted(data: bytes) -> str:
    """A byte string in quotation marks, cut to `_MAX_LABEL_CELLS`."""
    text = to_text(data)
    is_short = cell_len(text) <= _MAX_LABEL_CELLS - 2
    return f'"{text}"' if is_short else f'"{set_cell_size(text, _MAX_LABEL_CELLS - 3)}…"'


def _lines(branch: Branch, depth: int) -> Iterator[tuple[int, str, str, str, str, str]]:
    """The lines of a branch and of all branches below it: depth, label, mass, share, tokens, and the label's style."""
    share = "" if branch.share is None else f"{branch.share:.1%}"
    label = _quoted(branch.edge or branch.prefix)
    if char := _completed(branch.prefix, len(branch.edge)):
        label = f"{label} = {_quoted(char)}"
    tokens = ", ".join(map(str, branch.tokens[:_MAX_TOKENS]))
    if len(branch.tokens) > _MAX_TOKENS:
        tokens += f" and {len(branch.tokens) - _MAX_TOKENS} more"
    if branch.longer and tokens:
        if branch.alone is not None:
            tokens += f" alone: {_percent(branch.alone) if branch.alone > _MIN_ALONE * branch.mass else 'about 0%'}"
        if not branch.is_open:
            tokens += f" and {branch.longer} longer"
    elif branch.longer and not branch.is_open:
        tokens = f"{branch.longer} tokens"
    yield depth, label, _percent(branch.mass), share, tokens, "" if depth else "bold"
    for child in branch.children:
        yield from _lines(child, depth + 1)
    if branch.hidden:
        share = f"{branch.hidden_mass / branch.mass:.1%}" if branch.mass else ""
        yield depth + 1, f"… and {branch.hidden} more", _percent(branch.hidden_mass), share, "", "dim"


def _completed(prefix: bytes, edge_length: int) -> bytes:
    """If the edge begins inside a UTF-8 character, the text from the start of that character; else b""."""
    above = start = len(prefix) - edge_length
    while 0 < start < len(prefix) and prefix[start] & 0xC0 == 0x80:
        start -= 1
    try:
        return prefix[start:] if start < above and prefix[start:].decode() else b""
    except UnicodeDecodeError:
        return b""
