"""Compares vLLM and SGLang behind the pool with the same engines called directly, and with vLLM's own server."""

from __future__ import annotations

import json
import math
import os
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.comparison import FULL_V, PromptSource, alternated, compare, rate
from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import REPOSITORY, BenchmarkError, Child, Process, free_port
from benchmarks.harness.testbed import Testbed, wait_until
from benchmarks.measures.picks import TopTokens
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.scaling import write_llama

Ids = list[int]

VARIABLE = "LMPOOL_BENCH_ENGINES"
"""Environment variable: the folder that holds the engines' environments, venv-vllm and venv-sglang."""

_PROMPT_TOKENS = 32  # Tokens per random prompt.
# Prompts per sample of each measure.
_VLLM_PROMPTS, _SGLANG_PROMPTS, _HTTP_PROMPTS, _OVERHEAD_PROMPTS, _TENSOR_PROMPTS = 256, 64, 64, 1024, 2048
_CONTEXTS, _STEPS = 16, 32  # Number of growing contexts, and tokens by which each context grows.
_LONG_TOKENS = 256  # Initial tokens per context, so many that a recomputed context stands out in the count of tokens.
_HTTP_REPEATS = 2  # Number of samples of vLLM's own server: a sample takes about a minute.
_SERVER_READY_S = 600.0  # Max seconds until vLLM's own server is ready: minutes on a busy machine.
VLLM = ("--backend", "vllm", "--kv-cache-bytes", str(1 << 30))
_RANKS = 2  # Processes over which a model is spread.
_RANKS_REST_S = 2.0  # Seconds until vLLM's ranks rest: they spin for one second after each step.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_SGLANG = ("--backend", "sglang", "--kv-cache-bytes", str(1 << 30))


def vllm_random(testbed: Testbed) -> list[Result]:
    """Compare vLLM behind the pool with vLLM called directly."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        ours = pool(stack, testbed, "vllm", model, *VLLM)
        peer = stack.enter_context(testbed.child("peers.vllm_peer", model, "float32", python=engine_python("vllm")))
        samples = compare(testbed, ours, peer, testbed.scaled(_VLLM_PROMPTS, 64))
    meaning = (
        f"rows/s for {_VLLM_PROMPTS} distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool ÷ "
        "vLLM's engine core in one process with a capturing logits processor, the same prompts"
    )
    return [_result("vllm-random", meaning, 0.95, samples)]


def vllm_grow(testbed: Testbed) -> list[Result]:
    """Compare sessions (resumable requests) with prefix caching alone, for contexts that grow by a token per step."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        options = (*VLLM, "--dtype", "bfloat16")
        sides = {
            "sessions": pool(stack, testbed, "sessions", model, *options),
            "prefix caching": pool(stack, testbed, "prefixes", model, *options, "--sessions", "0"),
        }
        source = PromptSource()
        takes = {name: _growing(side, source) for name, side in sides.items()}
        samples = alternated(takes, testbed.repeats)
    meaning = (
        f"rows/s for {_CONTEXTS} contexts of {_PROMPT_TOKENS} tokens that grow by one token {_STEPS} times, "
        "SmolLM2-135M bf16, through the pool ÷ the same with `--sessions 0`, which leaves vLLM's prefix caching"
    )
    return [_result("vllm-grow", meaning, 4.2, samples)]


def vllm_sessions(testbed: Testbed) -> list[Result]:
    """Measure which share of prompts finds its session, for contexts in lock step on a pool of two workers."""
    name, model, ports = "two", str(_dummy_model(testbed.folder)), [free_port() for _ in range(2)]
    # Disable prefix caching, so that only sessions can save computation.
    options = (*VLLM, "--engine-args", "load_format=dummy enable_prefix_caching=false")
    with ExitStack() as stack:
        for port in ports:
            command, environment = engine_command("vllm")
            metrics = ("--metrics-port", str(port))
            stack.enter_context(
                testbed.workers(name, model, *options, *metrics, command=command, environment=environment)
            )
        producer = stack.enter_context(testbed.producer(name))
        return [_found(testbed, producer, ports, new) for new in (1, 3)]


def _found(testbed: Testbed, producer: Child, ports: list[int], new: int) -> Result:
    """Count the prompts that found their session among all prompts that extend a context by `new` tokens."""
    source, steps = PromptSource(), testbed.scaled(_STEPS, 8)
    samples: dict[str, list[float]] = {"found": [], "extended": []}
    for _ in range(testbed.repeats):
        contexts, found = source.draw(_CONTEXTS, _LONG_TOKENS + steps * new), 0
        for length in range(_LONG_TOKENS, _LONG_TOKENS + steps * new + 1, new):
            before = sum(map(_computed_tokens, ports))
            producer.request("together", prompts=[ids[:length] for ids in contexts])
            computed = sum(map(_computed_tokens, ports)) - before
            if length > _LONG_TOKENS:
                # For a prompt without a session, vLLM computes the whole prefix. For a prompt with an older session,
                # vLLM computes `new` more tokens per missed step.
                whole, more = divmod(computed - _CONTEXTS * new, length - new)
                found += max(0, _CONTEXTS - whole - math.ceil(more / new))
        samples["found"].append(found)
        samples["extended"].append(_CONTEXTS * steps)
    by = "one token" if new == 1 else f"{new} tokens"
    meaning = (
        f"prompts for which workers compute only the new tokens ÷ all prompts but the first of each context. "
        f"{_CONTEXTS} contexts of {_LONG_TOKENS} tokens grow in lock step by {by} {_STEPS} times; one client, two "
        "vLLM workers with one narrow layer, dummy weights and no prefix caching. The second prompt of each context "
        f"opens its session, so the maximum is {1 - 1 / _STEPS:.2f}"
    )
    name = "vllm-sessions" if new == 1 else f"vllm-sessions-{new}"
    return Result(name, meaning, Goal(0.9), *[Side(side, "prompts", taken) for side, taken in samples.items()])


def _computed_tokens(port: int) -> int:
    """The tokens that a worker has computed, from its metrics on this port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    tokens, reused = (
        re.search(rf"^lmpool_worker_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        for name in ("tokens", "reused_tokens")
    )
    if tokens is None or reused is None:
        raise BenchmarkError(f"the metrics of the worker on port {port} lack the counters of computed tokens")
    return int(float(tokens[1]) - float(reused[1]))


def vllm_http(testbed: Testbed) -> list[Result]:
    """Compare vLLM behind the pool with vLLM behind its own OpenAI server."""
    with ExitStack() as stack:
        ours = pool(stack, testbed, "vllm", str(smollm2_folder()), *VLLM)
        peer = server(stack, testbed)
        number = testbed.scaled(_HTTP_PROMPTS, 4)
        samples = compare(testbed, ours, peer, number, repeats=min(testbed.repeats, _HTTP_REPEATS))
    meaning = (
        f"rows/s for {_HTTP_PROMPTS} prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool ÷ "
        "OpenAI server with the log-probabilities of the whole vocabulary, 16 concurrent requests, JSON parsed; "
        f"{_HTTP_REPEATS} samples"
    )
    return [_result("vllm-http", meaning, 20, samples)]


def vllm_positions(testbed: Testbed) -> list[Result]:
    """Compare vLLM behind the pool with vLLM's own OpenAI server, for top-k tokens at every position of texts."""
    with ExitStack() as stack:
        ours = pool(stack, testbed, "vllm", str(smollm2_folder()), *VLLM)
        peer, top_tokens = server(stack, testbed), TopTokens(testbed)
        samples = alternated({"pool": top_tokens.new(ours), "server": top_tokens.same(peer)}, testbed.repeats)
    meaning = (
        f"{top_tokens.meaning}, vLLM through the pool ÷ vLLM's OpenAI server with as many `prompt_logprobs`, 16 "
        "concurrent requests, JSON parsed"
    )
    return [Result("vllm-positions", meaning, Goal(1), *top_tokens.sides(samples))]


def vllm_overhead(testbed: Testbed) -> list[Result]:
    """Measure the overhead of the pool with a model that takes almost no time."""
    with ExitStack() as stack:
        model = str(_dummy_model(testbed.folder))
        options = (*VLLM, "--dtype", "bfloat16", "--engine-args", "load_format=dummy")
        ours = pool(stack, testbed, "dummy", model, *options)
        peer = stack.enter_context(
            testbed.child("peers.vllm_peer", model, "bfloat16", "dummy", python=engine_python("vllm"))
        )
        samples = compare(testbed, ours, peer, testbed.scaled(_OVERHEAD_PROMPTS, 256), narrow=True)
    meaning = (
        f"rows/s for {_OVERHEAD_PROMPTS:,} distinct prompts of {_PROMPT_TOKENS} tokens, one narrow layer with dummy "
        f"weights, V = {FULL_V:,}, bf16, through the pool ÷ vLLM's engine core with a capturing logits processor"
    )
    return [_result("vllm-overhead", meaning, 0.6, samples)]


def vllm_tensor(testbed: Testbed) -> list[Result]:
    """Measure the overhead of the pool with a narrow model that is spread over two processes."""
    with ExitStack() as stack:
        model = str(write_llama(testbed.folder / "narrow", vocab_size=FULL_V, width=64, heads=2, layers=1))
        ours = pool(stack, testbed, "ranks", model, *VLLM, "--tensor-parallel-size", str(_RANKS), **_ONE_THREAD)
        testbed.wait_for_shared_memory("ranks")
        arguments, python = (model, "float32", "auto", str(_RANKS)), engine_python("vllm")
        peer = stack.enter_context(testbed.child("peers.vllm_peer", *arguments, python=python, **_ONE_THREAD))
        samples = compare(testbed, ours, peer, testbed.scaled(_TENSOR_PROMPTS, 256), pause_s=_RANKS_REST_S)
    meaning = (
        f"rows/s for {_TENSOR_PROMPTS:,} distinct prompts of {_PROMPT_TOKENS} tokens, one narrow layer with random "
        f"weights, V = {FULL_V:,}, f32, `tensor_parallel_size={_RANKS}`, one thread per rank, through the pool ÷ "
        "vLLM's engine core with as many ranks and a capturing logits processor in them, whose rows stay in the rank"
    )
    return [_result("vllm-tensor", meaning, 0.85, samples)]


def sglang_random(testbed: Testbed) -> list[Result]:
    """Compare SGLang behind the pool with SGLang's scheduler called directly."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        ours = pool(stack, testbed, "sglang", model, *_SGLANG)
        peer = stack.enter_context(
            testbed.child("peers.sglang_peer", model, python=engine_python("sglang"), **_ONE_THREAD)
        )
        samples = compare(testbed, ours, peer, testbed.scaled(_SGLANG_PROMPTS, 16))
    meaning = (
        f"rows/s for {_SGLANG_PROMPTS} distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool "
        "÷ SGLang's scheduler called directly in one process, the same prompts"
    )
    return [_result("sglang-random", meaning, 0.95, samples)]


def sglang_grow(testbed: Testbed) -> list[Result]:
    """Compare prompts that grow by one token with new prompts of the same length, both through the pool."""
    with ExitStack() as stack:
        ours = pool(stack, testbed, "sglang", str(smollm2_folder()), *_SGLANG)
        source = PromptSource()
        length = _PROMPT_TOKENS + 1
        takes = {
            "extensions": _growing(ours, source, contexts=_SGLANG_PROMPTS, steps=testbed.scaled(4, 2)),
            "cold": lambda: rate(ours, source.draw(_SGLANG_PROMPTS, length)),
        }
        samples = alternated(takes, testbed.repeats)
    meaning = (
        f"rows/s for {_SGLANG_PROMPTS} contexts of {_PROMPT_TOKENS} tokens that grow by one token 4 times ÷ "
        f"{_SGLANG_PROMPTS} new prompts of {length} tokens, SmolLM2-135M f32, SGLang behind the pool"
    )
    return [_result("sglang-grow", meaning, 6, samples)]


def engine_python(engine: str) -> str:
    """The interpreter of an engine's environment, which `make bench` builds; BenchmarkError if it is missing."""
    folder = Path(os.environ.get(VARIABLE, REPOSITORY / ".cache"))
    python = folder / f"venv-{engine}" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"there is no {python}: python -m tools.install_engine {engine} {python.parents[1]}")
    return str(python)


def pool(stack: ExitStack, testbed: Testbed, name: str, model: str, *options: str, **variables: str) -> Child:
    """Start a worker with an engine and more environment variables, and a producer for its model.

    The producer caches no rows: until a cache is full, each row allocates new memory, which takes additional time.
    """
    command, environment = engine_command(options[options.index("--backend") + 1])
    stack.enter_context(testbed.workers(name, model, *options, command=command, environment=environment | variables))
    return stack.enter_context(testbed.producer(name, "--cache-bytes", "0"))


def server(stack: ExitStack, testbed: Testbed, *options: str) -> Child:
    """A client of vLLM's own server, which serves SmolLM2; `options` are more options of the server."""
    port = free_port()
    command = [engine_python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_folder()),
               "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-logprobs", "-1",
               "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30), "--block-size", "32", "--served-model-name",
               "smollm2", *options]  # fmt: skip
    server = stack.enter_context(testbed.process("vllm-serve", *command))
    wait_until(lambda: is_healthy(server, port), _SERVER_READY_S, "vLLM's own server")
    return completions_client(stack, testbed, f"http://127.0.0.1:{port}")


def completions_client(stack: ExitStack, testbed: Testbed, base: str) -> Child:
    """A client of the completions that a server at the URL `base` serves."""
    url = f"{base}/v1/completions"
    return stack.enter_context(testbed.child("peers.vllm_http_peer", url, str(FULL_V), python=engine_python("vllm")))


def engine_command(engine: str) -> tuple[list[str], dict[str, str]]:
    """The command in place of `lmpool` that starts an engine's worker, and the worker's environment variables."""
    python = engine_python(engine)
    if engine == "sglang":  # On a CPU SGLang needs stubs of missing packages, which the tests provide.
        # Use one thread: SGLang's attention on a CPU consists of small operations, which threads slow down.
        return [python, "-m", "tests.engines.sglang_cpu"], _ONE_THREAD
    return [str(Path(python).with_name("lmpool"))], {}


def _growing(side: Child, source: PromptSource, *, contexts: int = _CONTEXTS, steps: int = _STEPS) -> Take:
    """Rows per second for growing contexts. Each sample draws new contexts, because both sides share one cache."""

    def take() -> float:
        drawn = source.draw(contexts, _PROMPT_TOKENS + steps)
        return contexts * steps / float(side.request("grow", contexts=drawn, steps=steps)["seconds"])

    return take


def _result(name: str, meaning: str, goal: float, samples: dict[str, list[float]]) -> Result:
    return Result(name, meaning, Goal(goal), *[Side(side, "rows/s", taken) for side, taken in samples.items()])


def _dummy_model(folder: Path) -> Path:
    """Write the config of a model that costs almost nothing: one narrow layer with the vocabulary of SmolLM2."""
    config = json.loads((smollm2_folder() / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 32, "dtype": "bfloat16"}  # fmt: skip
    made = folder / "dummy-model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(config))
    return made


def is_healthy(server: Process, port: int) -> bool:
    """Whether a server's route `/health` responds with status 200; raises BenchmarkError if its process has ended."""
    server.check()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False
