"""Answers that match a JSON schema or a regular expression: which tokens may come next (llguidance)."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from quire.errors import ConfigError
from quire.extras import require

ONE_BLANK: Any = {"whitespace_pattern": " ?"}
"""Between two parts of JSON stands one space at most: a small model goes on with blanks until there is no room."""

NUM_KEPT = 32
"""Grammars that are kept compiled: a schema of ten thousand parts takes ten seconds."""


class Grammars:
    """Grammars over the tokens of one model, whose logits are `vocab_size` wide.

    Raises `ConfigError` where llguidance is missing, for a tokenizer that it cannot use, or a grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def open(self, kind: Literal["json_schema", "regex"], text: str) -> "Grammar":
        """Return a grammar at its start; on any thread, and at once where it was opened before."""
        return Grammar(self._compiled(kind, text).deep_copy(), kind, self._vocab_size)

    @cached_property
    def _tokens(self) -> Any:
        if not getattr(self._tokenizer, "is_fast", False) or not self._eos_ids:
            raise ConfigError(
                "json_schema and regex need a fast tokenizer of transformers and an end token, but there are "
                f"{type(self._tokenizer).__name__} and end tokens {self._eos_ids}"
            )
        import llguidance.hf  # noqa: PLC0415 - optional

        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, self._vocab_size, self._eos_ids)
        except ValueError as error:
            raise ConfigError(f"llguidance cannot use this tokenizer: {error}") from error

    def _compile(self, kind: str, text: str) -> Any:
        """Return llguidance's matcher, which goes on itself, and is therefore copied."""
        require("hf", "json_schema or regex")
        from llguidance import LLMatcher  # noqa: PLC0415 - optional

        try:
            if kind == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=ONE_BLANK)
        except ValueError as error:
            raise ConfigError(f"{kind} cannot be used: {error}") from error
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"{kind} cannot be used: {matcher.get_error()}")
        return matcher


class Grammar:
    """Where one answer stands in its grammar.

    `failure`  why it can go on no further, and is no match: it came to a place without an end, or of too much work
    """

    failure: ConfigError | None = None

    def __init__(self, matcher: Any, kind: str, vocab_size: int) -> None:
        self._matcher, self._kind, self._vocab_size = matcher, kind, vocab_size

    def copy(self) -> "Grammar":
        """Return another one at the same place."""
        return Grammar(self._matcher.deep_copy(), self._kind, self._vocab_size)

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by the answer's next tokens."""
        self._matcher.consume_tokens(tokens)

    def allowed(self, ahead: Sequence[int]) -> np.ndarray:
        """Return which tokens may come after `ahead`, bool [vocab_size]; where that does not match, any.

        At its end, and where it has failed, only an end token may come.
        """
        taken = self._matcher.try_consume_tokens(ahead)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            why = str(self._matcher.get_error()).split("\n", 1)[0]
            self.failure = ConfigError(
                f"{self._kind} leads to a place where no token may come: {why}"
            )
        self._matcher.rollback(taken)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
