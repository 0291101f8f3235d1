"""The replays of one `quire replay`: their rows, and the page that shows them."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.output import progress
from quire_sim.cli.inputs import Asked
from quire_sim.curves import curves_of
from quire_sim.observers import HitsOverTime, Savings, SharedPrefixes
from quire_sim.reuse import reuses
from quire_sim.sweep import Experiment, Measure, SweepPoint, points_of, sweep

if TYPE_CHECKING:
    from quire_sim.executors import Executor
    from quire_sim.hardware import Roofline
    from quire_sim.replay import ReplayResult

MAX_STRETCHES = 48
"""Stretches of time of a report."""


class Replays:
    """A trace that is read once for its curves, and then replayed at given capacities."""

    def __init__(
        self, experiment: Experiment, roofline: "Roofline | None", executor: "Executor"
    ) -> None:
        self._read = reuses(experiment.trace, experiment.trace.block_size)
        self.curves = curves_of(self._read, executor=executor)
        self._experiment = experiment
        self._roofline = roofline
        self._executor = executor

    def document(self, capacities: Sequence[int], policies: Sequence[str]) -> dict[str, Any]:
        """Return the rows of all policies at all capacities, and the facts of the trace."""
        line = self._roofline
        measures = [] if line is None else [partial(Savings, line)]
        results = self._results(points_of(capacities, policies), measures)
        return self._facts() | {"rows": [self._row(result) for result in results]}

    def page(self, document: dict[str, Any], asked: Asked) -> str:
        """Return the rows as a page, with a closer look at one capacity. Raises `ConfigError`."""
        from quire_sim.report import Report, focus_capacity, html

        rows = document["rows"]
        capacity = focus_capacity([row["capacity_blocks"] for row in rows], self.curves.num_unique)
        policies = list(dict.fromkeys(row["policy"] for row in rows))
        size = document["block_size"]
        measures = [partial(HitsOverTime, MAX_STRETCHES), partial(SharedPrefixes, size)]
        closer = self._results(points_of([capacity], policies), measures)
        asked = asked.without_folders()
        commands = asked.command(), asked.command(capacity=capacity)
        facts = {key: value for key, value in document.items() if key != "rows"}
        return html(Report(facts, rows, self.curves, self._read, closer, *commands))

    def _results(
        self, points: Sequence[SweepPoint], measures: Sequence[Measure]
    ) -> "list[ReplayResult]":
        """Return a result per point.

        A cache with room for every block evicts nothing, however much larger it is, so no
        larger one is made.
        """
        enough = max(self.curves.num_unique, 1)
        bounded = [SweepPoint(min(each.capacity_blocks, enough), each.policy) for each in points]
        with progress("replaying", len(points)) as say:
            say(f"{len(points)} replays")
            results = sweep(
                msgspec.structs.replace(self._experiment, measures=measures),
                bounded,
                executor=self._executor,
                done=lambda point: say(f"{point.policy} in {point.capacity_blocks:,} blocks"),
            )
        return [
            msgspec.structs.replace(result, capacity_blocks=point.capacity_blocks)
            for point, result in zip(points, results, strict=True)
        ]

    def _row(self, result: "ReplayResult") -> dict[str, Any]:
        both, capacity = self.curves, result.capacity_blocks
        return result.row() | {
            "share": capacity / both.num_unique if both.num_unique else None,
            "optimum_token_hit": both.optimum.at(capacity),
            "reachable_token_hit": both.reachable.at(capacity),
            "gap_closed": self._gap_closed(result),
        }

    def _gap_closed(self, result: "ReplayResult") -> float | None:
        """Return what a policy finds of that between LRU and what a pool can reach; None where nothing is between, and of bounds."""
        from quire_sim.optimum import BOUNDS

        both, capacity = self.curves, result.capacity_blocks
        if result.policy in BOUNDS:
            return None
        lru, best = both.lru.at(capacity), both.reachable.at(capacity)
        return (result.token_hit - lru) / (best - lru) if best > lru else None

    def _facts(self) -> dict[str, Any]:
        both, line, trace = self.curves, self._roofline, self._experiment.trace
        common: dict[str, Any] = {
            "trace": trace.source,
            "block_size": trace.block_size,
            "num_requests": both.num_requests,
            "prompt_tokens": both.prompt_tokens,
            "num_unique": both.num_unique,
            "ceiling": both.ceiling,
            "hints": self._experiment.hints,
            "concurrent": self._experiment.service is not None,
        }
        if line is not None:
            common |= {"model": line.model.name, "gpu": line.accelerator.name}
            common["kv_bytes_per_block"] = line.model.kv.per_token * trace.block_size
        return common
