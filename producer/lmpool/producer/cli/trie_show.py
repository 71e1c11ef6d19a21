"""The command `lmpool trie show`: what the tokens below a prefix weigh after a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from lmpool.errors import NoWorker, SettingsError, UnknownModel, UnknownVocabulary
from lmpool.printable import printable
from lmpool.producer.cli.options import (
    AreIds,
    AsJson,
    ModelName,
    Prefix,
    RedisUrl,
    Timeout,
    Waits,
    hint_at_file,
    run,
    when_absent,
)
from lmpool.producer.cli.trie_branches import Branch, Grower, Limits, TokensBelow, from_text, to_text
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import load_tokenizer, parse_ids
from lmpool.producer.trie import PooledTrie
from lmpool.terminal import Terminal, say_json

_MOST_DEPTH = 64
_MOST_CHILDREN = 256
_MOST_IDS = 10
_MOST_TOKENS = 3
_GUIDE_CELLS = 4
_MOST_LABEL_CELLS = 40
# Below this part of its branch, what the tokens at its end weigh is rounding: it is a difference of float32 sums.
_ALONE_FROM = 1e-5

trie_app = typer.Typer(name="trie", help="The prefix tree over the tokens of a served model.", no_args_is_help=True)


class Found(NamedTuple):
    """What there is to show.

    Attributes:
        model: name of the model.
        prompt: its token ids; None without one.
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
    text: Annotated[
        str,
        typer.Option(
            help=r"The prefix whose branches are shown, such as ' the'; all tokens without it. \xe2 stands for a byte, "
            r"\n for a line break, \\ for a backslash."
        ),
    ] = "",
    ids: AreIds = False,
    depth: Annotated[int, typer.Option(min=1, max=_MOST_DEPTH, help="Levels of branches below the prefix.")] = 3,
    top: Annotated[int, typer.Option(min=1, max=_MOST_CHILDREN, help="How many branches of each to show.")] = 8,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out branches with less than this part of the prefix's mass.")
    ] = 0.001,
    local: Annotated[bool, typer.Option("--local", help="Compute here instead of asking a trie worker.")] = False,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = True,
    as_json: AsJson = False,
) -> None:
    """Show the branches below a prefix, with the probability of each after a prompt."""
    wanted, limits = from_text(text), Limits(depth, top, least)
    if ids and prompt is None:
        raise SettingsError("ids: there is no prompt; pass its token ids, such as `lmpool trie show 1,2,3 --ids`")

    if prompt is not None and not ids:
        hint_at_file(prompt)

    async def ask() -> Found:
        async with Producer(
            model, redis=redis, prefix=prefix, timeout=timeout, when_absent=when_absent(waits)
        ) as producer:
            tokens = None if prompt is None else _tokens(producer, prompt, ids)
            trie = await _trie(producer)
            below = TokensBelow(trie.structure)
            masses = below.shares if tokens is None else _Asked(trie, tokens, local).masses
            root = await Grower(trie.structure, below, masses).grow(wanted, limits)
            return Found(producer.model.name, tokens, trie.structure.n_tokens, root)

    found = run(ask())
    if as_json:
        tree = found.root.as_dict()
        say_json({"model": found.model, "prompt": found.prompt, "n_tokens": found.tokens, "tree": tree})
    else:
        print_tree(found.root, _title(found, prompt, ids), "of tokens" if prompt is None else "probability")


class _Asked:
    """Masses after a prompt, from the pool."""

    def __init__(self, trie: PooledTrie, prompt: list[int], local: bool) -> None:
        self._trie = trie
        self._prompt = prompt
        self._local = local

    async def masses(self, nodes: NDArray[np.int32]) -> NDArray[Any]:
        """See `lmpool.producer.cli.trie_branches.Masses`."""
        try:
            return await self._trie.weight_sum(prompt=self._prompt, nodes=nodes, local=self._local)
        except (UnknownModel, NoWorker) as error:
            if isinstance(error, NoWorker) and not isinstance(error.__cause__, UnknownModel):
                raise  # There was one, or it is the model that is not served.
            raise type(error)(
                "no trie worker serves: start one with `lmpool trie-worker`, or the model's workers with "
                "--with-trie, or compute here with --local"
            ) from error


def _tokens(producer: Producer, prompt: str, are_ids: bool) -> list[int]:
    return parse_ids(prompt) if are_ids else load_tokenizer(producer.model).encode(prompt)


async def _trie(producer: Producer) -> PooledTrie:
    try:
        return await producer.trie()
    except UnknownVocabulary as error:
        raise UnknownVocabulary(
            f"the model {producer.model.name!r} publishes no vocabulary, so there is no trie to show; the log of its "
            "worker says why"
        ) from error


def _title(found: Found, prompt: str | None, are_ids: bool) -> str:
    root = found.root
    what = _quoted(root.prefix) if root.prefix else "all tokens"
    if found.prompt is None:
        return f"{what} · {found.model} · {root.below} of {found.tokens} tokens"
    after = _shortened(found.prompt) if are_ids else _quoted((prompt or "").encode("utf-8", "surrogateescape"))
    mass = f"{_percent(root.mass)} of the probability, {root.below} of {found.tokens} tokens"
    return f"{what} after {after} · {found.model} · {mass}"


def _shortened(ids: list[int]) -> str:
    return "the tokens " + ", ".join(map(str, ids[:_MOST_IDS])) + ("…" if len(ids) > _MOST_IDS else "")


class _Line(NamedTuple):
    """What one line says, besides the guides of the tree.

    Attributes:
        depth: level of the branch.
        label: its bytes.
        mass: its mass.
        share: its part of the branch above.
        tokens: what there is to say of its tokens.
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
        measure: what masses are, in a word.
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


def _quoted(data: bytes, most: int = _MOST_LABEL_CELLS) -> str:
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
    ids = ", ".join(map(str, branch.tokens[:_MOST_TOKENS]))
    if len(branch.tokens) > _MOST_TOKENS:
        ids += f" and {len(branch.tokens) - _MOST_TOKENS} more"
    if not branch.longer:
        return ids
    if not ids:
        return "" if branch.is_open else f"{branch.longer} tokens"
    alone = "" if branch.alone is None else f" alone: {_alone(branch.alone, branch.mass)}"
    return ids + alone + ("" if branch.is_open else f" and {branch.longer} longer")


def _alone(alone: float, mass: float) -> str:
    return _percent(alone) if alone > _ALONE_FROM * mass else "about 0%"
