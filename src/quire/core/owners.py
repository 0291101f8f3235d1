"""Owners: the sessions and requests with hints, and until when their nodes are expected to be used again."""

from __future__ import annotations

from quire.core.node import FOREVER, Owner
from quire.core.order import Order
from quire.core.terms import Hint, Terms
from quire.scope import Scope

MAX_SESSIONS = 65_536
"""Beyond so many sessions that nobody ended, the ones begun first are forgotten."""


class Owners:
    """The owners of blocks stored with hints: sessions by scope and name, and single requests.

    `sessions`  that have begun and were not ended, by scope and name: those of two tenants never meet
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.sessions: dict[tuple[Scope, str], Owner] = {}

    def begin(self, scope: Scope, hint: Hint) -> Owner | None:
        """Return the owner of the blocks of a request that starts; None without a forecast.

        Reuse is expected as long as a request of the owner runs.
        """
        if hint.reuse == "never" or hint.session_id is None:
            owner = Owner() if hint.lasts_s < FOREVER else None
        else:
            owner = self._session(scope, hint.session_id)
        if owner is not None:
            owner.num_open += 1
            self._order.expect(owner, FOREVER)
        return owner

    def close(self, terms: Terms) -> None:
        """A request of these terms ends; with its owner's last one the time begins for which reuse is expected."""
        owner = terms.owner
        if owner is None:
            return
        owner.num_open -= 1
        if not owner.num_open and owner.due == FOREVER:  # else the session was ended
            self._order.expect(owner, self._order.now() + terms.hint.lasts_s)

    def end(self, scope: Scope, session_id: str) -> int:
        """End a session; return the blocks to which no return is expected from now on."""
        owner = self.sessions.pop((scope, session_id), None)
        if owner is None:
            return 0
        self._order.expect(owner, self._order.now())
        return sum(node.num_blocks for node in owner.nodes.values())

    def _session(self, scope: Scope, session_id: str) -> Owner:
        owner = self.sessions.get((scope, session_id))
        if owner is None:
            if len(self.sessions) >= MAX_SESSIONS:
                self.sessions.pop(next(iter(self.sessions)))
            owner = self.sessions[scope, session_id] = Owner()
        return owner
