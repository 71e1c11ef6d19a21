"""Ray Data on a pool: each actor of `map_batches` has a producer, and adds the pool's results to its batches.

    python examples/ray_map.py texts.txt --actors 2

Each line of the file is a text. The program prints the number of tokens and the log-probability of each text, given its
first token. The pool computes; an actor only sends requests, so it needs no GPU and a small part of a CPU.

Needs a pool, such as `lmpool up .cache/models/smollm2-float32 --name smollm2`, and pip install 'ray[data]'. Actors on
other machines need the URL of the pool's server (--redis).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from lmpool.errors import LMPoolError
from lmpool.producer import SyncProducer


class Score:
    """An actor: adds `tokens` and `logprob` to a batch with the column `text`.

    Args:
        model: name of the model, or None for the only one.
        redis: URL of the pool's server, or None as for `Producer`.
    """

    def __init__(self, model: str | None = None, redis: str | None = None) -> None:
        # As `lmpool batch run`: do not keep results of texts, and let workers take interactive prompts first.
        options: dict[str, Any] = {"timeout": 600, "cache_bytes": 0, "keep_answers": False, "priority": "bulk"}
        self.producer = SyncProducer(model, redis=redis, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Send all texts of the batch to the pool together."""
        texts = [self.producer.encode(text) for text in batch["text"].tolist()]
        found = self.producer.batch_positions(texts, next_token=True)
        batch["tokens"] = np.array([len(text) for text in texts])
        sums = []
        for each in found:
            assert each.next_token is not None
            sums.append(each.next_token[:-1].sum())  # No token follows the last one, whose value is NaN.
        batch["logprob"] = np.array(sums)
        return batch


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", type=Path, help="a text file in UTF-8")
    parser.add_argument("--actors", type=int, default=2, help="number of actors (default: 2)")
    parser.add_argument("--batch", type=int, default=64, help="texts of a batch (default: 64)")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    # Connect now, so that a wrong model name fails here and not in an actor.
    SyncProducer(given.model, redis=given.redis).close()
    lines = [{"text": line} for line in given.texts.read_text("utf-8").splitlines() if line.strip()]
    scored = ray.data.from_items(lines).map_batches(
        Score,
        fn_constructor_args=(given.model, given.redis),
        compute=ray.data.ActorPoolStrategy(size=given.actors),
        batch_size=given.batch,
        num_cpus=0.1,
    )
    for row in scored.iter_rows():
        print(f"{row['tokens']:5d} {row['logprob']:9.2f} {row['text']}")


if __name__ == "__main__":
    try:
        main()
    except (LMPoolError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
