"""A stopped batch run continues with the same command, and writes the same bytes; other runs are refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool.batch
from lmpool.batch import run as run_module
from lmpool.batch.folder import Folder, digest_of_file, sync
from lmpool.batch.lines import open_source
from lmpool.batch.shards import READERS, Failed, Text, open_writer
from lmpool.errors import BatchError, BatchRefused, ModelMismatch, SettingsError
from lmpool.workers.execution.contract import BackendJob
from tests.producer.batch.runs import arguments, begin, begun_folder, content, draw_texts, run, write_texts
from tests.producer.batch.strikes import VICTIMS, strike
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import Pool, is_held, run_lmpool, until, until_async

TEXTS = draw_texts(120)
SHARD_LINES = 20


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_processes_do_not_change_the_output(short_dir: Path, victim: str) -> None:
    strike(short_dir, [victim], rounds=2, seed=VICTIMS.index(victim))


class Counting(GatedBackend):
    """A backend that counts the texts that it computed."""

    texts = 0

    def _vectors(self, jobs: list[BackendJob], failures: dict[bytes, str]) -> Any:
        self.texts += sum(job.positions is not None for job in jobs)
        return super()._vectors(jobs, failures)


async def test_a_killed_client_costs_at_most_one_shard(pool: Pool, tmp_path: Path) -> None:
    """A run computes again the unfinished shard of the killed client, and its requests in flight."""
    concurrency = 8
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    options = ("--what", "topk:2", "--shard-lines", SHARD_LINES, "--concurrency", concurrency)
    backend = Counting(Gate(tmp_path / "gate"), batch=4, step_ms=5)
    backend.gate.open()
    async with gated_worker(pool, backend):
        kills = 3
        for after in range(1, kills + 1):
            client = begin(pool, source, tmp_path / "out", *options)
            await asyncio.to_thread(until, partial(is_in_place, tmp_path / "out", after), f"{after} shards are done")
            client.end()
        ended = await asyncio.to_thread(run_lmpool, *arguments(pool, source, tmp_path / "out", *options, "--json"))
        printed = json.loads(ended.stdout)
    assert printed["resumed"] >= kills
    assert printed["texts"] == len(TEXTS)
    # Besides a shard, each kill costs up to two requested texts for each concurrent request.
    assert len(TEXTS) <= backend.texts <= len(TEXTS) + kills * (SHARD_LINES + 2 * concurrency)


def is_in_place(folder: Path, number: int) -> bool:
    return len(list(folder.glob("shard-*[0-9].jsonl"))) >= number


@pytest.fixture
async def begun(pool: Pool, tmp_path: Path) -> tuple[Path, Path]:
    """Serve a model, and finish a run; return the run's input and output folder."""
    pool.start("--seed", 1)
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    async with pool.producer() as producer:
        await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
    return source, output


async def test_missing_and_damaged_shards_are_computed_again(
    pool: Pool, begun: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    source, output = begun
    whole, shards = content(output), len(TEXTS) // SHARD_LINES
    (output / "shard-00002.jsonl").unlink()
    (output / "shard-00004.jsonl").write_bytes(b"{}\n")  # Change the shard's size.
    with (output / "shard-00005.jsonl").open("r+b") as damaged:  # Keep the shard's size.
        damaged.write(bytes(100))
    (output / "shard-00003.jsonl.tmp").write_bytes(b"of a run that was killed")
    async with pool.producer() as producer:
        for missing in (3, 0):
            outcome = await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
            assert outcome == (len(TEXTS), 0, shards, shards - missing)
            assert content(output) == whole
            changed = [f"{output}/shard-0000{at}.jsonl changed since it was written" for at in (4, 5) if missing]
            assert [message.partition(":")[0] for message in caplog.messages] == changed
            caplog.clear()


async def test_a_shard_that_is_placed_while_shards_are_compared_stays(
    pool: Pool, begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = begun
    made = output / "shard-00005.jsonl"
    data = made.read_bytes()
    made.unlink()

    settings = run_module.BatchSettings("topk:2", shard_lines=SHARD_LINES)
    monkeypatch.setattr(
        "lmpool.batch.folder.digest_of_file", lambda path: (made.write_bytes(data), digest_of_file(path))[1]
    )
    async with pool.producer() as producer:
        opened = open_source(str(source))
        _, manifest = await run_module.begin(producer, Folder(output), opened, settings)
    assert [shard.number for shard in manifest.done] == list(range(6))
    assert made.read_bytes() == data


async def test_shards_with_a_note_are_not_computed_again(pool: Pool, begun: tuple[Path, Path]) -> None:
    """The notes of shards count, because the manifest lists all shards only when the run is finished."""
    source, output = begun
    whole = content(output)
    manifest = json.loads(whole["manifest.json"])
    (output / "manifest.json").write_text(json.dumps({**manifest, "finished": False, "done": manifest["done"][:1]}))
    (output / "shard-00005.jsonl").unlink()
    async with pool.producer() as producer:
        outcome = await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
    assert outcome.resumed == 5
    assert content(output) == whole


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"what": "topk:3"}, "options.what 'topk:2', now 'topk:3'"),
        ({"what": "rows"}, "options.what 'topk:2', now 'rows'"),
        ({"start": 1}, "options.start 0, now 1"),
        ({"shard_lines": 21}, "options.shard_lines 20, now 21"),
        ({"format": "parquet"}, "options.format 'jsonl', now 'parquet'"),
    ],
)
async def test_other_options_are_refused(
    pool: Pool, begun: tuple[Path, Path], change: dict[str, Any], reason: str
) -> None:
    source, output = begun
    before = content(output)
    settings = {"what": "topk:2", "shard_lines": SHARD_LINES, **change}
    async with pool.producer() as producer:
        with pytest.raises(BatchRefused, match=reason):
            await run(producer, source, output, **settings)
    assert content(output) == before


async def test_another_input_is_refused(pool: Pool, begun: tuple[Path, Path]) -> None:
    source, output = begun
    before = content(output)
    write_texts(source, [*TEXTS[:-1], [1]])
    async with pool.producer() as producer:
        with pytest.raises(BatchRefused, match="input.digest"):
            await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
    assert content(output) == before


async def test_another_model_is_refused_with_exit_code_4(pool: Pool, begun: tuple[Path, Path]) -> None:
    source, output = begun
    before = content(output)
    pool.start("--seed", 2, model="other")
    options = ("--what", "topk:2", "--shard-lines", SHARD_LINES, "--model", "other")
    ended = await asyncio.to_thread(run_lmpool, *arguments(pool, source, output, *options))
    assert (ended.returncode, ended.stdout) == (4, "")
    assert "holds the results of another run: model.fingerprint" in ended.stderr
    assert content(output) == before


def test_a_folder_with_other_files_is_refused(pool: Pool, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    for path, reason in (
        (tmp_path / "out/photo.jpg", "holds photo.jpg and no manifest.json"),
        (None, "is not a folder"),
    ):
        if path is not None:
            path.touch()
        ended = run_lmpool(*arguments(pool, source, path.parent if path else source, "--what", "topk:2"))
        assert (ended.returncode, ended.stdout) == (4, "")
        assert reason in ended.stderr
    (tmp_path / "out/manifest.json").write_text('{"version": "what"}')
    ended = run_lmpool(*arguments(pool, source, tmp_path / "out", "--what", "topk:2", "--no-wait"))
    assert ended.returncode == 2  # The error that no model is served comes first.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["lock", "manifest.json", "photo.jpg"]


def test_two_runs_cannot_write_to_one_folder(pool: Pool, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    first = begin(pool, source, tmp_path / "out", "--what", "topk:2")  # This run waits for a worker.
    until(lambda: (tmp_path / "out/lock").is_file() and (tmp_path / "out/lock").read_text(), "the folder is locked")
    second = run_lmpool(*arguments(pool, source, tmp_path / "out", "--what", "topk:2"))
    assert second.returncode == 4
    assert f"another run (process {first.process.pid}) writes to {tmp_path / 'out'}" in second.stderr
    pool.start()
    assert first.wait() == 0
    assert len(lmpool.batch.open(tmp_path / "out")) == len(TEXTS)


ENDED_BY = (
    ([signal.SIGTERM], 143),
    ([signal.SIGHUP, signal.SIGHUP], 129),
    ([signal.SIGINT, signal.SIGINT], 130),
)


@pytest.mark.parametrize(("signals", "code"), ENDED_BY, ids=["term", "hup", "int"])
def test_a_signal_leaves_no_partial_files_and_no_queued_prompts(
    pool: Pool, tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start("--max-batch", 1, command=gate.command)
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    options = ("--what", "topk:2", "--shard-lines", SHARD_LINES, "--concurrency", 8)
    client = begin(pool, source, output, *options)
    gate.let(70)  # Compute two shards, and more than two texts for each concurrent request.
    until(lambda: is_in_place(output, 2), "two shards are in place")
    for number in signals:
        client.signal(number)
    assert client.wait() == code
    assert "Traceback" not in client.text
    if "lmpool: stopped" in client.text:
        assert not list(output.rglob("*.tmp"))
        done, shards = len(lmpool.batch.open(output)) // SHARD_LINES, len(TEXTS) // SHARD_LINES
        cancelled = "its queued prompts are cancelled"
        assert f"stopped after {done} of {shards} shards; {cancelled}; run the same command to continue" in client.text
        until(lambda: not pool.jobs(), "no prompt is queued or held, although the step has not ended")
    else:
        assert len(signals) == 2
        assert signals[0] != signal.SIGHUP, "a terminal sends SIGHUP twice when it closes"
    assert not lmpool.batch.open(output).is_finished
    gate.open()
    ended = run_lmpool(*arguments(pool, source, output, *options))
    assert ended.returncode == 0, ended.stderr
    assert [answer["line"] for answer in lmpool.batch.open(output)] == list(range(1, len(TEXTS) + 1))


async def test_a_stopped_run_prints_how_many_lines_will_be_computed_again(pool: Pool, tmp_path: Path) -> None:
    concurrency = 2
    source, backend = write_texts(tmp_path / "in.jsonl", draw_texts(4000)), Counting(Gate(tmp_path / "gate"), step_ms=5)
    options = ("--what", "topk:2", "--shard-lines", 4000, "--concurrency", concurrency)
    backend.gate.open()
    async with gated_worker(pool, backend):
        client = begin(pool, source, tmp_path / "out", *options)
        await asyncio.to_thread(until, lambda: backend.texts >= 10, "some texts are computed")
        backend.gate.shut()
        client.signal(signal.SIGINT)
        assert await asyncio.to_thread(client.wait) == 130
    printed = re.search(r"to continue; (\d+) computed lines of unfinished shards will be computed again", client.text)
    assert printed, client.text
    # The client requests a text only when the text `concurrency` lines before has a result.
    assert 10 - concurrency <= int(printed[1]) <= backend.texts


async def test_a_changed_model_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    first = pool.start("--lease-s", 1, "--max-batch", 1, command=gate.command)
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    gate.open()
    async with pool.producer(when_absent="wait", keep_answers=False) as producer:
        await run(producer, source, tmp_path / "whole", "topk:2", shard_lines=SHARD_LINES)
        settings = {"shard_lines": SHARD_LINES, "concurrency": 8}
        gate.shut()
        running = asyncio.create_task(run(producer, source, output, "topk:2", **settings))
        gate.let(40)
        await asyncio.to_thread(until, partial(is_in_place, output, 1), "a shard is in place")
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        first.end()
        await asyncio.to_thread(until, lambda: not pool.names("worker:*"), "the heartbeat expires")
        second = await asyncio.to_thread(pool.start, "--seed", 7, "--lease-s", 1)
        with pytest.raises(ModelMismatch, match="the model 'syn' has changed"):
            await running
    assert not lmpool.batch.open(output).is_finished
    assert not list(output.rglob("*.tmp"))
    async with pool.producer() as producer:
        with pytest.raises(BatchRefused, match="model"):
            await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
    second.signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.wait) == 0
    await asyncio.to_thread(pool.start)
    async with pool.producer() as producer:
        await run(producer, source, output, "topk:2", shard_lines=SHARD_LINES)
    assert content(output) == content(tmp_path / "whole")


async def test_published_weights_end_a_run_with_advice(pool: Pool, tmp_path: Path) -> None:
    pool.start("--max-batch", 1, "--step-ms", 20)
    # The whole run would take more than a minute: the version must be served before its end, also on a busy machine.
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(4000)), tmp_path / "out"
    async with pool.producer() as producer, pool.producer() as publisher:
        running = asyncio.create_task(run(producer, source, output, "topk:2", shard_lines=SHARD_LINES, concurrency=8))
        await asyncio.to_thread(until, partial(is_in_place, output, 1), "a shard is in place")
        await publisher.publish_weights({"seed": np.array(7)})
        with pytest.raises(ModelMismatch, match="Run the same command again with --model syn@0, while"):
            await running


async def test_a_folder_without_results_is_free_for_another_run(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    async with pool.producer() as producer:
        source.write_text('{"text": "There is no tokenizer."}\n')
        with pytest.raises(SettingsError, match="has no tokenizer"):
            await run(producer, source, output, "topk:2")
        await run(producer, write_texts(source, TEXTS), output, "topk:3", shard_lines=SHARD_LINES)
    assert len(lmpool.batch.open(output)) == len(TEXTS)


async def test_a_changed_adapter_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    gate = Gate(tmp_path / "gate")
    gate.open()
    pool.start("--max-batch", 4, "--step-ms", 50, "--adapters", f"poet={tmp_path / 'first'}", command=gate.command)
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(4000)), tmp_path / "out"
    async with pool.producer() as producer:
        running = asyncio.create_task(run(producer, source, output, "topk:2", shard_lines=40, adapter="poet"))
        await asyncio.to_thread(until, lambda: is_in_place(output, 1), "a shard is in place")
        await producer.add_adapter("poet", tmp_path / "second")
        with pytest.raises(ModelMismatch, match="the adapter 'poet' has changed"):
            await running
        answer, ids = lmpool.batch.open(output)[-1], lmpool.batch.open(output)[-1]["ids"].tolist()
        await producer.add_adapter("poet", tmp_path / "first")
        best = (await producer.positions(ids, top=2, adapter="poet")).top
    assert best is not None
    assert (answer["logprobs"] == best.values).all()


@pytest.mark.parametrize("shard_lines", [20, 2000], ids=["between shards", "within the last shard"])
async def test_a_changed_input_ends_the_run(pool: Pool, tmp_path: Path, shard_lines: int) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start("--max-batch", 4, command=gate.command)
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(2000)), tmp_path / "out"
    async with pool.producer() as producer:
        running = asyncio.create_task(run(producer, source, output, "topk:2", shard_lines=shard_lines, concurrency=4))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        write_texts(source, draw_texts(2000, seed=1))  # Overwrite the input in place, like `cp`.
        gate.open()
        with pytest.raises(BatchError, match="changed while it was read"):
            await running
    assert not lmpool.batch.open(output).is_finished


TEXT = Text(1, "a", [1, 2], range(2))
PART = {"logprobs": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "safetensors"])
def test_two_writers_of_one_shard_write_the_same_shard(tmp_path: Path, suffix: str) -> None:
    """Two jobs may write one shard: in one process, or in two containers with equal process ids."""
    folders = [begun_folder(tmp_path / name, suffix) for name in ("alone", "shared")]
    alone, first, second = (open_writer(*begun, 0) for begun in (folders[0], folders[1], folders[1]))
    for writer in (alone, first, second):
        writer.add(TEXT, PART, is_last=True)
        writer.fail(Failed(2, None, "it is bad"))
    wanted = alone.place()
    for writer in (first, second):
        assert writer.place() == wanted
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    shard = tmp_path / "shared" / f"shard-00000.{suffix}"
    assert (wanted.digest, wanted.bytes) == (digest_of_file(shard), shard.stat().st_size)
    assert (wanted.texts, wanted.errors) == (1, 1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "safetensors"])
@pytest.mark.parametrize("at", [0, -20])
def test_a_damaged_shard_is_not_put_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, at: int
) -> None:
    writer = open_writer(*begun_folder(tmp_path, suffix), 0)
    for number in range(1, 4):
        writer.add(Text(number, "a", [1, 2], range(2)), PART, is_last=True)
    (temporary,) = tmp_path.glob("*.tmp")

    def sync_and_damage(file: Any) -> None:
        sync(file)
        with temporary.open("r+b") as other:
            other.seek(at, os.SEEK_SET if at == 0 else os.SEEK_END)
            other.write(bytes(8))

    monkeypatch.setattr("lmpool.batch.shards.sync", sync_and_damage)
    with pytest.raises(BatchError, match=f"{temporary.name} was damaged: its digest is not the digest of") as raised:
        writer.place()
    assert raised.value.may_pass
    writer.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json"]


async def test_a_run_computes_a_damaged_shard_again(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"

    def sync_and_damage(file: Any) -> None:
        sync(file)
        if "shard-00002" in file.name:
            with Path(file.name).open("r+b") as other:
                other.write(bytes(100))

    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "wanted", "topk:3", shard_lines=SHARD_LINES)
        with monkeypatch.context() as patched:
            patched.setattr("lmpool.batch.shards.sync", sync_and_damage)
            with pytest.raises(BatchError, match=r"shard-00002\.jsonl\.\w+\.tmp was damaged"):
                await run(producer, source, output, "topk:3", shard_lines=SHARD_LINES)
        assert not list(output.glob("shard-00002*"))
        await run(producer, source, output, "topk:3", shard_lines=SHARD_LINES)
    assert content(output) == content(tmp_path / "wanted")


def test_a_jsonl_shard_with_a_wrong_number_of_lines_is_not_put_into_place(tmp_path: Path) -> None:
    writer = open_writer(*begun_folder(tmp_path), 0)
    writer.add(TEXT, PART, is_last=True)
    writer._file.write(b"\n")
    with pytest.raises(BatchError, match="was damaged: it has 2 lines, and 1 texts have a result"):
        writer.place()
    writer.discard()


def test_no_digest_contains_a_dropped_text(tmp_path: Path) -> None:
    """When a later part of a text fails, the file of a safetensors shard already contains its first part."""
    writer = open_writer(*begun_folder(tmp_path, "safetensors"), 0)
    writer.add(TEXT, PART, is_last=True)
    writer.add(Text(2, None, [1, 2, 3, 4], range(4)), PART, is_last=False)
    writer.fail(Failed(2, None, "its second part failed"))
    shard = writer.place()
    assert list(READERS["safetensors"](tmp_path / "shard-00000.safetensors").custom_ids()) == ["a"]
    assert shard.texts == 1


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    folder, manifest = begun_folder(tmp_path)
    writer = open_writer(folder, manifest, 0)
    (written,) = tmp_path.glob("*.tmp")
    (tmp_path / "errors").mkdir()
    left = [tmp_path / "shard-00001.jsonl.0123456789abcdef.tmp", tmp_path / "errors" / "00001.jsonl.0123.tmp"]
    old = tmp_path / "shard-00002.jsonl.0123456789abcdef.tmp"
    for path in (*left, mine := tmp_path / "mine.tmp"):
        path.touch()
    (link := tmp_path / "manifest.json.0123.tmp").symlink_to(mine)
    old.touch()
    os.utime(old, (0, 0))
    with folder.shared(), folder.shared():
        assert all(path.exists() for path in (*left, link, written)), "another worker may write these"
        assert not old.exists()
    writer.place()
    with folder.locked():
        assert [path.exists() for path in (*left, link)] == [False] * 3
    assert mine.exists()


@pytest.mark.parametrize("hold", [Folder.locked, Folder.shared])
def test_a_symbolic_link_in_place_of_the_lock_is_refused(
    tmp_path: Path, hold: Callable[[Folder], AbstractContextManager[None]]
) -> None:
    """If the run followed the link, a user who can write to the folder could make it overwrite any file."""
    important, output = tmp_path / "important", tmp_path / "out"
    important.write_text("mine")
    output.mkdir()
    (output / "lock").symlink_to(important)
    with pytest.raises(BatchRefused, match="lock is a symbolic link"), hold(Folder(output)):
        pass
    assert important.read_text() == "mine"


@pytest.mark.parametrize("hold", [Folder.locked, Folder.shared])
def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Folder], AbstractContextManager[None]]
) -> None:
    output, other = tmp_path / "out", 4321
    (output / "errors").mkdir(parents=True)
    status = os.stat_result([0o40755, 0, 0, 1, other, 0, 0, 0, 0, 0])
    for method, path in (("stat", output), ("lstat", output), ("lstat", output / "errors")):
        real = getattr(Path, method)
        with monkeypatch.context() as patched:
            patched.setattr(
                Path,
                method,
                lambda given, path=path, real=real, **options: status if given == path else real(given, **options),
            )
            refused = f"{path} belongs to user {other}, and this is user {os.geteuid()}"
            with pytest.raises(BatchRefused, match=refused), hold(Folder(output)):
                pass
    (output / "errors").rmdir()
    (output / "errors").symlink_to(tmp_path)
    with pytest.raises(BatchRefused, match="errors is a symbolic link"), hold(Folder(output)):
        pass
    (output / "errors").unlink()
    with hold(Folder(output)):
        pass
