"""Clients against `quire serve`: a table of clients and features.

    python benchmarks/clients/run.py [--among NAMES] [--model MODEL] [--chat-template FILE] [--json | --write]

Makes an environment of each client below `.clients`, from PyPI or npm, and keeps it. Starts a server, runs each
client's script (`client_*`; `cells.py` says how), and prints the table: a cell is `yes`, `—` where the client has no such
feature, or the error. `--write` puts the rows into the table of docs/clients.md. Exits with 1 if there is an error.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import cells

from quire.cli.models import GGUF, name_of, source_of
from quire.cli.server_process import HOST, ServerProcess

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
MARKS = "<!-- table -->", "<!-- end of the table -->"
CLIENT_S = 1500
"""Seconds that a client's script may take."""


class Client(NamedTuple):
    """A client: its script below `benchmarks/clients`, and its packages, the first of which gives the version.

    `shares_base`  whether its environment finds the packages of this one, so that torch is not installed twice
    """

    name: str
    script: str
    packages: tuple[str, ...]
    shares_base: bool = False


CLIENTS = (
    Client("openai (Python)", "client_openai.py", ("openai",)),
    Client("openai (Node)", "client_openai_node.mjs", ("openai", "zod")),
    Client("anthropic (Python)", "client_anthropic.py", ("anthropic",)),
    Client("anthropic (Node)", "client_anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Client("ai, @ai-sdk/openai", "client_vercel_openai.mjs", ("@ai-sdk/openai", "ai", "zod")),
    Client("ai, @ai-sdk/anthropic", "client_vercel_anthropic.mjs", ("@ai-sdk/anthropic", "ai", "zod")),
    Client(
        "ai, @ai-sdk/openai-compatible",
        "client_vercel_compatible.mjs",
        ("@ai-sdk/openai-compatible", "ai", "zod"),
    ),
    Client("OpenAI Agents SDK", "client_agents.py", ("openai-agents",)),
    Client("litellm", "client_litellm.py", ("litellm",)),
    Client("langchain", "client_langchain.py", ("langchain-openai", "langchain-anthropic")),
    Client(
        "llama-index",
        "client_llama_index.py",
        ("llama-index-llms-openai-like", "llama-index-llms-openai"),
    ),
    Client("instructor", "client_instructor.py", ("instructor",)),
    Client("pydantic-ai", "client_pydantic_ai.py", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("llm", "client_llm.py", ("llm",)),
    Client("guidellm", "client_guidellm.py", ("guidellm",), shares_base=True),
    Client("lm-eval", "client_lm_eval.py", ("lm-eval[api]",), shares_base=True),
)  # fmt: skip


class Environment:
    """The packages of a client, in a folder that is kept."""

    def __init__(self, client: Client, root: Path) -> None:
        self.client, self.folder = client, root / Path(client.script).stem.removeprefix("client_")
        self.is_node = client.script.endswith(".mjs")

    def install(self) -> None:
        """Install the packages, unless they are there."""
        done = self.folder / "installed"
        asked = " ".join(self.client.packages)
        if done.is_file() and done.read_text() == asked:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.is_node:
            (self.folder / "package.json").write_text('{"private": true, "type": "module"}')
            _run(["npm", "install", "--no-audit", "--no-fund", *self.client.packages], self.folder)
        else:
            _run([sys.executable, "-m", "venv", "."], self.folder)
            if self.client.shares_base:
                (site,) = self.folder.glob("lib/python*/site-packages")
                (site / "base.pth").write_text(sysconfig.get_path("purelib"))
            _run([self._python, "-m", "pip", "install", "-q", *self.client.packages], self.folder)
        done.write_text(asked)

    def version(self) -> str:
        """Return the version of the first package."""
        package = self.client.packages[0].partition("[")[0]
        if self.is_node:
            told = (self.folder / "node_modules" / package / "package.json").read_text()
            return json.loads(told)["version"]
        ask = f"from importlib.metadata import version; print(version({package!r}))"
        return _run([self._python, "-c", ask], self.folder).strip()

    def measure(self, *server: str) -> dict[str, str]:
        """Run the client's script with the server's address, model, folder and features; return its cells."""
        if self.is_node:  # which looks for packages beside the script
            for each in HERE.glob("*.mjs"):
                shutil.copy(each, self.folder)
            command = ["node", self.client.script]
        else:
            command = [self._python, str(HERE / self.client.script)]
        quiet = {"AI_SDK_LOG_WARNINGS": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        try:
            done = subprocess.run(  # noqa: PLW1510 - a script that fails has told less
                [*command, *server],
                cwd=self.folder,
                env=os.environ | quiet,
                capture_output=True,
                text=True,
                timeout=CLIENT_S,
            )
            out, failed = (
                done.stdout,
                f"the script ended with {done.returncode}: {done.stderr[-300:]}",
            )
        except subprocess.TimeoutExpired as late:
            out, failed = (late.stdout or b"").decode(), f"the script took more than {CLIENT_S} s"
        told = [json.loads(each) for each in out.splitlines() if each.startswith('{"feature"')]
        found = {each["feature"]: each["said"] for each in told}
        is_ended = failed.startswith("the script ended with 0")
        return found if found or is_ended else {"chat": " ".join(failed.split())}

    @property
    def _python(self) -> str:
        return str(self.folder / "bin" / "python")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


class Model(NamedTuple):
    """A model to serve: a folder or a GGUF file, and what its tokenizer is.

    name      that of clients
    folder    with its tokenizer, and its weights: of a GGUF file, a folder made for clients
    dtype     that of the server; llama.cpp computes a GGUF file as it is
    template  its chat template
    """

    source: str
    name: str
    folder: Path
    dtype: str
    template: str


def model_of(given: str, template: Path | None, made: Path) -> Model:
    """Return a model as `quire serve` takes it, with a chat template of its own or another."""
    from transformers import AutoTokenizer

    folder = source = Path(source_of(given))
    if is_gguf := source.suffix == GGUF:
        folder = made / "model"
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
        (folder / source.name).symlink_to(source.resolve())
    own = AutoTokenizer.from_pretrained(folder).chat_template
    said = own if template is None else template.read_text(encoding="utf-8")
    return Model(given, name_of(given), folder, "auto" if is_gguf else "float32", said)


def measured(among: list[Client], root: Path, given: str, template: Path | None) -> Iterator[dict]:
    """Yield the row of each client, against one server."""
    places = [Environment(each, root) for each in among]
    for place in places:
        print(f"{place.client.name}: {place.folder}", file=sys.stderr)
        place.install()
    with tempfile.TemporaryDirectory() as made, ExitStack() as servers:
        model = model_of(given, template, Path(made))
        keys = Path(made) / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"clients {cells.KEY}\n")
        serve = [sys.executable, "-m", "quire", "serve", "--model", given, "--name", model.name]
        serve += ["--dtype", model.dtype, "--max-inflight", str(cells.MAX_INFLIGHT)]
        serve += ["--keys", str(keys), "--kv-memory", "512MiB"]
        environment = os.environ | {"QUIRE_OPERATOR_KEY": cells.OPERATOR_KEY}
        others = ",".join(each for each in cells.FEATURES if each != "reasoning")
        asked = {}
        for features, end in ((others, ""), ("reasoning", cells.THINKING)):
            file = Path(made) / f"{len(asked)}.jinja"
            file.write_text(model.template + end, encoding="utf-8")
            server = ServerProcess([*serve, "--chat-template", str(file)], environment)
            servers.enter_context(closing(server))
            asked[features] = f"http://{HOST}:{server.port}"
        for place in places:
            found = {}
            for features, url in asked.items():
                found |= place.measure(url, model.name, str(model.folder), features)
            yield {"client": place.client.name, "version": place.version(), "cells": found}
            print(f"{place.client.name}: {len(found)} cells", file=sys.stderr)


def table(rows: list[dict], known: str = "") -> str:
    """Return the rows as Markdown, errors below them; clients without a row keep theirs in the `known` table."""
    names = [each["client"] for each in rows]
    lines = {}
    for line in known.splitlines():
        if line.startswith("| ") and (name := line.split(" | ")[0][2:]) not in {"client", *names}:
            lines[name] = line
    errors = [each for each in known.splitlines() if each.startswith("- ")]
    errors = [each for each in errors if not any(each.startswith(f"- {name}, ") for name in names)]
    for row in rows:
        told = [row["cells"].get(each, "—") for each in cells.FEATURES]
        shown = " | ".join(each if each in ("yes", "—") else "error" for each in told)
        lines[row["client"]] = f"| {row['client']} | {row['version']} | {shown} |"
        errors += [
            f"- {row['client']}, {feature}: `{each}`"
            for feature, each in zip(cells.FEATURES.values(), told, strict=True)
            if each not in ("yes", "—")
        ]
    head = f"| client | version | {' | '.join(cells.FEATURES.values())} |"
    order = [lines[each.name] for each in CLIENTS if each.name in lines]
    return "\n".join([head, f"|{'---|' * (2 + len(cells.FEATURES))}", *order, "", *errors]).strip()


def write(rows: list[dict]) -> None:
    """Put the rows into the table of the page."""
    begin, end = MARKS
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    known, tail = rest.split(end)
    text = f"{head}{begin}\n\n{table(rows, known)}\n\n{end}{tail}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> int:
    """Measure; return the exit status."""
    options = argparse.ArgumentParser(description=textwrap.dedent(__doc__).partition("\n")[0])
    options.add_argument("--among", help="parts of clients' names, separated by commas")
    options.add_argument("--model", default="quire-tiny", help="as `quire serve` takes it")
    options.add_argument("--chat-template", type=Path, help="a file, in place of the model's own")
    options.add_argument("--cache", type=Path, default=HERE.parents[1] / ".clients")
    how = options.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true")
    how.add_argument("--write", action="store_true")
    asked = options.parse_args()
    parts, names = (asked.among or "").split(","), [each.name for each in CLIENTS]
    among = [
        each
        for each in CLIENTS
        if any(part == each.name if part in names else part in each.name for part in parts)
    ]
    if not among:
        options.error(f"no client of {names} has {asked.among} in its name")
    rows = []
    for row in measured(among, asked.cache.resolve(), asked.model, asked.chat_template):
        rows.append(row)
        if asked.write:
            write([row])
    print(json.dumps(rows) if asked.json else table(rows))
    return 0 if all(said == "yes" for row in rows for said in row["cells"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
