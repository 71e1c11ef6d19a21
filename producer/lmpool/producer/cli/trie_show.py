"""`lmpool trie show`: the branches below a prefix and their probabilities after a prompt.

`BranchReader` requests the masses of nodes level by level, and `print_tree` draws the branches with rich.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from lmpool.cli import Terminal, say_json
from lmpool.errors import NoWorker, SettingsError, UnknownModel, UnknownVocabulary, printable
from lmpool.producer.cli.options import (
    AreIds,
    AsJson,
    ModelName,
    Prefix,
    RedisUrl,
    Timeout,
    Waits,
    asking,
    hint_at_file,
    read_prompt,
    run,
)
from lmpool.producer.tokenizer import read_tokens
from lmpool.settings import shown
from lmpool.trie.trie import Trie

trie_app = typer.Typer(name="trie", help="The token trie (prefix tree) of a served model.", no_args_is_help=True)

Masses = Callable[[NDArray[np.int32]], Awaitable[NDArray[Any]]]
"""Returns the masses of k nodes, as floats of shape (k,)."""

_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_READ = {written[1]: char for char, written in _SHORT.items()}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))", re.DOTALL)
_ESCAPED_BYTES = range(0xDC80, 0xDD00)  # How Python represents a byte that is not UTF-8 (PEP 383): 0xDC00 + the byte.

_MAX_OPENED = 256  # Branches opened per level; with at most 256 children each, this bounds a request and the output.
_MAX_DEPTH = 64  # Levels; longer tokens are rare.
_MAX_CHILDREN = 256  # A node has at most one child per byte.
_MAX_IDS = 10  # Token ids of the prompt in the title.
_MAX_TOKENS = 3  # Token ids per line.
_GUIDE_CELLS = 4  # Columns of a level's guide in rich's trees.
_MAX_LABEL_CELLS = 40  # Columns of a quoted byte string.
_MIN_ALONE = 1e-5  # A smaller part of a branch is rounding: it is a difference of float32 sums.


class Limits(NamedTuple):
    """The size of the tree: its levels, the branches per node, and the least part of the prefix's mass of a branch."""

    depth: int
    top: int
    least: float


@dataclass(slots=True)
class Branch:
    """All tokens that begin with a prefix. A chain of nodes without a fork or a token is one branch.

    Attributes:
        node: the last node of the chain.
        prefix: the bytes from the root of the trie to that node.
        above: length of the parent branch's prefix.
        tokens: ids of the tokens that are equal to the prefix.
        below: number of all tokens of the branch.
        mass: sum of the weights of all its tokens.
        share: its part of the mass of the parent branch; None at the top, or when that has no mass.
        alone: sum of the weights of `tokens`, to within 1e-6 of the mass; None when unknown.
        children: its heaviest branches, the heaviest first.
        hidden: number of its other branches; 0 while none of its branches is listed, except at the top.
        hidden_mass: their mass.
    """

    node: int
    prefix: bytes
    above: int
    tokens: list[int]
    below: int
    mass: float = 0.0
    share: float | None = None
    alone: float | None = None
    children: list[Branch] = field(default_factory=list)
    hidden: int = 0
    hidden_mass: float = 0.0

    @property
    def edge(self) -> bytes:
        """The bytes between the parent branch and this one."""
        return self.prefix[self.above :]

    @property
    def longer(self) -> int:
        """Number of tokens that are longer than the prefix."""
        return self.below - len(self.tokens)

    @property
    def is_open(self) -> bool:
        """Whether its branches are listed."""
        return bool(self.children or self.hidden)

    def as_dict(self) -> dict[str, Any]:
        """The branch for JSON: byte strings as text with escapes, and as hex digits, which need no unescaping."""
        branch = {
            "prefix": to_text(self.prefix),
            "prefix_hex": self.prefix.hex(),
            "edge": to_text(self.edge),
            "node": self.node,
            "mass": self.mass,
            "share": self.share,
            "tokens": self.tokens,
            "alone": self.alone,
            "tokens_in_all": self.below,
        }
        if self.is_open:
            branch["children"] = [child.as_dict() for child in self.children]
            branch["hidden"] = {"branches": self.hidden, "mass": self.hidden_mass}
        return branch


class BranchReader:
    """Finds the branches below prefixes of a trie.

    Args:
        trie: the trie.
        masses: returns the masses of nodes; None for their part of all tokens.
    """

    def __init__(self, trie: Trie, masses: Masses | None = None) -> None:
        self._trie = trie
        self._masses = masses or self.shares
        self._order = np.argsort(trie.leaf, kind="stable")
        self._nodes = trie.leaf[self._order]

    def tokens_at(self, node: int) -> list[int]:
        """Ids of the tokens that end at a node."""
        first, end = np.searchsorted(self._nodes, (node, node + 1))
        return [int(token) for token in self._order[first:end]]

    def count(self, node: int) -> int:
        """Number of the tokens that end at a node or below it."""
        last = node
        while (children := self._trie.children(last)).size:
            last = int(children[-1])
        first, end = np.searchsorted(self._nodes, (node, last + 1))
        return int(end - first)

    async def shares(self, nodes: NDArray[np.int32]) -> NDArray[np.float64]:
        """The part of all tokens that end at each node or below it."""
        return np.array([self.count(int(node)) for node in nodes]) / self._trie.n_tokens

    async def read(self, prefix: bytes, limits: Limits) -> Branch:
        """The branch of a prefix with the branches below it. Each level takes one request.

        Raises:
            UnknownNode: no token begins with the prefix.
        """
        root = self._branch(self._trie.node(prefix), len(prefix))
        opened = [root]
        for _ in range(limits.depth):
            heads = [self._trie.children(branch.node) for branch in opened]
            masses = await self._masses(np.concatenate([np.array([root.node], np.int32), *heads]))
            root.mass, *others = masses.astype(np.float64).tolist()
            for branch, nodes in zip(opened, heads, strict=True):
                self._open(branch, nodes, np.array(others[: nodes.size]), limits.top, limits.least * root.mass)
                del others[: nodes.size]
            longer = [child for branch in opened for child in branch.children if child.longer]
            opened = sorted(longer, key=lambda branch: -branch.mass)[:_MAX_OPENED]
            if not opened:
                break
        return root

    def _branch(self, node: int, above: int) -> Branch:
        return Branch(node, self._trie.prefix(node), above, self.tokens_at(node), self.count(node))

    def _open(
        self, branch: Branch, nodes: NDArray[np.int32], masses: NDArray[np.float64], top: int, least: float
    ) -> None:
        """List the branches of a branch, which begin at the children `nodes` of its node."""
        in_all = float(masses.sum())
        branch.alone = max(0.0, branch.mass - in_all) if branch.tokens else 0.0
        order = np.argsort(-masses, kind="stable")[:top]
        kept = order[masses[order] >= least]
        for index in kept:
            child = self._branch(self._end(int(nodes[index])), len(branch.prefix))
            child.mass = float(masses[index])
            child.share = child.mass / branch.mass if branch.mass else None
            child.alone = None if child.longer else child.mass
            branch.children.append(child)
        # Without any listed branch it stays closed: its line says how many longer tokens it has.
        if kept.size or branch.edge == b"":
            branch.hidden = nodes.size - kept.size
            branch.hidden_mass = max(0.0, in_all - float(masses[kept].sum())) if branch.hidden else 0.0

    def _end(self, node: int) -> int:
        """The end of the branch that begins at a node: the next token or fork."""
        while not self.tokens_at(node) and (children := self._trie.children(node)).size == 1:
            node = int(children[0])
        return node


def to_text(data: bytes) -> str:
    r"""A byte string as text with escapes.

    Printable UTF-8 stands for itself, a quotation mark and a backslash have a backslash before them, and `\n`, `\r` and
    `\t` mean the same as everywhere. `\xe2` is one byte; `\u200b` and `\U000e0001` are the UTF-8 of a character.
    """
    return "".join(map(_written, data.decode("utf-8", "surrogateescape")))


def from_text(text: str) -> bytes:
    """The byte string of a text that `to_text` can write.

    Raises:
        SettingsError: an escape that does not exist.
    """
    try:
        data = bytearray()
        at = 0
        for escape in _ESCAPE.finditer(text):
            data += text[at : escape.start()].encode("utf-8", "surrogateescape") + _read(escape)
            at = escape.end()
        return bytes(data + text[at:].encode("utf-8", "surrogateescape"))
    except (UnicodeEncodeError, OverflowError, ValueError) as error:
        raise SettingsError(
            rf"under: {shown(text, 120)} has {error}: escapes are \\ \" \n \r \t, \xe2 for a byte, and \u200b or "
            r"\U0001f600 for a character"
        ) from None


def _written(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code in _ESCAPED_BYTES:
        return f"\\x{code - 0xDC00:02x}"
    if char.isprintable():
        return char
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _read(escape: re.Match[str]) -> bytes:
    byte, short, long, char = escape.groups()
    if byte:
        return bytes([int(byte, 16)])
    if short or long:
        code = int(short or long, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"{escape[0]}, which is not a character")
        return chr(code).encode()
    if char not in _READ:
        raise ValueError(f"a backslash before {char!r}" if char else "a backslash at its end")
    return _READ[char].encode()


@trie_app.callback()
def _several() -> None:
    """Without this, typer would turn the only command `trie show` into `trie`."""


@trie_app.command()
def show(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The prompt: text, or token ids such as 1,2,3 with --ids. Without a prompt, each branch shows its "
            "part of all tokens.",
        ),
    ] = None,
    under: Annotated[
        str,
        typer.Option(
            help=r"The prefix whose branches are shown, such as ' the'; all tokens without it. \xe2 stands for a byte, "
            r"\n for a line break, \\ for a backslash."
        ),
    ] = "",
    ids: AreIds = False,
    depth: Annotated[int, typer.Option(min=1, max=_MAX_DEPTH, help="Levels of branches below the prefix.")] = 3,
    top: Annotated[int, typer.Option(min=1, max=_MAX_CHILDREN, help="Branches shown per branch.")] = 8,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out branches with less than this part of the prefix's mass.")
    ] = 0.001,
    local: Annotated[bool, typer.Option("--local", help="Compute here, not on a trie worker.")] = False,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = None,
    as_json: AsJson = False,
) -> None:
    """Show the branches below a prefix, with the probability of each after a prompt."""
    shown_prefix, limits = from_text(under), Limits(depth, top, least)
    if ids and prompt is None:
        raise SettingsError("ids: there is no prompt; pass its token ids, such as `lmpool trie show 1,2,3 --ids`")
    prompt = None if prompt is None else read_prompt(prompt)
    if prompt is not None and not ids:
        hint_at_file(prompt)

    async def ask() -> tuple[str, list[int] | None, int, Branch]:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            tokens = None if prompt is None else await read_tokens(producer, prompt, ids, timeout)
            try:
                trie = await producer.trie()
            except UnknownVocabulary as error:
                raise UnknownVocabulary(
                    f"the model {producer.model.name!r} has no vocabulary in the pool, so its trie is unknown; the "
                    "log of its worker says why"
                ) from error

            async def masses(nodes: NDArray[np.int32]) -> NDArray[Any]:
                try:
                    return await trie.weight_sum(prompt=tokens, nodes=nodes, local=local)
                except (UnknownModel, NoWorker) as error:
                    if isinstance(error, NoWorker) and not isinstance(error.__cause__, UnknownModel):
                        raise  # A trie worker has ended, or the model is not served.
                    raise type(error)(
                        "no trie worker serves: start one with `lmpool trie-worker`, or the model's workers with "
                        "--with-trie, or compute here with --local"
                    ) from error

            reader = BranchReader(trie.structure, None if tokens is None else masses)
            return producer.model.name, tokens, trie.structure.n_tokens, await reader.read(shown_prefix, limits)

    name, tokens, n_tokens, root = run(ask())
    if as_json:
        say_json({"model": name, "prompt": tokens, "n_tokens": n_tokens, "tree": root.as_dict()})
        return
    title = f"{_quoted(root.prefix) if root.prefix else 'all tokens'}"
    count = f"{root.below} of {n_tokens} tokens"
    if tokens is None:
        print_tree(root, f"{title} · {name} · {count}", "of tokens")
        return
    listed = "the tokens " + ", ".join(map(str, tokens[:_MAX_IDS])) + ("…" if len(tokens) > _MAX_IDS else "")
    after = listed if ids else _quoted((prompt or "").encode("utf-8", "surrogateescape"))
    print_tree(
        root, f"{title} after {after} · {name} · {_percent(root.mass)} of the probability, {count}", "probability"
    )


class _Line(NamedTuple):
    """The texts of one line of the tree, and the style of its label and of its numbers."""

    depth: int
    label: str
    mass: str
    share: str
    tokens: str
    style: str = ""
    numbers: str = "cyan"


def print_tree(root: Branch, title: str, measure: str) -> None:
    """Print the branches below a prefix: cut to the width of a terminal, in full elsewhere.

    Args:
        root: the branch of the prefix.
        title: the first line.
        measure: the header of the masses.
    """
    head = _Line(0, "branch", measure, "of parent", "tokens", "dim", "dim")
    lines = list(_lines(root, 0))
    label_cells = max(_GUIDE_CELLS * line.depth + cell_len(line.label) for line in [head, *lines])
    mass_cells = max(cell_len(line.mass) for line in [head, *lines])

    def text(line: _Line) -> Text:
        made = Text(no_wrap=True, overflow="ellipsis")
        made.append(set_cell_size(line.label, label_cells - _GUIDE_CELLS * line.depth), line.style)
        made.append(f"  {line.mass:>{mass_cells}}  {line.share:>9}  ", line.numbers)
        made.append(line.tokens, "dim")
        made.rstrip()
        return made

    path: list[Tree] = []
    for line in lines:
        tree = Tree(text(line), guide_style="bright_black")
        if line.depth:
            path[line.depth - 1].children.append(tree)
        path[line.depth :] = [tree]
    Terminal().print(Group(Text(printable(title), style="bold"), text(head), path[0]))


def _percent(part: float) -> str:
    """A part as a percentage of three digits."""
    return f"{100 * part:#.3g}".rstrip(".") + "%"


def _quoted(data: bytes) -> str:
    """A byte string in quotation marks, cut to `_MAX_LABEL_CELLS`."""
    text = to_text(data)
    if cell_len(text) <= _MAX_LABEL_CELLS - 2:
        return f'"{text}"'
    return f'"{set_cell_size(text, _MAX_LABEL_CELLS - 3)}…"'


def _lines(branch: Branch, depth: int) -> Iterator[_Line]:
    """The lines of a branch and of everything below it, from top to bottom."""
    share = "" if branch.share is None else f"{branch.share:.1%}"
    label = _quoted(branch.edge or branch.prefix)
    if char := _completed(branch.prefix, branch.above):
        label = f"{label} = {_quoted(char)}"
    yield _Line(depth, label, _percent(branch.mass), share, _about_tokens(branch), "" if depth else "bold")
    for child in branch.children:
        yield from _lines(child, depth + 1)
    if branch.hidden:
        share = f"{branch.hidden_mass / branch.mass:.1%}" if branch.mass else ""
        label = f"… and {branch.hidden} more"
        yield _Line(depth + 1, label, _percent(branch.hidden_mass), share, "", "dim", "dim cyan")


def _completed(prefix: bytes, above: int) -> bytes:
    """The text from the character that the edge begins in the middle of; b"" for an edge that does not, or no text."""
    start = above
    while 0 < start < len(prefix) and prefix[start] & 0xC0 == 0x80:
        start -= 1
    try:
        return prefix[start:] if start < above and prefix[start:].decode() else b""
    except UnicodeDecodeError:
        return b""


def _about_tokens(branch: Branch) -> str:
    ids = ", ".join(map(str, branch.tokens[:_MAX_TOKENS]))
    if len(branch.tokens) > _MAX_TOKENS:
        ids += f" and {len(branch.tokens) - _MAX_TOKENS} more"
    if not branch.longer:
        return ids
    if not ids:
        return "" if branch.is_open else f"{branch.longer} tokens"
    alone = ""
    if branch.alone is not None:
        alone = f" alone: {_percent(branch.alone) if branch.alone > _MIN_ALONE * branch.mass else 'about 0%'}"
    return ids + alone + ("" if branch.is_open else f" and {branch.longer} longer")
