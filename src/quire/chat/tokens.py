"""The bytes of tokens, of which several may make one character."""

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
