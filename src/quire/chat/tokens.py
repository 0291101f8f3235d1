"""The bytes of tokens, of which several may make one character."""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The letters of byte-level BPE, each with its byte."""


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token, also of one that is part of a character."""
    text: str = tokenizer.decode([token])
    name: Any = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" in text and isinstance(name, str):
        if name.startswith("<0x") and len(name) == 6:
            return bytes([int(name[3:5], 16)])
        if all(each in _BYTES for each in name):
            return bytes(_BYTES[each] for each in name)
    return text.encode("utf-8", "replace")


def token_name(raw: Iterable[int]) -> str:
    """Return the name of a token of these bytes: its text, or the bytes if they are none."""
    given = bytes(raw)
    try:
        return given.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in given)


class TextOffsets:
    """Where tokens begin in the text that they make; one that is part of a character begins where that does."""

    def __init__(self) -> None:
        self._decoder, self._next = getincrementaldecoder("utf-8")("replace"), 0

    def take(self, raw: Iterable[int]) -> int:
        """Return where the next token begins, which has these bytes."""
        begin = self._next
        self._next += len(self._decoder.decode(bytes(raw)))
        return begin
