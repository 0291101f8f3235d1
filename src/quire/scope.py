"""Scopes: who may share a prefix."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from quire.errors import ScopeError

ScopePart: TypeAlias = "str | bytes | int | None"


class Scope(msgspec.Struct, frozen=True, order=False):
    """The structured key under which prefixes are shared: equal parts share, others never do.

    `salt` divides the cache, `lora` names an adapter, `model` the fingerprint of weights and layout.
    `tenant` names the owner whose data is purged in one call; without it, the salt does.
    Parts are compared one by one, never joined: LoRA "a" with salt "b" is not LoRA "ab". Raises `ScopeError` for a part that is not str, bytes, int or None.
    """

    salt: ScopePart = None
    lora: ScopePart = None
    model: ScopePart = None
    tenant: ScopePart = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            part: object = getattr(self, name)
            if part is not None and type(part) not in (str, bytes, int):
                raise ScopeError(f"scope {name} must be str, bytes, int or None, got {part!r}")
            if isinstance(part, int) and not -(2**63) <= part < 2**63:
                raise ScopeError(
                    f"scope {name} must fit 64 bits, this one has {part.bit_length()} bits; use a str"
                )
            if isinstance(part, str) and not part.isascii():
                try:
                    part.encode()
                except UnicodeEncodeError:
                    why = "cannot be written as UTF-8; use bytes for it"
                    raise ScopeError(f"scope {name} {part!r} {why}") from None

    def __repr__(self) -> str:
        parts = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"Scope({', '.join(f'{name}={part!r}' for name, part in parts if part is not None)})"


NO_SCOPE = Scope()
"""The scope of requests that name none."""


def check_scope(scope: object) -> None:
    """Raise `ScopeError` unless this is a `Scope`."""
    if not isinstance(scope, Scope):
        raise ScopeError(
            f"scope must be a quire.Scope, got {type(scope).__name__} {scope!r}; "
            "write Scope(salt=...) for a tenant, Scope(lora=...) for an adapter"
        )


def scope_of(tenant: Scope | ScopePart) -> Scope:
    """Return a scope of a tenant. Raises `ScopeError`."""
    return tenant if isinstance(tenant, Scope) else Scope(tenant=tenant)
