"""Connect a genlm language model to a pool: `ModelConnection` to a running pool, `PrivatePool` to a new one.

Both classes survive a fork of the process: the child does not touch its parent's connections. `split` and
`command_options` translate the options `llm_opts` of `load_model_by_name`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import redis

from lmpool.broker.server import RedisLike
from lmpool.cli import FOLDER_VARIABLE, LAUNCH
from lmpool.embedded import EmbeddedServer
from lmpool.errors import ModelError, ProducerClosed, SettingsError
from lmpool.producer.client.requests import ENDLESS_S, check_timeout
from lmpool.producer.client.session import Priority, WhenAbsent
from lmpool.producer.producer import Producer
from lmpool.producer.sync import SyncProducer
from lmpool.protocol.keys import Keys
from lmpool.settings import check_kind, shown

_LOAD_TIMEOUT_S = 1800.0  # Max seconds until a private worker serves its model: enough to download a large model.
_STOP_S = 5.0  # Seconds between SIGTERM and SIGKILL of a worker that does not stop.
_POLL_S = 0.05  # Seconds between two checks whether the model is served.
_LINES_SHOWN = 20  # Number of lines at the end of the worker's log that an error quotes.
_MAX_FOLDER_PATH = 60  # Max bytes of the temporary folder's path, else use /tmp: a socket's path has at most 107 bytes.

MODEL_OPTIONS = ("timeout", "cache_bytes", "tokenizer")
"""Names of the options of a language model that has a private worker."""

POOL_OPTIONS = (*MODEL_OPTIONS, "redis", "prefix", "when_absent", "priority")
"""Names of the options of a language model that connects to a running pool."""

MIN_TIMEOUT_S = 1.0
"""Min seconds of a request's timeout. In genlm-backend, `timeout` is the time that a batch waits for more prompts."""

_OPTION = re.compile(r"[a-z][a-z0-9_]*")
_HF_OPTS = {"torch_dtype": "dtype", "device_map": "device"}  # Arguments of transformers -> settings of the hf backend.
_HF_OPTS |= {name: name for name in ("dtype", "revision", "trust_remote_code")}
_REFUSED = {
    "bitsandbytes_opts": "the hf backend does not quantise: give a quantised checkpoint, or gguf_file=",
    "cache_size": "rows are bounded by bytes: use cache_bytes=",
    "cache_opts": "rows are bounded by bytes: use cache_bytes=",
    "when_absent": "the private worker serves before the model is returned",
    "priority": "no other client uses the private worker",
    "redis": "the model has a private server: connect to another with backend='pool'",
    "prefix": "the model has a private server: connect to another with backend='pool'",
}


@dataclass(frozen=True, slots=True)
class Address:
    """The arguments of `Producer`; a `timeout` of infinity means no deadline."""

    model: str | None = None
    redis: RedisLike | None = field(default=None, repr=False)  # Left out of `repr`: a URL may contain a password.
    timeout: float = math.inf
    cache_bytes: int = 256 * 1024 * 1024
    prefix: str = "lmpool"
    when_absent: WhenAbsent = "raise"
    priority: Priority = "interactive"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Producer` and `SyncProducer`."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return options | {"timeout": seconds_of(self.timeout)}


def seconds_of(timeout: float) -> float:
    """Return a producer's timeout for a language model's timeout, where infinity means no deadline."""
    return ENDLESS_S if timeout == math.inf else check_timeout(timeout)


class ModelConnection:
    """Holds producers: one for the coroutines of each thread, and one for synchronous callers in any thread."""

    def __init__(self, address: Address, owned: PrivatePool | None = None) -> None:
        self._address = address
        self._closed = False
        self._start(owned)
        _forked.add(self)
        atexit.register(self.close)

    def _start(self, owned: PrivatePool | None) -> None:
        self._owned = owned
        # A producer belongs to one thread, because its cache has no lock.
        self._of_thread = threading.local()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._sync: SyncProducer | None = None

    def after_fork(self) -> None:
        """Replace the connections in a child process; the parent's connections stay open."""
        # Closing the producers would remove descriptors from epoll instances that the child shares with its parent.
        _left_to_parent.append((self._of_thread, self._sync, self._owned))
        self._start(None)

    @property
    def producer(self) -> Producer:
        """The producer of coroutines in this thread; raises `ProducerClosed` after `close`."""
        self._check_open()
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is None:
            producer = self._of_thread.producer = Producer(**self._address.options)
            self._producers.add(producer)
        return producer

    @property
    def sync(self) -> SyncProducer:
        """The producer of synchronous callers, which connects at its first call, so that `close` can interrupt that."""
        with self._lock:
            self._check_open()
            if self._sync is None:
                producer = Producer(**self._address.options)
                self._sync = SyncProducer.__new__(SyncProducer)
                self._sync.__setstate__(producer)  # Like an unpickled producer, do not connect yet.
            return self._sync

    @property
    def used(self) -> list[Producer | SyncProducer]:
        """The producers that this thread has used: the thread's own, and the producer of synchronous callers."""
        producers = (getattr(self._of_thread, "producer", None), self._sync)
        return [producer for producer in producers if producer is not None]

    def close(self) -> None:
        """Close the producers and the private pool. A producer's session ends when its event loop next runs."""
        self._closed = True
        for producer in list(self._producers):
            producer.close_soon()
        with self._lock:
            sync, self._sync = self._sync, None
            if sync is not None:
                sync.close()
            if self._owned is not None:
                self._owned.close()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """Close as `close` does, without blocking the event loop."""
        self._closed = True
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is not None:
            await producer.close()
        await asyncio.to_thread(self.close)

    def abandon(self) -> None:
        """Close without waiting: the garbage collector calls this, in any thread and at any moment."""
        for producer in list(self._producers):
            producer.close_soon()
        if self._sync is None and self._owned is None:
            atexit.unregister(self.close)
            return
        try:
            threading.Thread(target=self.close, name="lmpool-close", daemon=True).start()
        except RuntimeError:  # No thread can start: the system's limit is reached, or the interpreter is ending.
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosed("this PooledLM is closed")


class PrivatePool:
    """A private server and worker, which run until `close` and have their files in a temporary folder.

    Server and worker end when this process ends or is killed. A fork may use the server and worker, but ends neither.

    Args:
        model: hub name or folder of the model, the argument of `lmpool worker`.
        backend: name of the worker's backend.
        options: more options of `lmpool worker`.
        load_timeout: max seconds until the worker serves the model.

    Raises:
        ModelError: the worker ended before it served, or did not serve in time; its log is quoted.
    """

    def __init__(self, model: str, backend: str, options: list[str], load_timeout: float = _LOAD_TIMEOUT_S) -> None:
        has_long_path = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_PATH
        self._folder = Path(tempfile.mkdtemp(prefix="lmpool-", dir="/tmp" if has_long_path else None))
        self._server = EmbeddedServer(folder=self._folder / "server")
        self._process: subprocess.Popen[bytes] | None = None
        _forked.add(self)
        try:
            self._server.start()
            self.url = self._server.url
            self._serve(model, ["--backend", backend, *options, "--", model], load_timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker and the server and remove their files; closing twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # Leaving the block closes the worker's pipe and waits for the worker's end.
                process.terminate()
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def after_fork(self) -> None:
        """Leave the server, the worker and their files to the parent process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            # The worker ends when all copies of its pipe are closed, so this process must not keep a copy.
            process.stdin.close()
            _left_to_parent.append(process)

    def _serve(self, model: str, arguments: list[str], load_timeout: float) -> None:
        """Start the worker and wait until it serves the model."""
        # Without -P, a file in the user's working directory could replace a module. `--adapter-hub` allows any adapter
        # of the hub, because no other program can add adapters to a private pool.
        program = [sys.executable, "-P", "-c", LAUNCH, "worker", "--redis", self.url]
        log, deadline = self._folder / "worker.log", time.monotonic() + load_timeout
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(
                [*program, "--adapter-hub", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**os.environ, FOLDER_VARIABLE: str(self._folder)},
                # Ctrl-C must not reach the worker: in a notebook, Ctrl-C must end a cell and not the model.
                start_new_session=True,
            )
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            while not client.hlen(Keys().models()):
                problem = ""
                if (code := process.poll()) is not None:
                    problem = f"the worker for {model!r} ended with code {code} before it served"
                elif time.monotonic() > deadline:
                    problem = f"{model!r} is not served within load_timeout = {load_timeout:g} s"
                if problem:
                    lines = log.read_text("utf-8", "replace").splitlines()[-_LINES_SHOWN:]
                    raise ModelError(f"{problem}:\n" + "\n".join(lines))
                time.sleep(_POLL_S)


_forked: weakref.WeakSet[ModelConnection | PrivatePool] = weakref.WeakSet()
# Objects of the parent that a child process keeps alive, because their finalizers would close connections.
_left_to_parent: list[Any] = []


def _after_fork() -> None:
    for connection in list(_forked):
        connection.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def split(backend: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of the language model and of its private worker; give the latter lmpool's names."""
    for name, instead in _REFUSED.items():
        if given.get(name) is not None:
            raise SettingsError(f"llm_opts: {name} cannot be set: {instead}")
    check_min_timeout(given)
    model = {name: given[name] for name in MODEL_OPTIONS if name in given}
    worker = {name: value for name, value in given.items() if name not in model and name not in _REFUSED}
    translated: dict[str, tuple[Collection[str], Callable[[Any], dict[str, Any]]]] = {
        "batch_size": ((backend,), lambda size: {"max_batch": size}),
        "hf_opts": (("hf",), _read_hf_opts),
        "engine_opts": (("vllm", "sglang"), _read_engine_opts),
    }
    for name, (backends, read) in translated.items():
        if name in worker and backend in backends:
            settings = read(worker.pop(name))
            if twice := settings.keys() & worker.keys():
                raise SettingsError(f"llm_opts: {name} and {min(twice)} are the same setting: give one of them")
            worker |= settings
    return model, worker


def check_min_timeout(given: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a timeout that is too small for a request."""
    timeout = given.get("timeout")
    if isinstance(timeout, (int, float)) and 0 < timeout < MIN_TIMEOUT_S:
        limit = f"is less than {MIN_TIMEOUT_S:g} s"
        raise SettingsError(f"llm_opts: timeout = {timeout} {limit}: it limits a request, not a batch: leave it out")


def command_options(given: Mapping[str, Any]) -> list[str]:
    """Settings of a worker as options of the `lmpool worker` command, without settings that are None or False."""
    options: list[str] = []
    for name, value in given.items():
        if not isinstance(name, str) or not _OPTION.fullmatch(name):
            raise SettingsError(f"llm_opts: {shown(name)} is not the name of a setting")
        option = "--" + name.replace("_", "-")
        if value is True:
            options.append(option)
        elif value is not None and value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            # `str` of a torch dtype has a prefix, as in `torch.float32`; the option has none.
            options += [f"{option}={str(item).removeprefix('torch.') if name == 'dtype' else item}" for item in values]
    return options


def _read_hf_opts(given: Any) -> dict[str, Any]:
    """Translate arguments of transformers into settings of the hf backend."""
    settings: dict[str, Any] = {}
    for name, value in check_kind("hf_opts", given or {}, Mapping, "a mapping of options to values").items():
        if name not in _HF_OPTS or (name == "device_map" and not isinstance(value, str | None)):
            raise SettingsError(
                f"llm_opts: hf_opts has {shown(name)} = {shown(value)}, which the hf backend does not take; it takes "
                "torch_dtype, dtype, device_map (one device), revision and trust_remote_code"
            )
        settings[_HF_OPTS[name]] = value
    return settings


def _read_engine_opts(given: Any) -> dict[str, Any]:
    """Translate arguments of an engine into settings of its backend."""
    arguments = dict(check_kind("engine_opts", given or {}, Mapping, "a mapping of options to values"))
    settings: dict[str, Any] = {"dtype": arguments.pop("dtype")} if "dtype" in arguments else {}
    try:
        settings["engine_args"] = [shlex.quote(f"{name}={json.dumps(value)}") for name, value in arguments.items()]
    except TypeError as error:
        raise SettingsError(f"llm_opts: engine_opts must be plain values: {error}") from error
    return settings
