"""Losses of a log joined with those of a server's cache: each request's lost tokens have one cause."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire_sim.caches import ADVICE, REASONS, CacheHit, CacheReport
from quire_sim.lint.causes import CAUSES, JOINT, Cause
from quire_sim.lint.exact import PIECE_TOKENS
from quire_sim.lint.linting import LEAST, LintedRequest
from quire_sim.lint.reports import CauseShare, LaterLoss, LintReport, Loss, count_loss, shares_of

THE_CACHE = "the cache"
"""The place of a loss that no words of the prompt cause."""

AN_ANSWER = "the joint with the answer"
"""The place of tokens that merge."""

_FROM_THE_FRONT = ("model", "cache-salt", "parameters")
"""Causes beside a prompt, whose losses are all that two prompts have in common."""

_BY_NAME = {
    name: Cause(name, title, ADVICE.get(name, "")) for name, title in REASONS.items() if name
} | {cause.name: cause for cause in CAUSES}


def cause_named(name: str) -> Cause:
    """Return a cause of a log's content or of a cache by its name."""
    return _BY_NAME[name]


class _Linted(NamedTuple):
    """A loss that content causes; `is_marked`: a breakpoint is found once it is mended."""

    loss: Loss
    is_marked: bool


class JoinedLosses:
    """The losses of a log in a server's cache.

    A request finds `hit_tokens` of the `seen_tokens` that earlier prompts begin with, and the cache is the cause of the
    difference. Equal tokens behind the first words that differ are the content's. The whole loss of a request has the
    cause that ends it first: that of the cache, whose place is before the words. It is that of the words if mending
    them ends the cache's as well: a prefix that is too short, or a breakpoint behind them.
    """

    def __init__(self) -> None:
        self._linted: list[_Linted | None] = []
        self._losses: list[Loss] = []
        self._rounding = 0

    def add(self, seen: LintedRequest) -> None:
        """Take a request as it was linted."""
        loss = seen.loss
        self._linted.append(None if loss is None else _Linted(loss, seen.is_marked))

    def find(self, hit: CacheHit, least: float) -> None:
        """Take the hit of a request; losses have at least so many tokens."""
        linted, self._linted[hit.number] = self._linted[hit.number], None
        missed = float(hit.seen_tokens - hit.hit_tokens)
        if hit.why == "rounding" or missed < least:
            self._rounding += hit.seen_tokens - hit.hit_tokens
            missed = 0.0
        content = None
        if linted is not None:
            size = linted.loss.tokens
            if linted.loss.cause in _FROM_THE_FRONT:  # a cache may be keyed by less
                size -= hit.seen_tokens
            size = min(size, hit.prompt_tokens - hit.seen_tokens)
            content = _cut(linted.loss, size) if size >= least else None
        if content is None and hit.merged >= least:
            content = Loss(
                JOINT, AN_ANSWER, 0, float(hit.merged), row=hit.row, earlier_row=hit.earlier_row
            )
        if missed and (content is None or not _ends(linted, content, hit)):
            self._losses.append(_lost_by_cache(hit, missed, content))
        elif content is not None:
            content.tokens += missed
            self._losses.append(content)

    def join(self, report: LintReport, cache: CacheReport) -> None:
        """Make a report of a log without limits one of a server's cache, in place."""
        by_cause: dict[str, CauseShare] = {}
        for loss in self._losses:
            count_loss(by_cause, loss)
        report.server, report.losses = cache.server, self._losses
        report.prompt_tokens, report.hit_tokens = cache.prompt_tokens, cache.hit_tokens
        report.lost_tokens = sum(each.tokens for each in self._losses)
        report.rounding_tokens = self._rounding
        report.causes = shares_of(by_cause, report.prompt_tokens)


def least_of(report: LintReport) -> float:
    """Return the tokens that a loss has at least."""
    return LEAST / report.chars_per_token if report.is_estimated else PIECE_TOKENS


def _cut(loss: Loss, tokens: float) -> Loss:
    """Return a loss of at most so many tokens."""
    behind = [
        msgspec.structs.replace(each, tokens=min(each.tokens, tokens)) for each in loss.behind
    ]
    return msgspec.structs.replace(loss, tokens=tokens, behind=behind)


def _ends(linted: _Linted | None, content: Loss, hit: CacheHit) -> bool:
    """Whether mending the content ends what the cache loses, too."""
    if hit.why == "minimum":
        return hit.seen_tokens + content.tokens >= hit.least
    return hit.why == "behind-breakpoint" and linted is not None and linted.is_marked


def _lost_by_cache(hit: CacheHit, missed: float, content: Loss | None) -> Loss:
    """Return the loss of a request that its cache causes first; what its content loses stands behind."""
    loss = Loss(hit.why, THE_CACHE, 0, missed, row=hit.row, earlier_row=hit.earlier_row)
    if hit.replica:
        loss.path = f"replica {hit.own_replica}"
        loss.old, loss.new = hit.replica, hit.own_replica
    if content is not None:
        fields = {name: getattr(content, name) for name in LaterLoss.__struct_fields__}
        loss.behind = [LaterLoss(**fields), *content.behind]
        loss.tokens += content.tokens
    return loss
