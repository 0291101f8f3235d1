"""Grammars of tool calls, in the text by which a chat template writes them.

The next prompt of the conversation then has the tokens of the answer, and finds them in the cache.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.chat.conversation import ANY_ID, ChatMessage, Conversation, Function, Tool
from quire.chat.grammars import lark_of
from quire.chat.structured import StructuredOutputs
from quire.chat.tools import arguments_schema
from quire.errors import ConfigError

_NAME = "quire_name"
_ARGUMENTS: dict[str, Any] = {"quire": 1, "more": [1, 2]}

_SEPARATORS = ((", ", ": "), (",", ":"))
"""Between items, and between a key and its value, as templates write JSON."""


def called_in_template(asked: Conversation, tokenizer: Any) -> StructuredOutputs | None:
    """Return the form of an answer that must call a function, as the model's chat template writes the call.

    None if it need not call one, and for a template that writes calls otherwise than as JSON between fixed texts.
    """
    grammar = _call(asked, asked.forced_functions(), {}, tokenizer)
    return None if grammar is None else StructuredOutputs(grammar=grammar)


def called_or_formed(
    asked: Conversation, form: StructuredOutputs, tokenizer: Any
) -> StructuredOutputs | None:
    """Return a form's alternative: the form, or a call as the model's chat template writes it.

    What llguidance does not know in the schema of a function's arguments is left out. None as in `called_in_template`.
    Raises `ConfigError`.
    """
    functions = {each.function.name: each.function.parameters for each in asked.callable_tools}
    call = _call(asked, functions, {"lenient": True}, tokenizer)
    if call is None:
        return None
    rules = "start: formed | called", f"formed: {lark_of(form)}", f"called: %lark {{\n{call}\n}}"
    return StructuredOutputs(grammar="\n".join(rules))


def _call(
    asked: Conversation,
    functions: Mapping[str, dict[str, Any] | None] | None,
    options: Mapping[str, Any],
    tokenizer: Any,
) -> str | None:
    """Return the grammar, as llguidance's Lark, of a call; `options` are those of its JSON."""
    if not functions or asked.continue_final_message or not asked.add_generation_prompt:
        return None
    if not all(re.fullmatch(r"[\w.-]+", name) for name in functions):
        return None
    try:
        written = _written(asked, tokenizer)
    except ConfigError:  # a template that refuses this little conversation
        return None
    for item, key in _SEPARATORS:
        head, found, tail = written.partition(json.dumps(_ARGUMENTS, separators=(item, key)))
        if found and _NAME in head + tail:
            form = {"item_separator": item, "key_separator": key, "whitespace_flexible": False}
            around = head, _ended(tail, tokenizer)
            return _lark(functions, around, form | {**options}, tokenizer)
    return None


def _written(asked: Conversation, tokenizer: Any) -> str:
    """Return a call of a marked function with marked arguments as the template writes it; "" if it stands elsewhere."""
    call = Tool(Function(_NAME, arguments=json.dumps(_ARGUMENTS)), "function", ANY_ID)
    said = [ChatMessage(role="user", content="a"), ChatMessage(role="assistant", tool_calls=[call])]
    names = ("tools", "chat_template_kwargs", "reasoning_effort")
    given = {name: getattr(asked, name) for name in names}
    before = Conversation(messages=said[:1], **given).text(tokenizer)
    after = Conversation(messages=said, add_generation_prompt=False, **given).text(tokenizer)
    return after[len(before) :] if after.startswith(before) else ""


def _ended(tail: str, tokenizer: Any) -> str:
    """Return the text behind a call's arguments up to a token that ends the answer."""
    special = (each.content for each in tokenizer.added_tokens_decoder.values() if each.special)
    ends = [at for each in special if (at := tail.find(each)) >= 0]
    return tail[: min(ends)] if ends else tail.rstrip()


def _lark(
    functions: Mapping[str, dict[str, Any] | None],
    around: tuple[str, str],
    options: Mapping[str, Any],
    tokenizer: Any,
) -> str:
    """Return the grammar, as llguidance's Lark, of a call of one of these functions, with texts around its arguments."""
    rules = [f"start: {' | '.join(f'call_{at}' for at in range(len(functions)))}"]
    for at, (name, schema) in enumerate(functions.items()):
        head, tail = (_literals(text.replace(_NAME, name), tokenizer) for text in around)
        rules.append(f"call_{at}: {head} arguments_{at} {tail}")
        rules.append(
            f"arguments_{at}: %json "
            + json.dumps(arguments_schema(schema) | {"x-guidance": options})
        )
    return "\n".join([*rules, "ID: /[a-zA-Z0-9]{9}/"])


def _literals(text: str, tokenizer: Any) -> str:
    """Return a text in Lark: tokens that were added to the vocabulary by their ids, as they are no text there."""
    added = tokenizer.get_added_vocab()
    names = "|".join(map(re.escape, [*sorted(added, key=len, reverse=True), ANY_ID]))
    parts = (part for part in re.split(f"({names})", text) if part)
    return " ".join(
        "ID" if part == ANY_ID else f"<[{added[part]}]>" if part in added else json.dumps(part)
        for part in parts
    )
