"""Errors as people and programs see them: a line, with `--json` a document, an exit code.

Exit codes: 0 done; 1 done, and the answer is bad (outputs differ, records are damaged);
2 cannot be done as asked; 3 a defect; 130 interrupted; 141 the reader of the output went away.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from quire.errors import QuireError

BAD_INPUT, DEFECT, INTERRUPTED, READER_GONE = 2, 3, 130, 141


def options_of(args: Sequence[str]) -> Sequence[str]:
    """Return the words before `--`, which may be options."""
    return args[: args.index("--")] if "--" in args else args


def explained(error: BaseException) -> tuple[str, int]:
    """Return an error in one line, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, (QuireError, ModuleNotFoundError)):
        return _of_library(error) or _line(error), BAD_INPUT
    if isinstance(error, OSError) and error.strerror:
        of = f" {str(error.filename)!r}" if error.filename is not None else ""
        return f"the system refuses{of}: {error.strerror}", BAD_INPUT
    if isinstance(error, MemoryError):
        return f"there is not enough memory. {_line(error)}".removesuffix(" MemoryError"), BAD_INPUT
    said = f"{type(error).__name__}: {_line(error)}"
    return f"{said} (not foreseen: a defect of quire, or of a library; --debug shows where)", DEFECT


def told(error: BaseException, options: Sequence[str]) -> int:
    """Tell a person, and with `--json` a program, of an error; with `--debug` as a traceback. Return the exit code."""
    as_json = "--json" in options
    said: Any = error  # typer's own errors: an unknown option, a value that is none
    if "--debug" in options:
        with suppress(OSError, ValueError):
            traceback.print_exception(error)
        return said.exit_code if hasattr(said, "format_message") else explained(error)[1]
    if not hasattr(said, "format_message"):
        message, code = explained(error)
        _report(type(error).__name__, message, code, as_json=as_json)
        return code
    if as_json:
        _report("UsageError", said.format_message(), said.exit_code, as_json=True)
    else:
        from typer import rich_utils

        rich_utils.rich_format_error(said)
    return said.exit_code


def _report(kind: str, message: str, code: int, *, as_json: bool) -> None:
    """Report an error as a red line and, with `as_json`, as one document on standard output."""
    if as_json:
        document = {"error": {"kind": kind, "message": message, "exit_code": code}}
        with suppress(OSError, ValueError):
            sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            sys.stdout.flush()
    line = f"error: {message}"
    with suppress(OSError, ValueError):
        colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write(f"\x1b[31m{line}\x1b[0m\n" if colours else f"{line}\n")
        sys.stderr.flush()


def close_quietly() -> None:
    """Leave nothing to be written at the end of the process to a stream that takes no more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _redirect(stream)


def _redirect(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _of_library(error: BaseException) -> str | None:
    """Return the command that installs a missing module; None where it is not one of ours."""
    from quire.extras import extra_of, install

    extra = extra_of(error.name) if isinstance(error, ModuleNotFoundError) else None
    said = str(error)
    if extra is None or "pip install" in said:
        return None
    return f"this needs {getattr(error, 'name', '')}: {install(extra)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
