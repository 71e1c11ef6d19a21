"""A model that SGLang spreads over two processes: a worker and its follower end together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.sglang_subject import TENSOR_PARALLEL, settings_of
from tests.engines.spread import check_ctrl_c, start
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


async def test_ctrl_c_lets_all_processes_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    await check_ctrl_c(pool, TENSOR_PARALLEL, start(pool, TENSOR_PARALLEL, model_folder))


_PROGRAM = """
import json, sys
from tests.engines.newest import accept
from tests.engines.sglang_cpu.shim import install
install()
accept()
from lmpool.errors import SettingsError
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.backends.sglang import backend
lost = "from lmpool.workers.execution.ranks import following\\nwith following(): raise RuntimeError('no device 1')"
backend.FOLLOWER = [sys.executable, "-c", lost]
try:
    SglangSettings(**json.loads(sys.argv[1])).open()
except SettingsError as error:
    print(error)
"""


def test_a_process_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    settings = json.dumps(settings_of(model_folder, "float32", {}, ranks=2))
    done = subprocess.run([sys.executable, "-c", _PROGRAM, settings], capture_output=True, text=True, cwd=ROOT)
    reason = "rank 1 of the model has failed: no device 1"
    assert done.stdout.rstrip().endswith(f"cannot serve {model_folder}: {reason}"), done.stderr
    assert len(done.stdout.splitlines()) == 1
