"""Chat templates that requests bring, laid out in a process of its own, within bounds of time and memory.

A template is a program: it can loop for hours or fill the memory, and no thread can be ended from outside.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, update_wrapper
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec

from quire.errors import ConfigError, RequestFailed

MAX_S = 2.0
"""Seconds that a template may take; those of models take milliseconds."""

MAX_MEMORY = 512 << 20
"""Bytes that a template may take, where the system can bound them."""

MAX_ERROR = 1000
"""Characters of a template's error."""


class TemplateProcess:
    """A process that lays out one conversation after another: it starts when it is needed, and ends with this one.

    `crew`      thread that waits for it, so that nothing else does
    `max_text`  characters of a text; of a longer one, no more than one further character is told
    """

    def __init__(self, max_text: int) -> None:
        self.crew, self._max_text = ThreadPoolExecutor(1, "quire-own-template"), max_text
        self._running: subprocess.Popen[bytes] | None = None

    def text(self, asked: Mapping[str, Any]) -> str:
        """Return the text that transformers makes of the arguments of its `render_jinja_template`. Raises `ConfigError`."""
        running = self._started()
        answer, timer = b"", Timer(MAX_S, _end, [running])
        timer.start()
        with suppress(OSError):  # it is gone
            line = msgspec.json.encode([self._max_text, asked], enc_hook=str)
            answer = _asked(running, line + b"\n")
        timer.cancel()
        timer.join()  # one that fired has ended the process when the next request comes
        if not answer.endswith(b"\n"):
            _end(running)
            raise ConfigError(
                f"chat_template takes more than {MAX_S:g} s, or more than {MAX_MEMORY >> 20} MiB; send a smaller one"
            )
        text, error = msgspec.json.decode(answer)
        if error is not None:
            raise ConfigError(f"chat_template {error}")
        return text

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._running.poll() is not None:
            words = [sys.executable, "-c", f"from {__name__} import main; main()"]
            pipe = subprocess.PIPE
            self._running = subprocess.Popen(words, stdin=pipe, stdout=pipe)  # noqa: S603 - this Python
            if not _asked(self._running, b""):
                self._running.wait()
                raise RequestFailed("the process for chat templates of requests does not start")
        return self._running


class OwnTemplate:
    """A tokenizer with a request's chat template in place of its own."""

    def __init__(self, tokenizer: Any, chat_template: str, process: TemplateProcess) -> None:
        self.chat_template, self._tokenizer, self._process = chat_template, tokenizer, process
        # wrapped: it has the parameters of the tokenizer's own, which no variable of a template may have
        apply = partial(self._laid_out)
        self.apply_chat_template = update_wrapper(apply, tokenizer.apply_chat_template)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def _laid_out(self, messages: Any, *, tokenize: bool, **options: Any) -> str:
        del tokenize  # there is text alone
        given = {"conversations": [messages], "chat_template": self.chat_template}
        return self._process.text(self._tokenizer.special_tokens_map | options | given)


def main() -> None:
    """Answer requests of a `TemplateProcess`, a line of JSON each, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    templates: Any = import_module("transformers.utils.chat_template_utils")
    _bound_memory()
    said = b""  # it is ready
    while True:
        answers.write(said + b"\n")
        answers.flush()
        if not (line := sys.stdin.buffer.readline()):
            return
        try:
            said = _answer(templates, *msgspec.json.decode(line))
        except MemoryError:
            return


def _answer(templates: Any, max_text: int, asked: dict[str, Any]) -> bytes:
    """Return a text and no error, or no text and an error, as JSON."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - optional

    try:
        (text, *_), _ = templates.render_jinja_template(**asked)
        return msgspec.json.encode([text[: max_text + 1], None])
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        said = f"has a syntax error in line {error.lineno}: {error.message}"
    except Exception as error:  # noqa: BLE001 - whatever a template does
        said = f"refuses this conversation: {error}"
    return msgspec.json.encode([None, said[:MAX_ERROR]])


def _bound_memory() -> None:
    """Bound the memory of this process, on Linux."""
    with suppress(ImportError, OSError, ValueError):
        resource: Any = import_module("resource")
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _asked(running: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Return the next line that a process says, having said one to it."""
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(line)
    running.stdin.flush()
    return running.stdout.readline()


def _end(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    running.wait()
