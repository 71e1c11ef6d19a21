"""`lmpool perplexity` scores a text file in one window or in several overlapping windows."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest

from lmpool.batch.cli import windows
from tests.support.pool import Pool, run_lmpool

TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep: a naïve fox. " * 2


async def test_the_perplexity_is_computed_from_the_scores_of_all_tokens(
    pool: Pool, tmp_path: Path, smollm2_folder: Path
) -> None:
    from transformers import AutoTokenizer

    await asyncio.to_thread(pool.start, "--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    ids = AutoTokenizer.from_pretrained(smollm2_folder).encode(TEXT)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    command = ["perplexity", str(tmp_path / "text.txt"), "--redis", pool.url, "--prefix", pool.prefix]
    async with pool.producer() as producer:
        for options, pairs in (
            ([], [(ids[:1], ids[1:])]),
            (["--window", "12", "--overlap", "5"], [*windows(ids, 12, 5)]),
        ):
            scores = np.concatenate([await producer.score(*pair) for pair in pairs])
            ended = await asyncio.to_thread(run_lmpool, *command, *options, "--json")
            printed = json.loads(ended.stdout)
            assert printed["tokens"] == len(scores) == len(ids) - 1
            assert printed["nats_per_token"] == pytest.approx(-scores.mean(), abs=1e-4)
            assert printed["perplexity"] == pytest.approx(math.exp(-scores.mean()), rel=1e-3)
            assert printed["bits_per_byte"] == pytest.approx(-scores.sum() / math.log(2) / len(TEXT.encode()), rel=1e-3)
    ended = await asyncio.to_thread(run_lmpool, *command)
    names = ["tokens", "nats per token", "perplexity", "bits per byte"]
    assert [line.rpartition(" ")[0].strip() for line in ended.stdout.splitlines()] == names


def test_every_token_but_the_first_is_scored_once_after_its_context() -> None:
    for size, window, overlap in ((1, 4, 2), (2, 4, 2), (50, 4, 2), (50, 12, 1), (49, 12, 11), (50, 100, 50)):
        ids = list(range(size))
        pairs = list(windows(ids, window, overlap))
        assert [token for _, continuation in pairs for token in continuation] == ids[1:]
        for context, continuation in pairs:
            assert context + continuation == list(range(context[0], continuation[-1] + 1))
            assert len(context) + len(continuation) <= window
            assert len(context) == min(overlap, continuation[0]) or context == [0]


def test_files_that_cannot_be_scored_are_errors(pool: Pool, tmp_path: Path) -> None:
    pool.start("--max-prompt-tokens", 100)
    (tmp_path / "text.txt").write_text("Hello")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for name, options, reason in (
        ("nothing.txt", [], "nothing.txt cannot be read: No such file or directory\n"),
        ("bad.txt", [], "cannot be read: "),
        ("text.txt", ["--window", "101"], "must be more than the overlap, 50, and at most 100"),
        ("text.txt", ["--window", "10", "--overlap", "10"], "must be more than the overlap, 10"),
        ("text.txt", [], "the model 'syn' has no tokenizer"),
    ):
        command = ["perplexity", str(tmp_path / name), "--redis", pool.url, "--prefix", pool.prefix, *options]
        ended = run_lmpool(*command)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert reason in ended.stderr
