"""A logged request: the sections of its prompt in order, its time, and the usage that the server told."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

Api: TypeAlias = Literal["chat", "completions", "responses", "messages", "text", "usage"]
"""The form of a body: OpenAI chat, completions or responses; Anthropic messages; a plain text; no prompt at all."""

APIS: tuple[Api, ...] = ("chat", "completions", "responses", "messages", "text", "usage")

Kind: TypeAlias = Literal["tool", "text", "call", "result", "thinking", "media"]


class Section(msgspec.Struct, frozen=True, gc=False):
    """A part of a prompt that stands at one place of its body.

    `path`        that place: `tools[3]`, `system`, `system[0]`, `messages[4].content[1]`
    `role`        `tools`, `system`, `user`, `assistant`, `tool`, ...
    `kind`        a tool's definition, a text, a call of a tool, its result, reasoning, or media
    `text`        the text; of tools, calls and schemas their JSON as the body orders it; of media what they are
                  (`image/png 640x480 low`)
    `media`       a digest of the bytes or the address of media; empty for others
    `breakpoint_s` the TTL of the breakpoint that stands behind it, in seconds; 0: none
    """

    path: str
    role: str
    kind: Kind
    text: str
    media: str = ""
    breakpoint_s: int = 0


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the server counted them; None: it told nothing.

    `prompt_tokens`  all tokens of the prompt, those read from a cache and written to it included
    `cached_tokens`  those of them read from the cache
    `written_tokens` those of them written to it, where writing is told (Anthropic); `written_1h_tokens` for an hour
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    written_tokens: int | None = None
    written_1h_tokens: int | None = None
    output_tokens: int | None = None


class EngineSteps(msgspec.Struct, frozen=True, gc=False):
    """The steps of quire's engine that computed a request, by number from 1.

    `engine`       the engine, of those that a server has had; empty if unknown
    `arrived_s`    when it took the request, on its own clock, in seconds since 1970
    `arrived_step` steps that it had done before
    `queued_s`     seconds from its arrival to the first of its steps
    `answered_s`   seconds from its arrival to the end of the answer
    `prompts`      steps that admitted or computed its prompt, rising, those after preemptions too: each with the tokens
                   that it computed, and those that were left behind it; without any left, the next token came
    `last_step`    the step of its last token
    `num_tokens`   tokens of the answer
    """

    engine: str
    arrived_s: float
    arrived_step: int
    queued_s: float
    answered_s: float
    prompts: tuple[tuple[int, int, int], ...]
    last_step: int
    num_tokens: int


class AnswerCall(NamedTuple):
    """A call of a tool in an answer; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = ""


class LoggedRequest(msgspec.Struct, frozen=True):
    """One request of a log, with its prompt in sections.

    `row`         its line in the file, or its place in a list, from 1; several requests may share a line
    `api`         the form of its body
    `sections`    the prompt in the order of caches: tools, then system, then messages
    `body`        the body as it was sent; empty where the log has none
    `model`       the model that was asked for; empty if unknown
    `time_s`      when it was sent, in seconds since 1970, or None
    `first_s`     seconds from there to the first byte of the answer, or None
    `duration_s`  how long it took, or None
    `tenant`      a digest of its API key, or the tenant or team that the log names; empty if unknown
    `session`     its conversation, where the log names one
    `cache_key`   `prompt_cache_key`, which routes
    `salt`        `cache_salt`, which divides caches
    `retention`   `prompt_cache_retention`
    `replica`     the server or deployment that answered, where the log names one
    `parameters`  other fields that caches depend on, by name, as JSON: `response_format`, `tool_choice`, ...
    `answer`      the answer's text; None if the log has none
    `calls`       the calls of tools in the answer
    `usage`       the server's counts
    `steps`       the steps of its engine, where the server is quire's and tells them
    """

    row: int
    api: Api
    sections: tuple[Section, ...]
    body: dict[str, Any] = {}
    model: str = ""
    time_s: float | None = None
    first_s: float | None = None
    duration_s: float | None = None
    tenant: str = ""
    session: str = ""
    cache_key: str = ""
    salt: str = ""
    retention: str = ""
    replica: str = ""
    parameters: dict[str, str] = {}
    answer: str | None = None
    calls: tuple[AnswerCall, ...] = ()
    usage: TokenUsage = TokenUsage()
    steps: EngineSteps | None = None


class Unread(msgspec.Struct):
    """Records of a log that were not read: how many for each reason, and the first line of each."""

    count: dict[str, int] = {}
    first: dict[str, int] = {}

    def add(self, reason: str, row: int) -> None:
        """Count a record that is not read."""
        self.count[reason] = self.count.get(reason, 0) + 1
        self.first.setdefault(reason, row)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.count.values())

    def sentences(self) -> list[str]:
        """Return a sentence for people for each reason, the most frequent first."""
        ordered = sorted(self.count, key=lambda reason: (-self.count[reason], reason))
        return [
            f"{self.count[reason]:,} not read, the first in line {self.first[reason]:,}: {reason}"
            for reason in ordered
        ]
