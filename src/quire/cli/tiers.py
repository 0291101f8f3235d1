"""Tiers on the command line: `--tier`, again for each, and `--tier-file FILE` for a TOML file."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.config import read_toml
from quire.errors import ConfigError
from quire.extras import lacking

TierLines = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        help="A tier for KV that outlives the pool, fastest first, again for each: host:2GiB, "
        "disk:/path?capacity=20GiB, redis://host, s3://bucket.",
        show_default=False,
    ),
]
TierFile = Annotated[
    Path | None,
    typer.Option(
        "--tier-file",
        help="Tiers as a TOML file: \\[\\[tiers]] tables, and their settings in \\[stack].",
        show_default=False,
    ),
]
TierKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--tier-key-file",
        help="A file of tier keys, from quire cache key: it signs records, and only signed ones are accepted.",
        show_default=False,
    ),
]


@contextmanager
def opened(
    lines: Sequence[str] | None,
    file: Path | None,
    key_file: Path | None = None,
    **defaults: object,
) -> Generator[Any]:
    """Open the tiers that a command names, as a `TierStack`, and close them; None for none.

    Those of the file come first. `key_file`: tier keys, instead of the file's own `key_file`. `defaults`: settings that hold where the file says nothing. Raises `ConfigError` and `TierError`.
    """
    specs: list[Any] = []
    settings: dict[str, object] = {}
    if file is not None:
        specs, settings = _read(file)
    specs += lines or ()
    if not specs:
        if key_file is not None:
            raise ConfigError(
                "--tier-key-file is given without a tier; name one with --tier or --tier-file"
            )
        yield None
        return
    if key_file is not None:
        settings["key_file"] = str(key_file)
    try:
        from quire.engines.tiered.opening import open_stack
    except ModuleNotFoundError as error:
        raise ConfigError(lacking("a tier", str(error.name), "hf")) from error
    with open_stack(specs, defaults | settings) as stack:
        yield stack


def in_words(tier_tokens: dict[str, int]) -> str:
    """Return what came from tiers as part of a sentence, or nothing."""
    parts = [f"{tokens:,} from {name}" for name, tokens in tier_tokens.items()]
    return f" ({', '.join(parts)})" if parts else ""


def _read(file: Path) -> tuple[list[Any], dict[str, object]]:
    given = read_toml(file)
    unknown = sorted(set(given) - {"tiers", "stack"})
    if unknown:
        raise ConfigError(
            f"{str(file)!r} has {', '.join(unknown)}; known are [[tiers]] and [stack]"
        )
    tiers, stack = given.get("tiers", []), given.get("stack", {})
    if not isinstance(tiers, list) or not isinstance(stack, dict):
        raise ConfigError(f"{str(file)!r}: tiers are [[tiers]] tables or lines, [stack] is a table")
    return list(tiers), stack  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - checked where they are opened
