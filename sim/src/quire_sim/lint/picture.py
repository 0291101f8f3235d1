"""Conversations of a log in time, its tokens by section, and the places where its prompts part: for a page."""

from __future__ import annotations

import msgspec

from quire_sim.lint.linting import LintedRequest

MOST_TALKS = 2000
"""Conversations that are kept; requests of later ones count in the sums alone."""

MOST_POINTS = 400
"""Requests of a conversation that are kept."""

FIRST_DEPTH = 64
DEPTHS = 12
"""Columns of the map, in tokens: up to `FIRST_DEPTH`, then each up to twice the one before."""

ROLES = ("tools", "system", "user", "assistant", "tool")


class Point(msgspec.Struct, frozen=True, gc=False):
    """A request in time: its prompt, and of that what is found and what is lost."""

    row: int
    time_s: float | None
    size: float
    hit: float
    lost: float


class Talk(msgspec.Struct):
    """A conversation: the begin of its first message, its requests, and their tokens."""

    begin: str
    points: list[Point] = []
    num_requests: int = 0
    size: float = 0


class RoleTokens(msgspec.Struct):
    """Tokens of one role, and those of them that are found."""

    size: float = 0
    hit: float = 0


class Cell(msgspec.Struct):
    """Requests that part at one depth in a section of one role, and the tokens that they lose."""

    requests: int = 0
    lost: float = 0


class LintPicture:
    """Figures of a page in the units of `LintedRequest`, in bounded memory; `per_token` of them are a token."""

    def __init__(self, per_token: float) -> None:
        self.talks: dict[tuple[str, str], Talk] = {}
        self.roles: dict[str, RoleTokens] = {}
        self.cells: dict[tuple[str, int], Cell] = {}
        self._per_token = per_token

    def add(self, seen: LintedRequest) -> None:
        """Add a request."""
        lost = 0.0 if seen.loss is None else seen.loss.tokens
        sections = seen.request.sections
        self._add_point(seen, lost)
        left = seen.hit_chars
        for section in sections:
            size = max(len(section.text) + len(section.media), 1)
            share = self.roles.setdefault(_role(section.role), RoleTokens())
            share.size += size
            share.hit += min(size, max(left, 0))
            left -= size
        if seen.place is not None:
            role = "the end"
            if 0 <= seen.place < len(sections):
                role = _role(sections[seen.place].role)
            depth = seen.hit / self._per_token
            column = next((n for n in range(DEPTHS - 1) if depth < FIRST_DEPTH << n), DEPTHS - 1)
            cell = self.cells.setdefault((role, column), Cell())
            cell.requests += 1
            cell.lost += lost

    def _add_point(self, seen: LintedRequest, lost: float) -> None:
        request = seen.request
        first = next((each for each in request.sections if each.role == "user"), None)
        begin = "" if first is None else first.text.lstrip()
        key = request.session or request.model, "" if request.session else begin[:200]
        talk = self.talks.get(key)
        if talk is None:
            if len(self.talks) >= MOST_TALKS:
                return
            talk = self.talks[key] = Talk(begin[:80])
        talk.num_requests += 1
        talk.size += seen.size
        if len(talk.points) < MOST_POINTS:
            point = Point(request.row, request.time_s, seen.size, seen.hit, lost)
            talk.points.append(point)


def _role(role: str) -> str:
    return role if role in ROLES else "user"
