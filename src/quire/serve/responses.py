"""OpenAI's responses: their requests as chats, and their answers, whole or as typed events."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from quire.chat.conversation import Function, Tool
from quire.chat.tools import ToolCall
from quire.errors import ConfigError
from quire.serve.items import ResponseItem, messages_of, new_id
from quire.serve.protocol import ChatRequest, Generation, JsonSchema, Likeliest, ResponseFormat
from quire.serve.replies import TEXT_ALONE, AnswerMarks, Reply, ReplyChoice
from quire.web.bodies import SEEN
from quire.web.clients import sse
from quire.web.errors import ApiError

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
)  # the latter: of reasoning that a server hides, which this one does not

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]

INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of responses by those of chats."""

ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "store"),
    *("top_logprobs", "truncation", "user"),
)
"""Fields that an answer repeats as they are."""


class FunctionTool(msgspec.Struct, omit_defaults=True):
    """A function that an answer may call, or the one that it must."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type != "function" or not self.name:
            # a ValueError: the error of the body adds the place
            raise ValueError(f"{self.type!r} is not offered; send type function, with a name")

    def tool(self) -> Tool:
        """Return it as chats have it."""
        function = Function(self.name, self.description, self.parameters)
        return Tool(function=function, type="function")


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The required format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.schema is None:
            raise ValueError("json_schema needs a schema")


class TextOptions(msgspec.Struct, frozen=True):
    """Options of an answer's text."""

    format: TextFormat = TextFormat("text")
    verbosity: Literal["medium"] = "medium"


class Reasoning(msgspec.Struct, frozen=True):
    """The reasoning that is asked for."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponseRequest(Generation, kw_only=True):
    """`/v1/responses`: OpenAI's fields, and those of `Generation` that are vLLM's or quire's."""

    input: str | list[ResponseItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    text_options: TextOptions = msgspec.field(name="text", default=TextOptions())
    # chats have these in another form
    prompt: Any = None
    tools: list[FunctionTool] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    tool_choice: str | FunctionTool = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    stream_options: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    parallel_tool_calls: bool = True
    include: tuple[str, ...] = ()
    top_logprobs: Likeliest = 0
    reasoning: Reasoning = Reasoning()
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: int | None = None  # of tools that the server runs, of which there are none

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, own in INSTEAD.items():
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is a field of chats; send {own}")
        if self.input is None:
            raise ConfigError("input is missing; send text, or items")
        for each in self.include:
            if each not in INCLUDED:
                raise ConfigError(f"include: {each[:SEEN]!r} is not offered; leave it out")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise ConfigError(f'top_logprobs needs include: ["{LOGPROBS}"]')

    @property
    def items(self) -> list[ResponseItem]:
        """The input as items."""
        given = self.input or []
        return [ResponseItem(role="user", content=given)] if isinstance(given, str) else given

    def chat(self, items: Sequence[ResponseItem]) -> ChatRequest:
        """Return the request as a chat of these items. Raises `ConfigError`."""
        same = {name: getattr(self, name) for name in Generation.__struct_fields__}
        form, choice = self.text_options.format, self.tool_choice
        schema = None if form.schema is None else JsonSchema(form.schema)
        own: dict[str, Any] = {
            "messages": messages_of(items, self.instructions),
            "tools": [each.tool() for each in self.tools or ()] or None,
            "tool_choice": choice.tool() if isinstance(choice, FunctionTool) else choice,
            "reasoning_effort": self.reasoning.effort,
            "response_format": ResponseFormat(form.type, schema),
            "max_tokens": self.max_output_tokens,
            "logprobs": LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs or None,
            "stream_options": None,
        }
        if self.session_id is None and self.reuse in (None, "session"):
            own["session_id"] = self.prompt_cache_key or None
        return ChatRequest(**same | own)


class AskedResponse(NamedTuple):
    """A request for a response, a function that keeps the answer, and the beginning of its id."""

    request: ResponseRequest
    keep: Callable[[dict[str, Any]], None]
    prefix: str = "resp"


class ResponseReply(Reply):
    """An answer of `/v1/responses`, kept once it is whole; a stream has the same items, event by event."""

    def __init__(
        self,
        asked: ChatRequest,
        model: str,
        tokenizer: Any,
        num_prompts: int = 1,
        marks: AnswerMarks = TEXT_ALONE,
        *,
        of: AskedResponse,
    ) -> None:
        super().__init__(asked, model, tokenizer, num_prompts, marks)
        self._of, self._top = of, asked.num_logprobs
        self._numbers = 0
        self._output, self._text = list[dict[str, Any]](), ""
        self._open: str | None = None  # the type of the last item, if it is a text that goes on
        self._entries, self._told = (
            list[dict[str, Any]](),
            0,
        )  # log-probabilities; how many were sent
        self._document = {"id": new_id(of.prefix)} | _opened(of.request, model)

    def whole(self) -> dict[str, Any]:
        for choice in self.choices:
            self.chunk(choice)
        return self._document

    def opening(self) -> list[bytes]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._document) for kind in kinds]

    def chunk(self, choice: ReplyChoice) -> bytes:
        news, said = choice.news(self._top), b""
        calls = news.calls if self._of.request.parallel_tool_calls else news.calls[:1]
        self._entries += news.entries
        if news.reasoning:
            said += self._more("reasoning", news.reasoning)
        if news.text or (news.finish_reason and not calls and not self._output):
            said += self._more("message", news.text)
        if news.finish_reason is None:
            return said
        is_whole = news.finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        said += self._text_done(status)
        for call in calls:
            said += self._called(call)
        self._end(status)
        if is_whole:
            self._document["completed_at"] = int(time.time())
        else:
            self._document["incomplete_details"] = {"reason": "max_output_tokens"}
        self._of.keep(self._document)
        return said + self._event(f"response.{status}", response=self._document)

    def broken(self, error: ApiError) -> bytes:
        told = {"code": error.code or "server_error", "message": str(error)}
        if self._open is not None:
            self._output[-1] |= {"status": "incomplete", "content": [self._part]}
        self._end("failed")
        self._document["error"] = told
        said = self._event("error", **told, param=error.param)
        return said + self._event("response.failed", response=self._document)

    def closing(self) -> list[bytes]:
        return []

    def _more(self, kind: str, text: str) -> bytes:
        """Return the events of more text of the reasoning or the message, the first of which open it."""
        said = b""
        if self._open != kind:
            said = self._text_done("completed")
            prefix, own = _HEADS[kind]
            head = {"id": new_id(prefix), "type": kind, **own}
            item: dict[str, Any] = head | {"status": "in_progress", "content": []}
            said += self._added(item)
            self._open, self._text = kind, ""
            bare: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            part = self._part | bare
            said += self._event("response.content_part.added", **self._place, part=part)
        self._text += text
        if text:
            more: dict[str, Any] = {}
            if kind == "message":
                more["logprobs"], self._told = self._entries[self._told :], len(self._entries)
            said += self._event(f"response.{_TEXTS[kind]}.delta", **self._place, delta=text, **more)
        return said

    def _text_done(self, status: str) -> bytes:
        """Return the last events of the text that goes on, if there is one.

        The message has the log-probabilities of all tokens, as a chat's.
        """
        if (kind := self._open) is None:
            return b""
        part, place, self._open = self._part, self._place, None
        more = {"logprobs": self._entries} if kind == "message" else {}
        self._output[-1] |= {"status": status, "content": [part]}
        said = self._event(f"response.{_TEXTS[kind]}.done", **place, text=self._text, **more)
        said += self._event("response.content_part.done", **place, part=part)
        return said + self._done(len(self._output) - 1)

    def _called(self, call: ToolCall) -> bytes:
        name, arguments = call.name, call.arguments
        head = {"id": new_id("fc"), "type": "function_call", "call_id": call.id or new_id("call")}
        item: dict[str, Any] = head | {"name": name, "arguments": "", "status": "in_progress"}
        said, at = self._added(item), len(self._output) - 1
        place = {"item_id": item["id"], "output_index": at}
        said += self._event("response.function_call_arguments.delta", **place, delta=arguments)
        kind = "response.function_call_arguments.done"
        said += self._event(kind, **place, name=name, arguments=arguments)
        self._output[at] |= {"arguments": arguments, "status": "completed"}
        return said + self._done(at)

    @property
    def _part(self) -> dict[str, Any]:
        """The text that goes on, as a part of its item."""
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        own: dict[str, Any] = {"annotations": [], "logprobs": self._entries}
        return {"type": "output_text", "text": self._text} | own

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the text that goes on."""
        at = len(self._output) - 1
        return {"item_id": self._output[at]["id"], "output_index": at, "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        kind, at = "response.output_item.added", len(self._output) - 1
        return self._event(kind, output_index=at, item=item)

    def _done(self, at: int) -> bytes:
        return self._event("response.output_item.done", output_index=at, item=self._output[at])

    def _end(self, status: str) -> None:
        made, hits = self.completion_tokens, self.cached_tokens
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": hits, "cache_write_tokens": self.prompt_tokens - hits},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + made,
        }  # fmt: skip
        told: dict[str, Any] = {"passages": self.passages} if self.passages else {}
        told |= self.timings()
        self._document |= {"status": status, "output": self._output, "usage": usage, **told}

    def _event(self, kind: str, **told: Any) -> bytes:
        number, self._numbers = self._numbers, self._numbers + 1
        event = sse({"type": kind, "sequence_number": number, **told})
        return b"event: %s\n%s" % (kind.encode(), event)


def _opened(request: ResponseRequest, model: str) -> dict[str, Any]:
    """Return the document of a response at its beginning, with what was asked."""
    effort = request.reasoning.effort
    return {
        "background": False,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **{name: getattr(request, name) for name in ECHOED},
        "metadata": request.metadata or {},
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": msgspec.to_builtins(request.text_options),
        "tool_choice": msgspec.to_builtins(request.tool_choice),
        "tools": [_NOT_SAID | msgspec.to_builtins(each) for each in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }


_NOT_SAID: dict[str, Any] = {"description": None, "parameters": None, "strict": None}

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}

_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}),
    "reasoning": ("rs", {"summary": [], "encrypted_content": None}),
}
