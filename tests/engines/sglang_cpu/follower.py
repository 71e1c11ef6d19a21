"""A follower of SGLang on a machine without a GPU: `python -m tests.engines.sglang_cpu.follower`."""

from __future__ import annotations

from lmpool.workers.backends.sglang.follower import main


def _prepare() -> None:
    # Import here, so that the follower first makes sure that it ends with its worker.
    from tests.engines.newest import accept
    from tests.engines.sglang_cpu.shim import install

    install()
    accept()


if __name__ == "__main__":
    main(_prepare)
