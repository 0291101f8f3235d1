"""Asking before gigabytes are downloaded."""

import sys

import typer

from quire.errors import ConfigError

SIZE = "up to 2.4 GB"


def allow_download(peers: set[str], *, yes: bool) -> None:
    """Return if the peers are installed, or a person or `--yes` lets them be; else `ConfigError`.

    Where nobody can be asked, the answer is no.
    """
    from quire.bench.peers import environment

    missing = environment.absent(names=tuple(sorted(peers)))
    if not missing or yes:
        return
    what = f"{', '.join(missing)} into {environment.DEFAULT_FOLDER} ({SIZE}, minutes)"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"this would download {what}, and nobody is here to ask: add --yes")
    if not typer.confirm(f"Download {what}?", err=True):
        raise ConfigError("nothing was downloaded; without the peers there is nothing to compare")
