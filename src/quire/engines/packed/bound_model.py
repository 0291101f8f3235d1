"""The packed form of a model as scopes are bound to it, used by one engine at a time."""

from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from quire.core import Scope
from quire.engines.models.adapters import follow_settings
from quire.engines.models.identity import Compute, Identity, checksum
from quire.engines.models.inventory import Inventory
from quire.engines.models.lora import LoraAdapters
from quire.engines.models.supported import checked_model, num_embeddings
from quire.engines.packed.model import PackedModel, eos_ids, locked
from quire.engines.packed.proof import proven
from quire.errors import ConfigError
from quire.scope import ScopePart

_T = TypeVar("_T")


class _State(NamedTuple):
    """A model with one of its adapters, or without: its packed form, proven, and what it is."""

    packed: PackedModel
    identity: Identity


class BoundModel:
    """A model of transformers, its packed form, and the identity that scopes are bound to.

    `model`     the model that computes: of a `PeftModel` the one inside
    `packed`    the packed form, proven. Raises `UnsupportedModel`
    `identity`  what the model is; `outlives`: also to what was written by another process
    `adapters`  folders of LoRA adapters: a scope whose `lora` is one of these names is bound to the model with that
                adapter. Raises `ConfigError` for one that does not fit
    """

    def __init__(
        self,
        given: Any,
        block_size: int,
        adapters: Mapping[str, str | Path] = MappingProxyType({}),
        *,
        outlives: bool,
    ) -> None:
        self.model = model = checked_model(given, "Engine")
        follow_settings(given, model)
        with locked(model):
            self._adapters = LoraAdapters(model, adapters)
        self._states: dict[str | None, _State] = {}
        for name in (None, *adapters):
            with self._as(name):
                before = Inventory(model)
                packed = proven(model, block_size)
                how = (
                    packed.layout,
                    before,
                    lambda: proven(model, block_size),
                    checksum if outlives else None,
                )
                self._states[name] = _State(
                    packed, Identity(model, *how, given=model if name else given)
                )
        self.packed, self.identity = self._states[None]
        self.layout, self.fingerprint = self.packed.layout, self.identity.fingerprint
        self.vocab_size, self.eos_ids = num_embeddings(model), eos_ids(model)
        self.max_positions = getattr(model.config, "max_position_embeddings", None)

    def scope(self, scope: Scope | None = None) -> Scope:
        """Return a scope bound to the model as it is now. Raises `ScopeError`, `ConfigError`."""
        name = self._adapter(scope)
        with self._as(name):  # another engine's step shows it with that one's attention
            return self._states[name].identity.scope(scope)

    def packed_of(self, scope: Scope) -> PackedModel:
        """Return the packed form of the model that a scope is of."""
        return self._states[self._adapter(scope)].packed

    def computed(
        self, bound: Scope, compute: Compute[_T], seen: Inventory | None = None
    ) -> _T | None:
        """Do what `Identity.computed` does, while no other engine changes how the model computes."""
        name = self._adapter(bound)
        with self._as(name):
            return self._states[name].identity.computed(bound, compute, seen)

    def seen(self, bound: Scope) -> Inventory | None:
        """Return the last inventory of the model, if it is the one that a scope is bound to."""
        return self._states[self._adapter(bound)].identity.seen(bound)

    def outdated(self, bound: Iterable[Scope]) -> Collection[ScopePart]:
        """Return the models that these scopes are bound to, but for the model as it is now."""
        by_adapter: dict[str | None, dict[ScopePart, Scope]] = {}
        for scope in bound:
            by_adapter.setdefault(self._adapter(scope), {})[scope.model] = scope
        gone = set[ScopePart]()
        for name, scopes in by_adapter.items():
            with self._as(name):
                gone.update(self._outdated(self._states[name].identity, scopes))
        return gone

    @staticmethod
    def _outdated(identity: Identity, scopes: Mapping[ScopePart, Scope]) -> Collection[ScopePart]:
        if len(scopes) == 1:
            (only,) = scopes.values()
            if identity.is_unchanged(only, by_itself=True):
                return set()
        try:
            return scopes.keys() - {identity.scope().model}
        except ConfigError:
            return {*scopes}  # on another device, of another type: of no use to these pools

    def _adapter(self, scope: Scope | None) -> str | None:
        """Return the adapter that a scope names; None for the model alone, as of a name that is none."""
        name = scope.lora if isinstance(scope, Scope) else None
        return name if isinstance(name, str) and name in self._states else None

    @contextmanager
    def _as(self, name: str | None) -> Generator[None]:
        """Have an adapter in the model, and nobody else compute with it."""
        with locked(self.model), self._adapters.within(name):
            yield
