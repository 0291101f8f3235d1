"""The core beside the caches of SGLang and vLLM: the same workloads, CPU time, medians of rounds in turn.

    python benchmarks/peers/environment.py sglang vllm      # once: .venv-peers, 2.4 GB
    python benchmarks/peers/run.py [--peers sglang-rust,vllm-16] [--rows match_8k,serve_a] [--rounds 3] [--best] [--json]

Every adapter is a script that runs in the peers' environment and prints a JSON array of rows. A row is a dict with `name`
and numbers: `median_us`, `requests_per_s`, `hit_rate`, `bytes`. A peer that could not be measured has one row with the
`reason`. Peers measure the rows that quire has. With `--best` a figure is the best of its rounds, on all sides, else their
median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import environment

from quire.bench import core_rows

OURS = "quire"
SHARED = Path(core_rows.__file__).parent
"""The folder of `workloads.py` and `timing.py`, which adapters import by path."""

ADAPTERS = {
    "sglang-legacy": ("sglang", "sglang_rows.py", "legacy"),
    "sglang-unified": ("sglang", "sglang_rows.py", "unified"),
    "sglang-rust": ("sglang", "sglang_rows.py", "rust"),
    "vllm-16": ("vllm", "vllm_rows.py", "16"),
    "vllm-64": ("vllm", "vllm_rows.py", "64"),
}
"""What can be measured, by the name it has in a report: the peer, the script beside this file, its argument."""

ADAPTER_TIMEOUT_S = 600
"""Wall-clock limit of one adapter; on a quiet machine one takes under 60 s."""

QUIET = {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
UNITS = {"median_us": "us", "requests_per_s": "req/s", "bytes": "bytes"}
"""The figure of a row, by the key it stands under, with its unit; the first that a row has."""

HIGHER_IS_BETTER = {"requests_per_s", "hit_rate"}


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=",".join(ADAPTERS))
    parser.add_argument("--rows", default=",".join(core_rows.ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    peers = asked.peers.split(",")
    if unknown := sorted(set(peers) - set(ADAPTERS)):
        parser.error(f"no peers named {', '.join(unknown)}; there are {', '.join(ADAPTERS)}")
    rounds = [one_round(peers, asked.rows.split(","), number) for number in range(asked.rounds)]
    found = merged(rounds, best if asked.best else median)
    print(json.dumps(found, indent=2) if asked.json else table(found))


def one_round(peers, names, number):
    """Run each system once; every other round in reversed order, so that what else the machine does falls on all alike."""
    measured = {}
    for system in [OURS, *peers] if number % 2 == 0 else [*reversed(peers), OURS]:
        print(f"round {number + 1}: {system}", file=sys.stderr)
        measured[system] = our_rows(names) if system == OURS else adapter_rows(system, names)
    return measured


def our_rows(names):
    """Return quire's rows from a process of their own, like a peer's: a second round finds memory that the first gave back."""
    command = [
        sys.executable,
        "-m",
        "quire",
        "bench",
        "core",
        "--json",
        "--rows",
        ",".join(names),
    ]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def adapter_rows(system, names):
    """Return the rows of a peer, or one row with the reason why there are none."""
    peer, script, argument = ADAPTERS[system]
    if reason := environment.lacks(peer):
        return [{"name": "not_installed", "reason": reason}]
    command = [environment.python(), Path(__file__).with_name(script), argument, ",".join(names)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=ADAPTER_TIMEOUT_S,
            env=os.environ | QUIET | {"PYTHONPATH": str(SHARED)},
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"ended with {error.returncode}"])[-1]
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        reason = str(error)
    return [{"name": "failed", "reason": reason}]


def best(values, key):
    """Return the best of the values that a row has under a key."""
    return max(values) if key in HIGHER_IS_BETTER else min(values)


def median(values, _key):
    """Return the median of the values that a row has under a key."""
    return statistics.median(values)


def merged(rounds, of):
    """Return each system's rows once, every number the median or the best of that number over the rounds."""
    found = {}
    for system in rounds[0]:
        by_name = {}
        for measured in rounds:
            for row in measured[system]:
                by_name.setdefault(row["name"], []).append(row)
        found[system] = [_merged(rows, of) for rows in by_name.values()]
    return {system: rows for system, rows in found.items() if rows}


def _merged(rows, of):
    row = dict(rows[0])
    for key, value in row.items():
        if isinstance(value, int | float):
            row[key] = of([each[key] for each in rows if key in each], key)
    return row


def table(found):
    """Return a table in Markdown: one figure per row and system, and how we stand to the best other."""
    reasons = {name: rows[0]["reason"] for name, rows in found.items() if "reason" in rows[0]}
    others = [name for name in found if name != OURS and name not in reasons]
    by_name = {name: {row["name"]: row for row in rows} for name, rows in found.items()}
    lines = ["| " + " | ".join(["row", "unit", OURS, *others, "ahead of the best"]) + " |"]
    lines.append("|---" * (len(others) + 4) + "|")
    for name, mine in by_name[OURS].items():
        unit = next(unit for unit in UNITS if unit in mine)
        theirs = [by_name[other].get(name, {}).get(unit) for other in others]
        known = [value for value in theirs if value is not None]
        higher = unit in HIGHER_IS_BETTER
        gain = (mine[unit] / max(known) if higher else min(known) / mine[unit]) if known else None
        cells = [
            name,
            UNITS[unit],
            *map(_cell, [mine[unit], *theirs]),
            f"{gain:.1f}x" if gain else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in reasons.items())])


def _cell(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
