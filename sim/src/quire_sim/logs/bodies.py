"""Bodies of requests as sections, in the order in which caches read a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from quire.assets import cache_ttls
from quire_sim.logs.media import media_section
from quire_sim.logs.rows import Api, Kind, Section

Body = dict[str, Any]

TTL_S = cache_ttls("anthropic")
"""Seconds of the TTLs of `cache_control`."""

HASHED = ("response_format", "text", "tool_choice", "parallel_tool_calls", "thinking", "reasoning",
          "reasoning_effort", "output_format", "output_config", "chat_template", "chat_template_kwargs",
          "guided_json", "structured_outputs", "documents", "mm_processor_kwargs")  # fmt: skip
"""Fields beside messages and tools that change a prompt, or what a provider's cache is keyed by."""

_MESSAGES_ONLY = (
    "system",
    "anthropic_version",
    "anthropic_beta",
    "stop_sequences",
    "top_k",
    "thinking",
)
_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document")

_encode = msgspec.json.Encoder().encode


def as_json(value: Any) -> str:
    """Return a value as JSON, its keys in the order that they have."""
    return _encode(value).decode()


def api_of(body: Body, url: str = "") -> Api | None:
    """Return the form of a body; None for one that is no prompt. The URL decides where it is known."""
    for ending, api in (
        ("/chat/completions", "chat"), ("/responses", "responses"), ("/completions", "completions"),
        ("/messages", "messages"), ("/messages/count_tokens", None), ("/embeddings", None), ("/tokenize", None), ("/input_tokens", None),
    ):  # fmt: skip
        if url.partition("?")[0].rstrip("/").endswith(ending):
            return cast("Api | None", api)
    if isinstance(body.get("messages"), list):
        return "messages" if _is_anthropic(body) else "chat"
    if "prompt" in body and isinstance(body["prompt"], (str, list)):
        return "completions"
    if isinstance(body.get("input"), (str, list)) and "embed" not in str(body.get("model", "")):
        return "responses"
    return None


def _is_anthropic(body: Body) -> bool:
    if any(key in body for key in _MESSAGES_ONLY):
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and any("input_schema" in tool for tool in objects_of(tools)):
        return True
    if str(body.get("model", "")).startswith("claude") and "max_tokens" in body:
        return True
    return any(
        part.get("type") in _BLOCKS or "cache_control" in part
        for message in objects_of(body["messages"])
        for part in objects_of(message.get("content"))
    )


def sections_of(body: Body, api: Api) -> tuple[Section, ...]:
    """Return the sections of a body: tools, then system, then messages."""
    found = [*_tools(body)]
    if api == "completions":
        found += _plain(body.get("prompt"), "prompt")
    elif api == "responses":
        found += _content(body.get("instructions"), "instructions", "system")
        found += _input(body.get("input"))
    else:
        found += _content(body.get("system"), "system", "system")
        for place, message in enumerate(_items(body.get("messages"))):
            found += _message(message, f"messages[{place}]")
    return tuple(found)


def parameters_of(body: Body) -> dict[str, str]:
    """Return the fields that a cache may be keyed by, as JSON by name."""
    return {name: as_json(body[name]) for name in HASHED if body.get(name) is not None}


def texts_of(content: Any) -> str:
    """Return the text of a content, whatever its form; parts that are none are left out."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        fields = cast("Body", content)
        return str(fields.get("text") or "") or texts_of(fields.get("content"))
    if isinstance(content, list):
        return "\n".join(filter(None, (texts_of(part) for part in cast("list[Any]", content))))
    return ""


def objects_of(values: Any) -> Iterator[Body]:
    """Yield the objects in a list, if it is one."""
    if isinstance(values, list):
        yield from (
            cast("Body", each) for each in cast("list[Any]", values) if isinstance(each, dict)
        )


def _items(values: Any) -> list[Any]:
    """Return a list as it is; a value in the place of one as its only item."""
    if isinstance(values, list):
        return cast("list[Any]", values)
    return [values] if values else []


def _tools(body: Body) -> Iterator[Section]:
    for name in ("tools", "functions"):
        for place, tool in enumerate(_items(body.get(name))):
            found = (tool, 0)
            if isinstance(tool, dict):
                found = _without_breakpoint(cast("Body", tool))
            yield Section(f"{name}[{place}]", "tools", "tool", as_json(found[0]), "", found[1])


def _plain(prompt: Any, path: str) -> Iterator[Section]:
    if isinstance(prompt, str):
        yield Section(path, "user", "text", prompt)
    elif isinstance(prompt, list):
        prompts = cast("list[Any]", prompt)
        if len(prompts) == 1 and not isinstance(prompts[0], int):
            yield from _plain(prompts[0], f"{path}[0]")
        else:
            yield Section(path, "user", "text", as_json(prompts))


def _message(message: Any, path: str) -> Iterator[Section]:
    if not isinstance(message, dict):
        yield Section(path, "user", "text", as_json(message))
        return
    fields = cast("Body", message)
    role = str(fields.get("role", "user"))
    role = "system" if role == "developer" else role
    for name in ("reasoning_content", "reasoning"):
        if isinstance(fields.get(name), str) and fields[name]:
            yield Section(f"{path}.{name}", role, "thinking", fields[name])
            break
    found = list(_content(fields.get("content"), f"{path}.content", role))
    calls = _items(fields.get("tool_calls"))
    if not found and not calls and "function_call" not in fields:
        found = [Section(f"{path}.content", role, "text", "")]
    yield from found
    for place, call in enumerate(calls):
        yield Section(f"{path}.tool_calls[{place}]", role, "call", as_json(call))
    if fields.get("function_call"):
        yield Section(f"{path}.function_call", role, "call", as_json(fields["function_call"]))


def _content(content: Any, path: str, role: str) -> Iterator[Section]:
    if isinstance(content, str):
        kind: Kind = "result" if role == "tool" else "text"
        if content or role != "system":
            yield Section(path, role, kind, content)
    elif isinstance(content, list):
        for place, part in enumerate(cast("list[Any]", content)):
            yield from _part(part, f"{path}[{place}]", role)
    elif isinstance(content, dict):
        yield from _part(content, path, role)


def _part(part: Any, path: str, role: str) -> Iterator[Section]:
    """Yield the sections of a part of a content; results of tools may have several."""
    if not isinstance(part, dict):
        yield Section(path, role, "text", part if isinstance(part, str) else as_json(part))
        return
    fields, ttl = _without_breakpoint(cast("Body", part))
    kind = fields.get("type", "text")
    if (media := media_section(fields, path, role, ttl)) is not None:
        yield media
    elif kind in {"tool_result", "function_call_output"}:
        inner = fields.get("content", fields.get("output"))
        found = list(_content(inner, f"{path}.content", "tool"))
        found = found or [Section(path, "tool", "result", "")]
        yield from found[:-1]
        yield msgspec.structs.replace(found[-1], breakpoint_s=ttl or found[-1].breakpoint_s)
    elif kind in {"tool_use", "server_tool_use", "function_call", "tool_call", "custom_tool_call"}:
        yield Section(path, "assistant", "call", as_json(fields), "", ttl)
    elif kind in {"thinking", "reasoning", "redacted_thinking"}:
        text = fields.get("thinking") or texts_of(fields.get("summary")) or texts_of(fields)
        yield Section(path, role, "thinking", str(text or as_json(fields)), "", ttl)
    else:
        text = fields.get("text", fields.get("refusal"))
        whole = text if isinstance(text, str) else as_json(fields)
        yield Section(path, role, "text", whole, "", ttl)


def _input(given: Any) -> Iterator[Section]:
    """Yield the sections of `input` of the responses API: messages, calls, results, reasoning."""
    if isinstance(given, str):
        yield Section("input", "user", "text", given)
        return
    for place, item in enumerate(_items(given)):
        path = f"input[{place}]"
        fields = cast("Body", item) if isinstance(item, dict) else {}
        if "role" in fields or fields.get("type") == "message":
            yield from _message(fields, path)
        else:
            yield from _part(item, path, "user")


def _without_breakpoint(fields: Body) -> tuple[Body, int]:
    """Return an object without its `cache_control`, and the seconds of that; 0 without one."""
    control = fields.get("cache_control")
    if not isinstance(control, dict):
        return fields, 0
    rest = {name: value for name, value in fields.items() if name != "cache_control"}
    return rest, TTL_S.get(str(cast("Body", control).get("ttl", "5m")), TTL_S["5m"])
