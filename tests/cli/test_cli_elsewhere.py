"""Commands of other packages: which are found, and what is said of one that is missing or broken."""

import json
import subprocess
import sys

import pytest
import typer

import quire.cli.elsewhere
from parts import is_installed
from quire.extras import COMMANDS

INSTALLED = {command for command, part in COMMANDS.items() if is_installed(part)}

MAKES_MISSING = """
import sys
import quire.plugins
offered = quire.plugins.names_offered
quire.plugins.names_offered = lambda group: set() if group == "quire.commands" else offered(group)
sys.argv = {words!r}
from quire.cli import main
main()
"""


def without_siblings(*words):
    """Run `quire` where no other package offers a command."""
    program = MAKES_MISSING.format(words=["quire", *words])
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("command", "package"), COMMANDS.items())
def test_a_missing_command_names_its_package(command, package):
    done = without_siblings(*command.split())
    assert done.returncode == 2
    assert done.stderr == (
        f"error: quire {command} comes with {package}, which is not installed: "
        f"pip install ./{package.removeprefix('quire-')} in a clone of quire\n"
    )


def test_a_missing_command_is_a_document_with_json():
    done = without_siblings("replay", "--json")
    assert json.loads(done.stdout)["error"]["kind"] == "ConfigError"


def test_help_lists_what_is_installed():
    assert "replay" not in without_siblings("--help").stdout
    done = subprocess.run(
        [sys.executable, "-m", "quire", "--help"], capture_output=True, text=True, check=True
    )
    assert all(word.split()[0] in done.stdout for word in INSTALLED)


def test_a_broken_command_says_why_and_leaves_the_others(monkeypatch):
    def broken(group, name):
        raise quire.cli.elsewhere.ConfigError(f"{name!r} cannot be loaded: no module")

    monkeypatch.setattr(quire.cli.elsewhere, "names_offered", lambda _: {"strange"})
    monkeypatch.setattr(quire.cli.elsewhere, "load_offered", broken)
    command = quire.cli.elsewhere.offered()["strange"]
    with pytest.raises(quire.cli.elsewhere.ConfigError, match="'strange' cannot be loaded"):
        command()


def test_every_known_command_of_another_package_is_offered():
    offered = quire.cli.elsewhere.offered()
    assert {name.replace(".", " ") for name in offered} == INSTALLED
    assert all(callable(each) or isinstance(each, typer.Typer) for each in offered.values())
