"""A conversation as a model reads it, by its chat template, and which tools an answer may or must call."""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, Literal

import msgspec

from quire.chat.tools import ToolCall, call_schema
from quire.errors import ConfigError

SEEN = 60
"""Characters of a refused value that an error shows."""

ANY_ID = "quireCall"
"""The id of a call that brings none, as in the old form: nine letters, as Mistral's templates want them."""


class Function(msgspec.Struct, omit_defaults=True):
    """A function that an answer may call, or, with its arguments as JSON text, one that was called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    """A tool of a conversation, a call of one, or which one to call."""

    function: Function
    type: Literal["function"] | None = None
    id: str | None = None


class TextPart(msgspec.Struct):
    """A part of a message's content: text, since models that are served read nothing else."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Tool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Function | None = None

    def __post_init__(self) -> None:
        """Translate the old form of calls and results: `function_call`, and messages of the role function."""
        if self.function_call is not None:
            if self.tool_calls:  # a ValueError: the error of the body adds the place
                raise ValueError("function_call is the old form of tool_calls; give one of them")
            self.tool_calls = [Tool(self.function_call, "function", ANY_ID)]
            self.function_call = None
        if self.role == "function":
            self.role, self.tool_call_id = "tool", ANY_ID

    def plain(self, template: str = "") -> dict[str, Any]:
        """Return it as a template reads it: text joined, arguments of calls as data. Raises `ConfigError`.

        A developer's message is the system's, unless the template knows developers.
        """
        said: dict[str, Any] = {"content": "", **msgspec.to_builtins(self)}
        if self.role == "developer" and self.role not in template:
            said["role"] = "system"
        if isinstance(self.content, list):
            said["content"] = "".join(part.text for part in self.content)
        for call in said.get("tool_calls", ()):
            given = call["function"].get("arguments") or "{}"
            try:
                call["function"]["arguments"] = msgspec.json.decode(given)
            except msgspec.DecodeError:
                raise ConfigError(
                    f"messages: the arguments of a call are JSON, got {given[:SEEN]!r}"
                ) from None
        if thought := said.pop("reasoning", None):
            said.setdefault("reasoning_content", thought)
        return said


_SWITCH = re.compile(r"\b(?:if|not|and|or)\s+\(*(enable_thinking|thinking)\b")
"""A variable of a chat template that switches reasoning on and off."""


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text that an answer is to be found in, with its title; `id` is the client's own."""

    text: str
    title: str = ""
    id: str | int | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """Messages, and the tools that an answer may call; names as in OpenAI's chat completions.

    chat_template           the template, in place of the model's; for a `PromptReader` that trusts those of requests
    documents               texts that the answer is to be found in, placed by the chat template (`documents`)
    continue_final_message  whether the answer goes on with the last message, which stays open
    reasoning_effort        how much the model reasons first: given to the template, or "none" to its switch
    """

    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Tool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    documents: list[str | Document] | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that an answer may call: none where the choice is "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    def followed_by(self, answer: ChatMessage) -> "Conversation":
        """Return it with an answer and what comes next: results of the answer's calls, or a user's message."""
        called = answer.tool_calls or ()
        results = [ChatMessage(role="tool", content="a", tool_call_id=each.id) for each in called]
        after = results or [ChatMessage(role="user", content="a")]
        given = {name: getattr(self, name) for name in Conversation.__struct_fields__}
        given["messages"] = [*(self.messages or ()), answer, *after]
        return Conversation(**given)

    def text(self, tokenizer: Any, **options: Any) -> str:
        """Return it as the model's text, ready for the answer; `options` are the template's. Raises `ConfigError`."""
        if not self.messages:
            raise ConfigError("messages is empty; send at least one")
        tools = self.callable_tools
        template = template_of(tokenizer, with_tools=bool(tools))
        if tools and template and not re.search(r"\btools\b", template):
            raise ConfigError(
                "tools: the model's chat template has no place for tools, so the model would not see them; "
                "describe them in a message, or use a model whose template has tools"
            )
        messages = [each.plain(template) for each in self.messages]
        for each in messages:
            if thought := each.get("reasoning_content"):  # templates know it by one of these names
                each |= {"reasoning": thought, "thinking": thought}
        return laid_out(
            tokenizer,
            messages,
            self._variables(template),
            tools=msgspec.to_builtins(tools) or None,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            tokenize=False,
            **options,
        )

    def _variables(self, template: str) -> dict[str, Any]:
        """Return the variables of a chat template. Raises `ConfigError` for an effort that it does not read."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs
        if effort is None:
            return given
        own: dict[str, Any] = dict.fromkeys(_SWITCH.findall(template), effort != "none")
        if "reasoning_effort" in template:
            own["reasoning_effort"] = effort
        if not own and effort != "none":
            raise ConfigError(
                f"reasoning_effort is {effort[:SEEN]!r}, but the model's chat template has no reasoning_effort "
                "and no enable_thinking; leave it out"
            )
        return own | given

    def forced_functions(self) -> dict[str, dict[str, Any] | None] | None:
        """Return the functions of which an answer must call one, each with the schema of its arguments.

        None if it need not call any; a schema is None if the function takes no arguments. Raises `ConfigError`.
        """
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        functions = {each.function.name: each.function.parameters for each in self.tools or ()}
        if isinstance(choice, Tool):
            name = choice.function.name
            functions = {name: functions[name]} if name in functions else {}
        if not functions or (isinstance(choice, str) and choice != "required"):
            got = msgspec.json.encode(choice).decode()[:SEEN]
            raise ConfigError(
                f"tool_choice is none, auto, required, or a function among the tools; got {got}"
            )
        return functions

    def forced_call(self) -> dict[str, Any] | None:
        """Return the JSON schema of an answer that must be a tool call; None if it need not. Raises `ConfigError`."""
        functions = self.forced_functions()
        return None if functions is None else call_schema(functions)


def answer_message(thought: str, text: str, calls: Sequence[ToolCall]) -> ChatMessage:
    """Return the message of an answer: its reasoning, its content, and its tool calls."""
    called = [
        Tool(Function(each.name, arguments=each.arguments), "function", each.id or ANY_ID)
        for each in calls
    ]
    return ChatMessage(
        role="assistant",
        content=text,
        reasoning_content=thought or None,
        tool_calls=called or None,
    )


def template_of(reader: Any, *, with_tools: bool = False) -> str:
    """Return the chat template of a tokenizer or processor, of several the one that it uses; "" for none."""
    given: Any = getattr(reader, "chat_template", None) or ""
    if isinstance(given, str):
        return given
    return (given.get("tool_use") if with_tools else None) or given.get("default") or ""


def drops_reasoning(tokenizer: Any) -> bool:
    """Whether a chat template leaves the reasoning of earlier turns out, even where it is given."""
    asked = Conversation(messages=[ChatMessage(role="user", content="a")])
    answer = ChatMessage(
        role="assistant", content="b", reasoning_content=(thought := "quire_thought")
    )
    try:
        return thought not in asked.followed_by(answer).text(tokenizer)
    except ConfigError:  # a template that refuses this little conversation
        return False


def needs_short_ids(tokenizer: Any) -> bool:
    """Whether a chat template takes calls by ids of nine letters alone, as Mistral's do."""
    asked = Conversation(messages=[ChatMessage(role="user", content="a")])

    def takes(name: str) -> bool:
        call = Tool(Function("a", arguments="{}"), "function", name)
        answer = ChatMessage(role="assistant", tool_calls=[call])
        try:
            return bool(asked.followed_by(answer).text(tokenizer))
        except ConfigError:
            return False

    return takes("a" * 9) and not takes("call_" + "a" * 24)


def check_template(text: str) -> None:
    """Raise `ConfigError` for a chat template that has a syntax error."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - optional

    templates: Any = import_module("transformers.utils.chat_template_utils")  # optional
    try:
        templates.render_jinja_template([[{"role": "user", "content": ""}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template has a syntax error in line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # noqa: BLE001 - it may refuse this conversation, and take others
        return


def laid_out(
    reader: Any, messages: Sequence[Any], variables: Mapping[str, Any] = {}, **options: Any
) -> Any:
    """Return the prompt that a tokenizer's or processor's chat template makes of messages; `options` are its own.

    Raises `ConfigError` where the model has no template, or that refuses the messages or one of the variables.
    """
    if not getattr(reader, "chat_template", None):
        raise ConfigError("this model has no chat template; give it a prompt instead")
    if variables:  # a signature takes as long as a short prompt's template
        reserved = signature(reader.apply_chat_template).parameters.keys()
        if taken := sorted(reserved & variables.keys()):
            raise ConfigError(f"chat_template_kwargs: {taken[0]} is not for the template")
    try:
        return reader.apply_chat_template(messages, **options, **variables)
    except ConfigError:  # of a request's own template
        raise
    except Exception as error:
        said = f"messages: the model's chat template refuses this: {error}"
        raise ConfigError(said) from error
