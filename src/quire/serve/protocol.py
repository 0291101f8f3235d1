"""What clients send and what they are told: OpenAI's requests with quire's own fields beside, and its error object."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw

from quire.core import Hint
from quire.errors import ConfigError, DeadlinePassed, OutOfBlocks, ScopeError, TokensError

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_PRIORITY = 100
MAX_STOPS = 64
MAX_LOGPROBS = 20
SEEN = 60
"""Characters of a refused value that an error shows."""

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

Body = TypeVar("Body")
Number: TypeAlias = float | None
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Likeliest: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class ApiError(Exception):
    """A request that is answered with an error: its status, and what OpenAI's error object says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": KINDS.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct):
    """What a stream has beside its text."""

    include_usage: bool = False


class JsonSchema(msgspec.Struct):
    """The schema of a `response_format`."""

    schema: dict[str, Any]
    name: str = ""


class ResponseFormat(msgspec.Struct):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generation(msgspec.Struct, kw_only=True):
    """What both kinds of completions take; fields that OpenAI does not have are vLLM's or quire's.

    `session_id`, `reuse`, `ttl_s`, `returns_in_s` and `within` are the parts of a `quire.Hint`; `cache_salt` divides the cache of a
    tenant; `deadline_s` is when a request is given up. A field that is not known is not looked at.
    """

    model: str | None = None
    n: Choices = 1
    best_of: Choices | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: int | None = None
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    session_id: str | None = None
    reuse: Literal["unknown", "session", "never"] | None = None
    ttl_s: Number = None
    returns_in_s: Number = None
    within: Number = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_s: Number = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Raise `ApiError` for what no engine is asked about."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        form = self.response_format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            raise ApiError(
                400, "type json_schema needs json_schema.schema", param="response_format"
            )
        if self.stream and self.num_answers > self.n:
            said = f"best_of is {self.best_of}, above n, {self.n}, which is known at the end only: leave out stream"
            raise ApiError(400, said, param="best_of")

    @property
    def num_answers(self) -> int:
        """Sequences that are made for each prompt."""
        return max(self.n, self.best_of or 0)

    def options(self) -> dict[str, Any]:
        """Return what the engine takes beside prompt and parameters. Raises `ConfigError`."""
        reuse = self.reuse or ("session" if self.session_id is not None else "unknown")
        within = 2.0 if self.within is None else self.within
        hint = Hint(reuse, self.ttl_s, self.session_id, self.returns_in_s, within)
        return {"priority": self.priority, "deadline_s": self.deadline_s, "hint": hint}

    def most_tokens(self) -> int | None:
        """Return how many tokens an answer may have; None for all there is room for."""
        return self.max_tokens


class CompletionRequest(Generation, kw_only=True):
    """`/v1/completions`: a prompt or several, each text or token ids."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: Likeliest | None = None
    echo: bool = False
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not offered; leave it out", param=name)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        given: Any = self.prompt
        alone = isinstance(given, str) or all(isinstance(each, int) for each in given)
        prompts: list[Any] = [given] if alone else list(given)
        mixed = not all(isinstance(each, type(prompts[0])) for each in prompts)
        if mixed or len(prompts) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"prompt is text, a list of token ids, or a list of up to {MAX_PROMPTS} prompts of "
                f"one kind; got {len(prompts)}",
                param="prompt",
            )
        return prompts


class Function(msgspec.Struct, omit_defaults=True):
    """A function that an answer may call, or, with its arguments as JSON text, one that was called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    """A tool of a request, a call of one, or which one to call."""

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


class ChatRequest(Generation, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    tool_choice: str | Tool | None = None

    def most_tokens(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


class PromptRequest(msgspec.Struct, kw_only=True):
    """Text, token ids, or a conversation: of `/tokenize`, and what is asked about the cache.

    `tenant`  whose cache is meant, by the name of the key; None for requests without one
    """

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    tool_choice: str | Tool | None = None
    model: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None


class PinRequest(PromptRequest, kw_only=True):
    """`/v1/cache/pin`: a cached prefix that stays for so many seconds."""

    ttl_s: float


class EvictRequest(PromptRequest, kw_only=True):
    """`/v1/cache/evict`: a prefix, with `all: true` a whole scope, or so many blocks by policy."""

    all: bool = False
    num_blocks: int | None = None


class Detokenize(msgspec.Struct):
    """`/detokenize`."""

    tokens: list[int]


def read(kind: type[Body], body: bytes) -> Body:
    """Return a body as a request. Raises `ApiError` that names field, value and what it should be."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        names = re.findall(r"\.(\w+)|\[(\d+)\]", path)
        try:
            value = shown(_at(body, [name or int(index) for name, index in names]))
        except (msgspec.DecodeError, RecursionError, LookupError):
            value = "what cannot be shown"
        param = path.rstrip("`").lstrip(".") or None
        raise ApiError(400, f"{param or 'the body'}: {said}, got {value}", param=param) from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def refused(error: Exception) -> ApiError:
    """Return what a client is told of an error that quire raised for its request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (ConfigError, TokensError, ScopeError)):
        first = str(error).split(" ", 1)[0]
        known = first in (*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)
        return ApiError(400, str(error), param=first if known else None)
    if isinstance(error, OutOfBlocks):
        return ApiError(400, str(error), code="out_of_memory")
    if isinstance(error, DeadlinePassed):
        return ApiError(504, str(error), param="deadline_s", code="deadline_passed")
    return ApiError(500, f"the engine failed at this request: {error or type(error).__name__}")


def shown(value: object) -> str:
    """Return a value as JSON, cut."""
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= SEEN else text[:SEEN] + "..."


def _at(body: bytes, path: list[str | int]) -> Raw:
    """Return what stands at a path of a document, as it was sent."""
    found = Raw(body)
    for step in path:
        kind: Any = dict[str, Raw] if isinstance(step, str) else list[Raw]
        found = msgspec.json.decode(found, type=kind)[step]
    return found
