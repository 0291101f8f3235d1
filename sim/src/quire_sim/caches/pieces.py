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

DAY_S = 86400


class TextPieces:
    """Pieces of texts, numbered by first appearance. Each section begins with a piece for its role and kind.

    `chars`  characters of a piece, as many as a token has on average
    """

    def __init__(self, chars: float = 4.0) -> None:
        self.chars = chars
        self._numbers: dict[str, int] = {}
        self._sections: dict[tuple[str, ...], IntArray] = {}

    def prompt(self, request: LoggedRequest) -> CachePrompt:
        """Return a logged request as a cache sees it. Its sections are its parts."""
        ids = _ids_of(request.body)
        if ids is not None:
            return cache_prompt(request, [ids])
        pieces = [self._section(section) for section in request.sections]
        schema = request.parameters.get("response_format") or request.parameters.get("text")
        if schema is not None and request.api in {"chat", "responses"}:
            pieces.insert(0, self._section(Section("", "schema", "text", schema)))
        output = NO_TOKENS
        if request.answer:
            output = self._section(Section("", "assistant", "text", request.answer))
        return cache_prompt(request, pieces, output, is_estimated=True)

    def _section(self, section: Section) -> IntArray:
        name = (section.role, section.kind, section.text, section.media)
        found = self._sections.get(name)
        if found is None:
            found = self._sections[name] = np.array(
                [self._number(each) for each in self._pieces(section)], INT32
            )
        return found

    def _pieces(self, section: Section) -> list[str]:
        text, pieces = section.text, [f"{section.role} {section.kind} {section.media}"]
        if section.media:
            pieces *= MEDIA_PIECES
        ends = range(1, int(len(text) / self.chars) + 2)
        at = 0
        for end in ends:
            piece = text[at : round(end * self.chars)]
            if piece:
                pieces.append(piece)
            at = round(end * self.chars)
        return pieces

    def _number(self, piece: str) -> int:
        return self._numbers.setdefault(piece, len(self._numbers))


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
        scope=f"{request.tenant}\0{request.salt}" if request.tenant or request.salt else "",
        key=request.cache_key,
        retention_s=DAY_S if request.retention == "24h" else 0,
        time_s=request.time_s,
        first_s=request.first_s,
        duration_s=request.duration_s,
        parts=tuple(parts),
        parameters=request.parameters,
        is_estimated=is_estimated,
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
