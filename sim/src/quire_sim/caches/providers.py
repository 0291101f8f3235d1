"""Caches of providers by their published rules: prefixes in steps of tokens, and prefixes up to breakpoints."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from quire.core.tokens import TOKEN_BYTES
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt, PromptPart
from quire_sim.caches.rules import CacheRules, ProviderRules
from quire_sim.caches.tracking import TrackedCache

MINUTE_S = 60.0


class _Entry(msgspec.Struct):
    """A prefix that is cached: until when, and for how long again after a hit."""

    ends_s: float
    ttl_s: int


class _Mark(NamedTuple):
    """A place where a prefix may be cached: its tokens, the digest of all before it, the part that ends there."""

    size: int
    digest: bytes
    part: int
    ttl_s: int


class _Machines:
    """Machines that requests are routed to: by a key, and by the rate of its requests."""

    def __init__(self) -> None:
        self._taken: dict[bytes, list[deque[float]]] = {}

    def of(self, prompt: CachePrompt, rules: CacheRules) -> tuple[bytes, int]:
        """Return the machine of a request: the first of its key that has taken less in the last minute."""
        if not rules.route_tokens:
            return b"", 0
        begin = prompt.tokens[: rules.route_tokens].tobytes()
        key = blake2b(begin + prompt.key.encode(), digest_size=16).digest()
        if not rules.route_rpm or prompt.time_s is None:
            return key, 0
        machines = self._taken.setdefault(key, [])
        for number, taken in enumerate(machines):
            while taken and taken[0] <= prompt.time_s - MINUTE_S:
                taken.popleft()
            if len(taken) < rules.route_rpm:
                taken.append(prompt.time_s)
                return key, number
        machines.append(deque([prompt.time_s]))
        return key, len(machines) - 1


class ProviderCache(TrackedCache):
    """The cache of a provider, without limits of memory. Each model, scope and machine has its own.

    steps        A prefix is found up to the last step that an earlier prompt has.
    breakpoints  A prefix is stored up to each breakpoint. It is looked for at each breakpoint and at the ends of
                 parts before it, as far back as the rules say.

    An entry can be found once the first token of the answer that wrote it has left.
    """

    has_steps = False

    def __init__(self, rules: ProviderRules) -> None:
        super().__init__()
        self._rules = rules
        self._machines = _Machines()
        self._entries: dict[tuple[object, ...], dict[bytes, _Entry]] = {}
        self._anywhere: dict[tuple[str, str], dict[bytes, _Entry]] = {}
        self._writes: dict[int, list[_Mark]] = {}
        self._asked: dict[int, dict[bytes, _Entry]] = {}
        self._contents: set[bytes] = set()

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Look for the longest prefix; what is longer is written when the prompt is computed."""
        rules = self._rules.of(prompt.model)
        machine = self._machines.of(prompt, rules)
        entries = self._entries.setdefault((prompt.model, prompt.scope, *machine), {})
        self._asked[number] = entries
        marks = _steps(prompt, rules) if rules.kind == "steps" else _ends(prompt, rules)
        places, writes = _places(marks, rules)
        alive = [mark for mark in places if _is_alive(entries, mark, now)]
        best = max(alive, key=lambda mark: mark.size, default=None)
        hit = 0 if best is None else best.size
        if rules.is_refreshed:
            for mark in marks:
                if mark.size <= hit and _is_alive(entries, mark, now):
                    entry = entries[mark.digest]
                    entry.ends_s = max(entry.ends_s, now + entry.ttl_s)
        found = self._hit(number, prompt, hit, 1)
        found.why = self._why(found, prompt, (marks, places), now)
        found.least = rules.minimum if found.why == "minimum" else 0
        self._writes[number] = [mark for mark in writes if mark.size > hit]
        found.written = _written(self._writes[number], hit)
        found.cost += hit * rules.read + sum(
            tokens * (rules.write_price(ttl) - 1) for ttl, tokens in found.written.items()
        )
        return found

    def computed(self, number: int, now: float) -> None:
        """Store the prefixes that the request writes."""
        prompt = self._computed(number)
        if prompt is None:
            return
        entries, writes = self._asked.pop(number), self._writes.pop(number)
        anywhere = self._anywhere.setdefault((prompt.model, prompt.scope), {})
        for mark in writes:
            entry = _Entry(now + mark.ttl_s, mark.ttl_s)
            entries[mark.digest] = anywhere[mark.digest] = entry
        rules = self._rules.of(prompt.model)
        if rules.keys and writes:
            sizes = {mark.size for mark in writes}
            contents = _ends(prompt, msgspec.structs.replace(rules, keys={}))
            self._contents.update(mark.digest for mark in contents if mark.size in sizes)

    def end(self, number: int, now: float) -> None:
        """Forget the request: an answer is no prefix until it is sent again."""
        self._prompts.pop(number)

    def _why(
        self,
        found: CacheHit,
        prompt: CachePrompt,
        places: tuple[list[_Mark], list[_Mark]],
        now: float,
    ) -> str:
        """Return why a hit is shorter than what earlier prompts have."""
        rules = self._rules.of(prompt.model)
        entries = self._asked[found.number]
        marks, looked_at = places
        if found.hit_tokens >= found.seen_tokens:
            return ""
        if found.seen_tokens < rules.minimum:
            return "minimum"
        longer = [mark for mark in marks if found.hit_tokens < mark.size <= found.seen_tokens]
        old = [mark for mark in longer if mark.digest in entries]
        anywhere = self._anywhere.get((prompt.model, prompt.scope), {})
        if any(
            _is_alive(anywhere, m, now) and m.digest not in entries
            for m in longer
            if m in looked_at
        ):
            return "other-machine"
        if any(mark in looked_at for mark in old):
            return "ttl"
        writing = {mark.digest for each in self._writes.values() for mark in each}
        if any(mark.digest in writing for mark in longer):
            return "at-once"
        if rules.kind == "steps":
            return "rounding"
        if not any(part.breakpoint_s for part in prompt.parts) and not rules.has_implicit:
            return "no-breakpoint"
        if any(_is_alive(entries, mark, now) for mark in old):
            return "look-back"
        without = msgspec.structs.replace(rules, keys={})
        sizes = {mark.size for mark in looked_at if mark.size > found.hit_tokens}
        if any(m.digest in self._contents and m.size in sizes for m in _ends(prompt, without)):
            return "parameters"
        is_equal = any(mark.ttl_s for mark in longer if mark in looked_at)
        return "unmarked" if is_equal else "behind-breakpoint"


def _is_alive(entries: dict[bytes, _Entry], mark: _Mark, now: float) -> bool:
    entry = entries.get(mark.digest)
    return entry is not None and entry.ends_s >= now


def _steps(prompt: CachePrompt, rules: CacheRules) -> list[_Mark]:
    """Return the steps of a prompt, the shortest first."""
    key, at, digest = prompt.tokens.tobytes(), 0, b""
    ttl = rules.retained_s if prompt.retention_s > rules.ttl_s and rules.retained_s else rules.ttl_s
    marks: list[_Mark] = []
    for size in range(rules.minimum, prompt.size + 1, rules.step):
        run = key[at * TOKEN_BYTES : size * TOKEN_BYTES]
        digest, at = blake2b(digest + run, digest_size=16).digest(), size
        marks.append(_Mark(size, digest, len(marks), ttl))
    return marks


def _ends(prompt: CachePrompt, rules: CacheRules) -> list[_Mark]:
    """Return the ends of a prompt's parts; a level's parameters belong to all from its first part on."""
    key, at, digest, level = prompt.tokens.tobytes(), 0, b"", ""
    marks: list[_Mark] = []
    parts = prompt.parts or (PromptPart(prompt.size),)
    has_media = str(any(part.is_media for part in parts)) if rules.keys else ""
    for place, part in enumerate(parts):
        if part.level != level:
            level = part.level
            named = rules.keys.get(part.level, ())
            told = [f"{name}={prompt.parameters.get(name, '')}" for name in named]
            told += [has_media] if named else []
            digest += "\0".join(told).encode()
        run = key[at * TOKEN_BYTES : part.end * TOKEN_BYTES]
        digest = blake2b(digest + run + b"|", digest_size=16).digest()
        at = part.end
        marks.append(_Mark(part.end, digest, place, part.breakpoint_s))
    return marks


def _places(marks: list[_Mark], rules: CacheRules) -> tuple[list[_Mark], list[_Mark]]:
    """Return where a request looks for entries, and where it writes them."""
    if rules.kind == "steps":
        return marks, marks
    points = [mark for mark in marks if mark.ttl_s]
    if rules.has_implicit and marks and not marks[-1].ttl_s:
        points.append(marks[-1]._replace(ttl_s=rules.ttl_s))
    points = points[-rules.most_breakpoints :]
    back = rules.look_back or len(marks)
    places = {
        place: None
        for point in points
        for place in range(point.part, max(point.part - back, -1), -1)
    }
    big = [marks[place] for place in places if marks[place].size >= rules.minimum]
    return big, [mark for mark in points if mark.size >= rules.minimum]


def _written(marks: list[_Mark], hit: int) -> dict[int, int]:
    """Return the tokens that are written, by TTL."""
    written: dict[int, int] = {}
    at = hit
    for mark in marks:
        written[mark.ttl_s] = written.get(mark.ttl_s, 0) + mark.size - at
        at = mark.size
    return written
