"""Torch tensors over the memory of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class _Writable:
    """A read-only array's memory, offered as writable: torch has no read-only tensors, and warns of such arrays."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__: dict[str, Any] = {**interface, "data": (interface["data"][0], False)}
        self._owner = array


def tensor_over(array: NDArray[np.float32]) -> torch.Tensor:
    """A tensor of the same shape and dtype in the same memory, which it keeps alive.

    Others may have the same memory, so the tensor must not be changed in place.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
