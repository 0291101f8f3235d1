"""`quire simulate --recorded`: a run of a real engine, and the same requests simulated."""

from pathlib import Path
from typing import Any

import msgspec

from quire.cli.output import milliseconds, print_json, stdout
from quire.cli.tables import facts_table, plain_table
from quire.errors import ConfigError
from quire_sim.cli.timing import basis_of, off_by, timing_of, within

NAMES = {
    "ttft_mean": "first token, mean",
    "ttft_p99": "first token, p99",
    "tpot_mean": "further tokens, mean",
    "makespan": "all of it",
}


def compare(path: Path, measured: str | None, *, as_json: bool) -> None:
    """Simulate a recorded run and print both. Raises `TraceError`, `ConfigError`."""
    from quire_sim.serving.recorded import RecordedRun

    run = RecordedRun(path)
    timing = timing_of(run.settings.timing, measured=measured)
    found = run.compare(timing)
    settings = run.settings
    document: dict[str, Any] = {
        "recorded": str(path),
        "model": settings.model.name,
        "device": settings.device.name,
        "tensor_parallel": settings.tensor_parallel,
        "data_parallel": settings.data_parallel,
        "requests": len(run.requests),
        "times_by": timing.basis,
        "times_off_by": off_by(timing),
        **msgspec.to_builtins(found),
    }
    if as_json:
        print_json(document)
        return
    console = stdout()
    devices = settings.tensor_parallel * settings.data_parallel
    expected = off_by(timing)
    console.print(
        f"\n[bold]{settings.model.name}[/bold] on {devices} x {settings.device.name}, "
        f"{len(run.requests):,} requests; times by {timing.basis}; {basis_of(expected)}\n"
    )
    table = plain_table("seconds", "simulated", "measured", "off by", "left out")
    for name, said in NAMES.items():
        simulated, real = getattr(found.simulated, name), getattr(found.measured, name)
        error = f"{getattr(found.errors, name):+.1%}"
        known = expected and expected.get(name, expected.get("step"))
        table.add_row(said, duration(simulated), duration(real), error, within(known))
    console.print(table)
    engine = found.blocks.engine
    said = "the engine does not say" if engine is None else f"the engine had {engine:,}"
    console.print(facts_table([("blocks", f"{found.blocks.simulated:,} simulated; {said}")]))
    console.print()


def check_alone(context: Any, option: str, beside: set[str]) -> None:
    """Raise `ConfigError` where more options were given than `option` and those that go beside it."""
    given = [
        each.opts[0]
        for each in context.command.params
        if each.name not in {option, *beside}
        and context.get_parameter_source(each.name).name == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(
            f"--{option} takes all settings from its file; leave out {', '.join(given)}"
        )


def duration(seconds: float) -> str:
    """Return a duration in ms, or from one second on in s."""
    return f"{milliseconds(seconds)} ms" if seconds < 1 else f"{seconds:,.4g} s"
