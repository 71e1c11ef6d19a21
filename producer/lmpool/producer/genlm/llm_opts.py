"""`llm_opts`: what is for the language model, what for its private worker, and genlm-backend's names for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from lmpool.errors import SettingsError
from lmpool.settings import shown

# A private pool has a server and a prefix of its own.
OF_THE_MODEL = ("timeout", "cache_bytes", "tokenizer")
OF_THE_POOL = (*OF_THE_MODEL, "redis", "prefix", "when_absent")

LEAST_TIMEOUT_S = 1.0
"""What is less is what genlm-backend waits for companions, not what a request may take."""

_OPTION = re.compile(r"[a-z][a-z0-9_]*")
_DTYPES = ("torch_dtype", "dtype")
_REFUSED = {
    "bitsandbytes_opts": "the hf backend does not quantise: give a quantised checkpoint, or gguf_file=",
    "cache_size": "rows are bounded by bytes: use cache_bytes=",
    "cache_opts": "rows are bounded by bytes: use cache_bytes=",
    "when_absent": "the private worker serves before the model is returned",
    "redis": "the model has a private server: connect to another with backend='pool'",
    "prefix": "the model has a private server: connect to another with backend='pool'",
}


def check_known(given: Mapping[str, Any]) -> None:
    """Refuse what is not an option of `PooledLM.from_name`.

    Raises:
        SettingsError: with the option, or a timeout that is none of a request.
    """
    for name in given:
        if name not in OF_THE_POOL:
            raise SettingsError(
                f"llm_opts: {shown(name)} is not an option of a connection; there are {', '.join(OF_THE_POOL)}"
            )
    _check_timeout(given)


def split(backend: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the language model, and those of its private worker by our names.

    Raises:
        SettingsError: an option of genlm-backend's that has no counterpart, with what to use instead.
    """
    for name, instead in _REFUSED.items():
        if given.get(name) is not None:
            raise SettingsError(f"llm_opts: {name} cannot be set: {instead}")
    ours = {name: given[name] for name in OF_THE_MODEL if name in given}
    _check_timeout(ours)
    workers = {name: value for name, value in given.items() if name not in ours and name not in _REFUSED}
    if "batch_size" in workers:
        workers = _with(workers, "batch_size", {"max_batch": workers["batch_size"]})
    if "hf_opts" in workers and backend == "hf":
        workers = _with(workers, "hf_opts", _read_hf_opts(workers["hf_opts"] or {}))
    if "engine_opts" in workers and backend in ("vllm", "sglang"):
        workers = _with(workers, "engine_opts", _read_engine_opts(workers["engine_opts"] or {}))
    return ours, workers


def command_options(given: Mapping[str, Any]) -> list[str]:
    """Settings of a worker as options of the `lmpool worker` command; None and False are what is not given.

    Raises:
        SettingsError: something that is no name of a setting.
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
            options += [f"{option}={_dtype(one) if name in _DTYPES else one}" for one in values]
    return options


def _check_timeout(given: Mapping[str, Any]) -> None:
    timeout = given.get("timeout")
    if isinstance(timeout, (int, float)) and 0 < timeout < LEAST_TIMEOUT_S:
        raise SettingsError(
            f"llm_opts: timeout = {timeout} is less than {LEAST_TIMEOUT_S:g} s: here it is what a request may "
            "take, not what genlm-backend waits for companions: leave it out"
        )


def _with(given: Mapping[str, Any], replaced: str, by: Mapping[str, Any]) -> dict[str, Any]:
    for name in by:
        if name in given:
            raise SettingsError(f"llm_opts: {replaced} and {name} are the same setting: give one of them")
    return {name: value for name, value in given.items() if name != replaced} | dict(by)


def _check_mapping(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise SettingsError(f"llm_opts: {name} = {shown(given)} is not a mapping of options to values")


def _read_hf_opts(given: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers would be told, as settings of the hf backend."""
    _check_mapping("hf_opts", given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _DTYPES:
            found["dtype"] = _dtype(value)
        elif name == "device_map" and (value is None or isinstance(value, str)):
            found["device"] = value
        elif name in ("revision", "trust_remote_code"):
            found[name] = value
        else:
            raise SettingsError(
                f"llm_opts: hf_opts has {shown(name)} = {shown(value)}, which the hf backend does not take; it takes "
                "torch_dtype, dtype, device_map (one device), revision and trust_remote_code"
            )
    return found


def _read_engine_opts(given: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine would be told, as settings of its backend."""
    _check_mapping("engine_opts", given)
    rest = {name: value for name, value in given.items() if name != "dtype"}
    found: dict[str, Any] = {"dtype": _dtype(given["dtype"])} if "dtype" in given else {}
    try:
        found["engine_args"] = [shlex.quote(f"{name}={json.dumps(value)}") for name, value in rest.items()]
    except TypeError as error:
        raise SettingsError(f"llm_opts: engine_opts must be plain values: {error}") from error
    return found


def _dtype(value: Any) -> str:
    """The name of a dtype; torch calls its own `torch.float32`."""
    return str(value).removeprefix("torch.")
