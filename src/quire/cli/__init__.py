"""The command line: `quire`.

app            the commands, and what happens to their errors
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
import sys


def main() -> None:
    """Run the command line that `sys.argv` holds."""
    try:
        from quire.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"quire: the command line needs {error.name}: pip install 'quire-kv[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model says what an ASCII terminal cannot
    app(prog_name="quire")
