"""The rows of `quire bench tiers`: bytes per second of each tier and of what it stands on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from quire.bench.tier_measure import Records, Row, measure
from quire.bench.tier_pairs import KEPT_ROUNDS, PAIRS, open_pair
from quire.bench.tier_peers import Peers, with_peers
from quire.bench.tier_raw import PLACES
from quire.errors import ConfigError, TierError

Progress = Callable[[str], None]

KEPT_COPIES = KEPT_ROUNDS + PLACES + 2
"""How often a round's bytes are on disk at the same time: in a tier, in the raw file, and slack."""

ROUND_BYTES = 64 << 20
SLOW_ROUND_BYTES = {"objects": 32 << 20, "objects-s3": 8 << 20, "mooncake": 32 << 20}
"""The most that a round moves; less where a server of tests answers, which is slow."""


class TierBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `quire bench tiers` measures, and with how much.

    `names`        tiers, see `tier_pairs.PAIRS`; None: all
    `block_bytes`  payload sizes
    `path`         a directory on the disk to measure; None: the system's temporary one
    `num_bytes`    the most that is on that disk at any time
    `rounds`       of each tier and size, at most
    `budget_s`     seconds for the rounds of each tier and size
    """

    names: tuple[str, ...] | None = None
    block_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    path: Path | None = None
    num_bytes: int = 1 << 30
    rounds: int = 9
    budget_s: float = 3.0


def rows(
    bench: TierBench, progress: Progress | None = None, peers: Peers | None = None
) -> list[Row]:
    """Measure tiers, one row per tier and block size, medians of interleaved rounds; see `measure`.

    With `peers` each row is followed by those of LMCache's storages, which run before and after ours. A tier that
    cannot be opened here has one row with the `reason`. Raises `ConfigError` for names and sizes that cannot be measured.
    """
    names = bench.names or tuple(PAIRS)
    _check(bench, names)
    measured: list[Row] = []
    for name in names:
        for size in bench.block_bytes:
            if progress is not None:
                progress(f"{name}, {size >> 10} KiB")
            runs = [peers.beside(name, size)] if peers else []
            row = _row(bench, name, size)
            if "reason" in row:
                measured.append(row)
                break
            if peers and runs[0]:
                runs.append(peers.beside(name, size))
            measured += with_peers(row, runs) if peers else [row]
    return measured


def _row(bench: TierBench, name: str, size: int) -> Row:
    most = min(bench.num_bytes // KEPT_COPIES, SLOW_ROUND_BYTES.get(name, ROUND_BYTES))
    count = max(1, most // size)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="quire-bench-", dir=bench.path) as folder,
            open_pair(name, Path(folder), size, count) as pair,
        ):
            records = Records(size, count)
            row = measure(pair, records, rounds=bench.rounds, budget_s=bench.budget_s)
    except (TierError, ConfigError, ImportError) as error:
        return {"tier": name, "reason": str(error)}
    return row | {"tier": name}


def _check(bench: TierBench, names: Iterable[str]) -> None:
    unknown = sorted(set(names) - set(PAIRS))
    if unknown:
        raise ConfigError(f"no tiers named {', '.join(unknown)}; there are {', '.join(PAIRS)}")
    if not bench.block_bytes or min(bench.block_bytes) < 1:
        raise ConfigError(f"block sizes are at least 1 byte, not {bench.block_bytes}")
    if bench.num_bytes < KEPT_COPIES * max(bench.block_bytes):
        raise ConfigError(
            f"{bench.num_bytes} bytes are too few for blocks of {max(bench.block_bytes)}: "
            f"a round's bytes are there up to {KEPT_COPIES} times"
        )
    if bench.path is not None and not bench.path.is_dir():
        raise ConfigError(f"{str(bench.path)!r} is no directory")
