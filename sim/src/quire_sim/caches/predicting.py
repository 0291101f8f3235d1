"""A log through a cache: predicted hits beside those that the log's own usage tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from quire_sim.caches.asking import CacheHit, ServerCache, hits
from quire_sim.caches.prompts import CachePrompt
from quire_sim.logs import LoggedRequest, TokenUsage

DIFFERENCES = {
    "": "equal",
    "before": "more than the log has: the cache was warm before it began, or others share it",
    "kept": "found although the rules or the capacity say that it was gone",
    "nothing": "nothing found: another replica, or evicted for others",
    "less": "less found: evicted for others, or another replica",
    "more": "more found: another version, block size or capacity",
    "estimated": "within what an estimate of tokens leaves open",
}
"""Reasons why a hit that a log tells differs from the predicted one."""

NEAR = 0.03
"""Share of a prompt's tokens below which a difference is put down to estimated tokens."""


class Prediction(msgspec.Struct):
    """A request's hit in a cache, and what its server told; None: nothing.

    `differs`  one of `DIFFERENCES`, if the server told it
    """

    hit: CacheHit
    told_prompt_tokens: int | None = None
    told_hit_tokens: int | None = None
    differs: str = ""
    is_estimated: bool = False


class CacheReport(msgspec.Struct):
    """The sums of a log in a cache, in tokens.

    `hit_tokens` + `lost`, by reason, == `seen_tokens`, which earlier prompts of the same model and scope have
    `cost` is the price of all prompts in input tokens that are not cached; of a server, the tokens it computes
    `told_of_tokens`, `told_hit_tokens`, `predicted_tokens`: prompts whose usage tells hits, those, and the predicted ones
    `curve`          hit rates by capacity in tokens, where they were asked for
    `asked`          predictions of the line that was asked for
    `equal`          requests of these whose hits are equal
    `differences`    requests of these by how they differ; `shown`: the largest differences
    """

    server: str
    requests: int = 0
    prompt_tokens: int = 0
    seen_tokens: int = 0
    hit_tokens: int = 0
    lost: dict[str, int] = {}
    written: dict[int, int] = {}
    cost: float = 0.0
    told: int = 0
    told_of_tokens: int = 0
    told_hit_tokens: int = 0
    predicted_tokens: int = 0
    equal: int = 0
    differences: dict[str, int] = {}
    shown: list[Prediction] = []
    is_estimated: bool = False
    asked: list[Prediction] = []
    curve: dict[int, float] = {}

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that are found, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def points_off(self) -> float | None:
        """Predicted hit rate minus the told one, in points; None if the log tells none."""
        if not self.told_of_tokens:
            return None
        return (self.predicted_tokens - self.told_hit_tokens) / self.told_of_tokens * 100


def predictions(
    log: Iterable[LoggedRequest],
    cache: ServerCache,
    render: Callable[[LoggedRequest], CachePrompt | None],
) -> Iterator[Prediction]:
    """Yield the prediction of each request that `render` gives a prompt for, in the order in which they start."""
    told: list[tuple[TokenUsage, bool]] = []

    def prompts() -> Iterator[CachePrompt]:
        for request in log:
            prompt = render(request) if request.sections else None
            if prompt is not None:
                told.append((request.usage, prompt.is_estimated))
                yield prompt

    for hit in hits(cache, prompts()):
        usage, is_estimated = told[hit.number]
        found = Prediction(hit, usage.prompt_tokens, usage.cached_tokens, is_estimated=is_estimated)
        if usage.cached_tokens is not None:
            found.differs = _difference(hit, usage.cached_tokens, is_estimated=is_estimated)
        yield found


def cache_report(server: str, found: Iterable[Prediction], row: int | None = None) -> CacheReport:
    """Return the sums of predictions, with the ten largest differences, and those of a line."""
    report = CacheReport(server)
    for each in found:
        hit = each.hit
        if hit.row == row:
            report.asked.append(each)
        report.requests += 1
        report.is_estimated |= each.is_estimated
        report.prompt_tokens += hit.prompt_tokens
        report.seen_tokens += hit.seen_tokens
        report.hit_tokens += hit.hit_tokens
        report.cost += hit.cost
        if hit.why:
            report.lost[hit.why] = report.lost.get(hit.why, 0) + hit.seen_tokens - hit.hit_tokens
        for ttl, tokens in hit.written.items():
            report.written[ttl] = report.written.get(ttl, 0) + tokens
        if each.told_hit_tokens is None:
            continue
        report.told += 1
        report.told_of_tokens += each.told_prompt_tokens or hit.prompt_tokens
        report.told_hit_tokens += each.told_hit_tokens
        report.predicted_tokens += hit.hit_tokens
        report.equal += not each.differs
        if each.differs:
            report.differences[each.differs] = report.differences.get(each.differs, 0) + 1
            report.shown.append(each)
            if len(report.shown) > 100:
                report.shown = _largest(report.shown)
    report.shown = _largest(report.shown)
    return report


def _largest(found: list[Prediction]) -> list[Prediction]:
    return sorted(found, key=lambda each: -abs((each.told_hit_tokens or 0) - each.hit.hit_tokens))[
        :10
    ]


def _difference(hit: CacheHit, told: int, *, is_estimated: bool) -> str:
    """Return how a told hit differs from the predicted one."""
    near = NEAR * hit.prompt_tokens if is_estimated else 0
    if told == hit.hit_tokens:
        return ""
    if abs(told - hit.hit_tokens) <= near:
        return "estimated"
    if told > hit.seen_tokens + near:
        return "before"
    if told > hit.hit_tokens:
        return "kept" if hit.why in {"ttl", "evicted", "at-once", "other-slot"} else "more"
    return "less" if told else "nothing"
