"""Twisted sequential Monte Carlo (SMC): a twist model that the pool serves learns to guide texts to a constraint.

    python examples/twisted_smc.py --updates 40

A base model writes texts of 12 characters. Texts with fewer than 8 vowels have a lower weight: each missing vowel costs
1.5 nats. The twist model predicts after each prefix how much weight each next character leads to: its logit at
character v is log psi(prefix + v). SMC samples each character in proportion to the base model's probability times psi,
and the better psi predicts, the less the weights of the particles differ. Both models are served by the pool.

Torch trains the twist on the particles of each run: contrastive twist learning, from Stephen Zhao et al.,
"Probabilistic Inference in Language Models via Twisted Sequential Monte Carlo", 2024, section 4.1, arXiv:2404.17546.
Every ten updates the program publishes the twist's weights (`Producer.publish_weights`), and the worker goes on with
them. The rows of the base model stay cached.

The program prints how much the estimates of the log normalising constant differ, before and after training. At the end,
it does the same in this process alone, with the same choices of characters and particles, and compares the results. (A
rounding error of a row could choose another character, and then the two runs would differ from there on.)

Needs `pip install 'lmpool[hf]'`. The program makes two tiny models, and starts a server and two workers of its own, so
it needs neither a pool nor a download. It takes about a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import itertools
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

from lmpool.embedded import EmbeddedServer
from lmpool.errors import LMPoolError
from lmpool.producer import Producer

CHARACTERS = " abcdefghijklmnopqrstuvwxyz"  # The vocabulary: token ids are places in this string.
START = 0  # Token before the first character of a text.
VOWELS = np.array([character in "aeiou" for character in CHARACTERS])
WANTED_VOWELS = 8
NATS_PER_MISSING_VOWEL = 1.5
SERVER_BYTES = 256 * 2**20  # Memory limit of the server: enough for the rows of the whole run.
START_LIMIT_S = 300.0  # Max seconds until a worker serves: it imports torch, which takes minutes on a busy machine.

Ids = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def log_potential(texts: Ids) -> Floats:
    """The logarithm of the weight that the constraint gives to each text, (n,)."""
    missing = np.maximum(0, WANTED_VOWELS - VOWELS[texts].sum(axis=1))
    return np.asarray(-NATS_PER_MISSING_VOWEL * missing)


def make_model() -> Any:
    """Make a Llama model of two small layers with random weights."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # Larger than usual: the rows of a random model are almost uniform otherwise.
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is partly untyped
    return model.eval()  # There is no dropout, so training needs no other mode.


def make_twist() -> Any:
    """Make a twist model whose logits are 0, so that SMC starts with samples of the base model."""
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


class Models(Protocol):
    """A base model and a twist: in a pool, or in this process."""

    async def base(self, texts: Ids) -> Floats:
        """Return the base model's log-probabilities of the next character of texts (n, t): (n, V)."""

    async def twist(self, texts: Ids) -> Floats:
        """Return log psi of texts (n, t) with each next character: (n, V)."""

    async def publish(self, weights: dict[str, Tensor]) -> int:
        """Replace the twist's weights; returns the number of the new version."""


class InPool(NamedTuple):
    """The models of a pool."""

    base_producer: Producer
    twist_producer: Producer

    async def base(self, texts: Ids) -> Floats:
        return await self.base_producer.batch_logprobs(texts)

    async def twist(self, texts: Ids) -> Floats:
        # Logits, because log-probabilities lack each prefix's normalising constant, which is a part of psi.
        return await self.twist_producer.batch_logprobs(texts, mode="logits")

    async def publish(self, weights: dict[str, Tensor]) -> int:
        return await self.twist_producer.publish_weights(weights)


class InProcess:
    """The reference: the same models in this process."""

    def __init__(self, base: Any, twist: Any) -> None:
        self._base, self._twist, self._version = base, copy.deepcopy(twist), 0

    async def base(self, texts: Ids) -> Floats:
        return _logits(self._base, texts).log_softmax(-1).numpy()

    async def twist(self, texts: Ids) -> Floats:
        return _logits(self._twist, texts).numpy()

    async def publish(self, weights: dict[str, Tensor]) -> int:
        self._twist.load_state_dict(weights)
        self._version += 1
        return self._version


@torch.inference_mode()
def _logits(model: Any, texts: Ids) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(texts)).logits[:, -1]
    return logits


class Step(NamedTuple):
    """One step of SMC: the particles before the step, and the characters and particles that the step chose."""

    texts: Ids  # (n, t)
    log_weights: Floats  # (n,): with these weights, the texts are samples of the base model.
    base: Floats  # (n, V): the base model's log-probabilities of the next character.
    tokens: Ids  # (n,): the next character of each particle.
    resampled: Ids | None  # (n,): the particles that go on, with repetitions; None without resampling.


class Run(NamedTuple):
    """The result of one run of SMC."""

    steps: list[Step]
    texts: Ids  # (n, T): the final particles, which begin with the token START.
    weights: Floats  # (n,): weights of the final particles; their sum is 1.
    log_z: float  # Estimate of the logarithm of the expected potential of a text of the base model.

    @property
    def effective(self) -> float:
        """The effective sample size, as a share of the number of particles."""
        return float(1 / (len(self.weights) * (self.weights**2).sum()))


async def smc(models: Models, particles: int, length: int, seed: int, earlier: Run | None = None) -> Run:
    """Sample texts with weights; resamples when the effective sample size is below half of the particles.

    With an earlier run, repeats that run's choices of characters and particles.

    All rows of the twist in a run are of one version, because this program publishes only between runs.
    """
    random = np.random.default_rng(seed)
    texts = np.full((particles, 1), START)
    log_weights, log_psi, log_z = np.zeros(particles), np.zeros(particles), 0.0
    steps: list[Step] = []
    for number in range(length):
        base, twist = await asyncio.gather(models.base(texts), models.twist(texts))
        # Sample each next character in proportion to the base model's probability times psi.
        proposal = np.exp(base.astype(float) + twist)
        totals = proposal.sum(axis=1)
        tokens = (proposal.cumsum(axis=1) < random.uniform(size=(particles, 1)) * totals[:, None]).sum(axis=1)
        before, log_weights = log_weights - log_psi, log_weights + np.log(totals) - log_psi
        weights = normalised(log_weights)
        resampled = systematic(weights, random.uniform()) if 1 / (weights**2).sum() < particles / 2 else None
        if earlier is not None:
            tokens, resampled = earlier.steps[number].tokens, earlier.steps[number].resampled
        steps.append(Step(texts, before, base, tokens, resampled))
        log_psi = twist[np.arange(particles), tokens].astype(float)
        texts = np.column_stack([texts, tokens])
        if resampled is not None:
            log_z += log_mean(log_weights)
            texts, log_psi, log_weights = texts[resampled], log_psi[resampled], np.zeros(particles)
    # The weights so far are for the twist's prediction; replace the prediction by the potential.
    log_weights = log_weights + log_potential(texts) - log_psi
    return Run(steps, texts, normalised(log_weights), log_z + log_mean(log_weights))


def log_mean(values: Floats) -> float:
    """The logarithm of the mean of exponentials."""
    return float(np.logaddexp.reduce(values) - np.log(len(values)))


def normalised(log_weights: Floats) -> Floats:
    """Weights with the sum 1."""
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())


def systematic(weights: Floats, uniform: float) -> Ids:
    """Indices of resampled particles: each particle about as often as its weight times n."""
    count = len(weights)
    places = (uniform + np.arange(count)) / count
    return np.minimum(weights.cumsum().searchsorted(places), count - 1)


def twist_loss(twist: Any, run: Run) -> Tensor:
    """The contrastive loss of a twist, averaged over the characters of a text.

    The loss raises psi on prefixes of the final particles, and lowers psi on samples of base model times psi. Its
    gradient is 0 if both have the same distribution at every step.
    """
    texts, weights = torch.from_numpy(run.texts), torch.from_numpy(run.weights)
    log_psi = twist(input_ids=texts[:, :-1]).logits.gather(-1, texts[:, 1:, None])[..., 0]
    loss: Tensor = -(weights[:, None] * log_psi).sum()
    for step in run.steps:
        logits = twist(input_ids=torch.from_numpy(step.texts)).logits[:, -1]
        log_weights = torch.from_numpy(step.log_weights)[:, None] + torch.from_numpy(step.base)
        loss = loss + torch.logsumexp((log_weights + logits).flatten(), dim=0)
    return loss / len(run.steps)


class Result(NamedTuple):
    """The losses of training, and all runs: several before training, one per update, and several after it."""

    losses: list[float]
    runs: list[Run]


async def estimate(models: Models, given: argparse.Namespace, title: str, earlier: Iterator[Run | None]) -> list[Run]:
    """Run SMC several times at once, and print how much the estimates of log Z differ."""
    # Training has other seeds: 0 to `updates`.
    seeds = range(given.seed + 10_000, given.seed + 10_000 + given.runs)
    runs = await asyncio.gather(*(smc(models, given.particles, given.length, seed, next(earlier)) for seed in seeds))
    found = [run.log_z for run in runs]
    effective = np.mean([run.effective for run in runs])
    spread = f"standard deviation {np.std(found):.3f} in {given.runs} runs"
    print(f"{title}: log Z {log_mean(np.array(found)):.3f}, {spread}, effective sample size {effective:.0%}")
    return runs


async def learn(models: Models, twist: Any, given: argparse.Namespace, repeat: Result | None = None) -> Result:
    """Train `twist`, and publish its weights; prints the progress. With `repeat`, repeats the choices of its runs."""
    earlier: Iterator[Run | None] = itertools.repeat(None) if repeat is None else iter(repeat.runs)
    optimizer = torch.optim.AdamW(twist.parameters(), lr=given.rate)
    losses: list[float] = []
    runs = await estimate(models, given, "before training", earlier)
    shares = []
    for update in range(1, given.updates + 1):
        run = await smc(models, given.particles, given.length, given.seed + update, next(earlier))
        runs.append(run)
        shares.append(run.effective)
        loss = twist_loss(twist, run)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch is partly untyped
        optimizer.step()
        losses.append(float(loss.detach()))
        if update % given.every == 0 or update == given.updates:
            effective = np.mean(shares[-given.every :])
            mean = np.mean(losses[-given.every :])
            version = await models.publish(twist.state_dict())
            print(f"update {update:3}: loss {mean:.4f}, effective sample size {effective:.0%}, "
                  f"published version {version}")  # fmt: skip
    return Result(losses, runs + await estimate(models, given, "after training", earlier))


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
    """Train a twist in a pool and in this process, and compare."""
    began = time.perf_counter()
    torch.manual_seed(given.seed)
    base, twist = make_model(), make_twist()
    with (
        tempfile.TemporaryDirectory(prefix="lmpool-") as name,
        pool(Path(name), {"base": base, "twist": twist}) as url,
    ):
        # The workers may still be starting: wait for them.
        options: dict[str, Any] = {"redis": url, "when_absent": "wait", "timeout": START_LIMIT_S}
        async with Producer("base", **options) as of_base, Producer("twist", **options) as of_twist:
            print(f"both models are served after {time.perf_counter() - began:.1f} s")
            pooled = await learn(InPool(of_base, of_twist), copy.deepcopy(twist), given)
    ended = time.perf_counter()
    print(f"{ended - began:.1f} s with the start of the pool")

    print("the same in this process alone:")
    local = await learn(InProcess(base, twist), copy.deepcopy(twist), given, pooled)
    of_loss = np.max(np.abs(np.subtract(pooled.losses, local.losses)))
    of_log_z = max(abs(ours.log_z - theirs.log_z) for ours, theirs in zip(pooled.runs, local.runs, strict=True))
    seconds = time.perf_counter() - ended
    print(f"largest difference of a loss: {of_loss:.1e}, of an estimate of log Z: {of_log_z:.1e}; {seconds:.1f} s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=40, help="training steps, one run of SMC each (default: 40)")
    parser.add_argument("--every", type=int, default=10, help="updates between two publications (default: 10)")
    parser.add_argument("--particles", type=int, default=32, help="particles of a run (default: 32)")
    parser.add_argument("--length", type=int, default=12, help="characters of a text (default: 12)")
    parser.add_argument("--runs", type=int, default=16, help="runs that estimate log Z (default: 16)")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate (default: 0.005)")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the particles (default: 0)")
    given = parser.parse_args()
    for name in ("updates", "every", "particles", "length", "runs"):
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
