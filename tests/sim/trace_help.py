"""Trace files written for a test, and their prompts renumbered block by block."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, rows: Iterable[dict]) -> Path:
    """Write rows as JSON Lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(ids, *, block_size=16, rest=0, at=0, **others) -> dict:
    """Return a Mooncake row with these ids: full blocks, and `rest` tokens in one more."""
    full = len(ids) - (1 if rest else 0)
    length = full * block_size + rest
    return {"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids} | others


def rows_in(path: Path) -> list[dict]:
    """Return the rows of a gzip file of JSON Lines."""
    return [json.loads(line) for line in gzip.open(path)]


def ids_in(row: dict) -> list:
    """Return the ids of a row, one by one."""
    if "hash_ids" in row:
        return row["hash_ids"]
    return [first + i for first, length in row["hash_runs"] for i in range(length)]


def runs_of(ids: list[int]) -> list[list[int]]:
    """Return ids as runs of rising ones."""
    runs: list[list[int]] = []
    for id_ in ids:
        if runs and sum(runs[-1]) == id_:
            runs[-1][1] += 1
        else:
            runs.append([id_, 1])
    return runs


def by_prefix(prompts: Iterable[list]) -> list[list[int]]:
    """Return prompts renumbered: one number for each different prefix, by first appearance."""
    trie: dict = {}
    renumbered = []
    for prompt in prompts:
        node, path = -1, []
        for id_ in prompt:
            node = trie.setdefault((node, id_), len(trie))
            path.append(node)
        renumbered.append(path)
    return renumbered


def violations(prompts: Iterable[list]) -> int:
    """Return how many references follow another id than the first reference to them did."""
    first: dict = {}
    count = 0
    for prompt in prompts:
        before = None
        for id_ in prompt:
            count += first.setdefault(id_, (before,)) != (before,)
            before = id_
    return count


def mooncake_rows(trace, output=1) -> list[dict]:
    """Return the requests of a trace as Mooncake rows, a second apart."""
    return [
        {
            "timestamp": 1000 * each.row,
            "input_length": each.prompt_tokens,
            "output_length": output,
            "hash_ids": each.blocks.tolist(),
        }
        for each in trace
    ]
