"""Prompts of a log as pieces of text, where no tokenizer is at hand: a piece stands for a token."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from quire.core.tokens import INT32, IntArray
from quire_sim.caches.prompts import NO_TOKENS, CachePrompt, Level, PromptPart
from quire_sim.logs import LoggedRequest, Section
from quire_sim.logs.bodies import TTL_S

MEDIA_PIECES = 512
"""Pieces of an image or another medium, about."""

MAX_PIECES = 16 << 20
"""Pieces of sections that are kept for the next request."""

DAY_S = 86400

_ODD = np.uint64(0x9E3779B9)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_POWERS = np.array([pow(0x5851F42D4C957F2D, n, 1 << 64) for n in range(64)], np.uint64)


class TextPieces:
    """Pieces of texts as numbers of 31 bits, made from their characters. A section begins with one for its role.

    `chars`       characters of a piece, as many as a token has on average
    `has_schema`  whether the schema of an answer stands before the prompt, as OpenAI has it
    """

    def __init__(self, chars: float = 4.0, *, has_schema: bool = False) -> None:
        self.chars, self._has_schema = max(chars, 1.0), has_schema
        self._sections: dict[tuple[str, ...], IntArray] = {}
        self._kept = 0

    def prompt(self, request: LoggedRequest) -> CachePrompt:
        """Return a logged request as a cache sees it. Its sections are its parts."""
        ids = _ids_of(request.body)
        if ids is not None:
            return cache_prompt(request, [ids])
        pieces = [self._section(section) for section in request.sections]
        schema = request.parameters.get("response_format") or request.parameters.get("text")
        if schema is not None and self._has_schema and request.api in {"chat", "responses"}:
            pieces.insert(0, self._section(Section("", "schema", "text", schema)))
        output = NO_TOKENS
        if request.answer:
            output = self._section(Section("", "assistant", "text", request.answer))
        return cache_prompt(request, pieces, output, is_estimated=True)

    def _section(self, section: Section) -> IntArray:
        name = (section.role, section.kind, section.text, section.media)
        found = self._sections.get(name)
        if found is None:
            if self._kept > MAX_PIECES:
                self._sections, self._kept = {}, 0
            head = self._pieces(f"{section.role} {section.kind} {section.media}", 1 << 20)
            heads = [head] * (MEDIA_PIECES if section.media else 1)
            found = np.concatenate([*heads, self._pieces(section.text, self.chars)])
            self._sections[name] = found
            self._kept += len(found)
        return found

    @staticmethod
    def _pieces(text: str, chars: float) -> IntArray:
        """Return the numbers of a text's pieces; equal pieces have equal ones."""
        if not text:
            return NO_TOKENS
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
        starts = np.round(np.arange(int(len(text) / chars) + 1) * chars).astype(np.intp)
        starts = starts[starts < len(text)]
        sizes = np.diff(starts, append=len(text))
        places = np.arange(len(text)) - np.repeat(starts, sizes)
        sums = np.add.reduceat((codes + _ODD) * _POWERS[places % len(_POWERS)], starts)
        sums = (sums ^ (sums >> np.uint64(32))) * _MIX
        return (sums >> np.uint64(33)).astype(INT32)


def cache_prompt(
    request: LoggedRequest,
    pieces: list[IntArray],
    output: IntArray = NO_TOKENS,
    *,
    is_estimated: bool = False,
) -> CachePrompt:
    """Return a logged request with the tokens of its sections; more than these stand in front."""
    sizes = np.cumsum([len(each) for each in pieces]).tolist()
    ends = sizes[len(sizes) - len(request.sections) :]
    parts = [
        PromptPart(end, _level(section), section.breakpoint_s, section.kind == "media")
        for section, end in zip(request.sections, ends, strict=True)
    ]
    if parts and not any(part.breakpoint_s for part in parts):
        parts[-1] = PromptPart(
            parts[-1].end, parts[-1].level, automatic_s(request.body), parts[-1].is_media
        )
    return CachePrompt(
        request.row,
        np.concatenate(pieces),
        output,
        model=request.model,
        scope=request.salt,
        tenant=request.tenant,
        key=request.cache_key,
        replica=request.replica,
        retention_s=DAY_S if request.retention == "24h" else 0,
        time_s=request.time_s,
        first_s=request.first_s if request.body.get("stream") else None,
        duration_s=request.duration_s,
        parts=tuple(parts),
        parameters=request.parameters,
        is_estimated=is_estimated,
        steps=request.steps,
    )


def _ids_of(body: dict[str, Any]) -> IntArray | None:
    """Return the token ids that a body has for its prompt; None if it has text."""
    prompt: Any = body.get("prompt")
    if isinstance(prompt, list) and len(cast("list[Any]", prompt)) == 1:
        prompt = cast("list[Any]", prompt)[0]
    if not isinstance(prompt, list) or not prompt:
        return None
    ids = cast("list[Any]", prompt)
    is_ids = all(type(each) is int and 0 <= each < 2**31 for each in ids)
    return np.array(ids, INT32) if is_ids else None


def automatic_s(body: dict[str, Any]) -> int:
    """Return the TTL of a breakpoint that a body asks for behind its last part; 0: none."""
    control = body.get("cache_control")
    if not isinstance(control, dict):
        return 0
    return TTL_S.get(str(cast("dict[str, Any]", control).get("ttl")), TTL_S["5m"])


def _level(section: Section) -> Level:
    if section.role == "tools":
        return "tools"
    return "system" if section.path.startswith(("system", "instructions")) else "messages"
