"""lmpool calls each vector function of MKL once in one thread before several threads of torch call it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmpool.trie import torch_device
from lmpool.trie.torch_device import TorchKernels
from lmpool.trie.trie import Trie


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is partly untyped
    """Records the functions that torch runs, and their dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            assert args[0].numel() == 1, "more than one element may go to several threads"
            self.seen.add((function.__name__.split(".")[0], args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_each_function_that_torch_delegates_to_mkl_is_called_once_with_one_element() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/cpu/vml.h").read_text()
    functions = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header, re.M))
    assert functions
    with Calls() as calls:
        torch_device.settle.__wrapped__()
    assert calls.seen == {(name, dtype) for name in functions for dtype in (torch.float32, torch.float64)}


def test_no_kernels_of_torch_are_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settled(Exception):
        pass

    def settle() -> None:
        raise Settled

    monkeypatch.setattr(torch_device, "settle", settle)
    with pytest.raises(Settled):
        TorchKernels(Trie([b"a", b"b"]), "cpu")
