"""`lmpool` with SGLang on a machine without a GPU: `python -m tests.sglang_cpu worker MODEL --backend sglang`."""

from __future__ import annotations

from lmpool.cli import main
from tests.newest_engines import accept
from tests.sglang_cpu.shim import install

if __name__ == "__main__":
    install()
    accept()
    main()
