"""Computes the perplexity of a text file, in windows that overlap.

    python examples/perplexity.py README.md --window 512 --overlap 256

Every token except the first is scored once, after at least `--overlap` tokens if the file has them. Each window of the
text is one request, `producer.score(context, continuation)`, which returns only the scores. Needs a pool, such as

    lmpool up .cache/models/smollm2-float32 --name smollm2

and the package tokenizers: pip install 'lmpool[text]'. `lmpool perplexity FILE` does the same in one command.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lmpool.batch.cli import windows
from lmpool.errors import LMPoolError
from lmpool.producer import Producer

AT_ONCE = 8
"""Number of windows in one batch of requests, enough to keep workers busy."""


async def nats_of(given: argparse.Namespace, text: str) -> tuple[int, float]:
    """The number of scored tokens, and minus the sum of their log-probabilities."""
    async with Producer(given.model, redis=given.redis) as producer:
        ids = await producer.encode(text)
        pairs = list(windows(ids, given.window, given.overlap))
        tokens, nats = 0, 0.0
        for first in track(range(0, len(pairs), AT_ONCE), "scoring", console=Console(stderr=True)):
            contexts, continuations = zip(*pairs[first : first + AT_ONCE], strict=True)
            for scores in await producer.batch_score(contexts, continuations):
                tokens += len(scores)
                nats -= float(scores.sum(dtype="float64"))
    return tokens, nats


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a text in UTF-8")
    parser.add_argument("--window", type=int, default=512, help="tokens of one forward at most (default: 512)")
    parser.add_argument("--overlap", type=int, default=256, help="tokens that are read again (default: 256)")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    if not 0 < given.overlap < given.window:
        parser.error(f"--overlap {given.overlap} must be at least 1 and less than --window {given.window}")
    text = given.file.read_text("utf-8")
    tokens, nats = asyncio.run(nats_of(given, text))
    if not tokens:
        parser.error(f"{given.file} has less than two tokens: there is nothing to score")
    print(f"tokens         {tokens}")
    print(f"nats per token {nats / tokens:.4f}")
    print(f"perplexity     {math.exp(nats / tokens):.3f}")
    print(f"bits per byte  {nats / math.log(2) / len(text.encode()):.4f}")


if __name__ == "__main__":
    try:
        main()
    except (LMPoolError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
