"""The state of a manager as plain data, and that data as a picture for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from quire.core.manager import CacheManager
from quire.core.node import FOREVER, Node
from quire.core.sequence import Sequence
from quire.core.sparse import SparseGroup
from quire.core.tokens import array_of
from quire.interrupts import mutating
from quire.ops.pins import all_pins, pinned_nodes
from quire.runs import runs_of

BAR = 40


@mutating
def snapshot(manager: CacheManager) -> dict[str, Any]:
    """Return all state that later calls depend on, as data that JSON can hold; equal data acts alike."""
    kernel, tree = manager.kernel, manager.kernel.tree
    pinned = pinned_nodes(all_pins(kernel))
    order = {id(node): place for place, node in enumerate(tree.order.order())}
    children = _tree(list(tree.roots.values()), order, tree.sparse, pinned)
    return {
        "block_size": manager.block_size,
        "policy": manager.settings.policy_name,
        "groups": [
            {
                "name": spec.name,
                "num_blocks": pool.num_blocks,
                "free": pool.num_free,
                "active": pool.num_active,
                "cached": pool.num_cached,
                "free_runs": [[run.start, len(run)] for run in runs_of(pool.free_ids().tolist())],
                "shared": {str(block): count for block, count in sorted(pool.shared.items())},
            }
            for spec, pool in zip(manager.settings.groups, manager.pools, strict=True)
        ],
        "roots": [
            {"scope": repr(scope), "children": children[id(root)]}
            for scope, root in tree.roots.items()
        ],
        "sequences": [_sequence(*each) for each in enumerate(manager.sequences.values())],
        "copies": [list(copy) for copy in kernel.copies.peek()],
        "sparse_order": [group.eviction_order() for group in tree.sparse],
        "pinned_blocks": sum(node.num_blocks for node in pinned),
        "num_pins": len(all_pins(kernel)),
        "num_media": len(tree.media),
        "stats": _stats(manager),
    }


def dump(manager: CacheManager) -> str:
    """Draw one bar per pool, the tree of every scope, and the running sequences, for a person."""
    state = snapshot(manager)
    lines: list[str] = []
    for group in state["groups"]:
        total = group["num_blocks"]
        active = round(BAR * group["active"] / total)
        cached = min(round(BAR * group["cached"] / total), BAR - active)
        bar = "#" * active + "+" * cached + "." * (BAR - active - cached)
        lines.append(
            f"{group['name']} [{bar}] {group['active']} active # {group['cached']} cached + "
            f"{group['free']} free . of {total} blocks of {state['block_size']} tokens"
        )
    for root in state["roots"]:
        if root["children"]:
            lines.append(root["scope"])
            _draw_children(root["children"], state, lines)
    lines.extend(
        f"sequence {seq['number']} {seq['state']}: {seq['published']} published <= "
        f"{seq['computed']} computed <= {seq['capacity']} capacity"
        for seq in state["sequences"]
    )
    stats = state["stats"]
    lines.append(
        f"{stats['num_requests']} requests, {stats['hit_tokens']} of {stats['prompt_tokens']} "
        f"prompt tokens found ({stats['hit_rate']:.1%}), {stats['evicted_blocks']} blocks evicted"
    )
    return "\n".join(lines)


def held_notes(node: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Say what sparse groups hold of a node of a snapshot, where that is not all of it."""
    size = state["block_size"]
    run = len(node["tokens"]) // size
    notes: list[str] = []
    for part in node["parts"]:
        name = state["groups"][part["group"]]["name"]
        if "snapshots" in part:
            at = ", ".join(str(end * size) for end, _ in part["snapshots"])
            notes.append(f"{name} at {at}" if at else f"no {name}")
        elif part["num_held"] < run:
            notes.append(f"{name} {part['num_held']}/{run}")
    return notes


def _draw_children(nodes: list[dict[str, Any]], state: dict[str, Any], lines: list[str]) -> None:
    size = state["block_size"]
    waiting = [("", index == 0, node) for index, node in enumerate(reversed(nodes))]
    while waiting:
        indent, last, node = waiting.pop()
        notes = [f"{node['locks']} ref" if node["locks"] else "cached"]
        if node["pins"]:
            notes.append("pinned")
        if node["priority"]:
            notes.append(f"priority {node['priority']}")
        head = ", ".join(str(token) for token in node["tokens"][:6])
        run = len(node["tokens"]) // size
        notes += held_notes(node, state)
        lines.append(
            f"{indent}{'└── ' if last else '├── '}{run} blocks, tokens "
            f"{(node['end'] - run) * size}-{node['end'] * size}: [{head}, ...]  {', '.join(notes)}"
        )
        below = indent + ("    " if last else "│   ")
        waiting += [(below, at == 0, child) for at, child in enumerate(reversed(node["children"]))]


def _tree(
    roots: list[Node],
    order: dict[int, int],
    sparse: tuple[SparseGroup, ...],
    pins: Mapping[Node, int],
) -> dict[int, list[dict[str, Any]]]:
    """Return the children of every root as data, without recursion: trees can be deep."""
    children: dict[int, list[dict[str, Any]]] = {id(root): [] for root in roots}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        for child in node.children.values():
            data = _node(child, order, sparse, pins)
            children[id(node)].append(data)
            children[id(child)] = data["children"]
            waiting.append(child)
    return children


def _node(
    node: Node, order: dict[int, int], sparse: tuple[SparseGroup, ...], pins: Mapping[Node, int]
) -> dict[str, Any]:
    return {
        "tokens": np.frombuffer(bytes(node.key), np.int32).tolist(),
        "blocks": [ids.tolist() for ids in node.blocks],
        "parts": [_part(node.parts[group.place]) | {"group": group.index} for group in sparse],
        "end": node.end,
        "locks": node.locks,
        "pins": pins.get(node, 0),
        "priority": node.priority,
        "keep_until": node.keep_until,
        "due": _due(node),
        "eviction_order": order.get(id(node)),
        "uses": node.uses,
        "children": [],
    }


def _part(part: msgspec.Struct) -> dict[str, Any]:
    """Return a group's part of a node, sets as lists and dicts as lists of pairs, in order."""
    data: dict[str, Any] = msgspec.to_builtins(part, order="sorted")
    for name in [name for name in data if isinstance(data[name], dict)]:
        data[name] = [list(pair) for pair in data[name].items()]
    return data


def _due(node: Node) -> float | str | None:
    """Return from when on nobody is expected to come back to a node; None where no owner says so."""
    if node.mark is None or node.mark.owner is None:
        return None
    due = node.mark.owner.due
    return "unknown" if due == FOREVER else due


def _sequence(number: int, seq: Sequence) -> dict[str, Any]:
    lengths = ("published", "computed", "capacity", "num_cached", "prompt_len")
    groups, is_open = range(len(seq.rows.flat)), seq.state == "open"
    return {
        "number": number,
        "state": seq.state,
        "scope": repr(seq.scope),
        **{name: getattr(seq, name) for name in lengths},
        "priority": seq.terms.priority,
        "tables": [seq.block_ids(group).tolist() if is_open else [] for group in groups],
        "private": array_of(seq.private_key).tolist(),
        "tokens": seq.tokens.tolist(),
        "known": array_of(seq.script.key).tolist(),
        "keep_for": seq.terms.retain_s,
    }


def _stats(manager: CacheManager) -> dict[str, Any]:
    stats = manager.stats
    counts = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return counts | {"hit_rate": stats.hit_rate}
