"""The package's code imports only allowed modules, obeys the project's rules, and exports exactly the public names."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.structure import import_cycles, import_graph, modules

import lmpool.producer
from lmpool import errors
from lmpool.broker import scripts

ROOT = Path(__file__).resolve().parents[2]
SHARED, PRODUCER, WORKERS, TESTING = ROOT / "shared", ROOT / "producer", ROOT / "workers", ROOT / "testing"
BACKENDS = WORKERS / "lmpool/workers/backends"
# Packages that only the files of one backend may import.
ENGINES = {
    "hf": {"torch", "transformers", "peft", "safetensors", "accelerate", "torchao"},
    "vllm": {"torch", "vllm", "pydantic", "safetensors"},
    "sglang": {"torch", "sglang", "tqdm", "safetensors"},
    "row_encoder.py": {"torch"},
    "output_head.py": {"torch"},
    "lora.py": {"torch", "safetensors"},
    "settings.py": {"packaging"},
    "checkpoint.py": {"huggingface_hub", "torch"},
    "tokenizer.py": {"transformers"},
}
# File outside the backends -> packages of engines that this file may import.
FILES_WITH_MORE = {
    "shared/lmpool/trie/cpu.py": {"numba"},
    "shared/lmpool/trie/torch_device.py": {"torch"},
    "producer/lmpool/distill/gradients.py": {"torch"},
    "producer/lmpool/producer/genlm/tries.py": {"genlm"},
    "producer/lmpool/producer/genlm/language_model.py": {"torch", "genlm"},
}
# Folder or file -> parts of the package that it may import in addition to itself. The name of a folder stands for all
# files below the folder that do not belong to another name of the table.
SHARED_UNITS = {
    "lmpool",
    *(f"lmpool.{name}" for name in ("errors", "settings", "protocol", "broker", "rows", "trie")),
}
WORKER_UNITS = {
    f"lmpool.workers.{name}"
    for name in ("settings", "execution", "metrics", "queue", "membership", "membership.partitions", "trie")
}
ENGINE_FOLDERS = {f"lmpool.workers.backends.{name}" for name in ("hf", "vllm", "sglang")}
MAY_IMPORT: dict[str, set[str]] = {
    "lmpool.errors": set(),
    "lmpool.settings": {"lmpool.errors"},
    "lmpool.protocol": {"lmpool.errors", "lmpool.settings"},
    "lmpool": {"lmpool.errors", "lmpool.settings", "lmpool.protocol"},
    "lmpool.broker": {"lmpool", "lmpool.errors", "lmpool.settings", "lmpool.protocol"},
    "lmpool.rows": {"lmpool", "lmpool.errors", "lmpool.settings", "lmpool.protocol", "lmpool.broker"},
    "lmpool.trie": {"lmpool", "lmpool.errors", "lmpool.settings", "lmpool.protocol"},
    "lmpool.producer.metrics": SHARED_UNITS,
    "lmpool.producer.client": SHARED_UNITS | {"lmpool.producer.metrics"},
    "lmpool.producer": SHARED_UNITS | {"lmpool.producer.metrics", "lmpool.producer.client"},
    "lmpool.producer.cli": SHARED_UNITS
    | {"lmpool.producer.metrics", "lmpool.producer.client", "lmpool.producer", "lmpool.admin"},
    "lmpool.producer.genlm": SHARED_UNITS | {"lmpool.producer.metrics", "lmpool.producer.client", "lmpool.producer"},
    # lmpool.batch sends the requests of whole files, and may import the producer as a user's program does.
    "lmpool.batch": SHARED_UNITS | {"lmpool.producer"},
    "lmpool.batch.cli": SHARED_UNITS | {"lmpool.producer", "lmpool.producer.cli", "lmpool.batch"},
    "lmpool.admin": SHARED_UNITS | {"lmpool.producer.client"},
    "lmpool.web": SHARED_UNITS | {"lmpool.producer", "lmpool.producer.cli", "lmpool.producer.client", "lmpool.admin"},
    # lmpool.distill computes with arrays that a producer has returned, and sends no requests.
    "lmpool.distill": SHARED_UNITS,
    # The gateway is a second web service: it shares the server and the open models with the first.
    "lmpool.http": SHARED_UNITS | {"lmpool.producer", "lmpool.producer.client", "lmpool.web"},
    "lmpool.http.dialects": SHARED_UNITS | {"lmpool.http", "lmpool.web"},
    "lmpool.http.app": SHARED_UNITS | {"lmpool.producer.metrics", "lmpool.web", "lmpool.http", "lmpool.http.dialects"},
    "lmpool.http.cli": SHARED_UNITS | {"lmpool.producer.cli", "lmpool.http", "lmpool.http.app"},
    # lmpool.lm_eval sends the requests of lm-evaluation-harness, and may import the producer as a user's program does.
    "lmpool.lm_eval": SHARED_UNITS | {"lmpool.producer"},
    "lmpool.workers.settings": SHARED_UNITS,
    "lmpool.workers.execution": SHARED_UNITS,
    "lmpool.workers.metrics": SHARED_UNITS | {"lmpool.workers.execution", "lmpool.workers.settings"},
    **dict.fromkeys(
        ("lmpool.workers.queue", "lmpool.workers.trie"),
        SHARED_UNITS | {"lmpool.workers.execution", "lmpool.workers.metrics", "lmpool.workers.settings"},
    ),
    # lmpool.workers.membership imports the backends' folder, which has the code that reads adapters on disk.
    "lmpool.workers.membership": SHARED_UNITS
    | {"lmpool.workers.execution", "lmpool.workers.backends", "lmpool.workers.metrics", "lmpool.workers.settings"},
    # A worker that moves to another partition changes its registration and the streams that it reads.
    "lmpool.workers.membership.partitions": SHARED_UNITS | {"lmpool.workers.queue", "lmpool.workers.membership"},
    "lmpool.workers": SHARED_UNITS | WORKER_UNITS,
    # The command line imports the backends' folder, which has the code that detects folders of models.
    "lmpool.workers.cli": SHARED_UNITS | WORKER_UNITS | {"lmpool.workers", "lmpool.workers.backends"},
    "lmpool.workers.backends": SHARED_UNITS | {"lmpool.workers.execution"},
    **dict.fromkeys(ENGINE_FOLDERS, SHARED_UNITS | {"lmpool.workers.execution", "lmpool.workers.backends"}),
    "lmpool.testing": SHARED_UNITS | WORKER_UNITS | {"lmpool.workers", "lmpool.workers.backends"},
    "lmpool.pytest_plugin": {"lmpool.testing"},
}
# Modules with test helpers for users, which the code of workers and clients may not import.
FOR_TESTS = ("testing", "pytest_plugin")
HF = BACKENDS / "hf"
LUA = SHARED / "lmpool/broker/lua"
FILES = sorted(path for part in (SHARED, PRODUCER, WORKERS, TESTING) for path in part.rglob("*.py"))
TREES = {path: ast.parse(path.read_text("utf-8"), str(path)) for path in FILES}

LOADERS_OF_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm", "code",
                   "jsonpickle", "yaml", "runpy", "imp"}  # fmt: skip
HEAVY = {"torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "gguf", "vllm", "sglang", "numba"}


def within(folder: Path) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(folder)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """The modules that a file imports in any place, each with the import statement.

    `from a import b` counts as `a` and as `a.b`, because b may be a module.
    """
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            module = node.module or ""
            yield module, node
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def allowed_in(path: Path) -> set[str]:
    """The packages of engines that a file may import: packages of its backend, or packages that compile a kernel."""
    if path.is_relative_to(BACKENDS):
        return ENGINES.get(path.relative_to(BACKENDS).parts[0], set())
    return FILES_WITH_MORE.get(name_of(path), set())


def third_party(path: Path) -> set[str]:
    tops = {module.partition(".")[0] for module, _ in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"lmpool", "__future__"}


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """Every string or bytes literal of a file, parts of f-strings included, docstrings excluded."""
    docstrings = {
        id(node.value)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if isinstance(node.value, str):
                yield node.value, node.lineno
            elif isinstance(node.value, bytes):
                yield node.value.decode("latin-1"), node.lineno


def test_the_parts_are_there() -> None:
    assert all(len(within(part)) >= 4 for part in (SHARED, PRODUCER, WORKERS, TESTING))
    # Only the shared part has lmpool/__init__.py, which joins the four parts to one package.
    owners = [part for part in (SHARED, PRODUCER, WORKERS, TESTING) if (part / "lmpool/__init__.py").exists()]
    assert owners == [SHARED]


# Allowed imports of each part


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        (SHARED, ("producer", "workers", *FOR_TESTS)),
        (PRODUCER, ("workers", *FOR_TESTS)),
        (WORKERS, ("producer", *FOR_TESTS)),
        (TESTING, ("producer",)),
    ],
    ids=["shared", "producer", "workers", "testing"],
)
def test_no_part_imports_another_but_shared(part: Path, forbidden: tuple[str, ...]) -> None:
    """Each part imports only itself and the shared part; the test helpers for users may also import the workers."""
    prefixes = tuple(f"lmpool.{name}" for name in forbidden)
    violations = [
        f"{name_of(path)}:{node.lineno}: {module}"
        for path in within(part)
        for module, node in imports(path)
        if f"{module}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
    ]
    assert violations == []


def test_no_part_reaches_another_by_a_name_in_a_string() -> None:
    violations = [
        f"{name_of(path)}:{line}: {text}"
        for part, other in (
            (SHARED, "producer|workers|testing"),
            (PRODUCER, "workers|testing"),
            (WORKERS, "producer|testing"),
        )
        for path in within(part)
        for text, line in strings(path)
        if re.search(rf"\blmpool\.({other})\b", text)
    ]
    assert violations == []


def unit_of(module: str) -> str:
    """The folder or file of `MAY_IMPORT` that a module belongs to."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


def test_each_folder_imports_only_what_lies_below_it() -> None:
    strays = {
        (name, imported)
        for name, all_imported in import_graph(ROOT).items()
        for imported in all_imported
        if unit_of(imported) not in MAY_IMPORT[unit_of(name)] | {unit_of(name)}
    }
    assert strays == set()


def test_the_table_of_layers_names_every_folder_and_has_no_circle() -> None:
    folders = {name for name, path in modules(ROOT).items() if path.name == "__init__.py"}
    assert folders <= MAY_IMPORT.keys()
    assert MAY_IMPORT.keys() <= modules(ROOT).keys()
    assert import_cycles(MAY_IMPORT) == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    """No chain of imports leads from a file back to it; imports inside functions and imports for types count too."""
    assert import_cycles(import_graph(ROOT)) == []


def test_only_backends_import_an_engine() -> None:
    """Files outside the backends do not import an engine; the exception is tokenizer.py, inside a function."""
    importers = {
        (name_of(path), module.partition(".")[0])
        for path in FILES
        for module, _ in imports(path)
        if module.partition(".")[0] in HEAVY - allowed_in(path)
    }
    texts = "producer/lmpool/producer/tokenizer.py"
    tensors = "producer/lmpool/producer/client/versions.py"  # Inside a function: it encodes tensors of the caller.
    assert importers == {(texts, "transformers"), (texts, "tokenizers"), (tensors, "safetensors")}
    tokenizer = ROOT / texts
    top_level = [node for node in TREES[tokenizer].body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [node for module, node in imports(tokenizer) if module.partition(".")[0] in HEAVY and node in top_level]


def test_each_part_needs_no_more_than_it_says() -> None:
    """Only listed files import more than numpy, redis with its hiredis, msgpack and msgspec."""
    small = {"numpy", "redis", "hiredis", "msgpack", "msgspec"}
    extra = {
        "shared/lmpool/cli.py": {"typer", "rich"},
        "producer/lmpool/producer/cli/options.py": {"typer", "uvloop"},
        "producer/lmpool/producer/cli/commands.py": {"typer", "rich"},
        "producer/lmpool/producer/cli/queues.py": {"typer", "rich"},
        "producer/lmpool/producer/cli/status.py": {"typer", "rich"},
        "producer/lmpool/producer/cli/trie_show.py": {"typer", "rich"},
        "producer/lmpool/producer/tokenizer.py": {"tokenizers", "transformers"},
        "producer/lmpool/producer/client/versions.py": {"safetensors"},
        "shared/lmpool/broker/bucket.py": {"fsspec", "aiohttp"},
        "producer/lmpool/batch/cli.py": {"typer"},
        "producer/lmpool/batch/run.py": {"rich"},
        # Inside functions, batch code imports packages for jobs, for Parquet files, for URLs and for zstd.
        "producer/lmpool/batch/jobs.py": {"arq"},
        "producer/lmpool/http/app.py": {"starlette", "prometheus_client"},
        "producer/lmpool/http/cli.py": {"typer"},
        "producer/lmpool/http/errors.py": {"starlette"},
        "producer/lmpool/http/limits.py": {"starlette"},
        "producer/lmpool/http/models.py": {"huggingface_hub", "starlette"},
        "producer/lmpool/http/arrays.py": {"pyarrow"},
        **{
            f"producer/lmpool/http/dialects/{name}.py": {"starlette"}
            for name in ("generate", "native", "openai", "sglang", "trl")
        },
        "producer/lmpool/web/app.py": {"starlette"},
        "producer/lmpool/web/server.py": {"starlette", "uvicorn", "h11"},
        "producer/lmpool/web/cli.py": {"typer"},
        "producer/lmpool/web/explorer.py": {"starlette"},
        "producer/lmpool/web/guard.py": {"starlette"},
        "producer/lmpool/batch/fetch.py": {"fsspec", "pyarrow"},
        "producer/lmpool/lm_eval.py": {"lm_eval", "jinja2", "tqdm"},
        "workers/lmpool/workers/cli/commands.py": {"typer"},
        "workers/lmpool/workers/cli/verify.py": {"rich"},
        "workers/lmpool/workers/cli/doctor.py": {"typer", "rich", "packaging"},
        "workers/lmpool/workers/cli/supervisor.py": {"typer"},
        # Inside functions, these files import packages for metrics, traces or JSON logs.
        "shared/lmpool/metrics.py": {"prometheus_client", "opentelemetry"},
        "producer/lmpool/producer/metrics.py": {"opentelemetry"},
        "workers/lmpool/workers/metrics/tracing.py": {"opentelemetry"},
        "workers/lmpool/workers/metrics/counters.py": {"prometheus_client"},
        "workers/lmpool/workers/cli/serve.py": {"pythonjsonlogger", "uvloop"},
        "testing/lmpool/pytest_plugin.py": {"pytest"},
        "testing/lmpool/testing/front.py": {"fakeredis"},
    }
    unlisted = {
        name_of(path): more
        for path in FILES
        if (more := third_party(path) - small - extra.get(name_of(path), set()) - allowed_in(path))
    }
    assert unlisted == {}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_client_brings_in_no_engine_and_no_command_line() -> None:
    unwanted = HEAVY | {"typer", "rich", "click", "uvloop"}
    for module in ("producer", "batch", "distill", "synthetic", "embedded", "trie.kernels"):
        assert loaded_after(f"import lmpool.{module}") & unwanted == set()
    modules = "import lmpool.producer, sys; assert not [m for m in sys.modules if m.startswith('lmpool.workers')]"
    loaded_after(modules)


def test_evaluating_needs_no_torch() -> None:
    assert loaded_after("import lmpool.lm_eval") & HEAVY == set()


def test_importing_the_worker_and_its_commands_brings_in_no_engine() -> None:
    for statement in ("import lmpool.workers.worker", "import lmpool.workers.cli.commands"):
        assert loaded_after(statement) & HEAVY == set()


def test_what_users_test_with_costs_nothing_until_it_is_used() -> None:
    """Every pytest run with lmpool installed loads the plugin, so the plugin and the test helpers import little."""
    more = loaded_after("import lmpool.pytest_plugin") - loaded_after("import pytest")
    assert more == {"lmpool", "pkgutil"}  # pkgutil joins the parts of the package.
    assert loaded_after("import lmpool.testing") & (HEAVY | {"fakeredis", "lupa", "pytest", "uvloop"}) == set()


def test_the_list_of_what_is_loaded_would_show_an_engine() -> None:
    assert {"typer", "rich"} <= loaded_after("import lmpool.producer.cli.commands")


# The code uses no data format that can run code


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    violations = []
    for path in FILES:
        violations += [
            f"{name_of(path)}:{node.lineno}: import {module}"
            for module, node in imports(path)
            if module.partition(".")[0] in LOADERS_OF_CODE
        ]
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Name) and node.id in {"eval", "exec", "compile", "__import__", "builtins"}:
                violations.append(f"{name_of(path)}:{node.lineno}: {node.id}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                violations.append(f"{name_of(path)}:{node.value.lineno}: allow_pickle")
            elif isinstance(node, ast.keyword) and node.arg == "shell":
                violations.append(f"{name_of(path)}:{node.value.lineno}: shell")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "np.load", "os.system"}:
                violations.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert violations == []


def test_commands_print_by_the_terminal_alone() -> None:
    """Commands print through a module that removes control characters, which a hostile user may put into a name."""
    printing = {"print", "Console", "typer.echo", "typer.secho", "click.echo", "sys.stdout.write"}
    printers = {
        name_of(path)
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printing
    }
    assert printers == {"shared/lmpool/cli.py"}


def test_at_most_the_named_places_catch_every_exception() -> None:
    """Only listed files have an `except` for every exception, or for Exception, that does not raise again."""
    catching = []
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = "" if node.type is None else ast.unparse(node.type)
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if (node.type is None or re.search(r"\b(Base)?Exception\b", kinds)) and not raises_again:
                catching.append(name_of(path))
    # Allowed are the ends of threads and of processes, which pass errors to waiting code, the end of the command line,
    # calls that load foreign packages or use a store, numpy's parser of headers, and streams that have begun.
    allowed = {
        "shared/lmpool/cli.py",
        "shared/lmpool/broker/bucket.py",
        "producer/lmpool/batch/fetch.py",
        "producer/lmpool/http/arrays.py",
        "producer/lmpool/http/dialects/openai.py",
        "workers/lmpool/workers/cli/commands.py",
        "workers/lmpool/workers/execution/engine_thread.py",
        f"{name_of(BACKENDS)}/sglang/engine.py",
        f"{name_of(BACKENDS)}/sglang/weights.py",
        "workers/lmpool/workers/execution/ranks.py",
        f"{name_of(BACKENDS)}/vllm/ranks.py",
        "testing/lmpool/testing/memory_pool.py",
    }
    assert {name for name in catching if not name.startswith(name_of(HF))} <= allowed


# Redis keys and Lua scripts


def test_all_redis_keys_are_made_in_one_file() -> None:
    key = re.compile(r"^lmpool:\S|:(jobs|models|worker|row|dead|waiting|reply|trie)(:|$)")
    texts = {
        (name_of(path), text) for path in FILES for text, _ in strings(path) if key.search(text) and "://" not in text
    }
    assert {name for name, _ in texts} == {"shared/lmpool/protocol/keys.py"}


def test_no_script_makes_a_key_of_its_own() -> None:
    for path in LUA.glob("*/*.lua"):
        code = re.sub(r"--.*", "", path.read_text("utf-8"))
        # Only names.lua and fair_queue.lua compose the names of a queue's keys, from the name of the job stream.
        assert path.stem in {"names", "fair_queue"} or not re.search(r"""['"][^'"]*:[^'"]*['"]""", code), path.name
        for call in re.finditer(r"redis\.p?call\(\s*'(\w+)'\s*,\s*(?:unpack\()?([\w\[\]]+)", code):
            # Every key that a script uses is in KEYS, or in a variable with one of these names.
            names = "jobs|dead|waiting|ended|row|reply|adapters|reasons"
            names += "|backlog|backlog_jobs|virtual_time|capacities|sole_client|base|key|workers|deadlines|cursor"
            names += "|stream|record|recorded_at|lanes|lane_of|lane|watcher|turn"
            # strings.lua calls MSETEX with `size`, the number of keys, which the including script defines.
            names += "|size" if path.stem == "strings" else ""
            assert re.fullmatch(rf"KEYS(\[.*\])?|{names}", call[2]), call[0]


def test_all_lua_lies_in_its_folder_and_every_script_is_loaded() -> None:
    assert {path.parent.parent for path in ROOT.glob("*/lmpool/**/*.lua")} == {LUA}
    loaded = {script.name: script.source for script in vars(scripts).values() if isinstance(script, scripts.Script)}
    files = {
        path.stem: re.split(r"^-- include (\w+)$", path.read_text("utf-8"), flags=re.M) for path in LUA.glob("*/*.lua")
    }
    included = {name for parts in files.values() for name in parts[1::2]}
    assert set(loaded) == set(files) - included
    assert len(loaded) >= 6
    for name, source in loaded.items():
        assert "-- include" not in source
        # A file that a script includes directly and through another file appears in the script once.
        parts = [*files[name][::2], *(part for other in files[name][1::2] for part in files[other][::2])]
        assert all(source.count(part) == 1 for part in parts if part.strip())
    violations = [
        f"{name_of(path)}:{line}"
        for path in FILES
        for text, line in strings(path)
        if re.search(r"redis\.p?call|\bKEYS\[|\bARGV\[", text)
    ]
    assert violations == []


# The public names of the package


def test_the_public_names_of_the_client_are_pinned() -> None:
    names = "ByteMass ByteOptions Continuation GenerateOptions PooledTrie PositionOptions Predictions Producer"
    names += " ProducerStats SampleOptions SyncProducer SyncTrie TopK TrieOptions"
    assert sorted(lmpool.producer.__all__) == names.split()
    public = {name for name, value in vars(lmpool.producer).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(lmpool.producer.__all__)
    calls = {name for name in dir(lmpool.producer.Producer) if not name.startswith("_")}
    rows = {"logprobs", "batch_logprobs", "warm", "clear_cache", "trie"}
    picks = {"topk", "batch_topk", "sample", "batch_sample", "score", "batch_score"}
    picks |= {"positions", "batch_positions", "stream_positions", "generate", "batch_generate", "logz", "batch_logz"}
    picks |= {"mass", "batch_mass", "mass_of_bytes", "token_set", "hidden", "head"}
    adapters = {"adapters", "add_adapter", "remove_adapter"}
    versions = {"versions", "at", "versioned", "reach_version", "publish_weights"}
    texts = {"tokenizer", "encode", "decode"}
    assert calls == rows | picks | adapters | versions | {"model", "stats", "open", "close", "close_soon", *texts}
    # SyncProducer has no `open` and `close_soon`: it connects when it is created, and its calls block.
    sync = {name for name in dir(lmpool.producer.SyncProducer) if not name.startswith("_")}
    assert sync == calls - {"open", "close_soon"}


def exceptions_of_the_tree() -> dict[str, type[BaseException]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == "lmpool.errors"
    }


def test_the_names_of_the_errors_are_pinned() -> None:
    assert sorted(exceptions_of_the_tree()) == [
        "AdapterChanged",
        "AdapterRefused",
        "AmbiguousModel",
        "AuthenticationFailed",
        "BatchError",
        "BatchRefused",
        "CorruptRow",
        "DeadlineExceeded",
        "EmptyPrompt",
        "InvalidPrompt",
        "InvalidVocabulary",
        "InvalidWeights",
        "LMPoolError",
        "ModelError",
        "ModelMismatch",
        "NoProbability",
        "NoWorker",
        "NotTokenIds",
        "ProducerClosed",
        "PromptTooLong",
        "ProtocolError",
        "QueueCleared",
        "QueueFull",
        "RequestFailed",
        "ServerError",
        "ServerUnreachable",
        "SettingsError",
        "SourceMissing",
        "TokenOutOfRange",
        "TrieError",
        "UnknownAdapter",
        "UnknownModel",
        "UnknownNode",
        "UnknownTokenSet",
        "UnknownTokenizer",
        "UnknownVocabulary",
        "WeightsRefused",
        "WorkerError",
    ]


def test_the_tree_that_is_drawn_is_the_tree_of_the_classes() -> None:
    drawn: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}((?:│   |    )*)(?:[├└]── )?(\w+)(?: \((\w+)\))?(?:  |$)", line)
        if match is None:
            continue
        indent, name, builtin = match.groups()
        depth = len(indent) // 4 + (1 if re.search("[├└]", line) else 0)
        del above[depth:]
        drawn[name] = (*above[-1:], *([builtin] if builtin else []))
        above.append(name)
    real = {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in exceptions_of_the_tree().items()}
    assert real.pop("LMPoolError") == ("Exception",)
    assert drawn.pop("LMPoolError") == ()
    assert drawn == real


def test_every_exception_of_the_package_belongs_to_the_tree() -> None:
    tree = set(exceptions_of_the_tree())
    plain = {name for name, value in vars(builtins).items() if isinstance(value, type)} - {"object"}
    strays = []
    for path in FILES:
        if path.name == "errors.py":
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                is_exception = any(
                    base in tree or (base in plain and issubclass(getattr(builtins, base), BaseException))
                    for base in bases
                )
                if is_exception and not bases & tree:
                    strays.append(f"{name_of(path)}: {node.name}")
    assert strays == []


def test_every_exception_says_what_it_is_for() -> None:
    assert all(inspect.getdoc(kind) for kind in exceptions_of_the_tree().values())
