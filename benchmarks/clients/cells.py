"""The cells of a Python client's row: one function per feature in its script, each given the server.

A script's functions that have a feature's name are its cells. `python SCRIPT URL MODEL FOLDER FEATURES` runs those of some
features, separated by commas, and prints each result as JSON. The tests call the same functions. This module needs the standard library alone.
"""

import asyncio
import inspect
import json
import signal
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FEATURES = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "forced_tool": "forced tool",
    "json_schema": "JSON schema",
    "stop": "stop",
    "cancel": "cancel",
    "n": "n",
    "logprobs": "logprobs",
    "responses": "responses",
    "previous_response": "previous response",
    "messages": "messages",
    "count_tokens": "count tokens",
    "embeddings": "embeddings",
    "reasoning": "reasoning",
    "errors": "errors",
    "usage": "cached tokens",
    "scoring": "scoring",
}
"""The columns of the table: the name of a script's function, and the heading."""

KEY, OPERATOR_KEY = "key-of-clients", "key-of-operator"
MAX_INFLIGHT = 4
"""Sequences that the server takes at once, so that a script can fill it."""
CELL_S = 600
"""Seconds that a cell may take."""

SYSTEM = "You answer questions about Python. " * 4
"""A prompt of several blocks, so that a second request finds some."""
TALK = "What is a list?"
ZONES = ["UTC", "CET"]
TOOL = {
    "name": "now",
    "description": "Tells the time.",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ZONES}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
"""A function. Its arguments are few words, which a small model completes."""
CALL = r'<tool_call>\{"name": "now", "arguments": \{"zone": "(UTC|CET)"\}\}</tool_call>'
"""A regex of answers that are calls, for a model that makes none by itself (`structured_outputs`)."""
THINKING = "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}{# </think> #}"
"""The end of a chat template by which an answer reasons if a request wants that, for a server of its own."""
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
"""Fields of a chat whose answer is to reason."""
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class Server(NamedTuple):
    """A server that was started for clients, with `KEY`, `OPERATOR_KEY` and `MAX_INFLIGHT`.

    `folder`  that of the model, for clients that read its tokenizer
    """

    url: str
    model: str
    folder: str = ""
    key: str = KEY

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def num_requests(self) -> int:
        """Requests that run or wait, by `/metrics`."""
        return self.count("quire_requests_running", "quire_requests_waiting")

    def count(self, *names: str) -> int:
        """Return the sum of the numbers in `/metrics` whose lines begin with one of these."""
        told = self.ask("/metrics", key=OPERATOR_KEY).read().decode().splitlines()
        return sum(int(float(each.split()[-1])) for each in told if each.startswith(names))

    @contextmanager
    def cancelled(self) -> Iterator[None]:
        """Check that a request of the block ends since its client leaves, and not by itself."""
        aborts = 'quire_finished_total{reason="abort"'
        before = self.count(aborts)
        yield
        self.wait_idle()
        assert self.count(aborts) > before, "the request ran to its end"

    def wait_idle(self) -> None:
        """Wait until no request runs or waits. Raises `AssertionError` after 20 s."""
        until = time.monotonic() + 20
        while self.num_requests:
            assert time.monotonic() < until, f"{self.num_requests} requests still run"
            time.sleep(0.05)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Hold all of the server's places with streams that do not end."""
        asked = {
            "prompt": TALK, "max_tokens": 1500, "min_tokens": 1500, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with ExitStack() as streams:
            for _ in range(MAX_INFLIGHT):
                streams.enter_context(self.ask("/v1/completions", asked)).readline()
            yield
        self.wait_idle()

    def ask(self, path: str, document: Any = None, key: str = KEY) -> Any:
        """Return the open answer to a request, a GET where there is no document."""
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(  # noqa: S310 - the server's own address
            f"{self.url}{path}", body, {"Authorization": f"Bearer {key}"}
        )
        return urllib.request.urlopen(request, timeout=30)  # noqa: S310


def call(cell: Callable[[Server], Any], server: Server, loop: asyncio.Runner) -> None:
    """Run a cell, which may be a coroutine; then the server is idle."""
    done = cell(server)
    if inspect.iscoroutine(done):
        loop.run(done)
    server.wait_idle()


def features(names: Mapping[str, Any]) -> list[str]:
    """Return the features for which a script has a function, in the order of the table."""
    return [each for each in FEATURES if each in names]


def main(names: Mapping[str, Any]) -> None:
    """Run a script's cells against the server of the command line, and print a line of JSON for each."""
    server, asked = Server(*sys.argv[1:4]), sys.argv[4].split(",")
    signal.signal(signal.SIGALRM, _too_slow)
    with asyncio.Runner() as loop:
        for feature in features(names):
            if feature not in asked:
                continue
            signal.alarm(CELL_S)
            try:
                call(names[feature], server, loop)
                said = "yes"
            except Exception as error:  # noqa: BLE001 - each error is the cell's content
                said = _told(error, names["__file__"])
            finally:
                signal.alarm(0)
            print(json.dumps({"feature": feature, "said": said}), flush=True)


def raised(kind: type[BaseException], ask: Callable[[], Any], *words: str) -> None:
    """Assert that a call raises an error of a kind, with these words in its message."""
    try:
        ask()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    missing = [each for each in words if each not in said]
    assert not missing, f"{said!r} does not say {missing}"


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"took more than {CELL_S} s")


def _told(error: Exception, script: str) -> str:
    """Return an error in a line; of an assertion without a message, the line of the script."""
    said = " ".join(str(error).split())
    if not said:
        lines = [
            f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == script
        ]
        said = lines[-1] if lines else ""
    return f"{type(error).__name__}: {said}"[:300]
