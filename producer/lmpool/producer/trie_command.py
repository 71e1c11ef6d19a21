"""The command `lmpool trie show`: what the tokens below a prefix weigh after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from lmpool.errors import NoWorker, SettingsError, UnknownModel, UnknownVocabulary
from lmpool.producer.byte_text import from_text
from lmpool.producer.commandline import (
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
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import load_tokenizer, parse_ids
from lmpool.producer.trie import PooledTrie
from lmpool.producer.trie_branches import Branch, Grower, Limits, TokensBelow
from lmpool.producer.trie_picture import TriePicture, percent, quoted
from lmpool.terminal import say, say_json

_MOST_DEPTH = 64
_MOST_CHILDREN = 256
_MOST_IDS = 10

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
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file too.")] = None,
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
    picture = TriePicture(found.root, _title(found, prompt, ids), "of tokens" if prompt is None else "probability")
    if svg is not None:
        _write(svg, picture.svg())
    if as_json:
        tree = found.root.as_dict()
        say_json({"model": found.model, "prompt": found.prompt, "n_tokens": found.tokens, "tree": tree})
    else:
        picture.show()


class _Asked:
    """Masses after a prompt, from the pool."""

    def __init__(self, trie: PooledTrie, prompt: list[int], local: bool) -> None:
        self._trie = trie
        self._prompt = prompt
        self._local = local

    async def masses(self, nodes: NDArray[np.int32]) -> NDArray[Any]:
        """See `lmpool.producer.trie_branches.Masses`."""
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
    what = quoted(root.prefix) if root.prefix else "all tokens"
    if found.prompt is None:
        return f"{what} · {found.model} · {root.below} of {found.tokens} tokens"
    after = _shortened(found.prompt) if are_ids else quoted((prompt or "").encode("utf-8", "surrogateescape"))
    mass = f"{percent(root.mass)} of the probability, {root.below} of {found.tokens} tokens"
    return f"{what} after {after} · {found.model} · {mass}"


def _shortened(ids: list[int]) -> str:
    return "the tokens " + ", ".join(map(str, ids[:_MOST_IDS])) + ("…" if len(ids) > _MOST_IDS else "")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"svg: {str(path)!r} cannot be written: {error.strerror or error}") from error
    say(f"the picture is in {path}", err=True)
