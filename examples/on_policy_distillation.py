"""On-policy distillation: a student that the pool serves learns from a teacher on the texts that it writes itself.

    python examples/on_policy_distillation.py --steps 50

Each training step has three parts. The pool's student continues some prompts (`Producer.batch_generate`). The pool's
teacher returns its distribution at every position of these texts (`Producer.batch_positions`). Torch takes one step
that lowers the divergence of the student from the teacher (`lmpool.distill.divergence`; Rishabh Agarwal et al.,
"On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", 2024, arXiv:2306.13649). Every ten
steps the program publishes the student's weights (`Producer.publish_weights`), and the worker goes on with them.

At the end, the program runs the same loop in this process alone, on the texts that the pool wrote, and compares the
losses. It also draws each token of these texts again, and counts the tokens that differ. Rows of older weights would
change many tokens; rounding errors change about one token in a million.

Needs `pip install 'lmpool[hf,distill]'`. The program makes two tiny models with random weights, and starts a server and
two workers of its own, so it needs neither a pool nor a download. It takes about a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lmpool.distill import divergence
from lmpool.embedded import EmbeddedServer
from lmpool.errors import LMPoolError
from lmpool.producer import Producer
from lmpool.protocol.picks import Sampling, sample

V = 64  # Size of the vocabulary of both models.
PROMPT_TOKENS = 2
SERVER_BYTES = 256 * 2**20  # Memory limit of the server: enough for the rows of the whole run.
START_LIMIT_S = 300.0  # Max seconds until a worker serves: it imports torch, which takes minutes on a busy machine.

Texts = list[list[int]]


def make_model(layers: int) -> Any:
    """Make a Llama model with random weights, some ten thousand per layer."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        initializer_range=0.2,  # Larger than usual: the rows of a random model are almost uniform otherwise.
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is partly untyped
    return model.eval()  # There is no dropout, so training needs no other mode.


def make_student(teacher: Any) -> Any:
    """Make a student of the teacher's first and last layer, its embedding and its head."""
    student = make_model(2)
    theirs, ours = teacher.model, student.model
    for its, of_teacher in [
        (ours.embed_tokens, theirs.embed_tokens),
        (ours.layers[0], theirs.layers[0]),
        (ours.layers[1], theirs.layers[-1]),
        (ours.norm, theirs.norm),
        (student.lm_head, teacher.lm_head),
    ]:
        its.load_state_dict(of_teacher.state_dict())
    return student


class Models(Protocol):
    """A student and a teacher: in a pool, or in this process."""

    async def generate(self, prompts: Texts, max_tokens: int, seed: int) -> tuple[Texts, int]:
        """Continue prompts by the student; returns the whole texts, and the version of the student's weights."""

    async def teach(self, texts: Texts, start: int) -> NDArray[np.float32]:
        """Return the teacher's log-probabilities at the positions from `start` on, (n, t, V)."""

    async def publish(self, weights: dict[str, Tensor]) -> int:
        """Replace the student's weights; returns the number of the new version."""


class InPool(NamedTuple):
    """The models of a pool."""

    student: Producer
    teacher: Producer
    written: list[Texts]  # The texts of each call of `generate`.

    async def generate(self, prompts: Texts, max_tokens: int, seed: int) -> tuple[Texts, int]:
        generate = self.student.batch_generate
        continuations, version = await self.student.versioned(generate, prompts, max_tokens, seed=seed)
        pairs = zip(prompts, continuations, strict=True)
        self.written.append([prompt + continuation.ids.tolist() for prompt, continuation in pairs])
        return self.written[-1], version

    async def teach(self, texts: Texts, start: int) -> NDArray[np.float32]:
        found = await self.teacher.batch_positions(texts, start, full=True)
        return np.stack([predictions.full for predictions in found if predictions.full is not None])

    async def publish(self, weights: dict[str, Tensor]) -> int:
        return await self.student.publish_weights(weights)


class InProcess:
    """The reference: the same models in this process, on the texts that the pool wrote."""

    def __init__(self, student: Any, teacher: Any, written: list[Texts]) -> None:
        self._student, self._teacher, self._version = copy.deepcopy(student), teacher, 0
        self._written = iter(written)
        self.differing = 0  # Number of tokens that differ from those that this process draws.

    async def generate(self, prompts: Texts, max_tokens: int, seed: int) -> tuple[Texts, int]:
        texts = next(self._written)
        start = PROMPT_TOKENS - 1
        for at, rows in enumerate(_log_probabilities(self._student, texts)[:, start:-1]):
            # The pool's workers use the same function, and these seeds (`Producer.generate`).
            seeds = range(seed + (at << 32), seed + (at << 32) + max_tokens)
            chosen = [
                sample(row, Sampling(temperature=1, top_p=1, seed=its)) for row, its in zip(rows, seeds, strict=True)
            ]
            self.differing += int(np.sum(np.not_equal(chosen, texts[at][PROMPT_TOKENS:])))
        return texts, self._version

    async def teach(self, texts: Texts, start: int) -> NDArray[np.float32]:
        return _log_probabilities(self._teacher, texts)[:, start:]

    async def publish(self, weights: dict[str, Tensor]) -> int:
        self._student.load_state_dict(weights)
        self._version += 1
        return self._version


@torch.inference_mode()
def _log_probabilities(model: Any, texts: Texts) -> NDArray[np.float32]:
    """The model's log-probabilities at every position of texts of equal length, (n, t, V)."""
    rows: NDArray[np.float32] = model(input_ids=torch.tensor(texts)).logits.log_softmax(-1).numpy()
    return rows


async def distill(models: Models, student: Any, given: argparse.Namespace) -> list[float]:
    """Train `student`, and publish its weights; returns the loss of each step, in nats per token."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=given.rate)
    random = np.random.default_rng(given.seed)
    losses: list[float] = []
    for step in range(1, given.steps + 1):
        prompts = random.integers(V, size=(given.batch, PROMPT_TOKENS)).tolist()
        # A continuation uses one seed per token, so the seeds of two steps do not overlap.
        texts, version = await models.generate(prompts, given.length, seed=step * given.length)
        start = PROMPT_TOKENS - 1  # The distribution at a position is about the next token.
        taught = torch.from_numpy(await models.teach(texts, start))
        logits = student(input_ids=torch.tensor(texts)).logits[:, start:]
        # Leave out the last position, whose next token no model has generated.
        loss = divergence(taught[:, :-1].reshape(-1, V), logits[:, :-1].reshape(-1, V), beta=given.beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % given.every == 0:
            mean = np.mean(losses[-given.every :])
            published = await models.publish(student.state_dict())
            print(f"step {step:3}: loss {mean:.4f} on texts of version {version}, published version {published}")
    return losses


@contextlib.contextmanager
def pool(folder: Path, models: dict[str, Any]) -> Iterator[str]:
    """Serve each model by a worker, on a server of this program's own; yields the server's URL."""
    with EmbeddedServer(SERVER_BYTES, folder / "server") as server:
        workers = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # More threads only wait for one another on tiny models.
        try:
            for name, model in models.items():
                model.config.save_pretrained(folder / name)
                save_file(model.state_dict(), folder / name / "model.safetensors", {"format": "pt"})
                options = ["--name", name, "--redis", server.url, "--device", "cpu"]
                with (folder / f"{name}.log").open("wb") as log:
                    command = [sys.executable, "-m", "lmpool", "worker", str(folder / name), *options]
                    workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
            yield server.url
        except LMPoolError as error:
            logs = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"error: {error}\nlogs of the workers:\n{logs}") from error
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(60)


async def run(given: argparse.Namespace) -> None:
    """Distil in a pool and in this process, and compare."""
    began = time.perf_counter()
    torch.manual_seed(given.seed)
    teacher = make_model(4)
    student = make_student(teacher)
    with (
        tempfile.TemporaryDirectory(prefix="lmpool-") as name,
        pool(Path(name), {"student": student, "teacher": teacher}) as url,
    ):
        # The workers may still be starting: wait for them.
        options: dict[str, Any] = {"redis": url, "when_absent": "wait", "timeout": START_LIMIT_S}
        async with Producer("student", **options) as serving, Producer("teacher", **options) as teaching:
            print(f"both models are served after {time.perf_counter() - began:.1f} s")
            in_pool = InPool(serving, teaching, [])
            losses = await distill(in_pool, copy.deepcopy(student), given)
    ended = time.perf_counter()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token; {ended - began:.1f} s with the start of the pool")

    print("the same in this process alone:")
    reference = InProcess(student, teacher, in_pool.written)
    expected = await distill(reference, copy.deepcopy(student), given)
    difference = np.max(np.abs(np.subtract(losses, expected)))
    print(f"{reference.differing} of {given.steps * given.batch * given.length} tokens differ")
    print(f"largest difference of a loss: {difference:.1e} nats per token; {time.perf_counter() - ended:.1f} s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: 50)")
    parser.add_argument("--every", type=int, default=10, help="steps between two publications (default: 10)")
    parser.add_argument("--batch", type=int, default=16, help="texts of a step (default: 16)")
    parser.add_argument("--length", type=int, default=24, help="tokens that the student writes per text (default: 24)")
    parser.add_argument("--beta", type=float, default=1.0, help="0 forward KL, 1 reverse KL, between: JSD (default: 1)")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate (default: 0.005)")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the prompts (default: 0)")
    given = parser.parse_args()
    for name in ("steps", "every", "batch", "length"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: {getattr(given, name)} must be at least 1")
    torch.set_num_threads(1)  # As for the workers.
    asyncio.run(run(given))


if __name__ == "__main__":
    try:
        main()
    except (LMPoolError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
