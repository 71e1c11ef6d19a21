"""Sequential Monte Carlo (SMC) in two processes on one model: a language model writes JSON of a given form.

    python examples/smc_json.py --particles 16

Each process runs SMC with genlm-control, under a regular expression that describes the JSON. Both processes start from
the same prompt and often write the same prefixes; each process gets rows that the other has requested.

Needs `pip install genlm-control 'lmpool[genlm]'` and a pool: `lmpool up .cache/models/smollm2-float32 --name smollm2`
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import defaultdict
from multiprocessing import get_context
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmpool.errors import LMPoolError
from lmpool.producer import SyncProducer

PROMPT = 'Large cities in JSON:\n{"city": "London", "millions": 9}\n{"city": "Berlin", "millions": 4}\n'
PATTERN = r'\{"city": "[A-Z][a-z]{2,11}", "millions": [1-9][0-9]?\}'


class Inference(NamedTuple):
    """The result of one process.

    Attributes:
        particles: each text with its share of the total weight.
        asked: number of requested rows.
        prompts: the prompts of these rows; particles with the same text so far have the same prompt.
    """

    particles: list[tuple[str, float]]
    asked: int
    prompts: set[tuple[int, ...]]


def infer(given: argparse.Namespace, seed: int) -> Inference:
    """Run SMC in this process; each process calls this function."""
    from genlm.control import AWRS, BoolFSA, PromptedLLM

    from lmpool.producer.genlm import PooledLM

    asked: list[tuple[int, ...]] = []

    class Noting(PooledLM):
        """Records the prompts that genlm-control requests, a batch for each step of the particles."""

        async def batch_next_token_logprobs(self, token_ids_list: Any, lora_name: str | None = None) -> Any:
            asked.extend(map(tuple, token_ids_list))
            return await super().batch_next_token_logprobs(token_ids_list, lora_name)

    with Noting.from_name(given.model, redis=given.redis) as model:
        language = PromptedLLM(model, prompt_ids=model.tokenizer.encode(given.prompt))
        form = BoolFSA.from_regex(given.pattern).coerce(language, f=b"".join)
        sampler = AWRS(language, form, seed=seed)
        sequences = asyncio.run(sampler.smc(n_particles=given.particles, ess_threshold=0.5, max_tokens=given.tokens))
    texts = [b"".join(token for token in tokens if isinstance(token, bytes)).decode() for tokens, _ in sequences]
    return Inference(list(zip(texts, map(float, sequences.normalized_weights), strict=True)), len(asked), set(asked))


def show(results: list[Inference]) -> None:
    """Print the particles of all processes, and how many prompts they shared."""
    table = Table("process", "particles", "what they wrote", "weight")
    for number, result in enumerate(results, 1):
        table.add_section()
        weights: defaultdict[str, list[float]] = defaultdict(list)
        for text, weight in result.particles:
            weights[text].append(weight)
        for text, equal in sorted(weights.items(), key=lambda item: -sum(item[1])):
            table.add_row(str(number), str(len(equal)), Text(text), f"{sum(equal):.3f}")
    console = Console()
    console.print(table)
    for number, result in enumerate(results, 1):
        console.print(f"process {number} asked for {result.asked} rows of {len(result.prompts)} different prompts")
    shared = set.intersection(*(result.prompts for result in results))
    console.print(f"prompts that both asked for, and a worker computed once: {len(shared)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT, help="beginning of the text")
    parser.add_argument("--pattern", default=PATTERN, help="regular expression for the continuation")
    parser.add_argument("--particles", type=int, default=16, help="of each process (default: 16)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a particle at most (default: 48)")
    parser.add_argument("--seed", type=int, default=1, help="of the first process; the second has the next one")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    SyncProducer(given.model, redis=given.redis).close()  # Connect first, so that a wrong model name fails only once.
    # Only the parent process handles Ctrl-C; it ends the other processes.
    with get_context("spawn").Pool(2, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as processes:
        show(processes.starmap(infer, [(given, given.seed), (given, given.seed + 1)]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except LMPoolError as error:
        sys.exit(f"error: {error}")
    except ImportError as error:
        sys.exit(f"error: {error}: pip install genlm-control 'lmpool[genlm]'")
