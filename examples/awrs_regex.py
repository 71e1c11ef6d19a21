"""Adaptive weighted rejection sampling (AWRS): draws continuations that match a regular expression, each with a weight.

    python examples/awrs_regex.py "The meeting is on" " (Mon|Tues|Fri)day at [0-9]{1,2} (am|pm)\\."

Each step draws a token from the model's row and keeps it if the expression allows it, so only a few tokens of the
vocabulary are checked. The weights estimate how often the model alone would write a matching text.

Needs `pip install genlm-control 'lmpool[genlm]'` and a pool: `lmpool up .cache/models/smollm2-float32 --name smollm2`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmpool.errors import LMPoolError

PROMPT = "The meeting is on"
PATTERN = r" (Mon|Tues|Wednes|Thurs|Fri)day at [1-9][0-2]?:[0-5][0-9] (am|pm)\."


async def sample(given: argparse.Namespace) -> Any:
    """Draw the samples; returns a `Sequences` of genlm-control."""
    from genlm.control import AWRS, BoolFSA, PromptedLLM

    from lmpool.producer.genlm import PooledLM

    with PooledLM.from_name(given.model, redis=given.redis) as model:
        language = PromptedLLM(model, prompt_ids=model.tokenizer.encode(given.prompt))
        form = BoolFSA.from_regex(given.pattern).coerce(language, f=b"".join)
        # With a threshold of 0 there is no resampling: the samples are independent; no sample is dropped or copied.
        return await AWRS(language, form, seed=given.seed).smc(
            given.samples, ess_threshold=0.0, max_tokens=given.tokens
        )


def text_of(tokens: Sequence[Any]) -> str:
    """The text of a sample, whose last token is the end of the text."""
    return b"".join(token for token in tokens if isinstance(token, bytes)).decode("utf-8", "replace")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="beginning of the text")
    parser.add_argument("pattern", nargs="?", default=PATTERN, help="regular expression for the continuation")
    parser.add_argument("--samples", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a sample at most (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: 1)")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    drawn = asyncio.run(sample(given))
    table = Table("sample", "log-weight")
    for tokens, log_weight in sorted(drawn, key=lambda weighted: -weighted[1]):
        table.add_row(Text(repr(text_of(tokens))), f"{log_weight:.2f}")
    console = Console()
    console.print(table)
    console.print(f"log-probability that the model by itself writes a match and ends there: about {drawn.log_ml:.1f}")


if __name__ == "__main__":
    try:
        main()
    except LMPoolError as error:
        sys.exit(f"error: {error}")
    except ImportError as error:
        sys.exit(f"error: {error}: pip install genlm-control 'lmpool[genlm]'")
