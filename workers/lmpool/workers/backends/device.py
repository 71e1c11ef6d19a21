"""The device that a setting names."""

from __future__ import annotations

import logging

import torch

from lmpool.errors import SettingsError

_logger = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first accelerator, else the CPU.

    Raises:
        SettingsError: this machine has no such device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        # What torch says is of its own builds and kernels; AssertionError is how one without CUDA answers.
        raise SettingsError(f"device: {name!r} cannot be used: {_why(name)}") from error
    if device.type == "meta":
        raise SettingsError(f"device: 'meta' computes nothing: {_why(name)}")
    return device


def log_threads(device: str) -> None:
    """Say in the log where rows are computed, and with how many of torch's threads on the CPU."""
    threads = torch.get_num_threads()
    _logger.info("computing on %s; CPU threads: %d", device, threads, extra={"threads": threads})


def _why(name: str) -> str:
    kind = name.partition(":")[0]
    here = f"this machine has {', '.join(_devices())}"
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"{here}, and this torch is built without CUDA: install one with it"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"{here}: torch finds no GPU (`nvidia-smi` tells whether the driver does)"
    if kind == "mps":
        return f"{here}. 'mps' is the GPU of a Mac with Apple silicon, macOS 14 or later"
    return here


def _devices() -> list[str]:
    found = ["'cpu'", *(f"'cuda:{index}'" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("'mps'")
    return found
