"""Distillation: a tiny student learns the served model's distribution after every token of a text.

    python examples/distill.py texts.txt --steps 200 --save student --plot kl.png

Each training step takes some windows of the text. The teacher returns the most likely tokens at each position and their
log-probabilities (`Producer.batch_positions`: one forward per window). The remaining probability counts as one more
token. The loss is the Kullback-Leibler divergence from the teacher to the student, in nats per token. While the student
learns from one batch, the pool computes the next batch.

Needs a pool, such as `lmpool up .cache/models/smollm2-float32 --name smollm2`, pip install 'lmpool[hf]', and for --plot
matplotlib. To write a teacher's data to disk, see `lmpool batch run`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lmpool.errors import LMPoolError, SettingsError
from lmpool.producer import Predictions, Producer


class Student:
    """A Llama model with some million parameters, most of them in its embedding.

    Args:
        vocab_size: V, the size of the teacher's vocabulary.
        rate: the learning rate.
    """

    def __init__(self, vocab_size: int, rate: float) -> None:
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
        self.model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is partly untyped
        self.model.train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def learn(self, windows: list[list[int]], taught: list[Predictions]) -> float:
        """Take one training step; returns the divergence before the step."""
        logits = self.model(input_ids=torch.tensor(windows)).logits
        values, ids = (np.stack(arrays) for arrays in zip(*(found.top for found in taught if found.top), strict=True))
        loss = divergence(logits, torch.from_numpy(values), torch.from_numpy(ids))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch is partly untyped
        self._optimizer.step()
        return float(loss.detach())


def divergence(logits: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """KL(teacher || student) over the teacher's most likely tokens and the rest as one token, averaged over positions.

    Args:
        logits: logits of the student, (n, t, V).
        values: log-probabilities of the teacher's most likely tokens, (n, t, k).
        ids: token ids of these most likely tokens, (n, t, k).
    """
    student = torch.log_softmax(logits, dim=-1).gather(-1, ids)
    both = torch.stack([_with_rest(values), _with_rest(student)])
    return (both[0].exp() * (both[0] - both[1])).sum(-1).mean()


def _with_rest(values: Tensor) -> Tensor:
    """Append to log-probabilities of some tokens the log-probability of all other tokens together."""
    rest = torch.log1p(-values.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([values, rest], dim=-1)


async def distill(given: argparse.Namespace, text: str) -> list[float]:
    """Train a student; returns the divergence of each step."""
    async with Producer(given.model, redis=given.redis, cache_bytes=0) as producer:
        tokens = await producer.encode(text)
        windows = [tokens[at : at + given.length] for at in range(0, len(tokens) - given.length + 1, given.length)]
        if not windows:
            raise SettingsError(f"texts: {len(tokens)} tokens are too few for a window of {given.length} (--length)")
        student, random = Student(producer.model.vocab_size, given.rate), np.random.default_rng(0)

        def ask() -> tuple[list[list[int]], asyncio.Task[Any]]:
            chosen = [windows[at] for at in random.integers(len(windows), size=given.batch)]
            return chosen, asyncio.create_task(producer.batch_positions(chosen, top=given.top))

        losses: list[float] = []
        asked = ask()
        try:
            for _ in track(range(given.steps), "distilling", console=Console(stderr=True)):
                (batch, answer), asked = asked, ask()
                taught = await answer
                losses.append(await asyncio.to_thread(student.learn, batch, taught))
        finally:
            # Cancel the request for the next batch, which may also have failed.
            asked[1].cancel()
            await asyncio.gather(asked[1], return_exceptions=True)
        if given.save is not None:
            student.model.save_pretrained(given.save)
    return losses


def plot(losses: list[float], path: Path) -> None:
    """Draw the divergence of each step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="KL(teacher || student), nats a token", ylim=(0, None))
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", type=Path, help="a text file in UTF-8")
    parser.add_argument("--steps", type=int, default=100, help="how many batches to learn from (default: 100)")
    parser.add_argument("--batch", type=int, default=8, help="windows of a batch (default: 8)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a window (default: 64)")
    parser.add_argument("--top", type=int, default=32, help="most likely tokens of the teacher (default: 32)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--save", type=Path, help="a folder for the student")
    parser.add_argument("--plot", type=Path, help="an image file for the divergence of each step")
    parser.add_argument("--model", help="name of the served model (default: the only one)")
    parser.add_argument("--redis", help="URL of the server (default: LMPOOL_REDIS_URL, then your embedded server)")
    given = parser.parse_args()
    for name in ("steps", "batch", "length"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: {getattr(given, name)} must be at least 1")
    losses = asyncio.run(distill(given, given.texts.read_text("utf-8")))
    if given.plot is not None:
        plot(losses, given.plot)
    few = max(1, len(losses) // 10)
    first, last = np.mean(losses[:few]), np.mean(losses[-few:])
    print(f"KL {first:.3f} -> {last:.3f} nats a token in {len(losses)} steps of {given.batch * given.length} tokens")


if __name__ == "__main__":
    try:
        main()
    except (LMPoolError, OSError, UnicodeDecodeError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
