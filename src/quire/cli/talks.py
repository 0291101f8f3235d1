"""The texts of the demo: a long system prompt and questions, for quire-tiny and for any assistant."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Talks(NamedTuple):
    """Conversations under one system prompt of rules and notes: the questions of each."""

    rules: str
    notes: str
    questions: list[list[str]]

    @property
    def system(self) -> str:
        """The system prompt."""
        return f"{self.rules}\n\n{self.notes.strip()}"


def _read(name: str) -> Talks:
    found: dict[str, Any] = tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))
    return Talks(**found)


TINY_TALKS = _read("talks_tiny.toml")
"""Conversations that quire-tiny has learned by heart."""

REAL_TALKS = _read("talks.toml")
"""Conversations with any other model."""
