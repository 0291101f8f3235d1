"""Why a prompt is cached as far as it is, for the operator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.core.lookup import Hit
from quire.core.manager import CacheManager
from quire.core.node import Node
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds
from quire.core.tree import PrefixTree
from quire.media import MediaItem
from quire.ops.demoting import goes_on_demoted
from quire.scope import Scope


class Segment(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt: found, or missed for a reason.

    Beside `stats.MISS_REASONS` there are "scope": another scope, which does not share, has them cached; and "demoted": other
    tokens are cached in their place, which were demoted as this prompt was to come.
    """

    start: int
    stop: int
    cached: bool
    why: str


class Explanation(msgspec.Struct, frozen=True):
    """A prompt divided into cached and uncached segments, each with its reason."""

    num_tokens: int
    hit: Hit
    segments: list[Segment]
    found_in: list[tuple[Scope, int]]
    """Other scopes in which a longer prefix is cached, with its tokens; longest first."""
    in_tiers: list[tuple[str, int]] = []
    """Tiers that would add to it, with the tokens that would come from each; an engine fills it in."""

    def __str__(self) -> str:
        share = self.hit.num_tokens / self.num_tokens
        lines = [f"{self.hit.num_tokens} of {self.num_tokens} tokens cached ({share:.1%})"]
        for part in self.segments:
            mark = "hit " if part.cached else "miss"
            lines.append(f"  {mark} [{part.start:>7}, {part.stop:>7})  {part.why}")
        lines += [f"  {scope!r} has {tokens} tokens of it" for scope, tokens in self.found_in]
        lines += [f"  tier {name} has {tokens} tokens more" for name, tokens in self.in_tiers]
        return "\n".join(lines)


def explain(
    manager: CacheManager,
    tokens: TokenIds,
    scope: Scope | None = None,
    media: Sequence[MediaItem] = (),
) -> Explanation:
    """Return the cached and uncached segments of a prompt, and the reasons; `str()` of it reads well.

    Asks every scope; changes nothing. Raises what `probe` raises.
    """
    root, key = manager.read_whole(tokens, scope, media)
    lookup, num_tokens = manager.kernel.lookup, len(key) // TOKEN_BYTES
    hit = lookup.hit(root, key)
    whole, at = hit.num_blocks * manager.block_size, hit.num_tokens
    segments: list[Segment] = []
    if whole:
        segments.append(Segment(0, whole, cached=True, why=f"{hit.num_blocks} shared blocks"))
    if hit.partial_tokens:
        why = "copied out of a block that starts the same"
        segments.append(Segment(whole, at, cached=True, why=why))
    elsewhere = [each for each in _elsewhere(manager.kernel.tree, root, key) if each[1] > whole]
    found = lookup.find(root, key, num_tokens - 1)
    reason, explained, *_ = lookup.why(key, found)
    if reason == "cold" and elsewhere and elsewhere[0][1] > at:
        reason, explained = "scope", min(num_tokens - 1, elsewhere[0][1]) - at
    elif reason == "cold" and goes_on_demoted(manager.kernel.tree, found, key):
        reason, explained = "demoted", num_tokens - 1 - at
    if explained:
        segments.append(Segment(at, at + explained, cached=False, why=reason))
        at += explained
    if at < num_tokens - 1:
        segments.append(Segment(at, num_tokens - 1, cached=False, why="cold"))
    segments.append(Segment(num_tokens - 1, num_tokens, cached=False, why="last_token"))
    return Explanation(num_tokens, hit, segments, elsewhere)


def _elsewhere(tree: PrefixTree, root: Node, key: Key) -> list[tuple[Scope, int]]:
    """Return the other scopes that hold a prefix, with its tokens, longest first."""
    first = key[: tree.block_bytes].tobytes()
    found: list[tuple[Scope, int]] = []
    for scope, other in tree.roots.items():
        if other is not root and first in other.children:
            match = tree.match(other, key, len(key) - len(key) % tree.block_bytes)
            found.append((scope, match.num_blocks * tree.block_bytes // TOKEN_BYTES))
    found.sort(key=lambda pair: -pair[1])
    return found
