"""What binds cached KV to the model that computed it: weights, config, layout, adapters."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import transformers

from quire.core import Scope
from quire.errors import ConfigError, ScopeError

SAMPLED_VALUES = 32

PIECE_BYTES = 64 << 20
"""Weights are copied from a device in pieces of so many bytes."""

NamedWeights = Sequence[tuple[str, torch.Tensor]]

Version = tuple[int, int]
"""Where a tensor's values lie, and how often they were written in place."""


class State(NamedTuple):
    """What decides a model's K and V at a moment, as far as it can be told without reading weights.

    base      versions of all weights that belong to no adapter
    adapters  per layer with adapters in use    its name, its active and its merged adapters
    names     the active and merged adapters of all layers, sorted
    """

    base: frozenset[Version]
    adapters: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    names: tuple[str, ...]


class Weights:
    """Binds scopes to the weights that a model has when it is asked.

    Adapters as PEFT injects them, whether by `model.load_adapter` or `get_peft_model`, are seen in
    the modules: which are active is part of the key, by name and by content. So they may be
    switched, trained and merged between calls, and each finds what it has computed itself.

    Other changes are noticed where torch counts them: a weight that was written in place (an
    optimizer's step, `weight.add_(...)` under `no_grad`) or replaced. They are the caller's to
    name. Writing through `weight.data`, and hooks that change what a layer returns, leave no trace.

    `read` turns weights into bytes that name them: a sample of their values, which tells models of one
    process apart, or with `whole_weights` all of them, for what is kept beyond it. Then names are
    of contents alone, the same in every process.
    """

    def __init__(
        self, model: Any, layout: object, read: Callable[[NamedWeights], bytes] | None = None
    ) -> None:
        self._model = model
        self._layout = layout
        self._read = read
        self._content: tuple[frozenset[Version], str] | None = None
        self._digests: dict[str, tuple[object, bytes]] = {}
        self._base: dict[str, Version] = {}
        self._num_changes = -1
        self.renew()

    def renew(self) -> None:
        """Take the weights as they are now for those that unnamed scopes are bound to."""
        self.fingerprint = self._named()
        base = {name: _version(weight) for name, weight in _base_weights(self._model)}
        if base != self._base:  # a sample of the values might not show it
            self._base = base
            if self._read is None or self._num_changes < 0:
                self._num_changes += 1

    def state(self) -> State:
        """Return what decides K and V now; it is compared with `==`."""
        layers: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        names: set[str] = set()
        adapted: set[int] = set()
        modules: list[tuple[str, torch.nn.Module]] = list(self._model.named_modules())
        for layer, module in modules:
            if not _is_adapted(module):
                continue
            adapted.update(id(weight) for weight in _adapter_weights(module))
            active, merged = _in_use(module)
            if active or merged:
                layers.append((layer, active, merged))
                names.update(active, merged)
        base = frozenset(
            _version(weight)
            for _, module in modules
            for weight in module._parameters.values()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - parameters() is slower
            if weight is not None and id(weight) not in adapted
        )
        return State(base, tuple(layers), tuple(sorted(names)))

    def bind(self, scope: Scope) -> Scope:
        """Return `scope` for the weights as they are now.

        Raises `ConfigError` for weights that have changed under a scope without a `lora`.
        """
        state = self.state()
        if scope.lora is None and state.base != frozenset(self._base.values()):
            raise ConfigError(self._what_changed())
        fingerprint = self._fingerprint_of(state)
        if not state.names and not self._num_changes:
            return Scope(salt=scope.salt, lora=scope.lora, model=fingerprint)
        digest = hashlib.sha256(fingerprint.encode())
        _add(digest, repr((self._num_changes, state.adapters)).encode())
        for name in state.names:
            _add(digest, name.encode())
            _add(digest, self._adapter_digest(name))
        lora = "+".join(state.names) or None if scope.lora is None else scope.lora
        return Scope(salt=scope.salt, lora=lora, model=digest.hexdigest())

    def scope(self, scope: object) -> Scope:
        """Return what a caller gave as its scope, bound as `bind` does. Raises `ScopeError` as well."""
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

    def _fingerprint_of(self, state: State) -> str:
        """Return the fingerprint of the weights of a state that a caller has named."""
        if self._read is None or state.base == frozenset(self._base.values()):
            return self.fingerprint
        if self._content is None or self._content[0] != state.base:
            self._content = (state.base, self._named())
        return self._content[1]

    def whole(self) -> str:
        """Return the fingerprint over all of the weights, as they are now."""
        if self._read is whole_weights:
            return self.fingerprint
        return model_fingerprint(self._model, self._layout, whole_weights)

    def _named(self) -> str:
        return model_fingerprint(self._model, self._layout, self._read or sampled_weights)

    def _adapter_digest(self, name: str) -> bytes:
        """Return SHA-256 over all that an adapter adds; read again only when it was written."""
        layers = [
            (layer, weight, scaling)
            for layer, module in self._model.named_modules()
            if _is_adapted(module)
            for weight, scaling in _one_adapter(module, name)
        ]
        seen = [(layer, _version(weight), scaling) for layer, weight, scaling in layers]
        known = self._digests.get(name)
        if known is not None and known[0] == seen:
            return known[1]
        digest = hashlib.sha256()
        for layer, weight, scaling in layers:
            values = weight.detach().cpu().contiguous()
            _add(digest, f"{layer} {list(values.shape)} {values.dtype} {scaling}".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
        self._digests[name] = (seen, digest.digest())
        return digest.digest()

    def _what_changed(self) -> str:
        now = {name: _version(weight) for name, weight in _base_weights(self._model)}
        changed = [name for name in {**self._base, **now} if self._base.get(name) != now.get(name)]
        return (
            f"{len(changed)} of the model's {len(now)} weights have changed since this cache was made "
            f"(the first one is {changed[0]!r}), so that cached K and V are not what it computes; "
            "make a new cache or clear() this one, or name each set of weights: Scope(lora=...)"
            if changed
            else "the model's weights have moved since this cache was made; make a new PrefixCache"
        )


def model_fingerprint(
    model: Any, layout: object, read: Callable[[NamedWeights], bytes] | None = None
) -> str:
    """Return SHA-256 (hex) over the config, the KV layout and what `read` makes of the weights.

    By default a sample of each, `sampled_weights`. Adapters are left out.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for unstable in ("transformers_version", "_name_or_path", "name_or_path"):
        config.pop(unstable, None)
    _add(digest, json.dumps(config, sort_keys=True, default=str).encode())
    _add(digest, repr(layout).encode())
    named = sorted(_base_weights(model))
    for name, weight in named:
        _add(digest, f"{name}{list(weight.shape)}{weight.dtype}".encode())
    _add(digest, (read or sampled_weights)(named))
    return digest.hexdigest()


def sampled_weights(named: NamedWeights) -> bytes:
    """Return `SAMPLED_VALUES` evenly spaced values of each weight.

    It tells checkpoints and fine-tunes apart in milliseconds, and is no proof of equal weights.
    """
    return torch.cat([_sample(weight) for _, weight in named]).cpu().numpy().tobytes()


def whole_weights(named: NamedWeights) -> bytes:
    """Return a checksum of every byte of each weight, and the release of the library that computes with them.

    XXH3 with 128 bits, at the speed of memory; weights on a device are copied to the host in pieces.
    """
    import xxhash  # noqa: PLC0415 - of the extra `tiers`

    release = ".".join(transformers.__version__.split(".")[:2])
    parts = [f"transformers {release}".encode()]
    for _, weight in named:
        values = weight.detach()
        checksum = xxhash.xxh3_128()
        flat = values.reshape(-1).contiguous().view(torch.uint8)
        for start in range(0, flat.numel(), PIECE_BYTES):
            checksum.update(cast("Any", flat[start : start + PIECE_BYTES].cpu().numpy()).data)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
        parts.append(checksum.digest())
    return b"".join(parts)


def _base_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that belong to no adapter, under the names they have without any."""
    adapted: set[int] = set()
    for module in filter(_is_adapted, model.modules()):
        adapted.update(id(weight) for weight in _adapter_weights(module))
    for name, weight in model.named_parameters():
        if id(weight) not in adapted:
            yield name.replace(".base_layer.", ".").replace(".original_module.", "."), weight


def _is_adapted(module: Any) -> bool:
    """Whether PEFT has wrapped this layer (its `BaseTunerLayer`, `AuxiliaryTrainingWrapper`)."""
    kind = cast("type[object]", type(module))  # asking the module itself takes ten times longer
    return hasattr(kind, "adapter_layer_names") and hasattr(kind, "active_adapters")


def _in_use(module: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the active and the merged adapters that a layer has."""
    if module.disable_adapters:
        return (), ()
    holders = [getattr(module, attribute, ()) for attribute in module.adapter_layer_names]
    active = (name for name in module.active_adapters if any(name in holder for holder in holders))
    return tuple(active), tuple(module.merged_adapters)


def _adapter_weights(module: Any) -> Iterator[torch.Tensor]:
    """Yield the weights of all adapters of a layer."""
    for attribute in module.adapter_layer_names:
        holder = getattr(module, attribute, None)
        if isinstance(holder, torch.nn.Module):
            yield from holder.parameters()


def _one_adapter(module: Any, name: str) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the weights of one adapter of a layer, with its scaling there."""
    scaling = cast("dict[str, float]", getattr(module, "scaling", {})).get(name, 1.0)
    for attribute in module.adapter_layer_names:
        holder: Any = getattr(module, attribute, None)
        if holder is None or name not in holder:
            continue
        entry = holder[name]
        weights = entry.parameters() if isinstance(entry, torch.nn.Module) else [entry]
        for weight in weights:
            yield weight, scaling


def _version(weight: torch.Tensor) -> Version:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version  # noqa: SLF001 - torch has no other name for it


def _sample(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES].float()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
