"""Teacher rows for distillation: what the model expects after every token of many texts, in a safetensors file.

    python examples/distill.py texts.txt teacher.safetensors --top 32

`texts.txt` has one text a line. The file gets one entry for each of all N tokens, text after text:

    tokens    int64 (N,)        the tokens of all texts, one after another
    starts    int64 (n + 1,)    text i is tokens[starts[i]:starts[i + 1]]
    logprobs  float32 (N, k)    of the k likeliest tokens after each one; with --full of all of them, (N, V)
    ids       int64 (N, k)      which these are; not there with --full

One forward a text, where the backend can (`producer.model.positions`). What is wanted goes to the file as it comes, so
that memory holds the tokens and some texts' answers, however many there are. Needs a pool, such as
`lmpool up .cache/models/smollm2-float32 --name smollm2`, and pip install 'lmpool[hf]'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from lmpool.aio import gather
from lmpool.errors import LMPoolError, SettingsError
from lmpool.producer import PositionOptions, Producer, TopK
from lmpool.producer.tokenizer import load_tokenizer

TEXTS_AT_ONCE = 16
DTYPES = {"I64": "<i8", "F32": "<f4"}


def create(path: Path, layout: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.memmap[Any, Any]]:
    """Create a safetensors file of tensors that are zero yet, and open these for writing.

    Args:
        path: the file, which must not exist.
        layout: dtype and shape of each tensor.
    """
    header: dict[str, dict[str, Any]] = {}
    size = 0
    for name, (dtype, shape) in layout.items():
        end = size + int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (size, end)}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin at a multiple of 8 bytes.
    start = 8 + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + size)
    return {
        name: np.memmap(path, DTYPES[dtype], "r+", start + header[name]["data_offsets"][0], shape)
        for name, (dtype, shape) in layout.items()
    }


async def distill(given: argparse.Namespace, texts: list[str]) -> int:
    """Write the file; returns N."""
    async with Producer(given.model, redis=given.redis, cache_bytes=0) as producer:
        tokenizer = load_tokenizer(producer.model)
        prompts = [tokenizer.encode(text) for text in texts]
        longest, limit = max(map(len, prompts)), producer.model.max_prompt_tokens
        if longest > limit:
            raise SettingsError(f"texts: one has {longest} tokens, and {limit} are the most that this model takes")
        starts = np.cumsum([0, *map(len, prompts)])
        total, width = int(starts[-1]), producer.model.vocab_size if given.full else given.top
        layout = {"tokens": ("I64", (total,)), "starts": ("I64", starts.shape), "logprobs": ("F32", (total, width))}
        file = create(given.output, layout if given.full else {**layout, "ids": ("I64", (total, width))})
        try:
            file["tokens"][:], file["starts"][:] = np.concatenate(prompts), starts
            with Progress(console=Console(stderr=True)) as progress:
                bar = progress.add_task("rows", total=total)
                wanted: PositionOptions = {"full": True} if given.full else {"top": given.top}

                async def fill(text: int) -> None:
                    async for start, values in producer.stream_positions(prompts[text], **wanted):
                        logprobs, *ids = values if isinstance(values, TopK) else (values,)
                        rows = slice(starts[text] + start, starts[text] + start + len(logprobs))
                        file["logprobs"][rows] = logprobs
                        for tokens in ids:
                            file["ids"][rows] = tokens
                        progress.advance(bar, len(logprobs))

                for first in range(0, len(prompts), TEXTS_AT_ONCE):
                    await gather([fill(text) for text in range(first, min(first + TEXTS_AT_ONCE, len(prompts)))])
        except BaseException:
            given.output.unlink()  # Half a file would look like a whole one.
            raise
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", type=Path, help="one text a line, in UTF-8")
    parser.add_argument("output", type=Path, help="the safetensors file, which must not exist")
    parser.add_argument("--top", type=int, default=32, help="how many tokens to keep of each row (default: 32)")
    parser.add_argument("--full", action="store_true", help="keep the whole rows")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    if given.output.exists():
        parser.error(f"{given.output} exists already, and is not replaced")
    texts = [line for line in given.texts.read_text("utf-8").splitlines() if line.strip()]
    if not texts:
        parser.error(f"{given.texts} has no text")
    total = asyncio.run(distill(given, texts))
    print(f"{total} rows of {len(texts)} texts in {given.output} ({given.output.stat().st_size:,} bytes)")


if __name__ == "__main__":
    try:
        main()
    except (LMPoolError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
