"""A digest of a model's weights: the same on every machine, another one as soon as one weight differs."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_VOLATILE = {
    "_name_or_path",
    "_attn_implementation",
    "_commit_hash",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
}
_SAMPLES = 1024
_CHUNK = 1 << 24
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_revision(model: PreTrainedModel) -> str:
    """Digest of every parameter and persistent buffer and of what the config says of the architecture.

    Of each tensor it takes name, shape, dtype, the sum of its bit patterns and a sample of its elements. Sums
    of integers do not depend on the order of addition, so neither device nor number of threads matter.

    Returns:
        32 hexadecimal digits.
    """
    state = blake2b(digest_size=16)
    config = json.dumps(_stable(model.config.to_diff_dict()), sort_keys=True, default=str)
    state.update(config.encode())
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.detach().reshape(-1)
        if bits.is_complex():
            bits = torch.view_as_real(bits).reshape(-1)
        bits = bits.view(_INTEGERS[bits.element_size()])
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_total(bits)}\n".encode())
        state.update(bits[:: max(1, len(bits) // _SAMPLES)].cpu().numpy().tobytes())
    return state.hexdigest()


def _total(bits: Tensor) -> int:
    """The sum modulo 2^64; in chunks, because widening a large tensor at once could take all memory."""
    total = 0
    for chunk in torch.split(bits, _CHUNK):
        total += int(chunk.sum(dtype=torch.int64))
    return total % (1 << 64)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    return value
