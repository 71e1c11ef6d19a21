"""The device that a setting names."""

from __future__ import annotations

import logging

import torch

from lmpool.errors import SettingsError
from lmpool.workers.backends.requirements import first_line

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
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # AssertionError is how a torch without CUDA answers.
        raise SettingsError(f"device: {name!r} cannot be used: {first_line(error)}") from error
    if device.type == "meta":
        raise SettingsError("device: 'meta' computes nothing")
    return device


def log_threads(device: str) -> None:
    """Say in the log where rows are computed, and with how many of torch's threads on the CPU."""
    threads = torch.get_num_threads()
    _logger.info("computing on %s; CPU threads: %d", device, threads, extra={"threads": threads})
