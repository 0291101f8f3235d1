"""Texts to token ids: by a tokenizer's file, or byte by byte."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.core.tokens import IntArray
from quire.errors import ConfigError
from quire.extras import lacking


class Encoder(Protocol):
    """What turns texts into token ids."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        ...

    def encode(self, texts: list[str]) -> list[IntArray]:
        """Return the ids of each text, int32, without special ones."""
        ...


class Bytes:
    """A token for each byte of UTF-8: three to four times as many as a tokenizer makes."""

    name = "bytes, a token each"

    def encode(self, texts: list[str]) -> list[IntArray]:
        """Return the bytes of each text, int32."""
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
            for text in texts
        ]


class FromFile:
    """A tokenizer of Hugging Face: a `tokenizer.json`, or a folder that has one."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
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
            self._tokenizer: Any = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain ones
            raise ConfigError(f"{str(file)!r} is no tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)

    def encode(self, texts: list[str]) -> list[IntArray]:
        """Return the ids of each text, int32."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        made = self._tokenizer.encode_batch(clean, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in made]


def encoder_of(path: str | Path | None) -> Encoder:
    """Return the tokenizer at a path; without one, `Bytes`. Raises `ConfigError`."""
    return Bytes() if path is None else FromFile(Path(path).expanduser())
