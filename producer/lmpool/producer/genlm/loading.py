"""`load_model_by_name` with genlm-backend's signature: a model of the pool, or one with a private worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from lmpool.errors import SettingsError
from lmpool.producer.deadline import check_timeout
from lmpool.producer.genlm.connection import Address
from lmpool.producer.genlm.language_model import PooledLM
from lmpool.producer.genlm.llm_opts import check_known, command_options, split
from lmpool.producer.genlm.private_pool import PREFIX, PrivatePool, WorkerCommand
from lmpool.producer.tokenizer import read_tokenizer
from lmpool.settings import shown
from lmpool.vocabulary import decode_vocab

_BACKENDS = {
    "hf": "hf",
    "vllm": "vllm",
    "sglang": "sglang",
    "sgl": "sglang",
    "synthetic": "synthetic",
    "mock": "synthetic",
}


def load_model_by_name(
    name: str | None, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> PooledLM:
    """A language model by name.

    Args:
        name: for the pool what the model is served as, None for the only one; otherwise the hub name or folder of the
            model.
        backend: None or "pool" connects to a pool that runs. "hf", "vllm" and "sglang" (or "sgl") start a private
            server and a worker with that backend, which end with `close`, with the model or with this program,
            however it ends. "synthetic" (or "mock") does so with random rows, for the vocabulary of the tokenizer
            `name`: other rows than genlm-backend's mock has, but as there the same ones for the same prompt.
        llm_opts: options of `PooledLM.from_name`; without `when_absent` it is "wait", so that programs and workers may
            start in any order. For a private worker those but `redis`, `prefix` and `when_absent`, `load_timeout`
            (seconds until it must serve, 1800 by default), the settings of `lmpool worker --backend …`, such as
            `dtype`, `max_batch` or `kv_cache_bytes`, and genlm-backend's `batch_size`, `hf_opts` and `engine_opts`.

    Returns:
        the model, connected.

    Raises:
        SettingsError: another backend, or an option that is unknown or malformed (a ValueError).
        ModelError: the private worker does not serve; the end of its log is quoted.
        As `PooledLM`.
    """
    if llm_opts is not None and not isinstance(llm_opts, Mapping):
        raise SettingsError(f"llm_opts: {shown(llm_opts)} is not a mapping of options to values")
    given = dict(llm_opts or {})
    if backend is None or backend == "pool":
        check_known(given)
        return PooledLM.from_name(name, **{"when_absent": "wait"} | given)
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise SettingsError(f"backend: {shown(backend)} is not one of pool, {', '.join(_BACKENDS)}")
    if not isinstance(name, (str, PurePath)) or "\0" in str(name):
        raise SettingsError(f"name: {shown(name)}: the {backend} backend needs the hub name or folder of a model")
    return _load_privately(str(name), _BACKENDS[backend], given)


def _load_privately(name: str, backend: str, given: dict[str, Any]) -> PooledLM:
    timing = {"load_timeout": check_timeout(given.pop("load_timeout"))} if "load_timeout" in given else {}
    ours, worker = split(backend, given)
    served = name
    if backend == "synthetic":
        served = PurePath(name).name
        if ours.get("tokenizer") is None:
            ours["tokenizer"] = read_tokenizer(name, option="name", otherwise="pass tokenizer= in llm_opts")
        worker.setdefault("vocab_size", len(decode_vocab(ours["tokenizer"]).tokens))
    tokenizer = ours.pop("tokenizer", None)
    pool = PrivatePool(WorkerCommand(served, backend, command_options(worker), **timing))
    try:
        model = PooledLM(Address(redis=pool.url, prefix=PREFIX, **ours), tokenizer=tokenizer, owned=pool)
    except BaseException:
        pool.close()
        raise
    model.batch_size = worker.get("max_batch", model.batch_size)
    return model
