"""Documents of a conversation: texts that the chat template places, and the prompt in segments around them."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.chat.conversation import ChatMessage, Conversation, Document, template_of
from quire.errors import ConfigError

_MARK = "\ue000{}\ue001"
"""Stands for a document while the template is laid out: characters for private use, which no text needs."""

_BREAK = "\n"

_CHANGED = (
    "documents: the model's tokenizer gives another text for {!r} in parts than as a whole, and documents are encoded "
    "one by one; put them into a message instead"
)

Encode = Callable[[str], list[int]]


class SegmentedPrompt(list[int]):
    """The token ids of a prompt, and its parts, one behind the other: `[head, passage, ..., question]`."""

    def __init__(self, segments: list[list[int]]) -> None:
        super().__init__(token for part in segments for token in part)
        self.segments = segments


def segmented(asked: Conversation, tokenizer: Any, encode: Encode) -> SegmentedPrompt:
    """Lay out a conversation with documents, and encode its parts one by one.

    A template that knows `documents` is given them, each with its title and text; with another they stand before the
    last message of the user, an empty line behind each. What a template puts between two documents is a part of its
    own, so that a document has the same tokens wherever it stands. Raises `ConfigError` where it leaves one out, or
    repeats it, and for a tokenizer whose parts do not make the whole text.
    """
    given = asked.documents or []
    documents = [Document(each) if isinstance(each, str) else each for each in given]
    following = encode_behind(tokenizer, encode)
    if "documents" in template_of(tokenizer):
        marked = [
            {"title": each.title, "text": _MARK.format(at)} for at, each in enumerate(documents)
        ]
        texts = [each.text for each in documents]
        text, ends = asked.text(tokenizer, documents=marked), ""
    else:
        placed = msgspec.structs.replace(asked, messages=_before_last(asked, len(documents)))
        text, ends = placed.text(tokenizer), "\n\n"
        texts = [each.title + "\n" * bool(each.title) + each.text for each in documents]
    segments = [""]
    for at, document in enumerate(texts):
        around = text.split(_MARK.format(at) + ends)
        if len(around) != 2:
            raise ConfigError(
                f"documents: the model's chat template places document {at} {len(around) - 1} times, where it has "
                "to stand once and in order; put it into a message instead"
            )
        segments[-1] = around[0]
        segments += [document + ends, ""]
        text = around[1]
    segments[-1] = text
    head, *others, question = encode(segments[0]), *map(following, segments[1:])
    if not question:
        raise ConfigError("documents: nothing follows them in the prompt; end with a question")
    return SegmentedPrompt([head, *filter(None, others), question])


def encode_behind(tokenizer: Any, encode: Encode) -> Encode:
    """Return the encoding of a part that stands behind others, so that parts decode to the text that they make.

    Some tokenizers put a blank before every text, as Llama 2's does; their parts are encoded behind a line break, whose
    tokens are dropped. Raises `ConfigError` for a tokenizer with which neither gives the text.
    """

    def behind_break(text: str) -> list[int]:
        ids, before = encode(_BREAK + text), encode(_BREAK)
        if ids[: len(before)] != before:
            raise ConfigError(_CHANGED.format(_BREAK + text[:20]))
        return ids[len(before) :] if text else []

    def is_right(following: Encode) -> bool:
        return all(
            tokenizer.decode(encode("a.") + following(text), clean_up_tokenization_spaces=False)
            == tokenizer.decode(encode("a." + text), clean_up_tokenization_spaces=False)
            for text in ("b", " b", "\nb", "(b")
        )

    for following in (encode, behind_break):
        if is_right(following):
            return following
    raise ConfigError(_CHANGED.format("a.b"))


def _before_last(asked: Conversation, count: int) -> list[ChatMessage]:
    """Return messages with marks of so many documents before the user's last one. Raises `ConfigError`."""
    messages = list(asked.messages or ())
    at = max((at for at, each in enumerate(messages) if each.role == "user"), default=None)
    if at is None:
        raise ConfigError("documents: there is no message of the user that they could stand before")
    marks = "".join(_MARK.format(index) + "\n\n" for index in range(count))
    said = marks + str(messages[at].plain()["content"])
    messages[at] = msgspec.structs.replace(messages[at], content=said)
    return messages
