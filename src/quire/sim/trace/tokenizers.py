"""Texts to token ids: by a tokenizer's file, or byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.core.tokens import IntArray
from quire.errors import ConfigError
from quire.extras import lacking


class Encoder(NamedTuple):
    """A tokenizer: its name for people, and texts to ids, int32 each, without special ones."""

    name: str
    encode: Callable[[list[str]], list[IntArray]]


def encoder_of(path: str | Path | None) -> Encoder:
    """Return the tokenizer at a path; without one, every byte is a token. Raises `ConfigError`.

    Bytes are three to four times as many tokens as a tokenizer makes.
    """
    if path is None:
        return Encoder("bytes, a token each", _bytes_of)
    path = Path(path).expanduser()
    tokenizer = _loaded(path / "tokenizer.json" if path.is_dir() else path)

    def encode(texts: list[str]) -> list[IntArray]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        made = tokenizer.encode_batch(clean, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in made]

    return Encoder(str(path), encode)


def _bytes_of(texts: list[str]) -> list[IntArray]:
    encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
    return [np.frombuffer(data, np.uint8).astype(np.int32) for data in encoded]


def _loaded(file: Path) -> Any:
    try:
        library: Any = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"{lacking('reading a tokenizer', 'tokenizers', 'hf')}; without a tokenizer, "
            "every byte is a token"
        ) from error
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {str(file)!r}: name a tokenizer.json or its folder")
    try:
        tokenizer: Any = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain ones
        raise ConfigError(f"{str(file)!r} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
