"""torch's vector functions on the CPU, made to compute what they should from the first call on."""

from __future__ import annotations

from functools import cache

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan", "tanh",
    "trunc",
)  # fmt: skip
"""What torch leaves to MKL, as its `ATen/cpu/vml.h` says; others it computes itself."""


@cache
def settle() -> None:
    """Have MKL choose the kernels of its vector functions, while no other thread calls one.

    It chooses each with its first call. Where several of torch's threads make that call at once, one of them may
    compute its part with a kernel of low accuracy, and say nothing: errors of 1e-4 (pytorch/pytorch#188792; torch 2.13
    on two threads did so in 4 of 240 processes). A model whose table of cosines was made then has wrong rows, off by
    1e-3 from the middle of its positions on, as long as it is loaded. So this is called before a model is.

    Once is enough for a process, and costs some microseconds. One element is computed by the thread that calls.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
