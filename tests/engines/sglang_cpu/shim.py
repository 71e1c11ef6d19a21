"""Stubs of packages that SGLang imports but does not need on a CPU, for machines without these packages.

SGLang imports triton, torchvision and its own kernels, but does not use these packages on a CPU with the attention of
torch. The modules of a stub package have every attribute: capitalised attributes are classes, and all other attributes
are decorators that do not change the decorated function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from lmpool.workers.backends.sglang import backend

_PACKAGES = ("triton", "torchvision", "sgl_kernel")
_declared: list[Any] = []  # Keep references: torch drops a library without a reference.
_MAKE_TENSORS = ("arange", "empty", "tensor", "zeros")


def install() -> None:
    """Install stubs for missing packages; call this function before SGLang is imported."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    backend.FOLLOWER = [sys.executable, "-m", "tests.engines.sglang_cpu.follower"]
    if not torch.cuda.is_available():
        _let_pinning_do_nothing()
    if find_spec("torchvision") is not None:
        _let_torchvision_import()
    missing = {name for name in _PACKAGES if name not in sys.modules and find_spec(name) is None}
    if not missing:
        return
    _let_transformers_see_what_is_there()
    sys.meta_path.insert(0, _Finder(missing))
    if "triton" in missing:
        _furnish_triton()


def _let_transformers_see_what_is_there() -> None:
    """Let transformers look for packages before stubs exist, and cache the result: it would use a stub."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_triton_available()


def _let_torchvision_import() -> None:
    """Declare operators that a torchvision built for CUDA lacks on a CPU, so that its import succeeds."""
    try:
        import_module("torchvision")
    except (RuntimeError, ImportError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        make: Any = torch.library.Library
        library = make("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def _let_pinning_do_nothing() -> None:
    """Let calls that pin memory do nothing: SGLang pins memory of adapters, and torch cannot pin without a GPU."""
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, device=None: self
    for name in _MAKE_TENSORS:
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*arguments: Any, **named: Any) -> torch.Tensor:
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return made


def _furnish_triton() -> None:
    """Add the few attributes of triton that SGLang uses while it is imported."""
    import triton

    triton.__version__ = "3.0.0"
    triton.cdiv = lambda count, size: -(-count // size)
    triton.next_power_of_2 = lambda number: 1 << max(0, number - 1).bit_length()
    triton.language.constexpr = _Constant


class _Constant:
    """A stub of triton's wrapper of a compile-time constant."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Anything:
    """A class that accepts any arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass


class _MadeUp(ModuleType):
    """A module that has every attribute and can be called as a decorator, with or without arguments."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__path__: list[str] = []
        self.__file__ = __file__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute: Any
        if name[0].isupper():
            base = Exception if name.endswith(("Error", "OutOfResources")) else _Anything
            attribute = type(name, (base,), {"__module__": self.__name__})
        else:
            full = f"{self.__name__}.{name}"
            attribute = sys.modules.setdefault(full, _MadeUp(ModuleSpec(full, _Finder(set()), is_package=True)))
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        return lambda decorated: decorated

    # Behave like an empty list: torch reads triton's list of backends.
    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of stub packages for Python's import system."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _MadeUp(spec)

    def exec_module(self, module: ModuleType) -> None:
        pass
