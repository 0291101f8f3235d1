"""The request router of Ray Serve: `quire.routing` decides by the prefixes that replicas report.

Ray Serve carries the whole module to where it routes, as a copy: what others know too is in `sent`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from quire.routing import LeastLoaded, Target, router_named
from quire_router.index import Held
from quire_router.prefixes import ToldPrefixes
from quire_router.sent import EVENTS, Sent, SentPrompt, home_of


class ReplicaRouter(RequestRouter):
    """Sends a request to the replica that a router of `quire.routing` names; to another one only while that is full.

    Of each replica it knows what it holds, from its events, and how much it has to do, as Ray Serve counts. A request
    with a home waits for that replica, if there is one. Calls that are no `Sent`, or are not to be routed, go to the
    least loaded. Given by its path, as Ray Serve's `request_router_class`, with `router` and `load_limit` in
    `request_router_kwargs`.
    """

    def initialize_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, router: str = "prefix", load_limit: float = 1.25, num_blocks: int = 1 << 20
    ) -> None:
        self._router, self._others = router_named(router, load_limit=load_limit), LeastLoaded()
        self._prefixes = ToldPrefixes(num_blocks, {}) if self._router.sees_prefix else None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if self._prefixes is None:
            return
        told = {_name(each): each.replica_metadata.get(EVENTS) for each in replicas}
        for gone in self._prefixes.followed - told.keys():
            self._prefixes.forget(gone)
        for name, endpoint in told.items():
            if endpoint is not None and name not in self._prefixes.followed:
                self._prefixes.follow(name, endpoint)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        sent = pending_request.args[0] if pending_request and pending_request.args else None
        if isinstance(sent, Sent) and sent.home is not None:
            homes = [each for each in candidate_replicas if home_of(_name(each)) == sent.home]
            if homes:
                return [homes]
        prompt = sent.prompt if isinstance(sent, Sent) else None
        held = self._held(prompt)
        session, router = (prompt.session, self._router) if prompt else (None, self._others)
        lengths = self.replica_queue_len_cache
        targets = [
            Target(_name(each), lengths.get(each.replica_id) or 0, held.get(_name(each), ()))
            for each in candidate_replicas
        ]
        at = router(targets, session)
        rest = [*candidate_replicas[:at], *candidate_replicas[at + 1 :]]
        return [[candidate_replicas[at]], rest]

    def _held(self, prompt: SentPrompt | None) -> Held:
        if self._prefixes is None or prompt is None or prompt.tokens is None:
            return {}
        return self._prefixes.found(prompt.tokens, prompt.salt, prompt.tenant, prompt.model)


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id
