"""The replays of one `quire replay`: what they have in common, and the rows they give."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.output import progress
from quire.sim.curves import curves
from quire.sim.sweep import Measure, Pair, pairs_of, sweep

if TYPE_CHECKING:
    from quire.sim.executors import Executor
    from quire.sim.hardware import Roofline
    from quire.sim.replay import ReplayResult
    from quire.sim.service import Service
    from quire.sim.trace.rows import Trace


class Replays:
    """A trace that is read once for its curves, and then replayed at given capacities."""

    def __init__(
        self,
        trace: "Trace",
        hints: str,
        roofline: "Roofline | None",
        service: "Service | None",
        executor: "Executor",
    ) -> None:
        self.trace = trace
        self.curves = curves(trace)
        self._hints = hints
        self._roofline = roofline
        self._service = service
        self._executor = executor

    def results(
        self, pairs: Sequence[Pair], measures: Sequence[Measure] = ()
    ) -> "list[ReplayResult]":
        """Return a result per pair.

        A cache with room for every block evicts nothing, however much larger it is, so no
        larger one is made.
        """
        enough = max(self.curves.num_unique, 1)
        bounded = [Pair(min(pair.capacity_blocks, enough), pair.policy) for pair in pairs]
        with progress("replaying", len(pairs)) as say:
            say(f"{len(pairs)} replays")
            results = sweep(
                self.trace,
                bounded,
                hints=self._hints,
                measures=measures,
                service=self._service,
                executor=self._executor,
                done=lambda pair: say(f"{pair.policy} in {pair.capacity_blocks:,} blocks"),
            )
        return [
            msgspec.structs.replace(result, capacity_blocks=pair.capacity_blocks)
            for pair, result in zip(pairs, results, strict=True)
        ]

    def document(self, capacities: Sequence[int], policies: Sequence[str]) -> dict[str, Any]:
        """Return the rows of all policies at all capacities, and what they have in common."""
        measures: list[Measure] = []
        if self._roofline is not None:
            from quire.sim.savings import MeasureSavings

            measures.append(MeasureSavings(self._roofline))
        results = self.results(pairs_of(capacities, policies), measures)
        return self._facts() | {"rows": [self._row(result) for result in results]}

    def _row(self, result: "ReplayResult") -> dict[str, Any]:
        both, capacity = self.curves, result.capacity_blocks
        return result.row() | {
            "share": capacity / both.num_unique if both.num_unique else None,
            "optimum_token_hit": both.optimum.at(capacity),
        }

    def _facts(self) -> dict[str, Any]:
        both, line = self.curves, self._roofline
        common: dict[str, Any] = {
            "trace": self.trace.source,
            "block_size": self.trace.block_size,
            "num_requests": both.num_requests,
            "prompt_tokens": both.prompt_tokens,
            "num_unique": both.num_unique,
            "ceiling": both.ceiling,
            "hints": self._hints,
            "concurrent": self._service is not None,
        }
        if line is not None:
            common |= {"model": line.model.name, "gpu": line.accelerator.name}
            common["kv_bytes_per_block"] = line.model.kv.per_token * self.trace.block_size
        return common
