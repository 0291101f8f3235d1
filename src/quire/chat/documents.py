"""Documents of a conversation: texts that the chat template places, and the prompt in segments around them."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.chat.conversation import ChatMessage, Conversation, template_of
from quire.errors import ConfigError

_MARK = "\ue000{}\ue001"
"""Stands for a document while the template is laid out: characters for private use, which no text needs."""

Encode = Callable[[str], list[int]]


class SegmentedPrompt(list[int]):
    """The token ids of a prompt, and its parts, one behind the other: `[head, passage, ..., question]`."""

    def __init__(self, segments: list[list[int]]) -> None:
        super().__init__(token for part in segments for token in part)
        self.segments = segments


def segmented(asked: Conversation, tokenizer: Any, encode: Encode) -> SegmentedPrompt:
    """Lay out a conversation with documents, and encode its parts one by one.

    A template that knows `documents` is given them, each with its text alone; with another they stand before the last
    message of the user, an empty line behind each. What a template puts between two documents is a part of its own, so
    that a document has the same tokens wherever it stands. Raises `ConfigError` where it leaves one out, or repeats it.
    """
    documents = asked.documents or []
    if "documents" in template_of(tokenizer):
        marked = [{"title": "", "text": _MARK.format(at)} for at in range(len(documents))]
        text, ends = asked.text(tokenizer, documents=marked), ""
    else:
        placed = msgspec.structs.replace(asked, messages=_before_last(asked, len(documents)))
        text, ends = placed.text(tokenizer), "\n\n"
    segments = [""]
    for at, document in enumerate(documents):
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
    head, *others, question = map(encode, segments)
    if not question:
        raise ConfigError("documents: nothing follows them in the prompt; end with a question")
    return SegmentedPrompt([head, *filter(None, others), question])


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
