"""Ray Data on a pool: each actor of `map_batches` has a producer and adds log-probabilities to its batches.

    python examples/ray_map.py texts.txt --out scored --actors 2

Reads a text file with one text per line, and writes Parquet files with the text, its number of tokens and its mean
log-probability per token. The pool computes; the actors only send requests, so they need no GPU, and half a CPU each.

Needs a pool, such as `lmpool up .cache/models/smollm2-float32 --name smollm2`, and pip install 'ray[data]'. Actors on
other machines need the URL of the pool's server (`--redis` or LMPOOL_REDIS_URL).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

from lmpool.errors import LMPoolError
from lmpool.producer import Producer


class Score:
    """An actor of Ray Data: a callable with a producer, which opens with the first batch."""

    def __init__(self, model: str | None, redis: str | None) -> None:
        self.producer = Producer(model, redis=redis)
