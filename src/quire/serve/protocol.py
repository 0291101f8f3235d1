"""Requests of clients: OpenAI's with quire's own fields; an error message begins with its field."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from quire.chat import Conversation, Function, StructuredOutputs, Tool
from quire.chat.structured import Choice, GrammarText, Schema
from quire.core import Hint, Scope
from quire.errors import ConfigError
from quire.web.errors import ApiError
from quire.web.keys import scope_of

MAX_PROMPTS = 256

Ids: TypeAlias = list[int]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=128)]
Likeliest: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Stops: TypeAlias = Annotated[list[str], Meta(max_length=64)]


class PromptRequest(Conversation, kw_only=True):
    """Text, token ids, or a conversation: of `/tokenize`, and of all that is asked about prompts."""

    model: str | None = None
    prompt: str | list[str | int | Ids] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None

    def adapter(self, adapters: Sequence[str]) -> str | None:
        """Return which of a model's adapters is asked; None for the model itself."""
        return self.model if self.model in adapters else None

    def prompts(self) -> list[str | Ids | Conversation]:
        """Return the prompts, one by one. Raises `ConfigError`."""
        if (self.prompt is None) == (self.messages is None):
            raise ConfigError("prompt or messages: give one of them")
        given = self.prompt
        if not isinstance(given, list):
            return [self if given is None else given]
        several, kinds = list[Any](given), set(map(type, given))
        if kinds <= {int}:
            return [several]
        if len(kinds) > 1 or len(given) > MAX_PROMPTS:
            raise ConfigError(
                f"prompt is text, a list of token ids, or a list of up to {MAX_PROMPTS} prompts of "
                f"one kind; got {len(given)}"
            )
        return several


class CacheRequest(PromptRequest, kw_only=True):
    """`/v1/cache/explain`; `tenant` is whose cache is meant, by the name of the key, None for requests without one."""

    tenant: str | None = None

    def scope(self, adapters: Sequence[str]) -> Scope:
        """Return whose cache is meant; `model` may be one of the adapters."""
        return scope_of(self.tenant, self.cache_salt, self.adapter(adapters))


class PinRequest(CacheRequest, kw_only=True):
    """`/v1/cache/pin`: a cached prefix to keep for some seconds."""

    ttl_s: float


class EvictRequest(CacheRequest, kw_only=True):
    """`/v1/cache/evict`: a prefix, with `all: true` a whole scope, or a number of blocks by policy."""

    all: bool = False
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        given = (self.prompt, self.messages, self.num_blocks, self.all or None)
        if sum(each is not None for each in given) != 1:
            raise ConfigError("give one of prompt, messages, all: true, and num_blocks")


class Detokenize(msgspec.Struct):
    """`/detokenize`."""

    tokens: Ids
    model: str | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(msgspec.Struct):
    """The schema of a `response_format`."""

    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct):
    """The required form of an answer: `type`, and the field of that name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: GrammarText | None = None

    def __post_init__(self) -> None:
        kind = self.type
        if kind not in ("text", "json_object") and getattr(self, kind) is None:
            field = "json_schema.schema" if kind == "json_schema" else kind
            raise ConfigError(f"response_format {kind} needs {field}")

    def structured(self) -> StructuredOutputs | None:
        """Return the form; None for text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                return StructuredOutputs(json=self.json_schema and self.json_schema.schema)
            case kind:
                return StructuredOutputs(**{kind: getattr(self, kind)})


class Generation(PromptRequest, kw_only=True):
    """Fields of both kinds of completions; those that OpenAI does not have are vLLM's or quire's.

    `session_id`, `reuse`, `ttl_s`, `returns_in_s` and `within` are the parts of a `quire.Hint`; `cache_salt` divides
    the cache of a tenant; a request is given up after `deadline_s`. Other fields are those of `fields`.
    """

    n: Choices = 1
    best_of: Choices | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    stop: str | Stops | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: Likeliest | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    session_id: str | None = None
    reuse: Literal["unknown", "session", "never"] | None = None
    ttl_s: float | None = None
    returns_in_s: float | None = None
    within: float | None = None
    retain_s: float | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    deadline_s: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: GrammarText | None = None

    def __post_init__(self) -> None:
        self.form()
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs is told at the end only: leave out stream, or use echo"
            )
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens is 0; give -1 for what fits, or 1 or more")
        if self.truncate_prompt_tokens and self.documents:
            raise ConfigError("truncate_prompt_tokens would cut documents; leave one of them out")
        if self.stream and self.num_answers > self.n:
            raise ConfigError(
                f"best_of is {self.best_of}, above n, {self.n}, which is known at the end only: leave out stream"
            )

    def truncated(self, prompt: Ids, limit: int) -> Ids:
        """Return the last `truncate_prompt_tokens` tokens of a prompt; for -1, those that fit beside the answer."""
        most = self.truncate_prompt_tokens
        if most == -1:
            most = max(limit - (self.max_tokens or 1), 1)
        return prompt if most is None or len(prompt) <= most else prompt[-most:]

    def check_length(self, num_tokens: int, limit: int) -> None:
        """Raise `ApiError` if a prompt of so many tokens and its answer have more than the limit together.

        Clients know the error by its first words, too.
        """
        if num_tokens + (1 if self.max_tokens is None else self.max_tokens) > limit:
            raise ApiError(
                400,
                f"this model's maximum context length is {limit} tokens; the prompt has {num_tokens} and max_tokens is "
                f"{self.max_tokens}: send a shorter prompt, or ask for less",
                param="prompt" if self.messages is None else "messages",
                code="context_length_exceeded",
            )

    @property
    def num_answers(self) -> int:
        """Sequences that are made for each prompt."""
        return max(self.n, self.best_of or 0)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens in the place of each prompt token; None for no scores of the prompt."""
        return self.prompt_logprobs

    @property
    def pin_s(self) -> float | None:
        """Seconds for which the prompt is pinned in its tenant's budget; None for no pin."""
        return None

    def form(self) -> tuple[str, StructuredOutputs] | None:
        """Return the field that asks for a form of the answer, and the form; None for any text. Raises `ConfigError`."""
        given = {"structured_outputs": self.structured_outputs}
        if self.response_format is not None:
            given["response_format"] = self.response_format.structured()
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, name := f"guided_{kind}")) is not None:
                given[name] = StructuredOutputs(**{kind: value})
        asked = [(name, form) for name, form in given.items() if form is not None]
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            raise ConfigError(f"{names} both say which form the answer has; give one of them")
        return asked[0] if asked else None

    def in_its_words(self, error: ConfigError) -> ConfigError:
        """Return an error about the form of the answer, under the name of the field that asks for it."""
        name, _ = self.form() or ("", None)
        return ConfigError(
            re.sub(r"^structured_outputs\.\w+", name, str(error)) if name else str(error)
        )

    def options(self) -> dict[str, Any]:
        """Return the engine's options of this request. Raises `ConfigError`."""
        reuse = self.reuse or ("session" if self.session_id is not None else "unknown")
        within = 2.0 if self.within is None else self.within
        hint = Hint(reuse, self.ttl_s, self.session_id, self.returns_in_s, within)
        return {"priority": self.priority, "deadline_s": self.deadline_s, "hint": hint}


class CompletionRequest(Generation, kw_only=True):
    """`/v1/completions`: a prompt or several, each text or token ids."""

    max_tokens: int | None = 16
    logprobs: Likeliest | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.messages = None  # which completions do not look at
        if self.prompt is None:
            raise ConfigError("prompt is missing; send text, token ids, or a list of either")

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens in the answer; None for no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = (self.logprobs, 0 if self.max_tokens == 0 else None) if self.echo else ()
        return max((n for n in (self.prompt_logprobs, *echoed) if n is not None), default=None)


class ChatRequest(Generation, kw_only=True):
    """`/v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    include_reasoning: bool = True
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | Function | None = None

    def __post_init__(self) -> None:
        self._take_functions()
        super().__post_init__()
        self.prompt = None  # which chats do not look at
        if self.messages is None:
            raise ConfigError("messages is missing; send at least one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs needs logprobs: true")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens

    def _take_functions(self) -> None:
        """Translate functions, the old form of tools. Raises `ConfigError`."""
        given, choice = self.functions or [], self.function_call
        if given and (self.tools or self.tool_choice):
            raise ConfigError("functions is the old form of tools; give one of them")
        if isinstance(choice, Function) and choice.name not in {each.name for each in given}:
            said = "function_call is none, auto, or the name of a function among the functions; got"
            raise ConfigError(f"{said} {choice.name[:60]!r}")
        if given:
            self.tools = [Tool(each, "function") for each in given]
            self.tool_choice = Tool(choice) if isinstance(choice, Function) else choice

    def form(self) -> tuple[str, StructuredOutputs] | None:
        """Return the form; a `response_format` is that of text, and a forced call has none."""
        asked, call = super().form(), self.forced_call()
        if call and asked and asked[0] != "response_format":
            raise ConfigError(
                f"tool_choice and {asked[0]} both say which form the answer has; give one of them"
            )
        return asked if call is None else ("tools", StructuredOutputs(json=call))

    @property
    def continued(self) -> str:
        """The text of the message that the answer goes on with; "" for none."""
        last = self.messages[-1].plain() if self.continue_final_message and self.messages else {}
        return str(last.get("content", ""))

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# What an error may be about
FIELDS = {"memory", "tokens", *ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
