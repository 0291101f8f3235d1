"""Answers that match a JSON schema or a regular expression: which tokens may come next (llguidance)."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError
from quire.extras import require


class Grammars:
    """Grammars over the tokens of one model, `vocab_size` logits wide.

    Raises `ConfigError` where llguidance is missing, or for a tokenizer or grammar it cannot use.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        require("guided", "json_schema or regex")
        if not getattr(tokenizer, "is_fast", False) or not eos_ids:
            raise ConfigError(
                "json_schema and regex need a fast tokenizer (of the tokenizers library) and an end token; "
                f"this engine has {type(tokenizer).__name__} and end tokens {list(eos_ids)}"
            )
        import llguidance.hf  # noqa: PLC0415 - optional

        self._vocab_size = vocab_size
        self._matcher = llguidance.LLMatcher
        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, vocab_size, list(eos_ids))
        except ValueError as error:
            raise ConfigError(f"llguidance cannot use this tokenizer: {error}") from error

    def open(self, params: SamplingParams) -> Any:
        """Return an `LLMatcher` at the start of the grammar that a request asks for."""
        try:
            if params.regex is not None:
                grammar = self._matcher.grammar_from_regex(params.regex)
            else:
                grammar = self._matcher.grammar_from_json_schema(cast("str", params.json_schema))
        except ValueError as error:
            raise ConfigError(f"json_schema is not a JSON schema: {error}") from error
        matcher = self._matcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            name = "json_schema" if params.regex is None else "regex"
            raise ConfigError(f"this {name} cannot be used: {matcher.get_error()}")
        return matcher

    def allowed(self, matcher: Any, ahead: np.ndarray) -> np.ndarray:
        """Return which tokens may come after `ahead` (bool [vocab_size]); the matcher stays where it is.

        Where `ahead` itself does not match, the answer says nothing. Nothing but an end token may come
        where the grammar is at its end, or took more work than llguidance allows.
        """
        taken = matcher.try_consume_tokens(ahead.tolist())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        matcher.rollback(taken)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
