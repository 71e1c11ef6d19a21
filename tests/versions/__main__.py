"""`python -m tests.versions`: change the weights many times under load, and check each row against its version.

The oracle knows the rows of every version: those of a generator for the synthetic backend, and those of transformers in
this process for a tiny Llama. With `--kills`, each change has a SIGKILL at a random moment (`tests.versions.kills`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.embedded import EmbeddedServer
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, V
from tests.versions.kills import WORKER_OPTIONS, Kills
from tests.versions.traffic import PROMPTS, Rows, Traffic, weights

_FIRST_SEED = 100


class SyntheticVersions:
    """Versions of the synthetic model; version v has the rows of the seed 100 + v."""

    options: tuple[str | int, ...] = ("--vocab-size", V)
    model = "syn"

    def weights(self, version: int) -> dict[str, Any]:
        """The full weights of a version."""
        return weights(_FIRST_SEED + version)

    def rows(self, version: int, prompt: list[int]) -> np.ndarray:
        """The row of a prompt in a version."""
        return synthetic_row(prompt, vocab_size=V, seed=_FIRST_SEED + version if version else 0)


class LlamaVersions:
    """Versions of a tiny Llama with random weights; version v has the base's weights times 1 + v / 1000."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
        model_class: Any = LlamaForCausalLM
        self._torch, self._model = torch, model_class(config).eval()
        self._base = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._model.save_pretrained(folder)
        self.options: tuple[str | int, ...] = ("--backend", "hf", "--dtype", "float32", "--device", "cpu")
        self.model = str(folder)
        self._rows: dict[int, np.ndarray] = {}

    def weights(self, version: int) -> dict[str, Any]:
        """The full weights of a version."""
        return {name: tensor * (1 + version / 1000) for name, tensor in self._base.items()}

    def rows(self, version: int, prompt: list[int]) -> np.ndarray:
        """The row of a prompt in a version."""
        if version not in self._rows:
            self._model.load_state_dict(self.weights(version))
            with self._torch.inference_mode():
                logits = self._model(self._torch.tensor(PROMPTS)).logits[:, -1]
            self._rows[version] = self._torch.log_softmax(logits, -1).numpy()
        row: np.ndarray = self._rows[version][PROMPTS.index(prompt)]
        return row


async def change(pool: Pool, versions: Rows, options: argparse.Namespace) -> Traffic:
    """Publish versions one after another, while clients request rows; returns what the clients got."""
    traffic = Traffic(versions, tolerance=options.tolerance)
    async with traffic.running(pool, options.clients), pool.producer("syn") as publisher:
        for version in range(1, options.changes + 1):
            assert await publisher.publish_weights(versions.weights(version)) == version
            if version % 10 == 0:
                print(f"{version} changes, {sum(traffic.answers.values())} rows", flush=True)
    return traffic


def main() -> None:
    """Run the changes, and print what the clients got."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--backend", choices=("synthetic", "hf"), default="synthetic")
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", action="store_true", help="SIGKILL a process in each change (synthetic only)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the kills, to repeat a run")
    options = parser.parse_args()
    if options.kills and options.backend != "synthetic":
        parser.error("--kills needs the synthetic backend")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    options.tolerance = 1e-4 if options.backend == "hf" else 0.0
    with (
        tempfile.TemporaryDirectory(prefix="lp") as folder,
        EmbeddedServer(256 * 2**20, Path(folder) / "s", appendonly=options.kills) as server,
    ):
        versions: Rows = LlamaVersions(Path(folder) / "model") if options.backend == "hf" else SyntheticVersions()
        pool = Pool(server.url, "lp", Path(folder))
        more = WORKER_OPTIONS if options.kills else ()
        start = partial(pool.start, *versions.options, *more, "--name", "syn", model=versions.model)
        try:
            workers = [start() for _ in range(options.workers)]
            kills = Kills(pool, server, workers, partial(start, wait=False), versions, random.Random(seed))
            began = time.monotonic()
            if options.kills:
                print(f"the seed of the kills is {seed}", flush=True)
                traffic = asyncio.run(kills.run(options.changes, options.clients))
            else:
                traffic = asyncio.run(change(pool, versions, options))
            seconds = time.monotonic() - began
        finally:
            pool.end()
    answers = sum(traffic.answers.values())
    print(f"{options.changes} changes in {seconds:.0f} s: {answers} rows of {len(traffic.answers)} versions, 0 wrong")
    if options.kills:
        kinds = ", ".join(f"{victim} {number}" for victim, number in sorted(kills.killed.items()))
        print(f"seed {seed}, kills: {kinds}; 0 hangs; versions that no worker served: {kills.unserved}")


if __name__ == "__main__":
    main()
