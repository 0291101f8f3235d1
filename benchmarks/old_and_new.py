"""The cost of a change: a benchmark of two checkouts, run in turn, the best round of each row.

    python benchmarks/old_and_new.py OLD NEW [core|hf] [rounds] [bench options ...]

OLD and NEW are checkouts of this repository. Prints each row's value in both, their ratio (above 1 is worse), and the
geometric mean. Two equal checkouts differ by up to 9 % on single rows.

A checkout is measured by the rows that it has itself.
"""

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HIGHER_IS_BETTER = {"requests_per_s", "tokens_per_s"}
UNITS = {"median_us", "requests_per_s", "bytes", "median_ms", "tokens_per_s"}


def main(old: str, new: str, suite: str = "core", rounds: int = 5, *options: str) -> None:
    """Measure and print."""
    best: dict[str, dict[str, float]] = {old: {}, new: {}}
    seen = defaultdict(list)
    command = ["-c", "from quire.cli import main; main()", "bench", suite, "--json", *options]
    for number in range(rounds):
        for checkout in (old, new) if number % 2 == 0 else (new, old):
            for name, value in values(checkout, command).items():
                better = max if name.split(".")[-1] in HIGHER_IS_BETTER else min
                best[checkout][name] = better(value, best[checkout].get(name, value))
                seen[checkout, name].append(value)
    ratios = []
    for name in best[old].keys() & best[new].keys():
        one, two = best[old][name], best[new][name]
        ratio = one / two if name.split(".")[-1] in HIGHER_IS_BETTER else two / one
        ratios.append((ratio, name, one, two))
    for ratio, name, one, two in sorted(ratios, reverse=True):
        print(f"{ratio:6.3f}  {name:<40} {one:12.3f} {two:12.3f}")
    mean = math.exp(sum(math.log(ratio) for ratio, *_ in ratios) / len(ratios))
    print(f"{mean:6.3f}  geometric mean of {len(ratios)} rows, best of {rounds} rounds")


def source(checkout: str) -> Path:
    """Return the folder that a checkout's package lies in."""
    return Path(checkout).resolve() / "src"


def values(checkout: str, command: list[str]) -> dict[str, float]:
    """Run one round on a checkout's package; return the measured values by row and unit."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(source(checkout))},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {
        f"{row['name']}.{unit}": float(row[unit])
        for row in json.loads(done.stdout)
        for unit in UNITS & row.keys()
    }


if __name__ == "__main__":
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 5
    main(*sys.argv[1:3], *(sys.argv[3:4] or ["core"]), rounds, *sys.argv[5:])
