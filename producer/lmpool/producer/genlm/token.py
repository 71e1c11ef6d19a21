"""Tokens: byte strings that know their id, for two ids may share one byte string."""

from __future__ import annotations

from typing import TypeGuard


class Token(bytes):
    """The byte string of a token together with its id.

    It is used like the byte string, but tokens are equal, hashed and ordered by their ids. It is equal to
    genlm-backend's `Token` of the same id, too, and to plain bytes of the same content.

    Attributes:
        token_id: the id.

    Raises:
        TypeError: the id is not an int, or the byte string not bytes.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        if not isinstance(token_id, int):
            raise TypeError(f"token_id must be an int, not {type(token_id).__name__}")
        if not isinstance(byte_string, bytes):
            raise TypeError(f"byte_string must be bytes, not {type(byte_string).__name__}")
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The byte string alone, as plain bytes."""
        return bytes(self)

    @staticmethod
    def as_bytes(x: bytes) -> bytes:
        """The plain bytes of a token; anything else as it is."""
        return x.byte_string if is_token(x) else x

    @staticmethod
    def is_plain_bytes(x: object) -> bool:
        """Whether `x` is bytes without an id."""
        return isinstance(x, bytes) and not is_token(x)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if is_token(other) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self.token_id != other.token_id if is_token(other) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self.token_id < other.token_id if is_token(other) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.token_id <= other.token_id if is_token(other) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.token_id > other.token_id if is_token(other) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.token_id >= other.token_id if is_token(other) else NotImplemented

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return type(self), (self.token_id, bytes(self))


def is_token(x: object) -> TypeGuard[Token]:
    """Whether `x` is a `Token`, or like one: genlm-backend has a class of its own, which is not imported for this."""
    return isinstance(x, Token) or (isinstance(x, bytes) and hasattr(x, "token_id") and hasattr(x, "byte_string"))
