"""The virtual environment of the compared projects (peers), with packages from PyPI; built once and kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from benchmarks.harness.processes import REPOSITORY, BenchmarkError, run

VARIABLE = "LMPOOL_BENCH_PEERS"

# Install torch first: packages that need torch must not choose another version.
_STEPS = (
    ("torch==2.13.0",),
    # Install the version of transformers in constraints.txt, so that both sides run the same model code.
    ("torch==2.13.0", "transformers==5.19.0", "genlm-backend==0.3.1", "arq==0.28.0"),
    ("torch==2.13.0", "transformers==5.19.0", "genlm-backend==0.3.1", "genlm-control==0.4.1"),
)
_SHOWN = ("genlm-backend", "genlm-control", "arq", "torch", "transformers", "redis", "numpy", "numba")
_STAMP = "lmpool-requirements.json"


def peers_python() -> str:
    """The interpreter that LMPOOL_BENCH_PEERS names, else that of `.cache/peers-venv`, which is built if missing."""
    if named := os.environ.get(VARIABLE):
        python = Path(named) / "bin" / "python"
        if not python.exists():
            raise BenchmarkError(f"{VARIABLE} is {named}, which has no bin/python. Name the folder of an environment.")
        return str(python)
    folder = REPOSITORY / ".cache" / "peers-venv"
    stamp, wanted = folder / _STAMP, json.dumps(_STEPS)
    if not stamp.exists() or stamp.read_text() != wanted:
        _build(folder)
        stamp.write_text(wanted)
    return str(folder / "bin" / "python")


def versions(python: str) -> dict[str, str]:
    """Package -> version in the peers' environment."""
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_SHOWN!r}}}))"
    return dict(json.loads(run(python, "-I", "-c", code)))


def _build(folder: Path) -> None:
    print(f"installing the peers into {folder} (once; some minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(folder))
    for step in _STEPS:
        run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *step)
