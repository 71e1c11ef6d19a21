r"""Byte strings as people read and type them: text, with escapes for what is not text.

Printable UTF-8 stands for itself. A quotation mark and a backslash have a backslash before them; `\n`, `\r` and `\t`
are what they are everywhere; `\xe2` is one byte, `\u200b` and `\U000e0001` are the UTF-8 of a character. What
`to_text` writes, `from_text` reads back.
"""

from __future__ import annotations

import re

from lmpool.checks import shown
from lmpool.errors import SettingsError

_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_READ = {written[1]: char for char, written in _SHORT.items()}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))", re.DOTALL)
# Where Python puts a byte that is not UTF-8 (PEP 383): 0xDC00 + the byte.
_ESCAPED_BYTES = range(0xDC80, 0xDD00)


def to_text(data: bytes) -> str:
    """A byte string for people to read."""
    return "".join(map(_written, data.decode("utf-8", "surrogateescape")))


def from_text(text: str) -> bytes:
    """The byte string that a text stands for.

    Raises:
        SettingsError: an escape that does not exist.
    """
    try:
        data = bytearray()
        at = 0
        for escape in _ESCAPE.finditer(text):
            data += text[at : escape.start()].encode("utf-8", "surrogateescape") + _read(escape)
            at = escape.end()
        return bytes(data + text[at:].encode("utf-8", "surrogateescape"))
    except (UnicodeEncodeError, OverflowError, ValueError) as error:
        raise SettingsError(
            rf"text: {shown(text, 120)} has {error}: escapes are \\ \" \n \r \t, \xe2 for a byte, and \u200b or "
            r"\U0001f600 for a character"
        ) from None


def _written(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code in _ESCAPED_BYTES:
        return f"\\x{code - 0xDC00:02x}"
    if char.isprintable():
        return char
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _read(escape: re.Match[str]) -> bytes:
    byte, short, long, char = escape.groups()
    if byte:
        return bytes([int(byte, 16)])
    if short or long:
        code = int(short or long, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"{escape[0]}, which is not a character")
        return chr(code).encode()
    if char not in _READ:
        raise ValueError(f"a backslash before {char!r}" if char else "a backslash at its end")
    return _READ[char].encode()
