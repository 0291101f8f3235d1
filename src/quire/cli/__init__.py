"""The command line: `quire`.

app            the commands
failures       what becomes of errors: a line, a document, an exit code
demo           conversations with and without quire
generate       text from a model, with the cache at work
doctor         what is installed, and what is missing
inspection     the state of a cache, drawn (`quire inspect`)
cache          what a tier holds: verify, evict, export, import
tier_place     where a tier is: a directory or an address
tier_picture   a tier's directory, drawn (`quire inspect DIR`)
tier_choice    which records a scope, a prefix or a size means
tier_check     reading every record
bench          the benchmarks, as tables
talks          the text of the demo
comparison     the demo's two runs, measured
chat           messages to token ids, and the stamp of the first token
models         models and tokenizers, from a folder or the hub
output         consoles, numbers and bars
"""

import io
import os
import sys

from quire.cli import failures


def main() -> None:
    """Run the command line that `sys.argv` holds."""
    as_json = "--json" in failures.options_of(sys.argv[1:])
    try:
        _open_streams()
        from quire.cli.app import app

        app(prog_name="quire")
    except (KeyboardInterrupt, ModuleNotFoundError) as error:
        if "--debug" in failures.options_of(sys.argv[1:]):
            raise
        message, code = failures.explained(error)
        failures.report(type(error).__name__, message, code, as_json=as_json)
        sys.exit(code)


def _open_streams() -> None:
    """Make both streams take any text, and none where the shell has closed one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model says what an ASCII terminal cannot
