"""Answers that match a JSON schema or a regular expression: which tokens may come next (llguidance)."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError
from quire.extras import require

ONE_BLANK: Any = {"whitespace_pattern": " ?"}
"""Between two parts of JSON stands one space at most: a small model goes on with blanks until there is no room."""


class Grammars:
    """Grammars over the tokens of one model, whose logits are `vocab_size` wide.

    Raises `ConfigError` where llguidance is missing, for a tokenizer that it cannot use, or a grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)

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

    def open(self, params: SamplingParams) -> Any:
        """Return an `LLMatcher` at the start of the grammar that a request asks for."""
        require("guided", "json_schema or regex")
        from llguidance import LLMatcher  # noqa: PLC0415 - optional

        try:
            if params.regex is not None:
                grammar = LLMatcher.grammar_from_regex(params.regex)
            else:
                schema = str(params.json_schema)
                grammar = LLMatcher.grammar_from_json_schema(schema, defaults=ONE_BLANK)
        except ValueError as error:
            raise ConfigError(f"json_schema cannot be used: {error}") from error
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            name = "json_schema" if params.regex is None else "regex"
            raise ConfigError(f"{name} cannot be used: {matcher.get_error()}")
        return matcher

    def allowed(self, matcher: Any, ahead: np.ndarray) -> np.ndarray:
        """Return which tokens may come after `ahead`, bool [vocab_size]; where that does not match, any.

        Only an end token may come where the grammar is at its end, or took more work than llguidance allows.
        The matcher stays where it is.
        """
        taken = matcher.try_consume_tokens(ahead.tolist())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        matcher.rollback(taken)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
