"""Hints: what callers foresee of the reuse of what they store, and sessions that end."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from quire.core.eviction import Evictor
from quire.core.node import SPENT, Node
from quire.core.scope import Scope
from quire.errors import ConfigError

Reuse: TypeAlias = Literal["unknown", "session", "never"]

REUSES = ("unknown", "session", "never")

MAX_SESSIONS = 65_536
"""Beyond so many sessions that nobody ended, the ones begun first are forgotten."""

MAX_NODES = 64
"""Beyond so many nodes of a session, those that were evicted are forgotten."""


class Hint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a caller foresees of the blocks that its request stores.

    `reuse`       "never": nobody comes back to them; "session": only this session does;
                  "unknown": nothing is known
    `ttl_s`       nobody comes back to them later than so many seconds after the request's end
    `session_id`  whose turn it is, within the request's scope; `CacheManager.end_session` says
                  that none follows

    A forecast, not an order: blocks that nobody is expected to come back to are evicted
    before all others, and found like any other until then. A request that uses them all the same
    makes them ordinary ones. A group with a window or a state still takes its own blocks by
    their last use, before whole prefixes go. Raises `ConfigError`.
    """

    reuse: Reuse = "unknown"
    ttl_s: float | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        if self.reuse not in REUSES:
            raise ConfigError(f"a hint's reuse is one of {', '.join(REUSES)}, got {self.reuse!r}")
        if self.session_id is not None:
            check_session_id(self.session_id)
        if self.reuse == "session" and self.session_id is None:
            raise ConfigError('reuse="session" needs a session_id: Hint("session", session_id="a")')


class Session(msgspec.Struct, eq=False):
    """The nodes that one session alone has used, by identity, and whether it has ended."""

    nodes: dict[int, Node] = msgspec.field(default_factory=dict[int, Node])
    ended: bool = False


class Sessions:
    """Which sessions there are, and what becomes of their blocks.

    A session is known by its scope and its name: those of two tenants never meet.
    The outlook of a node is `spent_from`: 0 for none, `SPENT`, `PENDING`, or the time from which
    on nobody is expected to come back. A cached parent's outlook is never shorter than its
    child's. `hinted` says whether there was any hint yet; without one all outlooks are 0.
    """

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._sessions: dict[tuple[Scope, str], Session] = {}
        self.hinted = False

    def __len__(self) -> int:
        return len(self._sessions)

    def join(self, scope: Scope, session_id: str) -> Session:
        """Return the session of this name in a scope, begun at its first request."""
        name = (scope, session_id)
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions))).nodes.clear()
            session = self._sessions[name] = Session()
        return session

    def end(self, scope: Scope, session_id: str) -> int:
        """End a session; return the blocks that nobody is expected to come back to from now on."""
        session = self._sessions.pop((scope, session_id), None)
        if session is None:
            return 0
        session.ended = True
        return self.forsake(session)

    def closed(self, session: Session, path: list[Node]) -> None:
        """A request of a session has let go of its path: remember it, or let it go first."""
        if len(session.nodes) > MAX_NODES:
            alive = [node for node in session.nodes.values() if node.parent is not None]
            session.nodes = {id(node): node for node in alive}
        for node in path:
            if node.session is session:
                session.nodes[id(node)] = node
        if session.ended:
            self.forsake(session)

    def forsake(self, session: Session) -> int:
        """Mark the nodes that only this session has used as spent; return their blocks."""
        num_blocks = 0
        for listed in sorted(session.nodes.values(), key=lambda node: -node.end):
            node = listed
            while (
                node.parent is not None
                and node.session is session
                and node.spent_from != SPENT
                and all(child.spent_from == SPENT for child in node.children.values())
            ):
                num_blocks += node.num_blocks
                if node.locks:
                    node.spent_from = SPENT
                else:
                    self._evictor.foresee(node)
                node = node.parent
        session.nodes.clear()
        return num_blocks


def check_session_id(session_id: object) -> None:
    """Raise `ConfigError` unless this is a name of a session."""
    if not isinstance(session_id, str) or not session_id:
        raise ConfigError(f"session_id is a text that names the session, got {session_id!r}")


NO_HINT = Hint()
