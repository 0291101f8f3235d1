"""Pins of a server, which the engine's thread alone touches: the operator's, and those of tenants' breakpoints."""

from collections.abc import Mapping, Sequence
from itertools import count

from quire import ops
from quire.engines.loop import Engine
from quire.errors import PinBudgetExceeded
from quire.scope import Scope, ScopePart


class ServerPins:
    """Pins by number. Tenants with a budget in tokens, from `budgets`, have some for their breakpoints.

    Conservation: of each tenant, the tokens of its pins <= its budget; those of nested pins count in full.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self._budgets: Mapping[ScopePart, int] = {**budgets}
        self._numbers = count(1)
        self._all: dict[int, tuple[ScopePart, ops.Pin]] = {}

    @property
    def held(self) -> dict[int, ops.Pin]:
        """The pins that hold something still."""
        self._all = {at: each for at, each in self._all.items() if each[1].is_held}
        return {at: pin for at, (_, pin) in self._all.items()}

    def add(self, pin: ops.Pin, tenant: ScopePart = None) -> int:
        """Add a pin, the operator's or for a tenant's breakpoint; return its number."""
        number = next(self._numbers)
        self._all = {at: self._all[at] for at in self.held} | {number: (tenant, pin)}
        return number

    def keep(self, scope: Scope, prompt: Sequence[int], seconds: float, engine: Engine) -> None:
        """Pin a prompt as far as its tenant's budget goes, in place of older pins within it.

        Without a budget, or beside pins that leave too little of it or of the pool's, the prompt is only retained.
        """
        budget = self._budgets.get(scope.tenant, 0)
        if not budget:
            return
        try:
            made = ops.pin(engine.manager, prompt[:budget], engine.scope(scope), ttl_s=seconds)
        except PinBudgetExceeded:
            return
        path = made.node.path()
        own = [self._all[at][1] for at in self.held if self._all[at][0] == scope.tenant]
        past = [each for each in own if each.node in path and each.due <= made.due]
        others = sum(each.num_tokens for each in own if each not in past)
        if not made.num_tokens or others + made.num_tokens > budget:
            made.close()
            return
        for each in past:
            each.close()
        self.add(made, scope.tenant)
