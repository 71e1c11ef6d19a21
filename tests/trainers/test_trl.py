"""TRL's trainers on a CPU: the losses and the student are the same with teachers in a pool and in the same process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from examples.trainers import trl_teacher
from examples.trainers.trl_teacher import PooledTeacher, RoutedTrainer
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedTokenizerFast
from trl import DistillationConfig, DistillationTrainer  # type: ignore[attr-defined]
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.generation import vllm_client

from lmpool.errors import SettingsError
from lmpool.protocol.row import Head
from tests.gateway.service import GatewayService
from tests.support.models.tiny_models import VOCAB_SIZE, make_model, write_model
from tests.support.pool import DEADLINE_S, Pool

TEACHERS = ("llama", "llama:poet", "llama:rhyme", "phi")
KINDS = ("llama", "phi", "gemma2")
STEPS = 3
# The pool computes each text alone, and TRL a padded batch: their float32 sums differ by rounding. Measured: losses of
# 0.3 to 2.8 differ by at most 5e-7, and weights by 3e-7. Another teacher changes the loss by more than 0.01.
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}


def write_phi(folder: Path) -> None:
    """Write a tiny model with a bias in its head."""
    torch.manual_seed(7)
    config = PhiConfig(vocab_size=VOCAB_SIZE, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
                       num_attention_heads=2)  # fmt: skip
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models, of which `phi` is narrower and has a bias in its head, and two adapters, one of the head too."""
    folder = tmp_path_factory.mktemp("trl")
    for kind in ("llama", "gemma2"):
        write_model(folder / kind, kind)
    write_phi(folder / "phi")
    for seed, (name, modules) in enumerate({"poet": ["q_proj", "v_proj"], "rhyme": ["q_proj", "lm_head"]}.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        get_peft_model(make_model("llama"), config).save_pretrained(str(folder / name))
    return {name: folder / name for name in (*KINDS, "poet", "rhyme")}


@pytest.fixture(scope="module")
def served(server_url: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with the models and the adapters."""
    pool = Pool(server_url, "trl", tmp_path_factory.mktemp("pool"))
    adapters = [word for name in ("poet", "rhyme") for word in ("--adapters", f"{name}={folders[name]}")]
    for kind in KINDS:
        options = ["--backend", "hf", "--dtype", "float32", "--name", kind, *(adapters if kind == "llama" else [])]
        pool.start(*options, model=str(folders[kind]), wait=False)
    for worker in pool.workers:
        worker.until_says("serving ")
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def local(folders: dict[str, Path]) -> dict[str, Any]:
    """The same teachers in this process."""
    found: dict[str, Any] = {}
    auto: Any = AutoModelForCausalLM
    for name in (*TEACHERS, "gemma2"):
        kind, _, adapter = name.partition(":")
        # Of transformers' kinds of attention, only "eager" caps the scores of Gemma 2.
        model = auto.from_pretrained(folders[kind], dtype=torch.float32, attn_implementation="eager")
        found[name] = PeftModel.from_pretrained(model, folders[adapter]).merge_and_unload() if adapter else model
    return found


@pytest.fixture(scope="module")
def pooled(served: Pool) -> PooledTeacher:
    """The teachers of the pool."""
    return PooledTeacher(*TEACHERS, redis=served.url, prefix=served.prefix, timeout=DEADLINE_S)


def train(make: Callable[..., Any], config: type[Any], folder: Path, **options: Any) -> tuple[list[float], np.ndarray]:
    """Train a student for some steps; return the losses and the student's weights.

    `column` has the name of a column and the value in all of its rows, in place of the column `teacher`.
    """
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    untyped: Any = PreTrainedTokenizerFast
    fast = untyped(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0")
    samples = [
        {"prompt": " ".join(f"w{2 + (7 * at + k) % 90}" for k in range(2 + at % 4)), "teacher": TEACHERS[at % 4]}
        for at in range(4 * STEPS)
    ]
    if "column" in options:
        name, value = options.pop("column")
        samples = [{"prompt": sample["prompt"], name: value} for sample in samples]
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "max_completion_length": 6,
        "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1, "beta": 0.5,
        "save_strategy": "no", "report_to": "none", "bf16": False, "use_cpu": True, "seed": 3, "disable_tqdm": True,
        **options.pop("settings", {}),
    }  # fmt: skip
    student = make_model("llama", seed=5)
    args = config(**settings)
    trainer = make(model=student, args=args, train_dataset=Dataset.from_list(samples), processing_class=fast, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    weights = torch.cat([each.detach().flatten() for each in student.parameters()])
    return losses, weights.numpy()


def test_losses_and_student_are_those_of_a_teacher_in_the_process(
    local: dict[str, Any], pooled: PooledTeacher, tmp_path: Path
) -> None:
    losses, weights = train(DistillationTrainer, DistillationConfig, tmp_path, teacher_model=local["llama"])
    found, trained = train(DistillationTrainer, DistillationConfig, tmp_path, teacher_model=pooled)
    np.testing.assert_allclose(found, losses, **CLOSE)
    np.testing.assert_allclose(trained, weights, **CLOSE)
    other, _ = train(DistillationTrainer, DistillationConfig, tmp_path, teacher_model=local["llama:poet"])
    assert np.abs(np.subtract(other, losses)).max() > 0.01


class LocalRoutedTrainer(RoutedTrainer):
    """The reference: each sample's loss with its own teacher in this process, whose sum is the loss of the batch."""

    local: ClassVar[dict[str, Any]] = {}

    def _compute_loss(self, student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        parts, pooled, base = [], self.teacher_model, cast(Any, DistillationTrainer)
        for at, route in enumerate(inputs["routes"].tolist()):
            self.teacher_model = self.local[TEACHERS[route]]
            one = {key: value[at : at + 1] if value.ndim else value for key, value in inputs.items()}
            parts.append(base._compute_loss(self, student, one, num_items_in_batch))
        self.teacher_model = pooled
        return tuple(sum(values) for values in zip(*parts, strict=True))


def test_each_sample_has_the_teacher_that_its_column_names(
    local: dict[str, Any], pooled: PooledTeacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, trained = train(RoutedTrainer, DistillationConfig, tmp_path, teacher_model=pooled)
    monkeypatch.setattr(LocalRoutedTrainer, "local", local)
    losses, weights = train(LocalRoutedTrainer, DistillationConfig, tmp_path, teacher_model=pooled)
    np.testing.assert_allclose(found, losses, **CLOSE)
    np.testing.assert_allclose(trained, weights, **CLOSE)
    assert pooled.routes is None


@pytest.mark.parametrize("column", ["teacher", "other"])
def test_a_sample_without_a_known_teacher_is_refused(pooled: PooledTeacher, tmp_path: Path, column: str) -> None:
    given = "prose" if column == "teacher" else None
    message = f"column teacher: {given!r} must be one of llama, llama:poet, llama:rhyme, phi; pass it to PooledTeacher"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        train(RoutedTrainer, DistillationConfig, tmp_path, teacher_model=pooled, column=(column, "prose"))


def test_a_teacher_without_names_and_samples_with_images_are_refused(pooled: PooledTeacher) -> None:
    with pytest.raises(SettingsError, match="^names: name at least one teacher"):
        PooledTeacher()
    ids = torch.arange(6)[None] + 2
    with pytest.raises(SettingsError, match="^pixel_values: a pool takes only token ids"):
        pooled(ids, torch.ones_like(ids), use_cache=False, pixel_values=ids, image_sizes=None)


def test_a_16_bit_head_with_factors_of_an_adapter_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    shapes = (50, 8), (2, 8), (50, 2), (3, 8)
    arrays: list[Any] = [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in shapes]
    weights, down, up, hidden = arrays
    heads = {
        "": Head(weights, None, 1.0, None, "bfloat16"),
        "poet": Head(weights, None, 0.3, None, "bfloat16", down, up),
    }
    monkeypatch.setattr(
        trl_teacher, "SyncProducer", lambda *_, **__: SimpleNamespace(head=lambda adapter: heads[adapter])
    )
    assert PooledTeacher("llama").head.weight.dtype == torch.bfloat16
    logits = PooledTeacher("llama:poet").head(torch.from_numpy(hidden))
    expected = replace(heads["poet"], dtype="float32").logits(hidden)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-5)


def test_logits_of_a_mixed_batch_are_those_of_each_teacher(
    local: dict[str, Any], pooled: PooledTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(24).reshape(4, 6) + 2
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1] * 6, [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    monkeypatch.setattr(pooled, "routes", [0, 1, 2, 3])
    states = pooled(ids, mask, logits_to_keep=4).last_hidden_state
    assert states.shape[:2] == (4, 4)
    logits = pooled.get_output_embeddings()(states)
    for at, name in enumerate(TEACHERS):
        kept = mask[at].bool()
        with torch.inference_mode():
            expected = local[name](input_ids=ids[at][kept][None]).logits[0]
        torch.testing.assert_close(logits[at][kept[2:]], expected[int(kept[:2].sum()) :], rtol=0, atol=1e-4)


def test_soft_caps_are_applied_and_not_mixed(served: Pool, local: dict[str, Any]) -> None:
    options: dict[str, Any] = {"redis": served.url, "prefix": served.prefix, "timeout": DEADLINE_S}
    teacher, ids = PooledTeacher("gemma2", **options), torch.arange(6)[None] + 2
    cap = teacher.config.get_text_config().final_logit_softcapping
    states = teacher(ids, torch.ones_like(ids)).last_hidden_state
    with torch.inference_mode():
        logits = cap * torch.tanh(teacher.get_output_embeddings()(states) / cap)
        torch.testing.assert_close(logits, local["gemma2"](input_ids=ids).logits, rtol=0, atol=1e-4)
    message = f"llama has V = {VOCAB_SIZE}, soft-cap None; gemma2 has V = {VOCAB_SIZE}, soft-cap {cap}. Use a trainer"
    with pytest.raises(SettingsError, match=re.escape(message)):
        PooledTeacher("llama", "gemma2", **options)


@pytest.mark.parametrize("name", ["llama", "llama:poet"])
def test_the_url_of_a_gateway_is_the_teacher_of_the_server_trainer(
    served: Pool, local: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Forward KL over the k = V most likely tokens is the loss of a teacher in the process."""
    # TRL's client checks that vLLM is installed, but needs vLLM only to send weights.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    # The client takes the first model that the gateway lists, which is its default and not the first by name.
    gateway = GatewayService(served, "--model", name)
    url = {"teacher_model_server_url": gateway.base, "loss_top_k": VOCAB_SIZE, "loss_add_tail": False, "beta": 0.0}
    found, trained = train(ServerDistillationTrainer, ServerDistillationConfig, tmp_path, settings=url)
    losses, weights = train(
        DistillationTrainer, DistillationConfig, tmp_path, teacher_model=local[name], settings={"beta": 0.0}
    )
    np.testing.assert_allclose(found, losses, **CLOSE)
    np.testing.assert_allclose(trained, weights, **CLOSE)
