"""Requests in records that describe themselves: bodies, bodies with answers, batches, exports, HAR entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quire_sim.logs.bodies import Body, api_of, parameters_of, sections_of
from quire_sim.logs.calls import calls_of
from quire_sim.logs.plain import is_usage_table, table_rows
from quire_sim.logs.records import LogRecord, head_of, records_of
from quire_sim.logs.rows import AnswerCall, Api, EngineSteps, LoggedRequest, TokenUsage, Unread
from quire_sim.logs.steps import steps_of
from quire_sim.logs.streams import answer_of_stream
from quire_sim.logs.usages import answer_of, first_of, times_of, usage_of

_BODY_KEYS = ("body", "request", "request_body", "requestBody", "proxy_server_request", "req", "payload",
              "params", "kwargs", "input", "postData", "text")  # fmt: skip
_ANSWER_KEYS = (
    "response",
    "response_body",
    "responseBody",
    "output",
    "completion",
    "answer",
    "result",
)
_TENANT_KEYS = ("tenant", "team", "api_key")
"""Names of what divides caches. Users that a body names share that of their API key."""

_SESSION_KEYS = ("session", "session_id", "sessionId", "conversation_id", "trace_id", "traceId")

_REPLICA_KEYS = (
    "replica",
    "server",
    "deployment",
    "deployment_id",
    "upstream",
    "model_id",
    "api_base",
)

_USAGE_KEYS = ("prompt_tokens", "input_tokens", "cached_tokens", "input_cached_tokens")


class _SentBody(NamedTuple):
    """A body, its form, and the URL that it was sent to."""

    body: Body
    api: Api


def requests(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield the request of each record that has one; the others are counted with their reasons."""
    for record in records_of(path, unread):
        try:
            yield request_of(record)
        except ValueError as error:
            unread.add(str(error), record.row)


def usages(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield the rows of an export of usage, from CSV or JSON."""
    if is_usage_table(head_of(path).decode("utf-8", "replace")):
        records = (LogRecord(row, fields) for row, fields in table_rows(path))
    else:
        records = records_of(path, unread)
    for record in records:
        row = usage_row(record)
        if row.usage.prompt_tokens is None:
            unread.add("no tokens of a prompt", record.row)
        else:
            yield row


def request_of(record: LogRecord) -> LoggedRequest:
    """Return the request of a record. Raises `ValueError` with the reason if it has none."""
    fields = record.fields
    found = _generation(fields) or _searched(fields, str(fields.get("url") or ""), 3)
    if found is None:
        if any(key in fields for key in _USAGE_KEYS) or _is_object(fields.get("usage")):
            return usage_row(record)
        raise ValueError(_why_none(fields))
    answer, calls, usage, steps = _answered(fields)
    time_s, duration_s = times_of(fields)
    if steps is not None and time_s is None:
        time_s, duration_s = steps.arrived_s, steps.answered_s
    return logged(
        record.row, found.body, found.api, answer=answer, calls=calls, usage=usage, steps=steps,
        time_s=time_s, first_s=first_of(fields), duration_s=duration_s, session=_first(fields, _SESSION_KEYS), tenant=_tenant(fields),
        replica=_replica(fields),
    )  # fmt: skip


def logged(row: int, body: Body, api: Api, **more: Any) -> LoggedRequest:
    """Return a body as a request; `more` are other fields of it. Raises `ValueError` for an empty prompt."""
    sections = sections_of(body, api)
    if not sections:
        raise ValueError("a body without a prompt")
    more["tenant"] = more.get("tenant") or _tenant(body)
    return LoggedRequest(
        row,
        api,
        sections,
        body,
        model=str(body.get("model") or ""),
        cache_key=str(body.get("prompt_cache_key") or ""),
        salt=str(body.get("cache_salt") or ""),
        retention=str(body.get("prompt_cache_retention") or ""),
        parameters=parameters_of(body),
        **more,
    )


def usage_row(record: LogRecord) -> LoggedRequest:
    """Return the row of an export of usage: tokens without a prompt."""
    fields = record.fields
    time_s, duration_s = times_of(fields)
    model = str(fields.get("model") or "")
    return LoggedRequest(record.row, "usage", (), model=model, time_s=time_s, duration_s=duration_s,
                         tenant=_tenant(fields), usage=usage_of(fields))  # fmt: skip


def is_body(fields: Mapping[str, Any]) -> bool:
    """Whether an object is a body: a model, and messages, a prompt or an input."""
    return "model" in fields and api_of(dict(fields)) is not None


def _generation(fields: Body) -> _SentBody | None:
    """Return the body of an observation of Langfuse's or a log line of LiteLLM's; None for others."""
    given = _decoded(fields.get("input"))
    names = ("modelParameters", "model_parameters", "optional_params")
    settings = next(
        (cast("Body", fields[key]) for key in names if _is_object(fields.get(key))), Body()
    )
    model = fields.get("model") or fields.get("providedModelName")
    if fields.get("type") == "GENERATION" or "modelParameters" in fields:
        if isinstance(given, list) and given:
            given = Body(messages=given)
        elif isinstance(given, str):
            given = {"messages": [{"role": "user", "content": given}]}
        if not isinstance(given, dict):
            return None
        body: Body = {"model": model, **settings, **cast("Body", given)}
        api = api_of(body)
        return None if api is None else _SentBody(body, api)
    if "call_type" in fields:
        sent = _searched(fields.get("proxy_server_request"), "", 2)
        messages = _decoded(fields.get("messages"))
        if sent is None and isinstance(messages, list) and messages:
            body = {"model": model, **settings, "messages": messages}
            sent = _SentBody(body, api_of(body) or "chat")
        return sent
    return None


def _searched(value: Any, url: str, depth: int) -> _SentBody | None:
    """Return the body in a record: itself, or what stands under a usual key."""
    fields = _decoded(value)
    if not isinstance(fields, dict):
        return None
    fields = cast("Body", fields)
    url = str(fields.get("url") or fields.get("path") or fields.get("endpoint") or url)
    api = api_of(fields, url)
    if api is not None and ("model" in fields or url) and _has_prompt(fields):
        return _SentBody(fields, api)
    if depth:
        for key in _BODY_KEYS:
            found = _searched(fields[key], url, depth - 1) if key in fields else None
            if found is not None:
                return found
    if api is not None and "messages" in fields and _has_prompt(fields):
        return _SentBody(fields, api)
    return None


def _has_prompt(fields: Body) -> bool:
    return any(fields.get(key) not in (None, "", []) for key in ("messages", "prompt", "input"))


def _answered(
    fields: Body,
) -> tuple[str | None, tuple[AnswerCall, ...], TokenUsage, EngineSteps | None]:
    for key in _ANSWER_KEYS:
        given = _decoded(fields.get(key))
        if isinstance(given, dict):
            inner = cast("Body", given)
            for name in ("body", "content"):
                deeper = _decoded(inner.get(name))
                deeper = (
                    _decoded(cast("Body", deeper).get("text"))
                    if _is_object(deeper) and "text" in deeper
                    else deeper
                )
                if _is_object(deeper) or (isinstance(deeper, str) and "data:" in deeper):
                    given = deeper
                    break
        if isinstance(given, str) and given.lstrip().startswith(("data:", "event:")):
            text, usage = answer_of_stream(given)
            return text, calls_of(given), usage, steps_of(given)
        if given not in (None, ""):
            usage = usage_of(given)
            usage = usage_of(fields) if usage == TokenUsage() else usage
            return answer_of(given), calls_of(given), usage, steps_of(given)
    return None, (), usage_of(fields), None


def _tenant(fields: Mapping[str, Any]) -> str:
    request: Any = fields.get("request")
    for headers in (fields.get("headers"), request.get("headers") if _is_object(request) else None):
        key = _key_in(headers)
        if key:
            return sha256(key.encode()).hexdigest()[:12]
    return _first(fields, _TENANT_KEYS)


def _replica(fields: Mapping[str, Any]) -> str:
    """Return the server or deployment that a record names; of LiteLLM's, beside the request."""
    hidden: Any = fields.get("hidden_params")
    named = _first(fields, _REPLICA_KEYS)
    return named or (_first(hidden, _REPLICA_KEYS) if _is_object(hidden) else "")


def _key_in(headers: Any) -> str:
    if isinstance(headers, list):
        pairs = [
            cast("Body", each) for each in cast("list[Any]", headers) if isinstance(each, dict)
        ]
        headers = {str(each.get("name")): each.get("value") for each in pairs}
    if not isinstance(headers, dict):
        return ""
    for name, value in cast("Body", headers).items():
        if name.lower() in {"authorization", "x-api-key", "api-key"}:
            return str(value)
    return ""


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next(
        (
            str(fields[name])
            for name in names
            if isinstance(fields.get(name), (str, int)) and fields[name]
        ),
        "",
    )


def _decoded(value: Any) -> Any:
    """Return what a JSON text means; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in {"{", "["}:
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _why_none(fields: Body) -> str:
    if "custom_id" in fields and "response" in fields:
        return "an answer of a batch; the requests stand in the batch's input file"
    if "embed" in str(fields.get("model", "")):
        return "an embedding, which has no prompt cache"
    if (
        str(fields.get("url"))
        .partition("?")[0]
        .endswith(("/count_tokens", "/input_tokens", "/tokenize"))
    ):
        return "a count of tokens, which has no answer"
    keys = ", ".join(list(fields)[:6]) or "none"
    return f"no body with model and messages, prompt or input; its keys are {keys}"
