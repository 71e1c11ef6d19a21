"""The pool with vLLM and SGLang against the same engines called directly, and against vLLM's own server."""

from __future__ import annotations

import json
import math
import os
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import REPOSITORY, BenchmarkError, Child, Process, free_port
from benchmarks.harness.workplace import Workplace, wait_until
from benchmarks.measures.asking import Asked, alternated, compare, rate
from benchmarks.measures.picks import Told
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.transport import FULL_V

Ids = list[int]

VARIABLE = "LMPOOL_BENCH_ENGINES"
"""The folder that holds the engines' environments, venv-vllm and venv-sglang."""

_PROMPT_TOKENS = 32
_VLLM_PROMPTS, _SGLANG_PROMPTS, _HTTP_PROMPTS, _OVERHEAD_PROMPTS = 256, 64, 64, 1024
_CONTEXTS, _STEPS = 16, 32
_LONG_TOKENS = 256
"""More than what all contexts of a step compute anew because their sessions are a few steps old."""
_HTTP_REPEATS = 2
_SERVER_READY_S = 180.0
_VLLM = ("--backend", "vllm", "--kv-cache-bytes", str(1 << 30))
# Its attention on a CPU is many small operations, for which threads cost more than they bring.
_SGLANG_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_SGLANG = ("--backend", "sglang", "--kv-cache-bytes", str(1 << 30))


def vllm_random(place: Workplace) -> list[Result]:
    """vLLM behind the pool, and vLLM called directly."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        ours = _pool(stack, place, "vllm", model, *_VLLM)
        peer = stack.enter_context(place.child("peers.vllm_peer", model, "float32", python=engine_python("vllm")))
        samples = compare(place, ours, peer, place.scaled(_VLLM_PROMPTS, 64))
    meaning = (
        f"rows/s for {_VLLM_PROMPTS} distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool ÷ "
        "vLLM's engine core in one process with a capturing logits processor, the same prompts"
    )
    return [_result("vllm-random", meaning, 0.95, samples)]


def vllm_grow(place: Workplace) -> list[Result]:
    """Contexts that grow by a token a step, with sessions and with prefix caching alone."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        options = (*_VLLM, "--dtype", "bfloat16")
        sides = {
            "sessions": _pool(stack, place, "sessions", model, *options),
            "prefix caching": _pool(stack, place, "prefixes", model, *options, "--sessions", "0"),
        }
        asked = Asked()
        takes = {name: _growing(side, asked) for name, side in sides.items()}
        samples = alternated(takes, place.repeats)
    meaning = (
        f"rows/s for {_CONTEXTS} contexts of {_PROMPT_TOKENS} tokens that grow by one token {_STEPS} times, "
        "SmolLM2-135M bf16, through the pool ÷ the same with `--sessions 0`, which leaves vLLM's prefix caching"
    )
    return [_result("vllm-grow", meaning, 4.2, samples)]


def vllm_sessions(place: Workplace) -> list[Result]:
    """Whether contexts that grow in lock step find their sessions again where there are two workers."""
    name, model, ports = "two", str(_dummy_model(place.folder)), [free_port() for _ in range(2)]
    # Without prefix caching only sessions find anything.
    options = (*_VLLM, "--engine-args", "load_format=dummy enable_prefix_caching=false")
    with ExitStack() as stack:
        for port in ports:
            command, environment = _command("vllm")
            told = ("--metrics-port", str(port))
            stack.enter_context(place.workers(name, model, *options, *told, command=command, environment=environment))
        producer = stack.enter_context(place.producer(name))
        return [_found(place, producer, ports, new) for new in (1, 3)]


def _found(place: Workplace, producer: Child, ports: list[int], new: int) -> Result:
    """Prompts that found their session, and those that extended another, when contexts grow by `new` tokens."""
    asked, steps = Asked(), place.scaled(_STEPS, 8)
    samples: dict[str, list[float]] = {"found": [], "extended": []}
    for _ in range(place.repeats):
        contexts, found = asked.fresh(_CONTEXTS, _LONG_TOKENS + steps * new), 0
        for length in range(_LONG_TOKENS, _LONG_TOKENS + steps * new + 1, new):
            before = sum(map(_computed_tokens, ports))
            producer.ask("together", prompts=[ids[:length] for ids in contexts])
            computed = sum(map(_computed_tokens, ports)) - before
            if length > _LONG_TOKENS:
                # One without a session computes what others find too; one whose session is older computes `new` more
                # for each step that this has missed.
                whole, more = divmod(computed - _CONTEXTS * new, length - new)
                found += max(0, _CONTEXTS - whole - math.ceil(more / new))
        samples["found"].append(found)
        samples["extended"].append(_CONTEXTS * steps)
    by = "one token" if new == 1 else f"{new} tokens"
    meaning = (
        f"prompts of which just the new tokens are computed, when {_CONTEXTS} contexts of {_LONG_TOKENS} tokens grow "
        f"in lock step by {by} {_STEPS} times, asked by one client of two vLLM workers with one narrow layer, dummy "
        "weights and no prefix caching ÷ all prompts but the first of each context. The second of each opens the "
        f"session, so {1 - 1 / _STEPS:.2f} is the most"
    )
    name = "vllm-sessions" if new == 1 else f"vllm-sessions-{new}"
    return Result(name, meaning, Goal(0.9), *[Side(side, "prompts", taken) for side, taken in samples.items()])


def _computed_tokens(port: int) -> int:
    """The tokens that a worker has computed, as its metrics on this port tell."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    tokens, reused = (
        re.search(rf"^lmpool_worker_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        for name in ("tokens", "reused_tokens")
    )
    if tokens is None or reused is None:
        raise BenchmarkError(f"the worker on port {port} does not tell how many tokens it has computed")
    return int(float(tokens[1]) - float(reused[1]))


def vllm_http(place: Workplace) -> list[Result]:
    """vLLM behind the pool, and behind its own OpenAI server."""
    with ExitStack() as stack:
        ours = _pool(stack, place, "vllm", str(smollm2_folder()), *_VLLM)
        peer = _server(stack, place)
        number = place.scaled(_HTTP_PROMPTS, 4)
        samples = compare(place, ours, peer, number, repeats=min(place.repeats, _HTTP_REPEATS))
    meaning = (
        f"rows/s for {_HTTP_PROMPTS} prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool ÷ vLLM's "
        "OpenAI server asked for the log-probabilities of the whole vocabulary, 16 requests at once, JSON read; "
        f"{_HTTP_REPEATS} samples"
    )
    return [_result("vllm-http", meaning, 20, samples)]


def vllm_positions(place: Workplace) -> list[Result]:
    """The likeliest tokens at every position of texts: vLLM behind the pool, and behind its own OpenAI server."""
    with ExitStack() as stack:
        ours = _pool(stack, place, "vllm", str(smollm2_folder()), *_VLLM)
        peer, told = _server(stack, place), Told(place)
        samples = alternated({"pool": told.new(ours), "server": told.same(peer)}, place.repeats)
    meaning = (
        f"{told.meaning}, vLLM through the pool ÷ vLLM's OpenAI server asked for as many `prompt_logprobs`, 16 "
        "requests at once, JSON read"
    )
    return [Result("vllm-positions", meaning, Goal(1), *told.sides(samples))]


def vllm_overhead(place: Workplace) -> list[Result]:
    """What the pool costs when the model costs next to nothing."""
    with ExitStack() as stack:
        model = str(_dummy_model(place.folder))
        options = (*_VLLM, "--dtype", "bfloat16", "--engine-args", "load_format=dummy")
        ours = _pool(stack, place, "dummy", model, *options)
        peer = stack.enter_context(
            place.child("peers.vllm_peer", model, "bfloat16", "dummy", python=engine_python("vllm"))
        )
        samples = compare(place, ours, peer, place.scaled(_OVERHEAD_PROMPTS, 256), narrow=True)
    meaning = (
        f"rows/s for {_OVERHEAD_PROMPTS:,} distinct prompts of {_PROMPT_TOKENS} tokens, one narrow layer with dummy "
        f"weights, V = {FULL_V:,}, bf16, through the pool ÷ vLLM's engine core with a capturing logits processor"
    )
    return [_result("vllm-overhead", meaning, 0.6, samples)]


def sglang_random(place: Workplace) -> list[Result]:
    """SGLang behind the pool, and its scheduler called directly."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        ours = _pool(stack, place, "sglang", model, *_SGLANG)
        peer = stack.enter_context(
            place.child("peers.sglang_peer", model, python=engine_python("sglang"), **_SGLANG_ENVIRONMENT)
        )
        samples = compare(place, ours, peer, place.scaled(_SGLANG_PROMPTS, 16))
    meaning = (
        f"rows/s for {_SGLANG_PROMPTS} distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool "
        "÷ SGLang's scheduler in one process, driven by its two seams, the same prompts"
    )
    return [_result("sglang-random", meaning, 0.95, samples)]


def sglang_grow(place: Workplace) -> list[Result]:
    """Prompts one token longer than the last, and new ones of the same length, both through the pool."""
    with ExitStack() as stack:
        ours = _pool(stack, place, "sglang", str(smollm2_folder()), *_SGLANG)
        asked = Asked()
        length = _PROMPT_TOKENS + 1
        takes = {
            "extensions": _growing(ours, asked, contexts=_SGLANG_PROMPTS, steps=place.scaled(4, 2)),
            "cold": lambda: rate(ours, asked.fresh(_SGLANG_PROMPTS, length)),
        }
        samples = alternated(takes, place.repeats)
    meaning = (
        f"rows/s for {_SGLANG_PROMPTS} contexts of {_PROMPT_TOKENS} tokens that grow by one token 4 times ÷ "
        f"{_SGLANG_PROMPTS} new prompts of {length} tokens, SmolLM2-135M f32, SGLang behind the pool"
    )
    return [_result("sglang-grow", meaning, 6, samples)]


def engine_python(engine: str) -> str:
    """The Python of an engine's environment; `make bench` builds them.

    Raises:
        BenchmarkError: it is not there.
    """
    folder = Path(os.environ.get(VARIABLE, REPOSITORY / ".cache"))
    python = folder / f"venv-{engine}" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"there is no {python}: python -m tools.install_engine {engine} {python.parents[1]}")
    return str(python)


def _pool(stack: ExitStack, place: Workplace, name: str, model: str, *options: str) -> Child:
    """A producer, and a worker of an engine behind it.

    It keeps no rows: until its memory is full of them each row takes new memory, which is no steady state.
    """
    command, environment = _command(options[options.index("--backend") + 1])
    stack.enter_context(place.workers(name, model, *options, command=command, environment=environment))
    return stack.enter_context(place.producer(name, "--cache-bytes", "0"))


def _server(stack: ExitStack, place: Workplace) -> Child:
    """A client of vLLM's own server, which serves SmolLM2."""
    port = free_port()
    command = [engine_python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_folder()),
               "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-logprobs", "-1",
               "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30), "--block-size", "32", "--served-model-name",
               "smollm2", "--return-tokens-as-token-ids"]  # fmt: skip
    server = stack.enter_context(place.process("vllm-serve", *command))
    wait_until(lambda: _is_healthy(server, port), _SERVER_READY_S, "vLLM's own server")
    url = f"http://127.0.0.1:{port}/v1/completions"
    return stack.enter_context(place.child("peers.vllm_http_peer", url, str(FULL_V), python=engine_python("vllm")))


def _command(engine: str) -> tuple[list[str], dict[str, str]]:
    """What stands for `lmpool` where an engine's worker is started, and the worker's environment."""
    python = engine_python(engine)
    if engine == "sglang":  # It needs a shim on a CPU, which is the tests' own.
        return [python, "-m", "tests.engines.sglang_cpu"], _SGLANG_ENVIRONMENT
    return [str(Path(python).with_name("lmpool"))], {}


def _growing(side: Child, asked: Asked, *, contexts: int = _CONTEXTS, steps: int = _STEPS) -> Take:
    """Rows a second for contexts that grow: new ones each time, for both sides' rows lie in one cache."""

    def take() -> float:
        drawn = asked.fresh(contexts, _PROMPT_TOKENS + steps)
        return contexts * steps / float(side.ask("grow", contexts=drawn, steps=steps)["seconds"])

    return take


def _result(name: str, meaning: str, goal: float, samples: dict[str, list[float]]) -> Result:
    return Result(name, meaning, Goal(goal), *[Side(side, "rows/s", taken) for side, taken in samples.items()])


def _dummy_model(folder: Path) -> Path:
    """The config of a model that costs next to nothing: one narrow layer under the vocabulary of SmolLM2."""
    config = json.loads((smollm2_folder() / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 32, "dtype": "bfloat16"}  # fmt: skip
    made = folder / "dummy-model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(config))
    return made


def _is_healthy(server: Process, port: int) -> bool:
    server.check()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False
