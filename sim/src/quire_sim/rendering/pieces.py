"""Texts as token ids in pieces that no token spans, so that each piece is tokenized once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 128 << 20
"""Memory of pieces that are kept with their tokens: those of the last half of it, and of the half before."""

PIECE_BYTES = 250
"""Memory of a piece beside its text and its tokens."""

_BEFORE, _BEHIND = 'a1.)}"é中;', 'a1-#{"(中é'
"""Characters before and behind a line end, by which a tokenizer is tried."""


class PieceTokenizer:
    """The tokens of texts, each as a character of a string: `text[i]` is `chr` of token i.

    A text is cut at special tokens, which tokenizers cut at as well, into segments. New segments are cut at line ends
    between words, if the tokenizer never joins a line with the next one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = None
        if backend is not None and backend.truncation is backend.padding is None:
            self._fast = backend.encode_batch_fast  # without offsets
        self._known: dict[str, str] = {}
        self._older: dict[str, str] = {}
        self._bytes = 0
        added = [*getattr(tokenizer, "added_tokens_decoder", {}).items()]
        self._special = {
            str(token): chr(number)
            for number, token in added
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        words = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, words))})") if words else None
        self._has_lines = self._cuts_lines()

    def segments(self, text: str) -> list[str]:
        """Return a text's tokens in segments; a special token is one."""
        parts = [text] if self._cut is None else self._cut.split(text)
        found: list[str] = []
        for place, part in enumerate(parts):
            if place % 2:
                found.append(self._special[part])
            elif part:
                is_first = place == 0  # some tokenizers put a space before the first text alone
                found.append(self._first(part) if is_first else self._tokens_of(part))
        return found

    def whole(self, text: str, *, add_special_tokens: bool) -> str:
        """Return the tokens of a text at once."""
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return "".join(map(chr, ids))

    def _first(self, text: str) -> str:
        tokens = self._found("\0first\0" + text)
        if tokens is None:
            tokens = self._keep("\0first\0" + text, self.whole(text, add_special_tokens=False))
        return tokens

    def _tokens_of(self, text: str) -> str:
        tokens = self._found(text)
        if tokens is None:
            lines = list(_lines(text)) if self._has_lines else [text]
            found = {each: self._found(each) for each in dict.fromkeys(lines)}
            new = [each for each, known in found.items() if known is None]
            for line, ids in zip(new, self._encoded(new), strict=True):
                found[line] = self._keep(line, "".join(map(chr, ids)))
            tokens = "".join(found[each] or "" for each in lines)
            if len(lines) > 1:
                self._keep(text, tokens)
        return tokens

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts that stand behind a special token."""
        if not texts:
            return []
        if self._special_before is None:
            return self._ids_of(texts)
        before = self._special_before
        return [ids[1:] for ids in self._ids_of([before + each for each in texts])]

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        if self._fast is None:
            return self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [each.ids for each in self._fast(texts, add_special_tokens=False)]

    def _found(self, text: str) -> str | None:
        tokens = self._known.get(text)
        if tokens is None and (tokens := self._older.pop(text, None)) is not None:
            self._keep(text, tokens)
        return tokens

    def _keep(self, text: str, tokens: str) -> str:
        if self._bytes > MAX_BYTES // 2:
            self._older, self._known = self._known, {}
            self._bytes = 0
        self._known[text] = tokens
        self._bytes += len(text) + 2 * len(tokens) + PIECE_BYTES
        return tokens

    @property
    def _special_before(self) -> str | None:
        return next(iter(self._special), None)

    def _cuts_lines(self) -> bool:
        """Return whether texts have the same tokens line by line as at once."""
        texts = [f"x {one}\n{other} y" for one in _BEFORE for other in _BEHIND]
        texts += [json.__doc__ or "", str(getattr(self._tokenizer, "chat_template", "") or "")]
        for text in texts:
            at_once = self._encoded([text])[0]
            if at_once != [token for ids in self._encoded(list(_lines(text))) for token in ids]:
                return False
        return True


def _lines(text: str) -> Iterator[str]:
    """Yield a text in lines; one that ends or begins with a blank stays with its neighbour."""
    begin = 0
    at = text.find("\n")
    while at >= 0:
        end = at + 1
        if at and end < len(text) and not (text[at - 1].isspace() or text[end].isspace()):
            yield text[begin:end]
            begin = end
        at = text.find("\n", end)
    yield text[begin:]
