"""Requests as their server sees them: times, tokens and ends by tenant class, and the latest ones phase by phase."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from math import floor, log2
from typing import Any

import msgspec

from quire.core.stats import MISS_REASONS, Missed
from quire.errors import QuireError

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""The buckets of histograms."""

MAX_CLASSES = 32
"""Tenants with a class of their own; the rest share `OTHER`, so that metrics have a bounded number of series."""

OTHER = "other"

MAX_RECENT = 40
"""Requests that are kept after their end, and running ones that are shown."""

NUM_INTERVALS = 30
"""Samples that percentiles and rates are of."""

FINE = 8
"""Bins of a percentile per doubling of a time: it is off by 5 % at most."""


class Times:
    """A histogram of times in seconds: counts per bucket of `SECONDS`, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def add(self, time_s: float) -> None:
        self.counts[bisect_left(SECONDS, time_s)] += 1
        self.sum_s += time_s

    @classmethod
    def total(cls, parts: Iterable[Times]) -> Times:
        """Return the histogram of all times that are in several."""
        made = cls()
        for each in parts:
            made.counts = [*map(int.__add__, made.counts, each.counts)]
            made.sum_s += each.sum_s
        return made


class ClassFigures:
    """Counters and histograms of one class of tenants; none of them ever falls.

    `first`, `between`  times to the first token, and between tokens
    `queue`, `whole`    times to a request's turn, and to its end
    `ended`             sequences by finish reason
    """

    def __init__(self) -> None:
        self.first, self.between, self.queue, self.whole = (Times() for _ in range(4))
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.preemptions = 0
        self.ended: Counter[str] = Counter()


class Followed(msgspec.Struct):
    """A request under way or ended; times on the log's clock, `metrics` on the engine's."""

    tenant: str
    prompt_tokens: int
    begun_s: float
    first_s: float = 0.0
    latest_s: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    metrics: Any = None
    reason: str | None = None
    ended_at: float | None = None

    def bar(self, now_s: float) -> dict[str, Any]:
        """Return it as plain data, in phases of seconds; `pending_s` before the first token is known."""
        times, bar = (
            self.metrics,
            {
                "tenant": self.tenant,
                "ended_at": self.ended_at,
                "reason": self.reason,
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.num_tokens,
            },
        )
        if times is None or times.scheduled_ts is None:
            end_s = self.latest_s if self.reason else now_s
            return bar | {"pending_s": max(end_s - self.begun_s, 0.0)}
        to_first = times.first_token_ts - times.scheduled_ts
        return bar | {
            "queued_s": times.scheduled_ts - times.arrival_time,
            "loaded_s": min(times.load_s, to_first),
            "computed_s": max(to_first - times.load_s, 0.0),
            "decoded_s": self.latest_s - self.first_s,
            "cached_tokens": self.num_cached,
            "loaded_tokens": dict(times.loaded_tokens),
            "missed": misses(self.prompt_tokens, self.num_cached, times.missed),
            "preemptions": times.num_preemptions,
        }


def misses(num_tokens: int, num_cached: int, missed: Missed | None) -> dict[str, int]:
    """Return the tokens of a prompt that were not cached, by reason, as far as there are any."""
    left = num_tokens - num_cached
    counts = dict.fromkeys(MISS_REASONS, 0)
    counts["last_token"] = min(left, 1)
    if missed is not None and missed.reason in counts:
        counts[missed.reason] += min(missed.num_tokens, left - counts["last_token"])
    counts["cold"] += left - sum(counts.values())
    return {reason: tokens for reason, tokens in counts.items() if tokens}


class RequestLog:
    """Follows the requests of an engine, and counts them by tenant class.

        with log.following(tenant, [len(prompt)]) as told:
            async for output in engine.generate(prompt):
                told(0, output)

    tenants      names, the most important first: `max_classes` of them have a class of their own, for as long as the log
                 lives, so no counter ever falls; requests without a tenant are in the class ""
    clock        seconds, rising

    One thread tells and reads it: plain numbers take a tenth of the time of prometheus_client's metrics.
    """

    def __init__(
        self,
        tenants: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        max_classes: int = MAX_CLASSES,
    ) -> None:
        self._clock = clock
        self.num_ignored_fields = 0  # whose names are unknown
        self.num_by_mend = Counter[str]()
        self.num_by_adapter = Counter[str]()  # prompts; "" is the model alone
        self.classes = {name: ClassFigures() for name in islice(tenants, max_classes)}
        if not self.classes:
            self.classes[""] = ClassFigures()
        self._live: dict[int, Followed] = {}
        self._recent: deque[Followed] = deque(maxlen=MAX_RECENT)
        self._numbers = count()
        self._num_ended = 0
        self._fresh = _Spreads()
        self._intervals: deque[tuple[float, int, _Spreads]] = deque(maxlen=NUM_INTERVALS)
        self._sampled_s = clock()

    def class_of(self, tenant: object) -> str:
        """Return the class of a tenant: its name, "" for none, or `OTHER`."""
        name = "" if tenant is None else str(tenant)
        if name not in self.classes:
            name = OTHER
            self.classes.setdefault(name, ClassFigures())
        return name

    def by_class(self, counts: Mapping[Any, int]) -> dict[str, int]:
        """Return counts of tenants by class, each class among them."""
        found = Counter(dict.fromkeys(self.classes, 0))
        for tenant, num in counts.items():
            found[self.class_of(tenant)] += num
        return found

    @contextmanager
    def following(
        self, tenant: object, prompt_lens: Sequence[int], num_answers: int = 1
    ) -> Generator[Callable[[int, Any], None]]:
        """Follow requests that begin now; each `RequestOutput` is told with the index of its prompt.

        Sequences that have not ended when the block is left count as `abort`, or as `error` where it raised quire's own.
        """
        name, begun_s = self.class_of(tenant), self._clock()
        figures, numbers = self.classes[name], [next(self._numbers) for _ in prompt_lens]
        requests = [Followed(name, num_tokens, begun_s) for num_tokens in prompt_lens]
        self._live.update(zip(numbers, requests, strict=True))

        def told(at: int, output: Any) -> None:
            self._tell(figures, requests[at], output)
            if output.finished:
                reasons = [each.finish_reason or "none" for each in output.outputs]
                self._end(figures, numbers[at], reasons)

        left = "abort"
        try:
            yield told
        except QuireError:
            left = "error"
            raise
        finally:
            for number in numbers:
                if number in self._live:
                    self._end(figures, number, [left] * num_answers)

    def sample(self) -> dict[str, Any]:
        """Begin the next interval; return the rates and percentiles of the one that ends.

        A percentile is None where nothing was measured.
        """
        now_s = self._clock()
        fresh, self._fresh = self._fresh, _Spreads()
        ended, self._num_ended = self._num_ended, 0
        self._intervals.append((now_s - self._sampled_s, ended, fresh))
        self._sampled_s = now_s
        return {"ended": ended, **fresh.percentiles()}

    def state(self) -> dict[str, Any]:
        """Return rates and percentiles of the latest intervals, counts by tenant class, and requests as bars."""
        whole, now_s = _Spreads(), self._clock()
        for _, _, each in self._intervals:
            whole.update(each)
        window_s = sum(each[0] for each in self._intervals)
        rate = sum(each[1] for each in self._intervals) / window_s if window_s else 0.0
        live = list(islice(self._live.values(), MAX_RECENT))
        return {
            "latency": {"window_s": window_s, "requests_per_s": rate, **whole.percentiles()},
            "tenants": [
                {
                    "tenant": name,
                    "prompt_tokens": each.prompt_tokens,
                    "cached_tokens": each.cached_tokens,
                    "generated_tokens": each.generated_tokens,
                    "preemptions": each.preemptions,
                    "ended": each.ended.total(),
                }
                for name, each in self.classes.items()
            ],
            "recent": [each.bar(now_s) for each in chain(live, reversed(self._recent))],
        }

    def _tell(self, figures: ClassFigures, request: Followed, output: Any) -> None:
        request.metrics = output.metrics
        num_tokens = sum([each.num_tokens for each in output.outputs])
        if num_tokens <= request.num_tokens:
            return
        now_s = self._clock()
        if request.num_tokens:
            spent_s = now_s - request.latest_s
            figures.between.add(spent_s)
            self._fresh.add("itl", spent_s)
        else:
            request.first_s, spent_s = now_s, now_s - request.begun_s
            figures.first.add(spent_s)
            self._fresh.add("ttft", spent_s)
            if (scheduled := output.metrics.scheduled_ts) is not None:
                queued_s = scheduled - output.metrics.arrival_time
                figures.queue.add(queued_s)
                self._fresh.add("queue", queued_s)
            figures.prompt_tokens += request.prompt_tokens
            figures.cached_tokens += output.num_cached_tokens
            request.num_cached = output.num_cached_tokens
        figures.generated_tokens += num_tokens - request.num_tokens
        request.latest_s, request.num_tokens = now_s, num_tokens

    def _end(self, figures: ClassFigures, number: int, reasons: Sequence[str]) -> None:
        request, now_s = self._live.pop(number), self._clock()
        figures.whole.add(now_s - request.begun_s)
        figures.ended.update(reasons)
        if request.metrics is not None:
            figures.preemptions += request.metrics.num_preemptions
        request.reason, request.ended_at = reasons[0] if reasons else "none", time.time()
        request.latest_s = request.latest_s or now_s
        self._num_ended += 1
        self._recent.append(request)


class _Spreads:
    """Counts of times by name and fine bin, for percentiles."""

    def __init__(self) -> None:
        self._bins: dict[str, Counter[int]] = {name: Counter() for name in ("ttft", "itl", "queue")}

    def add(self, name: str, time_s: float) -> None:
        self._bins[name][floor(FINE * log2(max(time_s, 1e-6)))] += 1

    def update(self, other: _Spreads) -> None:
        for name, bins in other._bins.items():
            self._bins[name].update(bins)

    def percentiles(self) -> dict[str, dict[str, float] | None]:
        """Return p50 and p99 of each in seconds; None for what has no times."""
        return {f"{name}_s": _percentiles(bins) for name, bins in self._bins.items()}


def _percentiles(bins: Counter[int]) -> dict[str, float] | None:
    if not bins:
        return None
    found, total, seen = dict[str, float](), bins.total(), 0
    for at in sorted(bins):
        seen += bins[at]
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            if name not in found and seen >= share * total:
                found[name] = 2 ** ((at + 0.5) / FINE)
    return found
