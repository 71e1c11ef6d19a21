"""For tests: features of vLLM that are disabled on a CPU. Slow, and for correctness only.

`use_v2_runner` must be installed before vllm is imported, the other one before an engine is made.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def use_v2_runner() -> None:
    """The new model runner, which CUDA uses by default; its Triton kernels run in Triton's interpreter.

    TRITON_INTERPRET=1 must be in the environment from the beginning: Triton reads it when it is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before Python starts: Triton reads it when it is imported")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return False

    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=Driver)


def use_async_scheduling() -> None:
    """Scheduling a step while the one before it runs, which CUDA uses by default."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_but_stay_async(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_but_stay_async)
