"""Retained prompts, bounded by tenant."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.config import check_seconds
from quire.core.tokens import TOKEN_BYTES, key_of
from quire.errors import QuireError
from quire.scope import Scope, ScopePart


@dataclass(eq=False)
class _Retained:
    """A prompt, and the one that it goes on from."""

    salt: ScopePart
    key: bytes
    due: float
    past: "_Retained | None" = None


@dataclass
class Grant:
    """The seconds for which a request's prompts are retained, None for not at all, and whether it was begun."""

    seconds: float | None
    is_used: bool = False


class RetentionBudget:
    """Prompts that clients have retained, of each tenant `max_tokens` at most.

    A prompt that goes on from a retained one replaces it; two that part somewhere count in full. Nothing is reserved:
    the budget bounds how much of a pool one tenant has evicted after everything of the others.

    Conservation: of each tenant, the tokens of its prompts that are not due <= `max_tokens`; none of one salt begins
    with another.
    """

    def __init__(self, max_tokens: int, clock: Callable[[], float]) -> None:
        self.max_tokens, self._clock = max_tokens, clock
        self._of: dict[ScopePart, list[_Retained]] = {}

    @contextmanager
    def granting(
        self, scope: Scope, prompts: Sequence[Sequence[int]], seconds: float | None
    ) -> Generator[Grant]:
        """Grant a request that its prompts are retained; not at all if they are more than its tenant has left.

        A request that is refused before it is begun gives back what it was granted. Raises `ConfigError`, `TokensError`.
        """
        check_seconds("retain_s", seconds)
        granted = self._granted(scope, prompts, seconds) if seconds else []
        grant = Grant(seconds if granted else None)
        try:
            yield grant
        except QuireError:
            if not grant.is_used:
                kept = self._of.get(scope.tenant, [])
                kept[:] = [one for each in kept if (one := _before(each, granted))]
            raise
        finally:
            for each in granted:
                each.past = None

    def num_tokens(self, tenant: str | None) -> int:
        """Return the tokens of a tenant's prompts that are not due."""
        return sum(len(each.key) for each in self._lasting(tenant)) // TOKEN_BYTES

    def _lasting(self, tenant: ScopePart) -> list[_Retained]:
        now = self._clock()
        return [each for each in self._of.get(tenant, ()) if each.due > now]

    def _granted(
        self, scope: Scope, prompts: Sequence[Sequence[int]], seconds: float
    ) -> list[_Retained]:
        """Return what prompts added to their tenant's; nothing if that would be too much."""
        due, kept, granted = self._clock() + seconds, self._lasting(scope.tenant), list[_Retained]()
        for prompt in prompts:
            new = _Retained(scope.salt, bytes(key_of(prompt)), due)
            for at, old in enumerate(kept):
                shorter, longest = sorted((new.key, old.key), key=len)
                if old.salt == new.salt and longest.startswith(shorter):
                    new = _Retained(new.salt, longest, max(due, old.due), kept.pop(at))
                    break
            granted.append(new)
            kept.append(new)
        if sum(len(each.key) for each in kept) > self.max_tokens * TOKEN_BYTES:
            return []
        self._of[scope.tenant] = kept
        return granted


def _before(each: _Retained | None, granted: Sequence[_Retained]) -> _Retained | None:
    """Return what stood in the place of a prompt before these were granted."""
    while each is not None and each in granted:
        each = each.past
    return each
