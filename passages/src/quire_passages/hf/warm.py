"""Passages in a tier: isolated captures, in eight bits, in memory, on disk or wherever records are kept.

A record holds a passage behind a head, found by the model's fingerprint, the scope, the head and all ids. Keys have a
scale for each channel, values one for each token (`quire.tensors.quant`); a layer's bytes, K in front of V:

    codes [heads, tokens, width], scales, minimums: [heads, 1, width] of K, [heads, tokens, 1] of V

What comes back is rounded, so it is never taken for exact, and never stored a second time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from quire.core import Scope
from quire.exchange.hashing import root_digest, tenant_tag
from quire.tensors import KV
from quire.tensors.kinds import kv_shapes
from quire.tensors.quant import Quantization, Quantized, dequantize, quantize
from quire.tiers import Outcome, Tier
from quire.tiers.format import (
    DType,
    Header,
    Namespace,
    new_buffer,
    payload_of,
    record_bytes,
    record_key,
    seal,
    tag_of_key,
)
from quire.tiers.keys import TierKey, stored_tag
from quire.tiers.opening import open_tiers
from quire.tiers.stack.vouching import vouch
from quire_passages import Passages, Variant
from quire_passages.hf.capture import PassageKV

_TIMEOUT_S = 5.0
_MOST_REFUSED = 4096
_TAKEN = frozenset({Outcome.STORED, Outcome.PRESENT})
_KEYS, _VALUES = 1, 2
"""The dimension of `[heads, tokens, width]` over which a scale is shared: K per channel, V per token."""


class WarmPassages:
    """Isolated captures of one model in a tier; what it fails to give is computed.

    shared  whether all scopes of one model and adapter find each other's
    key     signs what is stored; nothing else is accepted. None: all is
    """

    def __init__(self, tier: Tier, model: Any, *, shared: bool, key: TierKey | None = None) -> None:
        vouch([tier], key)
        self.tier = tier
        self._signer = key
        self._model = model
        self._shapes = [
            ((each.kv_heads, each.k_width), (each.kv_heads, each.v_width))
            for each in kv_shapes(model.config)
        ]
        self._shared = shared
        self._refused: OrderedDict[bytes, Outcome] = OrderedDict()

    def put(self, bound: Scope, variants: Iterable[Variant]) -> int:
        """Store isolated captures that were computed here; how many the tier has taken."""
        keys: list[bytes] = []
        records: list[memoryview] = []
        for each in variants:
            if each.kind != "isolated" or each.rounded or not isinstance(each.kv, PassageKV):
                continue
            payload = b"".join(map(_encoded, each.kv.layers))
            record = new_buffer(record_bytes(len(payload)))
            payload_of(record, len(payload))[:] = payload
            key = self._key(bound, each.ids, each.before)
            digest = self._namespace(bound).digest
            seal(
                record,
                Header(key, digest, len(payload), each.num_tokens, dtype=DType.INT8),
                self._signer,
            )
            keys.append(key)
            records.append(record)
        outcomes = self.tier.put_sealed(keys, records, _TIMEOUT_S) if keys else []
        for key, outcome in zip(keys, outcomes, strict=True):
            self._refused.pop(key, None)
            if outcome not in _TAKEN:
                self._refused[key] = outcome
        while len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        return sum(map(_TAKEN.__contains__, outcomes))

    def fetch(
        self, bound: Scope, passages: Sequence[bytes], head: bytes
    ) -> tuple[list[Variant], dict[bytes, str]]:
        """Return variants of passages (ids as bytes) behind a head, and why there is none of the others.

        Passages that nobody has tried to store have no reason.
        """
        keys = [self._key(bound, ids, head) for ids in passages]
        sizes = [self._payload_bytes(len(ids) // 4) for ids in passages]
        buffers = [new_buffer(record_bytes(size)) for size in sizes]
        found: list[Variant] = []
        reasons: dict[bytes, str] = {}
        if keys and self.tier.writes.is_barred(tag_of_key(keys[0])):
            return [], {}  # its tenant is being purged
        outcomes = self.tier.get(keys, buffers, _TIMEOUT_S) if keys else []
        for key, ids, size, buffer, outcome in zip(
            keys, passages, sizes, buffers, outcomes, strict=True
        ):
            if outcome is Outcome.HIT:
                kv = self._decoded(payload_of(buffer, size), len(ids) // 4)
                found.append(Variant(ids, head, "isolated", kv, rounded=True))
            elif outcome is not Outcome.ABSENT:
                reasons[ids] = f"its record in tier {self.tier.name} is of no use: {outcome}"
            elif key in self._refused:
                reasons[ids] = f"tier {self.tier.name} has not taken it: {self._refused[key]}"
        # A key names all that its record's size depends on, so that one of another size is a damaged one.
        self.tier.delete(
            [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.FOREIGN]
        )
        return found, reasons

    def tag(self, scope: Scope) -> bytes:
        """Return what stands for the tenant of a scope in the keys of records."""
        return stored_tag(tenant_tag(scope), self._signer)

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()

    def _key(self, bound: Scope, ids: bytes, head: bytes) -> bytes:
        owner = Scope() if self._shared else Scope(salt=bound.salt, tenant=bound.tenant)
        whose = b"shared" if self._shared else b"own"  # a scope may be as empty as that of all
        parts = (whose, root_digest(owner), head, ids)
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return record_key(self._namespace(bound).digest, text, tenant_tag(owner), self._signer)

    def _namespace(self, bound: Scope) -> Namespace:
        layers = "; ".join(f"K {k} V {v}" for k, v in self._shapes)
        return Namespace(
            model=f"{bound.model}+{bound.lora or ''}",
            dtype=f"int8 of {self._model.dtype}, K per channel, V per token",
            block_size=0,
            layout=f"passage: {layers}",
            layers=tuple(range(len(self._shapes))),
            heads=(0, self._shapes[0][0][0]),
        )

    def _payload_bytes(self, num_tokens: int) -> int:
        return sum(
            _num_bytes((heads, num_tokens, width), dim, self._model.dtype)
            for layer in self._shapes
            for (heads, width), dim in zip(layer, (_KEYS, _VALUES), strict=True)
        )

    def _decoded(self, payload: memoryview, num_tokens: int) -> PassageKV:
        layers: list[KV] = []
        start = 0
        for layer in self._shapes:
            kv: list[torch.Tensor] = []
            for (heads, width), dim in zip(layer, (_KEYS, _VALUES), strict=True):
                shape = heads, num_tokens, width
                stop = start + _num_bytes(shape, dim, self._model.dtype)
                part = _dequantized(payload[start:stop], shape, dim, self._model.dtype)
                kv.append(part.to(self._model.device))
                start = stop
            layers.append((kv[0], kv[1]))
        return PassageKV(tuple(layers))


def opened_warm(settings: Passages, model: Any) -> WarmPassages:
    """Open the tier that settings name. Raises `ConfigError`."""
    assert settings.warm is not None
    key = None if settings.warm_key is None else TierKey.from_file(settings.warm_key)
    (tier,) = open_tiers([settings.warm])
    return WarmPassages(tier, model, shared=settings.share_isolated, key=key)


def _encoded(layer: KV) -> bytes:
    parts: list[torch.Tensor] = []
    for each, dim in zip(layer, (_KEYS, _VALUES), strict=True):
        stored = quantize(each.cpu(), Quantization.INT8, dim)
        assert stored.minimums is not None
        parts += stored.codes, stored.scales, stored.minimums
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in parts)


def _num_bytes(shape: tuple[int, int, int], dim: int, dtype: torch.dtype) -> int:
    return prod(shape) + 2 * dtype.itemsize * prod(shape) // shape[dim]


def _dequantized(
    payload: memoryview, shape: tuple[int, int, int], dim: int, dtype: torch.dtype
) -> torch.Tensor:
    held = torch.frombuffer(payload, dtype=torch.uint8).clone()
    shared = [1 if at == dim else size for at, size in enumerate(shape)]
    codes, rest = held[: prod(shape)], held[prod(shape) :]
    # A part may begin at any byte; numbers are read from the beginning of memory of their own.
    scales, minimums = (each.clone().view(dtype).view(shared) for each in rest.view(2, -1))
    return dequantize(Quantized(codes.view(shape), scales, minimums))
