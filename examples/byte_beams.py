"""Byte-level beam search with genlm-bytes, which turns a model of tokens into a model of bytes.

    python examples/byte_beams.py "The capital of Fra" --bytes 16

A text may end in the middle of a word, because bytes have no token boundaries. The beam keeps several ways to cut the
text into tokens, and requests the rows of all these ways at once.

Needs `pip install genlm-bytes 'lmpool[genlm]'` and a pool: `lmpool up .cache/models/smollm2-float32 --name smollm2`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import warnings

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmpool.errors import LMPoolError

TEXT = "The capital of Fra"
EOS = 257
"""The number that stands for the end of the text in genlm-bytes, next to the 256 byte values."""


async def search(given: argparse.Namespace) -> tuple[bytes, Table]:
    """Extend the text by the most likely bytes; returns the text, and a table of alternatives to each byte."""
    from genlm.bytes import BeamParams, ByteBeamState

    from lmpool.producer.genlm import PooledLM

    warnings.filterwarnings("ignore", "Sparse", UserWarning)  # Hide torch's warnings about sparse matrices.
    with PooledLM.from_name(given.model, redis=given.redis) as model:
        end = model.byte_vocab[model.tokenizer.eos_token_id]
        params = BeamParams(K=given.beam, prune_threshold=0.01, eos_byte_strings=[bytes(end)])
        beam = await ByteBeamState.initial(model, params)
        text = given.text.encode()
        beam = await beam.prefill(text)
        table = Table("text so far", "beam", "likeliest next bytes")
        for _ in range(given.bytes):
            logprobs = (await beam.logp_next()).ps  # Entries for 256 bytes, the end of a token, the end of the text.
            best = np.argsort(logprobs)[::-1][:3]
            shown = "  ".join(f"{name_of(int(byte))} {np.exp(logprobs[byte]):.0%}" for byte in best)
            table.add_row(Text("…" + repr(text[-24:])[2:-1]), str(len(beam)), Text(shown))
            if best[0] == EOS:
                break
            text += bytes([best[0]])
            beam = await (beam.prune() << int(best[0]))
        await beam.cleanup()
    return text, table


def name_of(byte: int) -> str:
    """A byte as text."""
    return "the end" if byte == EOS else repr(bytes([byte]))[1:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="?", default=TEXT, help="the text to continue")
    parser.add_argument("--bytes", type=int, default=16, help="how many bytes to add (default: 16)")
    parser.add_argument("--beam", type=int, default=5, help="ways to cut the text that are kept (default: 5)")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    text, table = asyncio.run(search(parser.parse_args()))
    Console().print(table)
    print(text.decode("utf-8", "replace"))


if __name__ == "__main__":
    try:
        main()
    except LMPoolError as error:
        sys.exit(f"error: {error}")
    except ImportError as error:
        sys.exit(f"error: {error}: pip install genlm-bytes 'lmpool[genlm]'")
