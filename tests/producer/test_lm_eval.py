"""lm-evaluation-harness (lm-eval) on a pool gives the numbers of lm-eval's own model `hf`, for tiny tasks."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lmpool.errors import LMPoolError, PromptTooLong, ServerUnreachable, SettingsError, UnknownAdapter
from lmpool.lm_eval import LmpoolLM, main
from tests.contract.model import write_adapter
from tests.gateway.service import GatewayService
from tests.support.pool import DEADLINE_S, Pool, until
from tests.web.service import TOKEN

LONGEST = 64
TEXT = "The river ran past the mill, and the miller's wife sang to the geese.\n\nShe had a café in the town. " * 3
CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{options}}"
num_fewshot: 1
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{question}} "
doc_to_target: "{{options[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
""",
}


def write_model(folder: Path, *, marks: bool = False, longest: int = LONGEST) -> Path:
    """Write a tiny random Llama and a byte-level tokenizer; with `marks` texts begin with the BOS token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ċ", "Ċ"), ("e", "r"), ("i", "n"), (".", "ĊĊ")]
    pieces = ["<s>", "</s>", "<end>", "<turn>", *letters, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:4]])
    if marks:
        template: Any = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.post_processor = template
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=longest,
        bos_token_id=0,
        # Two end tokens, like many chat models; the tokenizer has only the first.
        eos_token_id=[1, 2],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        # Make end tokens frequent.
        model.lm_head.weight.data[1:4] *= 1.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model with a tokenizer whose texts begin with the BOS token."""
    return write_model(tmp_path_factory.mktemp("marked"), marks=True)


@pytest.fixture(scope="module")
def served(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that most tests share; `pooled` starts its workers."""
    pool = Pool(server_url, "lmeval", tmp_path_factory.mktemp("pool"))
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of lm-eval tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["the", "a mill", "geese", "water.\n\n", "she sang", " and"]
    lines = [
        {
            "question": f"{number} What did {words[number % 6]} see " + "by the river " * (number % 5),
            "options": [words[(number + at) % 6] + " it" * (at % 2) for at in range(3)],
            "answer": number % 3,
            "text": TEXT[number * 7 : number * 31 + 20],
        }
        for number in range(8)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    for name, text in TASKS.items():
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(source + "test_split: test\nfewshot_split: test\n" + text)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let lm-eval use only local data sets, and a cache folder of the test."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def hf(folder: Path, **arguments: Any) -> Any:
    """Return lm-eval's own model `hf`, which runs transformers in this process."""
    return get_model("hf")(pretrained=str(folder), dtype="float32", device="cpu", **arguments)


def pooled(pool: Pool, folder: Path, *options: str, **arguments: Any) -> LmpoolLM:
    """Return lm-eval's model `lmpool`; a worker serves the model of a folder under the folder's name."""
    if not pool.redis.hexists(pool.keys.models(), folder.name):
        pool.start("--backend", "hf", "--name", folder.name, *options, model=str(folder))
    return LmpoolLM(folder.name, redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S, **arguments)


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def longest(model: LmpoolLM) -> tuple[str, str]:
    """Return the longest generated text of 40 tokens, and its context."""
    contexts = [TEXT[: 3 * at] for at in range(1, 20)]
    questions = requests("generate_until", *((context, {"until": [], "max_gen_toks": 40}) for context in contexts))
    return max(zip(contexts, model.generate_until(questions), strict=True), key=lambda pair: len(pair[1]))


def evaluate(model: Any, tasks: Path, **options: Any) -> Any:
    return simple_evaluate(
        model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )


def answers_of(results: Any) -> dict[str, list[Any]]:
    """Return the results of each task, one entry for each document."""
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}


def flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def assert_same(answers: Any, expected: Any) -> None:
    """Assert equal texts and truth values, and numbers within 1e-4 or a relative 1e-5."""
    found, wanted = flat(answers), flat(expected)
    for value, other in zip(found, wanted, strict=True):
        assert isinstance(value, bool) == isinstance(other, bool)
        assert value == (pytest.approx(other, rel=1e-5, abs=1e-4) if isinstance(other, float) else other)


def assert_same_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that the metrics of a task have all numbers of the expected metrics, within a relative 1e-5.

    The pool and transformers compute different batches, so their log-probabilities differ by rounding errors. A
    perplexity is the exponential of a mean log-probability, so an absolute error of the mean becomes a relative error
    of the perplexity. The mean of `last_word` is about -41, where neighbouring float32 numbers differ by 4e-6.
    """
    numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
    assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_tasks_give_the_results_of_the_same_model_in_transformers(
    served: Pool, folder: Path, tasks: Path, chat: bool
) -> None:
    ours = evaluate(pooled(served, folder), tasks, apply_chat_template=chat)
    theirs = evaluate(hf(folder), tasks, apply_chat_template=chat)
    answers, expected = answers_of(ours), answers_of(theirs)
    for name in TASKS:
        assert_same(answers[name], expected[name])
        metrics = theirs["results"][name]
        assert sum(isinstance(value, float) for value in metrics.values()) >= len(TASKS[name].split("metric:")) - 1
        assert_same_metrics(ours["results"][name], metrics)
    # The tasks have right and wrong answers, so equal results are no accident.
    assert len({str(answer) for answer in flat(answers["written"])}) > 3
    assert 0 < ours["results"]["choice"]["acc,none"] < 1
    assert ours["config"]["model_fingerprint"]


@pytest.mark.parametrize("marks", [False, True], ids=["plain", "bos"])
def test_texts_are_tokenized_as_in_transformers(served: Pool, folder: Path, marked: Path, marks: bool) -> None:
    source = marked if marks else folder
    ours, theirs = pooled(served, source), hf(source)
    pairs = requests(
        "loglikelihood",
        ("The mill ", "by the river"),
        ("The mill", " by the river"),
        ("", "The mill"),
        ("<s>The mill", " sang"),
        (TEXT, " in the town"),
        (TEXT[:58], " "),
        ("a", "b" * LONGEST),
        ("a" * LONGEST, "b"),
    )
    assert_same(ours.loglikelihood(pairs), theirs.loglikelihood(pairs))
    texts = requests("loglikelihood_rolling", ("",), ("a",), (TEXT,), ("<s>" + TEXT[:70],), ("é" * LONGEST,))
    assert_same(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts))
    contexts = [mark + TEXT[: 4 * at] for at in range(1, 10) for mark in ("", "<s>")]
    written = requests("generate_until", *((text, {"until": [], "max_gen_toks": 20}) for text in contexts))
    assert ours.generate_until(written) == theirs.generate_until(written)


def greedy_questions(model: LmpoolLM) -> list[Any]:
    """Return eight prefixes of the most likely continuation of a text, and eight texts with another last token."""
    (said,) = model._producer.generate(model.tok_encode("The mill"), 8, temperature=0)
    likely = said.ids.tolist()
    context = model.tok_encode("The mill")
    questions: list[Any] = [(None, context, likely[:size]) for size in range(1, 9)]
    # Replace the last token by the second most likely token.
    for size in range(8):
        second = model._producer.topk([*context, *likely[:size]], 2).ids[1]
        questions.append((None, context, [*likely[:size], int(second)]))
    return questions


def test_greedy_is_reported_for_every_prefix_of_the_greedy_continuation(served: Pool, folder: Path) -> None:
    ours, theirs = pooled(served, folder), hf(folder)
    questions = greedy_questions(ours)
    answers = ours._loglikelihood_tokens(questions)
    assert [is_greedy for _, is_greedy in answers] == [True] * 8 + [False] * 8
    assert_same(answers, theirs._loglikelihood_tokens(questions))


@pytest.mark.parametrize(
    "arguments",
    [
        {"until": ["e"]},
        {"until": "\n\n", "max_gen_toks": 50},
        {"until": [], "max_new_tokens": 45},
        {"until": ["<end>"], "do_sample": False, "temperature": 0.7, "max_gen_toks": 60},
        {"until": ["th", "0", "."], "max_gen_toks": 33},
        {"until": ["<turn>"], "max_gen_toks": 60},
    ],
)
def test_generated_texts_end_where_they_end_in_transformers(
    served: Pool, folder: Path, arguments: dict[str, Any]
) -> None:
    ours, theirs = pooled(served, folder), hf(folder)
    contexts = [TEXT[at * 5 : at * 9 + 1] for at in range(24)] + [TEXT]
    questions = requests("generate_until", *((context, {"max_gen_toks": 40, **arguments}) for context in contexts))
    if "max_new_tokens" in arguments:
        questions = requests("generate_until", *((context, arguments) for context in contexts))
    texts = ours.generate_until(questions)
    assert texts == theirs.generate_until(questions)
    assert len(set(texts)) > 3
    # The texts have several lengths.
    assert len({len(text) for text in texts}) > 3


def test_samples_depend_on_the_seed_and_the_request(served: Pool, folder: Path) -> None:
    arguments = {"until": [], "do_sample": True, "temperature": 1.0, "top_p": 0.99, "max_gen_toks": 40}
    questions = requests("generate_until", *[("The mill", arguments)] * 6)
    ours = pooled(served, folder, seed=5)
    texts = ours.generate_until(questions)
    for at in range(6):
        how: Any = {"seed": 5 + (at << 32), "temperature": 1.0, "top_p": 0.99, "stop": [1, 2]}
        (made,) = ours._producer.generate(ours.tok_encode("The mill"), 40, **how)
        assert texts[at] == ours.tokenizer.decode(made.ids.tolist(), skip_special_tokens=True)
    assert len(set(texts)) == 6
    assert pooled(served, folder, seed=5, batch_size=2).generate_until(questions) == texts
    assert pooled(served, folder, seed=6).generate_until(questions) != texts


def test_settings_work_as_in_lm_evals_own_model(served: Pool, marked: Path) -> None:
    pairs = requests("loglikelihood", ("The mill", " sang"), ("", "The mill"), (TEXT, " in the town"))
    texts = requests("loglikelihood_rolling", (TEXT,))
    arguments: dict[str, Any]
    plain = pooled(served, marked)
    for arguments in ({"add_bos_token": False}, {"prefix_token_id": 7}, {"max_length": 20}):
        ours, theirs = pooled(served, marked, **arguments), hf(marked, **arguments)
        assert_same(ours.loglikelihood(pairs), theirs.loglikelihood(pairs))
        assert_same(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts))
        assert ours.loglikelihood_rolling(texts) != plain.loglikelihood_rolling(texts)
    context, whole = longest(plain)
    questions = requests("generate_until", (context, {"until": [], "max_gen_toks": 40}))
    mark = next(letter for letter in whole[5:] if letter.isprintable())
    (answer,) = pooled(served, marked, think_end_token=mark).generate_until(questions)
    assert answer == whole.split(mark)[-1].lstrip() != whole
    assert hf(marked, think_end_token=mark).generate_until(questions) == [answer]


def test_a_text_that_ends_early_is_one_request(served: Pool, folder: Path) -> None:
    ours = pooled(served, folder)
    context, whole = longest(ours)
    letter = next(letter for letter in whole[5:] if letter.isascii() and len(ours.tok_encode(letter)) == 1)
    before = ours._producer.stats().computed
    (text,) = ours.generate_until(requests("generate_until", (context, {"until": letter, "max_gen_toks": 50})))
    assert text == whole.split(letter)[0]
    assert ours._producer.stats().computed - before == 1


def test_a_question_needs_about_one_forward_for_each_option(served: Pool, folder: Path) -> None:
    ours = pooled(served, folder)
    before = ours._producer.stats().computed
    options = [" by the", " sang", " in", " 1", " 2", " 3"]
    ours.loglikelihood(requests("loglikelihood", *(("The mill by the river ran", option) for option in options)))
    # One forward for each option, one for the greedy token, and one more if an option begins with this token.
    assert ours._producer.stats().computed - before <= len(options) + 2


def test_lm_evals_cache_has_the_results_of_an_interrupted_evaluation(pool: Pool, folder: Path, tmp_path: Path) -> None:
    ours = pooled(pool, folder)
    cached = CachingLM(ours, str(tmp_path / "answers"))
    kinds = {
        "loglikelihood": requests("loglikelihood", ("The mill", " sang"), ("The mill", " by the river")),
        "loglikelihood_rolling": requests("loglikelihood_rolling", (TEXT,)),
        "generate_until": requests("generate_until", ("The mill", {"until": ["e"], "max_gen_toks": 20})),
    }
    # Call the model directly, so that only the model itself, and not lm-eval at the end, records results.
    answers = {kind: getattr(ours, kind)(questions) for kind, questions in kinds.items()}
    ours._producer.close()
    assert {kind: getattr(cached, kind)(questions) for kind, questions in kinds.items()} == answers


def test_an_adapter_changes_the_results(pool: Pool, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "warm", "warm")
    questions = requests("loglikelihood", ("The mill", " sang"))
    written = requests("generate_until", ("The mill", {"until": [], "max_gen_toks": 20}))
    ours = pooled(pool, folder, "--adapters", f"warm={adapter}", adapter="warm")
    theirs = hf(folder, peft=str(adapter))
    assert_same(ours.loglikelihood(questions), theirs.loglikelihood(questions))
    assert ours.generate_until(written) == theirs.generate_until(written)
    plain = pooled(pool, folder)
    assert ours.loglikelihood(questions) != plain.loglikelihood(questions)
    with pytest.raises(UnknownAdapter):
        pooled(pool, folder, adapter="cold").loglikelihood(questions)


def test_lm_evals_command_runs_on_a_pool(served: Pool, folder: Path, tasks: Path, tmp_path: Path) -> None:
    theirs = evaluate(hf(folder), tasks)
    pooled(served, folder)
    model = f"name={folder.name},redis={served.url},prefix={served.prefix},timeout={DEADLINE_S}"
    command = [sys.executable, "-m", "lmpool.lm_eval", "--model", "lmpool", "--model_args", model, "--batch_size", "8"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "|choice" in done.stdout
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text("utf-8"))["results"]
    for name, metrics in theirs["results"].items():
        assert_same_metrics(results[name], metrics)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of tiny models that accept the prompts of all tasks; only the texts of `rolling` are longer.

    The key is whether the tokenizer adds the BOS token.
    """
    folders = {marks: tmp_path_factory.mktemp(f"roomy-{marks}") for marks in (False, True)}
    return {marks: write_model(path, marks=marks, longest=2 * LONGEST) for marks, path in folders.items()}


@pytest.fixture(scope="module")
def gateway(served: Pool) -> GatewayService:
    """A gateway with a token."""
    return GatewayService(served, token=TOKEN)


@pytest.mark.parametrize(
    ("marks", "options"),
    [
        (False, {"num_concurrent": 8}),
        (False, {"num_concurrent": 2, "batch_size": 3, "tokenized_requests": False}),
        (True, {"batch_size": 4, "add_bos_token": True}),
    ],
    ids=["concurrent", "texts", "bos"],
)
def test_local_completions_of_a_gateway_gives_the_results_of_the_same_model_in_transformers(
    served: Pool,
    gateway: GatewayService,
    roomy: dict[bool, Path],
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    marks: bool,
    options: dict[str, Any],
) -> None:
    folder, max_length = roomy[marks], 2 * LONGEST + 1
    questions = greedy_questions(pooled(served, folder))
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    # lm-eval requests one token after each prompt, so its prompts may have one token less than `max_length`. It cuts
    # its texts as `hf` does with a `max_length` that is two tokens smaller.
    ours = get_model("local-completions")(
        model=folder.name,
        base_url=f"{gateway.base}/v1/completions",
        tokenizer=str(folder),
        max_length=max_length,
        max_retries=1,
        **options,
    )
    if ours.tokenized_requests:  # The tokens of a decoded text may be others.
        assert [is_greedy for _, is_greedy in ours._loglikelihood_tokens(questions)] == [True] * 8 + [False] * 8
    found, theirs = evaluate(ours, tasks), evaluate(hf(folder, max_length=max_length - 2), tasks)
    answers, expected = answers_of(found), answers_of(theirs)
    for name in TASKS:
        assert_same(answers[name], expected[name])
        assert_same_metrics(found["results"][name], theirs["results"][name])
    assert len({str(answer) for answer in flat(answers["written"])}) > 3
    assert 0 < found["results"]["choice"]["acc,none"] < 1


def test_errors_of_the_command_are_one_line(
    served: Pool, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"name=missing,redis={served.url}"
    command = ["lm_eval", "--model", "lmpool", "--model_args", model, "--tasks", "choice", "--include_path", str(tasks)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("lmpool: the model 'missing' is not served")


def test_bad_arguments_are_refused_by_name(served: Pool, folder: Path, tmp_path: Path) -> None:
    ours = pooled(served, folder)
    bad: list[tuple[dict[str, Any], type[LMPoolError], str]] = [
        ({"batch_size": 0}, SettingsError, "batch_size: 0 must be a whole number of at least 1, or 'auto'"),
        ({"batch_size": "many"}, SettingsError, "batch_size: 'many'"),
        ({"max_length": LONGEST + 1}, SettingsError, f"max_length: 65 must be a whole number from 1 to {LONGEST}"),
        ({"max_gen_toks": 0}, SettingsError, "max_gen_toks: 0"),
        ({"seed": -1}, SettingsError, "seed: -1"),
        ({"priority": "low"}, SettingsError, "priority: 'low' is not one of interactive, bulk"),
        ({"colour": 1}, SettingsError, "colour: not an argument of the model lmpool; there are name, redis"),
        ({"tokenizer": str(tmp_path)}, SettingsError, r"tokenizer: .* does not load: .*; or name one of this machine"),
    ]
    for arguments, kind, message in bad:
        with pytest.raises(kind, match=message):
            pooled(served, folder, **arguments)
    with pytest.raises(ServerUnreachable):
        LmpoolLM(redis="redis://127.0.0.1:1/0")
    for given, message in (
        ({"max_gen_toks": LONGEST}, "max_gen_toks: 64 must be less than max_length, 64 tokens"),
        ({"repetition_penalty": 2.0, "max_gen_toks": 3}, "repetition_penalty: a pool does not support it"),
        ({"do_sample": True, "temperature": 1.0, "top_k": 2, "max_gen_toks": 3}, "top_k: a pool does not support it"),
    ):
        with pytest.raises(SettingsError, match=message):
            ours.generate_until(requests("generate_until", ("a", given)))
    with pytest.raises(PromptTooLong, match="a continuation has 65 tokens; the limit is 64"):
        ours.loglikelihood(requests("loglikelihood", ("a", "b" * 65)))


@pytest.mark.parametrize(("device", "is_logged"), [("cuda:0", False), ("cpu", True), (None, False)])
def test_a_device_has_no_effect_and_is_logged(
    served: Pool, folder: Path, caplog: pytest.LogCaptureFixture, device: str | None, is_logged: bool
) -> None:
    """lm-eval's command passes "cuda:0" if the user named no device, so only another device is logged."""
    pooled(served, folder, device=device)
    assert ("device=cpu: has no effect" in caplog.text) == ("has no effect" in caplog.text) == is_logged


def test_a_model_without_a_tokenizer_needs_the_tokenizer_option(pool: Pool, folder: Path) -> None:
    pool.start("--vocab-size", "266")
    with pytest.raises(SettingsError, match="tokenizer: the model 'syn' has no tokenizer; name one of this machine"):
        LmpoolLM(redis=pool.url, prefix=pool.prefix)
    ours = LmpoolLM(redis=pool.url, prefix=pool.prefix, tokenizer=str(folder))
    (answer,) = ours.loglikelihood(requests("loglikelihood", ("The mill", " sang")))
    assert answer[0] < 0


def test_requests_can_have_bulk_priority(pool: Pool, folder: Path) -> None:
    pool.start("--vocab-size", "266")
    ours = LmpoolLM(redis=pool.url, prefix=pool.prefix, tokenizer=str(folder), priority="bulk")
    ours.loglikelihood(requests("loglikelihood", ("The mill", " sang")))
    (reply,) = pool.names("*:reply:*")
    assert ":reply:bulk:" in reply


def test_ctrl_c_does_not_wait_for_requests(pool: Pool, folder: Path) -> None:
    pool.start("--vocab-size", "300", "--step-ms", "600000")
    ours = LmpoolLM(redis=pool.url, prefix=pool.prefix, tokenizer=str(folder), timeout=3600)

    def press() -> None:
        until(pool.held, "the worker holds requests")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    # Hypothesis adds a callback to the garbage collector; a KeyboardInterrupt in the callback would be lost.
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            ours.loglikelihood(requests("loglikelihood", *(("The mill", " sang" * at) for at in range(1, 9))))
    finally:
        gc.enable()
    presser.join()


def test_lm_eval_finds_the_model_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    ((name, target),) = project["entry-points"]["lm_eval.models"].items()
    assert EntryPoint(name, target, "lm_eval.models").load() is get_model(name) is LmpoolLM
