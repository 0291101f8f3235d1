"""Simon Willison's `llm`, by a model of `extra-openai-models.yaml`, as its command and as a library."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from cells import SCHEMA, SYSTEM, TALK, main

YAML = """
- model_id: served
  model_name: {model}
  api_base: {v1}
  api_key_name: quire
  supports_tools: true
  supports_schema: true
"""


@cache
def home(server):
    """Return a folder with the configuration of a server."""
    folder = Path(tempfile.mkdtemp())
    (folder / "extra-openai-models.yaml").write_text(YAML.format(model=server.model, v1=server.v1))
    (folder / "keys.json").write_text(json.dumps({"quire": server.key}))
    return folder


def run(server, *words, said=TALK):
    command = [sys.executable, "-m", "llm", "-m", "served", said, "-o", "temperature", "0", *words]
    return subprocess.run(
        [*command, "-o", "max_tokens", "16"] if "max_tokens" not in words else command,
        env=os.environ | {"LLM_USER_PATH": str(home(server))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def ask(server, *words, **given):
    done = run(server, *words, **given)
    assert not done.returncode, done.stderr
    return done.stdout.removesuffix("\n")


def chat(server):
    said = ask(server, "--no-stream", "-s", SYSTEM)
    assert said
    assert ask(server, "--continue", said="And a tuple?")


def stream(server):
    assert ask(server, "-s", SYSTEM) == ask(server, "--no-stream", "-s", SYSTEM)


def json_schema(server):
    said = ask(server, "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "60")
    assert json.loads(said)["ok"] in (True, False)


def errors(server):
    wrong = run(server._replace(key="no-such-key"))
    assert wrong.returncode
    assert "401" in wrong.stderr
    with server.full():
        full = run(server)
    assert full.returncode
    assert "429" in full.stderr


def usage(server):
    done = run(server, "-s", SYSTEM, "-u")
    done = run(server, "-s", SYSTEM, "-u")
    assert "cached_tokens" in done.stderr, done.stderr


if __name__ == "__main__":
    main(globals())
