"""Reasoning in a model's answers, apart from their content."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.errors import ConfigError

TAIL = 32
"""Tokens at a prompt's end that may spell the tag which opens reasoning."""


class ReasoningFormat(NamedTuple):
    """A way to mark reasoning, which precedes an answer's content.

    `opener`  tag at its beginning; the prompt may end with it instead
    `closer`  tag at its end
    `marks`   what the chat templates of models have that write so
    `bare`    tags of content, behind reasoning or without any; if none stands there, the rest is content as it is
    `is_implied`  whether an answer begins within its reasoning, even if the prompt does not open it
    """

    opener: str
    closer: str
    marks: tuple[str, ...]
    bare: tuple[str, ...] = ()
    is_implied: bool = False

    def after(self, tail: str, continued: str = "") -> "ReasoningFormat | None":
        """Return the format of the answer to a prompt; None if its reasoning is over.

        `tail` is the prompt's end, `continued` the message that the answer goes on with. An answer that begins within
        its reasoning has the format with `is_implied`.
        """
        if continued.strip():
            is_open = continued.rfind(self.opener) > continued.rfind(self.closer)
            return self._replace(is_implied=True) if is_open else None
        tail = tail.rstrip()
        if tail.endswith(self.ending):
            return None
        return self._replace(is_implied=self.is_implied or tail.endswith(self.opener))

    @property
    def ending(self) -> str:
        """All tags between reasoning and content."""
        return self.closer + "".join(self.bare[:1])

    @property
    def tags(self) -> tuple[str, str]:
        """The tags of reasoning in an answer: "" for an opener that is in the prompt."""
        return "" if self.is_implied else self.opener, self.ending

    def has_special(self, tokenizer: Any) -> bool:
        """Whether a tag has special tokens, which the text must not leave out."""
        return any(
            each in tag
            for each in tokenizer.all_special_tokens
            for tag in (self.opener, self.closer, *self.bare)
        )

    def split(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """Return an answer's reasoning and content, without tags and the line ends beside them.

        What may become a tag as more text comes is in neither, unless the answer `is_whole`. Each of the two only grows.
        """
        begun = text.lstrip()
        for tag in (self.opener, *self.bare):
            if not is_whole and len(begun) < len(tag) and tag.startswith(begun):
                return "", ""
        if bare := next(filter(begun.startswith, self.bare), ""):
            return "", begun[len(bare) :]
        if begun.startswith(self.opener):
            text = begun[len(self.opener) :]
        elif not self.is_implied:
            return "", text
        thought, closer, content = text.partition(self.closer)
        if not closer and not is_whole:
            sizes = range(len(self.closer) - 1, 0, -1)
            held = next((n for n in sizes if text.endswith(self.closer[:n])), 0)
            thought = text[: len(text) - held]
        if self.bare and closer:
            again = self._replace(is_implied=False)
            more, content = again.split(content, is_whole=is_whole)
            thought += "\n" * bool(more) + more
        return thought.strip("\n"), content.lstrip("\n")

    def num_tokens(self, tokenizer: Any, ids: list[int]) -> int:
        """Return how many tokens of an answer are reasoning, its tags included."""
        text = _decoded(tokenizer, ids)
        if not self.is_implied and not text.lstrip().startswith(self.opener):
            return 0
        if (last := tokenizer.get_added_vocab().get(self.closer)) in ids:
            return ids.index(last) + 1
        closer = next((each for each in (self.ending, self.closer) if each in text), None)
        if closer is None:
            return len(ids)
        sizes = range(len(ids) + 1)
        return bisect_left(sizes, True, key=lambda size: closer in _decoded(tokenizer, ids[:size]))


_THINK = ReasoningFormat("<think>", "</think>", ("</think>",))

FORMATS: Mapping[str, ReasoningFormat] = {
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[/THINK]",)),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        ("<|channel|>analysis",),
        bare=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    ),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", ("<channel|>",)),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", ("</seed:think>",)),
    "granite": ReasoningFormat(
        "Here is my thought process:", "Here is my response:", ("Here is my thought process:",)
    ),
    "qwen3": _THINK,
    "deepseek_r1": _THINK._replace(is_implied=True),
}
"""The formats by vLLM's names; `auto` takes the first one that a chat template shows."""


def check_parser(name: str) -> None:
    """Raise `ConfigError` unless a name is auto, none, or that of a format."""
    if name not in ("auto", "none", *FORMATS):
        names = ", ".join(("auto", "none", *FORMATS))
        raise ConfigError(f"--reasoning-parser is one of {names}; got {name!r}")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of a name; for "auto", that which a chat template shows. None for no reasoning."""
    if name == "auto":
        shown = (each for each in FORMATS.values() if any(mark in template for mark in each.marks))
        return next(shown, None)
    return FORMATS.get(name)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
