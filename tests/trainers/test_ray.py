"""Ray Data maps batches with actors that use a pool."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.data

from lmpool.embedded import EmbeddedServer
from lmpool.errors import UnknownModel
from lmpool.producer import SyncProducer
from tests.support.pool import DEADLINE_S, Pool, children_of, is_running, until

ATTEMPTS = 4  # Ray starts its processes within 30 s or gives up, which happens on a busy machine.
TEXTS = ["The capital of France is Paris.", "Once", "The quick brown fox jumps over the lazy dog."] * 3


@pytest.fixture(scope="module")
def url(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a pool that serves SmolLM2."""
    with EmbeddedServer(memory_bytes=1 << 28) as server:
        pool = Pool(server.url, "lmpool", tmp_path_factory.mktemp("pool"))
        pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
        yield server.url
        pool.end()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray with two CPUs on this machine, which sends to the loopback only; its processes end with the test."""
    # Ray's paths of sockets would be too long in a folder of pytest.
    folder = tempfile.mkdtemp(prefix="ray")
    before = children_of(os.getpid()).keys()
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray sets this variable, which would keep later tests from forking processes.
    monkeypatch.setenv("PYTHONBREAKPOINT", "")
    monkeypatch.setenv("RAY_agent_register_timeout_ms", str(round(DEADLINE_S * 1000)))
    try:
        start_ray(folder)
        yield
    finally:
        ray.shutdown()
        until(lambda: not any(map(is_running, children_of(os.getpid()).keys() - before)), "Ray's processes end")
        shutil.rmtree(folder, ignore_errors=True)


def start_ray(folder: str) -> None:
    """Start Ray with its files in a folder."""
    options = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False, "log_to_driver": False}
    for attempt in range(ATTEMPTS):
        try:
            # Ray replaces 127.0.0.1 by the machine's own address, but takes other addresses of the loopback.
            ray.init(_temp_dir=folder, _node_ip_address="127.0.0.2", **options)
            break
        except Exception as error:
            ray.shutdown()
            if attempt == ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise


def test_a_wrong_model_ends_before_actors_start(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import ray_map

    (tmp_path / "texts.txt").write_text("Once", "utf-8")
    monkeypatch.setattr(sys, "argv", ["ray_map.py", str(tmp_path / "texts.txt"), "--model", "smollm3", "--redis", url])
    # A dataset would start Ray.
    monkeypatch.setattr(ray.data, "from_items", None)
    with pytest.raises(UnknownModel, match="did you mean 'smollm2'"):
        ray_map.main()


def test_actors_score_the_batches_of_a_dataset(
    url: str, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import ray_map

    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS), "utf-8")
    options = ["--batch", "2", "--actors", "2", "--redis", url]
    monkeypatch.setattr(sys, "argv", ["ray_map.py", str(tmp_path / "texts.txt"), *options])
    ray_map.main()
    found, lines = {}, capsys.readouterr().out.splitlines()
    assert len(lines) == len(TEXTS)
    for line in lines:
        tokens, logprob, text = line.split(maxsplit=2)
        found[text] = int(tokens), float(logprob)
    assert set(found) == set(TEXTS)
    with SyncProducer("smollm2", redis=url, timeout=DEADLINE_S) as producer:
        for text, (count, total) in found.items():
            ids = producer.encode(text)
            expected = producer.score(ids[:1], ids[1:]).sum() if len(ids) > 1 else 0
            assert count == len(ids)
            assert total == pytest.approx(expected, abs=0.01)
