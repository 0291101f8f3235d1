"""A log like those that other linters show of themselves, and the order of tools, which they miss."""

import json
import random
from datetime import UTC, datetime, timedelta

import planted
from log_help import TOOLS, chat, lines
from test_lint import run

SHOPS = ("Nordlicht", "Harbour Mills", "Copper & Sons", "Yarnhouse")


def support_log(*, has_changes=True, has_tools=False, count=60):
    """Chats of four shops, each with a time, an identifier and an address before its rules."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        shop = SHOPS[number % 4]
        sent = datetime(2026, 9, 1, 7, tzinfo=UTC) + timedelta(minutes=number)
        head = (
            f"Time: {sent:%Y-%m-%dT%H:%M:%SZ}\nRequest: req_{rng.getrandbits(40):010x}\n"
            f"user: buyer{number}@example.org\n"
        )
        own = random.Random(shop)
        rules = "\n".join(planted.sentence(own) for _ in range(9))
        tools = rng.sample(TOOLS, len(TOOLS)) if has_tools else None
        system = head * has_changes + rules
        question = f"Where is order {number * 7919}?"
        found.append({"request_id": f"r{number}"} | chat(question, system=system, tools=tools))
    return found


def told(path, log, *words):
    document = json.loads(run(lines(path, log), "--json", *words).stdout)
    losses = document["losses"]
    causes = {each["cause"] for loss in losses for each in (loss, *loss["behind"])}
    return document, causes


def test_each_of_three_lines_in_one_prompt_is_named(tmp_path):
    document, causes = told(tmp_path / "log", support_log())
    assert causes == {"time", "identifier", "user-data"}
    (first,) = [each for each in document["causes"] if each["requests"]]
    assert (first["cause"], first["requests"]) == ("time", 56)
    assert first["example"]["old"][:5] != first["example"]["new"][:5]
    mending = document["mending"]
    assert mending["before"]["hit_tokens"] < 0.1 * document["prompt_tokens"]
    assert mending["together"]["hit_tokens"] > 0.6 * document["prompt_tokens"]


def test_the_order_of_tools_is_named_before_them(tmp_path):
    document, causes = told(tmp_path / "log", support_log(has_tools=True))
    assert causes == {"tool-order", "time", "identifier", "user-data"}
    first = max(document["causes"], key=lambda each: each["tokens"])
    assert first["cause"] == "tool-order"
    assert all(path.startswith("tools[") for path in first["paths"])


def test_the_rest_of_a_block_is_told_apart_from_losses(tmp_path):
    document, causes = told(tmp_path / "log", support_log(), "--server", "vllm")
    assert causes == {"time", "identifier", "user-data"}
    assert document["rounding_tokens"] > 0
    whole = document["hit_tokens"] + document["rounding_tokens"] + document["lost_tokens"]
    assert whole <= document["prompt_tokens"]


def test_the_same_log_without_the_lines_loses_nothing(tmp_path):
    document, causes = told(tmp_path / "log", support_log(has_changes=False))
    assert (document["lost_tokens"], causes) == (0, set())
