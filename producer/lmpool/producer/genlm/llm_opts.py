"""The options `llm_opts` of `load_model_by_name`: checks, the split between model and worker, genlm-backend's names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from lmpool.errors import SettingsError
from lmpool.settings import shown

MODEL_OPTIONS = ("timeout", "cache_bytes", "tokenizer")
"""Options of a language model with a private worker."""

POOL_OPTIONS = (*MODEL_OPTIONS, "redis", "prefix", "when_absent", "priority")
"""Options of a language model that connects to a running pool."""

MIN_TIMEOUT_S = 1.0
"""A smaller timeout is the time that genlm-backend waits to fill a batch, not the time of a request; seconds."""

_OPTION = re.compile(r"[a-z][a-z0-9_]*")
_DTYPES = ("torch_dtype", "dtype")
_REFUSED = {
    "bitsandbytes_opts": "the hf backend does not quantise: give a quantised checkpoint, or gguf_file=",
    "cache_size": "rows are bounded by bytes: use cache_bytes=",
    "cache_opts": "rows are bounded by bytes: use cache_bytes=",
    "when_absent": "the private worker serves before the model is returned",
    "priority": "no other client uses the private worker",
    "redis": "the model has a private server: connect to another with backend='pool'",
    "prefix": "the model has a private server: connect to another with backend='pool'",
}


def check_known(given: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for an option that `PooledLM.from_name` lacks, or a timeout too small for a request."""
    for name in given:
        if name not in POOL_OPTIONS:
            raise SettingsError(
                f"llm_opts: {shown(name)} is not an option of a connection; there are {', '.join(POOL_OPTIONS)}"
            )
    _check_timeout(given)


def split(backend: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options between the language model and its private worker, and rename the worker's to lmpool's names.

    Raises:
        SettingsError: an option of genlm-backend has no counterpart here; the message names the alternative.
    """
    for name, instead in _REFUSED.items():
        if given.get(name) is not None:
            raise SettingsError(f"llm_opts: {name} cannot be set: {instead}")
    model = {name: given[name] for name in MODEL_OPTIONS if name in given}
    _check_timeout(model)
    worker = {name: value for name, value in given.items() if name not in model and name not in _REFUSED}
    if "batch_size" in worker:
        worker = _replace(worker, "batch_size", {"max_batch": worker["batch_size"]})
    if "hf_opts" in worker and backend == "hf":
        worker = _replace(worker, "hf_opts", _read_hf_opts(worker["hf_opts"] or {}))
    if "engine_opts" in worker and backend in ("vllm", "sglang"):
        worker = _replace(worker, "engine_opts", _read_engine_opts(worker["engine_opts"] or {}))
    return model, worker


def command_options(given: Mapping[str, Any]) -> list[str]:
    """Settings of a worker as options of the `lmpool worker` command, without those that are None or False.

    Raises:
        SettingsError: a malformed name.
    """
    options: list[str] = []
    for name, value in given.items():
        if not isinstance(name, str) or not _OPTION.fullmatch(name):
            raise SettingsError(f"llm_opts: {shown(name)} is not the name of a setting")
        option = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            options.append(option)
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            options += [f"{option}={_dtype(item) if name in _DTYPES else item}" for item in values]
    return options


def _check_timeout(given: Mapping[str, Any]) -> None:
    timeout = given.get("timeout")
    if isinstance(timeout, (int, float)) and 0 < timeout < MIN_TIMEOUT_S:
        raise SettingsError(
            f"llm_opts: timeout = {timeout} is less than {MIN_TIMEOUT_S:g} s: here it limits the time of a request, "
            "not the time that genlm-backend waits to fill a batch: leave it out"
        )


def _replace(given: Mapping[str, Any], replaced: str, by: Mapping[str, Any]) -> dict[str, Any]:
    """Replace one option by settings; raise `SettingsError` when a setting was given too."""
    for name in by:
        if name in given:
            raise SettingsError(f"llm_opts: {replaced} and {name} are the same setting: give one of them")
    return {name: value for name, value in given.items() if name != replaced} | dict(by)


def _check_mapping(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise SettingsError(f"llm_opts: {name} = {shown(given)} is not a mapping of options to values")


def _read_hf_opts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of transformers into settings of the hf backend."""
    _check_mapping("hf_opts", given)
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in _DTYPES:
            settings["dtype"] = _dtype(value)
        elif name == "device_map" and (value is None or isinstance(value, str)):
            settings["device"] = value
        elif name in ("revision", "trust_remote_code"):
            settings[name] = value
        else:
            raise SettingsError(
                f"llm_opts: hf_opts has {shown(name)} = {shown(value)}, which the hf backend does not take; it takes "
                "torch_dtype, dtype, device_map (one device), revision and trust_remote_code"
            )
    return settings


def _read_engine_opts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of an engine into settings of its backend."""
    _check_mapping("engine_opts", given)
    arguments = {name: value for name, value in given.items() if name != "dtype"}
    settings: dict[str, Any] = {"dtype": _dtype(given["dtype"])} if "dtype" in given else {}
    try:
        settings["engine_args"] = [shlex.quote(f"{name}={json.dumps(value)}") for name, value in arguments.items()]
    except TypeError as error:
        raise SettingsError(f"llm_opts: engine_opts must be plain values: {error}") from error
    return settings


def _dtype(value: Any) -> str:
    """The name of a dtype without torch's prefix, as in `torch.float32`."""
    return str(value).removeprefix("torch.")
