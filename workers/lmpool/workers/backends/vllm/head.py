"""Finds the output head of a model that vLLM has loaded, and joins the parts of a head that several ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from lmpool.errors import first_line
from lmpool.workers.backends.output_head import OutputHead

_CHECKED = 4  # Hidden states whose logits are compared.


class HeadFacts(NamedTuple):
    """What a rank sends to the worker about its part of the output head."""

    scale: float
    soft_cap: float | None
    bias: NDArray[np.float32] | None  # The part of the bias.


class HeadPart(NamedTuple):
    """The part of a model's output head that a process holds: the whole head, or the head of some tokens."""

    head: OutputHead  # Its weights and bias begin with the first token of the part.
    tokens: range

    @property
    def facts(self) -> HeadFacts:
        """The facts that the worker needs, except the weights."""
        bias = None if self.head.bias is None else self.head.bias.float().cpu().numpy()
        return HeadFacts(self.head.scale, self.head.soft_cap, bias)

    def weights(self, first: int, count: int) -> NDArray[np.uint8]:
        """The weights of those of the `count` tokens from `first` on that are in this part, as bytes (n, row size)."""
        begin, end = max(first, self.tokens.start), min(first + count, self.tokens.stop)
        rows = self.head.weights(begin - self.tokens.start, max(0, end - begin))
        return rows.cpu().contiguous().view(torch.uint8).numpy()


class _Given(NamedTuple):
    """The arguments that a model passes to vLLM's logits processor."""

    lm_head: Any
    hidden_states: Tensor
    embedding_bias: Tensor | None = None
    skip_gather: bool = False


def find_head(runner: Any, compute_logits: Callable[[Tensor], Tensor]) -> HeadPart | str:
    """The part of the output head that this process holds, or the reason why clients cannot use the model's head.

    The ranks of the last pipeline stage must call this function together, because they compute logits together.
    """
    config = runner.model_config
    calls = list[tuple[Any, _Given]]()

    def note(layer: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((layer, _Given(*given, **named)))

    kinds = (LogitsProcessor, LogitsProcessorWithLoRA)
    layers = [layer for layer in runner.get_model().modules() if isinstance(layer, kinds)]
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    draws = torch.Generator().manual_seed(0)  # All ranks need the same states.
    states = torch.randn(_CHECKED, config.get_hidden_size(), generator=draws).to(runner.device, config.dtype)
    try:
        with torch.inference_mode():
            logits = compute_logits(states)
            part = _part_of(*calls[0], config) if len(calls) == 1 and logits.dtype is config.dtype else None
            if part is None:
                return "the model has no plain linear head in its own dtype"
            # A rank may have no token of a small vocabulary.
            if part.tokens and not part.head.reproduces(logits[:, part.tokens.start : part.tokens.stop], states):
                return "the head does not give the model's logits"
            return part
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"the model's head cannot be checked ({first_line(error)})"
    finally:
        for handle in handles:
            handle.remove()


def _part_of(processor: Any, given: _Given, config: Any) -> HeadPart | None:
    """The part of the head in the layer that a model passes to vLLM's logits processor; None if it is not plain."""
    layer, size = getattr(given.lm_head, "base_layer", given.lm_head), config.get_hidden_size()
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not isinstance(layer, VocabParallelEmbedding) or not isinstance(layer.quant_method, plain):
        return None
    shard, weight = layer.shard_indices, layer.weight
    tokens = range(shard.org_vocab_start_index, min(shard.org_vocab_end_index, config.get_vocab_size()))
    is_shared = layer.tp_size == get_tp_group().world_size  # Otherwise each rank has the whole head.
    # On a CPU, vLLM removes the weights of some layers after it has packed them for its kernels.
    if not is_shared or weight.dtype is not config.dtype or weight.shape[1:] != (size,) or len(weight) < len(tokens):
        return None
    kept = weight.detach()[: len(tokens)]  # The rest is padding.
    bias = None if given.embedding_bias is None else given.embedding_bias.detach()[: len(tokens)]
    soft_cap = None if processor.soft_cap is None else float(processor.soft_cap)
    head = OutputHead(size, lambda first, count: kept[first : first + count], bias, float(processor.scale), soft_cap)
    return HeadPart(head, tokens)


def joined_head(
    parts: Sequence[HeadFacts], config: Any, fetch: Callable[[int, int], Iterable[NDArray[np.uint8]]]
) -> OutputHead:
    """The whole output head of a model with vLLM's config `config`.

    Args:
        parts: the facts of all parts, in the order of their tokens.
        config: vLLM's config of the model.
        fetch: function that returns `HeadPart.weights` of all parts, in the same order.
    """

    def weights(first: int, count: int) -> Tensor:
        return torch.from_numpy(np.concatenate([*fetch(first, count)])).view(config.dtype)

    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.from_numpy(np.concatenate(biases)) if biases else None
    return OutputHead(config.get_hidden_size(), weights, bias, parts[0].scale, parts[0].soft_cap)
