"""Anthropic's requests, translated to chats; an error message begins with its field."""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.assets import cache_ttls
from quire.chat import ChatMessage, Function, StructuredOutputs, Tool
from quire.errors import ConfigError
from quire.serve.protocol import ChatRequest, JsonSchema, ResponseFormat
from quire.web.errors import ApiError

SECONDS = cache_ttls("anthropic")

BILLING = "x-anthropic-billing-header:"
"""The first line of Claude Code's system text. It differs in each request, so nothing behind it would be found again."""


class CacheControl(msgspec.Struct):
    """A breakpoint, with the time for which the prompt is to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(msgspec.Struct, kw_only=True):
    """A part of a content; each type has some of the fields."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool = False
    thinking: str | None = None
    cache_control: CacheControl | None = None

    def has(self, name: str, where: str) -> Any:
        """Return a field of the block at a place. Raises `ConfigError` where it is missing."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"{where}.{name} is missing; a block of type {self.type} has one")
        return value


class MessageTurn(msgspec.Struct):
    """One message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    """A tool that the client runs; the types of Anthropic's own tools are refused."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool = False
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    """Whether a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model thinks first."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: int | None = None  # changes nothing


class OutputFormat(msgspec.Struct):
    """The schema that an answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Options of an answer."""

    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct):
    """A change of old messages, by the server."""

    type: str


class ContextManagement(msgspec.Struct):
    """Changes of old messages, by the server."""

    edits: list[ContextEdit] = []


class Metadata(msgspec.Struct):
    """Facts about a request that change nothing."""

    user_id: str | None = None


class MessageChat(ChatRequest, kw_only=True):
    """A chat that was asked for as a message: its answer has as many tokens as fit, up to `max_tokens`.

    `is_parallel`  whether several calls of tools are told, and not the first one alone
    `is_silent`    whether nothing of the answer is told, as the prompt is to be stored only
    """

    is_parallel: bool = True
    is_silent: bool = False

    @property
    def pin_s(self) -> float | None:
        return self.retain_s

    def form(self) -> tuple[str, StructuredOutputs] | None:
        if (asked := super().form()) is None or asked[0] != "response_format":
            return asked
        return "output_config.format", asked[1]

    def check_length(self, num_tokens: int, limit: int) -> None:
        """Raise `ApiError` for a prompt that leaves no room, in the words by which agents know to shorten it."""
        if num_tokens >= limit:
            said = f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum; send fewer or shorter messages"
            raise ApiError(400, said, param="messages", code="context_length_exceeded")


class MessagePrompt(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`: the fields that make a prompt. Unknown fields are ignored."""

    messages: list[MessageTurn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None
    compaction: Any = None
    fallbacks: Any = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise ConfigError("messages is empty; send at least one")
        if self.thread is not None:
            raise ConfigError(
                "thread is not offered: this server keeps no messages; send all of them (tool_runner: thread=False)"
            )
        for name in ("mcp_servers", "container", "compaction", "fallbacks"):
            if getattr(self, name):
                raise ConfigError(f"{name} is not offered; leave it out")
        for edit in self.context_management.edits if self.context_management else ():
            if not edit.type.startswith("clear_thinking"):
                raise ConfigError(
                    f"context_management: {edit.type!r} is not offered; leave it out, and send what the model is to read"
                )

    def chat(self, **options: Any) -> MessageChat:
        """Return the request as a chat; `options` are further fields of it. Raises `ConfigError`."""
        choice, form = self.tool_choice, self.output_format
        if self.output_config is not None:
            form = self.output_config.format or form
        messages = [*self._system(), *self._turns()]
        if messages[-1].role == "assistant" and messages[-1].tool_calls:
            raise ConfigError("messages end with a tool_use; send its tool_result behind it")
        if form is not None:
            schema = JsonSchema(form.schema)
            options["response_format"] = ResponseFormat("json_schema", schema)
        return MessageChat(
            model=self.model,
            messages=messages,
            tools=[_function(each, f"tools[{at}]") for at, each in enumerate(self.tools or ())]
            or None,
            tool_choice=self._choice(),
            is_parallel=choice is None or not choice.disable_parallel_tool_use,
            continue_final_message=messages[-1].role == "assistant",
            chat_template_kwargs={"enable_thinking": self.thinks, "thinking": self.thinks},
            include_reasoning=self.thinks,
            retain_s=max((float(SECONDS[each.ttl]) for each in self._breakpoints()), default=None),
            **options,
        )

    @property
    def thinks(self) -> bool:
        """Whether the answer has its thinking: a template with a switch for it is switched by that."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def _choice(self) -> str | Tool | None:
        """Return the choice of tools as chats have it. Raises `ConfigError`."""
        choice, names = self.tool_choice, [each.name for each in self.tools or ()]
        if choice is None:
            return None
        if choice.type == "any" and not names:
            raise ConfigError("tool_choice is any, and there are no tools; send some")
        if choice.type != "tool":
            return "required" if choice.type == "any" else choice.type
        if choice.name is None or choice.name not in names:
            raise ConfigError(f"tool_choice.name is a name among the tools, got {choice.name!r}")
        return Tool(Function(choice.name))

    def _system(self) -> Iterator[ChatMessage]:
        """Yield the system message, without the line of it that no two requests share."""
        texts = [_text(block, where) for where, block in _blocks(self.system or (), "system")]
        told = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
        if said := "\n".join(filter(None, told)):
            yield ChatMessage(role="system", content=said)

    def _turns(self) -> Iterator[ChatMessage]:
        """Yield the messages, those in a row of one role as one. Raises `ConfigError`."""
        for role, turns in groupby(enumerate(self.messages), lambda turn: turn[1].role):
            blocks = [
                each
                for at, turn in turns
                for each in _blocks(turn.content, f"messages[{at}].content")
            ]
            if role == "assistant":
                yield _answer(blocks)
            elif role == "user":
                yield from _asked(blocks)
            else:
                said = "\n".join(_text(block, where) for where, block in blocks)
                yield ChatMessage(role=role, content=said)

    def _breakpoints(self) -> Iterator[CacheControl]:
        contents = [self.system, *(each.content for each in self.messages)]
        blocks = [block for content in contents for block in _all_blocks(content)]
        for each in (self, *(self.tools or ()), *blocks):
            if each.cache_control is not None:
                yield each.cache_control


class MessageRequest(MessagePrompt, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=0)]
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=64)] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def chat(self, **options: Any) -> MessageChat:
        return super().chat(
            max_tokens=max(self.max_tokens, 1),
            is_silent=not self.max_tokens,
            stop=self.stop_sequences or None,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            **options,
        )


Placed = list[tuple[str, Block]]
"""Blocks, each behind the name of its place."""


def _blocks(content: Any, where: str) -> Placed:
    """Return the blocks of a content; a text is one."""
    if isinstance(content, str):
        return [(where, Block(type="text", text=content))]
    return [(f"{where}[{at}]", block) for at, block in enumerate(content)]


def _all_blocks(content: str | list[Block] | None) -> Iterator[Block]:
    """Yield the blocks of a content, and those within them."""
    for block in content if isinstance(content, list) else ():
        yield block
        yield from _all_blocks(block.content)


def _asked(blocks: Placed) -> Iterator[ChatMessage]:
    """Yield a user's blocks as messages: each result of a tool is one, and the texts between two."""
    texts, is_empty = list[str](), True
    for where, block in blocks:
        if block.type != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            yield ChatMessage(role="user", content="\n".join(texts))
        texts, is_empty = [], False
        result = _blocks(block.content or (), f"{where}.content")
        said = "\n".join(_text(part, place) for place, part in result)
        yield ChatMessage(
            role="tool",
            tool_call_id=block.has("tool_use_id", where),
            content=f"Error: {said}" if block.is_error else said,
        )
    if texts or is_empty:
        yield ChatMessage(role="user", content="\n".join(texts))


def _answer(blocks: Placed) -> ChatMessage:
    """Return the blocks of an answer as one message."""
    texts, thoughts, calls = list[str](), list[str](), list[Tool]()
    for where, block in blocks:
        match block.type:
            case "tool_use":
                given = msgspec.json.encode(block.has("input", where)).decode()
                called = Function(block.has("name", where), arguments=given)
                calls.append(Tool(called, "function", block.has("id", where)))
            case "thinking":
                thoughts.append(block.has("thinking", where))
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(block, where))
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _text(block: Block, where: str) -> str:
    """Return the text of a block. Raises `ConfigError` for one of another type."""
    if block.type != "text":
        raise ConfigError(
            f"{where} is a block of type {block.type[:60]!r}, which is not offered here; send text"
        )
    return block.has("text", where)


def _function(tool: ToolDefinition, where: str) -> Tool:
    """Return a tool as chats have it: the same text whatever its breakpoint. Raises `ConfigError`."""
    if tool.type not in (None, "custom"):
        said = f"{where} has the type {tool.type[:60]!r}, which is not offered; send tools that you run yourself"
        raise ConfigError(said)
    if tool.defer_loading:
        raise ConfigError(
            f"{where}.defer_loading is not offered; leave it out, or leave out the tool"
        )
    for name in ("name", "input_schema"):
        if not getattr(tool, name) and getattr(tool, name) != {}:
            raise ConfigError(f"{where}.{name} is missing; each tool has one")
    return Tool(Function(tool.name, tool.description, tool.input_schema), "function")
