"""SGLang's scheduler: making one in this process, ending it, and asking it; what changes from release to release."""

from __future__ import annotations

import gc
import inspect
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config
from tqdm import std as tqdm  # type: ignore[import-untyped]

from lmpool.protocol.prompt import decode_ids

_PLACE = {
    "gpu_id": 0, "tp_rank": 0, "moe_ep_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None,
}  # fmt: skip


class ModelFacts(NamedTuple):
    """What a checkpoint's config says.

    Attributes:
        positions: tokens that the model can look back on.
        layers: how many keep keys and values.
        kv_numbers: numbers that one of them keeps of a token; 0 without attention.
    """

    positions: int
    layers: int
    kv_numbers: int


class SchedulerFacts(NamedTuple):
    """What a scheduler has decided on.

    Attributes:
        vocab_size: V.
        max_prompt_tokens: the longest prompt that it does not refuse.
        max_batch: prompts that it runs together.
        dtype: of the model.
        adapters: adapter -> the id that requests name it by.
    """

    vocab_size: int
    max_prompt_tokens: int
    max_batch: int
    dtype: torch.dtype
    adapters: dict[str, str]


def known_options() -> dict[str, bool]:
    """The options that SGLang has, and whether they want a text."""
    hints = get_type_hints(ServerArgs)
    return {name: hint in (str, str | None) for name, hint in hints.items() if not name.startswith("_")}


def read_facts(folder: Path, trust_remote_code: bool) -> ModelFacts:
    """Read a checkpoint's config as SGLang does."""
    config = get_hf_text_config(get_config(str(folder), trust_remote_code=trust_remote_code))
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        numbers = 0
    elif compressed := getattr(config, "kv_lora_rank", None):
        numbers = compressed + config.qk_rope_head_dim  # Multi-head latent attention keeps one vector for all heads.
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers = 2 * (getattr(config, "num_key_value_heads", None) or heads) * size
    return ModelFacts(get_context_length(config), config.num_hidden_layers, numbers)


def make_scheduler(options: Mapping[str, Any]) -> Any:
    """Load a model; must be called in the thread that will run the event loop."""
    server_args = ServerArgs(**options)
    server_args.resolve_once()
    server_args.check_server_args()
    ports = PortArgs.init_new(server_args)
    place = {**_PLACE, "gpu_id": options.get("base_gpu_id", 0)}
    takes = inspect.signature(Scheduler.__init__).parameters
    # In two steps, so that one that cannot be finished can be ended.
    scheduler = Scheduler.__new__(Scheduler)
    try:
        ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=place["gpu_id"])
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)
        with _progress_bars_on_terminals_only(), _same_excepthook():
            scheduler.__init__(server_args, ports, **{name: place[name] for name in place if name in takes})
    except BaseException:
        end_scheduler(scheduler)
        raise
    finally:
        _remove_files(ports)
    _disconnect(scheduler)
    return scheduler


def facts_of(scheduler: Any) -> SchedulerFacts:
    """What a scheduler has decided on."""
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    adapters = {} if manager is None else {ref.lora_name: ref.lora_id for ref in manager.lora_refs.values()}
    return SchedulerFacts(
        vocab_size=scheduler.model_config.vocab_size,
        max_prompt_tokens=scheduler.max_req_input_len - 1,  # It refuses prompts of that length already.
        max_batch=scheduler.max_running_requests,
        dtype=scheduler.model_config.dtype,
        adapters=adapters,
    )


def end_scheduler(scheduler: Any) -> None:
    """Free what a scheduler holds, even if it could not be finished; its event loop must have ended."""
    if (watchdog := getattr(scheduler, "watchdog", None)) is not None:
        # Its thread never ends, and would keep the scheduler.
        watchdog.is_active = lambda: False
        watchdog.get_counter = lambda: 0
        watchdog.dump_info = None
        scheduler.release_host_resources()
    _disconnect(scheduler)
    # The server that a group of one process meets at.
    destroy_model_parallel()
    destroy_distributed_environment()


def collect() -> None:
    """Give the memory of an ended scheduler back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_request(name: str, ids: bytes, adapter: str | None) -> Any:
    """A request for the logits after a prompt, without sampling a token.

    Args:
        name: of the request; no other's may begin with it.
        ids: the token ids as little-endian uint32 bytes.
        adapter: what SGLang calls the adapter; None for none.
    """
    tokens = array("q")
    tokens.frombytes(decode_ids(ids).astype(np.int64).tobytes())
    sampling = SamplingParams(max_new_tokens=0)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=tokens,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        lora_id=adapter,
    )


def _disconnect(scheduler: Any) -> None:
    """Close the sockets to SGLang's other processes, of which there are none here."""
    if (channels := getattr(scheduler, "ipc_channels", None)) is not None:
        # SGLang's own way to send to nobody.
        channels.send_to_tokenizer.socket = channels.send_to_detokenizer.socket = None
        # Now, because one that is collected with its sockets waits for them forever.
        channels.recv_from_tokenizer.context.destroy(linger=0)
    if (writer := getattr(scheduler, "load_snapshot_writer", None)) is not None:
        writer.close()
        Path(writer.path).unlink(missing_ok=True)
        scheduler.load_snapshot_writer = None


def _remove_files(ports: Any) -> None:
    """Remove the files that stand for sockets which nobody will listen on."""
    for value in vars(ports).values():
        if isinstance(value, str) and value.startswith("ipc://"):
            with suppress(OSError):
                Path(value.removeprefix("ipc://")).unlink()


@contextmanager
def _progress_bars_on_terminals_only() -> Iterator[None]:
    """Progress bars make a mess of a log. SGLang has no switch for its own."""
    draw = tqdm.tqdm.__init__

    def leave(bar: Any, *arguments: Any, **named: Any) -> None:
        draw(bar, *arguments, **{**named, "disable": True})

    if not sys.stderr.isatty():
        tqdm.tqdm.__init__ = leave
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = draw


@contextmanager
def _same_excepthook() -> Iterator[None]:
    """torch's process groups put their rank before every traceback of the process, though they have one only."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
