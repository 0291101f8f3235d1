"""A request log like those of several apps at once: shared system prompts and tools, conversations that grow, one-shots.

    python benchmarks/made_log.py requests.jsonl --requests 100000
    command time -v quire lint requests.jsonl

A request has about 4,000 tokens. Texts are paragraphs of Python's own documentation. The same arguments give the same
bytes. Planted are a time in the system prompt of the desk, passages in changing order, and tools in changing order.
"""

import argparse
import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

Body = dict[str, Any]

START_S = 1_790_000_000
SECONDS = 0.7
"""Mean time between two requests."""

OPEN_TALKS = 40
"""Conversations that go on at once."""

PARAGRAPHS = [
    part.strip()
    for name in sorted(topics)
    for part in topics[name].split("\n\n")
    if len(part.strip()) > 120
]


class Talk:
    """A conversation of an app: its head stays, its messages grow by the turn."""

    def __init__(self, app: "App", number: int, rng: random.Random) -> None:
        self.app, self.number, self.rng = app, number, rng
        self.left = rng.randint(*app.turns)
        self.said: list[Body] = []

    def body(self, now_s: float) -> Body:
        """Return the next request."""
        self.left -= 1
        rng, app = self.rng, self.app
        if self.said:
            self.said.append({"role": "assistant", "content": said(rng, app.answer)})
        self.said.append({"role": "user", "content": app.question(rng)})
        body: Body = {"model": app.model, "messages": [*app.head(rng, now_s), *self.said]}
        if app.tools:
            body["tools"] = app.tools_now(rng)
        return body


class App:
    """An app with its own system prompt and tools; `turns` and `answer` are ranges of turns and of characters."""

    model = "large"
    turns = 1, 1
    answer = 200, 900

    def __init__(self, name: str, seed: int, chars: int, num_tools: int = 0) -> None:
        rng = random.Random(seed)
        self.system = f"You are {name}, an assistant of a company.\n\n" + text(rng, chars)
        self.tools = [tool(rng, f"{name}_{number}") for number in range(num_tools)]

    def head(self, rng: random.Random, now_s: float) -> list[Body]:
        """Return the messages before those of the conversation."""
        del rng, now_s
        return [{"role": "system", "content": self.system}]

    def question(self, rng: random.Random) -> str:
        """Return what a user says."""
        return said(rng, (60, 700))

    def tools_now(self, rng: random.Random) -> list[Body]:
        """Return the tools of a request."""
        del rng
        return self.tools


class Coder(App):
    """An agent with many tools, whose results are long."""

    turns = 4, 24
    answer = 120, 400

    def question(self, rng: random.Random) -> str:
        return text(rng, rng.randint(200, 1600))


class Desk(App):
    """A support desk that puts the time into its system prompt."""

    turns = 2, 7

    def head(self, rng: random.Random, now_s: float) -> list[Body]:
        line = f"Now: {int(now_s)}\n"
        return [{"role": "system", "content": line + self.system}]


class Finder(App):
    """Answers from passages, in the order of their scores."""

    model = "small"

    def __init__(self, name: str, seed: int, chars: int, num_tools: int = 0) -> None:
        super().__init__(name, seed, chars, num_tools)
        rng = random.Random(seed + 1)
        self.passages = [text(rng, 1500) for _ in range(400)]

    def question(self, rng: random.Random) -> str:
        topic = rng.randrange(0, 400, 8)
        found = rng.sample(self.passages[topic : topic + 8], 6)
        return "\n\n".join(found) + "\n\nQuestion: " + said(rng, (60, 200))


class Sorter(App):
    """Sorts one text after another; its tools come in any order one time of ten."""

    model = "small"

    def question(self, rng: random.Random) -> str:
        return text(rng, rng.randint(2000, 7000))

    def tools_now(self, rng: random.Random) -> list[Body]:
        return rng.sample(self.tools, len(self.tools)) if rng.random() < 0.1 else self.tools


def apps() -> list[tuple[App, int]]:
    """Return the apps, each with its share of new conversations."""
    return [
        (Coder("coder", 1, 5500, 9), 6),
        (Desk("desk", 2, 8500, 5), 6),
        (Finder("finder", 3, 3000), 9),
        (Sorter("sorter", 4, 5000, 6), 5),
    ]


def requests(count: int, seed: int = 1) -> Iterator[Body]:
    """Yield the records of a log: `time` and `request`."""
    rng = random.Random(seed)
    offered, weights = zip(*apps(), strict=True)
    talks: list[Talk] = []
    now_s = float(START_S)
    for number in range(count):
        now_s += rng.expovariate(1 / SECONDS)
        if len(talks) < OPEN_TALKS:
            talk = Talk(rng.choices(offered, weights)[0], number, random.Random(f"{seed} {number}"))
            talks.append(talk)
        else:
            talk = rng.choice(talks)
        yield {"time": round(now_s, 3), "request": talk.body(now_s)}
        if not talk.left:
            talks.remove(talk)


def text(rng: random.Random, chars: int) -> str:
    """Return paragraphs of about so many characters."""
    parts: list[str] = []
    while chars > 0:
        parts.append(rng.choice(PARAGRAPHS)[: max(chars, 80)])
        chars -= len(parts[-1])
    return "\n\n".join(parts)


def said(rng: random.Random, chars: tuple[int, int]) -> str:
    """Return a few words of a person, of a length in a range."""
    words = " ".join(rng.choice(PARAGRAPHS).split()[: chars[1]])
    return f"{rng.randrange(10**6)}: {textwrap.shorten(words, rng.randint(*chars))}"


def tool(rng: random.Random, name: str) -> Body:
    """Return a tool with a long description and three arguments."""
    fields = {
        key: {"type": "string", "description": said(rng, (40, 90))}
        for key in ("path", "query", "limit")
    }
    function = {
        "name": name,
        "description": said(rng, (200, 600)),
        "parameters": {"type": "object", "properties": fields, "required": ["path"]},
    }
    return {"type": "function", "function": function}


def main() -> None:
    """Write a log."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("file", type=Path)
    asked.add_argument("--requests", type=int, default=100_000)
    asked.add_argument("--seed", type=int, default=1)
    given = asked.parse_args()
    with given.file.open("w", encoding="utf-8") as log:
        for record in requests(given.requests, given.seed):
            log.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
