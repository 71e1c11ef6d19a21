"""Prints the most likely next words of some texts.

    python examples/next_words.py "The capital of France is" "Two plus two is"

The program sends all texts at once, and receives only the entries that it prints. Needs a pool, such as

    lmpool up .cache/models/smollm2-float32 --name smollm2

and the package tokenizers: pip install 'lmpool[text]'.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmpool.errors import LMPoolError
from lmpool.producer import Producer

TEXTS = ["The capital of France is", "Once upon a time there was a little", "The opposite of hot is"]


async def next_words(given: argparse.Namespace) -> Table:
    """A table of the texts, each with its most likely next words and their probabilities."""
    async with Producer(given.model, redis=given.redis) as producer:
        tokenizer = await producer.tokenizer()
        prompts = [tokenizer.encode(text) for text in given.texts]
        logprobs, tokens = await producer.batch_topk(prompts, given.top)  # Two arrays (n, k): float32 and int64.
    table = Table("text", "next word", "probability")
    for text, chances, ids in zip(given.texts, np.exp(logprobs), tokens.tolist(), strict=True):
        table.add_section()
        for rank, (token, chance) in enumerate(zip(ids, chances, strict=True)):
            table.add_row(Text("" if rank else text), Text(repr(tokenizer.decode([token]))), f"{chance:.1%}")
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="*", default=TEXTS, help="texts to continue")
    parser.add_argument("--top", type=int, default=5, help="how many words (default: 5)")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    Console().print(asyncio.run(next_words(parser.parse_args())))


if __name__ == "__main__":
    try:
        main()
    except LMPoolError as error:
        sys.exit(f"error: {error}")
