"""Request logs in every format: one request is one row, and what cannot be read is counted."""

import gzip
import json

import pytest
from log_help import chat, lines

from quire.errors import TraceError
from quire_sim.logs import open_log

BODIES = [chat("a"), chat("b", "c", "d")]
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 50, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
}  # fmt: skip
CLAUDE = {
    "model": "claude-x",
    "max_tokens": 5,
    "system": "s",
    "messages": [{"role": "user", "content": "a"}],
}
CLAUDE_ANSWER = {
    "content": [{"type": "text", "text": "yes"}],
    "usage": {"input_tokens": 10, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 20,
              "cache_creation": {"ephemeral_1h_input_tokens": 20}, "output_tokens": 2},
}  # fmt: skip
STREAM = (
    'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":10,'
    '"cache_read_input_tokens":30,"cache_creation_input_tokens":0,"output_tokens":1}}}\n\n'
    'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"yes"}}\n\n'
    'data: {"type":"message_delta","delta":{},"usage":{"output_tokens":7}}\n\n'
)


def read(path, name=None):
    log = open_log(path, format=name)
    return log, list(log)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", ["lines", "list", "indented", "gzip"])
def test_bodies_are_a_request_each_in_lines_and_in_a_list(tmp_path, form, count):
    path, bodies = tmp_path / "log", BODIES[:count]
    text = "".join(json.dumps(each) + "\n" for each in bodies)
    text = {"list": json.dumps(bodies), "indented": json.dumps(bodies, indent=2)}.get(form, text)
    path.write_bytes(gzip.compress(text.encode()) if form == "gzip" else text.encode())
    log, found = read(path)
    assert log.format == "requests"
    assert [each.body for each in found] == bodies
    assert [each.row for each in found] == [1, 2][:count]
    assert not log.unread.total


WRAPPED = {
    "request and response": ({"request": BODIES[0], "response": ANSWER, "time": 1.5e9}, 32),
    "a body as text": ({"request": json.dumps(BODIES[0]), "response": json.dumps(ANSWER), "time": "2017-07-14T02:40:00Z"}, 32),
    "a batch's input": ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODIES[0]}, None),
    "litellm": ({"call_type": "acompletion", "model": "m", "messages": BODIES[0]["messages"], "response": ANSWER,
                 "startTime": 1.5e9, "endTime": 1500000001.5, "end_user": "u"}, 32),
    "langfuse": ({"type": "GENERATION", "model": "m", "input": BODIES[0]["messages"], "output": {"content": "yes"},
                  "startTime": "2017-07-14T02:40:00.000Z", "usageDetails": {"input": 50, "output": 2, "input_cached_tokens": 32}}, 32),
    "har": ({"log": {"entries": [{"startedDateTime": "2017-07-14T02:40:00Z", "request": {
        "url": "https://a/v1/chat/completions", "postData": {"text": json.dumps(BODIES[0])}},
        "response": {"content": {"text": json.dumps(ANSWER)}}}]}}, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_a_body_is_found_with_its_answer_time_and_usage(tmp_path, name):
    record, cached = WRAPPED[name]
    _, (request,) = read(lines(tmp_path / "log", [record]))
    assert [each["content"] for each in request.body["messages"]][-1] == "a"
    assert (request.api, request.model) == ("chat", "m")
    assert request.usage.cached_tokens == cached
    if cached is not None:
        assert request.time_s == 1.5e9
        assert (request.answer, request.usage.prompt_tokens, request.usage.output_tokens) == (
            "yes",
            50,
            2,
        )


def test_usage_of_anthropic_counts_what_was_read_and_written(tmp_path):
    _, (request,) = read(lines(tmp_path / "log", [{"request": CLAUDE, "response": CLAUDE_ANSWER}]))
    assert request.api == "messages"
    assert request.usage.prompt_tokens == 60
    assert (request.usage.cached_tokens, request.usage.written_tokens) == (30, 20)
    assert request.usage.written_1h_tokens == 20


def test_a_streamed_answer_tells_its_text_and_usage(tmp_path):
    _, (request,) = read(lines(tmp_path / "log", [{"request": CLAUDE, "response": STREAM}]))
    assert request.answer == "yes"
    assert (
        request.usage.prompt_tokens,
        request.usage.cached_tokens,
        request.usage.output_tokens,
    ) == (40, 30, 7)


def claude_code_lines():
    common = {"sessionId": "s", "version": "2"}
    user = {
        "type": "user",
        "uuid": "1",
        "parentUuid": None,
        "message": {"role": "user", "content": "hi"},
    }
    said = {
        "id": "msg_1",
        "role": "assistant",
        "model": "claude-x",
        "usage": CLAUDE_ANSWER["usage"],
    }
    first = {"type": "assistant", "uuid": "2", "parentUuid": "1", "timestamp": "2026-01-01T00:00:00Z",
             "message": said | {"content": [{"type": "text", "text": "let me"}]}}  # fmt: skip
    second = {"type": "assistant", "uuid": "3", "parentUuid": "2",
              "message": said | {"content": [{"type": "tool_use", "id": "t", "name": "ls", "input": {}}]}}  # fmt: skip
    result = {"type": "user", "uuid": "4", "parentUuid": "3", "message": {
        "role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}}  # fmt: skip
    last = {"type": "assistant", "uuid": "5", "parentUuid": "4",
            "message": said | {"id": "msg_2", "content": [{"type": "text", "text": "done"}]}}  # fmt: skip
    return [
        common | each
        for each in ({"type": "summary", "leafUuid": "x"}, user, first, second, result, last)
    ]


def test_a_session_of_claude_code_has_a_request_for_each_answer(tmp_path):
    log, (first, second) = read(lines(tmp_path / "log", claude_code_lines()))
    assert log.format == "claude-code"
    assert [each.path for each in first.sections] == ["messages[0].content[0]"]
    assert [(each.role, each.kind) for each in second.sections] == [
        ("user", "text"), ("assistant", "text"), ("assistant", "call"), ("tool", "result"),
    ]  # fmt: skip
    assert (second.session, second.usage.cached_tokens) == ("s", 30)


def codex_lines():
    def item(**payload):
        return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}

    def counts(total):
        info = {"total_token_usage": {"input_tokens": total},
                "last_token_usage": {"input_tokens": 40, "cached_input_tokens": 16, "output_tokens": 3}}  # fmt: skip
        return {"type": "event_msg", "payload": {"type": "token_count", "info": info}}

    user = item(type="message", role="user", content=[{"type": "input_text", "text": "hi"}])
    call = item(type="function_call", call_id="c", name="ls", arguments="{}")
    output = item(type="function_call_output", call_id="c", output="x")
    said = item(type="message", role="assistant", content=[{"type": "output_text", "text": "done"}])
    meta = {"type": "session_meta", "payload": {"id": "s", "instructions": "Be brief."}}
    return [meta, user, call, counts(40), output, counts(40), said, counts(80), counts(80)]


def test_a_rollout_of_codex_has_a_request_for_each_count_of_tokens(tmp_path):
    log, (first, second) = read(lines(tmp_path / "log", codex_lines()))
    assert log.format == "codex"
    assert [each.role for each in first.sections] == ["system", "user"]
    assert [each.kind for each in second.sections] == ["text", "text", "call", "result"]
    assert (second.usage.cached_tokens, second.session) == (16, "s")


def span(**attributes):
    attributes = {name.replace("_x_", "."): value for name, value in attributes.items()}
    listed = [{"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
              for name, value in attributes.items()]  # fmt: skip
    return {"spanId": "1", "startTimeUnixNano": "1500000000000000000", "endTimeUnixNano": "1500000001000000000",
            "attributes": listed}  # fmt: skip


def test_spans_of_otel_are_requests_with_their_prompts_and_usage(tmp_path):
    messages = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    good = span(gen_ai_x_request_x_model="m", **{
        "gen_ai.input.messages": json.dumps(messages), "gen_ai.usage.input_tokens": 40,
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.usage.cache_read.input_tokens": 16})  # fmt: skip
    empty = span(**{"gen_ai.request.model": "m"})
    record = {
        "resourceSpans": [
            {"scopeSpans": [{"spans": [good, empty, {"spanId": "2", "attributes": []}]}]}
        ]
    }
    log, (request,) = read(lines(tmp_path / "log", [record]))
    assert [each.text for each in request.sections] == ["Be brief.", "hi"]
    assert (request.model, request.time_s, request.duration_s) == ("m", 1.5e9, 1.0)
    assert (request.usage.prompt_tokens, request.usage.cached_tokens) == (40, 16)
    assert log.unread.total == 1


def test_conversations_have_a_request_for_each_answer(tmp_path):
    talk = {"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"},
                                         {"from": "human", "value": "no"}, {"from": "gpt", "value": "so"}]}  # fmt: skip
    log, found = read(lines(tmp_path / "log", [talk]))
    assert log.format == "conversations"
    assert [len(each.sections) for each in found] == [1, 3]
    assert [each.answer for each in found] == ["yes", "so"]


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "a b"}\n{"prompt": "c"}\n', "a b\nc\n", '[{"prompt": "a b"}, {"text": "c"}]'],
)
def test_plain_prompts_are_requests(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text)
    log, found = read(path)
    assert log.format == "prompts"
    assert [each.sections[0].text for each in found] == ["a b", "c"]


LLAMA = """\
slot launch_slot_: id  0 | task 0 | processing task
slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 100
slot print_timing: id  0 | task 0 |
prompt eval time =     100.00 ms /    60 tokens (    1.67 ms per token,   600.00 tokens per second)
       eval time =      50.00 ms /     5 tokens (   10.00 ms per token,   100.00 tokens per second)
"""


def test_a_log_of_llama_server_has_the_counts_of_each_task(tmp_path):
    path = tmp_path / "log"
    path.write_text(LLAMA)
    log, (request,) = read(path)
    assert log.format == "llama-server"
    assert (
        request.usage.prompt_tokens,
        request.usage.cached_tokens,
        request.usage.output_tokens,
    ) == (100, 40, 5)
    assert request.duration_s == pytest.approx(0.15)


def test_a_log_of_vllm_has_the_prompts_that_it_shows(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "INFO 11-30 05:51:30 [logger.py:39] Received request cmpl-1: prompt: 'it\\'s\\na', params: SamplingParams(n=1)\n"
        "INFO 11-30 05:51:31 [logger.py:39] Received request cmpl-2: params: SamplingParams(n=1)\n"
    )
    log, (request,) = read(path)
    assert request.sections[0].text == "it's\na"
    assert log.unread.total == 1


def test_an_export_of_usage_has_tokens_and_no_prompts(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "time,model,input_tokens,input_cached_tokens\n2026-01-01,m,100,64\n2026-01-01,m,50,0\n"
    )
    log, found = read(path)
    assert log.format == "usage"
    assert [(each.usage.prompt_tokens, each.usage.cached_tokens) for each in found] == [
        (100, 64),
        (50, 0),
    ]


def test_records_that_cannot_be_read_are_counted_by_reason_and_line(tmp_path):
    path = tmp_path / "log"
    answer = {"id": "b", "custom_id": "1", "response": {"status_code": 200, "body": ANSWER}}
    text = [
        json.dumps(BODIES[0]),
        "{broken",
        json.dumps({"event": "start"}),
        json.dumps(answer),
        "[1]",
        json.dumps(BODIES[1]),
    ]
    path.write_text("\n".join(text))
    log, found = read(path)
    assert [each.row for each in found] == [1, 6]
    assert sorted(log.unread.first.values()) == [2, 3, 4, 5]
    assert any("no body with model" in each and "line 3" in each for each in log.unread.sentences())


def test_records_of_two_formats_are_an_error_that_names_the_option(tmp_path):
    path = lines(
        tmp_path / "log", [BODIES[0], {"conversations": [{"from": "human", "value": "x"}]}]
    )
    with pytest.raises(
        TraceError, match="conversations and requests; name one of them with --format"
    ):
        open_log(path)
    log, found = read(path, "requests")
    assert (len(found), log.unread.total) == (1, 1)


@pytest.mark.parametrize("text", ["", "\x00\x01", '{"a": 1}\n'])
def test_a_file_that_is_no_log_is_refused(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"is empty|no request log"):
        list(open_log(path))


def test_a_list_that_is_cut_is_refused_at_its_record(tmp_path):
    path = tmp_path / "log"
    path.write_text(json.dumps(BODIES)[:-40])
    with pytest.raises(TraceError, match="record 2"):
        list(open_log(path))
