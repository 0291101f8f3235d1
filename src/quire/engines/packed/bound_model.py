"""The packed form of a model as scopes are bound to it, used by one engine at a time."""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from quire.core import Scope
from quire.engines.models.adapters import follow_settings
from quire.engines.models.identity import Compute, Identity, checksum
from quire.engines.models.inventory import Inventory
from quire.engines.models.supported import checked_model
from quire.engines.packed.model import locked
from quire.engines.packed.proof import proven
from quire.errors import ConfigError
from quire.scope import ScopePart

_T = TypeVar("_T")


class BoundModel:
    """A model of transformers, its packed form, and the identity that scopes are bound to.

    `model`     the model that computes: of a `PeftModel` the one inside
    `packed`    the packed form, proven. Raises `UnsupportedModel`
    `identity`  what the model is; `outlives`: also to what was written by another process
    """

    def __init__(self, given: Any, block_size: int, *, outlives: bool) -> None:
        self.model = model = checked_model(given, "Engine")
        follow_settings(given, model)
        before = Inventory(model)
        self.packed = proven(model, block_size)
        again = checksum if outlives else None
        layout = self.packed.layout
        self.identity = Identity(
            model, layout, before, lambda: proven(model, block_size), again, given=given
        )

    def scope(self, scope: Scope | None = None) -> Scope:
        """Return a scope bound to the model as it is now. Raises `ScopeError`, `ConfigError`."""
        with locked(self.model):  # another engine's step shows it with that one's attention
            return self.identity.scope(scope)

    def computed(
        self, bound: Scope, compute: Compute[_T], seen: Inventory | None = None
    ) -> _T | None:
        """Do what `Identity.computed` does, while no other engine changes how the model computes."""
        with locked(self.model):
            return self.identity.computed(bound, compute, seen)

    def outdated(self, bound: Iterable[Scope]) -> Collection[ScopePart]:
        """Return the models that these scopes are bound to, but for the model as it is now."""
        scopes = {scope.model: scope for scope in bound}
        if len(scopes) == 1:
            (only,) = scopes.values()
            with locked(self.model):
                if self.identity.is_unchanged(only, by_itself=True):
                    return set()
        try:
            return scopes.keys() - {self.scope().model}
        except ConfigError:
            return {*scopes}  # on another device, of another type: of no use to these pools
