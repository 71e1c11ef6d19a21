"""One padded forward: prompts in, the logits of their last positions out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmpool.workers.backends.hf.kv_pool import KVPool
from lmpool.workers.backends.hf.prefix_slots import ROOT


def new_tokens(length: int, held: int, kept: int = 1) -> int:
    """Tokens to compute for a prompt of which a prefix is held: at least the last `kept`, whose logits are wanted."""
    return length - min(held, length - kept)


class Forward:
    """Runs a model on right-aligned batches.

    A batch computes the last `new` tokens of each of its prompts, where `new` is what the neediest of them
    lacks. A prompt that lacks fewer recomputes some instead of being padded in the middle: then the tokens of
    a prompt always stand side by side, which sliding windows and position biases rely on.

    Args:
        model: a causal language model in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.takes = frozenset(inspect.signature(model.forward).parameters)

    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        paths: Sequence[list[int]] = (),
        pool: KVPool | None = None,
        root: int = ROOT,
    ) -> Tensor:
        """The logits of the token after each prompt.

        Args:
            prompts: token ids, each at least one.
            paths: per prompt the slots of its held prefix (`PrefixSlots.match`); only with a pool.
            pool: where to take keys and values from, and where to keep the new ones.
            root: that the paths begin at.

        Returns:
            tensor of shape (n, V) in the dtype that the model returns.
        """
        return self.last_logits(prompts, [1] * len(prompts), paths, pool, root)[:, -1]

    def last_logits(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[int],
        paths: Sequence[list[int]] = (),
        pool: KVPool | None = None,
        root: int = ROOT,
    ) -> Tensor:
        """The logits of the tokens after each prompt's last tokens.

        Args:
            prompts: token ids, each at least one.
            kept: per prompt of how many last tokens.
            paths: as `logits`.
            pool: as `logits`.
            root: as `logits`.

        Returns:
            tensor of shape (n, max(kept), V), right-aligned.
        """
        lengths = [len(ids) for ids in prompts]
        most = max(kept)
        if pool is None:
            return self._run(prompts, lengths, max(lengths), most, {"use_cache": False})
        wants = zip(lengths, paths, kept, strict=True)
        new = max(most, *(new_tokens(length, len(path), own) for length, path, own in wants))
        block = pool.gather(lengths, paths, new)
        logits = self._run(prompts, lengths, new, most, {"use_cache": True, "past_key_values": block.cache})
        pool.store(prompts, paths, block, root)
        return logits

    def _run(
        self, prompts: Sequence[Sequence[int]], lengths: list[int], new: int, kept: int, arguments: dict[str, Any]
    ) -> Tensor:
        total = max(lengths)
        ids = np.zeros((len(prompts), total), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[total - len(prompt) :] = prompt
        arguments["input_ids"] = self._tensor(ids[:, total - new :])
        if min(lengths) < total:
            # Only then: without a mask attention takes its fast path.
            positions = np.arange(total) - (total - np.array(lengths))[:, None]
            arguments["attention_mask"] = self._tensor((positions >= 0).astype(np.int64))
            arguments["position_ids"] = self._tensor(positions[:, total - new :].clip(0))
        arguments["logits_to_keep"] = kept
        output = self.model(**{name: value for name, value in arguments.items() if name in self.takes})
        logits: Tensor = output.logits[:, -kept:]
        return logits

    def _tensor(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
