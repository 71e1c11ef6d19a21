"""LoRA adapters of the hf backend: rows equal those of peft, and rows of prompts without an adapter do not change."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from itertools import count, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from lmpool.errors import AdapterRefused, SettingsError, WorkerError
from lmpool.protocol.adapter import qualify
from lmpool.protocol.job import digest_of
from lmpool.protocol.query import HeadQuery, PositionsQuery
from lmpool.protocol.row import Row, decode_row, width_of
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.batching import BatchRules, PromptChunk, choose
from lmpool.workers.backends.hf.forward import new_path
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendJob
from tests.support.models.tiny_models import VOCAB_SIZE, make_model, write_model
from tests.support.pool import Pool

Request = tuple[list[int], str]

# A prompt's float32 row depends on its batch. Measured: the row differs by up to 3e-6 from the row of the prompt alone.
# In a pool, the timing of requests decides the batches. The rows of two adapters differ by more than 3.
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}

_numbers = count()


def write_lora(folder: Path, seed: int, kind: str = "llama", **config: Any) -> Path:
    """An adapter for a tiny model, made and written by peft."""
    # Import peft here: the import takes seconds, also in processes that only collect tests.
    from peft import LoraConfig, get_peft_model

    targets = config.pop("target_modules", ["q_proj", "v_proj", "up_proj"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(
            make_model(kind), LoraConfig(**{"r": 4, "target_modules": targets, "lora_dropout": 0.5} | config)
        )
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def reference(folder: Path | None, ids: Sequence[int], kind: str = "llama") -> Row:
    """The row that peft computes for a prompt."""
    from peft import PeftModel

    model: Any = make_model(kind)
    if folder is not None:
        model = PeftModel.from_pretrained(model, str(folder))
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    row: Row = torch.log_softmax(logits.float(), -1).numpy()
    return row


def ask(backend: HfBackend, asked: Sequence[Request]) -> list[Row]:
    """Submit prompts together, each (ids, "name@revision" or "" for no adapter), and return their rows."""
    jobs = []
    for ids, adapter in asked:
        data = np.asarray(ids, "<u4").tobytes()
        jobs.append(BackendJob(digest_of(data, str(next(_numbers))), data, adapter))
    backend.submit(jobs)
    rows: dict[bytes, Row] = {}
    while len(rows) < len(jobs):
        finished = backend.step()
        assert not finished.failures
        for block in finished.blocks:
            for index, digest in enumerate(block.digests):
                encoded = np.frombuffer(bytearray(block.encode(index)), np.uint8)
                rows[digest] = decode_row(encoded, VOCAB_SIZE)
    return [rows[job.digest] for job in jobs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters: a plain one, and one that also replaces the whole output head."""
    folder = tmp_path_factory.mktemp("loras")
    return {
        "poet": write_lora(folder / "poet", 1),
        "judge.v2": write_lora(folder / "judge", 2, modules_to_save=["lm_head"]),
    }


@pytest.fixture
def backend(model: Path) -> Iterator[HfBackend]:
    opened = HfBackend(HfSettings(str(model), name="tiny"))
    yield opened
    opened.close()


def load(backend: HfBackend, loras: dict[str, Path]) -> dict[str, str]:
    """Load adapters; returns their qualified names."""
    return {name: qualify(name, backend.load_adapter(name, str(folder))) for name, folder in loras.items()}


PROMPTS = [[1, 2, 3], [4, 5], list(range(40)), list(range(41)), [1, 2, 3, 9], [8]]


def test_rows_of_adapters_equal_those_of_peft(backend: HfBackend, loras: dict[str, Path]) -> None:
    named = load(backend, loras)
    folders = {"": None, **{named[name]: folder for name, folder in loras.items()}}
    asked = [(ids, adapter) for ids in PROMPTS for adapter in folders]
    random.Random(0).shuffle(asked)
    for _ in range(3):  # From the second round on, the prompts' prefixes are cached.
        for (ids, adapter), row in zip(asked, ask(backend, asked), strict=True):
            np.testing.assert_allclose(row, reference(folders[adapter], ids), **CLOSE)
    assert backend.stats().reused > 0


def test_an_adapter_is_loaded_next_to_one_of_the_settings(model: Path, loras: dict[str, Path]) -> None:
    backend = HfBackend(HfSettings(str(model), name="tiny", adapters=[f"poet={loras['poet']}"]))
    (judge,) = load(backend, {"judge.v2": loras["judge.v2"]}).values()
    np.testing.assert_allclose(
        ask(backend, [(PROMPTS[0], judge)])[0], reference(loras["judge.v2"], PROMPTS[0]), **CLOSE
    )
    backend.close()


def test_adapters_are_removed_in_any_order(
    backend: HfBackend, loras: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """peft cannot delete an adapter's copy of a module while no adapter of the module is active."""
    loras = {**loras, "critic": write_lora(tmp_path / "critic", 3, modules_to_save=["lm_head"])}
    expected = {name: reference(folder, PROMPTS[0]) for name, folder in loras.items()}
    names = ["critic", "judge.v2", "poet"]  # "poet", which copies no module, is active at the first removal.
    for order in permutations(names):
        named = load(backend, loras)
        rows = [ask(backend, [(PROMPTS[0], named[name])])[0] for name in names]
        for name, row in zip(names, rows, strict=True):
            np.testing.assert_allclose(row, expected[name], **CLOSE)
        for name in order:
            backend.drop_adapter(named[name])
        assert not backend.adapters
        assert "cannot be removed" not in caplog.text
    (row,) = ask(backend, [(PROMPTS[0], "")])
    np.testing.assert_allclose(row, reference(None, PROMPTS[0]), **CLOSE)


def test_an_adapter_that_peft_cannot_remove_is_logged_and_not_served(
    backend: HfBackend, loras: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("list index out of range")

    named = load(backend, loras)
    monkeypatch.setattr(backend._adapters._peft, "delete_adapter", fails)
    backend.drop_adapter(named["judge.v2"])
    assert f"the adapter '{named['judge.v2']}' cannot be removed" in caplog.text
    assert list(backend.adapters) == [named["poet"]]
    for folder, adapter in ((None, ""), (loras["poet"], named["poet"])):
        (row,) = ask(backend, [(PROMPTS[2], adapter)])
        np.testing.assert_allclose(row, reference(folder, PROMPTS[2]), **CLOSE)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_other_architectures_have_adapters_too(tmp_path: Path, kind: str) -> None:
    # GPT-2 and Gemma 3 use their embedding as output head: an adapter of the head must not change the embedding.
    targets = {"gpt2": ["c_attn", "lm_head"], "gemma3": ["q_proj", "o_proj", "lm_head"]}[kind]
    lora = write_lora(tmp_path / "lora", 3, kind, target_modules=targets)
    backend = HfBackend(HfSettings(str(write_model(tmp_path / "model", kind)), name="tiny"))
    (adapter,) = load(backend, {"a": lora}).values()
    for ids, row in zip(PROMPTS, ask(backend, [(ids, adapter) for ids in PROMPTS]), strict=True):
        np.testing.assert_allclose(row, reference(lora, ids, kind), **CLOSE)


def test_prompts_without_an_adapter_keep_their_rows_to_the_last_bit(
    model: Path, backend: HfBackend, loras: dict[str, Path]
) -> None:
    plain = HfBackend(HfSettings(str(model), name="tiny"))
    adapters = list(load(backend, loras).values())
    for left in (2, 1, 0):
        for adapter in backend.adapters:
            ask(backend, [(ids, adapter) for ids in PROMPTS])
        for ids in PROMPTS:
            assert np.array_equal(ask(backend, [(ids, "")]), ask(plain, [(ids, "")])), (ids, left)
        if left:
            backend.drop_adapter(adapters.pop())
    assert backend.stats().reused > 0
    assert backend.info.fingerprint == plain.info.fingerprint
    plain.close()


def test_keys_and_values_of_a_prefix_are_never_used_for_another_adapter(
    backend: HfBackend, loras: dict[str, Path]
) -> None:
    named = load(backend, loras)
    ids = list(range(50))
    for adapter in ("", named["poet"], named["judge.v2"]):
        before = backend.stats()
        ask(backend, [(ids, adapter)])
        assert backend.stats().reused == before.reused, "the first time there is nothing to reuse"
        ask(backend, [([*ids, 1], adapter)])
        assert backend.stats().reused - before.reused == 50
    # An adapter that is dropped and loaded again has the same name, and must not use its old keys and values.
    revision = named["poet"].rpartition("@")[2]
    backend.drop_adapter(named["poet"])
    assert backend.load_adapter("poet", str(loras["poet"])) == revision
    before = backend.stats()
    ask(backend, [(ids, named["poet"])])
    assert backend.stats().reused == before.reused


def test_prompts_of_different_adapters_do_not_run_together() -> None:
    rules = BatchRules(tokens=1000, logits=1000, kv_tokens=1000, pads=True, horizon=1000, chunk=1000, shares=False)
    adapters = ["", "a", "b", "a", "", "b"]
    waiting = {bytes([n]): PromptChunk(2, new_path(), adapter=adapter) for n, adapter in enumerate(adapters)}
    taken = []
    while waiting:
        batch = choose(waiting, 8, rules)
        waiting = {digest: chunk for digest, chunk in waiting.items() if digest not in batch}
        taken.append([chunk.adapter for chunk in batch.values()])
    assert taken == [["", ""], ["a", "a"], ["b", "b"]]


def test_another_weight_is_another_revision_and_the_same_weights_are_the_same(
    backend: HfBackend, tmp_path: Path, loras: dict[str, Path]
) -> None:
    revision = backend.load_adapter("a", str(loras["poet"]))
    assert backend.load_adapter("b", str(loras["poet"])) == revision
    other = write_lora(tmp_path / "other", 1)
    assert backend.load_adapter("c", str(other)) == revision
    tensors = load_file(other / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, other / "adapter_model.safetensors")
    assert backend.load_adapter("d", str(other)) != revision


# Refusals


def other_shape(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: torch.zeros(4, 4) for name in tensors}, folder / "adapter_model.safetensors")


def some_missing(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), folder / "adapter_model.safetensors")


def another_instead(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {
        name.replace("layers.0.mlp.up_proj", "layers.0.mlp.gate_proj"): tensor for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "adapter_model.safetensors")


def some_too_many(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    more = {f"base_model.model.model.layers.7.mlp.up_proj.lora_{f}.weight": torch.zeros(4, 4) for f in "AB"}
    save_file(tensors | more, folder / "adapter_model.safetensors")


def nonsense(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


def no_numbers(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    filled = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    save_file(filled, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_shape, "does not fit"),
        (some_missing, r"does not fit itself: .* asks for \d+ numbers \(parameters\), and .* holds \d+: save it anew"),
        (another_instead, "does not fit .*: 4 of its weights have no place or are missing"),
        (some_too_many, r"does not fit .* no place for .*layers\.7"),
        (nonsense, "does not fit"),
        (no_numbers, "the model's logits are no numbers"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"holds no adapter_model\.safetensors"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    model: Path, backend: HfBackend, tmp_path: Path, loras: dict[str, Path], spoil: Any, message: str
) -> None:
    spoiled = write_lora(tmp_path / "lora", 5)
    spoil(spoiled)
    plain = HfBackend(HfSettings(str(model), name="tiny"))
    for first in (True, False):
        with pytest.raises(SettingsError, match=message):
            backend.load_adapter("bad", str(spoiled))
        assert not any(adapter.startswith("bad") for adapter in backend.adapters)
        if first:
            (poet,) = load(backend, {"poet": loras["poet"]}).values()
        ids = [7, 3, len(backend.adapters)]
        np.testing.assert_allclose(ask(backend, [(ids, poet)])[0], reference(loras["poet"], ids), **CLOSE)
        assert np.array_equal(ask(backend, [([9, int(first)], "")]), ask(plain, [([9, int(first)], "")]))
    plain.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bias": "all"}, "changes biases of the model itself"),
        ({"init_lora_weights": "pissa"}, "has changed weights of its model"),
        ({"target_modules": ["q_proj"], "alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}, "aLoRA"),
    ],
)
def test_adapters_that_are_more_than_a_lora_are_refused(
    backend: HfBackend, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        backend.load_adapter("a", str(write_lora(tmp_path / "lora", 6, **config)))
    assert backend.adapters == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 1_000_000}, "the rank 'r': 1000000 must be a whole number from 1 to 1024"),
        ({"r": 512}, "has rank 4, and adapter_config.json says 512"),
        ({"target_modules": r"((\w|\w|\.)+)*!"}, "target_modules is .*, a pattern: .* list them"),
        ({"modules_to_save": [r"((\w|\w|\.)+)*!"]}, "modules_to_save names .* must match"),
    ],
)
def test_a_config_that_costs_memory_or_freezes_the_worker_is_refused_before_peft_reads_it(
    backend: HfBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], message: str
) -> None:
    spoiled = write_lora(tmp_path / "lora", 6)
    file = spoiled / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    monkeypatch.setattr("peft.PeftConfig.from_pretrained", lambda *_: pytest.fail("peft reads it"))
    with pytest.raises(SettingsError, match=message):
        backend.load_adapter("bad", str(spoiled))


class Reserved(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is partly untyped
    """Context manager that counts the bytes of tensors created inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: list[torch.UntypedStorage] = []  # Keep storages alive, so that no two have one address.

    @property
    def count(self) -> int:
        return sum({storage.data_ptr(): storage.nbytes() for storage in self._storages}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        tensors = [tensor for tensor in made if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"]
        self._storages += [tensor.untyped_storage() for tensor in tensors]
        return result


@pytest.mark.parametrize(
    "config",
    [
        {"r": 1, "rank_pattern": {"k_proj": 1024, "v_proj": 1024}, "target_modules": ["q_proj", "k_proj", "v_proj"]},
        {"r": 1, "target_modules": "all-linear"},
        {"r": 1, "target_modules": ["q_proj"], "modules_to_save": ["mlp", "lm_head"]},
        {"r": 1, "target_modules": ["q_proj"], "modules_to_save": ["layers.1"]},
        {"r": 1, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": list(range(50))}},
        {"r": 1, "target_modules": ["q_proj"], "use_dora": True},
    ],
)  # fmt: skip
def test_no_more_memory_is_reserved_for_an_adapter_than_its_file_holds(
    backend: HfBackend, loras: dict[str, Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = tmp_path / "greedy"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(1, 1)}, folder / "adapter_model.safetensors")
    for first in (True, False):
        with (
            Reserved() as reserved,
            pytest.raises(SettingsError, match=r"does not fit itself: .* asks for \d+ numbers .*, and .* holds 1: "),
        ):
            backend.load_adapter("greedy", str(folder))
        # Allow a few bytes: the backend copies tensors such as RoPE frequencies, neither parameters nor buffers.
        assert reserved.count < 1024
        if first:
            load(backend, loras)


def test_shapes_beyond_the_bytes_of_a_file_are_refused(backend: HfBackend, tmp_path: Path) -> None:
    boasting = write_lora(tmp_path / "lora", 5, r=64)
    file = boasting / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with Reserved() as reserved, pytest.raises(SettingsError, match="does not fit"):
        backend.load_adapter("boasting", str(boasting))
    assert reserved.count < 1024


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3]},
        {"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "alpha_pattern": {"lm_head": 3}},
    ],
)
def test_adapters_of_all_shapes_are_served(backend: HfBackend, tmp_path: Path, config: dict[str, Any]) -> None:
    lora = write_lora(tmp_path / "lora", 3, **config)
    (adapter,) = load(backend, {"a": lora}).values()
    np.testing.assert_allclose(ask(backend, [([1, 2], adapter)])[0], reference(lora, [1, 2]), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("llama", {"modules_to_save": ["lm_head"]}), ("gemma3", {"trainable_token_indices": [1, 2, 3]})],
)
def test_positions_use_the_rows_of_the_head_that_an_adapter_brings(
    tmp_path: Path, kind: str, extra: dict[str, Any]
) -> None:
    """An adapter that changes rows of the embedding changes the head too, if both are the same weights (Gemma 3)."""
    backend = HfBackend(HfSettings(str(write_model(tmp_path / "model", kind)), name="tiny"))
    lora = write_lora(tmp_path / "lora", 3, kind, target_modules=["q_proj"], **extra)
    (adapter,) = load(backend, {"a": lora}).values()
    ids, size = np.arange(1, 8, dtype="<u4").tobytes(), width_of(backend.info.hidden, backend.info.dtype)
    scored = BackendJob(bytes(16), ids, adapter, positions=PositionsQuery.scores_from(3))
    hidden = BackendJob(bytes(15) + b"1", ids, adapter, positions=PositionsQuery(0, values="hidden", size=size))
    answers, failures = dict[bytes, Row](), dict[bytes, str]()
    backend.submit([scored, hidden])
    while len(answers) + len(failures) < 2:
        finished = backend.step()
        failures |= finished.failures
        if finished.answers is not None:
            answers |= zip(finished.answers.digests, finished.answers.vectors, strict=True)
    expected = [reference(lora, range(1, at), kind)[at] for at in range(4, 8)]
    np.testing.assert_allclose(answers[scored.digest], expected, **CLOSE)
    assert "has a head, or rows of the head, of its own" in failures[hidden.digest]
    with pytest.raises(WorkerError, match="the adapter lora has a head, or rows of the head, of its own"):
        backend.head(HeadQuery("rank"), adapter)
    backend.close()


def test_a_rounded_copy_of_the_head_leaves_the_model_as_it_is(backend: HfBackend, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", 3, target_modules=["q_proj", "lm_head"])
    head = "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(lora / "adapter_model.safetensors")
    save_file(tensors | {head: tensors[head].bfloat16()}, lora / "adapter_model.safetensors")
    model: Any = backend._forward.model
    weight = model.get_output_embeddings().weight
    before = weight.clone()
    load(backend, {"a": lora})
    assert torch.equal(weight, before)
    # An adapter that was trained with a changed head needs this head: without it, the adapter's rows would be wrong.
    save_file(tensors | {head: tensors[head] * 1.1}, lora / "adapter_model.safetensors")
    with pytest.raises(SettingsError, match="does not fit .*model0: it has other weights for lm_head"):
        load(backend, {"b": lora})


# Serving


async def test_a_worker_serves_more_adapters_than_it_has_slots(pool: Pool, model: Path, tmp_path: Path) -> None:
    folders = [write_lora(tmp_path / str(number), number) for number in range(6)]
    pool.start("--backend", "hf", "--name", "tiny", "--max-adapters", 2, model=str(model))
    async with pool.producer() as producer:
        for number, folder in enumerate(folders):
            await producer.add_adapter(f"a{number}", folder)
        for ids in ([1, 2], [1, 2, 3]):
            asked = [producer.logprobs(ids, adapter=f"a{number}") for number in range(len(folders))]
            base, *rows = await asyncio.gather(producer.logprobs(ids), *asked)
            np.testing.assert_allclose(base, reference(None, ids), **CLOSE)
            for folder, row in zip(folders, rows, strict=True):
                np.testing.assert_allclose(row, reference(folder, ids), **CLOSE)


async def test_a_pool_serves_replaces_and_refuses_adapters(
    pool: Pool, model: Path, loras: dict[str, Path], tmp_path: Path
) -> None:
    pool.start("--backend", "hf", "--name", "tiny", "--adapters", f"poet={loras['poet']}", model=str(model))
    strange = write_lora(tmp_path / "strange", 4, "gpt2", target_modules=["c_attn"])
    async with pool.producer() as producer:
        (old,) = (await producer.adapters()).values()
        np.testing.assert_allclose(
            await producer.logprobs([1, 2], adapter="poet"), reference(loras["poet"], [1, 2]), **CLOSE
        )
        with pytest.raises(AdapterRefused, match="does not fit"):
            await producer.add_adapter("poet", strange)
        assert await producer.adapters() == {"poet": old}
        new = await producer.add_adapter("poet", loras["judge.v2"])
        assert new != old
        for ids in ([1, 2], [1, 2, 3]):
            row = await producer.logprobs(ids, adapter="poet")
            np.testing.assert_allclose(row, reference(loras["judge.v2"], ids), **CLOSE)
        np.testing.assert_allclose(await producer.logprobs([1, 2]), reference(None, [1, 2]), **CLOSE)
