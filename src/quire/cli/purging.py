"""`quire cache purge`: all of a tenant, in a tier or in a running server."""

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer
from rich.text import Text

from quire.cli.options import AsJson
from quire.cli.output import answer, progress, stdout
from quire.cli.tables import facts_table
from quire.cli.tier_place import shown, writing
from quire.cli.tiers import TierKeyFile
from quire.config import format_bytes, read_bytes
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.tiers.base import Tier

LEFT = 1
"""The exit code where something of the tenant is left."""

SERVER_TIMEOUT_S = 3600.0

LOOKED_AT = 16
"""Records that are looked at for a signature."""

HIDDEN = (
    "nothing of this tenant is found, and the tier has signed records: a tier key may hide its tenants; "
    "give --tier-key-file"
)


def purge(
    place: Annotated[
        str | None,
        typer.Argument(
            help="A tier's directory, or an address like redis://localhost.", show_default=False
        ),
    ] = None,
    *,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="The tenant: the name of its key, or a scope's salt. Others see it in the list of processes.",
            show_default=False,
        ),
    ] = None,
    tenant_file: Annotated[
        str | None,
        typer.Option(help="Read the tenant from this file; -: from stdin.", show_default=False),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Purge this running server, http://host:port, and its tiers.", show_default=False
        ),
    ] = None,
    tier_key_file: TierKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete all records of a tenant, and overwrite them where the tier can.

    Exit code 1 if something of the tenant is left or may be; the reason is
    said. Nothing else may have a disk tier's directory open. A running server
    keeps KV in its own memory: --url purges that, and its tiers, while it
    serves others. The operator's key is that of QUIRE_OPERATOR_KEY. A tier
    with a tier key that hides tenants needs --tier-key-file.

    [bold]Examples[/bold]

      quire cache purge /var/cache/quire --tenant-file -
      quire cache purge redis://localhost:6379 --tenant acme --json
      quire cache purge --url http://127.0.0.1:8000 --tenant acme
    """
    if (tenant is None) == (tenant_file is None):
        raise ConfigError("say whose records go: one of --tenant NAME and --tenant-file FILE")
    if (place is None) == (url is None):
        raise ConfigError("say where: one of a tier's PLACE and --url URL")
    name = tenant if tenant is not None else _read_tenant(tenant_file or "-")
    if not name:
        raise ConfigError(
            "the tenant is empty; records of everybody go with quire cache evict --all"
        )
    found = (
        _of_place(place, name, tier_key_file) if place is not None else _of_server(str(url), name)
    )
    answer(found, _show, as_json=as_json)
    if not found["complete"]:
        raise typer.Exit(LEFT)


def _of_place(place: str, name: str, key_file: Path | None) -> dict[str, Any]:
    """Purge a tier. Without a key file a tier with signed records may hide the tenant."""
    from quire.core import Scope
    from quire.exchange.hashing import tenant_tag
    from quire.tiers.contents.names import purge_names
    from quire.tiers.keys import TierKey, stored_tag
    from quire.tiers.purging import Purged

    tag = tenant_tag(Scope(tenant=name))
    key = None if key_file is None else TierKey.from_file(key_file)
    with writing(place) as held, progress("purging") as begin:
        begin("purging")
        told = held.tier.purge(stored_tag(tag, key))
        if not told.count and key is None and _has_signed(held.tier):
            told += Purged(is_complete=False, reason=HIDDEN)
        if held.path is not None:
            told += purge_names(held.path, tag)
    return {
        "place": shown(place),
        "purged": told.count,
        "purged_bytes": told.num_bytes,
        "complete": told.is_complete,
        "reason": told.reason,
    }


def _has_signed(tier: "Tier") -> bool:
    """Return whether one of the first records of a tier is signed."""
    from quire.tiers.base import Outcome
    from quire.tiers.format import key_id_of, new_buffer

    for each in islice(tier.scan(), LOOKED_AT):
        buffer = new_buffer(each.num_bytes)
        if tier.get([each.key], [buffer]) == [Outcome.HIT] and any(key_id_of(buffer)):
            return True
    return False


def _of_server(url: str, name: str) -> dict[str, Any]:
    """Have a server purge itself and its tiers. Raises `ConfigError`, and `QuireError` where it does not."""
    from quire.web.keys import OPERATOR_ENV

    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--url is an address like http://127.0.0.1:8000, got {url!r}")
    headers = {"Content-Type": "application/json"}
    if operator := os.environ.get(OPERATOR_ENV):
        headers["Authorization"] = f"Bearer {operator}"
    body = json.dumps({"tenant": name}).encode()
    asked = Request(f"{url.rstrip('/')}/v1/cache/purge", body, headers)  # noqa: S310 - checked above
    try:
        with progress("purging") as begin, urlopen(asked, timeout=SERVER_TIMEOUT_S) as answer:  # noqa: S310
            begin("purging")
            return {"server": url} | json.load(answer)
    except HTTPError as error:
        said = error.read(1000).decode("utf-8", "replace")
        mend = f"; the key in {OPERATOR_ENV} is to be the operator's" if error.code == 401 else ""
        raise QuireError(f"{url} answers {error.code}: {said}{mend}") from None
    except (URLError, OSError, ValueError) as error:
        raise QuireError(f"{url} cannot be asked: {getattr(error, 'reason', error)}") from None


def _show(found: dict[str, Any]) -> None:
    """Print the counts of a purge."""
    console = stdout()
    if "tiers" in found:
        blocks = ", ".join(f"{count:,} of {name}" for name, count in found["blocks"].items())
        facts: list[tuple[str, str | Text]] = [
            ("blocks", blocks),
            *((what, f"{found[what]:,}") for what in ("requests", "pins", "passages")),
        ]
        facts += [
            (name, f"{tier['count']:,} records ({format_bytes(tier['num_bytes'])})")
            for name, tier in found["tiers"].items()
        ]
        console.print(facts_table(facts))
    else:
        size = format_bytes(found["purged_bytes"])
        console.print(f"purged {found['purged']:,} records ({size})")
    if found["reason"]:
        console.print(Text(f"not complete: {found['reason']}", "red"))


def _read_tenant(file: str) -> str:
    """Return the first line of a file, or of stdin. Raises `ConfigError`."""
    data = sys.stdin.buffer.read() if file == "-" else read_bytes(Path(file))
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the tenant in {file!r} is no UTF-8: {error}") from None
