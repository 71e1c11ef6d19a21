"""Replaces the weights of a model that vLLM has loaded, in place, with vLLM's own loader."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from lmpool.protocol.tensors import Types, new_changes
from lmpool.workers.backends.checkpoint import NewWeights

_LAYER = re.compile(r".*?\.\d+\.")


def checked_weights(full: Path, sparse: Sequence[Path], held: int, types: Types) -> NewWeights:
    """Read and check the files of `ChangesWeights.load_weights`.

    vLLM joins tensors, such as q_proj, k_proj and v_proj, and loads the joined tensor as a whole. So if a tensor of a
    layer changes, all tensors of the layer are loaded.
    """
    changed = {_layer_of(name) for name in new_changes(full, sparse, held, types)}
    names = [name for name in types if _layer_of(name) in changed]
    return NewWeights(str(full), [*map(str, sparse)], names, dict(types))


def load_weights(worker: Any, new: NewWeights) -> None:
    """Load tensors into the model, or into a rank's part of it; `worker` is vLLM's object of the rank."""
    # vLLM would drop all adapters. Their factors do not depend on the weights of the model.
    keep_adapters = patch.object(worker.model_runner, "reset_lora_state", lambda: None)
    loader = logging.getLogger("vllm.model_executor.model_loader.reload")
    level = loader.level
    loader.setLevel(logging.ERROR)  # vLLM warns about each layer of which no tensor is loaded.
    try:
        with keep_adapters:
            worker.reload_weights(weights_iterator=new.tensors())
    finally:
        loader.setLevel(level)
    for layer in worker.model_runner.get_model().modules():
        # On a CPU, vLLM has a packed copy of the head, which it forgets if the head is tied to the embedding.
        if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)


def _layer_of(name: str) -> str:
    """The beginning of a tensor's name up to the number of its layer; "" for all tensors outside of layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""
