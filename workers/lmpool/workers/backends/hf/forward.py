"""A forward of the model over a batch, and the check which batches leave a prompt's row as it is alone."""

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

_LENGTH = 24
_LONGEST_WINDOW = 1024

_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What model code raises for arguments that it was not written for; there is no common type."""

EAGER = "eager"
"""transformers' name of the attention that is written in the model's own code, and so leaves nothing out."""

_LEFT_OUT = ("attn_logit_softcapping",)
"""Fields of a config that transformers passes to attention functions, and that its default one (sdpa) ignores."""

_log = logging.getLogger(__name__)


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
        paths: Sequence[Path] = (),
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
        paths: Sequence[Path] = (),
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
        new = max(most, *(new_tokens(length, len(path), wanted) for length, path, wanted in wants))
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


def new_tokens(length: int, held: int, kept: int = 1) -> int:
    """Tokens to compute for a prompt of which a prefix is held: at least the last `kept`, whose logits are wanted."""
    return length - min(held, length - kept)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a model's forward can be trusted with.

    Attributes:
        logits: what it returned for one prompt, tensor of shape (1, V).
        pads: prompts of different length may run together.
        layout: what one token leaves in its cache; None if prefixes cannot be reused.
        horizon: prompts longer than this must run alone and without reuse; at most the longest prompt.
        attention: `EAGER` if transformers' default attention had to be replaced, "" if it serves.
    """

    logits: Tensor
    pads: bool
    layout: KVLayout | None
    horizon: int
    attention: str


def check_model(forward: Forward, max_prompt_tokens: int) -> Abilities:
    """Compare batched, padded and reused rows of a few prompts with those of the same prompts alone.

    The rows of the prompts alone are compared with those of eager attention first (`_choose_attention`).

    Raises:
        RuntimeError, ValueError, ...: the model cannot even run one prompt.
    """
    config = forward.model.config.get_text_config(decoder=True)
    horizon = min(max_prompt_tokens, _horizon(config))
    window = attention_window(config)
    length = min(horizon, max(_LENGTH, window + 8 if window <= _LONGEST_WINDOW else 0))
    prompts = _prompts(length, forward.logits([[0]]).shape[-1])
    attention, check = _choose_attention(forward, config, prompts)
    logits = forward.logits([[0]])
    pads = check.pads()
    if not pads:
        _log.info("the model's rows change with padding: only prompts of one length run together")
    layout = cache_layout(forward)
    if layout is None:
        _log.info("the model's cache is not made of plain attention layers: prefixes are not reused")
    elif not check.reuses(layout, pads):
        layout = None
        _log.info("the model's rows change when a prefix is reused: prefixes are not reused")
    return Abilities(logits, pads, layout, horizon, attention)


def _choose_attention(forward: Forward, config: PreTrainedConfig, prompts: list[list[int]]) -> tuple[str, _Check]:
    """Switch the model to eager attention where the default attention gives other rows, or must give other rows.

    Args:
        forward: runs the model.
        config: of the model's decoder.
        prompts: whose rows are compared.

    Returns:
        `EAGER` if the model was switched, else ""; and the rows of the prompts alone.
    """
    model = forward.model
    check = _Check(forward, prompts)
    default = model.config._attn_implementation
    if default == EAGER:
        return "", check
    # Soft-capping changes large attention scores only: a few short prompts need not show it.
    left_out = [name for name in _LEFT_OUT if getattr(config, name, None)]
    try:
        model.set_attn_implementation(EAGER)
        if model.config._attn_implementation != EAGER:
            _log.warning(
                "the model's code chooses its attention itself: its rows are not compared with eager attention"
            )
            return "", check
        exact = _Check(forward, prompts)
    except _FORWARD_ERRORS as error:
        _log.warning("the model's rows are not compared with eager attention, which fails: %s", error)
        model.set_attn_implementation(default)
        return "", check
    if not left_out and (not exact.alone.isfinite().all() or check.agrees_with(exact)):
        model.set_attn_implementation(default)
        return "", check
    reason = f"leaves out {', '.join(left_out)}" if left_out else "gives other rows"
    _log.info(
        "attention is computed by the model's own code (eager), for transformers' default (%s) %s", default, reason
    )
    return EAGER, exact


def attention_window(config: PreTrainedConfig) -> int:
    """How far back the model's most short-sighted layers look; 0 if all of them see everything."""
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if type(size) is int and size > 0), default=0)


def cache_layout(forward: Forward) -> KVLayout | None:
    """What one token leaves in the model's cache, or None if that is not keys and values of plain layers."""
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
    """Up to which length a prefix's keys and values are surely those that its extensions need.

    A window too long to be tried here has no effect below its size. Rotary embeddings that stretch with the
    longest prompt of a batch have none below the length that the model was first trained for.
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
    """A prompt, its prefixes, a branch and a stranger, all of different lengths."""
    long = [(7 + 31 * i * (i + 3)) % vocab_size for i in range(length)]
    third = max(1, length // 3)
    branch = [*long[:third], *((token + 1) % vocab_size for token in long[third : 2 * third - 1])]
    lengths = {1, third, 2 * third, 2 * third + 1, length}
    prefixes = [long[:size] for size in sorted(lengths) if size <= length]
    return [*prefixes, branch, [(token + 2) % vocab_size for token in long[: third + 1]]]


class _Check:
    """Compares rows of some prompts that are computed together or in parts with those of each of them alone."""

    def __init__(self, forward: Forward, prompts: list[list[int]]) -> None:
        self._forward = forward
        self._prompts = prompts
        self.alone = torch.cat([forward.logits([ids]) for ids in prompts]).float()

    def agrees_with(self, other: _Check) -> bool:
        """Whether the rows of the same prompts alone are the same but for rounding."""
        return self._agree(range(len(self._prompts)), other.alone.to(self._forward.model.dtype))

    def pads(self) -> bool:
        """Whether padding leaves rows as they are."""
        try:
            return self._agree(range(len(self._prompts)), self._forward.logits(self._prompts))
        except _FORWARD_ERRORS:
            return False

    def reuses(self, layout: KVLayout, pads: bool) -> bool:
        """Whether prompts that grow, each on the keys and values of the last one, have the same rows."""
        everything = range(len(self._prompts))
        grown = [[index] for index in everything]
        # The second time around everything is held; in between, prompts that lack little recompute more.
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
        """Whether rows differ from those of the prompts alone by no more than rounding does.

        Differences are measured against the spread of a row's own logits: an untrained model's are tiny.
        """
        expected = self.alone[list(batch)]
        error = (logits.float() - expected).square().mean(-1).sqrt()
        tolerance = 2e-3 if logits.dtype == torch.float32 else 0.15
        return bool((error <= tolerance * expected.std(-1) + 1e-30).all())
