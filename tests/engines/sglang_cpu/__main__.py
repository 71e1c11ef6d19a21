"""Runs `lmpool` with SGLang on a machine without a GPU: `python -m tests.engines.sglang_cpu worker MODEL`."""

from __future__ import annotations

from lmpool.cli import main
from tests.engines.newest import accept
from tests.engines.sglang_cpu.shim import install

if __name__ == "__main__":
    install()
    accept()
    main()
