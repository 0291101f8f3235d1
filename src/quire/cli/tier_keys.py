"""`quire cache key`: files of tier keys."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson
from quire.cli.output import answer, stdout
from quire.cli.tables import facts_table
from quire.config import read_bytes
from quire.errors import ConfigError


def key(
    file: Annotated[Path, typer.Argument(help="The file.", show_default=False)],
    *,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Put a new key on top of those that the file has.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a file of tier keys, for --tier-key-file and key_file: only its owner may read it.

    With a key, a tier's records are signed, and nothing is accepted that was not. To change the key, --rotate and start
    processes again: records of older keys are read as long as their lines stay in the file. Keys are never printed, their
    ids are.

    [bold]Examples[/bold]

      quire cache key /etc/quire/tier.key
      quire cache key /etc/quire/tier.key --rotate
    """
    from quire.tiers.keys import TENANTS, TierKey, new_secret

    file = file.expanduser()
    if rotate:
        TierKey.from_file(file)
        old = read_bytes(file).decode("ascii")
        _replace(file, f"{new_secret()}\n{old}")
    else:
        text = f"{new_secret()}\n{TENANTS} {new_secret()}\n"
        try:
            _create(file, text)
        except FileExistsError:
            raise ConfigError(
                f"{str(file)!r} is there already; --rotate puts a new key on top of those that it has"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from error
    ids = [each.hex() for each in TierKey.from_file(file).ids]
    found: dict[str, Any] = {"file": str(file), "writes": ids[0], "reads": ids}
    facts = [("file", str(file)), ("writes", ids[0]), ("reads", ", ".join(ids))]
    answer(found, lambda _: stdout().print(facts_table(facts)), as_json=as_json)


def _create(file: Path, text: str) -> None:
    """Write a file that is not there, for its owner only. Raises `OSError`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(descriptor)


def _replace(file: Path, text: str) -> None:
    """Write a file anew, all or nothing. Its mode stays, but that no other user may write it."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        _create(fresh, text)
        fresh.chmod(file.stat().st_mode & 0o755)
        fresh.replace(file)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from error
