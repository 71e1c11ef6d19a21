"""Check the dashboard and the alerts of docker/observe with a real Prometheus and a real pool.

    python -m tests.project.live_board PROMETHEUS

PROMETHEUS is the path of the Prometheus program. Unlike in production, Prometheus finds workers by a list of addresses.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, start_http_server

from lmpool.embedded import EmbeddedServer
from lmpool.errors import WorkerError
from lmpool.producer.metrics import ProducerCollector
from tests.project.observed import OBSERVE, Query, board_queries
from tests.support.pool import Pool, until_async
from tests.support.scrape import free_port

_STEP_S = 0.05


def main() -> None:
    """Run the command `live_board PROMETHEUS`."""
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    try:
        with EmbeddedServer(memory_bytes=1 << 28, folder=folder / "s") as server:
            asyncio.run(_check(Path(sys.argv[1]).absolute(), server.url, folder))
    finally:
        shutil.rmtree(folder)


async def _check(program: Path, url: str, folder: Path) -> None:
    pool, ports = Pool(url, "board", folder), [free_port(), free_port(), free_port()]
    try:
        for port in ports[:2]:
            pool.start("--metrics-port", port, "--fail-token", 300, "--lease-s", 1)
        async with pool.producer(cache_bytes=1 << 20) as producer:
            REGISTRY.register(ProducerCollector(producer))
            start_http_server(ports[2], "127.0.0.1")
            _configure(folder, ports)
            port = free_port()
            with _prometheus(program, folder, port) as process:
                try:
                    asking = asyncio.create_task(_ask(producer))
                    await _watch(port)
                    asking.cancel()
                finally:
                    process.terminate()
                    process.wait()
    finally:
        pool.end()


def _configure(folder: Path, ports: list[int]) -> None:
    shutil.copytree(OBSERVE, folder / "observe")
    config = folder / "observe" / "prometheus.yml"
    text = re.sub(r"_interval: 15s", "_interval: 1s", config.read_text("utf-8"))
    config.write_text(re.sub(r" +dns_sd_configs:\n(?: {6,}.*\n)+?(?= {4}\w)", "", text))
    (folder / "observe" / "targets").mkdir()
    targets = json.dumps([{"targets": [f"127.0.0.1:{port}" for port in ports]}])
    (folder / "observe" / "targets" / "pool.yml").write_text(targets)


def _prometheus(program: Path, folder: Path, port: int) -> subprocess.Popen[bytes]:
    options = [f"--config.file={folder}/observe/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen([program, *options, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)


async def _ask(producer: Any) -> None:
    number = 0
    while True:
        number += 1
        await asyncio.gather(*(producer.logprobs([number % 200, i]) for i in range(10)))
        try:
            await producer.logprobs([300])
        except WorkerError:
            await asyncio.sleep(_STEP_S)


async def _watch(port: int) -> None:
    """Wait until every query has a result and every rule was evaluated."""
    left = {query: "" for query in board_queries() if not query.text.startswith("ALERTS")}
    count = len(left)

    async def are_answered() -> bool:
        for query in list(left):
            if await asyncio.to_thread(_answer, port, query):
                del left[query]
        return not left

    try:
        await until_async(are_answered, "every panel has data", 60)
    except AssertionError:
        sys.exit("no data: " + "; ".join(f"{query.name}: {query.text}" for query in left))
    rules = (await asyncio.to_thread(_get, port, "/api/v1/rules"))["groups"][0]["rules"]
    if wrong := [rule["name"] for rule in rules if rule["health"] != "ok"]:
        sys.exit(f"alerts that Prometheus cannot evaluate: {wrong}")
    print(f"{count} queries of the board have data, {len(rules)} alerts are evaluated")


def _answer(port: int, query: Query) -> bool:
    text = query.text.replace("$__rate_interval", "10s").replace("$model", ".*").replace("$instance", ".*")
    try:
        return bool(_get(port, "/api/v1/query", query=text)["result"])
    except OSError:
        return False  # Prometheus does not accept connections yet.


def _get(port: int, path: str, **parameters: str) -> Any:
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)["data"]


if __name__ == "__main__":
    main()
