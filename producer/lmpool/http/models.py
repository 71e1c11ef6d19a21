"""The models behind a gateway: how requests name them, their tokenizers, and the tokens that end a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.responses import Response

from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.scripts import read_infos
from lmpool.errors import ProtocolError, UnknownAdapter, UnknownModel, UnknownTokenizer
from lmpool.http.limits import MODEL_HEADER, VERSION_HEADER, Turn
from lmpool.producer import Producer
from lmpool.producer.client.discovery import Discovery
from lmpool.producer.client.requests import Deadline
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import Predictions
from lmpool.protocol.version import split_name
from lmpool.web.models import Models, OpenModel

_MAX_NAMES = 4096  # Max names whose meaning is remembered.
_CONTEXT = 8  # Tokens before a continuation that its first tokens are decoded with.
_CONFIGS = ("generation_config.json", "config.json")  # Files of a model that name its end tokens.


class TokenTexts:
    """The texts of a model's tokens. Without a tokenizer, token 5 has the text `token_id:5`, as vLLM writes it.

    Args:
        tokenizer: the tokenizer that the workers publish, or None.
    """

    def __init__(self, tokenizer: PublishedTokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._json: dict[int, bytes] = {}

    def token(self, token: int) -> str:
        """The text of a token, decoded without its neighbours."""
        text = self._texts.get(token)
        if text is None:
            known = self.tokenizer
            text = self._texts[token] = placeholder(token) if known is None else known.decode([token])
        return text

    def json(self, token: int) -> bytes:
        """The text of a token as JSON; null without a tokenizer."""
        text = self._json.get(token)
        if text is None:
            text = self._json[token] = b"null" if self.tokenizer is None else msgspec.json.encode(self.token(token))
        return text

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=skip_special)

    def after(self, prompt: Sequence[int], ids: Sequence[int], *, skip_special: bool) -> str:
        """The text that token ids add to a prompt: some tokenizers drop a space at the beginning of a text."""
        context = list(prompt[-_CONTEXT:])
        before = self.decode(context, skip_special=skip_special)
        whole = self.decode([*context, *ids], skip_special=skip_special)
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids, skip_special=skip_special)

    async def encode(self, text: str, deadline: Deadline, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; raises UnknownTokenizer if the model has no tokenizer."""
        if self.tokenizer is None:
            raise UnknownTokenizer("the model's workers publish no tokenizer: send token ids")
        return await TOKENIZERS.encode(self.tokenizer, text, deadline.left, add_special_tokens=add_special_tokens)


def placeholder(token: int) -> str:
    """The name of a token in place of its text."""
    return f"token_id:{token}"


class GatewayModel(OpenModel):
    """A model with the texts of its tokens and its end tokens."""

    def __init__(self, producer: Producer) -> None:
        super().__init__(producer)
        self._texts: dict[str, TokenTexts] = {}

    async def texts(self) -> TokenTexts:
        """The texts of the model's tokens; raises as `Producer.tokenizer` if the published tokenizer cannot be read."""
        digest = self.producer.model.tokenizer
        if (texts := self._texts.get(digest)) is None:
            texts = TokenTexts(await self.producer.tokenizer() if digest else None)
            self._texts = {digest: texts}
        return texts

    async def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, from the model's files; none if this machine has no copy of the files."""

        async def read() -> frozenset[int]:
            return await asyncio.to_thread(read_end_ids, self.producer.model)

        found: frozenset[int] = await self.once("end_ids", read)
        return found


def read_end_ids(info: ModelInfo) -> frozenset[int]:
    """The end tokens in a model's files: in its folder, or in the hub's cache on this machine."""
    for name in _CONFIGS if info.source else ():  # The path "" would be this process's working directory.
        path: Any = Path(info.source, name)
        if not path.is_file():
            path = None
            with suppress(ImportError, ValueError):  # ValueError: the source is a path, and no name on the hub.
                from huggingface_hub import try_to_load_from_cache

                path = try_to_load_from_cache(info.source, name)
        if isinstance(path, (str, Path)):
            with suppress(OSError, ValueError, AttributeError):
                ids: Any = msgspec.json.decode(Path(path).read_bytes()).get("eos_token_id")
                if ids is not None:
                    listed = ids if isinstance(ids, list) else [ids]
                    return frozenset(i for i in listed if isinstance(i, int) and 0 <= i < info.vocab_size)
    return frozenset()


@dataclass(frozen=True, slots=True)
class Target:
    """What one request computes with: a model, an adapter, the texts of tokens, and the request's turn.

    Attributes:
        name: the name in the request, "model" or "model:adapter".
    """

    name: str
    model: GatewayModel
    adapter: str
    texts: TokenTexts
    turn: Turn

    @property
    def producer(self) -> Producer:
        """The model's producer."""
        return self.model.producer

    @property
    def info(self) -> ModelInfo:
        """The model info."""
        return self.producer.model

    async def predict(self, ids: list[int], start: int, **options: Any) -> Predictions:
        """The result of `Producer.positions`, with the request's adapter and deadline."""
        return await self.producer.positions(ids, start, **options, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options `adapter` and `timeout` of a producer's call."""
        return {"adapter": self.adapter, "timeout": self.turn.deadline.left}


class Targets:
    """The models that requests may name.

    Args:
        models: the open models.
        default: the model of requests that name none; "" for the only model of the pool.
        redis: the connections that read the name of the only model, which the caller closes.
        keys: the keys of the pool.
    """

    def __init__(self, models: Models[GatewayModel], default: str, redis: Redis, keys: Keys) -> None:
        self._models = models
        self._default = default
        self._discovery, self._redis, self._keys = Discovery(redis, keys), redis, keys
        self._only = ""
        self._names: dict[str, tuple[str, str]] = {}

    @asynccontextmanager
    async def use(self, name: str, turn: Turn, adapter: str = "") -> AsyncIterator[Target]:
        """Open the model that a request names, "model" or "model:adapter"; raises as `Producer.open`.

        `adapter` is the name in a field of its own, for dialects that have one.
        """
        name = name or turn.headers.get(MODEL_HEADER, "") or self._default or await self._find_only(turn)
        model_name, named = await self._split(name)
        try:
            async with self._models.use(model_name or None) as model:
                texts = await model.texts()
                yield Target(name or model.producer.model.base, model, adapter or named, texts, turn)
        except (UnknownModel, UnknownAdapter):
            self._names.pop(name, None)
            raise

    async def answer(
        self, name: str, turn: Turn, make: Callable[[Target], Awaitable[Response]], adapter: str = ""
    ) -> Response:
        """The response that `make` makes with the model that a request names; see `use`.

        The response has a header with the version of the weights that computed all of it. If the pool changes the
        version in the middle, the response is made again.
        """
        async with self.use(name, turn, adapter) as target:
            held = turn.held

            async def attempt(**_: object) -> Response:
                turn.release(held)
                return await make(target)

            response, version = await target.producer.versioned(attempt, timeout=turn.deadline.left)
            response.headers[VERSION_HEADER] = str(version)
            return response

    async def _find_only(self, turn: Turn) -> str:
        """The name of the pool's only model now; of the last one, or "", while no model can be found."""
        with suppress(RedisError, ConnectionError, UnknownModel):
            async with turn.deadline.limit():
                infos = await read_infos(self._redis, self._keys)
                bases = {split_name(name.decode("utf-8", "replace"))[0] for name in infos}
                # Usually one read finds one model. Else find out which of the models has workers.
                self._only = bases.pop() if len(bases) == 1 else (await self._discovery.info(None)).base
        return self._only

    async def _split(self, name: str) -> tuple[str, str]:
        """Split a name into model and adapter. A model's own name may contain colons."""
        if ":" not in name or name in self._names:
            return self._names.get(name, (name, ""))
        split = name, ""
        try:
            async with self._models.use(name):
                pass
        except UnknownModel as error:
            if error.is_loading:
                raise
            model, _, adapter = name.rpartition(":")
            split = model, adapter
        if len(self._names) >= _MAX_NAMES:
            self._names.clear()
        self._names[name] = split
        return split


class Listed(NamedTuple):
    """A name that requests may give, with the model info and the name of the model that it belongs to, or None."""

    name: str
    info: ModelInfo
    parent: str | None


async def list_models(redis: Redis, keys: Keys) -> list[Listed]:
    """The names of the served models; then those of their adapters, and of the versions that workers serve."""
    discovery, by_base = Discovery(redis, keys), dict[str, list[ModelInfo]]()
    for _, info in sorted((await discovery.live()).items()):
        if not info.is_trie:
            by_base.setdefault(info.base, []).append(info)
    served: list[Listed] = []
    for base, infos in by_base.items():
        adapters: list[str] = []
        used = infos[-1]
        with suppress(ProtocolError):  # Invalid data of one model must not hide other models.
            used = await discovery.find(base) or used
        with suppress(ProtocolError):
            adapters = sorted((await AdapterRegistry(redis, keys.model(base), used.lineage).read()).adapters)
        served.append(Listed(base, used, None))
        served += [Listed(f"{base}:{adapter}", used, base) for adapter in adapters]
        if used.version or len(infos) > 1:
            versions = sorted(infos, key=lambda info: info.version)
            served += [Listed(f"{base}@{info.version}", info, base) for info in versions]
    return served
