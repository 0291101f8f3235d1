"""`quire replay --report`: the rows again as a page, with a closer look at one capacity."""

from typing import Any

from quire.cli.replay_inputs import Asked
from quire.cli.replay_run import Replays
from quire.sim.report import Focus, Report, focus_capacity, focus_measures, html, over_time_measure
from quire.sim.sweep import pairs_of


def report_of(replays: Replays, document: dict[str, Any], asked: Asked) -> str:
    """Return a report of the rows as a page. Raises `ConfigError`."""
    rows = document["rows"]
    capacity = focus_capacity([row["capacity_blocks"] for row in rows], replays.curves.num_unique)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    policy = next((name for name in policies if name != "optimum"), policies[0])
    timed = replays.results(pairs_of([capacity], policies), [over_time_measure()])
    (closer,) = replays.results(
        pairs_of([capacity], [policy]), focus_measures(replays.trace.block_size)
    )
    focus = Focus(
        capacity_blocks=capacity,
        policy=policy,
        over_time={each.policy: each.measured["over_time"] for each in timed},
        prefixes=closer.measured["prefixes"],
        hit_tokens=closer.hit_tokens,
        reuse_times=closer.measured["reuse_times"],
        new_blocks=closer.measured["new_blocks"],
    )
    facts = {key: value for key, value in document.items() if key != "rows"}
    asked = asked.without_folders()
    page = Report(
        facts=facts,
        rows=rows,
        curves=replays.curves,
        focus=focus,
        command=asked.command(),
        focus_command=asked.command(capacity=capacity),
    )
    return html(page)
