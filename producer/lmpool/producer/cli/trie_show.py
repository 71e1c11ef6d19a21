"""`lmpool trie show`: the branches below a prefix and their probabilities after a prompt, asked for level by level.

`Grower` asks for the masses of nodes and makes a tree of `Branch`es, `show` is the command, and `print_tree` draws it.
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
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import read_tokens
from lmpool.producer.trie import PooledTrie
from lmpool.settings import shown
from lmpool.trie.trie import Trie

trie_app = typer.Typer(name="trie", help="The token trie (prefix tree) of a served model.", no_args_is_help=True)

Masses = Callable[[NDArray[np.int32]], Awaitable[NDArray[Any]]]
"""The masses of k nodes, as floats of shape (k,)."""

_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_READ = {written[1]: char for char, written in _SHORT.items()}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))", re.DOTALL)
# Where Python puts a byte that is not UTF-8 (PEP 383): 0xDC00 + the byte.
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
# With at most 256 children each this bounds what one level asks for, and the lines that people get.
_MAX_OPENED = 256

_MAX_DEPTH = 64
_MAX_CHILDREN = 256
_MAX_IDS = 10
_MAX_TOKENS = 3
_GUIDE_CELLS = 4
_MAX_LABEL_CELLS = 40
# Below this part of its branch, the weight of the tokens at its end is rounding: it is a difference of float32 sums.
_ALONE_FROM = 1e-5


class Limits(NamedTuple):
    """How much of a subtree is wanted.

    Attributes:
        depth: levels of branches below the prefix.
        top: branches of one node; the heaviest.
        least: least mass of a branch, as a part of the prefix's.
    """

    depth: int
    top: int
    least: float


@dataclass(slots=True)
class Branch:
    """A branch: all tokens that begin with a prefix.

    A chain of nodes without a fork is one branch, which goes on to where a token ends or the next fork is.

    Attributes:
        node: the node that the branch ends at.
        prefix: the bytes from the root of the trie to there.
        above: length of the prefix of the branch above.
        tokens: ids of the tokens that are the prefix itself.
        below: number of all tokens of the branch, those of `tokens` among them.
        mass: sum of the weights of all its tokens.
        share: its part of the mass of the branch above; None when that has none, and at the top.
        alone: sum of the weights of `tokens`, to within some 1e-6 of the mass, for it is the difference to the sum of
            the branches; None when not known.
        children: its heaviest branches, the heaviest first.
        hidden: number of the other ones; 0 too when none is shown, except at the top.
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
        """The bytes from the branch above to this one."""
        return self.prefix[self.above :]

    @property
    def longer(self) -> int:
        """Number of the tokens that go on after the prefix."""
        return self.below - len(self.tokens)

    @property
    def is_open(self) -> bool:
        """Whether its branches are shown."""
        return bool(self.children or self.hidden)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: byte strings as text with escapes, and as hex digits, which need no reading of escapes."""
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


class TokensBelow:
    """Which tokens end at a node, and how many below it.

    Args:
        trie: the trie.
    """

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._order = np.argsort(trie.leaf, kind="stable")
        self._nodes = trie.leaf[self._order]

    def at(self, node: int) -> list[int]:
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
        """The part of all tokens that end at each node or below it (`Masses`)."""
        return np.array([self.count(int(node)) for node in nodes]) / self._trie.n_tokens


class Grower:
    """Finds the branches below prefixes of one trie.

    Args:
        trie: the trie.
        tokens: where its tokens are.
        masses: tells the masses of nodes.
    """

    def __init__(self, trie: Trie, tokens: TokensBelow, masses: Masses) -> None:
        self._trie = trie
        self._tokens = tokens
        self._masses = masses

    async def grow(self, prefix: bytes, limits: Limits) -> Branch:
        """The branch of a prefix with the branches below it.

        It asks once for each level, for the children of the branches that are drawn and nothing else.

        Args:
            prefix: any prefix of a token; b"" for the whole trie.
            limits: how much.

        Raises:
            UnknownNode: no token begins with the prefix.
        """
        root = self._branch(self._trie.node(prefix), len(prefix))
        opened = [root]
        for _ in range(limits.depth):
            heads = [self._trie.children(branch.node) for branch in opened]
            asked = np.concatenate([np.array([root.node], np.int32), *heads])
            masses = (await self._masses(asked)).astype(np.float64)
            root.mass = float(masses[0])
            at = 1
            for branch, nodes in zip(opened, heads, strict=True):
                self._open(branch, nodes, masses[at : at + nodes.size], limits.top, limits.least * root.mass)
                at += nodes.size
            longer = [child for branch in opened for child in branch.children if child.longer]
            opened = sorted(longer, key=lambda branch: -branch.mass)[:_MAX_OPENED]
            if not opened:
                break
        return root

    def _branch(self, node: int, above: int) -> Branch:
        return Branch(node, self._trie.prefix(node), above, self._tokens.at(node), self._tokens.count(node))

    def _open(
        self, branch: Branch, nodes: NDArray[np.int32], masses: NDArray[np.float64], most: int, least: float
    ) -> None:
        """Give a branch its branches, which begin at the children `nodes` of its node."""
        in_all = float(masses.sum())
        branch.alone = max(0.0, branch.mass - in_all) if branch.tokens else 0.0
        order = np.argsort(-masses, kind="stable")[:most]
        kept = order[masses[order] >= least]
        for index in kept:
            child = self._branch(self._end(int(nodes[index])), len(branch.prefix))
            child.mass = float(masses[index])
            child.share = child.mass / branch.mass if branch.mass else None
            child.alone = None if child.longer else child.mass
            branch.children.append(child)
        # A branch of which nothing is shown stays closed: that there are longer tokens is said anyway.
        if kept.size or branch.edge == b"":
            branch.hidden = nodes.size - kept.size
            branch.hidden_mass = max(0.0, in_all - float(masses[kept].sum())) if branch.hidden else 0.0

    def _end(self, node: int) -> int:
        """Where a branch ends that begins at a node: where a token ends or the next fork is."""
        while not self._tokens.at(node):
            children = self._trie.children(node)
            if children.size != 1:
                break
            node = int(children[0])
        return node


def to_text(data: bytes) -> str:
    r"""A byte string as people read and type it: text, with escapes for what is not text.

    Printable UTF-8 stands for itself. A quotation mark and a backslash have a backslash before them; `\n`, `\r` and
    `\t` are what they are everywhere; `\xe2` is one byte, `\u200b` and `\U000e0001` are the UTF-8 of a character.
    """
    return "".join(map(_written, data.decode("utf-8", "surrogateescape")))


def from_text(text: str) -> bytes:
    """The byte string that a text stands for: what `to_text` writes is read back.

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


class View(NamedTuple):
    """A tree, and what it is of.

    Attributes:
        model: name of the model.
        prompt: the prompt's token ids; None without one.
        tokens: V.
        root: the branch of the prefix.
    """

    model: str
    prompt: list[int] | None
    tokens: int
    root: Branch


@trie_app.callback()
def _several() -> None:
    """Without this, typer would make `trie show` of one command just `trie`."""


@trie_app.command()
def show(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The prompt: text, or token ids such as 1,2,3 with --ids. Without one, branches show which part of "
            "the tokens they have.",
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
    top: Annotated[int, typer.Option(min=1, max=_MAX_CHILDREN, help="How many branches of each to show.")] = 8,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out branches with less than this part of the prefix's mass.")
    ] = 0.001,
    local: Annotated[bool, typer.Option("--local", help="Compute here instead of asking a trie worker.")] = False,
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

    async def ask() -> View:
        async with asking(model, redis, prefix, waits, timeout=timeout) as producer:
            tokens = None if prompt is None else await read_tokens(producer, prompt, ids, timeout)
            trie = await _trie(producer)
            below = TokensBelow(trie.structure)
            masses = below.shares if tokens is None else _PoolMasses(trie, tokens, local).masses
            root = await Grower(trie.structure, below, masses).grow(shown_prefix, limits)
            return View(producer.model.name, tokens, trie.structure.n_tokens, root)

    view = run(ask())
    if as_json:
        tree = view.root.as_dict()
        say_json({"model": view.model, "prompt": view.prompt, "n_tokens": view.tokens, "tree": tree})
    else:
        print_tree(view.root, _title(view, prompt, ids), "of tokens" if prompt is None else "probability")


class _PoolMasses:
    """Masses after a prompt: probabilities, from the pool."""

    def __init__(self, trie: PooledTrie, prompt: list[int], local: bool) -> None:
        self._trie = trie
        self._prompt = prompt
        self._local = local

    async def masses(self, nodes: NDArray[np.int32]) -> NDArray[Any]:
        """See `lmpool.producer.cli.trie_show.Masses`."""
        try:
            return await self._trie.weight_sum(prompt=self._prompt, nodes=nodes, local=self._local)
        except (UnknownModel, NoWorker) as error:
            if isinstance(error, NoWorker) and not isinstance(error.__cause__, UnknownModel):
                raise  # There was one, or it is the model that is not served.
            raise type(error)(
                "no trie worker serves: start one with `lmpool trie-worker`, or the model's workers with "
                "--with-trie, or compute here with --local"
            ) from error


async def _trie(producer: Producer) -> PooledTrie:
    try:
        return await producer.trie()
    except UnknownVocabulary as error:
        raise UnknownVocabulary(
            f"the model {producer.model.name!r} publishes no vocabulary, so there is no trie to show; the log of its "
            "worker says why"
        ) from error


def _title(view: View, prompt: str | None, are_ids: bool) -> str:
    root = view.root
    text = _quoted(root.prefix) if root.prefix else "all tokens"
    if view.prompt is None:
        return f"{text} · {view.model} · {root.below} of {view.tokens} tokens"
    after = _shortened(view.prompt) if are_ids else _quoted((prompt or "").encode("utf-8", "surrogateescape"))
    mass = f"{_percent(root.mass)} of the probability, {root.below} of {view.tokens} tokens"
    return f"{text} after {after} · {view.model} · {mass}"


def _shortened(ids: list[int]) -> str:
    return "the tokens " + ", ".join(map(str, ids[:_MAX_IDS])) + ("…" if len(ids) > _MAX_IDS else "")


class _Line(NamedTuple):
    """The texts of one line, besides the guides of the tree.

    Attributes:
        depth: level of the branch.
        label: its bytes.
        mass: its mass.
        share: its part of the branch above.
        tokens: the ids or the number of its tokens.
    """

    depth: int
    label: str
    mass: str
    share: str
    tokens: str


def print_tree(root: Branch, title: str, measure: str) -> None:
    """Print the branches below a prefix: to a terminal cut to its width, elsewhere as wide as they are.

    Args:
        root: the branch of the prefix.
        title: what is shown.
        measure: the header of the masses.
    """
    head = _Line(0, "branch", measure, "of parent", "tokens")
    lines = [head, *_lines(root, 0)]
    label_cells = max(_GUIDE_CELLS * line.depth + cell_len(line.label) for line in lines)
    mass_cells = max(cell_len(line.mass) for line in lines)

    def text(line: _Line, style: str = "", numbers: str = "cyan") -> Text:
        made = Text(no_wrap=True, overflow="ellipsis")
        made.append(set_cell_size(line.label, label_cells - _GUIDE_CELLS * line.depth), style)
        made.append(f"  {line.mass:>{mass_cells}}  {line.share:>9}  ", numbers)
        made.append(line.tokens, "dim")
        made.rstrip()
        return made

    def tree(branch: Branch, depth: int) -> Tree:
        made = Tree(text(_line(branch, depth), "" if depth else "bold"), guide_style="bright_black")
        made.children += [tree(child, depth + 1) for child in branch.children]
        if branch.hidden:
            made.add(text(_rest(branch, depth + 1), "dim", "dim cyan"))
        return made

    Terminal().print(Group(Text(printable(title), style="bold"), text(head, "dim", "dim"), tree(root, 0)))


def _percent(part: float) -> str:
    """A part as people read it, small ones too."""
    return f"{100 * part:#.3g}".rstrip(".") + "%"


def _quoted(data: bytes, most: int = _MAX_LABEL_CELLS) -> str:
    """A byte string in quotation marks, cut when it takes more than `most` cells."""
    text = to_text(data)
    return f'"{text}"' if cell_len(text) <= most - 2 else f'"{set_cell_size(text, most - 3)}…"'


def _lines(branch: Branch, depth: int) -> Iterator[_Line]:
    yield _line(branch, depth)
    for child in branch.children:
        yield from _lines(child, depth + 1)
    if branch.hidden:
        yield _rest(branch, depth + 1)


def _line(branch: Branch, depth: int) -> _Line:
    share = "" if branch.share is None else f"{branch.share:.1%}"
    label = _quoted(branch.edge or branch.prefix)
    if char := _completed(branch.prefix, branch.above):
        label = f"{label} = {_quoted(char)}"
    return _Line(depth, label, _percent(branch.mass), share, _about_tokens(branch))


def _rest(branch: Branch, depth: int) -> _Line:
    share = f"{branch.hidden_mass / branch.mass:.1%}" if branch.mass else ""
    return _Line(depth, f"… and {branch.hidden} more", _percent(branch.hidden_mass), share, "")


def _completed(prefix: bytes, above: int) -> bytes:
    """The character that an edge goes on with in its middle, with what follows; b"" when it does not or is no text."""
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
    alone = "" if branch.alone is None else f" alone: {_alone(branch.alone, branch.mass)}"
    return ids + alone + ("" if branch.is_open else f" and {branch.longer} longer")


def _alone(alone: float, mass: float) -> str:
    return _percent(alone) if alone > _ALONE_FROM * mass else "about 0%"
