"""Findings of `quire lint` in a log: losses, their sums by cause, and both without words of prompts."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire_sim.lint.texts import BYTES_PER_TOKEN

_IN_TOOL = re.compile(
    r"(?:tools|functions)\[\d+\](?:\.(?:function|name|description|parameters|input_schema|type|strict)\b)*"
)
"""A place in a tool by names that all tools have."""

_REFUSED, _HIDDEN = (
    re.compile(r"(?<=: not rendered): .*", re.DOTALL),
    ", the reason has words of it",
)

_WORD_FIELDS = ("before", "old", "new")


class LaterLoss(msgspec.Struct):
    """A difference behind the first: `tokens` is what it costs once those before it are mended.

    `path`, `at`   the section that differs, and the character in it
    `before`       the text before that place; `old`, `new`: both sides from it on
    """

    cause: str
    path: str
    at: int
    tokens: float
    before: str = ""
    old: str = ""
    new: str = ""


class Loss(LaterLoss, kw_only=True):
    """A request that loses tokens: where it parts from the nearest earlier one, and why.

    `earlier_row`  the row of that one
    `tokens`       tokens behind the place that stand in both, about
    `behind`       further differences, in order
    """

    row: int
    earlier_row: int
    behind: list[LaterLoss] = []


class CauseShare(msgspec.Struct):
    """All losses of one cause: requests, tokens, their share of all prompt tokens, and the largest as an example.

    `later_requests`, `later_tokens`: where it is a further difference, and what it costs once those before it are
    mended; these tokens are among the `tokens` of the causes before.
    """

    cause: str
    requests: int = 0
    tokens: float = 0.0
    later_requests: int = 0
    later_tokens: float = 0.0
    share: float = 0.0
    paths: dict[str, int] = {}
    example: Loss | None = None


class LintReport(msgspec.Struct):
    """Tokens of a log's prompts by what a prefix cache would do, and causes of losses.

    `server`: whose cache it is; empty: one without limits.
    `prompt_tokens` = `hit_tokens` + `lost_tokens` + `rounding_tokens` + new ones. `rounding_tokens` are those that no
    server of this kind finds: the rest of a block or step, the last token, and others too few to be a loss. `is_estimated`: tokens are characters by a factor;
    otherwise they are a tokenizer's, exactly.
    `told_prompt_tokens`, `told_cached_tokens`: the sums of usage that the log tells, or None
    """

    source: str
    format: str
    server: str = ""
    requests: int = 0
    without_prompt: int = 0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    lost_tokens: float = 0.0
    rounding_tokens: float = 0.0
    is_estimated: bool = True
    chars_per_token: float = BYTES_PER_TOKEN
    told_prompt_tokens: int | None = None
    told_cached_tokens: int | None = None
    causes: list[CauseShare] = []
    unread: list[str] = []
    losses: list[Loss] = []


def count_loss(by_cause: dict[str, CauseShare], loss: Loss) -> None:
    """Add a loss to the shares of its cause and of those behind it."""
    share = by_cause.setdefault(loss.cause, CauseShare(loss.cause))
    share.requests += 1
    share.tokens += loss.tokens
    share.paths[loss.path] = share.paths.get(loss.path, 0) + 1
    if share.example is None or loss.tokens > share.example.tokens:
        share.example = loss
    for name in dict.fromkeys(each.cause for each in loss.behind):
        then = by_cause.setdefault(name, CauseShare(name))
        then.later_requests += 1
        then.later_tokens += next(e.tokens for e in loss.behind if e.cause == name)


def shares_of(by_cause: dict[str, CauseShare], prompt_tokens: float) -> list[CauseShare]:
    """Return the shares of causes, the largest first, each with its part of all prompt tokens."""
    for share in by_cause.values():
        share.share = share.tokens / max(prompt_tokens, 1)
    return sorted(by_cause.values(), key=lambda each: (-each.tokens, -each.later_tokens))


def without_words(loss: Loss) -> dict[str, Any]:
    """Return a loss as plain data without words of prompts."""
    told = msgspec.to_builtins(loss)
    for each in (told, *told["behind"]):
        each.update(dict.fromkeys(_WORD_FIELDS, ""), path=_without_names(each["path"]))
    return told


def hide_words(report: LintReport) -> None:
    """Take words of prompts, names in schemas of tools, and values of refused bodies out of a report."""
    for share in report.causes:
        paths, share.paths = share.paths, {}
        for path, requests in paths.items():
            place = _without_names(path)
            share.paths[place] = share.paths.get(place, 0) + requests
        if share.example is not None:
            share.example = msgspec.convert(without_words(share.example), Loss)
    report.losses = [msgspec.convert(without_words(each), Loss) for each in report.losses]
    report.unread = [_REFUSED.sub(_HIDDEN, each) for each in report.unread]


def _without_names(path: str) -> str:
    """Return a place up to where names of a tool's own begin."""
    found = _IN_TOOL.match(path)
    return found[0] if found else path


def scale(report: LintReport) -> None:
    """Turn characters into tokens."""
    factor = 1 / report.chars_per_token if report.is_estimated else 1
    for share in report.causes:
        share.tokens *= factor
        share.later_tokens *= factor
    examples = [share.example for share in report.causes if share.example is not None]
    for loss in {id(each): each for each in (*report.losses, *examples)}.values():
        loss.tokens *= factor
        for each in loss.behind:
            each.tokens *= factor
    report.prompt_tokens *= factor
    report.hit_tokens *= factor
    report.lost_tokens *= factor
