"""Inputs and outputs with URLs: a run writes the same output to a bucket as to a folder, even if killed."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import pickle
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace

import lmpool.batch
from lmpool.batch import fetch
from lmpool.batch.folder import Bucket, Folder, Manifest, Shard, open_folder
from lmpool.batch.lines import Index, Source, open_source
from lmpool.batch.run import Run
from lmpool.batch.shards import ShardWriter, Text, open_writer
from lmpool.broker.bucket import file_system, named
from lmpool.errors import BatchError, BatchRefused, ModelMismatch, SettingsError
from tests.producer.batch.buckets import TestBucket
from tests.producer.batch.runs import begin, content, draw_texts, manifest_of, run, write_lines, write_texts
from tests.support.pool import Pool, run_lmpool, until

TEXTS = draw_texts(60)
OPTIONS = ("--shard-lines", 10, "--concurrency", 8)


def begun(pool: Pool, *locations: str, what: str = "topk:3") -> list[str]:
    """Return the command line of a batch run."""
    source, output = locations
    options = map(str, ("--what", what, *OPTIONS, "--json"))
    return ["batch", "run", source, output, "--redis", pool.url, "--prefix", pool.prefix, *options]


@pytest.mark.parametrize(("what", "suffix"), [("topk:3", "jsonl"), ("rows", "safetensors")])
async def test_a_run_writes_the_same_output_to_a_bucket_as_to_a_folder(
    pool: Pool, tmp_path: Path, bucket: TestBucket, what: str, suffix: str
) -> None:
    pool.start()
    lines = write_texts(tmp_path / "in.jsonl", TEXTS).read_text("utf-8").splitlines()
    lines[17] = "bad"
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(write_lines(tmp_path / "in.jsonl", lines).read_bytes()))
    async with pool.producer() as producer:
        await run(producer, packed, tmp_path / "out", what, shard_lines=10)
        source = bucket.put("inputs/in.jsonl.gz", packed.read_bytes())
        outcome = await run(producer, source, f"{bucket.url}/out/", what, shard_lines=10)
    assert outcome == (len(TEXTS) - 1, 1, 6, 0)
    assert bucket.content("out") == content(tmp_path / "out")
    here, there = lmpool.batch.open(tmp_path / "out"), lmpool.batch.open(f"{bucket.url}/out")
    assert there.is_finished
    for copy in (there, pickle.loads(pickle.dumps(there))):  # noqa: S301 A DataLoader pickles its data set.
        for mine, yours in zip(here, copy, strict=True):
            assert all(np.array_equal(yours[name], value) for name, value in mine.items())
    assert there.by_custom_id("text-25")["ids"].tolist() == TEXTS[25]
    printed = run_lmpool("batch", "status", f"{bucket.url}/out", "--json")
    assert json.loads(printed.stdout) == {"shards": 6, "done": 6, "queued": 0, "under_way": 0, "failed": {}}


def test_a_file_url_is_a_path(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    ended = run_lmpool(*begun(pool, f"file://{source}", f"file://{tmp_path / 'out'}"))
    assert ended.returncode == 0, ended.stderr
    again = run_lmpool(*begun(pool, str(source), str(tmp_path / "out")))
    assert json.loads(again.stdout)["resumed"] == 6
    assert len(lmpool.batch.open(f"file://{tmp_path / 'out'}")) == len(TEXTS)


async def test_a_killed_run_to_a_bucket_continues(pool: Pool, tmp_path: Path, bucket: TestBucket) -> None:
    # All shards take half a minute, so that the client cannot upload the last shard between two checks of the test.
    pool.start("--step-ms", 500, "--max-batch", 4)
    path = write_texts(tmp_path / "in.jsonl", draw_texts(200))
    url, output = bucket.put("in.jsonl", path.read_bytes()), f"{bucket.url}/out"
    for after in (1, 3):
        client = begin(pool, url, output, "--what", "topk:3", *OPTIONS)
        await asyncio.to_thread(until, partial(is_done, bucket, output, after), f"{after} shards are done")
        client.end()
    half = lmpool.batch.open(output)
    assert len(half) >= 30
    done = len(half) // 10  # Not the number of notes: the upload of a note may have been cut off.
    # Damage two shards: one has no note any more, and one has another size than its note says.
    bucket.remove("out/done/00000.json")
    bucket.put("out/shard-00001.jsonl", b"half\n")
    assert len(lmpool.batch.open(output)) == len(half) - 20
    pool.start()
    ended = await asyncio.to_thread(run_lmpool, *begun(pool, url, output))
    assert json.loads(ended.stdout)["resumed"] == done - 2, ended.stderr
    # Compute the expected output last: its cached rows would make the killed run too fast.
    async with pool.producer() as producer:
        await run(producer, path, tmp_path / "whole", "topk:3", shard_lines=10)
    assert bucket.content("out") == content(tmp_path / "whole")


def is_done(bucket: TestBucket, output: str, number: int) -> bool:
    """Whether at least `number` shards of ten lines are complete."""
    return bucket.shards("out") >= number and len(lmpool.batch.open(output)) >= 10 * number


async def test_a_bucket_is_refused_for_the_same_reasons_as_a_folder(
    pool: Pool, tmp_path: Path, bucket: TestBucket
) -> None:
    pool.start()
    data = write_texts(tmp_path / "in.jsonl", TEXTS).read_bytes()
    source, other = bucket.put("in.jsonl", data), bucket.put("other.jsonl", data[::-1])
    bucket.put("mine/thesis.txt", b"mine")
    output, nowhere = f"{bucket.url}/out", f"{bucket.url}-nowhere/out"
    async with pool.producer() as producer:
        await run(producer, source, output, "topk:3", shard_lines=10)
        before = bucket.content("out")
        for given, place, what, kind, reason in (
            (source, output, "topk:2", BatchRefused, "options.what 'topk:3', now 'topk:2'"),
            (other, output, "topk:3", BatchRefused, "input.digest"),
            (source, f"{bucket.url}/mine", "topk:3", BatchRefused, "holds thesis.txt and no manifest.json"),
            (f"{bucket.url}/nothing.jsonl", output, "topk:3", SettingsError, "nothing.jsonl' does not exist"),
            (f"{bucket.url}/mine", output, "topk:3", SettingsError, "mine' is a folder: give one file in it"),
            (source, nowhere, "topk:3", BatchError, f"{nowhere}: The specified bucket does not exist"),
            (
                source,
                "nonsense://me:secret@host/out",
                "topk:3",
                SettingsError,
                "nonsense://host/out: the scheme nonsense:// is not accepted",
            ),
        ):
            with pytest.raises(kind, match=reason) as raised:
                await run(producer, given, place, what, shard_lines=10)
            assert "secret" not in str(raised.value)
    assert bucket.content("out") == before


async def test_another_run_can_use_the_bucket_of_a_run_without_results(
    pool: Pool, tmp_path: Path, bucket: TestBucket
) -> None:
    pool.start()
    nothing = bucket.put("nothing.jsonl", b"no JSON\nat all\n")
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS[:3]), f"{bucket.url}/out"
    async with pool.producer() as producer:
        assert (await run(producer, nothing, output, "topk:3", shard_lines=1)).errors == 2
        assert (await run(producer, source, output, "topk:3")).texts == 3
    assert bucket.content("out").keys() == {"manifest.json", "shard-00000.jsonl"}


async def test_a_run_ends_when_another_run_begins_in_its_bucket(pool: Pool, tmp_path: Path, bucket: TestBucket) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "topk:3", shard_lines=10)
    manifest, made = unfinished(tmp_path / "out")
    first, second = Bucket(f"{bucket.url}/out"), Bucket(f"{bucket.url}/out")
    first.begin(manifest)
    place(first, manifest, tmp_path / "out", made[0])
    other = replace(manifest, options=replace(manifest.options, what="topk:2"))
    with pytest.raises(BatchRefused, match="another run: options.what 'topk:3', now 'topk:2'"):
        second.begin(other)
    # Simulate a race: both runs found no manifest, and the second run wrote its manifest last.
    bucket.put("out/manifest.json", other.encoded())
    assert second.done(other) == {}
    with pytest.raises(BatchRefused, match="another run has begun here"):
        place(first, manifest, tmp_path / "out", made[1])


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_job_of_the_first_run_does_not_replace_a_shard_of_the_second_run(
    tmp_path: Path, bucket: TestBucket, where: str, shards: int
) -> None:
    output = str(tmp_path / "out") if where == "folder" else f"{bucket.url}/out"
    first = manifest_of("safetensors", shards)
    second = replace(first, model=replace(first.model, adapter="poet@1"), done=[])
    with open_folder(output).locked():
        open_folder(output).begin(first)
    with open_folder(output).shared():  # A job of the first run computes its first shard.
        late = computed(output, first, 0, 1.0)
        with open_folder(output).shared():
            open_folder(output).begin(second)
            second.done += [computed(output, second, number, 2.0).place() for number in range(shards)]
            open_folder(output).sum_up(second)
        with pytest.raises(BatchRefused, match="another run has begun here"):
            late.place()
        late.discard()
    batch = lmpool.batch.open(output)
    assert (batch.is_finished, batch.manifest.model.adapter) == (True, "poet@1")
    assert [float(result["logprobs"].max()) for result in batch] == [2.0] * shards


def computed(output: str, manifest: Manifest, number: int, value: float) -> ShardWriter:
    """Return the writer of a shard with one text, whose rows all have one value, before the shard is placed."""
    writer = open_writer(open_folder(output), manifest, number)
    writer.add(Text(1 + 10 * number, None, [1, 2], range(2)), {"logprobs": np.full((2, 3), value, np.float32)}, True)
    return writer


def unfinished(folder: Path) -> tuple[Manifest, list[Shard]]:
    """Return the manifest of a finished run as it was when the run began, and the run's shards."""
    manifest = lmpool.batch.open(folder).manifest
    return replace(manifest, finished=False, done=[]), manifest.done


def place(bucket: Bucket, manifest: Manifest, folder: Path, shard: Shard) -> None:
    """Put a shard of a folder into a bucket."""
    name = manifest.shard_name(shard.number)
    errors = folder / "errors" / f"{shard.number:05}.jsonl"
    copy = bucket.path / name
    copy.write_bytes((folder / name).read_bytes())
    bucket.place_shard(manifest, shard, copy, [errors.read_bytes()] if errors.exists() else [])


async def test_the_first_shard_stays_if_the_same_command_runs_twice(
    pool: Pool, tmp_path: Path, bucket: TestBucket
) -> None:
    pool.start()
    lines = write_texts(tmp_path / "in.jsonl", TEXTS[:10]).read_text("utf-8").splitlines()
    source = write_lines(tmp_path / "in.jsonl", [*lines[:9], "bad"])
    async with pool.producer() as producer:
        await run(producer, source, tmp_path / "out", "topk:3")
    manifest, (shard,) = unfinished(tmp_path / "out")
    name = manifest.shard_name(0)
    first, second = Bucket(f"{bucket.url}/out"), Bucket(f"{bucket.url}/out")
    first.begin(manifest)
    place(first, manifest, tmp_path / "out", shard)
    there = second.begin(manifest)
    assert second.done(there) == {0: shard}, "the shard of the first run stays"
    # Let the second run compute another result, as if a worker had failed only during the first run.
    writer = open_writer(second, there, 0)
    writer.add(Text(1, "a", [1], range(1)), {"ids": np.zeros((1, 3), np.int64)}, is_last=True)
    assert writer.place() == shard
    second.sum_up(there, is_over=True)
    batch = lmpool.batch.open(f"{bucket.url}/out")
    assert (batch.is_finished, batch.manifest.done, len(batch)) == (True, [shard], 9)
    for path in (name, "errors.jsonl"):
        assert bucket.content("out")[path] == (tmp_path / "out" / path).read_bytes()
    # Change a shard that the manifest lists as done: the run must not count as finished.
    bucket.put(f"out/{name}", (tmp_path / "out" / name).read_bytes() + b"\n")
    first.sum_up(there, is_over=True)
    assert (there.finished, there.done) == (False, [])


async def test_a_run_fails_if_another_program_removes_its_shards(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    source, output = write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    real = Folder.sum_up

    def sum_up(folder: Folder, *given: Any, **options: Any) -> None:
        (output / "shard-00002.jsonl").unlink()
        real(folder, *given, **options)

    monkeypatch.setattr(Folder, "sum_up", sum_up)
    async with pool.producer() as producer:
        with pytest.raises(BatchError, match="another program removed or replaced 1 of 6 shards"):
            await run(producer, source, output, "topk:3", shard_lines=10)


async def test_a_failed_manifest_does_not_hide_the_error_that_ended_the_run(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def end(*_: Any) -> None:
        raise ModelMismatch("the model has other weights")

    pool.start()
    monkeypatch.setattr(Folder, "sum_up", fail)
    monkeypatch.setattr(Run, "run_shards", end)
    async with pool.producer() as producer:
        with pytest.raises(ModelMismatch):
            await run(producer, write_texts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out", "topk:3", shard_lines=10)


def test_jobs_are_tried_again_if_the_store_cannot_be_reached(
    bucket: TestBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        """An exception that the library of a store raises."""

    def refuse(url: str) -> Any:
        raise Broken("connection to s3://me:secret@host refused")

    folder = Bucket(f"{bucket.url}/out")
    monkeypatch.setattr("lmpool.batch.folder.file_system", refuse)
    with pytest.raises(
        BatchError, match="s3://host refused. Finished shards are kept. Run the same command again"
    ) as raised:
        folder.read_manifest()
    assert raised.value.may_pass


async def test_no_message_contains_the_signature_of_a_presigned_url(
    pool: Pool, tmp_path: Path, bucket: TestBucket
) -> None:
    pool.start()
    presigned = bucket.presigned("in.jsonl.gz", gzip.compress(write_texts(tmp_path / "in.jsonl", TEXTS).read_bytes()))
    assert "Signature=" in presigned
    async with pool.producer() as producer:
        await run(producer, presigned, tmp_path / "out", "topk:3", shard_lines=10)
        assert lmpool.batch.open(tmp_path / "out").manifest.input.name == "in.jsonl.gz"
        bucket.put("in.jsonl.gz", gzip.compress(b"x" * 100)[:-20])
        for gone in (False, True):
            if gone:
                bucket.remove("in.jsonl.gz")
            with pytest.raises((BatchError, SettingsError), match="in.jsonl.gz") as raised:
                await run(producer, presigned, tmp_path / "other", "topk:3")
            assert "Signature" not in str(raised.value)
    assert named(f"403, url='{presigned}#a' again") == f"403, url='{presigned.partition('?')[0]} again"
    assert named("/data/what?#1.jsonl") == "/data/what?#1.jsonl", "a path has no query"


def test_an_input_is_fetched_again_only_if_it_changed(bucket: TestBucket, tmp_path: Path) -> None:
    url = bucket.put("in.jsonl", b'{"ids": [1]}\n')
    first = fetch.plain_file(url).stat()
    again = fetch.plain_file(url).stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns), (
        "a run that reads the copy is not disturbed"
    )
    bucket.put("in.jsonl", b'{"ids": [2]}\n')  # The new input has the same size.
    assert fetch.plain_file(url).read_bytes() == b'{"ids": [2]}\n'
    # If the store returns no version of a file, only this process may use the file's copy.
    assert fetch.identity({"size": 3}) != fetch.identity({"size": 4})
    assert fetch._PROCESS in fetch.identity({"size": 3})
    assert fetch._PROCESS not in fetch.identity({"size": 3, "ETag": "a"})


class StatusHandler(BaseHTTPRequestHandler):
    """Replies with the status in the path; the path /reset closes the connection when the file is read."""

    def do_GET(self) -> None:
        if self.path == "/reset" and self.command == "GET":  # Without lingering, the client's system reports a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(200 if self.path == "/reset" else int(self.path[1:4]))
        self.send_header("Content-Length", "13")
        self.send_header("ETag", "one")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b'{"ids": [1]}\n')

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start an HTTP server; yield its address. The cache is a folder of the test."""
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), StatusHandler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_fetch_of_an_input_has_no_time_limit(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, aiohttp limits a whole request to five minutes."""
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=1e-9))
    assert fetch.plain_file(f"{site}/200").read_bytes() == b'{"ids": [1]}\n'
    assert file_system(f"{site}/200")[0].client_kwargs["timeout"].sock_read == 60


@pytest.mark.parametrize("path", ["503", "403?Signature=s", "reset", "refused"])
def test_an_input_that_cannot_be_fetched_now_is_fetched_in_a_later_try(site: str, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"{site}/{path}" if path != "refused" else f"http://127.0.0.1:{port}/in.jsonl"
    with pytest.raises(BatchError, match=rf"^{named(url)}: .*The file cannot be fetched$") as raised:
        fetch.plain_file(url)
    assert raised.value.may_pass
    assert "Signature" not in str(raised.value)


@pytest.mark.parametrize("status", [404, 410])
def test_a_missing_input_behind_a_url_is_an_error_at_once(site: str, status: int) -> None:
    with pytest.raises(SettingsError, match=f"{site}/{status}' does not exist"):
        fetch.plain_file(f"{site}/{status}")


def test_a_full_disk_of_the_cache_is_no_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def get_file(self, *_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path))
    advice = "No space left on device. Free some space. Choose another folder with LMPOOL_BATCH_CACHE"
    with pytest.raises(BatchError, match=advice) as raised:
        fetch.fetch(Store(), "in.jsonl", "s3://bucket/in.jsonl", {"size": 1})
    assert not raised.value.may_pass


def test_no_copy_is_kept_of_a_file_that_changes_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "cache"))
    source, other = packed(tmp_path / "in.jsonl.gz"), packed(tmp_path / "other.gz")

    def open_and_replace(path: Path) -> gzip.GzipFile:
        opened = gzip.GzipFile(path)
        other.replace(path)
        return opened

    monkeypatch.setitem(fetch._COMPRESSED, b"\x1f\x8b", open_and_replace)
    with pytest.raises(BatchError, match=f"{source} changed while it was unpacked. Run the command again"):
        fetch.plain_file(str(source))
    assert not list(fetch.cache_folder().iterdir())


def test_two_commands_may_unpack_one_input_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"ids": [1]}\n' * 10))
    first: list[tuple[Source, Index]] = []

    def open_as_second(path: Path) -> gzip.GzipFile:
        """Let the first command unpack and index the input after the second command found no copy."""
        with monkeypatch.context() as patch:
            patch.setitem(fetch._COMPRESSED, b"\x1f\x8b", gzip.GzipFile)
            first.append((opened := open_source(str(path)), opened.index(4)))
        return gzip.GzipFile(path)

    monkeypatch.setitem(fetch._COMPRESSED, b"\x1f\x8b", open_as_second)
    second = open_source(str(source))
    for command, index in (*first, (second, second.index(4))):
        assert [len(chunk.lines) for chunk in command.read(index, 4, [0, 1, 2])] == [4, 4, 2]
    assert list(fetch.cache_folder().iterdir()) == [second.path]


def test_the_cache_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "cache"))

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # As Linux does on FAT.

    monkeypatch.setattr("lmpool.batch.fetch.os.link", refuse)
    source = packed(tmp_path / "in.jsonl.gz")
    copy = fetch.plain_file(str(source))
    assert copy.read_bytes() == source.name.encode()
    assert fetch.plain_file(str(source)) == copy
    assert list(fetch.cache_folder().iterdir()) == [copy]


def test_the_cache_removes_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path / "scratch"))
    cache = fetch.cache_folder()
    used, unused = (packed(tmp_path / f"{name}.jsonl.gz") for name in ("used", "unused"))
    copies = [fetch.plain_file(str(path)) for path in (used, unused)]
    staging = cache / "staging-a1b2_c3d"
    strangers = [
        folder / name
        for folder in (tmp_path / "scratch", cache)
        for name in (
            "thesis",
            "staging-notes",
            "0123456789abcdef-folder",
            "thesis.tex",
            "staging.txt",
            "0123456789abcde-",
        )
    ]
    for number, path in enumerate([*strangers, staging]):
        if number % 6 < 3 or path == staging:
            path.mkdir()
            (path / "chapter.tex").write_text("mine")
        else:
            path.write_text("mine")
    for path in (*strangers, *copies, staging):
        os.utime(path, (0, 0))
    assert fetch.plain_file(str(used)) == copies[0]
    fetch.plain_file(str(packed(tmp_path / "another.jsonl.gz")))
    assert [path for path in strangers if not path.exists()] == []
    assert [(path / "chapter.tex").exists() for path in strangers] == [True, True, True, False, False, False] * 2
    assert [path.exists() for path in (*copies, staging)] == [True, False, False]


def test_a_cache_that_other_users_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_BATCH_CACHE", str(tmp_path))
    source, cache = str(packed(tmp_path / "in.jsonl.gz")), tmp_path / "lmpool-batch"
    cache.mkdir()
    cache.chmod(0o777)
    copy = fetch.plain_file(source)  # An empty cache folder is made private.
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.chmod(0o777)
    copy.write_bytes(b"of another user")
    refused = rf"{cache} has mode 777 and is not lmpool's alone: set LMPOOL_BATCH_CACHE to a folder of its own"
    with pytest.raises(SettingsError, match=refused):
        fetch.plain_file(source)
    with pytest.raises(SettingsError, match=refused):
        fetch.temporary_folder(fetch)
    cache.chmod(0o700)
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=f"{cache} is not a folder.*LMPOOL_BATCH_CACHE"):
        fetch.plain_file(source)
    monkeypatch.setattr("lmpool.embedded.os.geteuid", lambda: cache.stat().st_uid + 1)
    cache.unlink()
    (tmp_path / "elsewhere").rename(cache)
    with pytest.raises(SettingsError, match=f"{cache} belongs to user .*LMPOOL_BATCH_CACHE"):
        fetch.plain_file(source)


def packed(path: Path) -> Path:
    """Write a gzip-compressed input, whose unpacked copy goes into the cache."""
    path.write_bytes(gzip.compress(path.name.encode()))
    return path


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SettingsError, match=r"pip install 'lmpool\[fsspec\]'"):
        lmpool.batch.open("s3://bucket/out")


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("reference::data://x:application/json;base64,e30=", ":: in them"),
        ("filecache::https://host/in.jsonl", ":: in them"),
        ("s3://bucket/a::b", ":: in them"),
        ("reference://me:secret@host/refs.json", "reference:// is not accepted"),
        ("memory://in.jsonl", "memory:// is not accepted"),
        ("file://host/in.jsonl", "file:// is not accepted"),
        ("ftp://host/in.jsonl", "ftp:// is not accepted"),
        ("S3://bucket/in.jsonl", "S3:// is not accepted"),
    ],
)
def test_urls_of_file_systems_that_run_code_are_refused(tmp_path: Path, location: str, reason: str) -> None:
    for use in (file_system, fetch.plain_file, open_folder, lmpool.batch.open):
        with pytest.raises(SettingsError, match=reason) as raised:
            use(location)
        assert "secret" not in str(raised.value)
    for job in ((location, str(tmp_path / "out")), (str(tmp_path / "in.jsonl"), location)):
        with pytest.raises(SettingsError, match=reason):
            fetch.check_locations(tmp_path, *job)


def test_a_job_may_use_files_below_one_folder_and_buckets(tmp_path: Path) -> None:
    root, inside, outside = tmp_path / "root", tmp_path / "root" / "out", tmp_path / "out"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    for source, output in (
        (inside, inside),
        ("https://host/in", "s3://bucket/out"),
        (f"file://{inside}", "az://c/out"),
    ):
        fetch.check_locations(root, str(source), str(output))
    for source, output, reason in (
        (outside, inside, f"{outside} is not below {root}"),
        (inside, outside, f"{outside} is not below {root}"),
        (f"file://{outside}", inside, "is not below"),
        (root / "link" / "in", inside, "is not below"),
        (root / ".." / "in", inside, "is not below"),
        ("/etc/passwd", inside, "with another --files or LMPOOL_BATCH_FILES"),
        ("http://169.254.169.254/latest", inside, "http:// is not accepted"),
        (inside, "https://host/out", "https:// is not accepted"),
    ):
        with pytest.raises(SettingsError, match=reason):
            fetch.check_locations(root, str(source), str(output))
