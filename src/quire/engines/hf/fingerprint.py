"""What binds cached KV to the model that computed it: weights, settings, layout, adapters."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from quire.core import Scope
from quire.engines.hf.naming import Names, Read, all_values, checksum, release, sampled_values
from quire.engines.hf.weights import Place, Sight, Stamp
from quire.errors import ScopeError

_NUM_SIGHTS = 8


class Weights:
    """Binds scopes to the model as it is when it is asked.

    Everything that decides K and V is part of the key: the values of parameters, buffers and other
    tensors of the modules, their settings, classes and hooks, the config, autocast. So weights may
    be trained, replaced, merged and switched between calls: each state finds what it has computed
    itself, and nothing else. Adapters as PEFT injects them count where they take part.

    A call looks at the address, the version and a few values of each tensor, and reads whole what
    has changed. `docs/identity.md` says what that cannot notice.

    `read` turns a tensor into bytes that name it: when the cache is made a sample of its values, which
    tells models of one process apart, or all of them, for what is kept beyond it. Then names are
    of contents alone, the same in every process.

    What a model notes in its own forward (a count, the offset of its last positions) is working
    state: it counts as it was before. `before` is a sight of the model from before it was first run.
    """

    def __init__(
        self, model: Any, layout: object, read: Read | None = None, before: Sight | None = None
    ) -> None:
        self._model = model
        self._layout = layout
        self._read = read
        self._names = Names()
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        self._working: dict[str, str] = {}
        self._sights: OrderedDict[str, Sight] = OrderedDict()
        self._last: tuple[Sight, str, tuple[str, ...]] | None = None
        if before is not None:
            sight = Sight(model)
            own = {place.owner for place in sight.places if not place.added} | sight.facts.keys()
            self._let_go(before, [path for path in before.changes(sight) if path in own])
        self.renew()

    def renew(self) -> None:
        """Forget what the model was, and take it as it is now."""
        self._known.clear()
        self._sights.clear()
        self._last = None
        self.fingerprint = self._base(Sight(self._model), self._read or sampled_values)

    def bind(self, scope: Scope) -> Scope:
        """Return `scope` for the model as it is now."""
        model, names = self._identity()
        lora = scope.lora if scope.lora is not None else "+".join(names) or None
        return Scope(salt=scope.salt, lora=lora, model=model)

    def scope(self, scope: object) -> Scope:
        """Return what a caller gave as its scope, bound as `bind` does. Raises `ScopeError`."""
        if scope is None:
            return self.bind(Scope())
        if not isinstance(scope, Scope):
            raise ScopeError(f"scope is {scope!r}; pass quire.core.Scope(salt=..., lora=...)")
        if scope.model is not None:
            raise ScopeError(
                f"scope.model is {scope.model!r}; a PrefixCache sets it to the fingerprint of its "
                "model: leave it out, and use salt to keep prompts apart"
            )
        return self.bind(scope)

    def is_unchanged(self, bound: Scope, *, by_itself: bool = False) -> bool:
        """Whether the model is what a scope was bound to.

        `by_itself`: only the model has run meanwhile, so that what it counts and notes in its
        attributes is working state. Numbers with a fraction are not: K and V may depend on them.
        """
        if self._identity()[0] == bound.model:
            return True
        before = self._sights.get(str(bound.model))
        if not by_itself or before is None:
            return False
        changes = before.changes(Sight(self._model))
        self._let_go(before, [path for path, is_note in changes.items() if is_note])
        return self._identity()[0] == bound.model

    def base(self) -> str:
        """Return the name of the model as it is now, without adapters."""
        return self._base(Sight(self._model), self._read or all_values)

    def whole(self) -> str:
        """Return the fingerprint over all values of the weights, as they are now."""
        known, self._known = self._known, {}
        try:
            return self._base(Sight(self._model), checksum)
        finally:
            self._known = known

    def _let_go(self, before: Sight, paths: Iterable[str]) -> None:
        """Let settings and buffers that the model changes itself count as they were."""
        for path in paths:
            known = path in before.facts
            self._working[path] = self._names.of(before.facts[path]) if known else ""
        self._last = None

    def _identity(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the model as it is now, and its adapters that take part."""
        sight = Sight(self._model)
        if self._last is not None and self._last[0] == sight:
            return self._last[1:]
        read, adapters = self._read or all_values, tuple(sorted(sight.names))
        name = self._base(sight, read)
        if adapters:
            facts = {path: self._names.of(fact) for path, fact in sight.added.items()}
            name = self._digest(sight, facts, read, added=True, start=name)
        if len(self._known) > _NUM_SIGHTS * (len(sight.places) + 1):  # of adapters that are gone
            here = {place.path for place in sight.places}
            self._known = {path: known for path, known in self._known.items() if path in here}
        self._last = (sight.forget_tensors(), name, adapters)
        self._sights[name] = sight
        self._sights.move_to_end(name)
        if len(self._sights) > _NUM_SIGHTS:
            self._sights.popitem(last=False)
        return name, adapters

    def _base(self, sight: Sight, read: Read) -> str:
        """Return the name of all that belongs to no adapter."""
        facts = {path: self._names.of(fact) for path, fact in sight.facts.items()} | self._working
        return self._digest(sight, facts, read, added=False, start=f"{release()} {self._layout!r}")

    def _digest(
        self, sight: Sight, facts: dict[str, str], read: Read, *, added: bool, start: str
    ) -> str:
        """Return SHA-256 (hex) over settings and the tensors that belong to them."""
        digest = hashlib.sha256()
        _add(digest, start.encode())
        for path in sorted(facts):
            _add(digest, f"{path} {facts[path]}".encode())
        for place, stamp in sorted(
            zip(sight.places, sight.stamps, strict=True), key=lambda each: each[0].path
        ):
            if place.added is added and place.owner not in self._working:
                shape, dtype = list(place.tensor.shape), place.tensor.dtype
                _add(digest, f"{place.path} {shape} {dtype}".encode())
                _add(digest, self._values(place, stamp, read))
        return digest.hexdigest()

    def _values(self, place: Place, stamp: Stamp, read: Read) -> bytes:
        """Return what stands for a tensor's values; they are read again only when it was changed."""
        known = self._known.get(place.path)
        values = known[1] if known and _is_same(known[0], stamp) else read(place.tensor)
        self._known[place.path] = (stamp, values)
        return values


def not_another(model: Any, other: Any, cache: str) -> str:
    """Say that a cache keeps its model."""
    return (
        f"this cache holds K and V of its {type(model).__name__}, and of no {type(other).__name__}; "
        f"make a new {cache} for another model (load_state_dict changes the weights of this one)"
    )


def _is_same(known: Stamp, now: Stamp) -> bool:
    """Whether a tensor's values are those that were read.

    PEFT merges through `.data`, which torch does not count: a layer whose merged adapters are
    others, or that is unwrapped, is read again. Wrapping alone changes nothing.
    """
    *where, merged, sample = known
    *where_now, merged_now, sample_now = now
    unwrapped = merged is not None and merged_now is None
    return (where, merged or (), sample) == (
        where_now,
        merged_now or (),
        sample_now,
    ) and not unwrapped


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
