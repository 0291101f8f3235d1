"""Request logs with planted causes: the place and the cause of each loss are known."""

import copy
import json
import random
import uuid

from log_help import TOOLS, chat

PARAGRAPHS = [
    f"Rule {n}: a clerk of branch {n * 7} answers in {n + 2} short sentences and names the shelf."
    for n in range(12)
]
INTRO = "You are a careful assistant of a shop.\n"
REST = "\n" + "\n".join(PARAGRAPHS)
IMAGE = "data:image/png;base64,"
NAMES = ("Ann Smith", "Bob Stone", "Cleo Marsh", "Dan Wood", "Eve Hill", "Finn Lake", "Gus Field")


def question(n):
    return (
        f"Question {n * 37 % 1009}: "
        + random.Random(n).choice(("where", "when", "why"))
        + f" {n * 91 % 997}?"
    )


def _system(line):
    return lambda n, rng: chat(question(n), system=INTRO + line(n, rng) + REST, tools=TOOLS)


def _shuffled(n, rng):
    tools = TOOLS[:]
    rng.shuffle(tools)
    tools = tools if n % 2 else tools[::-1]
    return chat(question(n), system=INTRO + REST, tools=tools)


def _keys(n, rng):
    tools = copy.deepcopy(TOOLS)
    if n % 2:
        tools[1]["function"]["parameters"] = dict(
            reversed(tools[1]["function"]["parameters"].items())
        )
    return chat(question(n), system=INTRO + REST, tools=tools)


def _passages(n, rng):
    parts = PARAGRAPHS[:]
    rng.shuffle(parts)
    return chat(question(n), system=INTRO + "\n\n".join(parts), tools=TOOLS)


def _other_tools(n, rng):
    return chat(question(n), system=INTRO + REST, tools=TOOLS if n % 2 else TOOLS[1:])


PLANTED = {
    "time": ("messages[0].content", _system(lambda n, rng: f"Now: 2026-11-{1 + n % 28:02}T0{n % 9}:{n % 60:02}:{n * 7 % 60:02}Z")),
    "time ": ("messages[0].content", _system(lambda n, rng: f"Today is {('Monday', 'Tuesday', 'Friday')[n % 3]}, March {1 + n % 28}, 2026.")),
    "time  ": ("messages[0].content", _system(lambda n, rng: f"at={1700000000 + n * 977}")),
    "identifier": ("messages[0].content", _system(lambda n, rng: f"Request {uuid.UUID(int=rng.getrandbits(128))}")),
    "identifier ": ("messages[0].content", _system(lambda n, rng: f"trace: req_{rng.getrandbits(60):015x}")),
    "counter": ("messages[0].content", _system(lambda n, rng: f"This is message number {n + 1}.")),
    "user-data": ("messages[0].content", _system(lambda n, rng: f"User name: {NAMES[n % 7]}")),
    "header-line": ("messages[0].content", lambda n, rng: chat(question(n), tools=TOOLS, system=f"x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={rng.getrandbits(20):05x};\n" + INTRO + REST)),
    "whitespace": ("messages[0].content", _system(lambda n, rng: "Be  brief, please, always." if n % 2 else "Be brief, please, always.")),
    "line-ends": ("messages[0].content", _system(lambda n, rng: "Be brief.\r\nAlways, and to everyone." if n % 2 else "Be brief.\nAlways, and to everyone.")),
    "unicode": ("messages[0].content", _system(lambda n, rng: "The cafe\u0301 is open to everyone." if n % 2 else "The caf\u00e9 is open to everyone.")),
    "tool-order": ("tools[", _shuffled),
    "tool-set": ("tools[", _other_tools),
    "key-order": ("tools[1].function.parameters", _keys),
    "passage-order": ("messages[0].content", _passages),
}  # fmt: skip
"""Causes, each with the begin of its place and the body of request n. Blanks behind a name tell variants apart."""


def planted(name, count=60, seed=1):
    """Return a log with one cause alone."""
    rng = random.Random(seed)
    return [PLANTED[name][1](n, rng) for n in range(count)]


def clean(count=60):
    """Return a log in which nothing is lost: conversations that go on, over one system prompt and the same tools."""
    found = []
    for n in range(count // 3):
        said = [question(n)]
        for turn in range(3):
            found.append(chat(*said, system=INTRO + REST, tools=TOOLS))
            said += [
                f"It is {n * 17 + turn} of {json.dumps(NAMES[n % 7])}.",
                question(100 + n * 3 + turn),
            ]
    return found


def talk(n, turns, change):
    """Return the requests of a conversation; `change` returns the messages of a turn before its question."""
    said, found = [], []
    for turn in range(turns):
        said.append(
            {"role": "user", "content": f"{question(n * 50 + turn)} " + PARAGRAPHS[(n + turn) % 12]}
        )
        messages = [{"role": "system", "content": INTRO + REST}, *change(turn, copy.deepcopy(said))]
        found.append({"model": "m", "messages": messages})
        said.append(
            {
                "role": "assistant",
                "content": f"<think>{question(turn + n)} {PARAGRAPHS[turn % 12]}</think>It is {n * 13 + turn}. {PARAGRAPHS[(n * 5 + turn) % 12]}",
            }
        )
    return found
