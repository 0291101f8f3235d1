"""Tiers beside the raw file, socket or store they stand on: MB/s of payload (10^6 bytes), medians of rounds in turn.

    python benchmarks/tiers/beside_raw.py [--kinds host,disk] [--block-bytes 64KiB,4MiB] [--path /mnt/nvme]
                                          [--bytes 1GiB] [--rounds 9] [--json]

Checksums are always on. Redis and the S3 server are started here, on loopback. About two minutes. The disk goes past the page cache, tier and raw file.
`--bytes` is the most that is on the disk at any time. Beside LMCache: `beside_lmcache.py`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measure import RawRecords, measure
from pairs import KEPT_ROUNDS, PAIRS, open_pair
from raw import PLACES

from quire.config import parse_bytes
from quire.errors import ConfigError, TierError

KEPT_COPIES = KEPT_ROUNDS + PLACES + 2
"""How often a round's bytes are on disk at the same time: in a tier, in the raw file, and slack."""

ROUND_BYTES = 64 << 20
SLOW_ROUND_BYTES = {"objects": 32 << 20, "objects-s3": 8 << 20, "mooncake": 32 << 20}
"""The most that a round moves; less where a server of tests answers, which is slow."""

BUDGET_S = 3.0
"""Seconds for the rounds of each tier and size."""


def main(arguments=None):
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(PAIRS))
    parser.add_argument("--block-bytes", default="64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--bytes", default="1GiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    measured = []
    for kind in asked.kinds.split(","):
        for size in map(parse_bytes, asked.block_bytes.split(",")):
            print(f"{kind}, {size >> 10} KiB", file=sys.stderr)
            measured.append(row_of(kind, size, asked))
            if "reason" in measured[-1]:
                break
    print(json.dumps(measured, indent=2) if asked.json else table(measured))


def row_of(kind, size, asked):
    """Return the row of a tier and block size, or one with the reason."""
    most = min(parse_bytes(asked.bytes) // KEPT_COPIES, SLOW_ROUND_BYTES.get(kind, ROUND_BYTES))
    count = max(1, most // size)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="quire-bench-", dir=asked.path) as folder,
            open_pair(kind, Path(folder), size, count) as pair,
        ):
            records = RawRecords(size, count)
            row = measure(pair, records, rounds=asked.rounds, budget_s=BUDGET_S)
    except (TierError, ConfigError, ImportError) as error:
        return {"tier": kind, "reason": str(error)}
    return row | {"tier": kind}


def table(rows):
    """Return a table in Markdown, and why tiers are missing."""
    lines = [
        "| tier | block | put | raw | of raw | get | raw | of raw | lookups/s | how |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        if "reason" in row:
            lines.append(f"{row['tier']}: {row['reason']}")
            continue
        cells = [row["tier"], f"{row['block_bytes'] >> 10} KiB"]
        for way in ("put", "get"):
            cells += [f"{row[f'{name}_mb_s']:,.0f}" for name in (way, f"raw_{way}")]
            cells.append(f"{row[f'{way}_ratio']:.2f}")
        lines.append("| " + " | ".join([*cells, f"{row['lookups_s']:,.0f}", row["mode"]]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
