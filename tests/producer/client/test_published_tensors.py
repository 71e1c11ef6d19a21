"""Tensors of torch that a publisher encodes as a safetensors file."""

from __future__ import annotations

import torch

from lmpool.producer.client.versions import _prepare
from lmpool.protocol.tensors import TensorType, types_of

EMBEDDING = TensorType("F32", (5, 3))


def test_the_state_dict_of_a_model_with_a_tied_head_can_be_published() -> None:
    embedding = torch.nn.Embedding(5, 3).weight
    upload = _prepare({"embed.weight": embedding, "lm_head.weight": embedding}, {"embed.weight": EMBEDDING}, False)
    assert types_of(upload.data) == {"embed.weight": EMBEDDING}
    assert not upload.is_sparse


def test_a_head_that_the_checkpoint_has_is_published() -> None:
    wanted = {"embed.weight": EMBEDDING, "lm_head.weight": EMBEDDING}
    tensors = {"embed.weight": torch.zeros(5, 3), "lm_head.weight": torch.ones(5, 3)}
    assert types_of(_prepare(tensors, wanted, False).data) == wanted
