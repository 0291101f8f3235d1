"""The rows of `quire bench core` of one checkout, on the core of another: what `old_and_new.py --rows-of-new` runs.

    PYTHONPATH=OLD/src python benchmarks/rows_on_core.py NEW/src [--rows name,name]

Prints the rows as JSON. A row that the core cannot run is left out, with the reason on standard error.
"""

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import quire.bench
import quire.core
from quire.core import CacheManager

SWITCHES = ("events", "curve")
"""What a core of before watchers was told by arguments."""

WATCHERS = ("quire.exchange", "quire.foresight")
"""Where later cores have what is passed instead."""


def main(rows_source: str, *options: str) -> None:
    """Measure and print."""
    quire.bench.__path__[:] = [str(Path(rows_source) / "quire" / "bench")]
    is_old = set(SWITCHES) <= inspect.signature(CacheManager).parameters.keys()
    if is_old:
        for name in WATCHERS:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__getattr__ = lambda _: (
                None
            )  # whatever is imported from there is not used
    if importlib.util.find_spec("quire.groups") is None:
        sys.modules["quire.groups"] = quire.core  # which had the kinds of groups then
    if importlib.util.find_spec("quire.ops") is None:
        sys.modules["quire.ops"] = ModuleType("quire.ops")
        sys.modules["quire.ops"].__getattr__ = method
    from quire.bench import core_rows, serving

    if is_old:
        serving.build = with_switches

    wanted = options[1].split(",") if options[:1] == ("--rows",) else list(core_rows.ROWS)
    measured = []
    for name in wanted:
        try:
            measured += core_rows.rows([name])
        except (AttributeError, ImportError, TypeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(measured))


def method(name):
    """Spell an operation as the method of the manager that it was."""
    return lambda manager, *args, **named: getattr(manager, name)(*args, **named)


def with_switches(num_tokens, features):
    """Make a manager as a core of before watchers spells it."""
    switches = {name: getattr(features, name) for name in SWITCHES}
    manager = CacheManager(num_tokens // 16, 16, **switches)
    return manager, manager.take_events


if __name__ == "__main__":
    main(*sys.argv[1:])
