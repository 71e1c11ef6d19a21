"""An engine that spreads a model over several processes (ranks) ends as a whole, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.adapter import qualify
from lmpool.workers.backends.checkpoint import checkpoint_revision
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, write_adapter
from tests.support.pool import is_running, ranks_below, shared_by, until

LOOPBACK = "0100007F"  # 127.0.0.1, as in /proc.
ENDED = r"^rank {} of the model has failed: its process was ended by signal 9 \(SIGKILL\)$"


@pytest.fixture
def expendable(opened: Opened) -> Opened:
    """The backend of all tests, for a test that ends it; opened again if another test has ended it."""
    if opened.is_expended:
        opened.backend.close()
        opened.__enter__()
    opened.is_expended = True
    return opened


def test_the_fingerprint_does_not_depend_on_the_number_of_processes(opened: Opened, model_folder: Path) -> None:
    backend: Any = opened.backend
    assert backend.info.revision == checkpoint_revision(model_folder)
    assert backend.devices == [backend.device] * opened.subject.processes


def test_killed_processes_would_leave_no_names_of_shared_memory(opened: Opened) -> None:
    processes = [os.getpid(), *ranks_below(os.getpid())]
    assert len(processes) >= opened.subject.processes
    assert [shared_by(pid) for pid in processes] == [set()] * len(processes)


def test_other_machines_cannot_connect_to_the_processes(opened: Opened) -> None:
    ranks = ranks_below(os.getpid())
    assert len(ranks) >= opened.subject.processes - 1, "with SGLang, this process is the first rank"
    assert set[str]().union(*map(interfaces_of, ranks)) <= {LOOPBACK}


def interfaces_of(pid: int) -> set[str]:
    """The addresses on which a process listens for connections, in hexadecimal digits as in /proc."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in links}


def test_an_adapter_that_the_ranks_refuse_leaves_them_running(
    opened: Opened, adapter_folders: dict[str, Path], tmp_path: Path, draw: random.Random
) -> None:
    backend, large = opened.backend, _write_large_adapter(tmp_path / "large")
    prompts, before = [prompt(draw, length) for length in (3, 40)], dict(backend.adapters)
    for name in ADAPTERS:
        with pytest.raises(SettingsError, match=r"^adapters: .*[Rr]ank"):
            backend.load_adapter("large", str(large))
        assert backend.adapters == before
        revision = backend.load_adapter("later", str(adapter_folders[name]))
        opened.check(prompts, opened.ask(prompts, "later"), name)
        backend.drop_adapter(qualify("later", revision))
    opened.check(prompts, opened.ask(prompts))


def _write_large_adapter(folder: Path) -> Path:
    """Write an adapter whose rank exceeds the rank that a worker with --max-adapters reserves memory for."""
    write_adapter(folder, ADAPTERS[0])
    tensors = {
        name: tensor.repeat(64, 1) if "lora_A" in name else tensor.repeat(1, 64)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 64 * config["r"]}))
    return folder


def test_no_row_of_an_aborted_prompt_remains(opened: Opened, draw: random.Random) -> None:
    backend: Any = opened.backend
    kept = [prompt(draw, 20) for _ in range(2)]
    for round_ in range(6):
        # Two batches may be in flight: abort after different numbers of steps.
        digests = opened.submit([prompt(draw, 20) for _ in range(12)])
        for _ in range(round_ % 3):
            opened.step()
        backend.abort(digests)
        opened.check(kept, opened.ask(kept))
    if opened.subject.name == "vllm":
        assert not backend._engine.captured._captured


def test_an_idle_engine_sends_messages_to_its_ranks(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    if opened.subject.name != "sglang":
        return  # The ranks of vLLM wait for messages without a timeout.
    backend: Any = opened.backend
    receiver, passes = backend._engine.scheduler.request_receiver, SimpleQueue[None]()
    receive: Callable[..., Any] = receiver.recv_requests

    def count_and_receive(**named: Any) -> Any:
        passes.put(None)
        return receive(**named)

    monkeypatch.setattr(receiver, "recv_requests", count_and_receive)
    until(lambda: passes.qsize() > 2, "rank 0 sends messages, without which a collective of torch would time out")


def test_an_idle_engine_reports_the_end_of_a_rank(expendable: Opened) -> None:
    killed = expendable.subject.processes - 1
    ranks, errors = ranks_below(os.getpid()), SimpleQueue[BaseException]()
    backend: Any = expendable.backend
    backend.when_broken(errors.put)
    for other in ranks[:-1]:
        os.kill(other, signal.SIGSTOP)  # A rank that does not run on cannot notice the end of another rank.
    os.kill(ranks[-1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=ENDED.format(killed)):
        raise errors.get(timeout=60)
    _check_ended(expendable, ranks, killed)


def test_a_rank_that_is_killed_during_forwards_ends_the_engine(expendable: Opened, draw: random.Random) -> None:
    ranks = ranks_below(os.getpid())
    killed = expendable.subject.processes - len(ranks)  # The first rank outside this process.
    digests = expendable.submit([prompt(draw, 200) for _ in range(200)])
    expendable.step()
    os.kill(ranks[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=ENDED.format(killed)):
        expendable.finish(digests)
    _check_ended(expendable, ranks, killed)


def _check_ended(driver: Opened, ranks: list[int], killed: int) -> None:
    """Check that an engine without the rank `killed` ends its other ranks, and that each later call reports the end."""
    backend: Any = driver.backend
    errors: SimpleQueue[BaseException] = SimpleQueue()
    backend.when_broken(errors.put)
    with pytest.raises(WorkerError, match=ENDED.format(killed)):
        raise errors.get(timeout=60)
    driver.submit([[1, 2, 3]])
    with pytest.raises(WorkerError, match=ENDED.format(killed)):
        driver.step()
    until(lambda: not any(map(is_running, ranks)), "no rank remains")
