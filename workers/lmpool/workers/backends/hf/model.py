"""Loads a transformers model, checks its rows and its reuse of prefixes, and computes the digest of its weights."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils.logging import disable_progress_bar

from lmpool.errors import SettingsError, first_line
from lmpool.settings import check_choice
from lmpool.workers.backends.checkpoint import checkpoint_folder, quantisation_of, stable
from lmpool.workers.backends.hf import placement
from lmpool.workers.backends.hf.forward import Forward, KVLayout, KVPool
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.row_encoder import log_threads, pick_device
from lmpool.workers.backends.settings import HfSettings

_UNLIMITED = 1 << 20  # Max tokens of a prompt for a model whose config states no limit.
# Config fields that may state the max tokens of a prompt, in the order in which they are read.
LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")

_CHECK_TOKENS = 24  # Tokens of the longest prompt that the checks run, unless a sliding window needs a longer prompt.
# Max tokens of a sliding window whose effect the checks test: longer prompts would take too long at every start.
_LONGEST_WINDOW = 1024

FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""Exceptions that a model's code raises for unsupported arguments; they have no common type."""

EAGER = "eager"
"""Name in transformers of the attention code in the model's own file, which supports all options of the model."""

# Config fields of attention that sdpa, the default attention of transformers, ignores.
_LEFT_OUT = ("attn_logit_softcapping",)
# Min number of a tensor's elements that the digest includes one by one; of a smaller tensor, it includes all.
_SAMPLES = 1024
_CHUNK = 1 << 24  # Max elements of a tensor that are summed at once: as int64 numbers, these elements take 128 MiB.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ROUNDING = 1e-6  # Largest difference of float32 logits that count as the same, as a share of their deviation.
_PACKAGES = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed-tensors",),
    "torchao": ("torchao",),
}
"""Method of quantisation -> packages that transformers needs to load such a checkpoint."""

_TORCHAO = {
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
}
"""Value of `quantization` -> class of torchao."""

_log = logging.getLogger(__name__)


@torch.inference_mode(mode=False)  # Weights made in inference mode could not be replaced.
@torch.no_grad()
def load_model(settings: HfSettings) -> tuple[PreTrainedModel, int, str, Path]:
    """A model in evaluation mode on its device, the max tokens of a prompt, its weights' digest, and its folder."""
    device = pick_device(settings.device)
    folder = checkpoint_folder("model", settings.model, settings.revision, gguf_file=settings.gguf_file)
    log_threads(str(device))
    # Remove the handlers of huggingface_hub, which would log each line a second time, in another format.
    logging.getLogger("huggingface_hub").handlers.clear()
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers is partly untyped
    model, report = _from_pretrained(settings, folder)
    if absent := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        few = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise SettingsError(f"model: {settings.model} has no weights for {few}: is it a causal language model?")
    config, limit = model.config.get_text_config(decoder=True), settings.max_prompt_tokens
    stated = [value for name in LIMITS if type(value := getattr(config, name, None)) is int and value > 0]
    if limit is None:
        limit = stated[0] if stated else _UNLIMITED
    elif stated and limit > stated[0]:
        raise SettingsError(f"max_prompt_tokens: {limit} is more than the {stated[0]} positions of the model")
    try:
        if settings.device_map:
            device = placement.input_device(model)
        if device.type == "cpu":
            # transformers maps the checkpoint's files into memory, and a CPU computes with the mapped pages.
            # Overwriting a file would change the rows of a running worker, and truncating it would end the worker.
            for tensor in chain(model.parameters(), model.buffers()):  # `parameters` yields a tied weight once.
                tensor.data = tensor.data.clone()
            placement.drop_addresses(model)
        if not placement.is_spread(model):
            model.to(device)  # type: ignore[arg-type]  # transformers wraps this method without its types
        model.train(mode=False)
    except (RuntimeError, ValueError) as error:
        # There is too little memory, or the model has quantised weights that cannot be moved.
        raise SettingsError(f"device: {settings.model} cannot be put on {device}: {first_line(error)}") from error
    placement.check_placement(model, settings.model)
    try:
        # Compute the digest before the first forward, in which some models (RWKV) rescale their weights.
        revision = weights_revision(model)
    except RuntimeError as error:  # NotImplementedError too: quantised tensors lack some operations.
        raise SettingsError(f"model: the weights of {settings.model} cannot be read: {first_line(error)}") from error
    except KeyError as error:
        # transformers writes one of two tied weights to the offload folder, and does not find the other weight there.
        text = f"device_map: {settings.model} has tied weights on the disk, and {error} is not found there"
        raise SettingsError(f"{text}: give more memory (--max-memory), or save the model as safetensors") from error
    return model, limit, revision, folder


def _from_pretrained(settings: HfSettings, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in a folder, and transformers' report of missing weights."""
    file = settings.gguf_file
    load: Any = AutoModelForCausalLM.from_pretrained
    placed, offloaded = placement.placement_options(settings)
    more: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
    more |= {"output_loading_info": True, **_quantisation(settings, folder)}
    try:
        model, report = load(str(folder), dtype=settings.dtype, gguf_file=file, **more, **placed)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, struct.error) as error:
        # transformers has no exception type of its own. It raises these exceptions for missing files, unknown
        # architectures, missing packages, broken checkpoints and broken GGUF files.
        what = f"model: {settings.model}" if file is None else f"gguf_file: {file} of {settings.model}"
        if settings.device_map and offloaded is None and "`offload_folder`" in str(error):
            reason = "its files do not have the weights in the form in which they are used"
            text = f"offload_folder: {settings.model} cannot be offloaded without a folder: {reason}"
            raise SettingsError(f"{text}; name a folder with --offload-folder") from error
        damaged = "the file is damaged or cut short: " if isinstance(error, struct.error) else ""
        # Name the missing package: quantised checkpoints need packages that no extra of lmpool includes.
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        install = f"; install it with: pip install {missing}" if missing else ""
        raise SettingsError(f"{what} cannot be loaded: {damaged}{first_line(error)}{install}") from error
    model.lmpool_offloaded = offloaded  # The backend removes the folder when it closes.
    return model, report


def _quantisation(settings: HfSettings, folder: Path) -> dict[str, Any]:
    """The argument of transformers that quantises the weights. Refuses a checkpoint whose packages are missing."""
    method = "" if settings.gguf_file else quantisation_of(folder)
    if missing := [name for name in _PACKAGES.get(method, ()) if find_spec(name.replace("-", "_")) is None]:
        remedy = f"install with: pip install {' '.join(missing)}"
        raise SettingsError(
            f"model: {settings.model} is quantised ({method}) and needs {' and '.join(missing)}; {remedy}"
        )
    # bitsandbytes would log a line for each layer of each forward.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if settings.quantization is None:
        return {}
    if method or settings.gguf_file:
        raise SettingsError(f"quantization: {settings.model} is quantised already ({method or 'gguf'}); leave it out")
    check_choice("quantization", settings.quantization, tuple(_TORCHAO))
    # Import here: these imports take seconds.
    import torchao.quantization
    from transformers import TorchAoConfig

    make: Any = TorchAoConfig
    return {"quantization_config": make(getattr(torchao.quantization, _TORCHAO[settings.quantization])())}


def weights_revision(model: PreTrainedModel) -> str:
    """Digest of every parameter and persistent buffer, and of the architecture in the config.

    The digest includes each tensor's name, shape, dtype, sum of bit patterns and a sample of its elements. It does not
    depend on the device or the number of threads, because integer sums do not depend on the order of addition.

    Returns:
        Digest: 32 hexadecimal digits.
    """
    config = json.dumps(stable(model.config.to_diff_dict()), sort_keys=True, default=str)
    state = blake2b(config.encode(), digest_size=16)
    for name, tensor in sorted(chain.from_iterable(map(_stored, model.state_dict().items()))):
        bits = placement.loaded(model, name, tensor).detach().reshape(-1)
        if bits.is_complex():
            bits = torch.view_as_real(bits).reshape(-1)
        bits = bits.view(_INTEGERS[bits.element_size()])
        total = sum(int(chunk.sum(dtype=torch.int64)) for chunk in torch.split(bits, _CHUNK)) % (1 << 64)
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode())
        state.update(bits[:: max(1, len(bits) // _SAMPLES)].cpu().numpy().tobytes())
    return state.hexdigest()


def _stored(named: tuple[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a weight: the weight itself, or the plain tensors inside a quantised weight of torchao."""
    name, tensor = named
    if not hasattr(tensor, "__tensor_flatten__"):
        return iter([named])
    inner, _ = tensor.__tensor_flatten__()
    return chain.from_iterable(_stored((f"{name}.{part}", getattr(tensor, part))) for part in inner)


@contextmanager
def hidden_in_place_of_logits(model: PreTrainedModel, kept: int) -> Iterator[list[Tensor]]:
    """In this context, each forward appends the last positions' hidden states (n, kept, d) to the yielded list.

    These forwards compute logits of the last position only: logits of all positions would cost the most time.
    """
    taken: list[Tensor] = []

    def take(_: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        taken.append(given[0][:, -kept:].clone())
        return (given[0][:, -1:], *given[1:])

    layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers is partly untyped
    # If an adapter has replaced the head, peft does not call the model's own layer, and nothing is taken.
    layer = getattr(layer, "original_module", layer)
    handle = layer.register_forward_pre_hook(take)
    try:
        yield taken
    finally:
        handle.remove()


def find_head(model: PreTrainedModel, vocab_size: int) -> tuple[OutputHead | None, bool]:
    """The output head of a model; None, with a log line, if it does not reproduce the model's logits.

    Also returns whether the head computes the same logits as the model, and not only similar ones.
    """
    layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    is_plain = type(layer) is torch.nn.Linear and layer.out_features == vocab_size
    if not is_plain or layer.weight.dtype is not model.dtype:
        _log.info("the model has no plain linear head: its hidden states are not served")
        return None, False
    config = model.config.get_text_config(decoder=True)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def weights(first: int, count: int) -> Tensor:
        return placement.loaded(layer, "weight", layer.weight)[first : first + count]

    bias = None if layer.bias is None else placement.loaded(layer, "bias", layer.bias).detach()
    head = OutputHead(layer.in_features, weights, bias, scale, getattr(config, "final_logit_softcapping", None))
    ids = torch.tensor([[0, vocab_size // 2, vocab_size - 1]], device=placement.input_device(model))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0]
        with hidden_in_place_of_logits(model, 3) as taken:
            model(input_ids=ids)
        if len(taken) != 1 or not head.reproduces(expected, taken[0][0]):
            _log.info("the head does not give the model's logits: the hidden states are not served")
            return None, False
        found = head.finished(layer(taken[0][0]))
        rounding = _ROUNDING * float(expected.float().std()) if model.dtype is torch.float32 else 0.0
        return head, float((found.to(expected.device) - expected).abs().max()) <= rounding


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the checks of a model found out."""

    vocab_size: int  # Number of logits of a prompt.
    pads: bool  # Whether prompts of different lengths may run together.
    layout: KVLayout | None  # Form of a token's keys and values in the cache; None if prefixes cannot be reused.
    horizon: int  # Max tokens of a prompt that may run with others and reuse prefixes; a longer prompt must run alone.
    attention: str  # `EAGER` if transformers' default attention had to be replaced, else "".


def check_model(forward: Forward, max_prompt_tokens: int) -> Abilities:
    """Check by a few prompts whether padding or reused prefixes change a model's rows.

    Rows of single prompts are compared with eager attention, and then rows of batches with rows of single prompts.

    Raises:
        RuntimeError, ValueError, ...: the model cannot run a single prompt.
    """
    config = forward.model.config.get_text_config(decoder=True)
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    # The shortest attention window of the model's layers in tokens; 0 if all layers attend to all tokens.
    window = min((size for size in sizes if type(size) is int and size > 0), default=0)
    # Beyond the horizon, the keys and values of a prompt's first tokens may depend on its length. The horizon is the
    # size of a sliding window (if it is too long to be tested here), or the original training length of rotary
    # embeddings that scale with the longest prompt of a batch.
    stated = getattr(config, "rope_parameters", None) or {}
    ropes = [rope for rope in (stated, *stated.values()) if isinstance(rope, dict)]
    ropes = [rope for rope in ropes if rope.get("rope_type") in ("dynamic", "longrope")]
    limits = [rope.get("original_max_position_embeddings") or config.max_position_embeddings for rope in ropes]
    horizon = min(max_prompt_tokens, *limits, window if window > _LONGEST_WINDOW else max_prompt_tokens)
    length = min(horizon, max(_CHECK_TOKENS, window + 8 if window <= _LONGEST_WINDOW else 0))
    prompts = _prompts(length, vocab_size := forward.logits([[0]]).shape[-1])
    attention, alone = _choose_attention(forward, config, prompts)
    try:
        pads = _agree(forward.logits(prompts), alone)
    except FORWARD_ERRORS:
        pads = False
    if not pads:
        _log.info("padding changes the model's rows: only prompts of one length run together")
    layout = _cache_layout(forward)
    if layout is None:
        _log.info("the model's cache is not made of plain attention layers: prefixes are not reused")
    elif not _reuses(forward, prompts, alone, layout, pads):
        layout = None
        _log.info("reused prefixes change the model's rows: prefixes are not reused")
    return Abilities(vocab_size, pads, layout, horizon, attention)


def _choose_attention(forward: Forward, config: PreTrainedConfig, prompts: list[list[int]]) -> tuple[str, Tensor]:
    """Switch the model to eager attention if the default attention changes rows, or ignores options of the model.

    Returns:
        `EAGER` if the model was switched, else ""; and the rows of the prompts, each computed alone.
    """
    model, alone = forward.model, _logits_alone(forward, prompts)
    default = model.config._attn_implementation
    if default == EAGER:
        return "", alone
    # Read the config too: soft-capping changes only large attention scores, which a few short prompts may not have.
    left_out = [name for name in _LEFT_OUT if getattr(config, name, None)]
    try:
        model.set_attn_implementation(EAGER)
        if model.config._attn_implementation != EAGER:
            _log.warning("the model's code selects its own attention: its rows are not compared with eager attention")
            return "", alone
        exact = _logits_alone(forward, prompts)
        is_same = not exact.isfinite().all() or _agree(exact.to(model.dtype), alone)
    except FORWARD_ERRORS as error:
        _log.warning("the model's rows are not compared with eager attention, which fails: %s", error)
        is_same, left_out = True, []
    if is_same and not left_out:
        model.set_attn_implementation(default)
        return "", alone
    reason = f"ignores {', '.join(left_out)}" if left_out else "gives other rows"
    _log.info("the model's own code computes attention (eager), because transformers' default (%s) %s", default, reason)
    return EAGER, exact


def _cache_layout(forward: Forward) -> KVLayout | None:
    """Layout of one token's keys and values in the model's cache; None if not all layers are plain attention."""
    if not {"past_key_values", "use_cache"} <= forward.takes:
        return None
    cache = DynamicCache()
    try:
        forward.model(input_ids=torch.tensor([[0, 0, 0]], device=forward.device), past_key_values=cache, use_cache=True)
    except FORWARD_ERRORS:
        return None
    layers: list[Any] = list(cache.layers)
    if not all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers):
        return None
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    is_plain = all(part.ndim == 4 and part.shape[0] == 1 and part.shape[2] == 3 for part in parts)
    if not is_plain or len({part.dtype for part in parts}) != 1:
        return None
    shapes = tuple((part.shape[1], part.shape[3]) for part in parts)
    return KVLayout(shapes, parts[0].dtype, tuple(layer.keys.device for layer in layers))


def _prompts(length: int, vocab_size: int) -> list[list[int]]:
    """A prompt, its prefixes, a branch and an unrelated prompt, all of different lengths."""
    long = [(7 + 31 * i * (i + 3)) % vocab_size for i in range(length)]
    third = max(1, length // 3)
    branch = [*long[:third], *((token + 1) % vocab_size for token in long[third : 2 * third - 1])]
    lengths = {1, third, 2 * third, 2 * third + 1, length}
    prefixes = [long[:size] for size in sorted(lengths) if size <= length]
    return [*prefixes, branch, [(token + 2) % vocab_size for token in long[: third + 1]]]


def _logits_alone(forward: Forward, prompts: list[list[int]]) -> Tensor:
    return torch.cat([forward.logits([ids]) for ids in prompts]).float()


def _reuses(forward: Forward, prompts: list[list[int]], alone: Tensor, layout: KVLayout, pads: bool) -> bool:
    """Whether prompts have the same rows alone and when they reuse the keys and values of shorter prompts."""
    everything = range(len(prompts))
    # Run three batches with one pool. In the second, some cached tokens are recomputed; in the third, all are cached.
    for batches in ([[index] for index in everything], [[1], everything, everything] if pads else []):
        pool = KVPool(layout, sum(map(len, prompts)))
        for batch in batches:
            chosen = [prompts[index] for index in batch]
            try:
                logits = forward.logits(chosen, [pool.slots.match(ids) for ids in chosen], pool)
            except FORWARD_ERRORS:
                return False
            if not _agree(logits, alone[list(batch)]):
                return False
    return True


def _agree(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits equal the logits of the same prompts computed alone, except for rounding.

    Differences are measured relative to the spread of the logits, which is tiny for an untrained model.
    """
    error = (logits.float() - expected).square().mean(-1).sqrt()
    tolerance = 2e-3 if logits.dtype == torch.float32 else 0.15
    return bool((error <= tolerance * expected.std(-1) + 1e-30).all())
