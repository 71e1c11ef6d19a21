"""Branches of a trie as a tree for the terminal, and as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from lmpool.printable import printable
from lmpool.producer.byte_text import to_text
from lmpool.producer.trie_branches import Branch
from lmpool.terminal import Terminal

_GUIDE_CELLS = 4
_MOST_LABEL_CELLS = 40
_MOST_IDS = 3
_BAR_CELLS = 10
# Below this part of its branch, what the tokens at its end weigh is rounding: it is a difference of float32 sums.
_ALONE_FROM = 1e-5
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")

# As that of rich, which has every viewer fetch a font from the net.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
        font-size: {char_height}px;
        line-height: {line_height}px;
        white-space: pre;
    }}
    .{unique_id}-title {{ font: bold 18px sans-serif; }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
    </g>
</svg>
"""


class Line(NamedTuple):
    """What one line says, besides the guides of the tree.

    Attributes:
        depth: level of the branch.
        label: its bytes.
        mass: its mass.
        share: its part of the branch above.
        bar: the mass as a bar.
        tokens: what there is to say of its tokens.
    """

    depth: int
    label: str
    mass: str
    share: str
    bar: str
    tokens: str


class TriePicture:
    """A picture of the branches below a prefix.

    Args:
        root: the branch of the prefix.
        title: what is shown.
        measure: what masses are, in a word.
    """

    def __init__(self, root: Branch, title: str, measure: str) -> None:
        self._root = root
        title = printable(title)
        head = Line(0, "branch", measure, "of parent", "", "tokens")
        lines = [head, *_lines(root, root.mass, 0)]
        self._label_cells = max(_GUIDE_CELLS * line.depth + cell_len(line.label) for line in lines)
        self._mass_cells = max(cell_len(line.mass) for line in lines)
        self._body = Group(Text(title, style="bold"), self._text(head, "dim", "dim"), self._tree(root, 0))
        texts = [Text(title), *(self._text(line) for line in lines)]
        self._width = max(
            text.cell_len + _GUIDE_CELLS * depth
            for text, depth in zip(texts, [0, *(line.depth for line in lines)], strict=True)
        )

    def show(self) -> None:
        """Print it: to a terminal cut to its width, elsewhere as wide as it is."""
        Terminal().print(self._body)

    def svg(self) -> str:
        """It as an SVG document that needs no other file."""
        console = Terminal(
            record=True, file=io.StringIO(), width=self._width, force_terminal=True, color_system="truecolor"
        )
        console.print(self._body)
        return console.export_svg(title="lmpool trie show", code_format=_SVG)

    def _tree(self, branch: Branch, depth: int) -> Tree:
        line = _line(branch, self._root.mass, depth)
        tree = Tree(self._text(line, "" if depth else "bold"), guide_style="bright_black")
        for child in branch.children:
            tree.children.append(self._tree(child, depth + 1))
        if branch.hidden:
            tree.add(self._text(_rest(branch, self._root.mass, depth + 1), "dim", "dim cyan"))
        return tree

    def _text(self, line: Line, style: str = "", numbers: str = "cyan") -> Text:
        label = set_cell_size(line.label, self._label_cells - _GUIDE_CELLS * line.depth)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(label, style)
        text.append(f"  {line.mass:>{self._mass_cells}}  {line.share:>9}  ", numbers)
        text.append(f"{line.bar:<{_BAR_CELLS}}  ", "blue")
        text.append(line.tokens, "dim")
        text.rstrip()
        return text


def percent(part: float) -> str:
    """A part as people read it, small ones too."""
    return f"{100 * part:#.3g}".rstrip(".") + "%"


def quoted(data: bytes, most: int = _MOST_LABEL_CELLS) -> str:
    """A byte string in quotation marks, cut when it takes more than `most` cells."""
    text = to_text(data)
    return f'"{text}"' if cell_len(text) <= most - 2 else f'"{set_cell_size(text, most - 3)}…"'


def _lines(branch: Branch, whole: float, depth: int) -> Iterator[Line]:
    yield _line(branch, whole, depth)
    for child in branch.children:
        yield from _lines(child, whole, depth + 1)
    if branch.hidden:
        yield _rest(branch, whole, depth + 1)


def _line(branch: Branch, whole: float, depth: int) -> Line:
    share = "" if branch.share is None else f"{branch.share:.1%}"
    label = quoted(branch.edge or branch.prefix)
    if char := _completed(branch.prefix, branch.above):
        label = f"{label} = {quoted(char)}"
    return Line(depth, label, percent(branch.mass), share, _bar(branch.mass, whole), _about_tokens(branch))


def _rest(branch: Branch, whole: float, depth: int) -> Line:
    share = f"{branch.hidden_mass / branch.mass:.1%}" if branch.mass else ""
    bar = _bar(branch.hidden_mass, whole)
    return Line(depth, f"… and {branch.hidden} more", percent(branch.hidden_mass), share, bar, "")


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
    ids = ", ".join(map(str, branch.tokens[:_MOST_IDS]))
    if len(branch.tokens) > _MOST_IDS:
        ids += f" and {len(branch.tokens) - _MOST_IDS} more"
    if not branch.longer:
        return ids
    if not ids:
        return "" if branch.is_open else f"{branch.longer} tokens"
    alone = "" if branch.alone is None else f" alone: {_alone(branch.alone, branch.mass)}"
    return ids + alone + ("" if branch.is_open else f" and {branch.longer} longer")


def _alone(alone: float, mass: float) -> str:
    return percent(alone) if alone > _ALONE_FROM * mass else "about 0%"


def _bar(mass: float, whole: float) -> str:
    eighths = round(_BAR_CELLS * 8 * min(1.0, mass / whole)) if whole else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
