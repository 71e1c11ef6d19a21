"""Measures how fast published weights are served: SmolLM2-135M in bfloat16, on one hf worker or two."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.real_model import smollm2_folder
from lmpool.producer import SyncProducer

_CHANGED = 100  # One number of this many differs in a sparse version.
_TIMEOUT_S = 300.0  # Max seconds of a request.
_BEFORE_S = 10.0  # Seconds for which the rate before a rolling change is measured.
_FIRST_ID, _IDS = 100, 10_000  # Token ids of the prompts.


def weights(testbed: Testbed) -> list[Result]:
    """Measure the time from publishing weights to the first row that they compute, full and sparse."""
    folders = [_folder(testbed, name, scale) for name, scale in (("a", 1.0), ("b", 1.01))]
    sparse = _sparse_file(testbed, folders[0])
    with _serving(testbed, folders[0], 1) as ask:
        turns = itertools.cycle(reversed(folders))
        copy = _copier(folders[0])
        taken: dict[str, Take] = {
            "publish": lambda: ask(next(turns)),
            "copy": lambda: copy(folders[1]),
            "sparse": lambda: ask(sparse),
        }
        for take in taken.values():
            take()
        samples = alternate(taken, testbed.repeats)
    sides = {name: Side(name, "s", values) for name, values in samples.items()}
    full = "seconds from `publish_weights` of a folder (SmolLM2-135M, bfloat16) to the first row that it computes"
    read = "seconds to map the folder and copy its tensors into a model in one process"
    few = f"the same for a sparse file with 1 % of the numbers ÷ {full}"
    return [
        Result("weights", f"{full} ÷ {read}", Goal(1.5, at_most=True), sides["publish"], sides["copy"]),
        Result("weights-sparse", few, Goal(0.2, at_most=True), sides["sparse"], sides["publish"]),
    ]


def weights_rolling(testbed: Testbed) -> list[Result]:
    """Measure the rows per second of two workers during a rolling change."""
    folders = [_folder(testbed, name, scale) for name, scale in (("a", 1.0), ("b", 1.01))]
    with _serving(testbed, folders[0], 2) as ask:
        before, during, longest, loads = [], [], [], []
        for turn in range(testbed.repeats):
            with _traffic(testbed) as times:
                time.sleep(_BEFORE_S)
                began = time.monotonic()
                ask(folders[(turn + 1) % 2])
                served = time.monotonic()
                # The second worker takes about as long as the first.
                time.sleep(served - began)
                ended = time.monotonic()
            before.append(sum(began - _BEFORE_S < at <= began for at in times) / _BEFORE_S)
            during.append(sum(began < at <= ended for at in times) / (ended - began))
            inside = [began, *(at for at in times if began < at <= ended), ended]
            longest.append(max(after - at for at, after in itertools.pairwise(inside)))
            loads.append(served - began)
    rate = "rows/s of two workers during a rolling change of their weights ÷ before it"
    gap = "longest time without a row during the change ÷ seconds from publishing to the first row of the new weights"
    return [
        Result("weights-rolling", rate, Goal(0.45), Side("during", "rows/s", during), Side("before", "rows/s", before)),
        Result("weights-gap", gap, Goal(1, at_most=True), Side("gap", "s", longest), Side("load", "s", loads)),
    ]


def _folder(testbed: Testbed, name: str, scale: float) -> Path:
    """A checkpoint of SmolLM2-135M in bfloat16, whose weights are multiplied by `scale`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = testbed.folder / f"weights-{name}"
    if not folder.exists():
        source = smollm2_folder()
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale)
        model.save_pretrained(folder)
        tokenizer: Any = AutoTokenizer
        tokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _sparse_file(testbed: Testbed, folder: Path) -> Path:
    """A sparse file that changes 1 % of the numbers of each tensor of a checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    changes: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        places = torch.arange(0, tensor.numel(), _CHANGED)
        changes[f"{name}.indices"] = places
        changes[f"{name}.values"] = tensor.reshape(-1)[places] * 1.01
    path = testbed.folder / "sparse.safetensors"
    save_file(changes, path)
    return path


def _copier(folder: Path) -> Callable[[Path], float]:
    """A function that copies the tensors of a folder into a model, and returns the seconds."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own = model.state_dict()

    def copy(source: Path) -> float:
        began = time.monotonic()
        with torch.no_grad(), safe_open(source / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                own[name].copy_(file.get_tensor(name))
        return time.monotonic() - began

    return copy


@contextmanager
def _serving(testbed: Testbed, folder: Path, workers: int) -> Iterator[Callable[[Path], float]]:
    """Start workers; yields a function that publishes weights, and returns the seconds until their first row."""
    options = ("--backend", "hf", "--device", "cpu", "--dtype", "bfloat16")
    with (
        testbed.workers("smollm2", str(folder), *options, number=workers),
        SyncProducer("smollm2", redis=testbed.url, timeout=_TIMEOUT_S) as producer,
    ):

        def ask(weights: Path) -> float:
            began = time.monotonic()
            producer.publish_weights(weights)
            producer.logprobs([_FIRST_ID, _FIRST_ID])
            return time.monotonic() - began

        yield ask


@contextmanager
def _traffic(testbed: Testbed) -> Iterator[list[float]]:
    """Have four clients request rows until the body ends; yields the times of their answers."""
    times: list[float] = []
    is_ended = threading.Event()

    def request(number: int) -> None:
        draw = np.random.default_rng(number)
        with SyncProducer("smollm2", redis=testbed.url, timeout=_TIMEOUT_S, cache_bytes=0) as producer:
            while not is_ended.is_set():
                producer.logprobs(draw.integers(_FIRST_ID, _IDS, 4))
                times.append(time.monotonic())

    threads = [threading.Thread(target=request, args=(time.monotonic_ns() + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        is_ended.set()
        for thread in threads:
            thread.join()
