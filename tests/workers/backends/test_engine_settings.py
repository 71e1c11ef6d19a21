"""Options that a user passes to an engine: all spellings of key=value, TOML files, and refusals."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmpool.errors import SettingsError
from lmpool.workers.backends.settings import check_engine_args, parse_engine_args

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a TOML file and returns its path."""

    def written(text: str) -> str:
        path = tmp_path / "engine.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return written


# Options as key=value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("True", True),
        ("False", False),
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("0x10", 16),
        ("0.9", 0.9),
        ("1e-3", 0.001),
        ("inf", math.inf),
        ("[1,2]", [1, 2]),
        ("[]", []),
        ("'[1, 2]'", [1, 2]),
        ('\'["x", "y"]\'', ["x", "y"]),
        ("{a=1}", {"a": 1}),
        ("'{a = {b = true}, c = [0.5]}'", {"a": {"b": True}, "c": [0.5]}),
        ("'\"true\"'", "true"),
        ("'\"a # b\"'", "a # b"),
        ('{"a":1}', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ("{a = 1}", {"a": 1}),
        ("{ a = 'x y', b = [1, 2] }", {"a": "x y", "b": [1, 2]}),
        ("[1, 2]", [1, 2]),
        ('["x y", "z}"]', ["x y", "z}"]),
        (r"""{"a": "b\"]}", "c": "it's"}""", {"a": 'b"]}', "c": "it's"}),
        ('{"a":\n  {"b": [1,\n2]}}', {"a": {"b": [1, 2]}}),
        ("""'{"a": {"b": [true, null]}}'""", {"a": {"b": [True, None]}}),
        ("""'["x", null]'""", ["x", None]),
        ("None", None),
    ],
)
def test_a_value_in_toml_or_json_is_parsed(text: str, value: object) -> None:
    options = parse_engine_args([f"key={text}"])
    assert options == {"key": value}
    assert type(options["key"]) is type(value), "True equals 1, and 1 equals 1.0"


def test_nan_is_parsed() -> None:
    assert math.isnan(parse_engine_args(["key=nan"])["key"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", "auto"),
        ("", ""),
        ("fp8_e5m2", "fp8_e5m2"),
        ("some/folder-1.5:tag", "some/folder-1.5:tag"),
        ("a=b", "a=b"),
        ("tRUE", "tRUE"),
        ("1.2.3", "1.2.3"),
        ("[1,", "[1,"),
        ("[1]x", "[1]x"),
        ("[x]", "[x]"),
        ("--x", "--x"),
        ("#1", "#1"),
        ('"two words"', "two words"),
        ("'two words'", "two words"),
        (r"two\ words", "two words"),
        ("'1 # one'", "1 # one"),
        ("'1\nother = 2'", "1\nother = 2"),
        ("'1, other = 2'", "1, other = 2"),
        ("2024-01-01", "2024-01-01"),
        ("07:30:00", "07:30:00"),
        ("null", "null"),
        ("1" * 5000, "1" * 5000),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_any_other_value_is_text(text: str, value: str) -> None:
    assert parse_engine_args([f"key={text}"]) == {"key": value}


@pytest.mark.parametrize("name", ["max_num_seqs", "max-num-seqs", "--max-num-seqs", "--max_num-seqs", "-max_num_seqs"])
def test_a_name_may_be_spelled_as_on_the_engines_own_command_line(name: str) -> None:
    assert parse_engine_args([f"{name}=4"]) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--enforce-eager", {"enforce_eager": True}),
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--enforce-eager --max-num-seqs 8", {"enforce_eager": True, "max_num_seqs": 8}),
        ("--no-enforce-eager max_num_seqs=8", {"enforce_eager": False, "max_num_seqs": 8}),
        ("--max-num-seqs 8 seed=1 --dtype half", {"max_num_seqs": 8, "seed": 1, "dtype": "half"}),
        ("--enforce-eager false --seed -1", {"enforce_eager": False, "seed": -1}),
        ("""--hf-overrides '{"num_hidden_layers":1}'""", {"hf_overrides": {"num_hidden_layers": 1}}),
        ('--hf-overrides {"a": "b c", "d": 1} --seed 1', {"hf_overrides": {"a": "b c", "d": 1}, "seed": 1}),
        ("--hf-overrides {a = 1} --enforce-eager", {"hf_overrides": {"a": 1}, "enforce_eager": True}),
        ('--names ["x y", "z"]', {"names": ["x y", "z"]}),
        ("--model-path 'a b/c=d'", {"model_path": "a b/c=d"}),
        ("--config engine.toml", {"config": "engine.toml"}),
        ("--no=1", {"no": 1}),
    ],
)
def test_options_may_be_written_as_on_the_engines_own_command_line(text: str, options: dict[str, Any]) -> None:
    assert parse_engine_args([text]) == options


def test_a_flag_takes_no_value_from_the_next_text(write: Write) -> None:
    assert parse_engine_args(["--enforce-eager", write("a = 1")]) == {"enforce_eager": True, "a": 1}


@pytest.mark.parametrize(
    "given",
    [
        ["a=1 b=two c=[3]"],
        ["a=1", "b=two", "c=[3]"],
        ["a=1 b=two", "c=[3]"],
        ["  a=1\tb=two\n c=[3] "],
        ["", "a=1", " ", "b=two c=[3]"],
        ["--a=1 'b=two' c='[3]'"],
        ["a=1 c=[ 3 ] b=two"],
        ["c=[3] b=two", "a=1"],
    ],
)
def test_pairs_may_share_a_text_or_have_one_each(given: list[str]) -> None:
    assert parse_engine_args(given) == {"a": 1, "b": "two", "c": [3]}


def test_no_texts_are_no_options() -> None:
    assert parse_engine_args([]) == {}


@pytest.mark.parametrize("given", [["a=1 b=0 a=2"], ["a=1 b=0", "a=2"], ["a-=0 a=1 b=0", "--a=2"]])
def test_the_later_of_two_values_wins(given: list[str]) -> None:
    assert {name: value for name, value in parse_engine_args(given).items() if name in "ab"} == {"a": 2, "b": 0}


# Options in TOML files


def test_a_file_sets_options_of_every_type(write: Write) -> None:
    path = write('# of mine\na = true\nb = "two"\nc = [3]\n\n[d]\ne = 0.5\n\n[d.f]\ng = "ü"\n')
    assert parse_engine_args([path]) == {"a": True, "b": "two", "c": [3], "d": {"e": 0.5, "f": {"g": "ü"}}}


def test_an_empty_file_sets_nothing(write: Write) -> None:
    assert parse_engine_args([write("")]) == {}


def test_the_later_of_a_file_and_a_pair_wins(write: Write) -> None:
    path = write("a = 1\n[b]\nx = 1\n")
    assert parse_engine_args([path, "a=2 b={y=2}"]) == {"a": 2, "b": {"y": 2}}
    assert parse_engine_args(["a=2 b={y=2} c=3", path]) == {"a": 1, "b": {"x": 1}, "c": 3}


def test_a_path_may_begin_at_home_and_hold_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my own.toml").write_text("a = 1")
    assert parse_engine_args(["~/my own.toml"]) == {"a": 1}


def test_a_file_may_stand_between_pairs(write: Write) -> None:
    assert parse_engine_args([f"a=1 {write('b = 2')} c=3"]) == {"a": 1, "b": 2, "c": 3}


def test_names_in_a_file_may_be_spelled_with_dashes_too(write: Write) -> None:
    assert parse_engine_args([write('max-num-seqs = 4\n[a-b]\n"c-d" = 1')]) == {"max_num_seqs": 4, "a_b": {"c-d": 1}}


def test_the_home_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^engine_args: ~nobody-here/x\.toml cannot be read: "):
        parse_engine_args(["~nobody-here/x.toml"])


def test_a_path_may_be_an_options_value() -> None:
    assert parse_engine_args(["config=engine.toml"]) == {"config": "engine.toml"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(SettingsError, match=f"^engine_args: {path} cannot be read: No such file"):
        parse_engine_args([str(path)])


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(SettingsError, match=f"^engine_args: {folder} cannot be read: "):
        parse_engine_args([str(folder)])


@pytest.mark.parametrize(
    ("content", "where"),
    [(b"a = \n", "line 1"), (b"a = 1\nb = yes", "line 2"), (b"a = 1\na = 2\n", "line 2"), (b"a = '\xff'", "utf-8")],
)
def test_the_error_for_a_broken_file_has_the_position(tmp_path: Path, content: bytes, where: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"^engine_args: {path} is not TOML: .*{where}") as caught:
        parse_engine_args([str(path)])
    assert "\n" not in str(caught.value)


# Options that are refused


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a", "'a'"),
        ("--a=1 b", "'b'"),
        ("--a 1 b", "'b'"),
        ("-a", "'-a'"),
        ("--", "'--'"),
        ("--1a", "'--1a'"),
        ("[1]", "'[1]'"),
        ("a=1 b", "'b'"),
        ("a = 1", "'a'"),
        ("=1", "'=1'"),
        ("--=1", "'--=1'"),
        ("1a=1", "'1a=1'"),
        ("a.b=1", "'a.b=1'"),
        ("'a b=1'", "'a b=1'"),
        ("some/folder/engine.json", "'some/folder/engine.json'"),
    ],
)
def test_a_text_other_than_key_and_value_is_refused_and_shown(text: str, shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_engine_args(["good=1", text])
    assert str(caught.value).startswith(f"engine_args: {shown} is neither key=value, nor --key, nor the value of")


@pytest.mark.parametrize("text", ["a={a:1}", 'a={"b": nonsense} c=1', "c=1 a={b}"])
def test_a_malformed_table_is_refused_with_a_hint_about_quotes(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"^engine_args: '\{.*' is neither TOML nor JSON\. If a shell removed its quotes"
    ) as caught:
        parse_engine_args([text])
    assert str(caught.value).endswith("""--engine-args 'name={"a": 1}'""")


def test_the_options_in_the_documentation_are_parsed() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/backends.md").read_text("utf-8")
    options = [shlex.split(line, comments=True) for line in page.splitlines() if line.startswith("lmpool worker")]
    given = [words[words.index("--engine-args") + 1] for words in options if "--engine-args" in words]
    pairs = parse_engine_args([text for text in given if not text.endswith(".toml")])
    assert pairs["gpu_memory_utilization"] == 0.8
    assert pairs["hf_overrides"] == {"rope_theta": 1e6}


@pytest.mark.parametrize("text", ["a='1", 'a="1', "a=1\\"])
def test_unclosed_quotes_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="^engine_args: .* cannot be read: No "):
        parse_engine_args([text])


KNOWN = {"tp_size", "max_num_seqs", "enforce_eager", "tokenizer", "seed"}
REFUSED = {"tokenizer": "prompts are token ids", "model": "it is the MODEL of the command"}


@pytest.mark.parametrize(
    "given", [{}, {"seed": 1, "tp_size": 1}, {"seed": None, "max_num_seqs": "any", "enforce_eager": []}]
)
def test_known_options_pass(given: dict[str, Any]) -> None:
    check_engine_args(given, KNOWN, REFUSED, "Engine 1.2")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_num_seq", "max_num_seqs"), ("max-num-seqs", "max_num_seqs"), ("enforce_eger", "enforce_eager")],
)
def test_an_unknown_option_is_refused_with_a_similar_known_one(name: str, meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_engine_args({"seed": 1, name: 4}, KNOWN, REFUSED, "Engine 1.2")
    assert str(caught.value) == f"engine_args: Engine 1.2 has no option {name!r}; did you mean {meant!r}?"


def test_an_unknown_option_without_a_similar_one_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        check_engine_args({"colour": "red"}, KNOWN, REFUSED, "Engine 1.2")
    assert str(caught.value) == "engine_args: Engine 1.2 has no option 'colour'"


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_backend_sets_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_engine_args({name: "x"}, KNOWN, REFUSED, "Engine 1.2")
    assert str(caught.value) == f"engine_args: {name} cannot be set here: {REFUSED[name]}"
