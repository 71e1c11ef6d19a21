"""`PooledLM`: a language model for genlm-control, genlm-bytes and llamppl whose rows come from a pool.

`load_model_by_name` makes a `PooledLM` that uses a running pool or a private one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.broker.server import RedisLike
from lmpool.errors import SettingsError, UnknownAdapter
from lmpool.producer.client.requests import check_timeout
from lmpool.producer.client.session import CopiedAsItself, Priority, WhenAbsent
from lmpool.producer.genlm import connection as pools
from lmpool.producer.genlm.connection import Address, PrivatePool
from lmpool.producer.metrics import ProducerStats
from lmpool.producer.tokenizer import load_tokenizer, read_tokenizer
from lmpool.protocol.job import not_token_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import check_choice, check_kind, check_known, shown
from lmpool.vocabulary import decode_vocab

try:
    from genlm.backend.llm import AsyncLM, AsyncTransformer
    from genlm.backend.tokenization import Token
except ImportError as error:
    raise ImportError(f"PooledLM needs genlm-backend: pip install 'lmpool[genlm]' ({error})") from error

_ALIASES = {"sgl": "sglang", "mock": "synthetic"}
_BACKENDS = ("hf", "vllm", "sglang", "synthetic", *_ALIASES)
_GENLM_BATCH_SIZE = 20  # The default `batch_size` of genlm-backend.
_MAX_AT_ONCE = 64  # Max tokens generated per request, so that a long continuation does not exceed the timeout.


class UnknownLora(UnknownAdapter, ValueError):
    """The model has no adapter of that name. This error is also a ValueError, as in genlm-backend."""


@contextmanager
def _errors_of_genlm() -> Iterator[None]:
    """Raise `UnknownLora` for an unknown adapter: users of genlm-backend expect a ValueError."""
    try:
        yield
    except UnknownAdapter as error:
        raise UnknownLora(str(error)) from None


class PooledLM(CopiedAsItself, AsyncLM):  # type: ignore[misc]  # genlm-backend has no types.
    """A genlm-backend `AsyncLM` whose rows come from a pool; create it with `from_name`.

    A model works in several event loops, one `asyncio.run` after another, in several threads and after a fork.
    Synchronous methods work inside a running event loop too. Copying returns the model itself; unpickling connects
    again with the same settings.

    Rows are torch float32 tensors of shape (V,) on the CPU, where V is the size of the model's vocabulary. They share
    the memory of the producer's cache and must not be changed in place.

    Without a `timeout`, a request waits as long as a worker serves or loads the model. The request raises NoWorker if
    no worker has been alive for the time of a lease (plus a minute with `when_absent="wait"`), and ServerError if the
    server has been unreachable for a minute.

    Methods with `lora_name` raise `UnknownLora` (an `UnknownAdapter` and a ValueError) for an adapter that the model
    does not have. All other errors are as for `Producer.logprobs`.

    Args:
        address: the model and its pool.
        tokenizer: the model's tokenizer; None for the tokenizer that the model info names.
        owned: a private pool that is closed together with the model, or None.
        connects: whether to connect now, so that a wrong model name fails here; False to connect at the first request.

    Attributes:
        tokenizer: a tokenizer of transformers.
        byte_vocab: genlm-backend's `Token` of every id of the tokenizer.
        str_vocab: the text of every id of the tokenizer.
        device: the device of the rows, always the CPU.
        batch_size: has no effect, because workers choose their batches. Programs may set it, as on genlm-backend's
            AsyncTransformer.

    Raises:
        ServerError, UnknownModel, AmbiguousModel, NoWorker: as for `Producer.open`.
        SettingsError: a value is malformed, or the tokenizer cannot be loaded.
        InvalidVocabulary: the tokenizer's tokens cannot be read.
    """

    device = torch.device("cpu")

    def __init__(
        self, address: Address, *, tokenizer: Any = None, owned: PrivatePool | None = None, connects: bool = True
    ) -> None:
        self._connection = pools.ModelConnection(address, owned)
        try:
            if connects:
                # Store the model's name: the pool may serve more models when this object connects again.
                base = self.info.base
                address = replace(address, model=address.model or base)
            if tokenizer is None:
                tokenizer = load_tokenizer(self.info, option="tokenizer", otherwise="pass tokenizer=")
            tokens, self.str_vocab = decode_vocab(tokenizer)
        except BaseException:
            self._connection.close()
            raise
        self.tokenizer = tokenizer
        self.byte_vocab = [Token(index, token) for index, token in enumerate(tokens)]
        self.batch_size = _GENLM_BATCH_SIZE
        self._timeout = address.timeout
        self._seconds = pools.seconds_of(address.timeout)
        self._address = address
        weakref.finalize(self, self._connection.abandon).atexit = False

    @classmethod
    def from_name(
        cls,
        name: str | None = None,
        *,
        redis: RedisLike | None = None,
        timeout: float = math.inf,
        cache_bytes: int = 256 * 1024 * 1024,
        prefix: str = "lmpool",
        tokenizer: Any = None,
        when_absent: WhenAbsent = "raise",
        priority: Priority = "interactive",
    ) -> Self:
        """Connect to a pool.

        Args:
            name: name of the served model; None for the only served model.
            redis: URL, or a redis-py client whose address and credentials are used (the model cannot be pickled then);
                None for `LMPOOL_REDIS_URL`, then this user's embedded server.
            timeout: max seconds per request; infinity waits as long as a worker serves or loads the model.
            cache_bytes: max bytes of cached rows per thread, and the same for all synchronous calls; 0 for none.
            prefix: prefix of the pool's Redis keys.
            tokenizer: the model's tokenizer; None for the tokenizer that the model info names.
            when_absent: behaviour of connecting and of requests while no worker serves the model: "wait" until
                `timeout` has passed (without a timeout: for a minute), or "raise" (see `Producer`).
            priority: "interactive", or "bulk" for requests that yield to interactive requests (see `Producer`).

        Raises:
            The exceptions of the class.
        """
        return cls(Address(name, redis, timeout, cache_bytes, prefix, when_absent, priority), tokenizer=tokenizer)

    @property
    def timeout(self) -> float:
        """Max seconds per request. With infinity, a request waits as long as a worker serves or loads the model.

        A timeout below 1 s is stored but has no effect: in genlm-backend it is the time that a batch waits for more
        prompts, and a pool's workers do not wait.

        Raises:
            SettingsError: the new value is not a number of at least 0.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        checked = 0.0 if seconds == 0 and seconds is not False else pools.seconds_of(seconds)
        if checked >= pools.MIN_TIMEOUT_S:
            self._seconds = checked
            self._address = replace(self._address, timeout=seconds)
        self._timeout = seconds

    @property
    def info(self) -> ModelInfo:
        """The model's info, with the size of its vocabulary (`vocab_size`), its limits and its adapters."""
        return self._connection.sync.model

    def _options(self, lora_name: str | None) -> dict[str, Any]:
        return {"adapter": lora_name or "", "timeout": self._seconds}

    async def next_token_logprobs(self, token_ids: Any, lora_name: str | None = None) -> Tensor:
        """The log-probabilities of the next token after a prompt.

        Args:
            token_ids: list, tuple or 1-D integer array (numpy, torch) of token ids.
            lora_name: name of an adapter; None for no adapter.

        Returns:
            float32 tensor of shape (V,), not to be changed in place.
        """
        with _errors_of_genlm():
            return tensor_over(await self._connection.producer.logprobs(token_ids, **self._options(lora_name)))

    def next_token_logprobs_sync(self, token_ids: Any, lora_name: str | None = None) -> Tensor:
        """Call `next_token_logprobs` synchronously; this blocks a running event loop."""
        with _errors_of_genlm():
            return tensor_over(self._connection.sync.logprobs(token_ids, **self._options(lora_name)))

    async def batch_next_token_logprobs(self, token_ids_list: Iterable[Any], lora_name: str | None = None) -> Tensor:
        """The rows of several prompts.

        Args:
            token_ids_list: prompts, each a sequence of token ids as for `next_token_logprobs`.
            lora_name: name of an adapter for all prompts; None for no adapter.

        Returns:
            float32 tensor of shape (n, V), owned by the caller.
        """
        with _errors_of_genlm():
            rows = await self._connection.producer.batch_logprobs(token_ids_list, **self._options(lora_name))
        return torch.from_numpy(rows)

    def batch_next_token_logprobs_sync(self, token_ids_list: Iterable[Any], lora_name: str | None = None) -> Tensor:
        """Call `batch_next_token_logprobs` synchronously; this blocks a running event loop."""
        with _errors_of_genlm():
            return torch.from_numpy(self._connection.sync.batch_logprobs(token_ids_list, **self._options(lora_name)))

    def next_token_logprobs_uncached(self, token_ids: Any, lora_name: str | None = None) -> Tensor:
        """Return a row as `next_token_logprobs_sync` does, but have a worker compute the row again if it is cached."""
        with _errors_of_genlm():
            return tensor_over(self._connection.sync.logprobs(token_ids, fresh=True, **self._options(lora_name)))

    async def sample(
        self,
        prompt_token_ids: Any,
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """A continuation of a prompt, sampled token by token.

        With a seed, tokens are drawn here from full rows by a torch generator, and are the same tokens as
        genlm-backend draws from the same rows. Without a seed, a worker draws many tokens per request, and
        `torch.manual_seed` has no effect.

        Args:
            prompt_token_ids: the prompt, as for `next_token_logprobs`.
            max_tokens: max tokens to draw.
            eos_token_ids: tokens that end the continuation; the continuation does not include these tokens.
            temperature: divisor of the log-probabilities; 0 takes the most likely token each time.
            seed: seed of the generator.
            lora_name: name of an adapter; None for no adapter.

        Returns:
            the token ids after the prompt.
        """
        if isinstance(prompt_token_ids, (str, Mapping)) or not hasattr(prompt_token_ids, "__iter__"):
            raise not_token_ids(prompt_token_ids)
        prompt, ends = list(prompt_token_ids), frozenset(eos_token_ids)
        # Temperature 0 needs no seed; genlm-backend would divide by 0.
        if seed is not None and temperature != 0:
            continuation: list[int] = await super().sample(prompt, max_tokens, ends, temperature, seed, lora_name)
            return continuation
        generated: list[int] = []
        producer = self._connection.producer
        with _errors_of_genlm():
            await producer.open()
            # A worker never draws an id outside of the vocabulary, so do not send such an id as a stop.
            stop = sorted(end for end in ends if 0 <= end < producer.model.vocab_size)
            options = self._options(lora_name)
            while len(generated) < max_tokens:
                ids = prompt + generated
                # Request at least one token: if the prompt is too long for the model, the request raises PromptTooLong.
                capacity = max(1, producer.model.max_prompt_tokens - len(ids) + 1)
                count = min(max_tokens - len(generated), capacity, _MAX_AT_ONCE)
                (made,) = await producer.generate(ids, count, stop=stop, temperature=temperature, **options)
                generated += map(int, made.ids)
                if generated[-1] in ends:
                    return generated[:-1]
        return generated

    def cache_kv(self, prompt_tokens: Any, lora_name: str | None = None) -> None:
        """Have a worker compute a prompt's row, so that longer prompts cost only their new tokens.

        The call is a hint: one worker computes the row, or no worker if the row is cached. Workers evict the least
        recently used keys and values.
        """
        with _errors_of_genlm():
            self._connection.sync.warm(prompt_tokens, **self._options(lora_name))

    def clear_cache(self) -> None:
        """Drop the rows that this process caches. The pool's cache keeps its rows."""
        for producer in self._connection.used:
            producer.clear_cache()

    def clear_kv_cache(self) -> None:
        """Do nothing: workers manage their keys and values."""

    def reset_async_queries(self) -> None:
        """Do nothing: a request is cancelled when its caller is cancelled."""

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Add an adapter to the model, or replace the adapter of that name.

        Args:
            lora_path: folder or hub name of the adapter, as seen by the workers.
            lora_name: name of the adapter.

        Raises:
            The exceptions of `Producer.add_adapter`.
        """
        self._connection.sync.add_adapter(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter from the model.

        Raises:
            The exceptions of `Producer.remove_adapter`.
        """
        with _errors_of_genlm():
            self._connection.sync.remove_adapter(lora_name)

    def stats(self) -> ProducerStats:
        """Counts of this thread's requests and of synchronous requests, added."""
        total = ProducerStats()
        for producer in self._connection.used:
            for name, count in asdict(producer.stats()).items():
                total.add(name, count)
        return total

    def close(self) -> None:
        """Close the connections, as garbage collection of the model does. Closing twice does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        redis = self._address.redis
        if redis is not None and not isinstance(redis, str):
            raise SettingsError("redis: a model that was made with a redis-py client cannot be pickled: give a URL")
        set_since = {"batch_size": self.batch_size, "_timeout": self._timeout}
        return partial(type(self), self._address, tokenizer=self.tokenizer, connects=False), (), set_since

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address.model!r})"


# llamppl chooses its code path by genlm-backend's class AsyncTransformer, whose methods PooledLM has.
AsyncTransformer.register(PooledLM)


def load_model_by_name(
    name: str | None, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> PooledLM:
    """A language model by name.

    Args:
        name: for a pool, the name of the served model, or None for the only served model; otherwise the model's hub
            name or folder.
        backend: None or "pool" connects to a running pool. "hf", "vllm" and "sglang" (or "sgl") start a private server
            and worker with that backend; both end when the model is closed or collected, or when this program ends
            or is killed. "synthetic" (or "mock") starts a worker that returns random rows for the vocabulary of the
            tokenizer `name`. Equal prompts have equal rows, which differ from the rows of genlm-backend's mock.
        llm_opts: options of `PooledLM.from_name`; `when_absent` defaults to "wait", so that programs and workers may
            start in any order. A private worker takes these options except `redis`, `prefix` and `when_absent`; also
            `load_timeout` (max seconds until it serves, 1800 by default), the settings of `lmpool worker --backend …`,
            such as `dtype`, `max_batch` or `kv_cache_bytes`, and genlm-backend's `batch_size`, `hf_opts` and
            `engine_opts`.

    Returns:
        the model, connected.

    Raises:
        SettingsError: an unknown backend, or an option that is unknown or malformed (a ValueError).
        ModelError: the private worker does not serve; the message quotes the end of its log.
        The exceptions of `PooledLM`.
    """
    given: dict[str, Any] = dict(check_kind("llm_opts", llm_opts or {}, Mapping, "a mapping of options to values"))
    if backend is None or backend == "pool":
        check_known(given, pools.POOL_OPTIONS, "an option of a connection")
        pools.check_min_timeout(given)
        return PooledLM.from_name(name, **{"when_absent": "wait"} | given)
    check_choice("backend", backend, ("pool", *_BACKENDS))
    if not isinstance(name, (str, PurePath)) or "\0" in str(name):
        raise SettingsError(f"name: {shown(name)}: the {backend} backend needs the hub name or folder of a model")
    name, backend = str(name), _ALIASES.get(backend, backend)
    loading = {"load_timeout": check_timeout(given.pop("load_timeout"))} if "load_timeout" in given else {}
    options, worker = pools.split(backend, given)
    served = name
    if backend == "synthetic":
        served = PurePath(name).name
        if options.get("tokenizer") is None:
            options["tokenizer"] = read_tokenizer(name, option="name", otherwise="pass tokenizer= in llm_opts")
        worker.setdefault("vocab_size", len(decode_vocab(options["tokenizer"]).tokens))
    tokenizer = options.pop("tokenizer", None)
    pool = PrivatePool(served, backend, pools.command_options(worker), **loading)
    # The model closes the private pool, even if the model's constructor fails.
    model = PooledLM(Address(redis=pool.url, **options), tokenizer=tokenizer, owned=pool)
    model.batch_size = worker.get("max_batch", model.batch_size)
    return model


class _Writable:
    """The memory of a read-only array, declared writable, because torch warns of read-only arrays."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__: dict[str, Any] = {**interface, "data": (interface["data"][0], False)}
        self._owner = array


def tensor_over(array: NDArray[np.float32]) -> Tensor:
    """A tensor that shares an array's memory and keeps the array alive; do not change the tensor in place."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
