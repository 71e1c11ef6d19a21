"""`lmpool.batch.open` reads results by number, by custom id, in order, for torch, and of unfinished runs."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool.batch
from lmpool.errors import BatchError, BatchRefused
from tests.producer.batch.runs import draw_texts, rows_of, run, write_lines, write_texts
from tests.support.pool import Pool

TEXTS = draw_texts(50)
FORMATS = [("topk:5", "jsonl"), ("topk:5", "parquet"), ("rows", "safetensors")]


async def written(
    pool: Pool, folder: Path, what: str, shard_format: str, texts: list[list[int]] = TEXTS, shard_lines: int = 8
) -> Path:
    """Do a batch run over texts; return its output folder."""
    pool.start()
    async with pool.producer() as producer:
        source = write_texts(folder / "in.jsonl", texts)
        await run(producer, source, folder / "out", what, format=shard_format, shard_lines=shard_lines)
    return folder / "out"


@pytest.mark.parametrize(("what", "shard_format"), FORMATS)
async def test_results_are_found_by_number_and_by_custom_id(
    pool: Pool, tmp_path: Path, what: str, shard_format: str
) -> None:
    batch = lmpool.batch.open(await written(pool, tmp_path, what, shard_format))
    assert len(batch) == len(TEXTS)
    for number in (0, 7, 8, 49, 20):
        for answer in (batch[number], batch[number - 50], batch.by_custom_id(f"text-{number}"), batch[number:][0]):
            assert answer["custom_id"] == f"text-{number}"
            assert answer["ids"].tolist() == TEXTS[number]
    assert [answer["line"] for answer in batch[3:40:9]] == [4, 13, 22, 31, 40]
    for wrong in (50, -51):
        with pytest.raises(IndexError, match="there are 50 results"):
            batch[wrong]
    with pytest.raises(KeyError):
        batch.by_custom_id("text-50")
    assert "50 results" in repr(batch)


@pytest.mark.parametrize(("what", "shard_format"), FORMATS)
async def test_the_folder_of_an_unfinished_run_has_the_finished_shards(
    pool: Pool, tmp_path: Path, what: str, shard_format: str
) -> None:
    output = await written(pool, tmp_path, what, shard_format)
    (output / f"shard-00002.{shard_format}").unlink()
    batch = lmpool.batch.open(output)
    assert not batch.is_finished
    assert [answer["line"] for answer in batch] == [*range(1, 17), *range(25, 51)]
    assert batch.by_custom_id("text-24")["line"] == 25
    with pytest.raises(KeyError):
        batch.by_custom_id("text-16")
    assert "6 of 7 shards" in repr(batch)


async def test_rows_are_views_of_the_file(pool: Pool, tmp_path: Path) -> None:
    batch = lmpool.batch.open(await written(pool, tmp_path, "rows", "safetensors"))
    rows = batch[9]["logprobs"]
    assert not rows.flags.owndata
    assert not rows.flags.writeable
    assert np.array_equal(rows, rows_of(TEXTS[9]))


@pytest.mark.parametrize(("what", "shard_format"), FORMATS[1:])
async def test_a_batch_may_have_more_shards_than_the_process_may_open_files(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, shard_format: str
) -> None:
    output = await written(pool, tmp_path, what, shard_format, TEXTS, shard_lines=1)
    batch = lmpool.batch.open(output)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    for at in (*range(len(TEXTS)), 0):
        assert batch[at]["ids"].tolist() == TEXTS[at]
        assert len(batch._open) <= 10
    assert batch.by_custom_id("text-7")["ids"].tolist() == TEXTS[7]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"not an output folder of `lmpool batch`: it has no manifest.json"):
        lmpool.batch.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BatchRefused, match="is not a manifest of this release"):
        lmpool.batch.open(tmp_path)


@pytest.mark.parametrize(("what", "shard_format"), FORMATS)
async def test_a_data_loader_of_torch_reads_it(pool: Pool, tmp_path: Path, what: str, shard_format: str) -> None:
    from torch.utils.data import DataLoader, Dataset

    texts = [text[:2] for text in TEXTS if len(text) > 1]
    output = await written(pool, tmp_path, what, shard_format, texts)
    batch: Any = lmpool.batch.open(output)
    assert isinstance(batch, Dataset)
    loader = DataLoader(batch, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    lines, values = [], []
    for part in loader:
        lines += part["line"].tolist()
        values.append(part["logprobs"].numpy())
    assert lines == list(range(1, len(texts) + 1))
    wanted = np.stack([answer["logprobs"] for answer in lmpool.batch.open(output)])
    assert np.array_equal(np.concatenate(values), wanted)
    again = pickle.loads(pickle.dumps(batch))  # noqa: S301
    assert len(again) == len(texts)
    assert isinstance(again, Dataset)


async def test_reading_needs_no_torch(pool: Pool, tmp_path: Path) -> None:
    output = await written(pool, tmp_path, "topk:5", "jsonl")
    program = (
        "import sys, lmpool.batch as b; print(len(b.open(sys.argv[1])), {'torch', 'typer', 'rich'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program, output], capture_output=True, text=True, check=True)
    assert done.stdout == "50 set()\n"


async def test_minus_infinity_is_kept(pool: Pool, tmp_path: Path) -> None:
    """JSON has no infinity, so results contain null for minus infinity."""
    output = await written(pool, tmp_path, "targets:1,2", "jsonl", [[1]])
    shard = output / "shard-00000.jsonl"
    line = json.loads(shard.read_text("utf-8"))
    size = shard.stat().st_size
    write_lines(shard, [json.dumps({**line, "logprobs": [[None, -1.5]]}).ljust(size - 1)])
    assert shard.stat().st_size == size
    (answer,) = lmpool.batch.open(output)
    assert answer["logprobs"].tolist() == [[-np.inf, -1.5]]
