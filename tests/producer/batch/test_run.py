"""A batch run gives each line the result that a producer returns, in order, for each format and kind of input."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import lmpool.batch
from lmpool.batch.folder import digest_of_file
from lmpool.batch.run import BatchSettings
from lmpool.errors import SettingsError
from lmpool.protocol.picks import top
from tests.producer.batch.runs import (
    arguments,
    content,
    draw_texts,
    errors,
    rows_of,
    run,
    write_lines,
    write_texts,
)
from tests.support.pool import DEADLINE_S, Pool, V, run_lmpool, until_done

TEXTS = draw_texts(40)
SEVERAL = "positions:top=5, next_token,targets=3 0"


def expected(what: str, ids: list[int], start: int) -> dict[str, Any]:
    """Compute the expected columns of a result from the rows of the text."""
    rows = rows_of(ids)
    match what:
        case "topk:5":
            best = [top(row, 5) for row in rows[start:]]
            return {"logprobs": np.stack([t.values for t in best]), "top_ids": np.stack([t.ids for t in best])}
        case "targets:3,0":
            return {"logprobs": rows[start:, [3, 0]]}
        case _ if what == SEVERAL:
            best = [top(row, 5) for row in rows[start:]]
            at = np.arange(len(ids))[start:-1]
            return {
                "logprobs": np.stack([t.values for t in best]),
                "top_ids": np.stack([t.ids for t in best]),
                "targets": rows[start:, [3, 0]],
                "next_token": np.append(rows[at, [ids[place + 1] for place in at]], np.float32(np.nan)),
            }
        case "scores":
            first = max(1, start)
            return {"logprobs": rows[np.arange(first - 1, len(ids) - 1), ids[first:]]}
        case _:
            return {"logprobs": rows[start:]}


@pytest.mark.parametrize("start", [0, 2, -1])
@pytest.mark.parametrize(
    ("what", "shard_format"),
    [("topk:5", "jsonl"), ("topk:5", "parquet"), ("targets:3,0", "jsonl"), ("targets:3,0", "parquet"),
     ("scores", "jsonl"), ("scores", "parquet"), (SEVERAL, "jsonl"), (SEVERAL, "parquet"), ("rows", "safetensors")],
)  # fmt: skip
async def test_every_line_has_the_result_of_a_producer(
    pool: Pool, tmp_path: Path, what: str, shard_format: str, start: int
) -> None:
    pool.start()
    async with pool.producer() as producer:
        source = write_texts(tmp_path / "in.jsonl", TEXTS)
        outcome = await run(producer, source, tmp_path / "out", what, start=start, format=shard_format, shard_lines=7)
    least = max(start + 1 if start >= 0 else 1, 2 if what == "scores" else 1)
    wanted = [(number, ids) for number, ids in enumerate(TEXTS) if len(ids) >= least]
    batch = lmpool.batch.open(tmp_path / "out")
    assert outcome == (len(wanted), len(TEXTS) - len(wanted), 6, 0)
    assert batch.is_finished
    assert len(batch) == len(wanted)
    for answer, (number, ids) in zip(batch, wanted, strict=True):
        first = start if start >= 0 else len(ids) + start
        columns = expected(what, ids, first)
        assert (answer["line"], answer["custom_id"]) == (number + 1, f"text-{number}")
        assert answer["ids"].tolist() == ids
        assert answer["start"] == (max(1, first) if what == "scores" else first)
        assert answer.keys() == {"line", "custom_id", "ids", "start", *columns}
        for name, values in columns.items():
            assert answer[name].dtype == values.dtype
            assert np.array_equal(answer[name], values, equal_nan=name == "next_token")


async def test_rows_in_16_bits_are_written_exactly(pool: Pool, tmp_path: Path) -> None:
    """One text fails in its second part: the run must drop log_z of its first part too."""
    pool.start("--encoding", "bf16", "--fail-token", 0)
    source = write_texts(tmp_path / "in.jsonl", [*TEXTS[:5], [*[3] * 4100, 0], *TEXTS[5:]])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "rows", shard_lines=9)
        assert producer.model.encoding == "bf16"
        logits = await producer.batch_positions(TEXTS, full=True, mode="logits")
    tensors: Any = safe_open(tmp_path / "out/shard-00000.safetensors", "pt")  # Read with the library safetensors.
    assert tensors.get_slice("logits").get_dtype() == "BF16"
    batch = lmpool.batch.open(tmp_path / "out")
    assert batch.manifest.columns["logits"].startswith("bfloat16 (n, V)")
    for answer, ids, values in zip(batch, TEXTS, logits, strict=True):
        rows = rows_of(ids)
        assert values.full is not None
        assert np.array_equal(answer["logits"], values.full)
        assert np.allclose(answer["logprobs"], rows, rtol=0, atol=2e-6)
        assert np.allclose(np.exp(answer["logits"] - answer["log_z"][:, None]).sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(tensors.get_tensor("logits")[0].float().numpy(), np.asarray(logits[0].full)[0])


@pytest.mark.parametrize("shard_format", ["jsonl", "parquet"])
async def test_continuations_are_the_ones_of_one_batch_call(pool: Pool, tmp_path: Path, shard_format: str) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    stop = list(range(1, 100))
    what = f"generate:6,temperature=0.7,seed=3,stop={' '.join(map(str, stop))}"
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", what, format=shard_format, shard_lines=9)
        drawn = await producer.batch_generate(TEXTS, 6, temperature=0.7, seed=3, stop=stop)
    assert len({len(found.ids) for found in drawn}) > 1
    for answer, ids, found in zip(lmpool.batch.open(tmp_path / "out"), TEXTS, drawn, strict=True):
        assert answer["ids"].tolist() == ids
        assert answer["start"] == len(ids) - 1
        assert np.array_equal(answer["new_ids"], found.ids)
        assert np.array_equal(answer["logprobs"], found.logprobs)


async def test_results_of_a_run_do_not_stay_in_the_cache(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    ended = run_lmpool(*arguments(pool, source, tmp_path / "out", "--what", "topk:50"))
    assert ended.returncode == 0, ended.stderr
    await until_done(pool)
    assert pool.names("row:*") == []
    async with pool.producer() as producer:  # Results of other producers stay in the cache.
        await producer.positions(TEXTS[0], top=50)
    assert len(pool.names("row:*")) == 1


FORMS: dict[str, Any] = {
    "ids": lambda number, ids: {"custom_id": f"text-{number}", "ids": ids},
    "prompt": lambda number, ids: {"custom_id": f"text-{number}", "prompt": ids, "other": {"a": [1]}},
    "completions": lambda number, ids: {
        "custom_id": f"text-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "syn", "prompt": ids, "max_tokens": 1},
    },
    "embeddings": lambda number, ids: {
        "custom_id": f"text-{number}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "syn", "input": ids},
    },
}


@pytest.fixture
async def wanted(pool: Pool, tmp_path: Path) -> dict[str, bytes]:
    """The shards of a run over `TEXTS`."""
    pool.start()
    async with pool.producer() as producer:
        await run(producer, write_texts(tmp_path / "plain.jsonl", TEXTS), tmp_path / "wanted", "topk:3", shard_lines=7)
    return shards(tmp_path / "wanted")


def shards(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name.startswith("shard-")}


@pytest.mark.parametrize("form", FORMS)
async def test_lines_may_have_the_format_of_batch_files(
    pool: Pool, tmp_path: Path, wanted: dict[str, bytes], form: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [FORMS[form](number, ids) for number, ids in enumerate(TEXTS)])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "topk:3", shard_lines=7)
    assert shards(tmp_path / "out") == wanted


@pytest.mark.parametrize("row_group", [5, 16, 1000])
async def test_an_input_may_be_parquet(pool: Pool, tmp_path: Path, wanted: dict[str, bytes], row_group: int) -> None:
    table = pa.table({"custom_id": [f"text-{number}" for number in range(len(TEXTS))], "more": TEXTS, "ids": TEXTS})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=row_group)
    async with pool.producer() as producer:
        await run(producer, tmp_path / "in.parquet", tmp_path / "out", "topk:3", shard_lines=7)
        assert shards(tmp_path / "out") == wanted
        for gone in (0, 3, 4):  # Shards 3 and 4 begin in the middle of a row group.
            (tmp_path / f"out/shard-{gone:05}.jsonl").unlink()
        outcome = await run(producer, tmp_path / "in.parquet", tmp_path / "out", "topk:3", shard_lines=7)
    assert outcome.resumed == 3
    assert shards(tmp_path / "out") == wanted


async def test_a_continuation_is_scored_after_its_prompt(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    pairs = [([1, 2, 3], [4]), ([5], [6, 7, 8])]
    lines = [{"prompt": prompt, "continuation": continuation} for prompt, continuation in pairs]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"prompt": [1], "continuation": []}])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "scores")
        scores = [await producer.score(*pair) for pair in pairs]
    for answer, (prompt, continuation), score in zip(lmpool.batch.open(tmp_path / "out"), pairs, scores, strict=True):
        assert answer["ids"].tolist() == prompt + continuation
        assert answer["start"] == len(prompt)
        assert answer["custom_id"] == ""
        assert np.array_equal(answer["logprobs"], score)
    assert errors(tmp_path / "out") == [
        (3, None, "the continuation is empty: a score needs a token, and a token before it")
    ]


async def test_large_results_are_requested_in_parts(pool: Pool, tmp_path: Path) -> None:
    """One result has at most 8 MiB (4,096 rows). If a later part of a text fails, its written parts are removed."""
    pool.start("--fail-token", 0)
    long = np.random.default_rng(0).integers(1, V, 5000).tolist()
    source = write_texts(tmp_path / "in.jsonl", [[1, 2], long, [*long, 0], [3], long[:4097]])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "rows", shard_lines=10)
        parts = np.asarray((await producer.positions(long, full=True)).full)
    assert [(number, name) for number, name, _ in errors(tmp_path / "out")] == [(3, "text-2")]
    answers = lmpool.batch.open(tmp_path / "out")
    for answer, wanted in zip(answers, [rows_of([1, 2]), parts, rows_of([3]), parts[:4097]], strict=True):
        assert np.array_equal(answer["logprobs"], wanted)
    tensors = load_file(tmp_path / "out/shard-00000.safetensors")  # Read with the library safetensors.
    assert tensors["logprobs"].shape == (2 + 5000 + 1 + 4097, V)
    assert np.array_equal(tensors["logprobs"][2:5002], parts)
    assert tensors["positions"].tolist() == [0, 2, 5002, 5003, 9100]
    assert json.loads(tensors["custom_ids"].tobytes()) == ["text-0", "text-1", "text-3", "text-4"]


@pytest.mark.parametrize("what", ["topk:2", "rows"])
async def test_a_shard_may_have_no_result(pool: Pool, tmp_path: Path, what: str) -> None:
    pool.start()
    source = write_lines(tmp_path / "in.jsonl", ["nothing", {"ids": [1]}])
    async with pool.producer() as producer:
        outcome = await run(producer, source, tmp_path / "out", what, shard_lines=1)
    batch = lmpool.batch.open(tmp_path / "out")
    assert outcome == (1, 1, 2, 0)
    assert [answer["line"] for answer in batch] == [2]


async def test_the_models_tokenizer_encodes_text(pool: Pool, tmp_path: Path, smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    encode = AutoTokenizer.from_pretrained(smollm2_folder).encode
    lines = [{"text": "The capital"}, {"prompt": "The capital of", "continuation": " France is Paris"}, {"text": ""}]
    source = write_lines(tmp_path / "in.jsonl", lines)
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "scores")
        prompt, continuation = encode("The capital of"), encode(" France is Paris")
        score = await producer.score(prompt, continuation)
    first, second = lmpool.batch.open(tmp_path / "out")
    assert first["ids"].tolist() == encode("The capital")
    assert second["ids"].tolist() == prompt + continuation
    assert np.allclose(second["logprobs"], score, atol=1e-4)
    assert [number for number, _, _ in errors(tmp_path / "out")] == [3]


async def test_reading_the_input_leaves_threads_for_loading_the_tokenizer(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that read its input in a thread of the event loop's executor could wait for itself, with many runs."""

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    async def find(*_: Any) -> Tokenizer:
        return await asyncio.wait_for(asyncio.to_thread(Tokenizer), DEADLINE_S)

    monkeypatch.setattr("lmpool.batch.run.find_tokenizer", find)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    pool.start()
    async with pool.producer() as producer:
        await run(producer, write_lines(tmp_path / "in.jsonl", [{"text": "abc"}]), tmp_path / "out", "topk:2")
    assert lmpool.batch.open(tmp_path / "out")[0]["ids"].tolist() == [97, 98, 99]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_hidden_states_are_written_in_the_models_dtype(
    pool: Pool, tmp_path: Path, smollm2_folder: Path, dtype: str
) -> None:
    pool.start("--backend", "hf", "--name", "smollm2", "--dtype", dtype, model=str(smollm2_folder))
    texts = [[*ids[:2], 7] for ids in TEXTS[:3]]
    source = write_texts(tmp_path / "in.jsonl", texts)
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "hidden", concurrency=1)
        states = [await producer.hidden(ids) for ids in texts]
    tensors: Any = safe_open(tmp_path / "out/shard-00000.safetensors", "pt")
    assert tensors.get_slice("hidden").get_dtype() == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    for answer, wanted in zip(lmpool.batch.open(tmp_path / "out"), states, strict=True):
        assert np.array_equal(answer["hidden"], wanted)


async def test_a_backend_without_hidden_states_is_an_error(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    async with pool.producer() as producer:
        with pytest.raises(SettingsError, match="the backend 'synthetic' of 'syn' does not return hidden states"):
            await run(producer, source, tmp_path / "out", "hidden")


async def test_the_manifest_has_the_options_and_every_shard(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "topk:3", shard_lines=16)
        manifest = json.loads((tmp_path / "out/manifest.json").read_text("utf-8"))
        assert manifest["model"]["fingerprint"] == producer.model.fingerprint
    assert manifest["input"]["digest"] == digest_of_file(source)
    assert manifest["input"]["lines"] == len(TEXTS)
    assert manifest["options"] == {"what": "topk:3", "start": 0, "format": "jsonl", "shard_lines": 16}
    for shard in manifest["done"]:
        path = tmp_path / f"out/shard-{shard['number']:05}.jsonl"
        assert shard["bytes"] == path.stat().st_size
        assert shard["digest"] == digest_of_file(path)
        assert shard["texts"] == len(path.read_bytes().splitlines())
    assert [shard["number"] for shard in manifest["done"]] == [0, 1, 2]


def test_malformed_requests_are_refused_before_the_input_is_read() -> None:
    wrong = "topk topk:0 topk:-1 topk:2.5 targets: targets:a scores:1 rows:2 nothing"
    wrong += " generate generate:a generate:4,heat=1 generate:4,seed=x"
    for what in ("", *wrong.split()):
        with pytest.raises(SettingsError, match="what: "):
            BatchSettings(what)
    for name, value in (("start", "1"), ("shard_lines", -1), ("concurrency", 0), ("format", "csv")):
        with pytest.raises(SettingsError, match=f"{name}: "):
            BatchSettings("topk:2", **{name: value})  # type: ignore[arg-type]
    for what, unfit in (("rows", "jsonl"), ("topk:2", "safetensors")):
        with pytest.raises(SettingsError, match="format: "):
            BatchSettings(what, format=unfit)
