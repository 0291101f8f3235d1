"""A request log as a report: tokens found, new and lost, and each loss with its cause and place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from quire.errors import ConfigError
from quire_sim.lint.causes import TEMPLATE, Parting, cause_of
from quire_sim.lint.exact import PIECE_TOKENS, ExactPrompts, Renderer
from quire_sim.lint.nearest import EarlierPrompt, Finding, PromptTrie
from quire_sim.lint.picture import LintPicture
from quire_sim.lint.texts import BYTES_PER_TOKEN
from quire_sim.logs import LogFile, LoggedRequest, TokenUsage

LEAST = 64
"""Characters that a loss has at least; below it, equal texts are chance."""

WORDS = 60
"""Characters that are shown of each side."""

REASON = 160
"""Characters of a reason that are shown."""

LEAST_TEMPLATE = 16
"""Tokens that a chat template writes otherwise at least."""

EVERY = 1000


class Loss(msgspec.Struct):
    """A request that loses tokens: where it parts from the nearest earlier one, and why.

    `earlier_row`  the row of that one; `path`, `at`: the section that differs, and the character in it
    `before`       the text before that place; `old`, `new`: both sides from it on
    `tokens`       tokens behind the place that stand in both, about
    """

    row: int
    earlier_row: int
    cause: str
    path: str
    at: int
    tokens: float
    before: str = ""
    old: str = ""
    new: str = ""


class CauseShare(msgspec.Struct):
    """All losses of one cause: requests, tokens, their share of all prompt tokens, and the largest as an example."""

    cause: str
    requests: int = 0
    tokens: float = 0.0
    share: float = 0.0
    paths: dict[str, int] = {}
    example: Loss | None = None


class LintReport(msgspec.Struct):
    """Tokens of a log's prompts by what a prefix cache without limits would do, and causes of losses.

    `prompt_tokens` = `hit_tokens` + `lost_tokens` + new ones. `is_estimated`: tokens are characters by a factor;
    otherwise they are a tokenizer's, exactly.
    `told_prompt_tokens`, `told_cached_tokens`: the sums of usage that the log tells, or None
    """

    source: str
    format: str
    requests: int = 0
    without_prompt: int = 0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    lost_tokens: float = 0.0
    is_estimated: bool = True
    chars_per_token: float = BYTES_PER_TOKEN
    told_prompt_tokens: int | None = None
    told_cached_tokens: int | None = None
    causes: list[CauseShare] = []
    unread: list[str] = []
    losses: list[Loss] = []


def lint_log(
    log: LogFile,
    *,
    renderer: Renderer | None = None,
    keep: Callable[[Loss], bool] = lambda _: False,
    on_progress: Callable[[int], None] | None = None,
    picture: LintPicture | None = None,
) -> LintReport:
    """Read a log once and return its report; `keep` says which losses it lists one by one. Raises `TraceError`.

    With a `renderer`, tokens are counted exactly, and a request that it refuses counts as unread. A `picture` is filled.
    """
    linting = _Linting(log, renderer, picture)
    report = linting.report
    for request in log:
        loss = linting.add(request)
        if loss is not None and keep(loss):
            report.losses.append(loss)
        if on_progress is not None and not report.requests % EVERY:
            on_progress(report.requests)
    linting.end()
    return report


class _Linting:
    """A report that grows by the request."""

    def __init__(
        self, log: LogFile, renderer: Renderer | None, picture: LintPicture | None
    ) -> None:
        self.report = LintReport(str(log.path), log.format, is_estimated=renderer is None)
        self._log, self._picture = log, picture
        self._exact = None if renderer is None else ExactPrompts(renderer)
        self._prompts = PromptTrie()
        self._by_cause: dict[str, CauseShare] = {}
        self._told = self._told_chars = 0

    def add(self, request: LoggedRequest) -> Loss | None:
        """Count a request, and return its loss."""
        report, usage = self.report, request.usage
        if usage.prompt_tokens is not None and usage.cached_tokens is not None:
            report.told_prompt_tokens = (report.told_prompt_tokens or 0) + usage.prompt_tokens
            report.told_cached_tokens = (report.told_cached_tokens or 0) + usage.cached_tokens
        if not request.sections:
            report.without_prompt += 1
            return None
        tokens = None
        if self._exact is not None:
            try:
                tokens = self._exact.add(request)
            except ConfigError as error:
                reason = re.sub(r"\d+", "N", str(error))[:REASON]
                self._log.unread.add(f"not rendered: {reason}", request.row)
                return None
        report.requests += 1
        found = self._prompts.add(request)
        counted = found if tokens is None else tokens
        report.prompt_tokens += counted.size
        report.hit_tokens += counted.hit
        self._learn(usage, found)
        loss = self._loss(found) if tokens is None else self._exact_loss(found, tokens)
        if loss is not None:
            report.lost_tokens += loss.tokens
            _count(self._by_cause.setdefault(loss.cause, CauseShare(loss.cause)), loss)
        if self._picture is not None:
            self._picture.add(request, found, counted, 0 if loss is None else loss.tokens)
        return loss

    def end(self) -> None:
        """Turn characters into tokens, and sort."""
        report = self.report
        if report.is_estimated and self._told:
            report.chars_per_token = self._told_chars / self._told
        report.causes = sorted(self._by_cause.values(), key=lambda each: -each.tokens)
        report.unread = self._log.unread.sentences()
        _scale(report)

    def _learn(self, usage: TokenUsage, found: Finding) -> None:
        if usage.prompt_tokens and self._log.format not in {"claude-code", "codex"}:
            self._told += usage.prompt_tokens
            self._told_chars += found.size

    def _loss(self, found: Finding) -> Loss | None:
        if found.lost < LEAST or found.earlier is None:
            return None
        return _loss(found, found.earlier, self._prompts)

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
            loss = _loss(found, earlier, self._prompts)
            loss.tokens = float(lost)
            return loss
        if found.place < len(earlier.ids):
            return None
        lost = exact.lost(tokens, earlier.rendered)
        if lost < LEAST_TEMPLATE:
            return None
        before, old, new = exact.parting(tokens, earlier.rendered, WORDS)
        path = "the chat template"
        return Loss(
            found.request.row, earlier.row, TEMPLATE, path, 0, float(lost), before, old, new
        )


def _count(share: CauseShare, loss: Loss) -> None:
    share.requests += 1
    share.tokens += loss.tokens
    share.paths[loss.path] = share.paths.get(loss.path, 0) + 1
    if share.example is None or loss.tokens > share.example.tokens:
        share.example = loss


def _scale(report: LintReport) -> None:
    """Turn characters into tokens."""
    factor = 1 / report.chars_per_token if report.is_estimated else 1
    for share in report.causes:
        share.share = share.tokens / max(report.prompt_tokens, 1)
        share.tokens *= factor
    examples = [share.example for share in report.causes if share.example is not None]
    for loss in {id(each): each for each in (*report.losses, *examples)}.values():
        loss.tokens *= factor
    report.prompt_tokens *= factor
    report.hit_tokens *= factor
    report.lost_tokens *= factor


def _loss(found: Finding, earlier: EarlierPrompt, prompts: PromptTrie) -> Loss:
    parting = Parting(
        prompts.sections(earlier.ids), prompts.sections(found.prompt.ids), found.place, found.at
    )
    cause = cause_of(parting)
    sections = found.request.sections
    path, at = "model", 0
    if 0 <= found.place < len(sections):
        path, at = sections[found.place].path, found.at
        if sections[found.place].kind == "tool":
            path += _within(parting)
    elif found.place >= len(sections):
        path = "the end"
    old, new = parting.texts
    loss = Loss(found.request.row, earlier.row, cause.name, path, at, float(found.lost))
    if parting.pair is not None:
        loss.before = new[max(at - WORDS, 0) : at]
        loss.old, loss.new = old[at : at + WORDS], new[at : at + WORDS]
    elif found.place < 0:
        loss.old, loss.new = (
            f"{earlier.model} {earlier.salt}".strip(),
            f"{found.request.model} {found.request.salt}".strip(),
        )
    return loss


def _within(parting: Parting) -> str:
    """Return the path within a tool to its first value that differs: `.function.description`; empty without one."""
    try:
        old, new = (json.loads(each) for each in parting.texts)
    except ValueError:
        return ""
    path = ""
    while True:
        step = _step(old, new)
        if step is None:
            return path
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
        old, new = old[step], new[step]


def _step(old: Any, new: Any) -> str | int | None:
    if isinstance(old, dict) and isinstance(new, dict):
        one, other = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        if list(one) != list(other):
            return None
        return next((key for key in one if json.dumps(one[key]) != json.dumps(other[key])), None)
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(cast("list[Any]", old), cast("list[Any]", new), strict=False)
        return next(
            (
                place
                for place, pair in enumerate(pairs)
                if json.dumps(pair[0]) != json.dumps(pair[1])
            ),
            None,
        )
    return None
