"""Kinds of prompts beside earlier ones, and their first difference."""

import pytest

from quire_sim.lint.texts import common_prefix
from quire_sim.logs.entries import request_of
from quire_sim.logs.records import LogRecord
from quire_sim.tap.kinds import RecentPrompts

SYSTEM = "You are a careful assistant. " * 40


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


TALK = [user("Read a.py."), bot("Yes."), user("And b.py."), bot("Done."), user("Go on.")]


class Line:
    def __init__(self):
        self.prompts, self.row = RecentPrompts(most=16), 0

    def add(self, messages, system=SYSTEM, **more):
        self.row += 1
        head = [{"role": "system", "content": system}] if system else []
        fields = {"time": 1e9 + self.row, "request": {"model": "m", "messages": [*head, *messages]} | more}  # fmt: skip
        return self.prompts.add(request_of(LogRecord(self.row, fields)))


@pytest.fixture
def line():
    made = Line()
    made.add(TALK)
    return made


def test_a_prompt_that_goes_on_is_a_continuation(line):
    found = line.add([*TALK, bot("So."), user("More.")])
    assert (found.kind, found.nearest, found.difference) == ("continuation", 1, None)
    assert found.num_equal == len(SYSTEM) + sum(len(each["content"]) for each in TALK)


def test_a_result_of_a_tool_is_a_round_trip(line):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    more = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "4"}]  # fmt: skip
    assert line.add([*TALK, *more]).kind == "tool round trip"


def test_a_changed_system_text_is_a_rewrite_at_its_first_character(line):
    found = line.add(TALK, system=SYSTEM[:100] + "?" + SYSTEM[101:])
    assert (found.kind, found.num_equal) == ("rewrite", 100)
    difference = found.difference
    assert (difference.path, difference.at) == ("messages[0].content", 100)
    assert "?" in difference.this
    assert "?" not in difference.earlier
    behind = sum(len(each["content"]) for each in TALK)
    assert difference.num_equal_behind == len(SYSTEM) - 101 + behind


def test_a_changed_turn_is_a_rewrite(line):
    found = line.add([*TALK[:2], user("And c.py."), *TALK[3:]])
    assert (found.kind, found.difference.path, found.difference.at) == ("rewrite", "messages[3].content", 4)  # fmt: skip


def test_tools_in_another_order_are_a_rewrite():
    line = Line()
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    line.add(TALK, tools=tools)
    found = line.add(TALK, tools=tools[::-1])
    assert (found.kind, found.difference.path) == ("rewrite", "tools[0]")


def test_a_shorter_history_with_a_summary_is_a_compaction(line):
    assert (
        line.add([user("Summary of the work: a.py was read."), user("Next.")]).kind == "compaction"
    )
    assert line.add(TALK[2:]).kind == "compaction"


def test_the_same_prompt_is_a_repeat(line):
    assert line.add(TALK).kind == "repeat"


def test_another_talk_with_the_same_system_text_is_a_new_chat(line):
    found = line.add([user("What is the weather?")])
    assert (found.kind, found.num_equal) == ("new chat", len(SYSTEM))


def test_a_short_prompt_beside_a_talk_is_a_side_request_and_a_long_one_is_cold(line):
    assert line.add([user("Name this talk.")], system="Write a title.").kind == "side request"
    assert line.add([user("x" * 3000)], system="Other.").kind == "cold"


def test_another_model_shares_nothing(line):
    assert line.add(TALK, model="other").num_equal == 0


def test_the_nearest_prompt_is_one_of_the_same_talk():
    line = Line()
    line.add(TALK, system="id=1 " + SYSTEM)
    line.add([user("Other talk.")], system="id=2 " + SYSTEM)
    found = line.add(TALK, system="id=3 " + SYSTEM)
    assert (found.kind, found.nearest) == ("rewrite", 1)


def test_old_prompts_are_forgotten():
    line = Line()
    line.add(TALK)
    for at in range(40):
        line.add([user(f"Talk {at}")], system=f"{at}")
    assert line.add(TALK).num_equal == 0
    assert len(line.prompts._prompts) == 16
    assert sum(len(each) for each in line.prompts._by_key.values()) <= 16 * 8


@pytest.mark.parametrize(("one", "other", "num"), [("", "", 0), ("a", "", 0), ("ab", "ab", 2), ("abc", "abd", 2), ("xa", "ya", 0), ("a" * 99, "a" * 70 + "b", 70)])  # fmt: skip
def test_equal_characters_are_counted(one, other, num):
    assert common_prefix(one, other) == num
