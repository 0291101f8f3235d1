"""Request logs that real clients write of real servers: the data of `tests/sim/test_client_logs.py`.

    python benchmarks/client_logs.py tests/data/client_logs --clients FOLDER
    python benchmarks/client_logs.py tests/data/client_logs --clients FOLDER --only quire

Starts `quire serve`, vLLM (`.venv-vllm`) and llama-server (`.llama`) with `quire tap` before each, and has clients ask
them, one request at a time. FOLDER has an environment for each client: `openai`, `anthropic`, `litellm`, `otel`
(openai, opentelemetry-sdk, opentelemetry-instrumentation-openai) and `mitmproxy`.

| file | written by |
|---|---|
| `SERVER_tap_CLIENT.jsonl` | `quire tap` before the server |
| `SERVER_CLIENT.jsonl` | a program that writes each body beside the answer, as the client's own objects |
| `quire_litellm.jsonl` | LiteLLM's `standard_logging_object`, one a line |
| `quire_otel.jsonl` | the console exporter of OpenTelemetry |
| `quire_mitmproxy.har` | mitmproxy, a relay that writes HAR files |
| `SERVER_server.log` | the server itself |
| `agent_tap_API.jsonl` | `quire tap` before `quire serve` with a model that calls tools, asked as a coding agent does (`agent_session`) |
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

SYSTEM = "{} keeps the lighthouse. Answer in few words, and say when a ship is late. " * 4
TOOL = {
    "name": "ships",
    "description": "Ships that are due.",
    "parameters": {
        "type": "object",
        "properties": {"day": {"type": "string"}},
        "required": ["day"],
    },
}
LOGGED = re.compile(r" slot |Received request|details: prompt")
"""Lines of servers' logs that tell of requests."""

ASKED = ("Which ship is next?", "And the one behind it?", "Is the lamp lit?")


# -- clients: each runs in an environment of its own and imports nothing of quire ------------------------------------


def note(out, request, response, began):
    """Append a body and its answer to a log, as a program would that logs what it asks."""
    said = response if isinstance(response, (dict, list, str)) else response.model_dump(mode="json")
    record = {
        "time": began,
        "duration_s": time.time() - began,
        "request": request,
        "response": said,
    }
    with Path(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def openai(base, out, system):
    """Ask chats, streamed and whole, with a tool, and a completion; then the same as responses, where they are offered."""
    from openai import NotFoundError, OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key="sk-golden-secret", max_retries=0)
    messages = [{"role": "system", "content": system}]
    for place, asked in enumerate(ASKED):
        messages.append({"role": "user", "content": asked})
        body = {"model": "m", "messages": list(messages), "max_tokens": 6, "temperature": 0}
        if place == 1:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, said = time.time(), client.chat.completions.create(**body)
        if place == 1:
            chunks = list(said)
            text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            said = (
                "".join(f"data: {each.model_dump_json()}\n\n" for each in chunks)
                + "data: [DONE]\n\n"
            )
        else:
            text = said.choices[0].message.content
        note(out, body, said, began)
        messages.append({"role": "assistant", "content": text})
    tool = {"type": "function", "function": TOOL}
    body = {
        "model": "m",
        "messages": messages[:2],
        "tools": [tool],
        "tool_choice": "none",
        "max_tokens": 4,
    }
    for _ in range(2):
        began = time.time()
        note(out, body, client.chat.completions.create(**body), began)
    body, began = {"model": "m", "prompt": system + ASKED[0], "max_tokens": 4}, time.time()
    note(out, body, client.completions.create(**body), began)
    for asked in ASKED[:2]:
        body, began = (
            {"model": "m", "instructions": system, "input": asked, "max_output_tokens": 4},
            time.time(),
        )
        with suppress(NotFoundError):
            note(out, body, client.responses.create(**body), began)


def anthropic(base, out, system):
    """Ask messages with system blocks, a tool and breakpoints."""
    from anthropic import Anthropic

    client = Anthropic(base_url=base, api_key="sk-golden-secret", max_retries=0)
    parts = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    tool = {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "input_schema": TOOL["parameters"],
    }
    messages = []
    for place, asked in enumerate(ASKED):
        messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
        body = {"model": "m", "system": parts, "messages": list(messages), "max_tokens": 6}
        body |= {"tools": [tool], "tool_choice": {"type": "none"}} if place == 2 else {}
        began, said = time.time(), client.messages.create(**body)
        note(out, body, said, began)
        text = "".join(each.text for each in said.content if each.type == "text")
        messages.append({"role": "assistant", "content": text or "-"})


def litellm(base, out, system):
    """Ask chats of LiteLLM, whose own logging payloads are written."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as client
    from litellm.integrations.custom_logger import CustomLogger

    class Log(CustomLogger):
        def log_success_event(self, kwargs, response_obj, start_time, end_time):
            told = dict(kwargs["standard_logging_object"])
            told.pop("response_cost_failure_debug_info", None)  # paths of this machine
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(told, default=str) + "\n")

    client.callbacks = [Log()]
    messages = [{"role": "system", "content": system}]
    for place, asked in enumerate(ASKED):
        messages.append({"role": "user", "content": asked})
        options = {
            "api_base": f"{base}/v1",
            "api_key": "sk-golden-secret",
            "max_tokens": 6,
            "temperature": 0,
        }
        said = client.completion(model="openai/m", messages=list(messages), **options)
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
        until = time.monotonic() + 10
        while time.monotonic() < until and lines_of(out) <= place:
            time.sleep(0.05)


def lines_of(path):
    """Return the lines of a file, 0 if there is none."""
    return len(Path(path).read_text(encoding="utf-8").splitlines()) if Path(path).exists() else 0


def otel(base, out, system):
    """Ask chats under OpenTelemetry's instrumentation of the openai client."""
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    with Path(out).open("w", encoding="utf-8") as file:
        provider = TracerProvider()
        exporter = ConsoleSpanExporter(
            out=file, formatter=lambda span: span.to_json(indent=None) + "\n"
        )
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        with TemporaryDirectory() as scratch:
            openai(base, Path(scratch) / "log", system)
        provider.shutdown()


# -- servers ---------------------------------------------------------------------------------------------------------


def run(clients, name, base, out):
    """Run a client in its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(clients / name / "bin/python"), __file__, "--as", name, base, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")


def recorded(server, folder, clients, tools):
    """Have the clients ask a server, and keep their logs."""
    from quire import demo_model

    model, vllm = str(demo_model()), tools / ".venv-vllm/bin/python"
    quiet = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": "",
                          "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}  # fmt: skip
    command, environment, asking = {
        "quire": ([sys.executable, "-m", "quire", "serve", "--model", model, "--name", "m", "--kv-memory", "64MiB"],
                  None, ("openai", "anthropic", "litellm", "otel", "mitmproxy")),
        "vllm": ([str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m",
                  "--enforce-eager", "--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "200",
                  "--enable-prompt-tokens-details", "--enable-log-requests"], quiet, ("openai", "anthropic")),
        "llama": ([str(tools / ".llama/llama-server"), "-m", str(tools / ".llama/model.gguf"), "--threads", "1",
                   "--host", "127.0.0.1", "--ctx-size", "8192", "--alias", "m", "--jinja"], None, ("openai", "anthropic")),
    }[server]  # fmt: skip
    groups = (
        [asking] if server == "vllm" else [(client,) for client in asking]
    )  # vLLM takes minutes to start
    for group in groups:
        with served(command, environment) as process:
            for client in group:
                asked(server, client, process.port, folder, clients)
            if server != "quire" and "openai" in group:
                lines = [line for line in process.said().splitlines() if LOGGED.search(line)]
                (folder / f"{server}_server.log").write_text(
                    "\n".join(lines) + "\n", encoding="utf-8"
                )


def recorded_agent(folder, num_turns=5, num_lines=3):
    """Have a coding agent's sessions pass a tap, and keep its logs. The clients are those of this environment."""
    from agent_session import APIS, NAME, SMALL
    from made_agent import made_model
    from transformers import AutoTokenizer

    from quire.cli.assistant import assistant_model

    tokenizer = AutoTokenizer.from_pretrained(assistant_model())
    with TemporaryDirectory() as model:
        made_model(tokenizer).save_pretrained(model)
        tokenizer.save_pretrained(model)
        command = [sys.executable, "-m", "quire", "serve", "--model", model, "--dtype", "float32"]
        command += ["--name", NAME, "--name", SMALL, "--kv-memory", "64MiB"]
        with served(command) as process:
            for name in ("messages", "chats"):
                log = folder / f"agent_tap_{name}.jsonl"
                log.unlink(missing_ok=True)
                with tapped(log, process.port) as tap:
                    session = APIS[name](f"http://127.0.0.1:{tap.port}", num_lines)
                    for _ in range(num_turns):
                        session.ask()
                    time.sleep(0.5)
                log.chmod(0o644)


def asked(server, client, port, folder, clients):
    """Have one client ask a server, by a relay that keeps a log of its own where there is one."""
    log = folder / f"{server}_{client}.jsonl"
    log.unlink(missing_ok=True)
    if client == "mitmproxy":
        with (
            closing(Har(clients, port, log.with_suffix(".har"))) as relay,
            TemporaryDirectory() as scratch,
        ):
            run(clients, "anthropic", f"http://127.0.0.1:{relay.port}", Path(scratch) / "log")
    elif client in {"openai", "anthropic"}:
        tap_log = folder / f"{server}_tap_{client}.jsonl"
        tap_log.unlink(missing_ok=True)
        with tapped(tap_log, port) as tap:
            run(clients, client, f"http://127.0.0.1:{tap.port}", log)
            time.sleep(0.5)
        tap_log.chmod(0o644)
    else:
        run(clients, client, f"http://127.0.0.1:{port}", log)


def served(command, environment=None):
    """Return a server as a process, once it answers."""
    from quire.cli.server_process import ServerProcess

    return closing(ServerProcess(command, environment))


def tapped(log, port):
    """Return a tap before a server that keeps a log, as a process."""
    words = ["-m", "quire", "tap", "--log", str(log), "--upstream", f"http://127.0.0.1:{port}"]
    return served([sys.executable, *words, "--private"])


class Har:
    """mitmproxy before a server, which writes what passes as a HAR file when it ends."""

    def __init__(self, clients, port, har):
        self.port = port + 1
        command = [
            str(clients / "mitmproxy/bin/mitmdump"),
            "--mode",
            f"reverse:http://127.0.0.1:{port}",
        ]
        command += [
            "--listen-host",
            "127.0.0.1",
            "--listen-port",
            str(self.port),
            "--set",
            f"hardump={har}",
            "--quiet",
        ]
        self._process = subprocess.Popen(command)
        time.sleep(5)

    def close(self):
        """End it, and wait for its file."""
        self._process.terminate()
        self._process.wait(20)


def main():
    """Run a client, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--clients", type=Path)
    parser.add_argument(
        "--tools", type=Path, default=Path(), help="the folder with .venv-vllm and .llama"
    )
    parser.add_argument("--only", choices=("quire", "vllm", "llama", "agent"))
    parser.add_argument("--as", nargs=3, dest="client", metavar=("CLIENT", "BASE", "OUT"))
    args = parser.parse_args()
    if args.client:
        name, base, out = args.client
        ask = {"openai": openai, "anthropic": anthropic, "litellm": litellm, "otel": otel}[name]
        ask(base, out, SYSTEM.replace("{}", name))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for server in ("quire", "vllm", "llama", "agent") if args.only is None else (args.only,):
        if server == "agent":
            recorded_agent(args.folder)
        else:
            recorded(server, args.folder, args.clients, args.tools)


if __name__ == "__main__":
    main()
