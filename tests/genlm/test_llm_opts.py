"""`load_model_by_name` splits `llm_opts` into options of the model and options of its private worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmpool.errors import SettingsError
from lmpool.producer.genlm import load_model_by_name
from lmpool.producer.genlm.connection import command_options, split


@pytest.mark.parametrize(
    ("backend", "given", "options"),
    [
        ("hf", {"dtype": torch.bfloat16, "max_batch": 8}, ["--dtype=bfloat16", "--max-batch=8"]),
        ("hf", {"batch_size": 8}, ["--max-batch=8"]),
        ("hf", {"with_trie": True, "trust_remote_code": False, "revision": None}, ["--with-trie"]),
        (
            "hf",
            {"hf_opts": {"torch_dtype": torch.float32, "device_map": "cpu", "revision": "main"}},
            ["--dtype=float32", "--device=cpu", "--revision=main"],
        ),
        ("hf", {"hf_opts": None, "bitsandbytes_opts": None}, []),
        ("vllm", {"adapters": ["a=x", "b=y"]}, ["--adapters=a=x", "--adapters=b=y"]),
        (
            "vllm",
            {"engine_opts": {"dtype": "float16", "gpu_memory_utilization": 0.2, "tokenizer": "a b"}},
            ["--dtype=float16", "--engine-args=gpu_memory_utilization=0.2", "--engine-args='tokenizer=\"a b\"'"],
        ),
    ],
)
def test_options_of_the_worker_are_translated(backend: str, given: dict[str, Any], options: list[str]) -> None:
    model_options, worker = split(backend, given)
    assert model_options == {}
    assert command_options(worker) == options


def test_options_of_the_model_are_separated() -> None:
    given = {"timeout": 5, "cache_bytes": 0, "tokenizer": "t"}
    assert split("hf", {**given, "max_batch": 3}) == (given, {"max_batch": 3})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0.02}, "timeout = 0.02 is less than 1 s: .* leave it out"),
        (
            {"bitsandbytes_opts": {"load_in_8bit": True}},
            "bitsandbytes_opts cannot be set: the hf backend does not",
        ),
        ({"cache_size": 10}, "cache_size cannot be set: .* use cache_bytes="),
        ({"redis": "redis://localhost"}, "redis cannot be set: .* backend='pool'"),
        ({"when_absent": "wait"}, "when_absent cannot be set: the private worker serves before"),
        ({"priority": "bulk"}, "priority cannot be set: no other client uses the private worker"),
        ({"batch_size": 3, "max_batch": 3}, "batch_size and max_batch are the same setting"),
        (
            {"hf_opts": {"device_map": {"": 0}}},
            "hf_opts has 'device_map' = {'': 0}, which the hf backend does not take",
        ),
        ({"hf_opts": {"attn_implementation": "eager"}}, "hf_opts has 'attn_implementation'"),
    ],
)
def test_unsupported_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        split("hf", given)


@pytest.mark.parametrize("name", ["max-batch", "--max-batch", "", "a b", "Max", 3])
def test_a_setting_cannot_become_another_option(name: Any) -> None:
    with pytest.raises(SettingsError, match="is not the name of a setting"):
        command_options({name: 1})


@pytest.mark.parametrize("backend", ["mlx", "invalid", ""])
def test_other_backends_are_value_errors(backend: str) -> None:
    with pytest.raises(ValueError, match=f"backend: '{backend}' is not one of pool, hf"):
        load_model_by_name("gpt2", backend)


def test_a_connection_accepts_its_own_options_only() -> None:
    with pytest.raises(SettingsError, match="batch_size: not an option of a connection"):
        load_model_by_name("gpt2", llm_opts={"batch_size": 3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", []), r"backend: \[\] is not one of pool, hf"),
        (("gpt2", "hf", 5), "llm_opts: 5 must be a mapping"),
        (("gpt2", "hf", {"hf_opts": 5}), "hf_opts: 5 must be a mapping"),
        (("gpt2", "vllm", {"engine_opts": 5}), "engine_opts: 5 must be a mapping"),
        ((None, "hf"), "name: None: the hf backend needs"),
        (("\0", "hf"), "the hf backend needs the hub name or folder"),
        (("gpt2", "pool", {"timeout": 0.02}), "timeout = 0.02 is less than 1 s"),
        (("gpt2", "hf", {"load_timeout": "x"}), "timeout: 'x' must be a number of seconds"),
        (("gpt2", "hf", {"load_timeout": float("nan")}), "timeout: nan must be a number of seconds"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_before_a_worker_starts(arguments: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_model_by_name(*arguments)
