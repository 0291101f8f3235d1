"""Commands as people type them, and what comes of them."""

import json

from typer.testing import CliRunner

from quire.cli.app import app


def run(*words, **options):
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def shown(*words, **options):
    """What a command prints for people."""
    done = run(*words, **options)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*words):
    """What a command prints for programs."""
    return json.loads(shown(*words, "--json"))


def refusal(*words):
    """The line in which a command refuses; it prints nothing else."""
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
