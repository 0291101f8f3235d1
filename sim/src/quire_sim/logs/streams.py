"""Answers that were streamed as server-sent events: their text and usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from quire_sim.logs.rows import TokenUsage
from quire_sim.logs.usages import usage_of


def answer_of_stream(text: str) -> tuple[str, TokenUsage]:
    """Return the text of a stream of any API, and the usage that its events tell."""
    said: list[str] = []
    usage = TokenUsage()
    for event in events_of(text):
        said.append(_delta(event))
        for place in (event, event.get("message"), event.get("response")):
            fields = cast("dict[str, Any]", place) if isinstance(place, dict) else {}
            if fields.get("usage") or fields.get("timings"):
                usage = _joined(usage, usage_of(fields))
    return "".join(said), usage


def events_of(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream that are JSON objects."""
    for line in text.splitlines():
        data = line.partition("data:")[2].strip() if line.startswith("data:") else ""
        if data.startswith("{"):
            try:
                yield cast("dict[str, Any]", msgspec.json.decode(data))
            except msgspec.DecodeError:
                continue


def _delta(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    given: Any = event.get("delta")
    if isinstance(choices, list) and choices:
        choice = cast("dict[str, Any]", choices[0])
        given = choice.get("delta") or choice.get("text")
    if isinstance(given, dict):
        fields = cast("dict[str, Any]", given)
        given = fields.get("content") or fields.get("text")
    return given if isinstance(given, str) else ""


def _joined(first: TokenUsage, then: TokenUsage) -> TokenUsage:
    """Return usage told in parts: a later part counts where it tells something."""
    names = TokenUsage.__struct_fields__
    told = {name: getattr(then, name) for name in names if getattr(then, name) is not None}
    if first.prompt_tokens is not None and not told.get("prompt_tokens"):
        told.pop("prompt_tokens", None)
    return msgspec.structs.replace(first, **told)
