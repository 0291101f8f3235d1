"""Mends in flight: rewrites of requests on their way to a model, by rules that an operator chose.

A rule changes what it is named for and nothing else. A body that no rule changes passes byte for byte, and so does one
that is no JSON, of another API, packed in a way that is not known here, or signed.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from hashlib import md5
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Raw

from quire.errors import ConfigError
from quire.web.mend_rules import (
    FORMS,
    LINES,
    RULES,
    TOOLS,
    MendDifference,
    TextRules,
    line_rule,
    with_tools,
    without_emptied,
)

Headers: TypeAlias = list[tuple[bytes, bytes]]

logger = logging.getLogger("uvicorn.error")  # which uvicorn prints

MENDED = "X-Quire-Mended"
"""The header of an answer that names the rules by which its request was changed."""

LONG = 1 << 20
"""Bytes of a body that is changed in a thread of its own."""

MOST_DIFFERENCES = 20
"""Differences of one request that are kept."""

_APIS = {
    "/chat/completions": "chat",
    "/apply-template": "chat",
    "/completions": "completions",
    "/completion": "completions",
    "/messages": "messages",
    "/messages/count_tokens": "messages",
    "/messages/tokenize": "messages",
    "/responses": "responses",
    "/responses/input_tokens": "responses",
    "/responses/tokenize": "responses",
    "/tokenize": "",
    "/cache/explain": "",
    "/cache/pin": "",
    "/cache/evict": "",
}
"""The API of a body by the end of its path; empty: a chat if it has `messages`, else a completion."""

_ENDS = re.compile(f"(?:{'|'.join(sorted(map(re.escape, _APIS), key=len, reverse=True))})/?\\Z")
_SIGNED = frozenset(
    (b"signature", b"signature-input", b"digest", b"content-digest", b"repr-digest",
     b"x-amz-content-sha256", b"x-hub-signature-256", b"x-signature")
)  # fmt: skip
"""Headers of requests whose body is signed, or hashed."""

_TOOLS = ("tools", "functions")
_TEXTS = ("system", "instructions", "messages", "input", "prompt")


class Mended(NamedTuple):
    """A request that was changed, and how: its body and headers as they are passed on.

    `differences`  the first ones of them; `rules` are the names of all rules that changed it
    """

    body: bytes
    headers: Headers
    differences: tuple[MendDifference, ...]
    rules: tuple[str, ...]

    @property
    def told(self) -> str:
        """The value of the answer's header `MENDED`."""
        return ", ".join(self.rules)


class Mends:
    """A set of rules. Raises `ConfigError` for one that is not known, or whose pattern cannot be used.

    `lines`   rules as the command line has them: `sort-tools`, `drop-lines`, `drop-lines=PATTERN`
    `counts`  requests that each rule changed; that of other rules, where they are counted together
    `num_unread`  bodies of known paths that passed as they were, since they could not be read

    Rules for lines and forms hold for system texts: `system`, `instructions`, messages of systems and developers; those for
    lines also for the prompt of a completion. Equal bodies have equal results, and a second pass changes nothing.
    """

    def __init__(self, lines: Sequence[str], counts: Counter[str] | None = None) -> None:
        self.counts = Counter[str]() if counts is None else counts
        self.num_unread = 0
        self.names: list[str] = []
        self._texts = TextRules([], [])
        for line in lines:
            name, has_pattern, pattern = line.partition("=")
            if name not in RULES:
                raise ConfigError(
                    f"--mend {name[:60]!r} is no rule; they are {', '.join(RULES)}, and those for lines take a pattern: drop-lines=PATTERN"
                )
            if name in LINES:
                self._texts.lines.append(line_rule(name, pattern if has_pattern else LINES[name]))
            elif has_pattern:
                raise ConfigError(f"--mend {name} takes no pattern, got {pattern[:60]!r}")
            self.names.append(name)
        self._texts.forms.extend(name for name in FORMS if name in self.names)
        self._tools = [name for name in TOOLS if name in self.names]
        self._tools += self._tools[:-1]  # a breakpoint that went to another tool is sorted, too
        self._fields = (*_TEXTS, *_TOOLS) if len(self._tools) < len(self.names) else _TOOLS

    def reads(self, method: str, path: str, headers: Headers) -> bool:
        """Whether a request may be changed, by its head: a prompt of a known API that is not signed."""
        if not self.names or method != "POST" or _ENDS.search(path) is None:
            return False
        given = dict(headers)
        is_signed = not _SIGNED.isdisjoint(given) or given.get(b"authorization", b"").startswith(
            b"AWS4-"
        )
        return not is_signed and given.get(b"content-encoding", b"") in (b"", b"identity", b"gzip")

    def mended(self, path: str, headers: Headers, body: bytes, most: int) -> Mended | None:
        """Return a changed request, and count it; None for one that passes as it is.

        `most`  bytes of a body once it is unpacked; a larger one passes
        """
        is_packed = dict(headers).get(b"content-encoding") == b"gzip"
        plain = _unpacked(body, most) if is_packed else body
        ends = _ENDS.search(path)
        if not plain or ends is None:
            self.num_unread += plain is None
            return None
        try:
            changed, told = self._changed(plain, _APIS[ends[0].rstrip("/")])
        except (msgspec.MsgspecError, UnicodeError, ValueError, TypeError, RecursionError):
            self.num_unread += 1
            return None
        if not told:
            return None
        if is_packed:
            changed = _packed(changed)
        places = {each.rule: each.path for each in reversed(told)}
        for rule, place in places.items():
            if not self.counts[rule]:
                logger.warning("--mend %s changed its first request, in %s", rule, place)
            self.counts[rule] += 1
        first = tuple(told[:MOST_DIFFERENCES])
        rules = tuple(dict.fromkeys(each.rule for each in told))
        return Mended(changed, _fitting(headers, changed), first, rules)

    async def of(self, scope: Any, body: bytes, most: int) -> Mended | None:
        """Return the changed request of an ASGI scope, whose state notes it; None for one that passes."""
        if not self.reads(scope["method"], scope["path"], scope["headers"]):
            return None
        found = await self.later(scope["path"], scope["headers"], body, most)
        if found is not None:
            scope.setdefault("state", {})["mended"] = found
        return found

    async def later(self, path: str, headers: Headers, body: bytes, most: int) -> Mended | None:
        """Return the same; in a thread for a body that would hold up the event loop."""
        if len(body) <= LONG:
            return self.mended(path, headers, body, most)
        return await asyncio.to_thread(self.mended, path, headers, body, most)

    def _changed(self, plain: bytes, api: str) -> tuple[bytes, list[MendDifference]]:
        """Return a body with all rules applied, and what they changed. Parts that no rule changes stay as they are."""
        raw = msgspec.json.decode(plain, type=dict[str, Raw])
        api = api or ("chat" if "messages" in raw else "completions")
        body = {name: _decoded(name, raw[name]) for name in self._fields if name in raw}
        told: list[MendDifference] = []
        found = self._texts.apply(body, api, told)
        for name in self._tools:
            found = with_tools(name, found, told)
        if told:
            found = without_emptied(found, body)
            for name, before in body.items():
                if name not in found:
                    del raw[name]
                elif found[name] is not before:
                    raw[name] = _encoded(found[name], before, raw[name])
        return msgspec.json.encode(raw), told


def _decoded(name: str, value: Raw) -> Any:
    """Return a field; of messages those of systems and the last one, the others as they came."""
    text = bytes(value)
    if name in {"messages", "input"} and text[:1] == b"[":
        messages: list[Any] = [*msgspec.json.decode(text, type=list[Raw])]
        for at, message in enumerate(messages):
            if at == len(messages) - 1 or _role(message) in {"system", "developer"}:
                messages[at] = msgspec.json.decode(message)
        return messages
    return msgspec.json.decode(text)


def _encoded(value: Any, before: Any, raw: Raw) -> Raw:
    """Return a changed field; messages that did not change as they came."""
    if isinstance(before, list) and isinstance(value, list):
        pieces = msgspec.json.decode(raw, type=list[Raw])
        came = {
            id(each): piece for each, piece in zip(cast("list[Any]", before), pieces, strict=True)
        }
        value = [came.get(id(each), each) for each in cast("list[Any]", value)]
    return Raw(msgspec.json.encode(value))


class _Role(msgspec.Struct):
    role: Any = None


def _role(message: Raw) -> Any:
    return msgspec.json.decode(message, type=_Role).role if bytes(message)[:1] == b"{" else None


def _unpacked(body: bytes, most: int) -> bytes | None:
    """Return a gzip body as it was; None for one that is none, or larger than `most` bytes."""
    reader = zlib.decompressobj(wbits=31)
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error:
        return None
    return found if reader.eof and not reader.unused_data and len(found) <= most else None


def _packed(body: bytes) -> bytes:
    """Return a body as gzip, equal for equal bodies."""
    writer = zlib.compressobj(wbits=31)
    return writer.compress(body) + writer.flush()


def _fitting(headers: Headers, body: bytes) -> Headers:
    """Return headers for another body: its length, and its MD5 where they have one."""
    own = {b"content-length", b"transfer-encoding", b"content-md5"}
    found = [pair for pair in headers if pair[0] not in own]
    if any(name == b"content-md5" for name, _ in headers):
        digest = md5(body, usedforsecurity=False).digest()
        found.append((b"content-md5", base64.b64encode(digest)))
    return [*found, (b"content-length", b"%d" % len(body))]
