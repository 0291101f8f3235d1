"""Today's core and the core as it was, driven in lockstep: the same calls, and no difference.

    python tests/oracle/lockstep.py --steps 100000 --seed 1
    python tests/oracle/lockstep.py --seed 1 --world 17            # that world alone
    python tests/oracle/lockstep.py --without media,lost,order       # features, policies and calls left out

A step is one call on both sides. After each, what it returned or raised is compared, and what it
touched; every so often all there is.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from pprint import pformat
from random import Random

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from driver import Driver
from recipes import recipe_of
from sides import New, Old, outcome

ALL_EVERY = 20
"""Steps between two comparisons of the whole state."""

TRAIL = 12
"""Calls that are shown of those before a difference."""


class Clock:
    """Seconds that pass when the driver says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Difference(AssertionError):  # noqa: N818 - reads as what it says
    """The two sides did not agree."""


class World(Driver):
    """Two managers of one recipe, and the calls that are made on both."""

    def __init__(self, recipe, calls=None):
        self.clock = Clock()
        self.recipe = recipe
        self.patches = ExitStack()
        for side in (Old, New):
            for patch in side.patches(recipe):
                self.patches.enter_context(patch)
        self.old = Old(recipe, self.clock)
        self.new = New(recipe, self.clock)
        self.has = frozenset(recipe["features"])
        self.trail = []
        self.num_steps = 0
        self.calls = Counter() if calls is None else calls
        super().__init__(recipe, Random(f"{recipe['seed']}/{recipe['number']}/calls"))

    def run(self):
        """Make the recipe's number of steps; raise `Difference`."""
        with self.patches:
            due = ALL_EVERY
            while self.num_steps < self.recipe["steps"]:
                self.act()
                if self.num_steps >= due:
                    self.compare_all()
                    due = self.num_steps + ALL_EVERY * (5 if "long" in self.has else 1)
            self.compare_all()

    def both(self, call, *args, touched=()):
        """Make one call on both sides and compare; return (whether it gave something, what)."""
        self.trail.append((call, args))
        del self.trail[:-TRAIL]
        self.num_steps += 1
        old, new = outcome(self.old, call, args), outcome(self.new, call, args)
        if old != new:
            self.compare(call, self.loosened(call, old), self.loosened(call, new))
        gave = old[0] == "gave"
        self.calls[call if gave else f"{call}: {old[1]}"] += 1
        self.compare_counts()
        for name in touched:
            if name in self.old.seqs:
                self.compare(f"sequence {name}", self.old.view(name), self.new.view(name))
        return gave, old[1]

    def loosened(self, call, outcome):
        """Return an outcome without what this world does not compare."""
        kind, *what = outcome
        if kind == "raised":
            return what if "messages" in self.has else what[:1]
        if "lost" not in self.has and call in ("probe", "explain"):
            return what[0][:3] if call == "probe" else None
        return what

    def compare(self, what, old, new):
        if old != new:
            raise Difference(self.report(what, old, new))

    def compare_counts(self):
        old, new = self.old.counts(), self.new.counts()
        if old != new:
            if "lost" not in self.has:
                for _, _, stats in (old, new):
                    del stats["missed"]
            self.compare("(groups, copies, stats)", old, new)

    def compare_all(self):
        old, new = self.old.state(), self.new.state()
        if "order" not in self.has:
            del old["sparse order"], new["sparse order"]
        self.compare("the whole state", old, new)
        self.new.check()
        self.compare("what the observer heard", self.old.heard(), self.new.heard())
        for call in ("take_events", "take_evicted"):
            args = (call, ())
            self.compare(call, outcome(self.old, *args), outcome(self.new, *args))
        names = [name for name in self.live if self.old.view(name)[0][0] == "open"]
        for group in range(len(self.recipe["groups"])):
            args = ("tables", (names, group, None))
            self.compare("all tables", outcome(self.old, *args), outcome(self.new, *args))

    def report(self, what, old, new):
        trail = [f"  {call}{short(args)}" for call, args in self.trail]
        recipe = self.recipe
        return "\n".join(
            [
                f"{what} differs: seed {recipe['seed']}, world {recipe['number']}, step {self.num_steps}",
                f"recipe: {pformat(recipe, width=110, compact=True)}",
                "the last calls:",
                *trail,
                *differing(what, old, new),
            ]
        )


def short(args, limit=400):
    """Write arguments for a person."""
    shown = tuple(each.tolist() if isinstance(each, np.ndarray) else each for each in args)
    text = repr(shown)
    return text if len(text) <= limit else f"{text[:limit]}..."


def differing(where, old, new):
    """Return lines that say where two values differ."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [
            line
            for at in old
            if old[at] != new[at]
            for line in differing(f"{where}.{at}", old[at], new[at])
        ]
    pairs = isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new)
    if pairs and any(isinstance(each, dict | list | tuple) for each in old):
        return [
            line
            for at, (one, two) in enumerate(zip(old, new, strict=True))
            if one != two
            for line in differing(f"{where}[{at}]", one, two)
        ]
    return [f"{where}:", f"  old {short((old,), 2000)}", f"  new {short((new,), 2000)}"]


def drive(num_steps, seed, without=(), first=0):
    """Drive worlds until so many steps are made; return (steps, worlds, calls)."""
    calls, steps, number = Counter(), 0, first
    while steps < num_steps:
        recipe = recipe_of(seed, number, without)
        recipe["steps"] = min(recipe["steps"], num_steps - steps)
        recipe["without"] = sorted(without)
        world = World(recipe, calls)
        try:
            world.run()
        except Difference:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            raise Difference(f"{world.report('a crash', None, None)}\n{trace}") from error
        steps += world.num_steps
        number += 1
    return steps, number - first, calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--world", type=int, help="this one alone")
    parser.add_argument("--without", default="", help="features, policies, calls; commas between")
    args = parser.parse_args()
    without = tuple(filter(None, args.without.split(",")))
    began = time.perf_counter()
    num_steps, first = (1, args.world) if args.world is not None else (args.steps, 0)
    if args.world is not None:
        num_steps = recipe_of(args.seed, args.world, without)["steps"]
    try:
        steps, worlds, calls = drive(num_steps, args.seed, without, first)
    except Difference as difference:
        sys.exit(str(difference))
    seconds = time.perf_counter() - began
    refused = sum(count for call, count in calls.items() if ":" in call)
    print(f"{steps} steps in {worlds} worlds, seed {args.seed}, no difference; {refused} refusals")
    print(f"{steps / seconds:.0f} steps/s")
    for call, count in sorted(calls.items()):
        print(f"  {count:>7}  {call}")


if __name__ == "__main__":
    main()
