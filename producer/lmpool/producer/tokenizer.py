"""Prompts as people type them: text through the model's tokenizer, or token ids."""

from __future__ import annotations

from typing import Any, Protocol

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import ModelInfo


class Tokenizer(Protocol):
    """What the command line uses of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with those that mark its beginning or end for this model, or without."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        ...


def load_tokenizer(
    info: ModelInfo, option: str = "text", otherwise: str = "pass token ids with --ids", **settings: Any
) -> Tokenizer:
    """The tokenizer that belongs to a served model; needs transformers.

    Args:
        info: the model's info.
        option: what the user has given or left out, for an error.
        otherwise: what the user can do instead, for an error.
        settings: as transformers' `AutoTokenizer.from_pretrained` takes them.

    Raises:
        SettingsError: the model has none, or it cannot be loaded here.
    """
    if not info.source:
        raise SettingsError(f"{option}: the model {info.name!r} has no tokenizer; {otherwise}")
    return read_tokenizer(info.source, info.gguf_file, option=option, otherwise=otherwise, **settings)


def read_tokenizer(source: str, gguf_file: str = "", *, option: str, otherwise: str, **settings: Any) -> Tokenizer:
    """The tokenizer of a hub name or folder; needs transformers.

    Args:
        source: the hub name or folder.
        gguf_file: the GGUF file in it that holds the tokenizer, or "".
        option: as `load_tokenizer`.
        otherwise: as `load_tokenizer`.
        settings: as `load_tokenizer`.

    Raises:
        SettingsError: it cannot be loaded here.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SettingsError(
            f"{option}: needs the tokenizer of transformers: pip install 'lmpool[hf]', or {otherwise}"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file or None, **settings)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(f"{option}: the tokenizer of {source!r} does not load: {reason}; or {otherwise}") from error
    tokenizer: Tokenizer = loaded
    return tokenizer


def end_tokens(source: str) -> list[int]:
    """The tokens at which a model's generation config has it stop; none where there is no such config.

    Args:
        source: the hub name or folder.
    """
    from transformers import GenerationConfig

    try:
        ids: Any = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError):
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])


def parse_ids(text: str) -> list[int]:
    """Token ids as typed: integers separated by commas or spaces.

    Raises:
        SettingsError: something else is among them.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise SettingsError(f"ids: {text!r} is not a list of integers such as 1,2,3") from None
