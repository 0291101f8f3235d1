"""The command line: `quire`. One file per command, `app` brings them together."""

import atexit
import gc
import io
import os
import sys

from quire.cli import failures


def main() -> None:
    """Run the command line that `sys.argv` holds."""
    # Else Python looks at all of torch once more as it ends, which takes a second.
    atexit.register(gc.freeze)
    options = failures.options_of(sys.argv[1:])
    try:
        _open_streams()
        from quire.cli.app import app

        app(prog_name="quire")
    except (KeyboardInterrupt, ModuleNotFoundError) as error:
        sys.exit(failures.told(error, options))


def _open_streams() -> None:
    """Make both streams take any text, and none where the shell has closed one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model says what an ASCII terminal cannot
