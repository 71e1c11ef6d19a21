"""`PooledLM`, the language model that genlm-control, genlm-bytes and llamppl run on, with its rows from a pool.

`load_model_by_name` connects it to a pool that runs, or to a private one that it starts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePath
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lmpool.broker.server import RedisLike
from lmpool.errors import SettingsError, UnknownAdapter
from lmpool.producer.client.requests import check_timeout
from lmpool.producer.client.session import Priority, WhenAbsent
from lmpool.producer.client.session_per_loop import CopiedAsItself
from lmpool.producer.genlm.connection import PREFIX, Address, Connection, Owned, PrivatePool, WorkerCommand, seconds_of
from lmpool.producer.genlm.llm_opts import MIN_TIMEOUT_S, check_known, command_options, split
from lmpool.producer.metrics import ProducerStats
from lmpool.producer.tokenizer import load_tokenizer, read_tokenizer
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.prompt import not_token_ids
from lmpool.settings import shown
from lmpool.vocabulary import decode_vocab

try:
    from genlm.backend.llm import AsyncLM, AsyncTransformer
    from genlm.backend.tokenization import Token
except ImportError as error:
    raise ImportError(f"PooledLM needs genlm-backend: pip install 'lmpool[genlm]' ({error})") from error

_BACKENDS = {
    "hf": "hf",
    "vllm": "vllm",
    "sglang": "sglang",
    "sgl": "sglang",
    "synthetic": "synthetic",
    "mock": "synthetic",
}
_GENLM_BATCH_SIZE = 20
# Tokens of one request: all of a long continuation may take more seconds than a request has.
_MAX_AT_ONCE = 64


class UnknownLora(UnknownAdapter, ValueError):
    """The model has no adapter of that name; a ValueError too, as genlm-backend raises."""


@contextmanager
def _errors_of_genlm() -> Iterator[None]:
    """Raise `UnknownLora` for an unknown adapter: users of genlm-backend expect a ValueError."""
    try:
        yield
    except UnknownAdapter as error:
        raise UnknownLora(str(error)) from None


class PooledLM(CopiedAsItself, AsyncLM):  # type: ignore[misc]  # genlm-backend has no types.
    """A genlm-backend `AsyncLM` whose rows come from a pool; make it with `from_name`.

    Coroutines ask in their own event loop, one `asyncio.run` after another; the synchronous methods work inside a
    running event loop too. It may be used from several threads, and after a fork. A copy is the model itself; a
    pickled one connects again where it is unpickled, by the same settings.

    Rows are torch float32 tensors of shape (V,) on the CPU, V being the model's, in the memory of the producer's
    cache: they must not be changed in place.

    Without a `timeout` a request waits as long as a worker serves the model or loads it. It ends in NoWorker when none
    has lived for a lease (with `when_absent="wait"` for a minute more), and in ServerError when the server has been
    away for a minute.

    Wherever it takes `lora_name`, an adapter that the model does not have raises `UnknownLora`, which is an
    `UnknownAdapter` and a ValueError; otherwise all methods raise what `Producer.logprobs` raises.

    Args:
        address: which model, and where.
        tokenizer: the model's; None for the one that the model's info names.
        owned: closed together with it; None for nothing.

    Attributes:
        tokenizer: the tokenizer, one of transformers.
        byte_vocab: genlm-backend's `Token` of every id of the tokenizer.
        str_vocab: the text of every id of the tokenizer.
        device: where the rows are, the CPU.
        batch_size: that of genlm-backend's AsyncTransformer, for programs that set it. It changes nothing: workers
            batch whatever they find, up to a bound of their own.

    Raises:
        ServerError, UnknownModel, AmbiguousModel, NoWorker: as `Producer.open`.
        SettingsError: a value is malformed, or the tokenizer cannot be loaded.
        InvalidVocabulary: the tokenizer's tokens cannot be read.
    """

    device = torch.device("cpu")

    def __init__(self, address: Address, *, tokenizer: Any = None, owned: Owned | None = None) -> None:
        connection = Connection(address, owned)
        try:
            # Connects, so that a wrong name fails here and not in the middle of somebody's inference.
            info = connection.sync.model
            # Under its name from now on: others may be served by the time it is pickled or connects again.
            named = replace(address, model=info.name)
            self._take(named, connection, _tokenizer_of(info) if tokenizer is None else tokenizer)
        except BaseException:
            connection.close()
            raise

    def _take(self, address: Address, connection: Connection, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokens, self.str_vocab = decode_vocab(tokenizer)
        self.byte_vocab = [Token(index, token) for index, token in enumerate(tokens)]
        self.batch_size = _GENLM_BATCH_SIZE
        self._timeout = address.timeout
        self._seconds = seconds_of(address.timeout)
        self._address = address
        self._connection = connection
        weakref.finalize(self, connection.abandon).atexit = False

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
            name: what the model is served as; None for the only one that is served.
            redis: URL, or a redis-py client whose address and credentials are taken over (the model cannot be
                pickled then); None means `LMPOOL_REDIS_URL`, then this user's embedded server.
            timeout: seconds that a request may take; infinity: as long as a worker serves the model or loads it.
            cache_bytes: bytes of rows that are kept for coroutines of one thread, and as much again for synchronous
                calls; 0 for none.
            prefix: prefix of the pool's Redis keys.
            tokenizer: the model's; None for the one that the model's info names.
            when_absent: what connecting and asking do while no worker serves the model: "wait" until `timeout` has
                passed (without one: for a minute), or "raise" (see `Producer`).
            priority: "interactive", or "bulk" for what yields to all others (see `Producer`).

        Raises:
            As the class.
        """
        address = Address(name, redis, timeout, cache_bytes, prefix, when_absent, priority)
        return cls(address, tokenizer=tokenizer)

    @property
    def timeout(self) -> float:
        """Seconds that a request may take; infinity: as long as a worker serves the model or loads it.

        A timeout of less than 1 s is kept and changes nothing: to genlm-backend it is for how long a batch waits for
        companions, 0 among them, and a pool's workers wait for none.

        Raises:
            SettingsError: it is set to something else than a number from 0 on.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        checked = 0.0 if seconds == 0 and seconds is not False else seconds_of(seconds)
        if checked >= MIN_TIMEOUT_S:
            self._seconds = checked
            self._address = replace(self._address, timeout=seconds)
        self._timeout = seconds

    @property
    def info(self) -> ModelInfo:
        """The model's info: V (`vocab_size`), limits, adapters."""
        return self._connection.sync.model

    async def next_token_logprobs(self, token_ids: Any, lora_name: str | None = None) -> torch.Tensor:
        """The log-probabilities of the token that follows a prompt.

        Args:
            token_ids: list, tuple or 1-D integer array (numpy, torch) of token ids.
            lora_name: an adapter; None for none.

        Returns:
            float32 tensor of shape (V,), not to be changed in place.
        """
        with _errors_of_genlm():
            work = self._connection.producer.logprobs(token_ids, adapter=_adapter(lora_name), timeout=self._seconds)
            return tensor_over(await work)

    def next_token_logprobs_sync(self, token_ids: Any, lora_name: str | None = None) -> torch.Tensor:
        """As `next_token_logprobs`, for synchronous callers; a running event loop stands still meanwhile."""
        with _errors_of_genlm():
            sync = self._connection.sync
            return tensor_over(sync.logprobs(token_ids, adapter=_adapter(lora_name), timeout=self._seconds))

    async def batch_next_token_logprobs(
        self, token_ids_list: Iterable[Any], lora_name: str | None = None
    ) -> torch.Tensor:
        """The rows of several prompts.

        Args:
            token_ids_list: prompts, each as `next_token_logprobs` takes it.
            lora_name: an adapter for all of them; None for none.

        Returns:
            float32 tensor of shape (n, V), the caller's own.
        """
        with _errors_of_genlm():
            rows = await self._connection.producer.batch_logprobs(
                token_ids_list, adapter=_adapter(lora_name), timeout=self._seconds
            )
        return torch.from_numpy(rows)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Iterable[Any], lora_name: str | None = None
    ) -> torch.Tensor:
        """As `batch_next_token_logprobs`, for synchronous callers."""
        with _errors_of_genlm():
            rows = self._connection.sync.batch_logprobs(
                token_ids_list, adapter=_adapter(lora_name), timeout=self._seconds
            )
        return torch.from_numpy(rows)

    def next_token_logprobs_uncached(self, token_ids: Any, lora_name: str | None = None) -> torch.Tensor:
        """As `next_token_logprobs_sync`, computed anew by a worker, whatever is cached."""
        with _errors_of_genlm():
            row = self._connection.sync.logprobs(
                token_ids, fresh=True, adapter=_adapter(lora_name), timeout=self._seconds
            )
        return tensor_over(row)

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

        With a seed the tokens are drawn here from full rows, by a torch generator: the tokens that genlm-backend draws
        from the same rows. Without one a worker draws many in one request, so that nothing else travels, and
        `torch.manual_seed` has no effect.

        Args:
            prompt_token_ids: the prompt, as `next_token_logprobs` takes it.
            max_tokens: most tokens to draw.
            eos_token_ids: tokens that end the continuation and are no part of it.
            temperature: what log-probabilities are divided by; 0 takes the likeliest token each time.
            seed: of the generator.
            lora_name: an adapter; None for none.

        Returns:
            the token ids after the prompt.
        """
        if isinstance(prompt_token_ids, (str, Mapping)) or not hasattr(prompt_token_ids, "__iter__"):
            raise not_token_ids(prompt_token_ids)
        prompt = list(prompt_token_ids)
        ends = frozenset(eos_token_ids)
        # The likeliest token needs no seed; genlm-backend would divide by 0.
        if seed is not None and temperature != 0:
            continuation: list[int] = await super().sample(prompt, max_tokens, ends, temperature, seed, lora_name)
            return continuation
        generated: list[int] = []
        while len(generated) < max_tokens:
            made = await self._generate(prompt + generated, max_tokens - len(generated), ends, temperature, lora_name)
            if made[-1] in ends:
                return generated + made[:-1]
            generated += made
        return generated

    async def _generate(
        self, token_ids: list[int], max_tokens: int, ends: frozenset[int], temperature: float, lora_name: str | None
    ) -> list[int]:
        """At least one token, and no more than the model has room for: the one that has none may never be drawn."""
        producer = self._connection.producer
        with _errors_of_genlm():
            await producer.open()
            room = producer.model.max_prompt_tokens - len(token_ids) + 1
            (made,) = await producer.generate(
                token_ids,
                max(1, min(max_tokens, room, _MAX_AT_ONCE)),
                # What is no token never ends it.
                stop=sorted(end for end in ends if 0 <= end < producer.model.vocab_size),
                temperature=temperature,
                adapter=_adapter(lora_name),
                timeout=self._seconds,
            )
        return [int(token) for token in made.ids]

    def cache_kv(self, prompt_tokens: Any, lora_name: str | None = None) -> None:
        """Have a worker compute a prompt's row, so that prompts that begin with it cost their new tokens only.

        A hint: one worker is warmed, and none where the row is cached; workers drop the keys and values that were used
        least recently.
        """
        with _errors_of_genlm():
            self._connection.sync.warm(prompt_tokens, adapter=_adapter(lora_name), timeout=self._seconds)

    def clear_cache(self) -> None:
        """Drop the rows that are kept in this process. Those in the pool's cache stay, for everyone who asks."""
        self._connection.forget_rows()

    def clear_kv_cache(self) -> None:
        """Nothing: keys and values are the workers', which bound them."""

    def reset_async_queries(self) -> None:
        """Nothing: a request whose caller has gone is taken back by itself."""

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load an adapter on every worker of the model; one of the same name is replaced.

        Args:
            lora_path: folder or hub name of the adapter, as the workers see it.
            lora_name: its name from now on.

        Raises:
            As `Producer.add_adapter`.
        """
        self._connection.sync.add_adapter(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter from every worker of the model.

        Raises:
            As `Producer.remove_adapter`.
        """
        with _errors_of_genlm():
            self._connection.sync.remove_adapter(lora_name)

    def stats(self) -> ProducerStats:
        """What became of this thread's requests and of the synchronous ones, together."""
        return self._connection.stats()

    def close(self) -> None:
        """Close the connections; closing twice does nothing. Without it, they are closed when the model is dropped."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        redis = self._address.redis
        if redis is not None and not isinstance(redis, str):
            raise SettingsError(
                "redis: a model that was made with a redis-py client cannot be pickled: make it with a URL"
            )
        set_since = {"batch_size": self.batch_size, "_timeout": self._timeout}
        return _reconnected, (type(self), self._address, self.tokenizer), set_since

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address.model!r})"


# llamppl decides by genlm-backend's classes which methods a model has; PooledLM has those of this one.
AsyncTransformer.register(PooledLM)


def _reconnected(kind: type[PooledLM], address: Address, tokenizer: Any) -> PooledLM:
    """A model that has been pickled; it connects at the first request."""
    model = kind.__new__(kind)
    model._take(address, Connection(address), tokenizer)
    return model


def _adapter(lora_name: str | None) -> str:
    return "" if lora_name is None else lora_name


def _tokenizer_of(info: ModelInfo) -> Any:
    return load_tokenizer(info, option="tokenizer", otherwise="pass tokenizer=")


def load_model_by_name(
    name: str | None, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> PooledLM:
    """A language model by name.

    Args:
        name: for the pool what the model is served as, None for the only one; otherwise the hub name or folder of the
            model.
        backend: None or "pool" connects to a pool that runs. "hf", "vllm" and "sglang" (or "sgl") start a private
            server and a worker with that backend, which end with `close`, with the model or with this program,
            however it ends. "synthetic" (or "mock") does so with random rows, for the vocabulary of the tokenizer
            `name`: other rows than genlm-backend's mock has, but as there the same ones for the same prompt.
        llm_opts: options of `PooledLM.from_name`; without `when_absent` it is "wait", so that programs and workers may
            start in any order. For a private worker those but `redis`, `prefix` and `when_absent`, `load_timeout`
            (seconds until it must serve, 1800 by default), the settings of `lmpool worker --backend …`, such as
            `dtype`, `max_batch` or `kv_cache_bytes`, and genlm-backend's `batch_size`, `hf_opts` and `engine_opts`.

    Returns:
        the model, connected.

    Raises:
        SettingsError: another backend, or an option that is unknown or malformed (a ValueError).
        ModelError: the private worker does not serve; the end of its log is quoted.
        As `PooledLM`.
    """
    if llm_opts is not None and not isinstance(llm_opts, Mapping):
        raise SettingsError(f"llm_opts: {shown(llm_opts)} is not a mapping of options to values")
    given = dict(llm_opts or {})
    if backend is None or backend == "pool":
        check_known(given)
        return PooledLM.from_name(name, **{"when_absent": "wait"} | given)
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise SettingsError(f"backend: {shown(backend)} is not one of pool, {', '.join(_BACKENDS)}")
    if not isinstance(name, (str, PurePath)) or "\0" in str(name):
        raise SettingsError(f"name: {shown(name)}: the {backend} backend needs the hub name or folder of a model")
    return _load_privately(str(name), _BACKENDS[backend], given)


def _load_privately(name: str, backend: str, given: dict[str, Any]) -> PooledLM:
    loading = {"load_timeout": check_timeout(given.pop("load_timeout"))} if "load_timeout" in given else {}
    options, worker = split(backend, given)
    served = name
    if backend == "synthetic":
        served = PurePath(name).name
        if options.get("tokenizer") is None:
            options["tokenizer"] = read_tokenizer(name, option="name", otherwise="pass tokenizer= in llm_opts")
        worker.setdefault("vocab_size", len(decode_vocab(options["tokenizer"]).tokens))
    tokenizer = options.pop("tokenizer", None)
    pool = PrivatePool(WorkerCommand(served, backend, command_options(worker), **loading))
    try:
        model = PooledLM(Address(redis=pool.url, prefix=PREFIX, **options), tokenizer=tokenizer, owned=pool)
    except BaseException:
        pool.close()
        raise
    model.batch_size = worker.get("max_batch", model.batch_size)
    return model


class _Writable:
    """A read-only array's memory, offered as writable: torch has no read-only tensors, and warns of such arrays."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__: dict[str, Any] = {**interface, "data": (interface["data"][0], False)}
        self._owner = array


def tensor_over(array: NDArray[np.float32]) -> torch.Tensor:
    """A tensor of the same shape and dtype in the same memory, which it keeps alive.

    Others may have the same memory, so the tensor must not be changed in place.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
