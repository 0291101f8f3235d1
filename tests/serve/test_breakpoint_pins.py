"""Breakpoints of messages: pins in the budget that a tenant's line of the key file gives it."""

import pytest
from serve_help import running

import plain_http
from quire.errors import ConfigError
from quire.web.keys import ApiKeys, read_keys

BREAK = {"type": "ephemeral", "ttl": "1h"}
LONG = "Keep this in mind, please. " * 8
KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
SIZE = 16


@pytest.fixture
def server():
    keys = ApiKeys([*KEYS.items()], "the-operators", pins={"ann": 320})
    with running(keys=keys, num_blocks=256) as made:
        yield made
        for name in KEYS:  # else pins hold their blocks
            operate(made, "purge", {"tenant": name})
        made.quiet()


def say(server, text, name="ann", turns=(), **given):
    talk = [*turns, {"role": "user", "content": text}]
    asked = {"model": "quire-tiny", "max_tokens": 3, "messages": talk, "cache_control": BREAK}
    answer = server.post("/v1/messages", asked | {"temperature": 0} | given, headers={"x-api-key": KEYS[name]})  # fmt: skip
    assert answer.status_code == 200, answer.text
    if given.get("stream"):
        return None
    usage = answer.json()["usage"]
    told = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["cache_read_input_tokens"], told + usage["cache_read_input_tokens"]


def operate(server, path, document=None):
    headers = {"x-api-key": "the-operators"}
    ask = server.get if document is None else server.post
    return ask(f"/v1/cache/{path}", **({} if document is None else {"document": document}), headers=headers).json()  # fmt: skip


def pinned(server):
    return [each["num_tokens"] for each in operate(server, "pins")["data"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_breakpoint_pins_the_prompt(server, stream):
    asked = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, headers={"x-api-key": "key-of-ann"})  # fmt: skip
    size = asked.json()["input_tokens"] // SIZE * SIZE
    say(server, LONG, stream=stream)
    assert pinned(server) == [size]
    assert operate(server, "evict", {"all": True, "tenant": "ann"})["evicted_blocks"] >= 0
    read, _ = say(server, LONG)
    assert read >= size
    assert pinned(server) == [size]
    assert server.service.retention.num_tokens("ann") > 0


def test_the_pin_of_the_next_turn_replaces_that_of_the_turn_before(server):
    say(server, "a")  # which has no whole block
    assert pinned(server) == []
    _, size = say(server, "Keep this in mind, please.")
    assert pinned(server) == [size // SIZE * SIZE]
    turns = [
        {"role": "user", "content": "Keep this in mind, please."},
        {"role": "assistant", "content": "Yes."},
    ]
    _, more = say(server, "And this, please, as well.", turns=turns)
    assert more // SIZE > size // SIZE
    assert pinned(server) == [more // SIZE * SIZE]


def test_a_tenant_s_pins_are_within_its_budget_and_the_beginning_of_a_long_prompt_is_pinned(server):
    say(server, LONG * 3)
    assert pinned(server) == [320]
    operate(server, "evict", {"all": True, "tenant": "ann"})
    read, size = say(server, LONG * 3)
    assert 320 <= read < size
    say(server, f"Other. {LONG}")  # there is no room beside it
    assert pinned(server) == [320]
    assert operate(server, "purge", {"tenant": "ann"})["pins"] == 1
    assert pinned(server) == []
    say(server, f"Other. {LONG}")
    assert len(pinned(server)) == 1


def test_a_tenant_without_a_budget_has_no_pins_and_no_request_without_a_breakpoint(server):
    say(server, LONG, "bob")
    assert server.service.retention.num_tokens("bob") > 0
    say(server, LONG, cache_control=None)
    chat = {"messages": [{"role": "user", "content": LONG}], "retain_s": 60, "max_tokens": 2}
    server.post("/v1/chat/completions", chat, headers={"x-api-key": "key-of-ann"})
    assert pinned(server) == []


def test_the_operator_s_pins_leave_no_room_and_end_by_number(server):
    prompt = [each % 90 + 5 for each in range(2040)]
    headers = {"x-api-key": "key-of-bob"}
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers=headers)
    made = operate(server, "pin", {"prompt": prompt, "tenant": "bob", "ttl_s": 60})
    assert made["num_tokens"] == 2032  # of 2048, half of the pool
    say(server, LONG)
    assert pinned(server) == [2032]
    url = f"{server.url}/v1/cache/pins/{made['id']}"
    answers = [plain_http.delete(url, headers={"x-api-key": "the-operators"}) for _ in range(2)]  # fmt: skip
    assert [each.status_code for each in answers] == [200, 404]
    say(server, LONG)
    assert len(pinned(server)) == 1


def test_a_line_of_keys_has_options_in_any_order(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann key-of-ann pin=4096 priority=3\nbob key-of-bob pin=0\neve key-of-eve\n")
    keys = read_keys(file, exposed=False)
    assert keys.pins == {"ann": 4096, "bob": 0}
    keys.check_priority("ann", 3)
    for line in ("ann key-of-ann pin=-1", "ann key-of-ann pin=", "ann key-of-ann 4096", "ann"):
        file.write_text(line + "\n")
        with pytest.raises(ConfigError, match="pin=N with N tokens"):
            read_keys(file, exposed=False)
