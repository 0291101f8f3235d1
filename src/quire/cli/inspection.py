"""`quire inspect`: the state of a cache, drawn from its snapshot."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column
from rich.text import Text
from rich.tree import Tree

from quire.cli.files import read_text
from quire.cli.options import AsJson
from quire.cli.output import ACTIVE, CACHED, pool_bar, pool_counts, print_json, stdout
from quire.cli.tables import facts_table, plain_table
from quire.cli.tier_place import is_address
from quire.config import format_bytes
from quire.errors import ConfigError

PARTS = frozenset({"block_size", "policy", "groups", "roots", "sequences", "stats"})

HEAD_TOKENS, HEAD_IDS = 48, 8
"""Tokens of an edge that are shown as text, or as ids."""

MISSES = {
    "last_token": "the last token of each prompt is always computed",
    "partial_block": "in the last, incomplete block",
    "evicted": "was cached once, and evicted",
    "window": "cached, but not the window or state to go on from",
    "cold": "never seen before in its scope",
}


def inspect(
    place: Annotated[
        str | None,
        typer.Argument(
            help="A saved snapshot, or a tier: its directory, or its address.", show_default=False
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            help="Of a tier: most namespaces, scopes, and prefixes of each scope shown.", min=0
        ),
    ] = 12,
    as_json: AsJson = False,
) -> None:
    """The state of a cache: pools, prefix tree, sequences, and why prompts missed.

    Reads what quire generate --save wrote, or the JSON of a quire.ops.snapshot(manager) of
    yours. Without a file it shows a small demonstration, which needs no torch.

    Of a tier (a directory that --tier made, or the same address) it shows what is stored: by model and
    layers, by scope and prefix as far as names stand beside the records, how hot
    and how big. Nothing is changed.

    [bold]Examples[/bold]

      quire inspect
      quire generate "Hello" --save run.json && quire inspect run.json
      quire inspect run.json --json
      quire inspect /var/cache/quire --top 3
      quire inspect redis://localhost
    """
    file = None if place is None else Path(place).expanduser()
    if place is not None and file is not None and (is_address(place) or file.is_dir()):
        _inspect_tier(place, top=top, as_json=as_json)
        return
    state = demonstration() if file is None else read(file)
    if as_json:
        print_json(state)
        return
    console = stdout()
    if file is None:
        console.print(
            "\nA demonstration: two chats of tenant [bold]a[/bold] share a prompt, one of them is "
            "forked and still running; tenant [bold]b[/bold] asks the same and shares nothing.",
            soft_wrap=False,
        )
    try:
        with console.capture() as drawn:
            show(console, state, text=bool(state.get("text_is_bytes")))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ConfigError(_not_a_snapshot(file, f"{type(error).__name__}: {error}")) from error
    console.file.write(drawn.get())


def _inspect_tier(place: str, *, top: int, as_json: bool) -> None:
    from quire.cli import tier_picture

    picture = tier_picture.surveyed(place)
    if as_json:
        print_json(tier_picture.as_data(picture))
    else:
        tier_picture.draw(stdout(), picture, top=top)


def read(path: Path) -> dict[str, Any]:
    """Read a snapshot. Raises `ConfigError` for a file that is none."""
    try:
        state: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(_not_a_snapshot(path, str(error))) from error
    missing = PARTS.difference(cast("dict[str, Any]", state) if isinstance(state, dict) else ())
    if missing:
        raise ConfigError(_not_a_snapshot(path, f"{', '.join(sorted(missing))} missing"))
    return cast("dict[str, Any]", state)


def show(console: Console, state: dict[str, Any], *, text: bool) -> None:
    """Draw a snapshot: pools, trees, sequences, statistics."""
    console.print()
    memory = {group["name"]: group for group in state.get("memory", ())}
    for group in state["groups"]:
        counts = pool_counts(group).append(f" of {state['block_size']} tokens, {state['policy']}")
        facts = [(group["name"], pool_bar(group)), ("", counts)]
        if group["name"] in memory:
            facts.append(("", Text(_memory(memory[group["name"]]), "bright_black")))
        console.print(facts_table(facts))
    for root in state["roots"]:
        if root["children"]:
            console.print()
            tree = Tree(Text(_scope_name(root["scope"]), "bold"), guide_style="bright_black")
            _grow(tree, root["children"], state, text=text)
            console.print(tree)
    console.print()
    if state["sequences"]:
        console.print(_sequences(state))
    console.print(facts_table(_statistics(state["stats"])))
    console.print()


def _memory(group: dict[str, Any]) -> str:
    return (
        f"{group['kind']}, {group['num_layers']} layers, {format_bytes(group['bytes_per_block'])} a "
        f"block, {group['share']:.0%} of the memory"
    )


def demonstration() -> dict[str, Any]:
    """Return the snapshot of a small cache with something of everything in it."""
    from quire import ops
    from quire.core import CacheManager, Scope

    manager = CacheManager(48, 8)
    rules = b"You are a careful librarian. Answer in one sentence. "
    mine, other = Scope(salt="a"), Scope(salt="b")

    def serve(text: bytes, scope: Scope) -> Any:
        seq = manager.open(list(text), scope)
        manager.reserve(seq, len(text) - seq.computed)
        manager.take_copies()
        manager.commit(seq, list(text[seq.computed :]))
        return seq

    manager.close(serve(b"A long story that nobody asks for again. " * 5, mine))
    manager.close(serve(rules + b"Where are the maps? On the second floor.", mine))
    manager.close(serve(rules + b"Where are the poems? Next to the window.", mine))
    chat = serve(rules + b"Where are the poems? Next to the window. And the plays?", mine)
    twin = manager.fork(chat)
    for seq, reply in ((chat, b" Upstairs, on the left."), (twin, b" Ask at the desk.")):
        manager.reserve(seq, len(reply))
        manager.take_copies()
        manager.commit(seq, list(reply))
    ops.reclaim(manager, 20)
    manager.close(serve(b"A long story that nobody asks for again.", mine))
    manager.close(serve(rules + b"Where are the maps?", other))
    ops.check(manager)
    return ops.snapshot(manager) | {"text_is_bytes": True}


def _grow(tree: Tree, nodes: list[dict[str, Any]], state: dict[str, Any], *, text: bool) -> None:
    from quire.ops import held_notes

    size = state["block_size"]
    for node in nodes:
        num_blocks = len(node["tokens"]) // size
        stop = node["end"] * size
        tokens = f"  tokens {stop - num_blocks * size:,}-{stop:,}  "
        held = (f"{node['locks']} ref", ACTIVE) if node["locks"] else ("cached", CACHED)
        count = f"{num_blocks} block{'s' if num_blocks != 1 else ''}", "bold"
        label = Text.assemble(count, tokens, held)
        if node["pins"]:
            label.append("  pinned", "magenta")
        if node["priority"]:
            label.append(f"  priority {node['priority']}", "magenta")
        for note in held_notes(node, state):
            label.append(f"  {note}", "yellow")
        below = tree.add(_Label(label, node["tokens"], text=text))
        _grow(below, node["children"], state, text=text)


class _Label:
    """The facts of an edge, whole, and as much of its beginning as the line has room for."""

    def __init__(self, facts: Text, tokens: list[int], *, text: bool) -> None:
        self._facts, self._tokens, self._text = facts, tokens, text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = _head(self._tokens, options.max_width - self._facts.cell_len - 2, text=self._text)
        yield Text.assemble(self._facts, ("  " + head if head else "", "dim"))


def _head(tokens: list[int], room: int, *, text: bool) -> str:
    """The beginning of an edge in so many columns, as text or as token ids; whole ids, or none."""
    if text:
        head = bytes(token for token in tokens[:HEAD_TOKENS] if 0 <= token < 256)
        said = json.dumps(head.decode("utf-8", "replace"), ensure_ascii=False)
        said += "..." if len(tokens) > HEAD_TOKENS else ""
        return said if len(said) <= room else said[: room - 1] + "…" if room > 1 else ""
    for count in range(min(HEAD_IDS, len(tokens)), 0, -1):
        more = ", ..." if len(tokens) > count else ""
        said = f"[{', '.join(map(str, tokens[:count]))}{more}]"
        if len(said) <= room:
            return said
    return ""


def _sequences(state: dict[str, Any]) -> Any:
    lengths = ("published", "computed", "capacity", "cached at open")
    table = plain_table(Column("sequence"), *lengths, Column("scope", overflow="fold"))
    for seq in state["sequences"]:
        lengths = (f"{seq[name]:,}" for name in ("published", "computed", "capacity", "num_cached"))
        table.add_row(f"{seq['number']} {seq['state']}", *lengths, _scope_name(seq["scope"]))
    return table


def _statistics(stats: dict[str, Any]) -> list[tuple[str, Any]]:
    found = f"{stats['hit_tokens']:,} of {stats['prompt_tokens']:,}"
    missed = {reason: tokens for reason, tokens in stats["missed"].items() if tokens}
    kinds = ("published", "deduplicated", "copied", "evicted")
    return [
        ("requests", f"{stats['num_requests']:,}"),
        ("found", f"{found} prompt tokens ({stats['hit_rate']:.1%})"),
        *((f"missed {missed[why]:,}", f"{why}: {MISSES.get(why, '')}") for why in missed),
        ("blocks", ", ".join(f"{stats[f'{kind}_blocks']:,} {kind}" for kind in kinds)),
    ]


def _scope_name(scope: str) -> str:
    """A scope's repr; long fingerprints are cut."""
    if scope == "Scope()":
        return "everyone"
    quoted = scope.split("'")
    return "'".join(part[:12] + "..." if len(part) > 40 else part for part in quoted)


def _not_a_snapshot(path: Path | None, reason: str) -> str:
    return f"{str(path)!r} is no snapshot of a CacheManager ({reason}); quire generate --save makes one"
