"""`quire simulate --recorded`: a run of a real engine, and the same requests simulated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.cli.output import milliseconds, print_json, stderr, stdout
from quire.cli.tables import facts_table, plain_table
from quire.errors import ConfigError
from quire_sim.cli.timing import basis_of, off_by, timing_of, within

NAMES = {
    "ttft_mean": "first token, mean",
    "ttft_p99": "first token, p99",
    "tpot_mean": "further tokens, mean",
    "makespan": "all of it",
}


SETTINGS = {
    "model": "model",
    "gpu": "device",
    "num_gpus": "tensor_parallel_size",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "utilization": "gpu_memory_utilization",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
}
"""Options that say of a benchmark's engine what its result does not, and the settings that they are."""


def compare(path: Path, measured: str | None, context: Any, *, as_json: bool) -> None:
    """Simulate a recorded run and print both. Raises `TraceError`, `ConfigError`."""
    from quire_sim.serving.recorded import RecordedRun

    given = given_options(context)
    said = {SETTINGS[name]: context.params[name] for name in given if name in SETTINGS}
    run = RecordedRun(path, said)
    check_alone(given, "recorded", {"measured", "as_json", *(SETTINGS if run.benched else ())})
    for note in run.notes:
        stderr().print(f"{path.name}: {note}", markup=False, highlight=False)
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
        "times_from": "clients" if run.by_clients else "engine",
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
        known = None if expected is None else expected.get(name, expected.get("step"))
        table.add_row(said, duration(simulated), duration(real), error, within(known))
    console.print(table)
    engine = found.blocks.engine
    said = "the engine does not say" if engine is None else f"the engine had {engine:,}"
    console.print(facts_table([("blocks", f"{found.blocks.simulated:,} simulated; {said}")]))
    console.print()


def given_options(context: Any) -> dict[str, str]:
    """Return the options on the command line: their parameters, and how they are written."""
    return {
        each.name: each.opts[0]
        for each in context.command.params
        if context.get_parameter_source(each.name).name == "COMMANDLINE"
    }


def check_alone(given: Mapping[str, str], option: str, beside: set[str]) -> None:
    """Raise `ConfigError` where more options were given than `option` and those that go beside it."""
    others = [written for name, written in given.items() if name not in {option, *beside}]
    if others:
        raise ConfigError(
            f"--{option} takes all settings from its file; leave out {', '.join(others)}"
        )


def duration(seconds: float) -> str:
    """Return a duration in ms, or from one second on in s."""
    return f"{milliseconds(seconds)} ms" if seconds < 1 else f"{seconds:,.4g} s"
