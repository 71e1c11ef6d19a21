"""A client refuses a tokenizer that could freeze it or fill its memory, and accepts tokenizers of known models."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from lmpool.errors import InvalidVocabulary
from lmpool.protocol.tokenizer import MAX_GROWTH, check_regex, check_tokenizer

KNOWN = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    "digits from the right": r"\d{1,3}(?=(?:\d{3})*\b)|(?=(\d{3})+(?!\d))",
    "spaces": r" {2,}",
    "lazy": r"a{1,3}?|a+?|[[:alpha:][:^punct:]]++|[:;]",
}

SLOW = [
    "(a+)+b", "(a|aa)+b", "(?:a|a)*$", "(a?){9}", "((aa))+", "(a{2}{3})+", "a{1,9}+", "a**", r"(a)\1", "a*a*a*a*b",
    "((a{2,})?){3,}", "(?~abc)", r"(?<n>a)\g<n>", "(?#x)", "[a", "a" * 3000,
    "a{1,3}?+b", "a+?*b", "(?:ab)+?{2,}", "a?" * 30 + "b", "(?:a|a)" * 30 + "b", "(?:a*|b)" * 30 + "c",
    "a{0,999}" * 4 + "b", "(?x:(?:a|aa) +)b", r"\c[(?:a|aa)*b]", r"[\c](?:a|aa)*b]", "[]a](?:a|aa)*b", "[^]a]",
    "[[:aaaaaaaaaaaaaaaaaaaaaaaa:](?:a|aa)*b]", "[a[:", r"a\Kb", "\\M-a",
]  # fmt: skip


def file_with(part: str, component: Any) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, part: component})


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*replacements: str) -> str:
    return base64.b64encode(b"\4\0\0\0TRIE" + b"\0".join(text.encode() for text in replacements)).decode()


@pytest.mark.parametrize("name", list(KNOWN))
def test_patterns_of_known_models_are_accepted(name: str) -> None:
    check_regex(KNOWN[name])
    split = {"type": "Split", "pattern": {"Regex": KNOWN[name]}, "behavior": "Isolated", "invert": False}
    nested = {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [split]}]}
    assert check_tokenizer(file_with("pre_tokenizer", nested)) == 1


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_can_take_exponential_time_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidVocabulary):
        check_regex(pattern)


@pytest.mark.parametrize(
    ("part", "component", "reason"),
    [
        ("normalizer", replace({"String": "q"}, "x" * 20_000_000), "content of its Replace has 20000000 characters"),
        ("normalizer", replace({"Regex": "q"}, "x" * 100), "lengthen a text 100 times; the limit is 32"),
        ("normalizer", {"type": "Sequence", "normalizers": [replace({"String": "q"}, "qq")] * 20}, "lengthen a text"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}, "more than 64 components"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "x" * 99)}, "99 times"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}, "not base64"),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 1000}, "prepend of its Prepend has 1000 characters"),
        ("normalizer", replace({"String": ""}, "x"), "the pattern of its normalizer is '', not text"),
        ("normalizer", replace({}, "x"), "not one pattern"),
        ("normalizer", replace({"String": "a", "Regex": "a"}, "x"), "not one pattern"),
        ("normalizer", {"type": "Script"}, "of the kind 'Script', which lmpool does not accept"),
        ("normalizer", {"type": "Replace"}, "without the fields"),
        ("normalizer", ["NFC"], "without the fields"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}}, "repeats a repetition"),
        ("decoder", replace({"Regex": "a"}, "b"), "regular expression"),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 2, "pair": [], "special_tokens": {}},
            "repeats the text",
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "s"}}],
                "pair": [],
                "special_tokens": {"s": {"ids": [0] * 100}},
            },
            "adds 100 tokens",
        ),
    ],
)
def test_components_that_could_fill_or_freeze_a_client_are_refused(part: str, component: Any, reason: str) -> None:
    with pytest.raises(InvalidVocabulary, match=reason):
        check_tokenizer(file_with(part, component))


def test_words_that_take_long_to_split_are_refused() -> None:
    for longest in (100, 1000, 1001):
        file = json.dumps({"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": longest}})
        if longest <= 1000:
            assert check_tokenizer(file) == 1
        else:
            with pytest.raises(InvalidVocabulary, match="model splits has 1001 characters; the limit is 1000"):
                check_tokenizer(file)


def test_growth_is_that_of_all_normalizers() -> None:
    normalizers = [replace({"String": " "}, "▁"), replace({"String": "q"}, "qu"), replace({"Regex": "z"}, "zzz")]
    assert check_tokenizer(file_with("normalizer", {"type": "Sequence", "normalizers": normalizers})) == 6
    precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "ffi", "ï" * 18)}
    assert check_tokenizer(file_with("normalizer", precompiled)) == 18 <= MAX_GROWTH


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_other_texts_than_a_tokenizer_json_are_refused(text: str) -> None:
    with pytest.raises(InvalidVocabulary, match=r"tokenizer\.json cannot be read"):
        check_tokenizer(text)
