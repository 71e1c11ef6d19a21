"""The output head of a model that SGLang has loaded: found in the first forward, and read from all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor
from torch.distributed import all_gather, recv, send

from lmpool.errors import WorkerError
from lmpool.workers.backends.output_head import OutputHead

_CHECKED = 4  # Hidden states whose logits are compared.
_log = logging.getLogger(__name__)


class RankHead:
    """A rank's part of the output head, the head of the tokens in its shard of the vocabulary.

    All ranks compute the same forwards, and read the head together.

    Args:
        model: SGLang's model.
        config: SGLang's config of the model.
        group: SGLang's group of ranks.

    Attributes:
        part: the rank's part, whose weights begin with the first token of the rank; None if the head of a rank does not
            give the logits, and before the first forward.
    """

    def __init__(self, model: torch.nn.Module, config: Any, group: Any) -> None:
        self._config, self._group = config, group
        self.part: OutputHead | None = None
        self._is_checked = False
        self._tokens: list[range] = []  # Tokens of each rank.
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module._get_logits = partial(self._check_first, module, module._get_logits)

    def _check_first(
        self, processor: Any, get_logits: Callable[..., Tensor], states: Tensor, layer: Any, metadata: Any, **named: Any
    ) -> Tensor:
        """Compute logits as SGLang does. The first call finds the head, because SGLang passes it here."""
        if not self._is_checked:
            self._is_checked = True
            self._find(processor, partial(get_logits, use_logits_buffer=False), states, layer, metadata)
        return get_logits(states, layer, metadata, **named)

    def _find(
        self, processor: Any, get_logits: Callable[..., Tensor], states: Tensor, layer: Any, metadata: Any
    ) -> None:
        layer = getattr(layer, "base_layer", layer)  # Adapters that change the head are refused.
        weight: Any = getattr(layer, "weight", None)
        dtype, size = self._config.dtype, states.shape[-1]
        is_plain = isinstance(layer, VocabParallelEmbedding) and weight is not None
        if not is_plain or not weight.dtype == states.dtype == dtype or weight.shape[1:] != (size,):
            self._log_refusal("the model has no plain linear head")
            return
        shard, vocab_size = layer.shard_indices, self._config.vocab_size
        tokens = range(shard.org_vocab_start_index, min(shard.org_vocab_end_index, vocab_size))
        weight = weight.detach()
        scale = 1.0 if processor.logit_scale is None else float(processor.logit_scale)
        soft_cap = processor.final_logit_softcapping or None
        # SGLang adds no bias to the logits.
        head = OutputHead(size, lambda first, count: weight[first : first + count], None, scale, soft_cap)
        drawn = torch.randn(_CHECKED, size, generator=torch.Generator().manual_seed(0)).to(states)
        logits = get_logits(drawn, layer, metadata)[:, tokens.start : tokens.stop]
        # A rank may have no token of a small vocabulary.
        gives = not tokens or head.reproduces(logits, drawn)
        if gives and getattr(layer, "bias", None) is not None and bool(layer.bias.any()):
            raise WorkerError("SGLang leaves out the bias of the model's head; use --backend hf or vllm")
        facts = torch.tensor([gives, tokens.start, tokens.stop])
        gathered = [torch.empty_like(facts) for _ in self._group.ranks]
        all_gather(gathered, facts, self._group.cpu_group)
        self._tokens = [range(start, stop) for _, start, stop in (each.tolist() for each in gathered)]
        if all(bool(each[0]) for each in gathered) and sum(map(len, self._tokens)) >= vocab_size:
            self.part = head
        else:
            self._log_refusal("the head does not give the model's logits")

    def _log_refusal(self, reason: str) -> None:
        if self._group.rank_in_group == 0:
            _log.info("%s: its hidden states are not served", reason)

    def read(self, wanted: Any) -> Tensor | None:
        """The requested weights in rank 0; None in other ranks, which send their rows to rank 0.

        `wanted`: a `GetWeightsByNameReqInput`, whose name is the first row, and whose `truncate_size` the row count.
        """
        assert self.part is not None
        first, own = int(wanted.name), self._group.rank_in_group
        rows, group = torch.empty(wanted.truncate_size, self.part.size, dtype=self._config.dtype), self._group.cpu_group
        for rank, tokens in enumerate(self._tokens):
            begin, end = max(first, tokens.start), min(first + len(rows), tokens.stop)
            if begin < end and own in (0, rank):
                place = rows[begin - first : end - first]
                if own == rank:
                    place.copy_(self.part.weights(begin - tokens.start, end - begin))
                if rank and own == 0:
                    recv(place.view(torch.uint8), group=group, group_src=rank)  # gloo has no 16-bit numbers.
                elif rank:
                    send(place.view(torch.uint8), group=group, group_dst=0)
        return None if own else rows
