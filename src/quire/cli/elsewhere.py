"""Commands of other packages: how they are found, and what is said where one is not installed."""

from typing import Any

from typer.core import TyperGroup

from quire.errors import ConfigError
from quire.extras import COMMANDS, lacking_package
from quire.plugins import load_offered, names_offered

GROUP = "quire.commands"
"""The entry points by which packages offer commands, by name; "bench.serve" is `serve` of the group `bench`."""


class PartlyElsewhere(TyperGroup):
    """A group some of whose commands other packages bring: one that is not installed names its package."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        words = [*ctx.command_path.split()[1:], cmd_name]
        if found is None and (package := COMMANDS.get(" ".join(words))):
            raise ConfigError(lacking_package(" ".join(["quire", *words]), package))
        return found


def offered() -> dict[str, Any]:
    """Return the commands of other packages, functions or typer apps, by name.

    One that cannot be loaded raises the reason when it is called.
    """
    return {name: _loaded(name) for name in sorted(names_offered(GROUP))}


def _loaded(name: str) -> Any:
    try:
        return load_offered(GROUP, name)
    except ConfigError as error:
        reason = error

    def broken() -> None:
        """A command that cannot be loaded."""
        raise reason

    return broken
