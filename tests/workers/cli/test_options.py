"""Settings, options and addresses: malformed values are refused with their names, and no message shows a password."""

from __future__ import annotations

import inspect
import re
import traceback
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import redis as redis_sync
import redis.asyncio as redis_async
import redis.exceptions as redis_errors
import typer.models
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmpool.broker.server import URL_VARIABLE, Server, mask
from lmpool.errors import (
    AuthenticationFailed,
    LMPoolError,
    ProtocolError,
    ServerError,
    ServerUnreachable,
    SettingsError,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.backends.settings import HfSettings, VllmSettings
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.cli.commands import _backends, _configure, build, option_parameters, parse_size
from lmpool.workers.cli.supervisor import as_arguments
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie import TrieSettings
from tests.support.pool import run_lmpool

SECRET = "hunter2"
ALL = {"every worker": WorkerSettings, "hf backend": HfSettings, "synthetic backend": SyntheticSettings}


@pytest.fixture(autouse=True)
def no_server_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(tmp_path / "none"))


# Options from settings classes


@dataclass(frozen=True)
class Kettle:
    """A settings class in which some fields have no help text."""

    litres: float = field(default=1.5, metadata={"help": "Capacity in litres."})
    name: str = field(default="", metadata={"help": "Name of the kettle."})
    whistles: bool = False
    colour: str | None = field(default=None, metadata={"help": ""})
    cups: int = 4


def option(parameter: inspect.Parameter) -> tuple[Any, typer.models.OptionInfo]:
    kind, info = get_args(parameter.annotation)
    return kind, info


def test_each_field_becomes_one_optional_keyword_with_its_description() -> None:
    options = {parameter.name: parameter for parameter in option_parameters({"kitchen": Kettle}, set())}
    assert list(options) == ["litres", "name", "whistles", "colour", "cups"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in options.values())
    assert all(parameter.default is None for parameter in options.values())
    kinds = {name: option(parameter)[0] for name, parameter in options.items()}
    assert kinds == {
        "litres": float | None,
        "name": str | None,
        "whistles": bool,
        "colour": str | None,
        "cups": int | None,
    }
    texts = {name: option(parameter)[1].help for name, parameter in options.items()}
    assert texts == {
        "litres": "Capacity in litres. (default: 1.5)",
        "name": "Name of the kettle.",
        "whistles": "",
        "colour": "",
        "cups": "(default: 4)",
    }
    assert {option(parameter)[1].rich_help_panel for parameter in options.values()} == {"Options: kitchen"}


def test_a_field_of_several_classes_is_one_option_and_some_are_excluded() -> None:
    options = [parameter.name for parameter in option_parameters(ALL, {"model"})]
    assert len(options) == len(set(options))
    every = {field.name for kind in ALL.values() for field in fields(kind)}
    assert set(options) == every - {"model"}
    shared = next(p for p in option_parameters(ALL, {"model"}) if p.name == "max_batch")
    assert option(shared)[1].rich_help_panel == "Options: hf backend, synthetic backend"
    assert str(option(shared)[1].help).endswith("(default: 64 for hf backend; 32 for synthetic backend)")


def test_inherited_fields_become_options() -> None:
    options = {p.name: str(option(p)[1].help) for p in option_parameters({"vllm": VllmSettings}, {"model"})}
    assert set(options) == {field.name for field in fields(VllmSettings)} - {"model"}
    assert options["sessions"].startswith("Growing prompts")
    assert options["max_batch"].startswith("Prompts that run together. (default: 256)")
    assert options["adapters"].startswith("LoRA adapters, as name=folder; may be given several times.")


@pytest.mark.parametrize("kind", [WorkerSettings, TrieSettings, *_backends().values()])
def test_every_setting_is_described(kind: type) -> None:
    for parameter in option_parameters({"x": kind}, set()):
        assert len(str(option(parameter)[1].help)) > 10


def test_the_first_that_describes_a_setting_describes_the_option() -> None:
    @dataclass(frozen=True)
    class Pot:
        whistles: bool = field(default=False, metadata={"help": "Whether it whistles."})

    options = {p.name: option(p)[1].help for p in option_parameters({"kettle": Kettle, "pot": Pot}, set())}
    assert options["whistles"] == "Whether it whistles."


def test_a_numeric_default_of_zero_is_shown() -> None:
    helps = {p.name: str(option(p)[1].help) for p in option_parameters({"x": SyntheticSettings}, set())}
    assert helps["seed"].endswith("(default: 0)")
    assert helps["step_ms"].endswith("(default: 0.0)")


def test_settings_are_built_from_given_values_and_defaults() -> None:
    assert build(WorkerSettings, {}, "workers") == WorkerSettings()
    assert build(WorkerSettings, {"lease_s": 3.0}, "workers") == WorkerSettings(lease_s=3.0)


def test_an_option_of_another_class_is_refused_with_its_name_and_the_class() -> None:
    for kind, name in ((WorkerSettings, "vocab_size"), (SyntheticSettings, "kv_cache_bytes"), (Kettle, "Litres")):
        with pytest.raises(SettingsError, match=f"^{name}: .* of my class"):
            build(kind, {name: 1}, "my class")


def test_a_malformed_value_is_refused_while_building() -> None:
    with pytest.raises(SettingsError, match=r"^lease_s: 0 .* from 0\.1 to 3600"):
        build(WorkerSettings, {"lease_s": 0}, "workers")


# The settings of every worker

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prefix", value) for value in ("", "a{b}", "a\nb", "a\0b", "p" * 201, None, 5, b"lmpool")),
        *(("lease_s", value) for value in (0, 0.09, -1, 3601, NAN, INF, -INF, "15", None, True)),
        *(("step_timeout_s", value) for value in (0, 0.09, -1, NAN, INF, "15", None, True)),
        *(("max_deliveries", value) for value in (0, -1, 1001, 2.0, NAN, "3", None, True)),
        *(("queue_limit", value) for value in (0, -5, 1e5, INF, "9", None, False)),
        *(("row_ttl_s", value) for value in (0, 0.5, -1, NAN, "60", None, True)),
        *(("log_every_s", value) for value in (0, -1, NAN, "60", None, True)),
    ],
)
def test_a_malformed_worker_setting_is_refused_with_its_name_and_value(field: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        WorkerSettings(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{field}: {value!r} ")


@pytest.mark.parametrize(
    ("field", "value"),
    [("row_ttl_s", INF), ("row_ttl_s", 1e300), ("queue_limit", 2**64)],
)
def test_a_worker_setting_beyond_the_range_of_redis_is_refused(field: str, value: object) -> None:
    # Values beyond these limits cannot be stored: Redis takes milliseconds as int64, the model info takes uint64.
    with pytest.raises(SettingsError, match=field):
        WorkerSettings(**{field: value})  # type: ignore[arg-type]


def test_the_heartbeat_is_frequent_enough_to_miss_two() -> None:
    for lease in (0.1, 15.0, 3600):
        assert 3 * WorkerSettings(lease_s=lease).heartbeat_s < lease


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        WorkerSettings().prefix = "x"  # type: ignore[misc]


# The producer's arguments


@pytest.mark.parametrize("make", [Producer, SyncProducer])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", value) for value in ("", "a{b", "a\nb", "m" * 201, 5, b"m", ["m"])),
        *(("prefix", value) for value in ("", "a}b", "a\rb", None, 5, b"lmpool")),
        *(("timeout", value) for value in (0, -1, 0.0, NAN, INF, 1e9, "60", None, True)),
        *(("cache_bytes", value) for value in (-1, 1.5, "9", None, True)),
        *(("redis", value) for value in (5, b"redis://h", ["redis://h"], object(), ("h", 6379))),
    ],
)
def test_a_malformed_argument_is_refused_with_its_name(make: Any, field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{field}: "):
        make(**{field: value})


def test_a_name_that_is_not_utf8_is_refused() -> None:
    # "\udc80" stands for a byte of a command line that is not UTF-8; a Redis key cannot contain it.
    for name in ("model", "prefix"):
        with pytest.raises(SettingsError, match=f"^{name}: "):
            Producer(**{name: "a\udc80"})  # type: ignore[arg-type]


def test_an_unknown_argument_is_an_error() -> None:
    for make in (Producer, SyncProducer):
        with pytest.raises(TypeError, match="colour"):
            make(colour="red")  # type: ignore[call-arg]


def test_numbers_of_numpy_are_good_timeouts() -> None:
    assert isinstance(Producer(timeout=np.float64(1.5)), Producer)
    assert isinstance(Producer(timeout=1), Producer)


async def test_a_timeout_of_one_call_is_checked_before_anything_is_sent() -> None:
    producer = Producer(redis="redis://localhost:1")
    for call in (producer.logprobs, producer.batch_logprobs):
        for value in (0, -1, NAN, "5", True):
            with pytest.raises(SettingsError, match="^timeout: "):
                await call([1], timeout=value)  # type: ignore[arg-type]


async def test_the_model_info_is_available_only_after_connecting() -> None:
    with pytest.raises(LMPoolError, match="not connected"):
        _ = Producer().model


# Addresses

BAD_URLS = [
    "http://h",
    "localhost",
    "localhost:6379",
    "h",
    "://h",
    "valkey://h",
    "REDIS",
    "redis//h",
    "redis:h",
    "redis:/h",
    "redis://h:port",
    "redis://h:99999",
    "redis://h?db=x",
    "redis://h?colour=red",
    "redis://h?max_connections=many",
    "redis://[::1",
    "redis://h?protocol=4",
    "rediss://h?ssl_cert_reqs=maybe",
    "redis://h/no-number",
    "unix://",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_malformed_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(SettingsError, match="^redis: "):
        Server(url)


async def test_a_producer_refuses_a_malformed_address_when_it_connects() -> None:
    for url in ("http://h", "redis://h:port"):
        with pytest.raises(SettingsError, match="^redis: "):
            await Producer(redis=url).open()
        with pytest.raises(SettingsError, match="^redis: "):
            SyncProducer(redis=url)


def test_the_address_comes_from_the_environment_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "redis://elsewhere:7000")
    assert str(Server()) == "redis://elsewhere:7000"
    assert str(Server("redis://here")) == "redis://here:6379"


def test_an_empty_address_is_not_the_same_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # An empty URL, such as from `--redis "$UNSET"`, must be refused: another server could be used by mistake.
    monkeypatch.setenv(URL_VARIABLE, "redis://elsewhere:7000")
    for make in (Server, lambda url: SyncProducer(redis=url)):
        with pytest.raises(SettingsError, match="^redis: ''"):
            make("")


def test_without_an_address_the_error_names_the_remedy() -> None:
    with pytest.raises(ServerUnreachable, match=f"lmpool up.*{URL_VARIABLE}"):
        Server()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://", "redis://localhost:6379"),
        ("redis://h", "redis://h:6379"),
        ("redis://h:7000/3", "redis://h:7000"),
        (f"redis://user:{SECRET}@h:7000", "redis://h:7000"),
        (f"redis://:{SECRET}@h", "redis://h:6379"),
        (f"redis://h?password={SECRET}", "redis://h:6379"),
        (f"rediss://user:{SECRET}@h", "rediss://h:6379"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
        (f"unix://user:{SECRET}@/run/r.sock?db=2", "unix:///run/r.sock"),
    ],
)
def test_an_address_is_shown_without_user_and_password(url: str, shown: str) -> None:
    assert str(Server(url)) == shown
    assert repr(Server(url)) == f"Server({shown!r})"


CLIENTS: dict[str, tuple[Any, str]] = {
    "sync": (redis_sync.Redis(host="h", port=7, username="u", password=SECRET, db=3), "redis://h:7"),
    "asyncio": (redis_async.Redis(host="h", port=7, username="u", password=SECRET, db=3), "redis://h:7"),
    "sync url": (redis_sync.Redis.from_url(f"redis://u:{SECRET}@h:7/3"), "redis://h:7"),
    "asyncio url": (redis_async.Redis.from_url(f"redis://u:{SECRET}@h:7/3"), "redis://h:7"),
    "sync socket": (
        redis_sync.Redis(unix_socket_path="/r.sock", username="u", password=SECRET, db=3),
        "unix:///r.sock",
    ),
    "asyncio socket": (
        redis_async.Redis(unix_socket_path="/r.sock", username="u", password=SECRET, db=3),
        "unix:///r.sock",
    ),
    "sync TLS": (redis_sync.Redis(host="h", ssl=True, username="u", password=SECRET, db=3), "rediss://h:6379"),
    "asyncio TLS": (redis_async.Redis(host="h", ssl=True, username="u", password=SECRET, db=3), "rediss://h:6379"),
    "decoding": (redis_async.Redis(host="h", username="u", password=SECRET, db=3, decode_responses=True), "redis://h"),
    "RESP3": (redis_sync.Redis(host="h", username="u", password=SECRET, db=3, protocol=3), "redis://h:6379"),
}


@pytest.mark.parametrize(("client", "shown"), CLIENTS.values(), ids=CLIENTS)
def test_address_and_credentials_are_taken_over_from_a_client(client: Any, shown: str) -> None:
    server = Server(client)
    assert str(server).startswith(shown)
    made = server.client()
    assert made is not client
    assert isinstance(made, redis_async.Redis)
    connection = made.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    assert (connection.username, connection.password, connection.db) == ("u", SECRET, 3)
    assert not made.connection_pool.connection_kwargs.get("decode_responses")


def test_a_client_that_checks_ocsp_is_refused_and_not_quietly_trusted_less() -> None:
    with pytest.raises(SettingsError, match=r"^redis: .*ssl_validate_ocsp"):
        Server(redis_sync.Redis(host="h", ssl=True, ssl_validate_ocsp=True))


def test_our_clients_do_not_retry_by_themselves() -> None:
    made = Server(redis_sync.Redis(host="h", retry=Retry(NoBackoff(), 5))).client()
    connection = made.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    assert connection.retry._retries == 0


# Passwords

LEAKS = [
    f"http://user:{SECRET}@h",
    f"http://h?password={SECRET}",
    f"user:{SECRET}@localhost:6379",
    f":{SECRET}@localhost",
    f"redis:user:{SECRET}@h",
    f"redis://user:{SECRET}@h:port",
    f"redis://user:{SECRET}@h:99999",
    f"redis://user:{SECRET}@h?db=x",
    f"redis://user:{SECRET}@h?colour=red",
    f"redis://h?password={SECRET}&db=x",
    f"unix:///r.sock?password={SECRET}&db=x",
    f"redis://:{SECRET}/with-a-slash@h",
    f"redis://:{SECRET}#with-a-hash@h",
    f"redis://:{SECRET}?with-a-question@h",
    f"redis://:{SECRET}@with-an-at@h:port",
    f"redis://user:{SECRET}@[::1",
]


@pytest.mark.parametrize("url", LEAKS)
def test_no_error_contains_the_password(url: str) -> None:
    # Accept any exception: another test checks its type.
    with pytest.raises(Exception) as caught:  # noqa: PT011
        Server(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value)), "a traceback shows the causes too"


@pytest.mark.parametrize("url", [f"redis://user:{SECRET}@h:7", f"unix://user:{SECRET}@/r.sock"])
def test_no_text_of_a_server_or_a_producer_contains_the_password(url: str) -> None:
    server, producer = Server(url), Producer("m", redis=url)
    texts = [str(server), repr(server), str(producer), repr(producer), f"{server!r} {producer!s}"]
    assert not any(SECRET in text for text in texts)
    for error in (OSError("refused"), redis_errors.AuthenticationError("WRONGPASS no"), redis_errors.RedisError("x")):
        assert SECRET not in str(server.explain(error))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}", "redis://:…"),
        (f"redis://h?password=a@{SECRET}", "redis://…"),
        (f"redis://h?password={SECRET}", "redis://h?…"),
        (f"user:{SECRET}://x@h", "…@h"),
        (f"redis://user:{SECRET}@[::1]:7", "redis://…@[::1]:7"),
    ],
)
def test_possible_passwords_are_masked(url: str, shown: str) -> None:
    assert mask(url) == shown


def test_a_masked_url_keeps_its_other_parts() -> None:
    assert mask(f"redis://user:{SECRET}@h:7/3") == "redis://…@h:7/3"
    assert mask("redis://h:7/3") == "redis://h:7/3"


# Errors of the Redis server become exceptions of lmpool


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(111, "refused"), ServerUnreachable),
        (redis_errors.ConnectionError("Error 111"), ServerUnreachable),
        (redis_errors.TimeoutError("Timeout"), ServerUnreachable),
        (redis_errors.BusyLoadingError("LOADING"), ServerUnreachable),
        (TimeoutError(), ServerUnreachable),
        (redis_errors.AuthenticationError("invalid username-password pair"), AuthenticationFailed),
        (redis_errors.NoPermissionError("NOPERM this user"), AuthenticationFailed),
        (redis_errors.ResponseError("NOAUTH Authentication required."), AuthenticationFailed),
        (redis_errors.ResponseError("WRONGPASS invalid"), AuthenticationFailed),
        (redis_errors.ResponseError("OOM command not allowed"), ServerError),
        (redis_errors.ReadOnlyError("READONLY"), ServerError),
    ],
)
def test_every_error_of_the_server_has_its_exception(error: Exception, kind: type[ServerError]) -> None:
    explained = Server("redis://h:7").explain(error)
    assert type(explained) is kind
    assert "redis://h:7" in str(explained)
    assert str(error).splitlines()[:1] == [] or str(error).splitlines()[0] in str(explained)


def test_lmpool_exceptions_are_not_translated() -> None:
    error = ProtocolError("x")
    assert Server("redis://h").explain(error) is error


def test_every_good_worker_setting_fits_in_an_info() -> None:
    for settings in (
        WorkerSettings(lease_s=0.1, queue_limit=1, row_ttl_s=1),
        WorkerSettings(lease_s=3600, queue_limit=2**31, row_ttl_s=1e9),
    ):
        info = ModelInfo("m", "synthetic", 1, 1, "r", "float32", queue_limit=settings.queue_limit,
                         lease_s=settings.lease_s, row_ttl_s=settings.row_ttl_s)  # fmt: skip
        assert ModelInfo.unpack(info.pack()) == info


# From the command line to settings


def test_a_zero_that_was_given_is_a_value() -> None:
    _, chosen = _configure("somewhere", "hf", {"kv_cache_bytes": 0, "trust_remote_code": False, "revision": None})
    assert isinstance(chosen, HfSettings)
    assert chosen == HfSettings("somewhere", kv_cache_bytes=0)


def test_a_name_of_a_version_is_refused_for_workers_and_accepted_for_clients(tmp_path: Path) -> None:
    (folder := tmp_path / "llama@12").mkdir()
    for name in ("", "x@", "x@0"):
        with pytest.raises(SettingsError, match="name: '.*' must not end with @ or with @ and a number"):
            HfSettings(str(folder), name)
    assert HfSettings(str(folder), "user@host").served_as == "user@host"
    assert Producer("llama@12")._model == "llama@12"


def test_the_model_argument_names_models_without_weights() -> None:
    _, chosen = _configure("some-name", "synthetic", {})
    assert chosen == SyntheticSettings(name="some-name")


def test_backends_are_found_by_entry_point_and_built_in_ones_are_first() -> None:
    assert list(_backends())[:4] == ["hf", "vllm", "sglang", "synthetic"]
    with pytest.raises(SettingsError, match=r"^backend: 'tgi' is not one of hf, vllm, sglang, synthetic"):
        _configure("m", "tgi", {})


# How options are written


def test_sizes_have_units() -> None:
    sizes = {"4096": 4096, "128k": 128_000, "8g": 8 * 10**9, "8G": 2**33, "8GiB": 2**33, "8GB": 8 * 10**9,
             "1.5k": 1500, " 2 Ki": 2048, "0": 0, "-1": -1}  # fmt: skip
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "k", "1.5", "8x", "1e3", "0x10", "8 g b"):
        with pytest.raises(Exception, match="is no size|is no whole number"):
            parse_size(text)


def test_options_are_passed_on_to_workers() -> None:
    options = {"backend": "hf", "with_trie": True, "adapters": ["a=b", "c=d"], "seed": -1}
    assert as_arguments(options) == ["--backend=hf", "--with-trie", "--adapters=a=b", "--adapters=c=d", "--seed=-1"]


def test_options_have_aliases_of_vllm_and_errors_name_the_given_one(tmp_path: Path) -> None:
    model = str(tmp_path / "nowhere")
    for option, value in (("--served-model-name", "a{b"), ("--max-num-seqs", "0"), ("--max-model-len", "0")):
        ended = run_lmpool("worker", model, option, value)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"lmpool: {option}: "), ended.stderr
    ended = run_lmpool("worker", "syn", "--backend", "synthetic", "--max-model-len", "many")
    assert "'many' is no size: write 4096, 128k" in ended.stderr


def test_the_help_is_short_and_help_all_shows_all_options() -> None:
    short, whole = (run_lmpool("up", option, COLUMNS="200").stdout for option in ("--help", "--help-all"))
    options = [set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) for text in (short, whole)]
    assert {"--workers", "--detach", "--dtype", "--max-model-len", "--kv-cache-bytes", "--help-all"} <= options[0]
    assert len([line for line in short.splitlines() if re.match(r"│ --", line)]) <= 14
    assert {"--lease-s", "--memory-mb", "--vocab-size"} <= options[1] - options[0]
