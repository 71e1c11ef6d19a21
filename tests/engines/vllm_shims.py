"""Enables features of vLLM that are disabled on a CPU, so that tests can check their results, though more slowly.

Call `use_v2_runner` before vllm is imported, and `use_async_scheduling` before an engine is created.
"""

from __future__ import annotations

import os
from multiprocessing import spawn
from types import SimpleNamespace
from typing import Any


def use_v2_runner() -> None:
    """Use the model runner V2, which is the default on CUDA; its Triton kernels run in Triton's interpreter.

    Ranks that this process starts use it too. Set TRITON_INTERPRET=1 in the environment before Python starts, because
    Triton reads it when it is imported.
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

    prepare = spawn.get_preparation_data

    def prepare_rank(name: str) -> dict[str, Any]:
        """Have a rank run this file in place of the main module, before it imports vLLM."""
        data = prepare(name)
        data.pop("init_main_from_path", None)
        return data | {"init_main_from_name": __name__}

    spawn.get_preparation_data = prepare_rank


def use_async_scheduling() -> None:
    """Let vLLM schedule a step while the previous step runs, which is the default on CUDA."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_but_stay_async(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_but_stay_async)


if __name__ == "__mp_main__":  # This process is a rank.
    use_v2_runner()
