"""The identity of a model: a name for its present state, which is part of the keys of its KV."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, cast

import torch
import transformers
from msgspec.structs import replace

from quire.core import Scope
from quire.engines.models.adapters import check_wrapper
from quire.engines.models.inventory import Inventory, Stamp
from quire.engines.models.setting_names import SettingNames
from quire.errors import ConfigError, ScopeError

SAMPLED_VALUES = 32
PIECE_BYTES = 64 << 20
"""Weights are copied from a device in pieces of so many bytes."""

Read = Callable[[torch.Tensor], bytes]
"""Turns a tensor into bytes that stand for its values."""

_NUM_INVENTORIES = 8
_MOST_SHOWN = 200
_NUM_TRIES = 3

_T = TypeVar("_T")
Compute = Callable[[Inventory], _T]
"""Computes something with a model, of which it is given an inventory that holds."""


class Computed(Protocol):
    """`Identity.computed`, or what does the same under a lock."""

    def __call__(
        self, bound: Scope, compute: Compute[_T], seen: Inventory | None = None, /
    ) -> _T | None:
        """Return what `compute` makes of the model that a scope is bound to; None where that is another one."""
        ...


_Parts = dict[str, tuple[str | None, bytes]]
"""Settings and tensors in the name of a model: owner (None for a parameter) and content, by path."""


class Identity:
    """Binds scopes to the model as it is when it is asked.

    Everything that decides K and V is part of the key: the values of all tensors of the modules, their
    settings, classes and hooks, the config, autocast, adapters that take part. So weights may be
    trained, replaced, merged and switched between calls: each state finds what it has computed itself.
    A call looks at the address, the version and a few values of each tensor, and reads whole what
    has changed. `docs/identity.md` says what that cannot notice.

    before  an inventory of the model from before it was first run. What a model notes in its own forward (a
            count, the offset of its last positions) is working state: it counts as it was before
    verify  called when modules of another class take part, or the forward of a class is another;
            raises unless K and V are still a function of the tokens before them
    read    turns a tensor into bytes that name it. None: a sample of its values at first, which tells
            models of one process apart. For names that hold in every process it reads all
    given   the model as callers have it: a `PeftModel` around `model`, which must compute what that does, or `model`
    """

    def __init__(
        self,
        model: Any,
        layout: object,
        before: Inventory,
        verify: Callable[[], object],
        read: Read | None = None,
        *,
        given: Any = None,
    ) -> None:
        self._model = model
        self._given = model if given is None else given
        self._layout = layout
        self._read = read
        self._names = SettingNames()
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        self._verify = verify
        self._working: set[str] = set()
        self._pinned: _Parts = {}
        self._inventories: OrderedDict[str, tuple[Inventory, _Parts]] = OrderedDict()
        self._kind = (model.dtype, model.device)
        self._last: tuple[Inventory, str, tuple[str, ...]] | None = None
        inventory = Inventory(model)
        self._verified = inventory.classes
        own = {
            weight.owner for weight in inventory.weights if not weight.added
        } | inventory.facts.keys()
        parts = self._parts(before, before.facts, sampled_values, added=False)
        self._let_go(parts, [path for path in before.changes(inventory) if path in own])
        self.renew()

    def renew(self) -> None:
        """Forget what the model was, and take it as it is now."""
        self._known.clear()
        self._inventories.clear()
        self._last = None
        self.fingerprint = self.base(self._read or sampled_values)

    def scope(self, scope: object = None) -> Scope:
        """Return a caller's scope for the model as it is now, None being nobody's. Raises `ScopeError`."""
        scope = Scope() if scope is None else scope
        if not isinstance(scope, Scope):
            raise ScopeError(f"scope is {scope!r}; pass quire.core.Scope(salt=..., lora=...)")
        if scope.model is not None:
            raise ScopeError(
                f"scope.model is {scope.model!r}; the cache sets it to the fingerprint of its "
                "model: leave it out, and use salt to keep prompts apart"
            )
        if self._given is not self._model:
            check_wrapper(self._given)
        model, names = self._now()
        lora = scope.lora if scope.lora is not None else "+".join(names) or None
        return replace(scope, lora=lora, model=model)

    @property
    def inventory(self) -> Inventory | None:
        """The last inventory of the model; None if it was not looked at since it changed."""
        return self._last and self._last[0]

    def seen(self, bound: Scope) -> Inventory | None:
        """Return the last inventory of the model, if it was then what a scope is bound to."""
        return self._last[0] if self._last and self._last[1] == bound.model else None

    def is_unchanged(self, bound: Scope, *, by_itself: bool = False) -> bool:
        """Whether the model is the one that a scope was bound to.

        `by_itself`: only the model has run meanwhile, so that what it counts and notes in its
        attributes is working state. Numbers with a fraction are not: K and V may depend on them.
        """
        last = self._last
        if last is not None and last[1] == bound.model and last[0].holds(sampled=not by_itself):
            return True
        if (self._model.dtype, self._model.device) != self._kind:
            return False
        if self._now()[0] == bound.model:
            return True
        if not by_itself or bound.model not in self._inventories:
            return False
        before, parts = self._inventories[str(bound.model)]
        changes = before.changes(Inventory(self._model))
        self._let_go(parts, [path for path, is_note in changes.items() if is_note])
        return self._now()[0] == bound.model

    def stayed(self, bound: Scope, seen: Inventory) -> bool:
        """Whether the model has been what a scope is bound to ever since an inventory: only it has run meanwhile.

        A parameter that was written is another one, whatever it holds; other tensors a model may write in its own forward,
        and parameters too where adapters take part: PEFT sets those that it adapts anew in each.
        """
        if seen.holds(sampled=False):
            return True
        if not seen.names:
            parameters = {weight.path for weight in seen.weights if weight.owner is None}
            if not parameters.isdisjoint(seen.changes(Inventory(self._model))):
                return False
        return self.is_unchanged(bound, by_itself=True)

    def computed(
        self, bound: Scope, compute: Compute[_T], seen: Inventory | None = None
    ) -> _T | None:
        """Return what `compute` makes of the model that a scope is bound to; None where that is another one.

        Where weights were written meanwhile, and are what they were, it is computed again.

        seen  an inventory of the model that holds now; None: it is looked at
        """
        for _ in range(_NUM_TRIES):
            if seen is None and self.is_unchanged(bound, by_itself=True):
                seen = self.inventory
            if seen is None:
                break
            found = compute(seen)
            if seen.is_unwritten() or self.stayed(bound, seen):
                return found
            seen = None
        return None

    def base(self, read: Read | None = None) -> str:
        """Return the name of the model as it is now, without adapters."""
        return self._name(
            self._base_parts(Inventory(self._model), read or self._read or all_values)
        )

    def whole(self) -> str:
        """Return `base` over all values of the weights, the same in every process."""
        known, self._known = self._known, {}
        try:
            return self.base(checksum)
        finally:
            self._known = known

    def facts(self) -> dict[str, str]:
        """Return the parts of the model's name: digests of weights, config entries and the rest."""
        inventory = Inventory(self._model)
        known, self._known = self._known, {}
        try:
            parts = self._base_parts(inventory, checksum)
        finally:
            self._known = known
        of_config: dict[str, str] = {}
        for name, value in cast(
            "tuple[tuple[str, object], ...]", inventory.facts.get(".config", ())
        ):
            of_config[f"config.{name}"] = self._names.of(value)[:_MOST_SHOWN]
        weights = {
            f"weight {n[1:-7]}": p[1].hex() for n, p in parts.items() if n.endswith(" values")
        }
        rest = {n: p for n, p in parts.items() if not n.endswith(" values") and n != ".config"}
        release = ".".join(transformers.__version__.split(".")[:2])
        return {
            **weights,
            **of_config,
            "release of transformers": release,
            "code and settings of modules": _digest("", rest),
        }

    def _let_go(self, parts: _Parts, paths: Iterable[str]) -> None:
        """Let settings and tensors that the model changes itself count as they were, if they were there."""
        self._working.update(paths)
        for name, part in parts.items():
            if part[0] in self._working:
                self._pinned.setdefault(name, part)
        self._last = None

    def _now(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the model as it is now, and its adapters that take part."""
        if self._last is not None and self._last[0].holds():
            return self._last[1:]
        kind = (self._model.dtype, self._model.device)
        if kind != self._kind:
            raise ConfigError(
                f"the model is {kind[0]} on {kind[1]} now, and was {self._kind[0]} on {self._kind[1]} when "
                "this cache took its memory: K and V of the one are of no use to the other; make a new cache"
            )
        inventory, read = Inventory(self._model), self._read or all_values
        if not inventory.classes <= self._verified:
            self._verify()
            self._verified |= inventory.classes
        parts, adapters = self._base_parts(inventory, read), tuple(sorted(inventory.names))
        name = self._name(parts)
        if adapters:
            name = _digest(name, self._parts(inventory, inventory.added, read, added=True))
        if len(self._known) > _NUM_INVENTORIES * (
            len(inventory.weights) + 1
        ):  # of adapters that are gone
            here = {weight.path for weight in inventory.weights}
            self._known = {path: known for path, known in self._known.items() if path in here}
        self._last = (inventory.forget_tensors(), name, adapters)
        self._inventories[name] = (inventory, parts)
        self._inventories.move_to_end(name)
        if len(self._inventories) > _NUM_INVENTORIES:
            self._inventories.popitem(last=False)
        return name, adapters

    def _name(self, parts: _Parts) -> str:
        # The numbers may depend on the release of the library that computes, up to its second number.
        release = ".".join(transformers.__version__.split(".")[:2])
        return _digest(f"{release} {self._layout!r}", parts)

    def _base_parts(self, inventory: Inventory, read: Read) -> _Parts:
        """Return the parts that belong to no adapter, working state as it was before."""
        parts = self._parts(inventory, inventory.facts, read, added=False)
        own = {name: part for name, part in parts.items() if part[0] not in self._working}
        return own | self._pinned

    def _parts(
        self, inventory: Inventory, facts: dict[str, object], read: Read, *, added: bool
    ) -> _Parts:
        """Return the parts of settings, and of the tensors that belong to them."""
        parts: _Parts = {
            path: (path, self._names.of(fact).encode()) for path, fact in facts.items()
        }
        for weight, stamp in zip(inventory.weights, inventory.stamps, strict=True):
            if weight.added is added:
                about = f"{list(weight.tensor.shape)} {weight.tensor.dtype} ".encode()
                known = self._known.get(weight.path)
                values = known[1] if known and _is_same(known[0], stamp) else read(weight.tensor)
                self._known[weight.path] = (stamp, values)
                parts[f"{weight.path} values"] = (weight.owner, about + values)
        return parts


def sampled_values(tensor: torch.Tensor) -> bytes:
    """Return `SAMPLED_VALUES` evenly spaced values.

    It tells checkpoints and fine-tunes apart in milliseconds, and is no proof of equal weights.
    """
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES].contiguous()
    return values.view(torch.uint8).cpu().numpy().tobytes()


def all_values(tensor: torch.Tensor) -> bytes:
    """Return SHA-256 over every byte of a tensor; one on a device is copied to the host in pieces."""
    return _through(tensor, hashlib.sha256())


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a checksum over every byte of a tensor: XXH3 with 128 bits, at the speed of memory."""
    import xxhash  # noqa: PLC0415 - of the extra `tiers`

    return _through(tensor, xxhash.xxh3_128())


def _through(tensor: torch.Tensor, checksum: Any) -> bytes:
    if tensor.is_meta:
        return b"meta"
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        checksum.update(cast("Any", flat[start : start + PIECE_BYTES].cpu().numpy()).data)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    return checksum.digest()


def _is_same(known: Stamp, now: Stamp) -> bool:
    """Whether a tensor's values are those that were read.

    PEFT merges through `.data`, which torch does not count: a layer whose merged adapters are
    others, or that is unwrapped, is read again.
    """
    *values, merged = known
    *values_now, merged_now = now
    unwrapped = merged is not None and merged_now is None
    return (values, merged or ()) == (values_now, merged_now or ()) and not unwrapped


def _digest(start: str, parts: _Parts) -> str:
    """Return SHA-256 (hex) over parts, in the order of their names."""
    digest = hashlib.sha256(start.encode())
    for name in sorted(parts):
        for each in (name.encode(), parts[name][1]):
            digest.update(len(each).to_bytes(8, "little"))
            digest.update(each)
    return digest.hexdigest()
