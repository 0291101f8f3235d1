"""From tokens to text, piece by piece, and where an answer ends."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character decodes to."""

_PART = 3
"""Tokens that the bytes of one character, of which the last is missing, are spread over at most."""

_WINDOW = 8
"""Tokens that are decoded again with the next one, so that it has its space and its whole character."""

_GARBLED = 64
"""Tokens without a whole character at their end: these are no text."""


class TextTerms(Protocol):
    """Text options of a request, with vLLM's names.

    detokenize                  whether there is to be any text
    skip_special_tokens         whether special tokens are left out of it
    stop                        texts that end it, from the `min_tokens`-th token on
    include_stop_str_in_output  whether the text that ended it is included
    """

    @property
    def detokenize(self) -> bool: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def stop(self) -> Sequence[str] | None: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...


class TextStream:
    """The text of one answer as it comes, and whether a text of `stop` ended it.

        stream.feed(token_ids)   returns text that is new and sure; takes no token behind one that ends it
        stream.finish()          returns what was held back, when no token follows
        stream.text              all that was returned
        stream.stopped           the text of `stop` that ended the answer, or None
        stream.num_tokens        tokens taken

    Held back are parts of a character, and what may become a text of `stop`, of which nothing is said.
    All pieces together are what the tokenizer makes of all tokens, where these are whole characters.
    `prompt_ids` are the prompt's last tokens: some tokenizers begin a text with a space only behind others.
    Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Any, terms: TextTerms, prompt_ids: Sequence[int] = ()) -> None:
        self.text = ""
        self.stopped: str | None = None
        self.num_tokens = 0
        self._terms = terms
        self._stops = tuple(terms.stop or ())
        self._held = ""
        self._decoder: _Decoder | None = None
        if tokenizer is not None and terms.detokenize:
            self._decoder = _Decoder(tokenizer, terms.skip_special_tokens, prompt_ids)

    @property
    def tells(self) -> bool:
        """Whether there is any text to come."""
        return self._decoder is not None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, and return the text that is sure now."""
        said = ""
        for ids in [[token] for token in token_ids] if self._stops else [token_ids]:
            if self.stopped is None:
                self.num_tokens += len(ids)
                said += self._released("" if self._decoder is None else self._decoder.add(ids))
        self.text += said
        return said

    def finish(self) -> str:
        """Return the rest of the text; a character that was cut off is U+FFFD."""
        rest, self._held = self._held, ""
        if self._decoder is not None:
            rest += self._decoder.rest()
            self._decoder = None
        self.text += rest
        return rest

    def _released(self, new: str) -> str:
        """Return what may be said of the text held back and `new`; a text of `stop` may end in `new` only."""
        if not self._stops:
            return new
        text = self._held + new
        found: list[tuple[int, int, str]] = []
        if self.num_tokens > self._terms.min_tokens:
            for stop in self._stops:
                start = text.find(stop, max(len(self._held) + 1 - len(stop), 0))
                if start >= 0:
                    found.append((start + len(stop), start, stop))
        if found:
            end, start, stop = min(found)
            self.stopped, self._held, self._decoder = stop, "", None
            return text[: end if self._terms.include_stop_str_in_output else start]
        sure = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[sure:]
        return text[:sure]


class _Decoder:
    """Tokens in, whole characters out; `_shown` counts the characters of the window that are out.

    What ends in U+FFFD may be part of a character. It is one no longer when so many tokens followed that
    a character of four bytes would be whole. A character that the prompt began is said once it is whole; where it
    never is, its U+FFFD are the prompt's.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        if getattr(tokenizer, "is_fast", False):  # its own decoding, without what is laid around it
            decode = tokenizer.backend_tokenizer.decode
        else:
            decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._decode = partial(decode, skip_special_tokens=skip_special_tokens)
        self._window = [int(token) for token in prompt_ids[-_WINDOW:]]
        self._whole = len(self._window)  # tokens of it up to the end of a character
        text = self._decode(self._window)
        self._shown = len(text.rstrip(_HALF))
        self._prompts = len(text) - self._shown  # halves at the prompt's end

    def add(self, ids: Sequence[int]) -> str:
        more = [int(token) for token in ids]
        text = self._decode(self._window + more)
        if len(more) > 1 and text.endswith(_HALF):  # some decoders garble whole runs
            return "".join(self.add([token]) for token in more)
        self._window += more
        sure = len(text)
        if text.endswith(_HALF):
            sure = len(text.rstrip(_HALF))
            if len(self._window) - self._whole > _PART:
                sure = max(sure, len(self._decode(self._window[:-_PART])))
        new, said = text[self._shown : sure], self._said(text[self._shown : sure])
        self._shown = max(self._shown, sure)
        if new and sure == len(text):
            if len(self._window) > _WINDOW:
                del self._window[: self._whole]
                self._shown = len(self._decode(self._window))
            self._whole = len(self._window)
        elif len(self._window) - self._whole > _GARBLED:
            self._shown -= len(self._decode(self._window[:-_PART]))
            del self._window[:-_PART]
            self._shown, self._whole = max(self._shown, 0), 0
        return said

    def rest(self) -> str:
        return self._said(self._decode(self._window)[self._shown :])

    def _said(self, new: str) -> str:
        """Return new text without the halves of the prompt."""
        num_halves, self._prompts = (self._prompts, 0) if new else (0, self._prompts)
        return new[:num_halves].lstrip(_HALF) + new[num_halves:]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
