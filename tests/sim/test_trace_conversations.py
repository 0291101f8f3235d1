"""Conversations as traces: each answer is a request whose prompt is all before it."""

import json
import sys

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.errors import ConfigError, TraceError
from quire_sim.trace import Findings, chunks, open_trace, save_trace

TINY = quire.demo_model()

CHAT = [("human", "x" * 90), ("gpt", "y" * 50), ("human", "z"), ("gpt", "w" * 20)]


def sharegpt(turns, name="a"):
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in turns]}


def openai(turns, name="a"):
    roles = {"human": "user", "gpt": "assistant"}
    said = [{"role": roles.get(who, who), "content": text} for who, text in turns]
    return {"id": name, "messages": said}


def as_list(path, talks):
    path.write_text(json.dumps(talks, indent=1))
    return path


def as_lines(path, talks):
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "talks.json"


@pytest.mark.parametrize("write", [as_list, as_lines])
@pytest.mark.parametrize("form", [sharegpt, openai])
def test_every_answer_is_a_request_whose_prompt_is_all_before_it(path, write, form):
    trace = open_trace(write(path, [form(CHAT)]))
    first, second = trace
    assert (trace.format, trace.block_size) == ("conversations", 16)
    assert first.prompt_tokens == len("user\n" + "x" * 90 + "\nassistant\n")
    assert first.output_tokens == len("y" * 50 + "\n")
    assert second.prompt_tokens == first.prompt_tokens + 51 + len("user\nz\nassistant\n")
    assert first.blocks.tolist() == list(range(first.prompt_tokens // 16))
    assert second.blocks.tolist() == list(range(second.prompt_tokens // 16))
    assert first.session == second.session


def test_conversations_share_the_blocks_that_they_begin_with(path):
    system = ("system", "s" * 100)
    talks = [openai([system, ("human", ask * 30), ("gpt", "yes")]) for ask in "ab"]
    first, second = open_trace(as_lines(path, talks))
    assert first.blocks[:7].tolist() == second.blocks[:7].tolist() == list(range(7))
    assert not set(first.blocks[7:].tolist()) & set(second.blocks[7:].tolist())


def test_a_tokenizer_makes_the_tokens_if_one_is_named(path):
    import tokenizers

    as_lines(path, [sharegpt([("human", "Once upon a time there was"), ("gpt", "a cat")])])
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    pieces = ("user\n", "Once upon a time there was\n", "assistant\n")
    expected = sum(len(tokenizer.encode(p, add_special_tokens=False).ids) for p in pieces)
    for named in (TINY, TINY / "tokenizer.json"):
        (request,) = open_trace(path, tokenizer=named, block_size=4)
        assert request.prompt_tokens == expected
        assert request.num_blocks == expected // 4


def test_turns_come_in_order_and_times_rise_and_are_the_seeds(path):
    as_lines(path, [sharegpt(CHAT, str(n)) for n in range(200)])
    rows = list(open_trace(path, seed=3))
    times = [row.time_s for row in rows]
    assert times == sorted(times)
    assert times == [row.time_s for row in open_trace(path, seed=3)]
    assert times != [row.time_s for row in open_trace(path, seed=4)]
    for session in {row.session for row in rows}:
        first, second = (row for row in rows if row.session == session)
        assert second.row == first.row + 1
        assert second.time_s > first.time_s + first.output_tokens / 50


def test_conversations_begin_once_a_second_and_people_think_half_a_minute(path):
    as_lines(path, [sharegpt(CHAT, str(n)) for n in range(2000)])
    rows = list(open_trace(path))
    firsts = [row for row in rows if row.row % 2]
    assert firsts[-1].time_s / 2000 == pytest.approx(1, rel=0.1)
    begin = {row.session: row.time_s for row in firsts}
    waits = [row.time_s - begin[row.session] for row in rows if not row.row % 2]
    assert sum(waits) / len(waits) == pytest.approx(30 + 51 / 50, rel=0.1)


def test_nothing_of_the_content_is_in_the_trace(path, tmp_path):
    as_lines(path, [sharegpt([("human", "my secret plan " * 9), ("gpt", "ok")], "user-77")])
    saved = tmp_path / "saved.jsonl"
    save_trace(open_trace(path), saved)
    assert b"secret" not in saved.read_bytes()
    assert b"user-77" not in saved.read_bytes()


def test_parts_that_are_no_text_are_left_out_and_counted(path):
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    content = [{"type": "text", "text": "look"}, image]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    said = [{"role": "user", "content": content}, call, {"role": "tool", "content": "3"}]
    as_lines(path, [{"messages": [*said, {"role": "assistant", "content": "3"}]}])
    report = Findings()
    first, second = open_trace(path).read(report)
    assert first.prompt_tokens == len("user\nlook\nassistant\n")
    assert first.output_tokens == len('[{"name": "f"}]\n')
    assert second.prompt_tokens == len(
        'user\nlook\nassistant\n[{"name": "f"}]\ntool\n3\nassistant\n'
    )
    assert "1 parts that are no text are left out" in report.notes


def test_an_answer_without_a_prompt_is_no_request(path):
    as_lines(path, [sharegpt([("gpt", "hi"), ("human", "hi"), ("gpt", "yes")])])
    report = Findings()
    (request,) = open_trace(path).read(report)
    assert (request.row, report.rows, report.without_prompt) == (2, 2, 1)


def test_a_long_list_is_read_in_pieces(path, monkeypatch):
    talks = [sharegpt([("human", "é]}[{" * n), ("gpt", '"\\')], str(n)) for n in range(50)]
    whole = [row.prompt_tokens for row in open_trace(as_list(path, talks))]
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 97)
    path.write_text(json.dumps(talks, ensure_ascii=False))
    assert [row.prompt_tokens for row in open_trace(path, format="conversations")] == whole


BAD = {
    "no list": ('{"conversations": 5}', "conversation 2: no list of conversations or messages"),
    "other keys": ('{"text": "a"}', "conversation 2: no list of .*; its keys are text"),
    "no role": ('{"messages": [{"content": "a"}]}', "conversation 2: message 1 has no role"),
    "broken": ('{"messages": [', r"conversation 2: not JSON"),
    "a number": ("3", "conversation 2: an object is expected, got '3"),
    "deep": ('{"a": ' + "[" * 100_000, "conversation 2: not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_conversation_is_refused_with_its_line_number(path, case):
    line, why = BAD[case]
    path.write_text(json.dumps(sharegpt(CHAT)) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=why):
        list(open_trace(path))


def test_a_list_that_breaks_off_between_conversations_is_refused(path):
    path.write_text("[" + json.dumps(sharegpt(CHAT)) + ",\n")
    with pytest.raises(TraceError, match="the file ends within the list"):
        list(open_trace(path))


def test_conversations_without_answers_are_refused(path):
    as_lines(path, [sharegpt(CHAT[:1])])
    with pytest.raises(TraceError, match="none of its conversations has an answer"):
        list(open_trace(path))


def test_a_tokenizer_that_cannot_be_had_is_refused(path, monkeypatch, tmp_path):
    as_lines(path, [sharegpt(CHAT)])
    with pytest.raises(ConfigError, match="no tokenizer at"):
        open_trace(path, tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="is no tokenizer"):
        open_trace(path, tokenizer=path)
    with pytest.raises(ConfigError, match="a seed is a whole number from 0, got -1"):
        open_trace(path, seed=-1)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install"):
        open_trace(path, tokenizer=TINY)


def test_trace_info_and_convert_take_a_tokenizer_and_a_seed(path, tmp_path):
    as_lines(path, [sharegpt(CHAT)])
    run = CliRunner().invoke
    options = ["--tokenizer", str(TINY), "--seed", "5"]
    shown = run(app, ["trace", "info", str(path), *options])
    assert "times are made up (seed 5)" in shown.output
    target = tmp_path / "made.jsonl"
    assert run(app, ["trace", "convert", str(path), str(target), *options]).exit_code == 0
    made, direct = list(open_trace(target)), list(open_trace(path, tokenizer=TINY, seed=5))
    assert [row.time_s for row in made] == [row.time_s for row in direct]
    assert [row.prompt_tokens for row in made] == [row.prompt_tokens for row in direct]
