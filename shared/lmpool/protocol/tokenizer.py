"""A model's tokenizer as it travels: the `tokenizer.json` of the package `tokenizers`, compressed, named by its digest.

Workers write it beside the vocabulary, under `Keys.tokenizer`. It is JSON, so reading it runs nobody's code.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

from lmpool.errors import InvalidVocabulary, ProtocolError

MAX_TOKENIZER_BYTES = 96 * 1024 * 1024
"""Most bytes of a `tokenizer.json`; that of a vocabulary of 262,144 tokens has 33 million."""

MAX_PACKED_BYTES = 24 * 1024 * 1024
"""Most bytes of one that is compressed."""

_LEVEL = 6


@dataclass(frozen=True, slots=True)
class PackedTokenizer:
    """A compressed `tokenizer.json`.

    Attributes:
        data: a zlib stream.
        digest: 32 hex digits, the BLAKE2b-128 of `data`.
    """

    data: bytes
    digest: str

    @classmethod
    def pack(cls, text: str) -> PackedTokenizer:
        """Compress a `tokenizer.json`.

        Raises:
            InvalidVocabulary: it is over a limit.
        """
        plain = text.encode()
        if len(plain) > MAX_TOKENIZER_BYTES:
            raise InvalidVocabulary(f"its tokenizer.json has {len(plain)} bytes: at most {MAX_TOKENIZER_BYTES} travel")
        data = zlib.compress(plain, _LEVEL)
        if len(data) > MAX_PACKED_BYTES:
            raise InvalidVocabulary(
                f"its tokenizer.json has {len(data)} bytes when it is compressed: at most {MAX_PACKED_BYTES} travel"
            )
        return cls(data, digest_of(data))


def unpack_tokenizer(data: bytes, digest: str) -> str:
    """The `tokenizer.json` in what a server has as the tokenizer of this digest.

    Raises:
        ProtocolError: it is another, of more bytes than there can be, or no text.
    """
    if len(data) > MAX_PACKED_BYTES:
        raise ProtocolError(f"it has more than {MAX_PACKED_BYTES} bytes")
    if (named := digest_of(data)) != digest:
        raise ProtocolError(f"its digest is {named}")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MAX_TOKENIZER_BYTES)
        if not stream.eof:
            raise ProtocolError(f"it is cut off, or has more than {MAX_TOKENIZER_BYTES} bytes when it is decompressed")
        return plain.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"it cannot be read: {error}") from error


def digest_of(data: bytes) -> str:
    """The name of a packed tokenizer: 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
