"""LoRA adapters that SGLang loads and unloads while it serves, in the scheduler's thread between two forwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

from lmpool.errors import SettingsError
from lmpool.workers.backends.sglang.engine import Engine


class LoadedAdapters:
    """The adapters of one engine.

    Args:
        engine: the engine; `engine.lora_ids` has SGLang's ids of the adapters.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = engine.lora_ids
        self._dropped: dict[str, str] = {}  # SGLang's id -> adapter: dropped, but a request still named it then.

    def load(self, adapter: str, plain: Path) -> None:
        """Have SGLang load an adapter ("name@revision") from a folder that `write_plain_adapter` has written.

        Raises:
            SettingsError: SGLang refuses it.
        """
        self._engine.call(self._unload_dropped)
        # A new id each time: the prefix cache distinguishes adapters by their ids.
        self._ids[adapter] = self._engine.call(partial(_load, adapter=adapter, folder=plain))

    def drop(self, adapter: str) -> None:
        """Have SGLang unload an adapter, now or with the next load or drop."""
        if lora_id := self._ids.pop(adapter, ""):
            self._dropped[lora_id] = adapter
            self._engine.call(self._unload_dropped)

    def _unload_dropped(self, scheduler: Any) -> None:
        lists = [scheduler.waiting_queue]
        lists += [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        in_use = {request.lora_id for requests in lists for request in requests}
        in_use |= {getattr(scheduler.chunked_req, "lora_id", None)}
        for lora_id in self._dropped.keys() - in_use:
            name = self._dropped.pop(lora_id)
            scheduler.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name, lora_id=lora_id))


def _load(scheduler: Any, adapter: str, folder: Path) -> str:
    """Load an adapter; returns its new id."""
    lora_id = uuid4().hex
    wanted = LoadLoRAAdapterReqInput(lora_name=adapter, lora_path=str(folder), lora_id=lora_id)
    result = scheduler.load_lora_adapter(wanted)
    if not result.success:
        raise SettingsError(f"adapters: SGLang cannot load {adapter!r}: {result.error_message}")
    return lora_id
