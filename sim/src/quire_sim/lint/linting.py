"""A request log as a report: tokens found, new and lost, and each loss with its cause and place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec

from quire.errors import ConfigError
from quire_sim.lint.causes import TEMPLATE, Parting, cause_of
from quire_sim.lint.chains import PromptDifference, differences
from quire_sim.lint.exact import PIECE_TOKENS, ExactPrompts, Renderer
from quire_sim.lint.nearest import MAX_BYTES, EarlierPrompt, Finding, PromptTrie, scope_of
from quire_sim.lint.places import place_of
from quire_sim.lint.rates import RequestRates
from quire_sim.lint.reports import (
    CauseShare,
    LaterLoss,
    LintReport,
    Loss,
    count_loss,
    scale,
    shares_of,
)
from quire_sim.lint.rewrites import ChangingParts
from quire_sim.lint.texts import BYTES_PER_TOKEN
from quire_sim.logs import LogFile, LoggedRequest, TokenUsage
from quire_sim.logs.hashed import KEY, LintedRow

LEAST = 64
"""Characters that a loss has at least; below it, equal texts are chance."""

WORDS = 60
"""Characters that are shown of each side."""

REASON = 160
"""Characters of a reason that are shown."""

LEAST_TEMPLATE = 16
"""Tokens that a chat template writes otherwise at least."""

EVERY = 1000


class LintedRequest(msgspec.Struct, frozen=True):
    """A request as it was linted, in characters, or in tokens that are exact.

    `hit_chars`  characters of its sections that are found
    `place`      the first section that differs from the nearest earlier prompt; None without one
    `is_marked`  whether a breakpoint is found again once the loss is mended
    """

    request: LoggedRequest
    size: float
    hit: float
    hit_chars: float
    place: int | None
    loss: Loss | None
    is_marked: bool = False


def lint_log(
    log: LogFile,
    *,
    renderer: Renderer | None = None,
    keep: Callable[[Loss], bool] = lambda _: False,
    on_progress: Callable[[int], None] | None = None,
    watchers: Sequence[Callable[[LintedRequest], None]] = (),
    learned: ChangingParts | None = None,
) -> LintReport:
    """Read a log once and return its report; `keep` says which losses it lists one by one.

    With a `renderer`, tokens are counted exactly, and a request that it refuses counts as unread. The `watchers`
    are told of each request, and `learned` gets what rewrites need to know. Raises `TraceError`, and `ConfigError` for a renderer of a log without text.
    """
    linting = LogLinting(log, renderer=renderer, watchers=watchers, learned=learned)
    for _ in linting.requests(keep, on_progress):
        pass
    return linting.report


class LogLinting:
    """A report that grows by the request, for one pass through a log. Raises `ConfigError` as `lint_log` does."""

    def __init__(
        self,
        log: LogFile,
        *,
        renderer: Renderer | None = None,
        watchers: Sequence[Callable[[LintedRequest], None]] = (),
        learned: ChangingParts | None = None,
    ) -> None:
        if renderer is not None and log.format == "hashed":
            raise ConfigError(
                f"{log.path} has no text, so no model counts its tokens; leave --model out"
            )
        self.report = LintReport(str(log.path), log.format, is_estimated=renderer is None)
        self._log, self._watchers = log, watchers
        self._exact = None if renderer is None else ExactPrompts(renderer)
        self._prompts = PromptTrie(MAX_BYTES if renderer is None else MAX_BYTES // 2)
        self._learned = ChangingParts() if learned is None else learned
        self._rates = RequestRates()
        self._by_cause: dict[str, CauseShare] = {}
        self._told = self._told_chars = 0
        self._per_token = 0.0

    def requests(
        self, keep: Callable[[Loss], bool], on_progress: Callable[[int], None] | None = None
    ) -> Iterator[LoggedRequest]:
        """Yield the requests of the log, each once it is linted; the report is whole at the end. Raises `TraceError`."""
        report = self.report
        for request in self._log:
            loss = self.add(request)
            if loss is not None and keep(loss):
                report.losses.append(loss)
            if on_progress is not None and not report.requests % EVERY:
                on_progress(report.requests)
            yield request
        self.end()

    def add(self, request: LoggedRequest) -> Loss | None:
        """Count a request, and return its loss."""
        report, usage = self.report, request.usage
        if usage.prompt_tokens is not None and usage.cached_tokens is not None:
            report.told_prompt_tokens = (report.told_prompt_tokens or 0) + usage.prompt_tokens
            report.told_cached_tokens = (report.told_cached_tokens or 0) + usage.cached_tokens
        if not request.sections:
            report.without_prompt += 1
            return None
        self._rates.add(request)
        tokens = None
        if self._exact is not None:
            try:
                tokens = self._exact.add(request)
            except ConfigError as error:
                reason = re.sub(r"\d+", "N", str(error))[:REASON]
                self._log.unread.add(f"not rendered: {reason}", request.row)
                return None
        if isinstance(told := request.body.get(KEY), LintedRow):
            self._per_token = told.per_token
            return self._tell(_told(request, told))
        found = self._prompts.add(request)
        counted = found if tokens is None else tokens
        self._learn(usage, found)
        loss = self._loss(found) if tokens is None else self._exact_loss(found, tokens)
        place = None if found.earlier is None else found.place
        is_marked = loss is not None and _is_marked(found)
        return self._tell(
            LintedRequest(request, counted.size, counted.hit, found.hit, place, loss, is_marked)
        )

    def _tell(self, seen: LintedRequest) -> Loss | None:
        """Count what was found of a request."""
        report, loss = self.report, seen.loss
        report.requests += 1
        report.prompt_tokens += seen.size
        report.hit_tokens += seen.hit
        if loss is not None:
            report.lost_tokens += loss.tokens
            count_loss(self._by_cause, loss)
        for watch in self._watchers:
            watch(seen)
        return loss

    def end(self) -> None:
        """Turn characters into tokens, and sort."""
        report, self._learned.busiest = self.report, self._rates.busiest
        if self._log.format == "hashed":
            report.is_estimated = self._per_token > 0
            report.chars_per_token = self._per_token or BYTES_PER_TOKEN
        elif report.is_estimated and self._told:
            report.chars_per_token = self._told_chars / self._told
        report.causes = shares_of(self._by_cause, report.prompt_tokens)
        report.unread = self._log.unread.sentences()
        scale(report)

    def _learn(self, usage: TokenUsage, found: Finding) -> None:
        if usage.prompt_tokens and self._log.format not in {"claude-code", "codex"}:
            self._told += usage.prompt_tokens
            self._told_chars += found.size

    def _loss(self, found: Finding) -> Loss | None:
        if found.lost < LEAST or found.earlier is None:
            return None
        return _loss(found, found.earlier, self._prompts, self._learned)

    def _exact_loss(self, found: Finding, tokens: Finding) -> Loss | None:
        """Return the loss of a request in tokens: of its first difference, or of the template that writes it otherwise."""
        found.prompt.rendered = tokens.prompt
        earlier, exact = found.earlier, cast("ExactPrompts", self._exact)
        if earlier is None:
            return None
        if found.lost >= LEAST:
            lost = exact.lost(tokens, earlier.rendered)
            if lost < PIECE_TOKENS:
                return None
            loss = _loss(found, earlier, self._prompts, self._learned)
            for each in loss.behind:
                each.tokens *= lost / loss.tokens
            loss.tokens = float(lost)
            return loss
        if found.place < len(earlier.ids):
            return None
        lost = exact.lost(tokens, earlier.rendered)
        if lost < LEAST_TEMPLATE:
            return None
        before, old, new = exact.parting(tokens, earlier.rendered, WORDS)
        path = "the chat template"
        row, earlier_row = found.request.row, earlier.row
        return Loss(
            TEMPLATE, path, 0, float(lost), before, old, new, row=row, earlier_row=earlier_row
        )


def _told(request: LoggedRequest, row: LintedRow) -> LintedRequest:
    """Return a request of a log without text as it was linted."""
    loss = None if row.loss is None else msgspec.convert(row.loss, Loss)
    return LintedRequest(request, row.size, row.hit, row.hit_chars, row.place, loss)


def _is_marked(found: Finding) -> bool:
    """Whether the sections up to the first breakpoint are equal but for the first that differs."""
    sections, earlier = found.request.sections, found.earlier
    first = next((n for n, each in enumerate(sections) if each.breakpoint_s), None)
    if first is None or earlier is None:
        return False
    return set(found.prompt.ids[found.place + 1 : first + 1]) <= set(earlier.ids)


def _loss(
    found: Finding, earlier: EarlierPrompt, prompts: PromptTrie, learned: ChangingParts
) -> Loss:
    scope = scope_of(found.request)
    other = next(
        (name for name in {**earlier.scope, **scope} if earlier.scope.get(name) != scope.get(name)),
        "",
    )
    parting = Parting(
        prompts.sections(earlier.ids),
        prompts.sections(found.prompt.ids),
        found.place,
        found.at,
        other,
    )
    chain = list(differences(parting, found.lost, LEAST))
    first = (
        chain[0] if chain else PromptDifference(cause_of(parting), parting, found.place, found.lost)
    )
    row, earlier_row = found.request.row, earlier.row
    loss = Loss(first.cause.name, "", 0, float(found.lost), row=row, earlier_row=earlier_row)
    for each in chain:
        learned.add(each)
    loss.path, loss.at = place_of(first, found.request.sections)
    _words(loss, parting, earlier.scope, scope)
    for each in chain[1:]:
        then = LaterLoss(each.cause.name, "", 0, float(min(each.chars, found.lost)))
        then.path, then.at = place_of(each, found.request.sections)
        _words(then, each.parting, earlier.scope, scope)
        if (then.cause, then.path) not in {(e.cause, e.path) for e in (loss, *loss.behind)}:
            loss.behind.append(then)
    return loss


def _words(
    loss: LaterLoss, parting: Parting, old_scope: dict[str, str], scope: dict[str, str]
) -> None:
    at = parting.at
    if parting.pair is not None:
        old, new = parting.texts
        loss.before = new[max(at - WORDS, 0) : at]
        loss.old, loss.new = old[at : at + WORDS], new[at : at + WORDS]
    elif parting.place < 0:
        loss.old, loss.new = (each.get(parting.scope, "")[:WORDS] for each in (old_scope, scope))
