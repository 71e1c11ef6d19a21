"""The forward of a model over a batch, and checks which batches give a prompt the same row as alone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from lmpool.workers.backends.hf.kv_pool import ROOT, KVLayout, KVPool, Path

# Tokens of the longest prompt of the checks, unless a sliding window needs more.
_CHECK_TOKENS = 24
# Longest sliding window that the checks try: longer prompts would take too long at every start.
_LONGEST_WINDOW = 1024

_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""Exceptions of model code for arguments that it was not written for; there is no common type."""

EAGER = "eager"
"""transformers' name of the attention in the model's own code, which supports all options of the model."""

_LEFT_OUT = ("attn_logit_softcapping",)
"""Config fields that transformers passes to attention functions, and that the default function (sdpa) ignores."""

_log = logging.getLogger(__name__)


class Forward:
    """Runs a model on right-aligned batches.

    A batch computes the last `new` tokens of each prompt, where `new` is the max number of tokens that a prompt of the
    batch lacks. A prompt that lacks fewer recomputes some, and is not padded in the middle: sliding windows and
    position biases rely on adjacent tokens.

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
        paths: Sequence[Path] = (),
        pool: KVPool | None = None,
        root: int = ROOT,
    ) -> Tensor:
        """The logits of the token after each prompt.

        Args:
            prompts: token ids, each at least one.
            paths: per prompt the slots of its held prefix (`PrefixSlots.match`); only with a pool.
            pool: provides keys and values, and keeps the new ones.
            root: root of the paths.

        Returns:
            tensor of shape (n, V) in the dtype that the model returns.
        """
        return self.last_logits(prompts, [1] * len(prompts), paths, pool, root)[:, -1]

    def last_logits(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[int],
        paths: Sequence[Path] = (),
        pool: KVPool | None = None,
        root: int = ROOT,
    ) -> Tensor:
        """The logits of the tokens after each prompt's last tokens.

        Args:
            prompts: token ids, each at least one.
            kept: per prompt, the number of these last tokens.
            paths: as `logits`.
            pool: as `logits`.
            root: as `logits`.

        Returns:
            tensor of shape (n, max(kept), V), right-aligned.
        """
        lengths = [len(ids) for ids in prompts]
        max_kept = max(kept)
        if pool is None:
            return self._run(prompts, lengths, max(lengths), max_kept, {"use_cache": False})
        wants = zip(lengths, paths, kept, strict=True)
        new = max(max_kept, *(new_tokens(length, len(path), wanted) for length, path, wanted in wants))
        block = pool.gather(lengths, paths, new)
        logits = self._run(prompts, lengths, new, max_kept, {"use_cache": True, "past_key_values": block.cache})
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
            # Without a mask attention takes its fast path.
            positions = np.arange(total) - (total - np.array(lengths))[:, None]
            arguments["attention_mask"] = self._tensor((positions >= 0).astype(np.int64))
            arguments["position_ids"] = self._tensor(positions[:, total - new :].clip(0))
        arguments["logits_to_keep"] = kept
        output = self.model(**{name: value for name, value in arguments.items() if name in self.takes})
        logits: Tensor = output.logits[:, -kept:]
        return logits

    def _tensor(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def new_tokens(length: int, held: int, kept: int = 1) -> int:
    """Tokens to compute for a prompt with a held prefix: at least the last `kept`, whose logits are requested."""
    return length - min(held, length - kept)


@dataclass(frozen=True, slots=True)
class Abilities:
    """Results of the checks of a model.

    Attributes:
        logits: logits of one prompt, tensor of shape (1, V).
        pads: prompts of different lengths may run together.
        layout: keys and values of one token in the cache; None if prefixes cannot be reused.
        horizon: longer prompts must run alone and without reuse; at most the longest prompt.
        attention: `EAGER` if transformers' default attention had to be replaced, else "".
    """

    logits: Tensor
    pads: bool
    layout: KVLayout | None
    horizon: int
    attention: str


def check_model(forward: Forward, max_prompt_tokens: int) -> Abilities:
    """Compare the rows of a few prompts in batches, padded and with reused prefixes, with their rows alone.

    Before that, the rows alone are compared with those of eager attention (`_choose_attention`).

    Raises:
        RuntimeError, ValueError, ...: the model cannot run a single prompt.
    """
    config = forward.model.config.get_text_config(decoder=True)
    horizon = min(max_prompt_tokens, _horizon(config))
    window = attention_window(config)
    length = min(horizon, max(_CHECK_TOKENS, window + 8 if window <= _LONGEST_WINDOW else 0))
    prompts = _prompts(length, forward.logits([[0]]).shape[-1])
    attention, check = _choose_attention(forward, config, prompts)
    logits = forward.logits([[0]])
    pads = check.pads()
    if not pads:
        _log.info("padding changes the model's rows: only prompts of one length run together")
    layout = cache_layout(forward)
    if layout is None:
        _log.info("the model's cache is not made of plain attention layers: prefixes are not reused")
    elif not check.reuses(layout, pads):
        layout = None
        _log.info("reused prefixes change the model's rows: prefixes are not reused")
    return Abilities(logits, pads, layout, horizon, attention)


def _choose_attention(forward: Forward, config: PreTrainedConfig, prompts: list[list[int]]) -> tuple[str, _Check]:
    """Switch the model to eager attention if the default attention gives other rows, or must give other rows.

    Args:
        forward: runs the model.
        config: config of the model's decoder.
        prompts: prompts whose rows are compared.

    Returns:
        `EAGER` if the model was switched, else ""; and the rows of the prompts alone.
    """
    model = forward.model
    check = _Check(forward, prompts)
    default = model.config._attn_implementation
    if default == EAGER:
        return "", check
    # Soft-capping changes only large attention scores, which a few short prompts may not have.
    left_out = [name for name in _LEFT_OUT if getattr(config, name, None)]
    try:
        model.set_attn_implementation(EAGER)
        if model.config._attn_implementation != EAGER:
            _log.warning("the model's code selects its own attention: its rows are not compared with eager attention")
            return "", check
        exact = _Check(forward, prompts)
    except _FORWARD_ERRORS as error:
        _log.warning("the model's rows are not compared with eager attention, which fails: %s", error)
        model.set_attn_implementation(default)
        return "", check
    if not left_out and (not exact.alone.isfinite().all() or check.agrees_with(exact)):
        model.set_attn_implementation(default)
        return "", check
    reason = f"ignores {', '.join(left_out)}" if left_out else "gives other rows"
    _log.info("the model's own code computes attention (eager), because transformers' default (%s) %s", default, reason)
    return EAGER, exact


def attention_window(config: PreTrainedConfig) -> int:
    """The shortest attention window of the model's layers in tokens; 0 if all layers attend to all tokens."""
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if type(size) is int and size > 0), default=0)


def cache_layout(forward: Forward) -> KVLayout | None:
    """Keys and values of one token in the model's cache; None if its layers are not plain attention layers."""
    if not {"past_key_values", "use_cache"} <= forward.takes:
        return None
    cache = DynamicCache()
    try:
        forward.model(input_ids=torch.tensor([[0, 0, 0]], device=forward.device), past_key_values=cache, use_cache=True)
    except _FORWARD_ERRORS:
        return None
    shapes = []
    dtypes = set()
    for layer in cache.layers:
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            return None
        for part in (layer.keys, layer.values):
            if part.ndim != 4 or part.shape[0] != 1 or part.shape[2] != 3:
                return None
            shapes.append((part.shape[1], part.shape[3]))
            dtypes.add(part.dtype)
    return KVLayout(tuple(shapes), dtypes.pop()) if len(dtypes) == 1 else None


def _horizon(config: PreTrainedConfig) -> int:
    """Longest prefix whose keys and values are certainly valid for longer prompts.

    A window that is too long to be tried here has no effect below its size. Rotary embeddings that scale with the
    longest prompt of a batch have none below the length of the first training.
    """
    window = attention_window(config)
    limits = [window] if window > _LONGEST_WINDOW else []
    stated = getattr(config, "rope_parameters", None) or {}
    for rope in [stated, *stated.values()]:
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            limits.append(original or config.max_position_embeddings)
    return min(limits, default=2**62)


def _prompts(length: int, vocab_size: int) -> list[list[int]]:
    """A prompt, its prefixes, a branch and an unrelated prompt, all of different lengths."""
    long = [(7 + 31 * i * (i + 3)) % vocab_size for i in range(length)]
    third = max(1, length // 3)
    branch = [*long[:third], *((token + 1) % vocab_size for token in long[third : 2 * third - 1])]
    lengths = {1, third, 2 * third, 2 * third + 1, length}
    prefixes = [long[:size] for size in sorted(lengths) if size <= length]
    return [*prefixes, branch, [(token + 2) % vocab_size for token in long[: third + 1]]]


class _Check:
    """Compares rows of prompts that are computed together or in parts with their rows alone."""

    def __init__(self, forward: Forward, prompts: list[list[int]]) -> None:
        self._forward = forward
        self._prompts = prompts
        self.alone = torch.cat([forward.logits([ids]) for ids in prompts]).float()

    def agrees_with(self, other: _Check) -> bool:
        """Whether the rows alone are the same, except for rounding."""
        return self._agree(range(len(self._prompts)), other.alone.to(self._forward.model.dtype))

    def pads(self) -> bool:
        """Whether padding does not change rows."""
        try:
            return self._agree(range(len(self._prompts)), self._forward.logits(self._prompts))
        except _FORWARD_ERRORS:
            return False

    def reuses(self, layout: KVLayout, pads: bool) -> bool:
        """Whether prompts that reuse the keys and values of shorter prompts have the same rows."""
        everything = range(len(self._prompts))
        grown = [[index] for index in everything]
        # In the last batch all tokens are held. In the one before, prompts that lack few tokens recompute some.
        together = [[1], everything, everything] if pads else []
        try:
            return self._all_agree(grown, layout) and self._all_agree(together, layout)
        except _FORWARD_ERRORS:
            return False

    def _all_agree(self, batches: Sequence[Sequence[int]], layout: KVLayout) -> bool:
        pool = KVPool(layout, sum(map(len, self._prompts)), self._forward.device)
        return all(self._agree(batch, self._reused(batch, pool)) for batch in batches)

    def _reused(self, batch: Sequence[int], pool: KVPool) -> Tensor:
        prompts = [self._prompts[index] for index in batch]
        return self._forward.logits(prompts, [pool.slots.match(ids) for ids in prompts], pool)

    def _agree(self, batch: Sequence[int], logits: Tensor) -> bool:
        """Whether rows differ from the rows alone only by rounding.

        Differences are measured relative to the spread of the logits, which is tiny for an untrained model.
        """
        expected = self.alone[list(batch)]
        error = (logits.float() - expected).square().mean(-1).sqrt()
        tolerance = 2e-3 if logits.dtype == torch.float32 else 0.15
        return bool((error <= tolerance * expected.std(-1) + 1e-30).all())
