"""Published tokenizers return the same ids as transformers, without transformers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lmpool.broker import registries
from lmpool.errors import DeadlineExceeded, NotTokenIds, ProtocolError, SettingsError, TokenOutOfRange, UnknownTokenizer
from lmpool.producer import SyncProducer
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, load_tokenizer
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.tokenizer import PackedTokenizer, digest_of, unpack_tokenizer
from lmpool.workers.backends.tokenizer import read_texts
from tests.producer.cli.test_cli import on, one_line
from tests.support.models import real_tokenizers
from tests.support.pool import Pool, until

TEXTS = [
    "The capital of France is",
    "  Two  spaces,\n\ta tab, \r\n and 3.14159e-5; it's naïve — “ﬁne” 中文 हिन्दी 😀👩‍👩‍👧",
    "<s>[INST] a </s> <|im_start|>user\n<|endoftext|>",
    "",
    "\ufeff\u200b\x00",
]
SLOW = "mistral-slow"
FAST = {name: make for name, make in real_tokenizers.READABLE.items() if name != SLOW}
FAST["nepali-wordpiece"] = real_tokenizers.nepali_wordpiece
INFO = ModelInfo(name="m", backend="hf", vocab_size=300_000, max_prompt_tokens=64, revision="1", dtype="float32")


@pytest.fixture(scope="module")
def served(server_url: str, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that serves SmolLM2."""
    pool = Pool(server_url, "text", tmp_path_factory.mktemp("text"))
    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    yield pool
    pool.end()


@pytest.mark.parametrize("name", list(FAST))
def test_published_tokenizers_return_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    FAST[name]().save_pretrained(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    packed = read_texts(replace(INFO, source=str(tmp_path)), None, trust_remote_code=False).tokenizer
    assert packed is not None
    ours = PublishedTokenizer(unpack_tokenizer(packed.data, packed.digest))
    for text in [*TEXTS, " ".join(theirs.all_special_tokens)]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_slow_tokenizer_that_transformers_cannot_convert_is_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real_tokenizers.READABLE[SLOW]().save_pretrained(tmp_path)
    texts = read_texts(replace(INFO, source=str(tmp_path)), None, trust_remote_code=False)
    assert texts.vocabulary is not None
    assert texts.tokenizer is None
    assert "the tokenizer of m is not published: Converting from SentencePiece" in caplog.text


def test_a_tokenizer_whose_file_encodes_to_other_ids_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_tokenizers.gpt2().save_pretrained(tmp_path)

    def encode(self: Any, text: str, **options: Any) -> list[int]:
        return [7]

    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", encode)
    assert read_texts(replace(INFO, source=str(tmp_path)), None, trust_remote_code=False).tokenizer is None
    assert 'it makes other ids of "Hello, world!' in caplog.text


async def test_a_program_encodes_a_string(served: Pool, smollm2_folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(smollm2_folder)
    async with served.producer() as producer:
        ids = await producer.encode("The capital of France is")
        assert ids == theirs.encode("The capital of France is")
        assert await producer.decode((await producer.topk(ids, 1)).ids) == " Paris"
        long = "All work and no play. " * 1000
        assert await producer.encode(long) == theirs.encode(long)
        # All producers of a process share a tokenizer.
        async with served.producer() as other:
            assert await other.tokenizer() is await producer.tokenizer()
        for wrong in (b"bytes", ["a"], 7, None, "\ud800"):
            with pytest.raises(NotTokenIds):
                await producer.encode(wrong)  # type: ignore[arg-type]
        for no_ids in ("text", [1.5], [[1]], 7):
            with pytest.raises(NotTokenIds):
                await producer.decode(no_ids)
        for beyond in (-1, producer.model.vocab_size, 99_999_999):
            with pytest.raises(TokenOutOfRange, match=f"ids to decode go from 0 to .*, not from {beyond} to {beyond}"):
                await producer.decode([beyond])
        with pytest.raises(NotTokenIds, match="text"):
            await producer.logprobs("The capital of France is")


async def test_concurrent_texts_read_the_tokenizer_once_and_outside_the_event_loop(
    served: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZERS, "_kept", {})
    threads = []

    def noting(work: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return noted

    monkeypatch.setattr(registries, "unpack_tokenizer", noting(unpack_tokenizer))
    monkeypatch.setattr(PublishedTokenizer, "__init__", noting(PublishedTokenizer.__init__))
    async with served.producer() as producer, served.producer() as other:
        asked = [(producer, other)[at % 2].encode("Hello") for at in range(100)]
        assert await asyncio.gather(*asked) == [[19556]] * 100
        assert len(threads) == 2, "it is unpacked once, and parsed once"
        assert threading.main_thread() not in threads


def test_a_program_without_asyncio_does_too(served: Pool) -> None:
    with SyncProducer(redis=served.url, prefix=served.prefix) as producer:
        ids = producer.encode("Hello")
        assert producer.decode(ids) == "Hello"
        assert producer.tokenizer().tokens([*ids, *ids]) == ["Hello", "Hello"]


@pytest.mark.parametrize("bits", ["other", "cut", "huge", "list"])
async def test_other_content_under_the_tokenizers_key_is_refused(
    served: Pool, monkeypatch: pytest.MonkeyPatch, bits: str
) -> None:
    monkeypatch.setattr(TOKENIZERS, "_kept", {})
    async with served.producer() as producer:
        key = served.keys.tokenizer(producer.model.tokenizer)
        whole: Any = served.redis.get(key)
        other = PackedTokenizer.pack('{"model": {}}').data
        try:
            failed: list[Any] = []
            while not failed or not all(isinstance(error, Exception) for error in failed):
                monkeypatch.setattr(TOKENIZERS, "_kept", {})
                served.redis.delete(key)
                if bits == "list":
                    served.redis.rpush(key, "x")
                else:
                    served.redis.set(key, {"other": other, "cut": whole[:-1], "huge": whole + b"\0" * 30_000_000}[bits])
                # On a busy machine, the worker may write the tokenizer again before the requests read the key.
                failed = await asyncio.gather(*(producer.encode("Hello") for _ in range(9)), return_exceptions=True)
            for error in failed:
                with pytest.raises(UnknownTokenizer, match=f"as the tokenizer {producer.model.tokenizer} is none: "):
                    raise error
            assert len(set(map(id, failed))) == 9, "each has an exception of its own"
            # The worker detects that the stored value has another size or type, and writes the tokenizer again.
            await asyncio.to_thread(until, lambda: is_string(served, key, whole), "the worker has written it again")
            assert await producer.encode("Hello") == [19556]
        finally:
            served.redis.set(key, whole)


def is_string(pool: Pool, key: bytes, value: bytes) -> bool:
    return pool.redis.type(key) == b"string" and pool.redis.get(key) == value


def test_foreign_content_with_the_right_digest_is_refused() -> None:
    packed = PackedTokenizer.pack('{"model": {}}')
    with pytest.raises(UnknownTokenizer, match="cannot be read by tokenizers"):
        PublishedTokenizer(unpack_tokenizer(packed.data, packed.digest))
    for data, reason in ((packed.data[:-4], "cut off"), (b"no stream", "cannot be read")):
        with pytest.raises(ProtocolError, match=reason):
            unpack_tokenizer(data, digest_of(data))


async def test_the_error_for_a_model_without_a_tokenizer_is_clear(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.to_thread(pool.start)
    async with pool.producer() as producer:
        with pytest.raises(UnknownTokenizer, match="'syn' publishes no tokenizer"):
            await producer.encode("Hello")
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(SettingsError, match=r"pip install 'lmpool\[text\]'"):
            await producer.encode("Hello")
    assert "'syn' has no tokenizer; pass token ids with --ids" in one_line(on(pool, "logprobs", "Hello"))


def test_the_command_shows_the_top_k_tokens_without_heavy_packages(served: Pool) -> None:
    where = ["--redis", served.url, "--prefix", served.prefix, "--json", "--top", "3"]
    command = [sys.executable, "-X", "importtime", "-m", "lmpool", "logprobs"]

    def ask(*arguments: str, given: bytes = b"") -> Any:
        ended = subprocess.run([*command, *arguments, *where], input=given, capture_output=True, timeout=60, check=True)
        imported = {line.rpartition(b"|")[2].strip().partition(b".")[0] for line in ended.stderr.splitlines()}
        assert b"tokenizers" in imported
        assert not imported & {b"torch", b"transformers", b"huggingface_hub", b"scipy", b"pandas", b"pyarrow"}
        return json.loads(ended.stdout)

    result = ask("The capital of France is")
    assert result["top"][0]["token"] == " Paris"
    assert ask("-", given=b"The capital of France is\n") == result
    # With --ids too, the output includes the texts of tokens.
    assert ask("--ids", ",".join(map(str, result["ids"]))) == result


def test_standard_input_that_is_not_text_gives_a_one_line_error(served: Pool) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "lmpool", "logprobs", "-", "--redis", served.url, "--prefix", served.prefix],
        input=b"\xff\xfe", capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert b"standard input is not UTF-8" in ended.stderr


def byte_tokenizer(pattern: str) -> str:
    """Return a `tokenizer.json` with a token for each byte, which first splits a text by a pattern."""
    tokenizer = tokenizers.Tokenizer(BPE(vocab={char: at for at, char in enumerate(ByteLevel.alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = Steps(
        [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer.to_str()


def test_a_tokenizer_that_could_freeze_a_client_is_neither_published_nor_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = byte_tokenizer("(a|aa)+b")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizers.Tokenizer.from_str(text)).save_pretrained(tmp_path)
    assert read_texts(replace(INFO, source=str(tmp_path)), None, trust_remote_code=False).tokenizer is None
    assert "the tokenizer of m is not published: the pattern '(a|aa)+b' repeats a repetition" in caplog.text
    with pytest.raises(UnknownTokenizer, match="the model's tokenizer is refused: the pattern"):
        PublishedTokenizer(text)


def test_a_panic_of_the_package_becomes_an_lmpool_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmpool.producer.tokenizer.check_tokenizer", lambda text: 1.0)
    tokenizer = PublishedTokenizer(byte_tokenizer("(a|aa)+b"))
    with pytest.raises(UnknownTokenizer, match="fails on this text: .*retry-limit"):
        tokenizer.encode("a" * 100)
    assert len(tokenizer.encode("aab")) == 3


def test_a_text_that_could_grow_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmpool.producer.tokenizer.MAX_NORMALIZED_CHARACTERS", 100)
    growing = json.loads(byte_tokenizer("x"))
    growing["normalizer"] = {"type": "Replace", "pattern": {"String": "q"}, "content": "qqqqqqqqqq"}
    tokenizer = PublishedTokenizer(json.dumps(growing))
    assert len(tokenizer.encode("q" * 10)) == 100
    with pytest.raises(NotTokenIds, match="the text has 11 characters; this tokenizer takes at most 10: split it"):
        tokenizer.encode("q" * 11)


async def test_a_slow_text_times_out_without_blocking_the_event_loop() -> None:
    # The pattern takes cubic time, here some seconds; if it held the GIL, the timeout would come too late.
    tokenizer = PublishedTokenizer(byte_tokenizer("a*a*[^a]"))
    ended = threading.Event()

    class Slow:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            try:
                return tokenizer.encode(text, add_special_tokens=add_special_tokens)
            finally:
                ended.set()

        def decode(self, token_ids: list[int]) -> str:
            raise AssertionError

    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await TOKENIZERS.encode(Slow(), "a" * 1000, 0.05)
    assert not ended.is_set()
    await asyncio.to_thread(ended.wait)


def test_code_in_a_tokenizer_is_not_run_and_no_question_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked on the terminal"))
    with pytest.raises(SettingsError, match="does not load"):
        load_tokenizer(replace(INFO, source=str(tmp_path)))
