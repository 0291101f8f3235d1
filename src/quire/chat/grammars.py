"""Answers of a required form: which tokens may come next (llguidance)."""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from quire.chat.structured import StructuredOutputs
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

    def open(self, kind: str, text: str, tags: tuple[str, str] | None = None) -> "Grammar":
        """Return a grammar at its start, of `StructuredOutputs.grammar_of`; on any thread, and at once if it was opened before.

        With `tags`, reasoning between these may precede it; it does if the first tag is "".
        """
        return Grammar(self._compiled(kind, text, tags).deep_copy(), kind, self._vocab_size)

    @cached_property
    def _tokens(self) -> Any:
        if not getattr(self._tokenizer, "is_fast", False) or not self._eos_ids:
            raise ConfigError(
                "structured_outputs needs a fast tokenizer of transformers and an end token, but there are "
                f"{type(self._tokenizer).__name__} and end tokens {self._eos_ids}"
            )
        import llguidance.hf  # noqa: PLC0415 - optional

        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, self._vocab_size, self._eos_ids)
        except ValueError as error:
            raise ConfigError(f"llguidance cannot use this tokenizer: {error}") from error

    def _compile(self, kind: str, text: str, tags: tuple[str, str] | None) -> Any:
        """Return llguidance's matcher, which goes on itself, and is therefore copied."""
        require("hf", "structured_outputs")
        from llguidance import LLMatcher  # noqa: PLC0415 - optional

        try:
            if kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=ONE_BLANK)
            elif kind == "grammar":
                grammar = LLMatcher.grammar_from_lark(_as_lark(text))
            else:
                grammar = LLMatcher.grammar_from_regex(_checked(_regex(kind, text)))
        except ValueError as error:
            raise _unusable(kind, error) from error
        tokens = self._tokens
        if tags is not None:
            grammar = self._behind_reasoning(grammar, *tags)
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if tags is not None and matcher.is_error():  # its own errors have its own places
            self._compiled(kind, text, None)
        if matcher.is_error():
            raise _unusable(kind, _IN_LARK.sub(r"\1", matcher.get_error()))
        return matcher

    def _behind_reasoning(self, grammar: str, opener: str, closer: str) -> str:
        """Return a grammar behind reasoning between two tags, of which an opener that is "" was in the prompt.

        llguidance spells an added token by its id alone, so such a tag may come as a token or as text.
        """
        ends, regex = self._with_added(closer), re.escape(closer).replace("/", "\\/")
        rules = [
            f"start: {'reasoning' if not opener else '(opener reasoning)?'} @form",
            f"reasoning: (text{' | THOUGHT ' + ends if ends else ''}) BREAKS",
            f"text[suffix={json.dumps(closer)}]: /(?s:.*)/",
            f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){regex}(?s:.*)/" if ends else "",
            "BREAKS: /\\n{0,2}/",
        ]
        if opener:
            added = self._with_added(opener)
            rules.append(f"opener: {json.dumps(opener)}{' | ' + added if added else ''}")
        form: dict[str, Any] = {"lark_grammar": grammar}
        if grammar.startswith("{"):  # llguidance's own form, of a schema or a regular expression
            form = json.loads(grammar)["grammars"][0]
        whole = {"name": "answer", "lark_grammar": "\n".join(rules)}
        return json.dumps({"grammars": [whole, form | {"name": "form"}]})

    def _with_added(self, tag: str) -> str:
        """Return a tag as Lark's sequence of added tokens and texts; "" if it has no added token."""
        added = self._tokenizer.added_tokens_decoder
        ids: list[int] = self._tokenizer(tag, add_special_tokens=False)["input_ids"]
        if not any(each in added for each in ids):
            return ""
        spelled = (
            f"<[{each}]>" if each in added else json.dumps(self._tokenizer.decode([each]))
            for each in ids
        )
        return " ".join(spelled)


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

        Where only one text may come, only the token may come by which the tokenizer writes it, so that the next prompt
        finds the answer; the last token of that text may be part of a longer one, and is free. At its end, and where it
        has failed, only an end token may come.
        """
        taken = self._matcher.try_consume_tokens(ahead)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        forced = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            why = str(self._matcher.get_error()).split("\n", 1)[0]
            self.failure = ConfigError(
                f"structured_outputs.{self._kind} leads to a place where no token may come: {why}"
            )
        self._matcher.rollback(taken)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if len(forced) > 1 and allowed[forced[0]]:
            allowed[:] = False
            allowed[forced[0]] = True
        return allowed


def lark_of(form: StructuredOutputs) -> str:
    """Return a form as the right side of a rule of llguidance's Lark. Raises `ConfigError`."""
    kind, text = form.grammar_of
    try:
        if kind == "json":
            return "%json " + json.dumps({"x-guidance": ONE_BLANK} | json.loads(text))
        if kind == "grammar":
            return f"%lark {{\n{_as_lark(text)}\n}}"
        regex = _checked(_regex(kind, text))
    except ValueError as error:
        raise _unusable(kind, error) from error
    escaped = re.sub(r"(?s)\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], regex)
    return f"/(?:{escaped})/"


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_IN_LARK = re.compile(r"at 1\(\d+\): .*?\(in regex\): (.*?)\n   1 \| start: .*", re.DOTALL)
"""An error of a regular expression as llguidance tells it, which puts each into a rule of Lark; the group is about it."""


def _unusable(kind: str, why: object) -> ConfigError:
    return ConfigError(f"structured_outputs.{kind} cannot be used: {str(why).rstrip()}")


def _as_lark(text: str) -> str:
    """Return a grammar as Lark writes it, also of one in GBNF. Raises `ValueError`."""
    if not _GBNF_RULE.search(text):
        return text
    converter: Any = import_module("llguidance.gbnf_to_lark")  # optional
    converter.RepetitionNode.is_atomic = _needs_parentheses
    try:
        return str(converter.gbnf_to_lark(text))
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _needs_parentheses(_: object) -> bool:
    """Say of each repetition that it is not atomic: by default, llguidance writes one that is repeated as `"a"++`."""
    return False


def _regex(kind: str, text: str) -> str:
    """Return a regular expression, or that of a choice."""
    return text if kind == "regex" else _any_of(json.loads(text))


def _any_of(texts: Sequence[str]) -> str:
    """Return the regular expression of any of these texts."""
    return "|".join(
        "".join(
            each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
        )
        for text in texts
    )


def _checked(regex: str) -> str:
    """Return a regular expression whose backslashes all stand before something: llguidance drops one at the end."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError(f"the backslash at its end, character {len(regex)}, stands before nothing")
    return regex
