"""The programs of examples/ run as a user runs them, on one worker with a real model."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.producer import SyncProducer
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb") and path.stem[0] != "_"
)
# Modules and configurations for trainers, which tests/trainers runs.
TRAINERS = sorted(path for path in (ROOT / "examples/trainers").iterdir() if path.is_file() and path.stem[0] != "_")
# Examples that use a running pool, and the arguments of each example.
ASKING: dict[str, tuple[str, ...]] = {
    "next_words.py": (),
    "smc_json.py": (),
    "awrs_regex.py": (),
    "byte_beams.py": (),
    "distill.py": (str(ROOT / "LICENSE"),),
    "perplexity.py": (str(ROOT / "LICENSE"),),
}
# Examples that import torch before they connect.
SLOW = ("awrs_regex.py", "byte_beams.py", "distill.py")
FOLDER = ROOT / "docs/tutorials"
# A text that each tutorial prints.
TUTORIALS = {
    "next-words.md": "' Paris'",
    "smc.md": "log-probability that 16 tokens have no e: about -",
    "distillation.md": "probability of these tokens: 0.",
    "scoring.md": "exit code 3\n",
}
NOBODY = "redis://127.0.0.1:1"
UNREACHABLE = f"error: no Redis server answers at {NOBODY}"
NOT_SERVED = (
    "error: the model 'smollm3' is not served; did you mean 'smollm2'? served are: smollm2; "
    "start a worker with `lmpool worker MODEL --name smollm3`"
)
TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep in its warm bed. " * 3


@pytest.fixture(scope="module")
def url(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for the examples, on which only SmolLM2 is served."""
    folder = tmp_path_factory.mktemp("examples")
    with EmbeddedServer(memory_bytes=1 << 29) as server:
        pool = Pool(server.url, "lmpool", folder)
        pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
        yield server.url
        pool.end()


@pytest.fixture(scope="module")
def producer(url: str) -> Iterator[SyncProducer]:
    """A producer that computes the values which the examples must print."""
    with SyncProducer("smollm2", redis=url) as producer:
        yield producer


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    """The tokenizer of SmolLM2."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


def run(
    name: str, *arguments: str | int | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run an example; return its exit code, its output and its errors."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def output(name: str, *arguments: str | int | Path, environment: Mapping[str, str] | None = None) -> str:
    """The output of an example that succeeds."""
    code, out, err = run(name, *arguments, environment=environment)
    assert code == 0, err
    return out


def ended(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str | int | Path) -> SystemExit:
    """Run an example in this process, which has imported torch already; return the example's SystemExit."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return caught.value


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """A function that returns the output of an example that starts its own pool.

    The example runs in this process, which has imported torch already.
    """
    import torch

    def call(name: str, *arguments: str | int) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


def cells(out: str) -> list[list[str]]:
    """The cells of each row of the table that an example has printed."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def test_next_words_are_the_top_k_tokens(url: str, producer: SyncProducer, tokenizer: Any) -> None:
    rows = cells(output("next_words.py", "--top", 3, environment={"LMPOOL_REDIS_URL": url}))
    row = producer.logprobs(tokenizer.encode("The capital of France is"))
    best = np.argsort(row)[::-1][:3]
    assert [line[:2] for line in rows[:3]] == [
        ["" if rank else "The capital of France is", repr(tokenizer.decode([token]))]
        for rank, token in enumerate(best.tolist())
    ]
    # The percentages have one digit after the point. A rounding error of a row can change this digit by 1.
    shown = [float(line[2].removesuffix("%")) for line in rows[:3]]
    np.testing.assert_allclose(shown, 100 * np.exp(row[best]), rtol=0, atol=0.06)
    assert rows[0][1] == "' Paris'"
    assert len(rows) == 9


def test_every_particle_of_both_processes_is_json_of_the_given_form(url: str) -> None:
    out = output("smc_json.py", "--particles", 16, "--redis", url)
    rows = cells(out)
    for process in ("1", "2"):
        mine = [row for row in rows if row[0] == process]
        assert sum(int(count) for _, count, _, _ in mine) == 16
        assert sum(float(weight) for _, _, _, weight in mine) == pytest.approx(1, abs=0.01)
    for _, _, text, _ in rows:
        city = json.loads(text)
        assert re.fullmatch("[A-Z][a-z]{2,11}", city["city"])
        assert 1 <= city["millions"] <= 99
    asked = re.findall(r"process \d asked for (\d+) rows of (\d+) different prompts", out)
    assert all(int(rows) > int(prompts) >= 16 for rows, prompts in asked)
    assert len(asked) == 2
    shared = re.search(r"computed once: (\d+)", out)
    assert shared is not None
    # The runs share at least their first prompt, because all of them begin with the same prompt.
    assert 1 <= int(shared[1]) <= min(int(prompts) for _, prompts in asked)


def test_every_awrs_sample_matches_the_expression(url: str) -> None:
    out = output("awrs_regex.py", "She has", " (one|two|three) (cats|dogs)\\.", "--samples", 5, "--redis", url)
    rows = cells(out)
    assert len(rows) == 5
    assert all(re.fullmatch(r"' (one|two|three) (cats|dogs)\.'", text) for text, _ in rows)
    weights = np.array([float(weight) for _, weight in rows])
    mean = re.search(r"about (-[0-9.]+)", out)
    assert mean is not None
    assert float(mean[1]) == pytest.approx(np.log(np.mean(np.exp(weights))), abs=0.1)


def test_byte_beams_continue_in_the_middle_of_a_word(url: str) -> None:
    out = output("byte_beams.py", "The capital of Fra", "--bytes", 12, "--redis", url)
    assert out.splitlines()[-1] == "The capital of France is Paris"
    assert len(cells(out)) == 12


def test_a_student_learns_from_the_teacher(
    url: str, producer: SyncProducer, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    (tmp_path / "texts.txt").write_text(TEXT * 3, "utf-8")
    options = ("--steps", 12, "--batch", 4, "--length", 24, "--top", 8)
    files = ("--save", tmp_path / "student", "--plot", tmp_path / "kl.svg")
    out = output("distill.py", tmp_path / "texts.txt", *options, *files, "--redis", url)
    first, last = re.findall(r"\d+\.\d+", out)[:2]
    assert float(last) < 0.7 * float(first)
    assert ElementTree.parse(tmp_path / "kl.svg").getroot().tag.endswith("svg")
    # The saved student model is nearer to the teacher than an untrained student model.
    divergence = runpy.run_path(str(ROOT / "examples" / "distill.py"), run_name="distill")["divergence"]
    ids = tokenizer.encode(TEXT)[:24]
    best = producer.positions(ids, top=8).top
    assert best is not None
    values, tokens = best
    student: Any = LlamaForCausalLM.from_pretrained(tmp_path / "student")
    untaught: Any = type(student)(student.config)
    losses = []
    for model in (student, untaught):
        with torch.inference_mode():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits
            losses.append(float(divergence(logits, torch.tensor(values)[None], torch.tensor(tokens)[None])))
    assert losses[0] < losses[1]
    assert losses[0] < 0.8 * float(first)


def test_the_divergence_of_a_distribution_from_itself_is_0() -> None:
    import torch

    divergence = runpy.run_path(str(ROOT / "examples" / "distill.py"), run_name="distill")["divergence"]
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    values, ids = torch.log_softmax(logits, dim=-1).topk(5)
    assert abs(float(divergence(logits, values, ids))) < 1e-6
    assert float(divergence(logits.roll(1, -1), values, ids)) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--top", 0), "error: top: 0 "), (("--length", 5000), "error: texts: .* tokens are too few for a window of")],
)
def test_invalid_options_of_distillation_are_refused(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: tuple[str | int, ...],
    message: str,
) -> None:
    (tmp_path / "texts.txt").write_text(TEXT, "utf-8")
    error = ended(monkeypatch, "distill.py", tmp_path / "texts.txt", *options, "--redis", url)
    assert re.match(message, str(error.code))
    del error
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_served_student_learns_from_its_own_texts_as_without_a_pool(printed: Callable[..., str]) -> None:
    out = printed("on_policy_distillation.py", "--steps", 6, "--every", 2, "--batch", 4, "--length", 8)
    found = re.findall(r"step +(\d+): loss ([0-9.]+) on texts of version (\d+), published version (\d+)\n", out)
    # Each step has the texts of the version that was published last, in the pool and then without a pool.
    versions = [tuple(map(int, (step, *versions))) for step, _, *versions in found]
    assert versions == [(2, 0, 1), (4, 1, 2), (6, 2, 3)] * 2
    losses = [float(loss) for _, loss, *_ in found]
    assert losses[2] < losses[0]
    # Do not compare the printed losses: a rounding error can change their last digit.
    difference = re.search(r"largest difference of a loss: (\S+) nats", out)
    assert difference is not None
    assert float(difference[1]) < 1e-4
    differing = re.search(r"(\d+) of 192 tokens differ", out)
    assert differing is not None
    assert int(differing[1]) <= 2  # A rounding error can change a token; rows of other weights change many.


def test_a_served_twist_learns_to_guide_particles_as_without_a_pool(printed: Callable[..., str]) -> None:
    options = ("--updates", 10, "--every", 5, "--particles", 32, "--length", 8, "--runs", 6, "--rate", 0.01)
    out = printed("twisted_smc.py", *options)
    found = re.findall(r"training: log Z \S+, standard deviation (\S+) in 6 runs, effective sample size (\d+)%\n", out)
    before, after, *alone = [(float(spread), int(share)) for spread, share in found]
    assert after[0] < before[0] / 2
    assert after[1] > before[1]
    # A rounding error can change the last digit of a printed number by 1.
    for (spread, share), (pooled_spread, pooled_share) in zip(alone, (before, after), strict=True):
        assert spread == pytest.approx(pooled_spread, abs=0.0011)
        assert share == pytest.approx(pooled_share, abs=1)
    assert re.findall(r"published version (\d)\n", out) == ["1", "2"] * 2
    differences = re.search(r"largest difference of a loss: (\S+), of an estimate of log Z: (\S+);", out)
    assert differences is not None
    assert max(float(differences[1]), float(differences[2])) < 1e-4


@pytest.mark.parametrize("name", ["on_policy_distillation.py", "twisted_smc.py"])
def test_an_example_that_starts_its_pool_refuses_invalid_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, name, "--every", 0).code == 2
    assert "--every: 0 must be at least 1\n" in capsys.readouterr().err


def test_the_gradient_of_a_twist_is_0_where_psi_is_the_expected_potential() -> None:
    """Check texts of two characters of a uniform base model, whose expected potentials are means over all texts."""
    import torch

    example = runpy.run_path(str(ROOT / "examples" / "twisted_smc.py"), run_name="twisted_smc")
    count = len(example["CHARACTERS"])
    pairs = np.array([(0, first, second) for first in range(count) for second in range(count)])
    weights = np.exp(example["log_potential"](pairs))
    # Instead of samples: all texts, each with its probability.
    uniform = np.full((count, count), -np.log(count), np.float32)
    # The loss does not read the choices of a step.
    steps = [
        example["Step"](np.zeros((1, 1), np.int64), np.zeros(1), uniform[:1], tokens=None, resampled=None),
        example["Step"](
            np.column_stack([np.zeros(count, np.int64), range(count)]), np.zeros(count), uniform,
            tokens=None, resampled=None,
        ),
    ]  # fmt: skip
    run = example["Run"](steps, pairs, weights / weights.sum(), 0.0)
    best = weights.reshape(count, count)

    class Table:
        """A twist with a logit for each pair of a last character and a next one; the start is a row of its own."""

        def __init__(self) -> None:
            self.first = torch.tensor(np.log(best.mean(axis=1)), requires_grad=True)
            self.second = torch.tensor(np.log(best), requires_grad=True)

        def __call__(self, input_ids: Any) -> Any:
            rows = [self.first.expand(len(input_ids), count), self.second[input_ids[:, -1]]]
            return type("Output", (), {"logits": torch.stack(rows[: input_ids.shape[1]], dim=1)})

    table = Table()
    example["twist_loss"](table, run).backward()
    for logits in (table.first, table.second):
        assert logits.grad is not None
        assert float(logits.grad.abs().max()) < 1e-6


def test_perplexity_is_that_of_transformers_on_the_same_windows(
    url: str, smollm2_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from lmpool.trie import torch_device

    window, overlap = 24, 10
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    out = output("perplexity.py", tmp_path / "text.txt", "--window", window, "--overlap", overlap, "--redis", url)
    figures = {line[:14].strip(): float(line[14:]) for line in out.splitlines()}

    torch_device.settle()
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    ids = torch.tensor(tokenizer.encode(TEXT))
    nats, scored = 0.0, 1
    for first in range(0, len(ids) - overlap, window - overlap):
        piece = ids[first : first + window]
        with torch.no_grad():
            rows = model(piece[None]).logits[0].log_softmax(-1)
        for position in range(scored - first, len(piece)):
            nats -= float(rows[position - 1, piece[position]])
        scored = first + len(piece)
    assert scored == len(ids)
    assert figures["tokens"] == len(ids) - 1
    assert figures["nats per token"] == pytest.approx(nats / (len(ids) - 1), abs=1e-3)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-3)
    assert figures["bits per byte"] == pytest.approx(nats / math.log(2) / len(TEXT), abs=1e-3)


@pytest.mark.parametrize("name", [name for name in ASKING if name not in SLOW])
def test_a_wrong_model_name_ends_in_one_line(name: str, url: str, tmp_path: Path) -> None:
    code, _, err = run(name, *ASKING[name], "--model", "smollm3", "--redis", url, folder=tmp_path)
    assert (code, err) == (1, f"{NOT_SERVED}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in ASKING if name not in SLOW])
def test_a_missing_server_ends_in_one_line(name: str, tmp_path: Path) -> None:
    code, _, err = run(name, *ASKING[name], "--redis", NOBODY, folder=tmp_path)
    assert code == 1
    assert re.fullmatch(rf"{UNREACHABLE}[^\n]*\n", err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SLOW)
def test_wrong_names_and_missing_servers_end_programs_that_import_torch(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in ((("--model", "smollm3", "--redis", url), NOT_SERVED), (("--redis", NOBODY), UNREACHABLE)):
        assert re.fullmatch(rf"{re.escape(message)}[^\n]*", str(ended(monkeypatch, name, *ASKING[name], *options).code))


@pytest.mark.parametrize(
    ("name", "package"), [("smc_json.py", "control"), ("awrs_regex.py", "control"), ("byte_beams.py", "bytes")]
)
def test_a_missing_package_ends_in_one_line(name: str, package: str, url: str, tmp_path: Path) -> None:
    # This empty module `genlm` precedes the installed module, also in processes that an example starts.
    (tmp_path / "genlm").mkdir()
    (tmp_path / "genlm" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, _, err = run(name, "--redis", url, environment={"PYTHONPATH": path})
    assert code == 1
    assert err == f"error: No module named 'genlm.{package}': pip install genlm-{package} 'lmpool[genlm]'\n"


def test_the_notebook_draws_the_picture_that_it_shows(
    url: str, monkeypatch: pytest.MonkeyPatch, producer: SyncProducer
) -> None:
    notebook = json.loads((ROOT / "examples/surprise.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.setenv("LMPOOL_REDIS_URL", url)
    scope: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), scope)
    scope["producer"].close()

    prompt, text, nats = scope["prompt"], scope["text"], scope["nats"]
    rows = producer.batch_logprobs([prompt + text[:end] for end in range(len(text))])
    np.testing.assert_allclose(nats, -rows[np.arange(len(text)), text], atol=1e-3)
    assert scope["tokenizer"].decode([text[int(np.argmax(nats))]]) == " Tokyo"
    drawn, stored = scope["picture"].data, "".join(cells[-1]["outputs"][0]["data"]["image/svg+xml"])
    ElementTree.fromstring(drawn)
    for part in (r"<text[^>]* rotate\(60\)\">([^<]*)<", r'fill="gray">([^<]*)<', r'fill="(steelblue|firebrick)"'):
        assert re.findall(part, drawn) == re.findall(part, stored) != []


@pytest.mark.parametrize(("page", "printed"), TUTORIALS.items())
def test_a_tutorial_runs_to_its_end(
    page: str,
    printed: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run all cells of a tutorial in one namespace, as a notebook does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMPOOL_REDIS_URL", url)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    cells = re.findall(r"^```{code-cell}\n(.*?)^```$", (FOLDER / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        for cell in cells:
            if cell.startswith("%%bash\n"):
                script = cell.removeprefix("%%bash\n")
                print(subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout)
                continue
            awaited = eval(compile(cell, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)  # noqa: S307
            if inspect.iscoroutine(awaited):
                runner.run(_the(awaited))
    assert printed in capsys.readouterr().out
    assert len(cells) >= 4


def test_the_programs_of_the_page_of_divergences_agree(url: str) -> None:
    """Run the Python blocks of the page with a small student: all forms of the teacher give one divergence."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmpool.distill import divergence, partial_divergence, partial_divergence_error
    from lmpool.producer import Producer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    untyped: Any = LlamaForCausalLM
    model, ids = untyped(config), [504, 2767, 282, 4649, 314]
    scope: dict[str, Any] = {"model": model, "ids": ids, "input_ids": torch.tensor([ids])}
    scope["is_completion"] = np.arange(len(ids)) > 2
    page = (ROOT / "docs/distillation.md").read_text("utf-8")

    async def run() -> None:
        async with Producer("smollm2", redis=url) as scope["producer"]:
            for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
                awaited = eval(compile(block, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)  # noqa: S307
                if inspect.iscoroutine(awaited):
                    await awaited

    asyncio.run(run())
    assert model.lm_head.weight.grad is not None
    assert scope["loss"].requires_grad
    options: dict[str, Any] = {"temperature": 2.0, "reduction": "none"}
    logits, known, tail = scope["logits"].detach(), scope["predictions"].top, scope["predictions"].tail
    exact = divergence(scope["teacher"], logits, **options)
    torch.testing.assert_close(divergence(scope["full"], logits, **options), exact, rtol=1e-4, atol=1e-5)
    low = partial_divergence(known, tail, logits, **options)
    error = partial_divergence_error(known, tail, logits, temperature=2.0, is_top=True)
    assert ((low <= exact + 1e-5) & (exact <= low + error + 1e-5)).all()


async def _the(awaited: Any) -> None:
    await awaited


def test_every_tutorial_is_run() -> None:
    notebooks = {path.name for path in FOLDER.glob("*.md") if "file_format: mystnb" in path.read_text("utf-8")}
    assert notebooks == set(TUTORIALS)


def test_a_cached_model_of_another_dtype_is_not_used(
    smollm2_folder: Path,
) -> None:
    code, out, err = run("smollm2.py", smollm2_folder, "--dtype", "bfloat16")
    assert (code, out) == (1, "")
    assert err.startswith(f"{smollm2_folder} has the model in float32 already, and bfloat16 is asked for: name another")
    code, out, err = run("smollm2.py", smollm2_folder, "--dtype", "float32")
    assert (code, out) == (0, f"{smollm2_folder}\n")
    assert "nothing has been written" in err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_explained_and_listed(path: Path) -> None:
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source))
        assert text is not None
        # These two are modules for other programs: a backend, and a model for lighteval.
        assert f"python examples/{path.name}" in text or path.name in ("own_backend.py", "lighteval_model.py")
    else:
        assert json.loads(source)["cells"][0]["cell_type"] == "markdown"
    assert f"[{path.name}](../../examples/{path.name})" in (FOLDER / "examples.md").read_text("utf-8")


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_every_example_for_a_trainer_is_explained_and_listed(path: Path) -> None:
    assert path.read_text("utf-8").startswith("# " if path.suffix == ".toml" else '"""')
    for page in ("examples.md", "trainers.md"):
        assert f"(../../examples/trainers/{path.name})" in (FOLDER / page).read_text("utf-8")


def test_every_example_that_asks_a_pool_is_tested() -> None:
    # tests/trainers runs ray_map.py.
    others = {"demo.py", "lighteval_model.py", "own_backend.py", "ray_map.py", "smollm2.py", "surprise.ipynb"}
    own_pool = {"on_policy_distillation.py", "twisted_smc.py"}
    assert {path.name for path in EXAMPLES} == others | own_pool | set(ASKING)
