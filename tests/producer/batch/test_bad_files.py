"""A bad line of an input fails alone; a bad file or a full disk is an error, and leaves no partial shard."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import json
import lzma
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lmpool.batch
from lmpool.batch import lines as lines_module
from lmpool.batch.folder import SUBMISSION
from lmpool.batch.lines import CustomIds, Line, ParquetSource, Source
from lmpool.batch.shards import Failed
from lmpool.errors import (
    BatchError,
    BatchRefused,
    DeadlineExceeded,
    LMPoolError,
    SettingsError,
    TokenOutOfRange,
    UnknownAdapter,
)
from tests.producer.batch.runs import arguments, begin, content, draw_texts, errors, run, write_lines, write_texts
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, lmpool_command, run_lmpool

MAX_TOKENS = 8
PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}
BAD: list[tuple[dict[str, Any] | str, str]] = [
    ('{"custom_id": "broken", "ids": [1', "no JSON: "),
    ("[1, 2]", "unusable: Expected `object`, got `array`"),
    ("not JSON", "no JSON: "),
    ('{"ids": [1]} {"ids": [2]}', "no JSON: "),
    (
        '{"custom_id": "\udc80", "ids": [1]}',
        "no JSON: ",
    ),  # The rest is msgspec's text, which differs between its releases.
    ({}, "a line needs one of text, ids, prompt, body.prompt, body.input: it has none of them"),
    ({"custom_id": "none"}, "it has none of them"),
    ({"body": {"messages": [{"role": "user", "content": "Hello"}]}}, "it has none of them"),
    ({"ids": [1], "text": "two"}, "it has text and ids"),
    ({"ids": []}, "the prompt is empty"),
    ({"ids": ["a"]}, "unusable: Expected `int`, got `str` - at `$.ids[0]`"),
    ({"ids": [1.5]}, "Expected `int`, got `float` - at `$.ids[0]`"),
    ({"ids": [True]}, "Expected `int`, got `bool` - at `$.ids[0]`"),
    ({"ids": [[1], [2]]}, "Expected `int`, got `array` - at `$.ids[0]`"),
    ({"ids": [1, V]}, f"token id {V} is out of range"),
    ({"ids": [-1]}, "token id -1 is out of range"),
    ({"ids": [10**30]}, "is out of range"),
    ({"ids": [1] * (MAX_TOKENS + 1)}, f"at most {MAX_TOKENS}"),
    ({"custom_id": ["a"], "ids": [1]}, "Expected `int | str | null`, got `array` - at `$.custom_id`"),
    ({"ids": [1], "continuation": [2]}, "continuation: only --what scores accepts it"),
    ({"custom_id": "good-1", "ids": [3]}, "an earlier line has its custom_id"),
    ({"custom_id": "good-1", "ids": [1] * 100}, "an earlier line has its custom_id"),
    ({"ids": [1, 9]}, "was told to fail"),
    (
        '{"ids": [1], "other": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "the lists and objects of the line are nested too deeply",
    ),
    ({"body": {"prompt": 5}}, "Expected `str | array | null`, got `int` - at `$.body.prompt`"),
    ({"custom_id": "kept", "ids": "abc"}, "Expected `array | null`, got `str` - at `$.ids`"),
]


async def test_bad_lines_are_listed_with_their_numbers_and_reasons(pool: Pool, tmp_path: Path) -> None:
    pool.start("--max-prompt-tokens", MAX_TOKENS, "--fail-token", 9)
    good: list[dict[str, Any] | str] = [{"custom_id": f"good-{number}", "ids": [number + 1]} for number in range(4)]
    listed = [*good[:3], "", *(line for line, _ in BAD), "  ", good[3]]
    source = write_lines(tmp_path / "in.jsonl", listed)
    ended = await asyncio.to_thread(
        run_lmpool, *arguments(pool, source, tmp_path / "out", "--what", "topk:2", "--shard-lines", 5)
    )
    assert ended.returncode == 3, ended.stderr
    assert f"4 results in 7 shards in {tmp_path / 'out'}; {len(BAD)} lines without one: see" in ended.stdout
    assert "the first of them: line 5: no JSON: " in ended.stderr
    found = errors(tmp_path / "out")
    assert [number for number, _, _ in found] == list(range(5, 5 + len(BAD)))
    for (line, reason), (_, custom_id, error) in zip(BAD, found, strict=True):
        assert reason in error
        expected = line.get("custom_id") if isinstance(line, dict) else None
        assert custom_id == (expected if isinstance(expected, str) else None)
    answers = lmpool.batch.open(tmp_path / "out")
    assert [answer["line"] for answer in answers] == [1, 2, 3, len(listed)]
    # Run the same command again: it computes nothing, and has the same exit code and counts.
    before = content(tmp_path / "out")
    ended = await asyncio.to_thread(
        run_lmpool, *arguments(pool, source, tmp_path / "out", "--what", "topk:2", "--shard-lines", 5, "--json")
    )
    assert (ended.returncode, ended.stdout) == (3, f'{{"texts": 4, "errors": {len(BAD)}, "shards": 7, "resumed": 7}}\n')
    assert content(tmp_path / "out") == before


async def test_bad_rows_of_a_parquet_file_are_listed(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    table = pa.table({"custom_id": ["a", "b", "a", None, "e"], "ids": [[1], [V], [2], None, [None]]})
    pq.write_table(table, tmp_path / "in.parquet")
    async with pool.producer() as producer:
        await run(producer, tmp_path / "in.parquet", tmp_path / "out", "topk:2")
        assert [(number, custom_id) for number, custom_id, _ in errors(tmp_path / "out")] == [
            (2, "b"), (3, "a"), (4, None), (5, "e")
        ]  # fmt: skip
        (tmp_path / "no.parquet").write_bytes(b"not Parquet")
        with pytest.raises(BatchError, match=r"no\.parquet cannot be read as Parquet"):
            await run(producer, tmp_path / "no.parquet", tmp_path / "other", "topk:2")


async def test_a_text_shorter_than_start_is_listed(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", [[1, 2], [1, 2, 3]])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "topk:2", start=2)
    assert errors(tmp_path / "out") == [(1, "text-0", "start 2 is beyond the text, which has 2 tokens")]


def test_a_line_that_is_too_long_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 40)
    monkeypatch.setattr(lines_module, "_READ_BYTES", 16)
    source = Source(
        write_lines(tmp_path / "in.jsonl", ['{"ids": [1]}', '{"ids": [%s1]}' % ("1," * 100), '{"ids": [2]}' + " " * 28])
    )
    index = source.index(1)
    read = [line for chunk in source.read(index, 1, range(3)) for line in chunk.lines]
    assert [isinstance(line, Line) and line.fields.ids for line in read] == [[1], False, False]
    assert isinstance(read[1], Failed)
    assert "the line has more than" in read[1].error
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"ids": [1]}')  # With a byte order mark, no final newline.
    source = Source(tmp_path / "in.jsonl")
    (chunk,) = source.read(source.index(10), 10, [0])
    assert [isinstance(line, Line) and line.fields.ids for line in chunk.lines] == [[1]]


def write_numbered(path: Path, texts: list[list[int]]) -> Path:
    """Write an input in the format of its suffix, a text on each line; an existing file is overwritten in place."""
    if path.suffix == ".jsonl":
        return write_texts(path, texts)
    with path.open("wb") as file:
        pq.write_table(pa.table({"ids": texts}), file, compression="none", row_group_size=100, use_dictionary=False)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def two_inputs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """Write an input of many blocks; return its path, its texts, and other texts whose input has the same size."""
    monkeypatch.setattr(lines_module, "_READ_BYTES", 4096)
    first, second = ([[kind, *divmod(line, 10)] * 20 for line in range(100, 1000)] for kind in (1, 2))
    return write_numbered(tmp_path / f"in.{request.param}", first), first, second


def open_input(path: Path) -> Source:
    """Open the input at a path."""
    return ParquetSource(path) if path.suffix == ".parquet" else Source(path)


@pytest.mark.parametrize("change", ["same size", "cut", "longer"])
def test_no_line_is_read_after_the_input_changed(
    two_inputs: tuple[Path, list[list[int]], list[list[int]]], change: str
) -> None:
    path, first, second = two_inputs
    source = open_input(path)
    index = source.index(len(first))
    chunks = source.read(index, len(first), [0])
    read = list(next(chunks).lines)
    write_numbered(path, {"same size": second, "cut": second[:300], "longer": [*second, *second]}[change])

    def read_on() -> None:
        for chunk in chunks:
            assert not chunk.is_last, "a shard with lines of two files would be put into place"
            read.extend(chunk.lines)

    with pytest.raises(BatchError, match=f"{path.name} changed while it was read"):
        read_on()
    assert [isinstance(line, Line) and line.fields.ids for line in read] == first[: len(read)]


def test_long_lines_are_read_a_few_at_a_time(
    two_inputs: tuple[Path, list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, texts, _ = two_inputs
    of_line, most = (8 * 60, 8 * 600) if path.suffix == ".parquet" else (120, 1200)
    monkeypatch.setattr(lines_module, "MAX_CHUNK_BYTES", most)
    source = open_input(path)
    read = list(source.read(source.index(len(texts)), len(texts), [0]))
    assert [isinstance(line, Line) and line.fields.ids for chunk in read for line in chunk.lines] == texts
    assert max(len(chunk.lines) for chunk in read) <= most // of_line
    assert [chunk.is_last for chunk in read].count(True) == 1
    assert read[-1].is_last


def test_columns_that_are_not_read_do_not_make_batches_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts = tmp_path / "in.parquet", [[line, 1] for line in range(64)]
    pq.write_table(pa.table({"ids": texts, "image": [os.urandom(1 << 16) for _ in texts]}), path)
    sizes, iter_batches = list[int](), pq.ParquetFile.iter_batches

    def record(file: Any, *, batch_size: int, **options: Any) -> Any:
        sizes.append(batch_size)
        return iter_batches(file, batch_size=batch_size, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record)
    monkeypatch.setattr(lines_module, "MAX_CHUNK_BYTES", 1 << 16)
    source = open_input(path)
    read = [line for chunk in source.read(source.index(64), 64, [0]) for line in chunk.lines]
    assert [isinstance(line, Line) and line.fields.ids for line in read] == texts
    assert min(sizes) >= len(texts)


def test_duplicates_are_all_lines_but_the_first_with_an_id() -> None:
    generator = np.random.default_rng(0)
    drawn = [None if value == 0 else str(value) for value in generator.integers(0, 300, 2000)]
    ids, seen, wanted = CustomIds(), set[str](), []
    for line, custom_id in enumerate(drawn, 1):
        ids.add(line, custom_id)
        if custom_id in seen:
            wanted.append(line)
        elif custom_id is not None:
            seen.add(custom_id)
    assert ids.duplicates().tolist() == wanted
    assert CustomIds().duplicates().tolist() == []


@pytest.mark.parametrize("text", ["", "\n", " \n\n  \n"])
def test_an_empty_input_is_an_error(pool: Pool, tmp_path: Path, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    ended = run_lmpool(*arguments(pool, tmp_path / "in.jsonl", tmp_path / "new/out", "--what", "topk:2"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "is empty" in ended.stderr
    assert not (tmp_path / "new").exists(), "a run that is refused leaves no folder"


async def test_requests_that_do_not_fit_the_model_fail_at_once(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", [[1]])
    async with pool.producer() as producer:
        for what, reason in (
            (f"topk:{V + 1}", f"what: topk: {V + 1} must be"),
            (f"targets:1,{V}", f"token id {V} is out of range"),
        ):
            with pytest.raises((SettingsError, TokenOutOfRange), match=reason):
                await run(producer, source, tmp_path / "out", what)
        with pytest.raises(UnknownAdapter, match="has no adapter 'poet'; it has: none"):
            await run(producer, source, tmp_path / "out", "topk:2", adapter="poet")
        with pytest.raises(SettingsError, match="input: .*nothing.jsonl' does not exist"):
            await run(producer, tmp_path / "nothing.jsonl", tmp_path / "out", "topk:2")
        with pytest.raises(SettingsError, match=f"input: '{tmp_path}' is a folder: give one file in it"):
            await run(producer, tmp_path, tmp_path / "out", "topk:2")
        for data in (b"PK\x03\x04 zip", '{"ids": [1]}'.encode("utf-16")):
            (tmp_path / "foreign").write_bytes(data)
            with pytest.raises(SettingsError, match="input: .*foreign' is zip, 7z, lz4 or UTF-16. Give UTF-8"):
                await run(producer, tmp_path / "foreign", tmp_path / "out", "topk:2")
        with pytest.raises(SettingsError, match="input: '/dev/null' is a pipe or a device.*save its data to a file"):
            await run(producer, "/dev/null", tmp_path / "out", "topk:2")
        assert not (tmp_path / "out").exists(), "a run that is refused leaves no folder"
        write_lines(source, [{"text": "Hello"}])
        with pytest.raises(SettingsError, match="the model 'syn' has no tokenizer; give token ids"):
            await run(producer, source, tmp_path / "out", "topk:2")


async def test_a_run_ends_with_the_number_of_a_line_that_timed_out(pool: Pool, tmp_path: Path) -> None:
    pool.start(command=Gate(tmp_path / "gate").command)
    source = write_texts(tmp_path / "in.jsonl", [[1]])
    # The same timeout limits the connecting, so it is long enough for a busy machine.
    async with pool.producer(timeout=5) as producer:
        with pytest.raises(DeadlineExceeded, match=r"^line 1: no row within 5 s"):
            await run(producer, source, tmp_path / "out", "topk:2")


@pytest.mark.parametrize("what", ["topk:64", "rows"])
def test_a_full_disk_is_an_error_and_leaves_no_partial_shard(pool: Pool, tmp_path: Path, what: str) -> None:
    pool.start()
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(60, longest=4)), tmp_path / "out"
    # Add a text whose shard exceeds the maximum file size, which `ulimit -f` sets below.
    with source.open("a") as file:
        file.write(json.dumps({"ids": [1] * 1000}) + "\n")
    command = [*lmpool_command(), *arguments(pool, source, output, "--what", what, "--shard-lines", 60)]
    limited = ["bash", "-c", 'ulimit -f 800; exec "$@"', "limited", *command]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert f"{output}: File too large. Free some space. Finished shards are kept." in ended.stderr
    assert sorted(path.name for path in output.iterdir() if path.name.startswith("shard")) == [
        "shard-00000." + ("safetensors" if what == "rows" else "jsonl")
    ]
    assert not list(output.rglob("*.tmp"))
    ended = run_lmpool(*arguments(pool, source, output, "--what", what, "--shard-lines", 60, "--json"))
    assert ended.stdout == '{"texts": 61, "errors": 0, "shards": 2, "resumed": 1}\n'


@pytest.mark.parametrize(("ending", "packed"), list(PACKED.items()))
async def test_a_compressed_input_gives_the_output_of_the_plain_input(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, packed: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "cache"))
    pool.start()
    plain = write_texts(tmp_path / "in.jsonl", draw_texts(30))
    source = tmp_path / f"in.jsonl{ending}"
    source.write_bytes(packed(plain.read_bytes()))
    async with pool.producer() as producer:
        await run(producer, plain, tmp_path / "plain", "topk:2", shard_lines=10)
        await run(producer, source, tmp_path / "packed", "topk:2", shard_lines=10)
        assert {name: data for name, data in content(tmp_path / "packed").items() if name != "manifest.json"} == {
            name: data for name, data in content(tmp_path / "plain").items() if name != "manifest.json"
        }
        source.write_bytes(source.read_bytes()[:-20])
        with pytest.raises(BatchError, match=rf"{source.name} cannot be unpacked"):
            await run(producer, source, tmp_path / "half", "topk:2")
    assert not (tmp_path / "half").exists()


async def test_the_first_bytes_of_an_input_decide_its_format(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    table = pa.table({"ids": [[1], [2, 3]]})
    pq.write_table(table, tmp_path / "table.jsonl")  # A Parquet file with the suffix of JSON Lines.
    async with pool.producer() as producer:
        assert (await run(producer, tmp_path / "table.jsonl", tmp_path / "out", "topk:2")).texts == 2


def test_a_missing_model_is_an_error_at_once_if_others_are_served(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", [[1, 2]])
    wrong = arguments(pool, source, tmp_path / "out", "--what", "topk:2", "--model", "sny")
    ended = run_lmpool(*wrong)
    assert ended.returncode == 2
    assert "the model 'sny' is not served; did you mean 'syn'? served are: syn;" in ended.stderr
    assert "or pass --wait to wait for it" in ended.stderr
    assert "waiting for" not in ended.stderr
    ended = run_lmpool(*wrong, "--wait", "--timeout", "5")
    assert "waiting for a worker to serve 'sny'" in ended.stderr
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("text", "reason", "code"),
    [
        ("import json\n\nprint(1)\n", "no JSON: ", 2),
        ('{"txt": "Hello"}\n', "a line needs one of text, ids, ", 2),
        ('[\n{"ids": [1]}\n]\n', "unusable: Expected `object`, got `array`", 3),
    ],
    ids=["program", "misspelt", "array"],
)
def test_another_run_can_use_the_folder_of_a_run_over_a_wrong_file(
    pool: Pool, tmp_path: Path, text: str, reason: str, code: int
) -> None:
    pool.start()
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(text)
    ended = run_lmpool(*arguments(pool, source, out, "--what", "topk:2", "--shard-lines", 1))
    assert ended.returncode == code, ended.stderr
    assert f"line 1: {reason}" in ended.stderr
    good = write_lines(tmp_path / "good.jsonl", [{"ids": [1]}, {"ids": [2]}])
    again = run_lmpool(*arguments(pool, good, out, "--what", "topk:3"))
    if code == 3:  # The output has a result of one line, so it stays.
        assert (again.returncode, "another run: input.digest" in again.stderr) == (4, True)
        return
    assert f"no line of {source} has a result; line 1: " in ended.stderr
    assert again.returncode == 0, again.stderr
    assert len(lmpool.batch.open(out)) == 2
    assert sorted(content(out)) == ["manifest.json", "shard-00000.jsonl"]


def test_a_run_waits_for_the_first_model(pool: Pool, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", [[1, 2]])
    client = begin(pool, source, tmp_path / "out", "--what", "topk:2", "--model", "syn")
    client.until_says("waiting for a worker to serve 'syn'")
    pool.start()
    assert client.wait() == 0, client.text
    assert "1 result in 1 shard in" in client.text


def test_the_status_of_a_run_needs_no_arq(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(30)), tmp_path / "out"
    assert run_lmpool(*arguments(pool, source, output, "--what", "topk:2", "--shard-lines", 10)).returncode == 0
    ended = run_lmpool("batch", "status", str(output))
    assert (ended.returncode, ended.stdout) == (0, "3 of 3 shards done\n")
    (output / "shard-00001.jsonl").unlink()
    ended = run_lmpool("batch", "status", str(output))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2 of 3 shards done\n", "")
    printed = json.loads(run_lmpool("batch", "status", str(output), "--json").stdout)
    assert printed == {"shards": 3, "done": 2, "queued": 0, "under_way": 0, "failed": {}}
    # Make the run look submitted: `status` cannot read its jobs, because arq is not installed.
    (output / SUBMISSION).write_text("{}")
    ended = run_lmpool("batch", "status", str(output))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("2 of 3 shards done (jobs are not shown: batch: its queue needs arq: pip install")
    printed = json.loads(run_lmpool("batch", "status", str(output), "--json").stdout)
    assert printed == {"shards": 3, "done": 2, "queued": None, "under_way": None, "failed": None}
    ended = run_lmpool("batch", "status", str(tmp_path))
    assert (ended.returncode, "is not an output folder of `lmpool batch`" in ended.stderr) == (2, True)


def test_a_folder_that_cannot_be_made_is_an_error(pool: Pool, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", [[1]])
    ended = run_lmpool(*arguments(pool, source, source / "out", "--what", "topk:2"))
    assert ended.returncode == 2
    assert "Not a directory" in ended.stderr


def test_without_pyarrow_the_error_names_the_extra_and_jsonl_works(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", [[1, 2]])
    program = "import sys; sys.modules['pyarrow'] = None; sys.argv[0] = 'lmpool'; from lmpool.cli import main; main()"
    for options, code in ((["--format", "parquet"], 2), ([], 0)):
        given = arguments(pool, source, tmp_path / "out", "--what", "topk:2", *options)
        command = [sys.executable, "-c", program, *given]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ended.returncode == code, ended.stderr
        assert ("pip install 'lmpool[parquet]'" in ended.stderr) == bool(code)


def test_a_terminal_shows_a_bar_with_rate_and_time(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", draw_texts(30))
    controlling, terminal = pty.openpty()
    command = [*lmpool_command(), *arguments(pool, source, tmp_path / "out", "--what", "topk:2")]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=environment)
    process.communicate(timeout=DEADLINE_S)
    shown = os.read(controlling, 1 << 20).decode()
    os.close(controlling)
    os.close(terminal)
    assert process.returncode == 0
    assert "30/30" in shown
    assert "lines/s" in shown


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": [1, 2], "continuation": []}, "the continuation is empty"),
        ({"prompt": [], "continuation": [3, 4]}, "the prompt is empty"),
    ],
)
async def test_an_empty_prompt_or_continuation_is_listed(
    pool: Pool, tmp_path: Path, line: dict[str, Any], reason: str
) -> None:
    pool.start()
    source = write_lines(tmp_path / "in.jsonl", [line, {"prompt": [1], "continuation": [2]}])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "scores")
    ((number, _, error),) = errors(tmp_path / "out")
    assert number == 1
    assert reason in error


async def test_temporary_files_of_other_programs_are_kept(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source, out = write_texts(tmp_path / "in.jsonl", [[1], [2]]), tmp_path / "out"
    out.mkdir()
    (out / "mywork.tmp").write_text("mine")
    async with pool.producer() as producer:
        with pytest.raises(BatchRefused, match="holds mywork.tmp and no manifest.json"):
            await run(producer, source, out, "topk:2")
        (out / "mywork.tmp").unlink()
        await run(producer, source, out, "topk:2")
        (out / "mywork.tmp").write_text("mine")
        (out / "shard-00000.jsonl.123-abc-0.tmp").write_text("half")
        await run(producer, source, out, "topk:2")
    assert (out / "mywork.tmp").read_text() == "mine"
    assert not (out / "shard-00000.jsonl.123-abc-0.tmp").exists()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("generate:4,temperature=-1", "what: generate: temperature: -1"),
        ("positions:top=0", "what: positions: top: 0 must be"),
        ("positions:top=2,most", "what: 'most' is none of top=32, targets=260 504, next_token"),
        ("positions:tail", "positions: give at least one of top=k, targets=ids, next_token, logz and full=True"),
        ("generate:4,top_p=3", "what: generate: top_p: 3"),
        ("generate:4,seed=-3", "what: generate: seed: -3"),
        (f"generate:4,stop={V}", f"stop: token id {V} is out of range"),
        (
            "generate:99",
            "what: generate: 99 must be a whole number from 1 to 20, the tokens of the model's longest prompt",
        ),
    ],
)
async def test_malformed_requests_are_refused_before_a_folder_is_written(
    pool: Pool, tmp_path: Path, what: str, message: str
) -> None:
    pool.start("--max-prompt-tokens", 20)
    source = write_texts(tmp_path / "in.jsonl", [[1]])
    async with pool.producer() as producer:
        with pytest.raises(LMPoolError, match=message):
            await run(producer, source, tmp_path / "out", what)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_file_in_place_of_an_output_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BatchError, match="file is not an output folder: Not a directory"):
        lmpool.batch.open(tmp_path / "file")
