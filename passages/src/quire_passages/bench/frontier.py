"""Policies on prompts of public text for a model with weights of its own: agreement against time.

Prompts draw from one pool of passages, in changing orders. The first of them (`HISTORY`) are traffic that was answered
exactly: contextual captures are copied from it. They are no part of the figures, and the store does not change behind
them, so prompts are independent of each other: the bounds are those of prompts drawn anew (bootstrap).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import transformers

from quire.bench.timing import Row, check_names
from quire.core import Scope
from quire.engines.models.identity import sampled_values
from quire.engines.segments import Segments
from quire.errors import ConfigError
from quire_passages import (
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    PassageStore,
    QuestionRows,
    Selector,
    Variant,
)
from quire_passages.bench.methods import FULL, Captured, Method
from quire_passages.bench.oracle import Oracle, ScoredRows, true_errors
from quire_passages.bounds import bootstrap
from quire_passages.hf import PassageModel
from quire_passages.hf.beside import FullAnswer
from quire_passages.hf.weighing import largest_early
from quire_passages.verdict import PolicyOutcome

HISTORY = 20
"""Prompts before those that count."""

PREFIX = "prefix"
"""The name of the row with the whole prompt but its question cached: the least time that any reuse can take."""

Measured = Method | Oracle
"""A policy, or an oracle: what one line of the table measures."""

Outcomes = dict[str, PolicyOutcome]
Told = Callable[[int, list[Row]], object]
"""Is shown how many prompts were measured, and the rows so far."""

_FORM = "quire passages 1"
_SCOPE = Scope(model="measured")

_RELATED = 3
"""Passages that those of `related` rows are computed behind."""

_CAPTURED: Mapping[Captured, str] = {"alone": "", "earlier": "earlier_"}
"""The beginnings of row names, by where captures are from."""


def policies(num_layers: int) -> dict[str, Measured]:
    """Return what is measured on a model of so many layers, by the names of rows."""
    found: dict[str, Measured] = {}
    for captured, start in _CAPTURED.items():
        checks = sorted({max(num_layers * part // 4, 1) for part in (0, 1, 2, 3)})
        selectors = {
            start.rstrip("_") or "moved": NoRows(),
            f"{start}epic_16": Epic(16),
            **{f"{start}kv_deviation_15%_at_{at}": KVDeviation(0.15, at) for at in checks},
            **{f"{start}question_{share:.0%}": QuestionRows(share) for share in (0.15, 0.33)},
        }
        found |= {name: Method(each, captured) for name, each in selectors.items()}
    found["related"] = Method(NoRows(), "related")
    found["related_question_33%"] = Method(QuestionRows(0.33), "related")
    found["earlier_cache_craft_0.5"] = Method(CacheCraft(0.5), "earlier")
    for captured, start in _CAPTURED.items():
        for is_exact, kind in ((False, "oracle"), (True, "exact")):
            for share in (0.15, 0.33):
                found[f"{kind}_{start}error_{share:.0%}"] = Oracle(share, is_exact, captured)
    return found


def is_policy(name: str) -> bool:
    """Whether a row is of a policy that could serve: no oracle, and no end of the scale."""
    return name not in (FULL, PREFIX) and not name.startswith(("oracle_", "exact_"))


class PolicyBench:
    """Policies on prompts of one model, each prompt beside its full forward.

    prompts  without end, always the same ones
    names    rows that are measured; None: all. Raises `ValueError` for one that does not exist
    history  prompts, the first ones, that become traffic
    """

    def __init__(
        self,
        model: Any,
        prompts: Iterator[Segments],
        names: Sequence[str] | None = None,
        *,
        history: int = HISTORY,
    ) -> None:
        self._history = history
        self._model = PassageModel(model)
        every = policies(self._model.relocation.num_layers)
        check_names(names or (), (FULL, PREFIX, *every))
        self.policies = {name: each for name, each in every.items() if not names or name in names}
        self._prompts = prompts
        self._store = PassageStore("1TiB")  # of a pool, four variants each
        self._alone: dict[bytes, Variant] = {}
        self._related: dict[bytes, Variant] = {}

    @property
    def num_history(self) -> int:
        """Prompts that have to be computed before the first one that counts."""
        is_asked = any(each.captured != "alone" for each in self.policies.values())
        return self._history if is_asked else 0

    def pass_history(self) -> Iterator[int]:
        """Compute the traffic before the prompts that count; yield its number behind each."""
        weighs = "earlier_cache_craft_0.5" in self.policies
        for number, segments in enumerate(islice(self._prompts, self._history)):
            if self.num_history:
                count = largest_early if weighs else None
                for each in self._model.capture_all(segments, count=count):
                    self._store.put(_SCOPE, each)
                yield number + 1
            if any(each.captured == "related" for each in self.policies.values()):
                self._held_alone(segments)
        if self._alone:
            alone = [*self._alone.values()]
            self._related = {each.ids: each for each in self._model.runs.among(alone, _RELATED)}

    def outcomes(self, known: int = 0) -> Iterator[Outcomes]:
        """Yield the outcomes of each prompt behind the first `known` ones, with those of `full` and `prefix`."""
        for segments in islice(self._prompts, known, None):
            full = self._model.answer(segments)
            num_tokens = segments.num_tokens
            last_s = full.seconds_behind(num_tokens - 1)
            of_prefix = full.seconds_behind(num_tokens - segments.question.size)
            found = {
                FULL: _exactly(full, 1.0, full.seconds + last_s),
                PREFIX: _exactly(full, segments.question.size / num_tokens, of_prefix),
            }
            alone = self._held_alone(segments)
            for name, each in self.policies.items():
                outcome = self._by_policy(full, each, alone)
                found[name] = replace(outcome, seconds=outcome.seconds + last_s)
            yield found

    def _by_policy(
        self, full: FullAnswer, policy: Measured, alone: Sequence[Variant]
    ) -> PolicyOutcome:
        selector = policy.selector if isinstance(policy, Method) else NoRows()
        held: Sequence[Variant | None] = alone
        if policy.captured == "related":
            held = [None, *(self._related.get(each.ids, each) for each in alone[1:])]
        elif policy.captured != "alone":
            held = self._held_earlier(full.segments, selector, alone)
        if isinstance(policy, Method):
            return full.beside(selector, held)
        errors = true_errors(self._model, full, held)
        return _by_oracle(full, policy, ScoredRows(errors, policy.share), held)

    def _held_alone(self, segments: Segments) -> list[Variant]:
        """Return an isolated capture of each passage of a prompt."""
        texts = dict(zip(segments.passage_texts, segments.passages, strict=True))
        new = [ids for text, ids in texts.items() if text not in self._alone]
        for each in self._model.capture_alone(new, segments.head) if new else ():
            self._alone[each.ids] = each
        return [self._alone[text] for text in segments.passage_texts]

    def _held_earlier(
        self, segments: Segments, selector: Selector, alone: Sequence[Variant]
    ) -> list[Variant | None]:
        """Return what traffic has left of each passage, isolated captures of those that it lacks.

        The first passage is exact, as in a cache: placed if it stood first before, computed else.
        """
        find, texts = self._store.finder(_SCOPE, segments.head.tobytes()), segments.passage_texts
        held: list[Variant | None] = []
        for at, (text, own) in enumerate(zip(texts, alone, strict=True)):
            there = find(text)
            if not at:
                held.append(next((each for each in there if each.kind == "isolated"), None))
            else:
                held.append(selector.preferred(there, texts[:at]) if there else own)
        return held


def summary(found: Sequence[Outcomes], *, seed: int = 0) -> list[Row]:
    """Return a row for each policy of the outcomes of prompts, with bounds of 95 % by bootstrap over prompts.

    agree_rate      next tokens of the answer that are those of the full forward, with `agree_low` and `agree_high`
    kl              nats per token from the full forward, with `kl_low` and `kl_high`
    work_rate       computing up to the prompt's last token, over that of a full forward
    cpu_s           mean CPU seconds to the first token, without captures; `ratio_to_full` is beside the full forward
    """
    if not found:
        return []
    full = float(np.sum([each[FULL].seconds for each in found]))
    rows: list[Row] = []
    for name in found[0]:
        own = [each[name] for each in found]
        tokens = np.array([each.tokens for each in own], np.float64)
        agree = bootstrap(tokens, np.array([each.agreed for each in own], np.float64), seed=seed)
        kl = bootstrap(tokens, np.array([each.kl for each in own], np.float64), seed=seed)
        seconds = float(np.sum([each.seconds for each in own]))
        rows.append(
            {
                "name": name,
                "prompts": len(own),
                "tokens": int(tokens.sum()),
                **dict(zip(("agree_rate", "agree_low", "agree_high"), agree, strict=True)),
                **dict(zip(("kl", "kl_low", "kl_high"), kl, strict=True)),
                "work_rate": float(np.mean([each.work for each in own])),
                "cpu_s": seconds / len(own),
                "ratio_to_full": seconds / full,
            }
        )
    return rows


def best_within(rows: Sequence[Row], ratio: float = 0.5) -> Row | None:
    """Return the policy that agrees most within a share of the full forward's time; None: none is so fast."""
    fast = [
        row for row in rows if is_policy(str(row["name"])) and float(row["ratio_to_full"]) <= ratio
    ]
    return max(fast, key=lambda row: float(row["agree_rate"]), default=None)


class OutcomeFile:
    """A file of outcomes, from which a measurement goes on: a line of facts, then a line for each prompt.

    Raises `ConfigError` for a file of another measurement, and for what is none.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, object]) -> None:
        self._path = path
        self.outcomes: list[Outcomes] = []
        line = json.dumps({"form": _FORM, **facts})
        if path is None:
            return
        if not path.exists() or not path.stat().st_size:
            path.write_text(line + "\n", "utf-8")
            return
        with path.open("rb+") as held:  # a line without its end was cut off
            held.truncate(held.read().rfind(b"\n") + 1)
        first, *rest = path.read_text("utf-8").splitlines() or [""]
        if first != line:
            raise ConfigError(
                f"{str(path)!r} has another measurement: {_difference(first, facts)}; name another file, or measure the "
                "same again"
            )
        for number, each in enumerate(rest, 2):
            try:
                self.outcomes.append(msgspec.json.decode(each, type=Outcomes))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{str(path)!r}, line {number}: {error}; remove that line"
                ) from None

    def add(self, outcomes: Outcomes) -> None:
        """Take the outcomes of the next prompt, and append them."""
        self.outcomes.append(outcomes)
        if self._path is not None:
            with self._path.open("ab") as out:
                out.write(msgspec.json.encode(outcomes) + b"\n")


def facts_of(model: Any, texts: Sequence[str] | None, **settings: object) -> dict[str, object]:
    """Return what outcomes depend on: weights and config by a digest, texts, versions, and settings.

    texts  None: what this Python carries
    """
    digest = sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(sampled_values(tensor))
    said = f"Python {platform.python_version()}"
    if texts is not None:
        said = sha256("\0".join(texts).encode()).hexdigest()[:16]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"model": digest.hexdigest()[:16], "texts": said, **versions, **settings}


def _by_oracle(
    full: FullAnswer, oracle: Oracle, picks: ScoredRows, held: Sequence[Variant | None]
) -> PolicyOutcome:
    if not oracle.is_exact:
        return full.beside(picks, held)
    moved = (
        span
        for span, each in zip(full.segments.spans, held, strict=True)
        if each is not None and each.start != span[0]
    )
    return full.beside(picks, held, picks.among([*moved]))


def _exactly(full: FullAnswer, work: float, seconds: float) -> PolicyOutcome:
    """Return the outcome of a computation without approximate parts."""
    return PolicyOutcome(len(full.answer), len(full.answer), 0.0, work, seconds)


def _difference(line: str, facts: Mapping[str, object]) -> str:
    try:
        read: object = json.loads(line)
    except ValueError:
        return "its first line is no line of facts"
    known = cast("dict[str, object]", read if isinstance(read, dict) else {})
    if known.get("form") != _FORM:
        return f"its first line does not say {_FORM!r}"
    here = cast("dict[str, object]", json.loads(json.dumps({"form": _FORM, **facts})))
    return ", ".join(
        f"{name} is {known.get(name)!r} there, {here.get(name)!r} here"
        for name in {**here, **known}
        if known.get(name) != here.get(name)
    )
