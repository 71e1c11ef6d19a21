"""The branches below a prefix and what they weigh, asked for level by level; their bytes as text."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.settings import shown
from lmpool.trie.trie import Trie

_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_READ = {written[1]: char for char, written in _SHORT.items()}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))", re.DOTALL)
# Where Python puts a byte that is not UTF-8 (PEP 383): 0xDC00 + the byte.
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
# With at most 256 children each this bounds what one level asks for, and the lines that people get.
_MOST_OPENED = 256

Masses = Callable[[NDArray[np.int32]], Awaitable[NDArray[Any]]]
"""The masses of k nodes, as floats of shape (k,)."""


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
        """For JSON: byte strings as text with escapes and, what needs no reading, as hex digits."""
        found = {
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
            found["children"] = [child.as_dict() for child in self.children]
            found["hidden"] = {"branches": self.hidden, "mass": self.hidden_mass}
        return found


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

        One question a level, for the children of what is drawn and nothing else.

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
            found = [child for branch in opened for child in branch.children if child.longer]
            opened = sorted(found, key=lambda branch: -branch.mass)[:_MOST_OPENED]
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
            rf"text: {shown(text, 120)} has {error}: escapes are \\ \" \n \r \t, \xe2 for a byte, and \u200b or "
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
