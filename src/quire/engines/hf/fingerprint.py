"""What binds cached KV to the model that computed it: weights, settings, layout, adapters."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from quire.core import Scope
from quire.engines.hf.naming import Names, Read, all_values, checksum, release, sampled_values
from quire.engines.hf.weights import Sight, Stamp, Weight
from quire.errors import ConfigError, ScopeError

_NUM_SIGHTS = 8


class _Part(NamedTuple):
    """What stands for a setting or a tensor in the name of a model; `owner` is None for a parameter."""

    owner: str | None
    content: bytes


_Parts = dict[str, _Part]


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

    `verify` looks whether K and V are still a function of the tokens before them. It is called when
    modules of another class take part, or the forward of a class is another, and raises if they are not.
    """

    def __init__(
        self,
        model: Any,
        layout: object,
        read: Read | None = None,
        before: Sight | None = None,
        verify: Callable[[], object] | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._read = read
        self._names = Names()
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        self._verify = verify
        self._verified = Sight(model).classes
        self._working: set[str] = set()
        self._pinned: _Parts = {}
        self._sights: OrderedDict[str, tuple[Sight, _Parts]] = OrderedDict()
        self._kind = (model.dtype, model.device)
        self._last: tuple[Sight, str, tuple[str, ...]] | None = None
        if before is not None:
            sight = Sight(model)
            own = {
                weight.owner for weight in sight.weights if not weight.added
            } | sight.facts.keys()
            parts = self._parts(before, before.facts, sampled_values, added=False)
            self._known.clear()
            self._let_go(parts, [path for path in before.changes(sight) if path in own])
        self.renew()

    def renew(self) -> None:
        """Forget what the model was, and take it as it is now."""
        self._known.clear()
        self._sights.clear()
        self._last = None
        self.fingerprint = self.base(self._read or sampled_values)

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
        if (self._model.dtype, self._model.device) != self._kind:
            return False
        last = self._last
        if last is not None and last[1] == bound.model and last[0].holds(sampled=not by_itself):
            return True
        if self._identity()[0] == bound.model:
            return True
        if not by_itself or bound.model not in self._sights:
            return False
        before, parts = self._sights[str(bound.model)]
        changes = before.changes(Sight(self._model))
        self._let_go(parts, [path for path, is_note in changes.items() if is_note])
        return self._identity()[0] == bound.model

    def base(self, read: Read | None = None) -> str:
        """Return the name of the model as it is now, without adapters."""
        return self._name(self._base_parts(Sight(self._model), read or self._read or all_values))

    def whole(self) -> str:
        """Return `base` over all values of the weights, the same in every process."""
        known, self._known = self._known, {}
        try:
            return self.base(checksum)
        finally:
            self._known = known

    def _let_go(self, parts: _Parts, paths: Iterable[str]) -> None:
        """Let settings and tensors that the model changes itself count as they were, if they were there."""
        self._working.update(paths)
        for name, part in parts.items():
            if part.owner in self._working:
                self._pinned.setdefault(name, part)
        self._last = None

    def _identity(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the model as it is now, and its adapters that take part."""
        if self._last is not None and self._last[0].holds():
            return self._last[1:]
        self._check_kind()
        sight, read = Sight(self._model), self._read or all_values
        if self._verify is not None and not sight.classes <= self._verified:
            self._verify()
            self._verified |= sight.classes
        parts, adapters = self._base_parts(sight, read), tuple(sorted(sight.names))
        name = self._name(parts)
        if adapters:
            name = _digest(name, self._parts(sight, sight.added, read, added=True))
        if len(self._known) > _NUM_SIGHTS * (len(sight.weights) + 1):  # of adapters that are gone
            here = {weight.path for weight in sight.weights}
            self._known = {path: known for path, known in self._known.items() if path in here}
        self._last = (sight.forget_tensors(), name, adapters)
        self._sights[name] = (sight, parts)
        self._sights.move_to_end(name)
        if len(self._sights) > _NUM_SIGHTS:
            self._sights.popitem(last=False)
        return name, adapters

    def _name(self, parts: _Parts) -> str:
        return _digest(f"{release()} {self._layout!r}", parts)

    def _base_parts(self, sight: Sight, read: Read) -> _Parts:
        """Return what stands for all that belongs to no adapter."""
        parts = self._parts(sight, sight.facts, read, added=False)
        if not self._working:
            return parts
        own = {name: part for name, part in parts.items() if part.owner not in self._working}
        return own | self._pinned

    def _parts(self, sight: Sight, facts: dict[str, object], read: Read, *, added: bool) -> _Parts:
        """Return what stands for settings and for the tensors that belong to them."""
        parts = {path: _Part(path, self._names.of(fact).encode()) for path, fact in facts.items()}
        for weight, stamp in zip(sight.weights, sight.stamps, strict=True):
            if weight.added is added:
                about = f"{list(weight.tensor.shape)} {weight.tensor.dtype} ".encode()
                values = about + self._values(weight, stamp, read)
                parts[f"{weight.path} values"] = _Part(weight.owner, values)
        return parts

    def _values(self, weight: Weight, stamp: Stamp, read: Read) -> bytes:
        """Return what stands for a tensor's values; they are read again only when it was changed."""
        known = self._known.get(weight.path)
        values = known[1] if known and _is_same(known[0], stamp) else read(weight.tensor)
        self._known[weight.path] = (stamp, values)
        return values

    def _check_kind(self) -> None:
        kind = (self._model.dtype, self._model.device)
        if kind != self._kind:
            raise ConfigError(
                f"the model is {kind[0]} on {kind[1]} now, and was {self._kind[0]} on {self._kind[1]} when "
                "this cache took its memory: K and V of the one are of no use to the other; make a new cache"
            )


def _is_same(known: Stamp, now: Stamp) -> bool:
    """Whether a tensor's values are those that were read.

    PEFT merges through `.data`, which torch does not count: a layer whose merged adapters are
    others, or that is unwrapped, is read again. Wrapping alone changes nothing.
    """
    *values, merged = known
    *values_now, merged_now = now
    unwrapped = merged is not None and merged_now is None
    return (values, merged or ()) == (values_now, merged_now or ()) and not unwrapped


def _digest(start: str, parts: _Parts) -> str:
    """Return SHA-256 (hex) over parts, in the order of their names."""
    digest = hashlib.sha256(start.encode())
    for name in sorted(parts):
        for each in (name.encode(), parts[name].content):
            digest.update(len(each).to_bytes(8, "little"))
            digest.update(each)
    return digest.hexdigest()
