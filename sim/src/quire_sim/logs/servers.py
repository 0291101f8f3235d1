"""Logs of llama-server and vLLM: prompts where the log has them, else counts of tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from quire_sim.logs.rows import LoggedRequest, Section, TokenUsage, Unread
from quire_sim.logs.usages import seconds_of
from quire_sim.trace.chunks import lines_of

_SLOT = re.compile(r"\bslot\s+\w+: id\s+(\d+) \| task (-?\d+) \| (.*)")
_PROMPT = re.compile(r"(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_NEW = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
_WHOLE = re.compile(r"stop processing: n_tokens = (\d+), truncated = 0")
_EVAL = re.compile(r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) tokens")

_RECEIVED = re.compile(r"Received request ([\w-]+): prompt: (['\"].*?['\"]), params: ")
_DETAILS = re.compile(r"Request ([\w-]+) details: prompt: (['\"].*?['\"]), prompt_token_ids: ")
_NO_TEXT = re.compile(r"Received request ([\w-]+): params: ")
_VLLM_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d:\d\d:\d\d)")


def is_llama_server(text: str) -> bool:
    """Whether a text is the log of a llama-server."""
    return _SLOT.search(text) is not None


def is_vllm(text: str) -> bool:
    """Whether a text is the log of vLLM."""
    return "Received request " in text or ("vllm" in text.lower() and "Engine 0" in text)


def llama_server(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield the counts of each task: its prompt, and the part of it that the slot had."""
    found: dict[str, dict[str, float]] = {}
    timings = ""
    for row, line in enumerate(lines_of(path), 1):
        text = line.decode("utf-8", "replace")
        match = _SLOT.search(text)
        if match:
            timings = match[2]
            facts = found.setdefault(timings, {"row": row})
            if told := _PROMPT.search(match[3]):
                facts["prompt"] = int(told[1])
            elif (told := _WHOLE.search(match[3])) and "out" in facts:
                # All but the answer's last token; by default no line has the prompt's own count.
                facts.setdefault("prompt", int(told[1]) + 1 - facts["out"])
        facts = found.get(timings, {})
        if told := _NEW.search(text):
            facts |= {"new": int(told[2]), "ms": float(told[1])}
        elif told := _EVAL.search(text):
            facts |= {"out": int(told[2]), "ms": facts.get("ms", 0.0) + float(told[1])}
        if "prompt" in facts and "new" in facts and "out" in facts:
            yield _counted(found.pop(timings))
    for facts in found.values():
        if "prompt" in facts:
            unread.add("a task whose timings are not in the log", int(facts["row"]))


def _counted(facts: dict[str, float]) -> LoggedRequest:
    prompt = int(facts["prompt"])
    usage = TokenUsage(prompt, max(prompt - int(facts["new"]), 0), output_tokens=int(facts["out"]))
    return LoggedRequest(int(facts["row"]), "usage", (), duration_s=facts["ms"] / 1000, usage=usage)


def vllm(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield the rendered prompt of each request; vLLM logs them with --enable-log-requests."""
    known = ""  # the request whose prompt a line of its own has told
    for row, line in enumerate(lines_of(path), 1):
        text = line.decode("utf-8", "replace")
        match = _RECEIVED.search(text) or _DETAILS.search(text)
        if match is None:
            if (told := _NO_TEXT.search(text)) and told[1] != known:
                unread.add(
                    "a request without its prompt; start vLLM with VLLM_LOGGING_LEVEL=DEBUG", row
                )
            continue
        known = match[1]
        try:
            prompt = ast.literal_eval(match[2])
        except (SyntaxError, ValueError):
            unread.add("a prompt that the log cuts; start vLLM without --max-log-len", row)
            continue
        section = Section("prompt", "user", "text", prompt)
        yield LoggedRequest(row, "text", (section,), {"prompt": prompt}, time_s=_time(text))


def _time(text: str) -> float | None:
    """Return the time of a line of vLLM's log, which has no year: it is taken as 2000."""
    match = _VLLM_TIME.search(text)
    return None if match is None else seconds_of(f"2000-{match[1]}-{match[2]}T{match[3]}")
