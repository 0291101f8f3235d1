"""The order in which a request asks upstreams."""

from quire.routing import Router, Target
from quire_router.prefixes import Known
from quire_router.upstreams import Upstream


class Candidates:
    """The upstreams to ask for a request, one after another.

    `stale`  one whose idle connection was closed as the request went there: it is asked on a new one if no other is well
    """

    def __init__(
        self,
        upstreams: list[Upstream],
        router: Router,
        homes: list[Upstream],
        known: Known,
        session: str | None,
    ) -> None:
        self.known, self.is_fresh = known, False
        self.stale: Upstream | None = None
        self._left, self._router, self._homes = [*upstreams], router, homes
        self._session = session

    def next(self) -> Upstream | None:
        """Return the upstream to ask next; if none is well, one that may have come up."""
        left = self._left = [each for each in self._left if not each.is_leaving]
        homes = [each for each in self._homes if not each.is_leaving]
        able = homes or [each for each in left if each.is_well and each.breaker.allows]
        self.is_fresh = False
        if not able and self.stale is not None and not self.stale.is_leaving:
            chosen, self.stale, self.is_fresh = self.stale, None, True
            return chosen
        able = able or [each for each in left if each.is_well] or left
        if not able:
            return None
        held = self.known.held
        targets = [Target(each.name, each.num_inflight, held.get(each.name, ())) for each in able]
        chosen = able[self._router(targets, self._session)]
        left.remove(chosen)
        self._homes = []
        return chosen
