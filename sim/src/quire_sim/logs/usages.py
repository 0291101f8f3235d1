"""TokenUsage, answers and times as logs write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from quire_sim.logs.bodies import texts_of
from quire_sim.logs.rows import TokenUsage

TIME_KEYS = ("time", "timestamp", "created_at", "startTime", "start_time", "ts", "datetime",
             "created", "request_time", "arrival_time", "start", "date")  # fmt: skip
_END_KEYS = ("endTime", "end_time", "completed_at")
_LENGTHS_S = {"duration_s": 1.0, "latency_s": 1.0, "duration": 1.0, "latency": 1.0, "response_time": 1.0,
              "duration_ms": 1e-3, "latency_ms": 1e-3}  # fmt: skip

_FIRST_S = {"first_s": 1.0, "ttft_s": 1.0, "ttft": 1.0, "ttft_ms": 1e-3}


def seconds_of(value: Any) -> float | None:
    """Return a time in seconds since 1970, from ISO text or a number of s, ms, us or ns."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d{9,19}(\.\d+)?", text):
            return seconds_of(float(text))
        try:
            moment = datetime.fromisoformat(text.replace(" UTC", "+00:00"))
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return None
    for limit, scale in ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6)):
        if value < limit:
            return value * scale
    return value * 1e-9


def times_of(fields: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return when a record's request was sent and how long it took, in seconds; None: not told."""
    if "startedDateTime" in fields:  # an entry of HAR, whose `time` is how long it took, in ms
        return seconds_of(fields["startedDateTime"]), _milliseconds(fields, "time")
    sent = next((t for key in TIME_KEYS if (t := seconds_of(fields.get(key))) is not None), None)
    end = next((t for key in _END_KEYS if (t := seconds_of(fields.get(key))) is not None), None)
    if sent is not None and end is not None and end >= sent:
        return sent, end - sent
    for key, scale in _LENGTHS_S.items():
        if isinstance(fields.get(key), (int, float)) and not isinstance(fields[key], bool):
            return sent, fields[key] * scale
    return sent, None


def first_of(fields: Mapping[str, Any]) -> float | None:
    """Return the seconds from sending a record's request to the first byte of its answer; None: not told."""
    for key, scale in _FIRST_S.items():
        value = fields.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return value * scale
    timings = _object(fields.get("timings"))  # of an entry of HAR
    return _milliseconds(timings, "send", "wait")


def _milliseconds(fields: Mapping[str, Any], *names: str) -> float | None:
    """Return the sum of durations in ms, in seconds; -1 counts as none. None if one is not told."""
    told = [fields.get(name) for name in names]
    numbers = [float(each) for each in told if isinstance(each, (int, float))]
    return sum(max(each, 0.0) for each in numbers) * 1e-3 if len(numbers) == len(told) else None


def usage_of(fields: Any) -> TokenUsage:
    """Return the usage that an answer or a record tells, in the words of any API."""
    found = _object(fields)
    timings = _object(found.get("timings"))
    if "cache_n" in timings and not found.get("usage"):  # llama-server, of any path
        cached, computed = _count(timings, "cache_n") or 0, _count(timings, "prompt_n") or 0
        return TokenUsage(cached + computed, cached, output_tokens=_count(timings, "predicted_n"))
    given = _object(found.get("usage") or found.get("usageDetails") or found.get("usage_details"))
    given = given or _object(_object(found.get("message")).get("usage")) or found
    details = _object(given.get("prompt_tokens_details") or given.get("input_tokens_details"))
    written = _count(
        given, "cache_creation_input_tokens", "input_cache_creation", "cache_write_tokens"
    )
    by_ttl = _object(given.get("cache_creation"))
    cached = _count(details, "cached_tokens")
    if cached is None:
        cached = _count(given, "cached_tokens", "cached_input_tokens", "input_cached_tokens",
                        "prompt_cache_hit_tokens")  # fmt: skip
    read = _count(given, "cache_read_input_tokens", "input_cache_read", "cache_read_tokens")
    prompt = _count(given, "prompt_tokens", "input_tokens", "promptTokens", "input")
    if read is not None or written is not None:
        apart = "prompt_tokens" not in given and not details
        cached = cached if read is None else read
        if apart and prompt is not None:  # these APIs count them beside
            prompt += (read or 0) + (written or 0)
    output = _count(given, "completion_tokens", "output_tokens", "completionTokens", "output")
    return TokenUsage(prompt, cached, written, _count(by_ttl, "ephemeral_1h_input_tokens"), output)


def answer_of(response: Any) -> str | None:
    """Return the text of an answer in any API's form; None where it has none."""
    if isinstance(response, str):
        return response
    fields = _object(response)
    choices = fields.get("choices")
    if isinstance(choices, list) and choices:
        choice = _object(cast("list[Any]", choices)[0])
        message = _object(choice.get("message"))
        return texts_of(message.get("content")) if message else str(choice.get("text") or "")
    for key in ("content", "output", "output_text"):
        if fields.get(key):
            return texts_of(fields[key])
    return None


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return int(value)
    return None
