"""`decode_vocab` gives genlm-backend's byte strings of tokens, and reads tokenizers that genlm-backend cannot read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import sentencepiece
import tiktoken
from genlm.backend.tokenization import decode_vocab as genlm_decode_vocab
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.tokenization_mistral_common import MistralCommonBackend

from lmpool.errors import InvalidVocabulary, SettingsError
from lmpool.vocabulary import MAX_TOKENS, DecodedVocab, Vocabulary, decode_vocab
from tests.support.models import real_tokenizers as real

ALPHABET = {letter: byte for byte, letter in real.LETTERS.items()}
BYTES = {bytes([byte]): byte for byte in range(256)}


def genlm(tokenizer: Any, fallback: str = "tokenizer") -> DecodedVocab:
    """The vocabulary that genlm-backend reads from a tokenizer."""
    tokens, texts = genlm_decode_vocab(tokenizer, fallback)
    return DecodedVocab([token.byte_string for token in tokens], texts)


def unigram(pieces: Iterable[str], added: list[str] | None = None) -> Tokenizer:
    """A SentencePiece-like tokenizer; piece 0 is `<unk>`."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens(added or [])
    return tokenizer


class Slow:
    """A slow tokenizer of transformers, which has no Rust tokenizer behind it."""

    name_or_path = "some/slow"

    def __init__(self, pieces: Mapping[str, int], added: Mapping[str, int] | None = None, **more: Any) -> None:
        self.pieces, self.added = dict(pieces), dict(added or {})
        self.__dict__ |= more

    def __len__(self) -> int:
        return len(self.pieces | self.added)

    def get_vocab(self) -> dict[str, int]:
        return self.pieces | self.added

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def convert_ids_to_tokens(self, token: int) -> str:
        return {i: piece for piece, i in self.get_vocab().items()}[token]


# Byte strings equal to those of genlm-backend


@pytest.mark.parametrize("make", real.READABLE.values(), ids=real.READABLE)
def test_real_tokenizers_are_read_as_genlm_reads_them(make: Callable[[], Any]) -> None:
    ours, theirs = decode_vocab(make()), genlm(make())
    assert ours.tokens == theirs.tokens
    assert ours.texts == theirs.texts
    assert {type(token) for token in ours.tokens} == {bytes}


@pytest.mark.parametrize("fallback", ["latin1", "replace"])
@pytest.mark.parametrize("make", real.SMALL.values(), ids=real.SMALL)
def test_every_fallback_gives_the_texts_that_genlm_gives(make: Callable[[], Any], fallback: str) -> None:
    assert decode_vocab(make(), fallback) == genlm(make(), fallback)


pieces_of_sentencepiece = st.lists(
    st.lists(st.sampled_from(["▁", "<0x41>", "<0xe9>", "<0x0A>", "a", "é", "中", "<", "0x"]), min_size=1).map("".join),
    max_size=8,
)


@given(pieces_of_sentencepiece, st.lists(st.text("▁a<中|>", min_size=1, max_size=4), max_size=3))
def test_any_pieces_of_sentencepiece_are_read_as_genlm_reads_them(pieces: list[str], added: list[str]) -> None:
    tokenizer = real.fast(unigram(pieces, added))
    assert decode_vocab(tokenizer) == genlm(tokenizer)


@given(st.sets(st.binary(min_size=2, max_size=5), max_size=8), st.lists(st.text("▁aĠ中|", min_size=1, max_size=4)))
def test_any_byte_level_pieces_are_read_as_genlm_reads_them(tokens: set[bytes], added: list[str]) -> None:
    tokenizer = real.byte_level(BYTES | {token: 256 + i for i, token in enumerate(tokens)})
    # Added tokens are longer than one character, so that no added token replaces a character of the alphabet.
    tokenizer.add_tokens([f"<{text}>" for text in added])
    decoded = decode_vocab(real.fast(tokenizer))
    assert decoded == genlm(real.fast(tokenizer))
    assert decoded.tokens[: 256 + len(tokens)] == [*BYTES, *tokens]


# Tokenizers of other libraries


def test_tekken_is_the_same_from_mistral_common_and_from_transformers() -> None:
    wrapped = real.mistral_tekken()
    decoded = decode_vocab(real.tekken())
    assert len(decoded.tokens) == 131_072
    for tokenizer in (wrapped, wrapped.instruct_tokenizer, wrapped.instruct_tokenizer.tokenizer):
        assert decode_vocab(tokenizer).tokens == decoded.tokens


def test_the_special_tokens_of_tekken_come_first() -> None:
    tokens = decode_vocab(real.mistral_tekken()).tokens
    assert tokens[:4] == [b"<unk>", b"<s>", b"</s>", b"[INST]"]
    assert tokens[1000:1256] == [bytes([byte]) for byte in range(256)]
    assert tokens[1256:1259] == [b"  ", b" t", b"er"]


def test_sentencepiece_is_the_same_from_every_library() -> None:
    expected = decode_vocab(real.mistral()).tokens
    path = real.mistral_model_file()
    assert expected[:5] == [b"<unk>", b"<s>", b"</s>", b"\x00", b"\x01"]
    assert decode_vocab(sentencepiece.SentencePieceProcessor(model_file=path)).tokens == expected
    assert decode_vocab(MistralCommonBackend(path)).tokens == expected
    assert decode_vocab(real.mistral().backend_tokenizer).tokens == expected


def test_tiktoken_is_the_same_as_the_tokenizer_of_transformers() -> None:
    encoding, converted = decode_vocab(real.qwen_encoding()), decode_vocab(real.qwen())
    assert encoding.tokens == converted.tokens
    assert encoding.tokens[-3:] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]


def test_a_tokenizer_without_names_shows_replacement_characters() -> None:
    encoding = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=BYTES, special_tokens={"<end>": 256})
    assert decode_vocab(encoding).texts[0x41:0x42] == ["A"]
    assert decode_vocab(encoding).texts[0xE9] == "\N{REPLACEMENT CHARACTER}"
    assert decode_vocab(encoding, "latin1").texts[0xE9] == "é"


def test_a_processor_is_read_by_its_tokenizer() -> None:
    class Processor:
        tokenizer = real.gpt2()

    assert decode_vocab(Processor()) == decode_vocab(real.gpt2())


# WordPiece tokenizers, which genlm-backend refuses


def test_wordpiece_continuations_lose_their_prefix_and_words_stay_unchanged() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "##": 3, "#": 4, "é": 5, "##é": 6}))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "##keep"])
    expected = [b"[UNK]", b"play", b"ing", b"##", b"#", "é".encode(), "é".encode(), b"##keep"]
    assert decode_vocab(tokenizer).tokens == expected
    assert decode_vocab(real.fast(tokenizer)).tokens == expected


def test_the_prefix_of_wordpiece_is_the_one_that_its_decoder_names() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "@@ing": 1, "##ing": 2}))
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(prefix="@@")])
    assert decode_vocab(tokenizer).tokens == [b"[UNK]", b"ing", b"##ing"]


def test_a_real_wordpiece_is_read() -> None:
    tokenizer = real.nepali_wordpiece()
    tokens, texts = decode_vocab(tokenizer)
    assert len(tokens) == len(tokenizer) == 30_522
    assert tokens[:5] == [b"[UNK]", b"[CLS]", b"[SEP]", b"[PAD]", b"[MASK]"]
    ids = tokenizer("नेपालीहरूका", add_special_tokens=False)["input_ids"]
    assert b"".join(tokens[i] for i in ids).decode() == "".join(texts[i] for i in ids) == "नेपालीहरूका"


# Duplicate tokens, unused ids and added tokens


def test_duplicates_are_kept_apart() -> None:
    tokens = decode_vocab(unigram(["▁a", "b", "▁a", "<0x62>"])).tokens
    assert tokens == [b"<unk>", b" a", b"b", b" a", b"b"]
    assert Vocabulary(tokens).tokens == tokens


def test_ids_that_the_tokenizer_leaves_out_are_empty() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "Ġb": 3}, []))
    backend.decoder = decoders.ByteLevel()
    assert decode_vocab(backend) == DecodedVocab([b"a", b"", b"", b" b"], ["a", "", "", " b"])
    encoding = tiktoken.Encoding("gap", pat_str=".", mergeable_ranks=BYTES, special_tokens={"<end>": 300})
    assert decode_vocab(encoding).tokens == [*BYTES, *[b""] * 44, b"<end>"]
    slow = Slow({"a": 0, "Ġb": 3}, byte_decoder=ALPHABET)
    assert decode_vocab(slow).tokens == [b"a", b"", b"", b" b"]


def test_ids_that_only_the_model_has_are_empty() -> None:
    alone, padded = decode_vocab(real.qwen()), decode_vocab(real.qwen(), vocab_size=152_064)
    extra = 152_064 - len(alone.tokens)
    assert extra > 0
    assert padded == DecodedVocab(alone.tokens + [b""] * extra, alone.texts + [""] * extra)


def test_ids_that_only_the_tokenizer_has_are_cut_off() -> None:
    alone, cut = decode_vocab(real.gpt2()), decode_vocab(real.gpt2(), vocab_size=50_000)
    assert cut == DecodedVocab(alone.tokens[:50_000], alone.texts[:50_000])
    assert decode_vocab(real.gpt2(), vocab_size=50_257) == alone


def test_added_tokens_are_their_text_in_utf_8() -> None:
    added = ["<é>", "Ġ", "a▁b"]
    backend = real.byte_level(BYTES)
    backend.add_tokens([AddedToken(text) for text in added])
    # "Ġ" stands for the space in GPT-2's alphabet; added as a token, it keeps its id but is the plain text "Ġ".
    tokens = decode_vocab(backend).tokens
    assert tokens[256:] == ["<é>".encode(), "a▁b".encode()]
    assert tokens[0x20] == "Ġ".encode()
    assert decode_vocab(unigram(["b"], ["a▁b", "<0x41>"])).tokens[2:] == [b"a b", b"<0x41>"]


def test_byte_fallback_tokens_are_their_bytes() -> None:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    assert decode_vocab(unigram(pieces)).tokens[1:] == list(BYTES)


@pytest.mark.parametrize("piece", ["<0xZZ>", "<0x4>", "<0x+1>", "<0x  >", "<0x0é>"])
def test_a_malformed_byte_token_is_text(piece: str) -> None:
    assert decode_vocab(unigram([piece])).tokens[1] == piece.encode()


def test_the_end_of_a_word_is_a_space_as_in_its_decoder() -> None:
    # CLIP's vocabulary marks the ends of words with "</w>".
    backend = Tokenizer(models.BPE({"the": 0, "the</w>": 1, "</w>": 2}, [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.ByteLevel()
    assert decode_vocab(backend).tokens == [b"the", b"the ", b" "]


# Slow tokenizers of transformers


def test_a_slow_tokenizer_is_read_by_its_own_byte_decoder() -> None:
    slow = Slow({"x": 0, "yx": 1}, {"<é>": 2}, byte_decoder={"x": 0xE9, "y": 0x20})
    assert decode_vocab(slow).tokens == [b"\xe9", b" \xe9", "<é>".encode()]
    assert decode_vocab(slow).texts == ["x", "yx", "<é>"]


def test_a_slow_tokenizer_with_all_letters_of_gpt2_is_byte_level() -> None:
    assert decode_vocab(Slow(ALPHABET | {"Ġthe": 256})).tokens == [*BYTES, b" the"]


def test_bytes_that_utf_8_never_has_may_be_missing_from_an_alphabet() -> None:
    letters = {letter: byte for letter, byte in ALPHABET.items() if byte not in (0xC0, 0xC1) and byte < 0xF5}
    slow = Slow({letter: i for i, letter in enumerate(letters)})
    assert decode_vocab(slow).tokens == [bytes([byte]) for byte in letters.values()]
    del slow.pieces["Ġ"]
    with pytest.raises(InvalidVocabulary, match="not every byte"):
        decode_vocab(slow)


# Tokenizers that cannot be read


def with_decoder(decoder: Any) -> Tokenizer:
    """A tokenizer with one token and the given decoder."""
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    return backend


class Reversed:
    """A decoder of tokenizers that is written in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens[::-1]


@pytest.mark.parametrize(
    ("tokenizer", "name", "reason"),
    [
        (None, "NoneType", "it is no tokenizer of transformers"),
        ("gpt2", "str", "it is no tokenizer of transformers"),
        (object(), "object", "it is no tokenizer of transformers"),
        (Slow({"the": 0, "cat": 1}), r"'some/slow' \(Slow\)", "it has no decoder.* not every byte"),
        (Slow({"é": 0}, byte_decoder={"e": 1}), r"'some/slow' \(Slow\)", "token 0, 'é', has a character"),
        (Slow({"e": 0}, byte_decoder={"e": 256}), r"'some/slow' \(Slow\)", "token 0, 'e', has a character"),
        (Slow({"\ud800": 0}, sp_model=None), r"'some/slow' \(Slow\)", "token 0, .* has a character"),
        (Slow({"a": 0}, get_added_vocab=None), r"'some/slow' \(Slow\)", "TypeError: 'NoneType'"),
        (Slow({}, byte_decoder=ALPHABET), r"'some/slow' \(Slow\)", "it has 0 tokens"),
        (Slow({"a": 10**10}), r"'some/slow' \(Slow\)", f"it has {10**10 + 1} tokens: from 1 to {MAX_TOKENS}"),
        (with_decoder(None), "Tokenizer", "it has no decoder.* not every byte"),
        (with_decoder(decoders.BPEDecoder()), "Tokenizer", "its decoder is BPEDecoder: only ByteLevel"),
        (with_decoder(decoders.Sequence([decoders.Fuse(), decoders.CTC()])), "Tokenizer", "is CTC, Fuse, Sequence:"),
        (with_decoder(decoders.Decoder.custom(Reversed())), "Tokenizer", "its decoder is written in Python"),
        (real.fast(with_decoder(decoders.Fuse())), r"\S* ?\(?TokenizersBackend\)?", "its decoder is Fuse:"),
        (Tokenizer(models.BPE()), "Tokenizer", "it has 0 tokens"),
        (Tokenizer(models.BPE({"a": 2**32 - 1}, [])), "Tokenizer", f"it has {2**32} tokens"),
    ],
)
def test_a_tokenizer_without_known_bytes_is_refused_by_name(tokenizer: Any, name: str, reason: str) -> None:
    with pytest.raises(InvalidVocabulary, match=f"the vocabulary of {name} cannot be read: .*{reason}"):
        decode_vocab(tokenizer)


@pytest.mark.parametrize("fallback", ["utf8", "", None, "Tokenizer", ["latin1"]])
def test_an_unknown_fallback_is_refused(fallback: Any) -> None:
    with pytest.raises(SettingsError, match="byte2str_fallback: .*tokenizer, latin1, replace"):
        decode_vocab(real.gpt2(), fallback)


@pytest.mark.parametrize("size", [0, -1, True, 5.0, "5", MAX_TOKENS + 1])
def test_an_impossible_vocab_size_is_refused(size: Any) -> None:
    with pytest.raises(SettingsError, match=f"vocab_size: .* from 1 to {MAX_TOKENS}"):
        decode_vocab(real.gpt2(), vocab_size=size)
